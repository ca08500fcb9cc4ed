"""The notebooks as files (nbmake runs them), and the exercises' checkers."""

import bisect
import html
import importlib.util
import re
from functools import partial
from pathlib import Path

import mlx.core as mx
import nbformat
import numpy as np
import pytest

from workbench import Trace, course
from workbench.apps.course.bugs import BUGS, planted
from workbench.apps.course.faults import FAULTS, code_of, hunt_code
from workbench.scheduler.policy import SchedulingPolicy
from workbench.trace.readings.computed_by import KERNELS, kernel_words

NOTEBOOKS = sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb"))
MAX_CODE_CELLS = 13
MAX_CODE_COLUMNS = 106  # at which a page of 1,000 pixels shows the whole line


def code_cells(path):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def test_the_course_is_complete_and_in_order():
    numbers = [path.name[:2] for path in NOTEBOOKS]
    assert numbers == sorted(set(numbers)) and numbers == [f"{number:02d}" for number in range(25)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_is_valid_and_short(self, path):
        notebook = nbformat.read(path, 4)
        nbformat.validate(notebook)
        shown = [cell for cell in code_cells(path) if "check" not in cell.metadata.get("tags", [])]
        shown = [cell for cell in shown if not cell.metadata.get("nbgrader", {}).get("grade")]
        assert 1 <= len(shown) <= MAX_CODE_CELLS
        assert notebook.metadata.kernelspec.name == "python3"
        assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)

    def test_is_committed_without_outputs(self, path):
        for cell in code_cells(path):
            assert cell.outputs == [] and cell.execution_count is None

    def test_shows_nothing_in_an_output_widget(self, path):
        """The client of ``nbconvert --execute`` sends while it waits for a cell's reply then, and may miss it."""
        for cell in code_cells(path):
            assert not re.search(r"\binteract(ive|ive_output|_manual)?\(|\bOutput\(", cell.source)

    def test_asks_asserts_and_says_what_vllm_does(self, path):
        text = "\n".join(cell.source for cell in nbformat.read(path, 4).cells)
        assert text.startswith("# ")
        for part in ("**Question:**", "**Predict:**", "assert ", "**Exercise:**", "**What vLLM does here:**"):
            assert part in text, f"{path.name} has no {part}"

    def test_the_answer_is_followed_by_its_check(self, path):
        """The cells have nbgrader's metadata, and the check is a call."""
        cells = nbformat.read(path, 4).cells
        answer, check = (index for index, cell in enumerate(cells) if cell.metadata.get("nbgrader", {}).get("grade_id"))
        marks = [cells[index].metadata.nbgrader for index in (answer, check)]
        assert check == answer + 1 and "**Exercise:**" in cells[answer - 1].source
        assert [(mark.solution, mark.grade, mark.locked) for mark in marks] == [
            (True, False, False),
            (False, True, True),
        ]
        assert marks[1].grade_id == f"check-{marks[0].grade_id}" and marks[1].points == 1
        assert cells[check].source.startswith("course.check_")

    def test_as_slides_the_question_comes_before_the_picture(self, path):
        """Text begins a slide, the code below it and its picture come with the next key, and checks are left out."""
        for cell in nbformat.read(path, 4).cells:
            kind = cell.metadata.slideshow.slide_type
            if cell.cell_type == "markdown":
                assert kind == "slide"
            elif cell.metadata.get("nbgrader", {}).get("solution"):
                assert kind == "subslide"
            else:
                assert kind == ("skip" if "check" in cell.metadata.get("tags", []) else "fragment")

    def test_checks_are_folded(self, path):
        """Claims are asserted in a folded cell below the one that they are about."""
        import ast

        for cell in code_cells(path):
            is_check, body = "check" in cell.metadata.get("tags", []), ast.parse(cell.source).body
            assert is_check == bool(cell.metadata.get("jupyter", {}).get("source_hidden"))
            assert is_check or not any(isinstance(statement, ast.Assert) for statement in body), cell.source

    def test_predictions_are_revealed_and_hints_come_one_by_one(self, path):
        """The answer to a prediction is behind a fold, and each hint is inside the fold of the one before it."""
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type != "markdown":
                continue
            for question in cell.source.split("**Predict:**")[1:]:
                assert "<details><summary>Reveal</summary>" in question, question
            if "**Exercise:**" in cell.source:
                ladder = re.findall(r"(Hint \d)</summary>|(</details>)", cell.source)
                assert [hint for hint, _ in ladder][:3] == ["Hint 1", "Hint 2", "Hint 3"]
            assert cell.source.count("<details>") == cell.source.count("</details>")

    def test_a_picture_cell_ends_with_what_it_shows(self, path):
        """A cell with the tag "viz" ends with an expression, so that the notebook displays its value."""
        import ast

        for cell in code_cells(path):
            if "viz" in cell.metadata.get("tags", []):
                last = ast.parse(cell.source).body[-1]
                assert isinstance(last, ast.Expr), f"{path.name}: nothing is shown by\n{cell.source}"

    def test_every_picture_is_shown(self, path):
        """A picture in the middle of a cell needs ``display``: only the last expression of a cell is shown."""
        import ast

        for cell in code_cells(path):
            for statement in ast.parse(cell.source).body[:-1]:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                    assert ast.unparse(statement.value.func) not in ("bars", "matrix"), ast.unparse(statement)

    def test_code_fits_the_page(self, path):
        for cell in code_cells(path):
            for line in cell.source.splitlines():
                assert len(line) <= MAX_CODE_COLUMNS, f"{path.name}: {line}"

    def test_imports_workbench_before_mlx(self, path):
        """Otherwise MLX uses its slow BLAS, and a cell takes minutes."""
        source = "\n".join(cell.source for cell in code_cells(path))
        if "mlx" in source:
            assert source.index("from workbench") < source.index("import mlx" if "import mlx" in source else "mlx_lm")


def mask(cu_seqlens_q, seqused_k):
    out = np.zeros((cu_seqlens_q[-1], sum(seqused_k)), dtype=bool)
    column = 0
    for seq, length in enumerate(seqused_k):
        begin, end = cu_seqlens_q[seq : seq + 2]
        for row in range(begin, end):
            out[row, column : column + length - (end - row) + 1] = True
        column += length
    return out


def chunks(num_prompt_tokens, token_budget, num_decodes):
    room = token_budget - num_decodes
    return [(start, min(start + room, num_prompt_tokens)) for start in range(0, num_prompt_tokens, room)]


def victim(running, policy):
    if policy == "fcfs":
        return running[-1][0]
    return max(enumerate(running), key=lambda item: (item[1][1], item[0]))[1][0]


def cached(num_shared, num_prompt_tokens, block_size):
    return min(num_shared, num_prompt_tokens - 1) // block_size * block_size


def token_of(probabilities, number):
    return int(np.searchsorted(np.cumsum(probabilities), number, side="right"))


def tokens_kept(drafts, model_tokens):
    num_right = next((i for i, (a, b) in enumerate(zip(drafts, model_tokens)) if a != b), len(drafts))
    return [*drafts[:num_right], model_tokens[num_right]]


ANSWERS = {
    course.check_tokens_kept: (tokens_kept, lambda drafts, model_tokens: list(drafts)),
    course.check_num_chunks: (
        lambda num_tokens, ends_by_stop_token: num_tokens + ends_by_stop_token,
        lambda num_tokens, ends_by_stop_token: num_tokens,
    ),
    course.check_first_block: (
        lambda num_computed, window, block_size: max(0, num_computed - window + 1) // block_size,
        lambda num_computed, window, block_size: max(0, num_computed - window) // block_size,
    ),
    course.check_token_of: (token_of, lambda probabilities, number: int(np.argmax(probabilities))),
    course.check_mask: (mask, lambda cu_seqlens_q, seqused_k: np.tri(cu_seqlens_q[-1], sum(seqused_k)) > 0),
    course.check_slots: (
        lambda block_table, position, block_size: (
            block_table[position // block_size] * block_size + position % block_size
        ),
        lambda block_table, position, block_size: block_table[0] * block_size + position,
    ),
    course.check_find_seq_idx: (
        lambda cu_seqlens_q, row: bisect.bisect_right(cu_seqlens_q, row) - 1,
        lambda cu_seqlens_q, row: bisect.bisect_left(cu_seqlens_q, row),
    ),
    course.check_chunks: (chunks, lambda num_prompt_tokens, token_budget, num_decodes: [(0, num_prompt_tokens)]),
    course.check_could_differ: (
        lambda logits, error: np.ptp(np.sort(logits)[-2:]) < 2 * error,
        lambda logits, error: np.ptp(np.sort(logits)[-2:]) < error,
    ),
    course.check_prompt_share: (
        lambda chunks, token_budget: sum(n for role, n in chunks if role != "decode") / token_budget,
        lambda chunks, token_budget: sum(n for role, n in chunks) / token_budget,
    ),
    course.check_recomputed: (
        lambda num_tokens, chunk: sum(min(end, num_tokens) for end in range(chunk, num_tokens + chunk, chunk)),
        lambda num_tokens, chunk: num_tokens,
    ),
    course.check_victim: (victim, lambda running, policy: running[-1][0]),
    course.check_cached_tokens: (
        cached,
        lambda num_shared, num_prompt_tokens, block_size: num_shared // block_size * block_size,
    ),
}


@pytest.mark.parametrize("check", ANSWERS, ids=lambda check: check.__name__)
def test_checker(check):
    right, wrong = ANSWERS[check]
    assert check(right), check(right)
    verdict = check(wrong)
    assert not verdict and "expected" in verdict.message
    silent = check(lambda **arguments: None)
    assert not silent and "gives None" in silent.message and "Is there a return?" in silent.message
    other_kind = check(lambda **arguments: object())
    assert not other_kind and "expected" in other_kind.message
    broken = check(lambda **arguments: 1 / 0)
    assert not broken and "ZeroDivisionError" in broken.message


def test_a_wrong_matrix_is_told_its_first_wrong_cell():
    verdict = course.check_mask(ANSWERS[course.check_mask][1])
    assert "gives False in row 0, column 1, expected True" in verdict.message
    verdict = course.check_mask(lambda cu_seqlens_q, seqused_k: np.zeros((2, 2)))
    assert "gives shape (2, 2), expected (5, 5)" in verdict.message


def test_the_number_of_steps_is_not_given_away():
    sizes = {"num_prompt_tokens": 170, "token_budget": 32, "num_ahead": 5}
    assert "27, 31, 31, 31, 31, 19" in course.check_num_steps(6, **sizes).message
    for wrong in (5, 7, None):
        verdict = course.check_num_steps(wrong, **sizes)
        assert not verdict and "room for 27 of its 170 tokens, the second for 31" in verdict.message
        assert "6" not in verdict.message


def standstill():
    sampled = set()

    def condition(record):
        stands = any(rid in sampled and rid not in record.num_kv_computed for rid in record.running)
        sampled.update(chunk.request_id for chunk in record.chunks if chunk.sampled is not None)
        return stands

    return condition


def test_a_condition_for_standing_still():
    assert course.check_standstill(standstill)
    never = course.check_standstill(lambda: lambda record: False)
    assert not never and "holds in steps [], and chat stands still in [5, 6" in never.message
    prefilling = course.check_standstill(lambda: lambda record: any(c.is_partial_prefill for c in record.chunks))
    assert not prefilling and "on a healthy server" in prefilling.message
    assert "raises TypeError" in course.check_standstill(lambda: None).message


def test_a_policy_that_gives_up_the_fewest_computed_tokens():
    class Fewest(SchedulingPolicy):
        def victim(self, view):
            return min(view.victims, key=lambda request: request.num_kv_computed)

    right, default = course.check_fewest_computed(Fewest()), course.check_fewest_computed(SchedulingPolicy())
    assert right and "6 victims" in right.message
    assert not default and "chooses 'c'" in default.message


def test_the_smallest_budget_for_a_recording():
    recording = Trace.load(NOTEBOOKS[0].parent / "data" / "vllm_five_long.jsonl.gz")
    verdicts = {budget: course.check_smallest_budget(budget, recording) for budget in range(199, 206)}
    assert [budget for budget, verdict in verdicts.items() if verdict] == [203]
    hint = max(request.ttft.steps for request in recording.metrics().requests.values())
    assert verdicts[200].message.endswith(f"in the recording {hint}."), "the number that the hints lead to"
    assert "with 203 it does too" in verdicts[204].message
    assert "not a number" in course.check_smallest_budget(None, recording).message


def test_the_league_takes_policies_and_the_checker_knows_lru():
    from workbench.apps.course.arena import check_eviction, league
    from workbench.scheduler.eviction import Eviction, Lfu, Ttl

    found = league({"mine": Lfu(), "lfu": "lfu", "lru": "lru"})
    assert found.hits["mine"] == found.hits["lfu"] > found.hits["lru"]
    assert repr(found).splitlines()[1].split()[:2] == ["belady", "100.0%"]
    assert check_eviction(Lfu) and "and LRU" in check_eviction(Ttl).message

    class Unfinished(Eviction):
        def release(self, block, digest):
            pass

        def remove(self, block, digest):
            pass

        def victim(self):
            return None

    verdict = check_eviction(Unfinished)
    assert not verdict and "it fails" in verdict.message


def test_the_fewest_seats_for_a_recording():
    recording = Trace.load(NOTEBOOKS[0].parent / "data" / "vllm_served.jsonl.gz")
    check = partial(course.check_fewest_seats, recording=recording, ttft_p99=5)
    verdicts = {seats: check(seats) for seats in (1, 9, 10, 11, 32)}
    assert [seats for seats, verdict in verdicts.items() if verdict] == [10]
    assert repr(verdicts[9]).startswith("Not yet: with 9") and "try more" in verdicts[9].message
    assert "with 10 still" in verdicts[11].message and "try fewer" in verdicts[32].message
    assert repr(verdicts[10]).startswith("Right: with 10")
    assert all("not a number" in check(wrong).message for wrong in (None, 0, "10", 10.0))
    assert check(1, ttft_p99=1000), "one seat is enough for a target that everything meets"


def test_a_random_model_is_that_of_its_seed():
    from workbench.apps.course.random_models import random_model

    fields = {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 3}
    tokens = mx.array([[5, 200, 9, 31, 7, 77]])
    same, again, other = (random_model("gemma3_text", seed=seed, **fields) for seed in (1, 1, 2))
    logits = [np.array(loaded.model(tokens)) for loaded in (same, again, other)]
    assert (logits[0] == logits[1]).all() and np.abs(logits[0] - logits[2]).max() > 0.1
    assert "random gemma3_text" in repr(same) and same.vocab_size == logits[0].shape[-1]
    with pytest.raises(ValueError, match=r"architecture must be a module of mlx_lm.models.*got 'nonsense'"):
        random_model("nonsense")


def test_a_search_that_reads_everything_is_told_so():
    verdict = course.check_find_seq_idx(lambda cu_seqlens_q, row: sum(start <= row for start in cu_seqlens_q) - 1)
    assert not verdict and "1025 of 1,025" in verdict.message


def test_knobs_are_judged_by_their_bounds():
    workload = {
        "config": {"max_num_batched_tokens": 64},
        "requests": [{"id": "long", "prompt": {"len": 320}}, {"id": "short", "prompt": {"len": 8}}],
    }
    assert not course.check_knobs(workload, {}, short_ttft=2, long_ttft=10)
    assert course.check_knobs(workload, {"max_num_partial_prefills": 2}, short_ttft=2, long_ttft=10)
    assert "nonsense" in course.check_knobs(workload, {"nonsense": 1}, short_ttft=2, long_ttft=10).message


@pytest.mark.repeats(step=12)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_hunt_is_found_and_its_repair_is_right(name):
    fault, code = FAULTS[name], code_of(name)
    case = hunt_code(name)
    assert case is not None and len(case.workload["requests"]) <= 3 and case.num_workloads < 100
    assert case.broken.message in case.story and case.trace[-1].step >= case.broken.step - 1
    if name in "AF":
        assert not course.check_repair(name, code)
        assert course.check_repair(name, code.replace(fault.wrong, fault.right))


def test_a_repair_that_is_no_function_is_not_right():
    assert "line 1" in course.check_repair("A", "def preempt(:").message
    assert "must define preempt()" in course.check_repair("A", "preempt = 1").message


def test_a_planted_bug_is_gone_afterwards():
    from workbench.engine import sampler, step
    from workbench.scheduler.queues import ServiceOrder
    from workbench.scheduler.scheduler import Scheduler

    def state():
        return step.prepare_unified, sampler.keyed_uniform, Scheduler._advance, ServiceOrder.running_order

    healthy = state()
    for name in BUGS:
        with planted(name):
            assert state() != healthy
        assert state() == healthy
    with pytest.raises(ValueError, match="bug must be one of A, B, C, D, got 'E'"), planted("E"):
        pass


def test_pictures_escape_their_texts_and_refuse_what_cannot_be_drawn():
    picture = course.bars({"<b>": 1.0}, "a & b")
    assert "<b>" not in picture._repr_html_() and "a &amp; b" in picture._repr_html_()
    assert 'class="prefill"' in course.matrix(np.eye(3), "identity").svg
    words = ["<s>", " is", "\n", "extraordinarily"]
    labelled = course.matrix(np.tri(4), "words", row_labels=words, column_labels=words).svg
    assert labelled.count("&lt;s&gt;") == labelled.count(">is<") == labelled.count(">\\n<") == 2
    assert labelled.count(">extraordinari…<") == 2 and labelled.count("rotate(-90)") == 4
    for size, has_lines in ((4, True), (100, True), (180, False)):
        drawn = course.matrix(np.eye(size), "lines").svg
        filled = re.findall(
            r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" class="prefill"', drawn
        )
        assert len(filled) == size
        (path,) = re.findall(r'<path d="([^"]+)" class="slack"', drawn) or [""]
        across, down = (re.findall(rf"M[\d.]+ [\d.]+{letter}", path) for letter in "hv")
        assert len(across) == len(down) == (size - 1 if has_lines else 0), "lines in both directions, or none"
    narrow = course.matrix(np.eye(160), "many", column_labels=["w"] * 160).svg
    assert 0 < narrow.count(">w<") < 80
    with pytest.raises(ValueError, match="2 dimensions"):
        course.matrix(np.zeros(3), "a line")


def executed(source, *outputs, tags=(), **marks):
    """A notebook with one code cell and these outputs; ``marks`` are nbgrader's."""
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": list(tags), "nbgrader": marks}, outputs=list(outputs))
    return nbformat.v4.new_notebook(cells=[cell])


def result(**data):
    return nbformat.v4.new_output("execute_result", {f"text/{kind}": text for kind, text in data.items()})


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


PICTURE = result(plain="Picture", html="<svg><rect/></svg>")
REFUSAL = nbformat.v4.new_output("error", ename="ValueError", evalue="too small", traceback=[])


class TestLookingAtOutputs:
    """`complaints` of notebooks/conftest.py checks every notebook after its run."""

    @pytest.fixture
    def complaints(self):
        path = NOTEBOOKS[0].parent / "conftest.py"
        spec = importlib.util.spec_from_file_location("notebooks_conftest", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.complaints

    @pytest.mark.parametrize(
        ("notebook", "complaint"),
        [
            (executed("step"), "shows nothing"),
            (executed("step", PICTURE, stream("careful", "stderr")), "writes to stderr: careful"),
            (executed("print(x)", stream("{'a': np.float64(0.5)}")), "prints 'np.float64('"),
            (executed("x", result(plain="<workbench.Thing object at 0x7f>")), "prints '<workbench.Thing object at 0x'"),
            (executed("bars(x)", result(plain="Picture"), tags=["viz"]), "shows no picture"),
            (executed("bars(x)", result(html="<svg></svg>"), tags=["viz"]), "shows no picture"),
            (executed("add(x)", stream("done"), tags=["raises-exception"]), "should end with a ValueError"),
            (executed("check_mask(mask)", result(html="<b>Right</b>"), grade=True), "committed solved"),
        ],
    )
    def test_a_fault_is_named(self, complaints, notebook, complaint):
        found = complaints(notebook)
        assert len(found) == 1 and found[0].startswith("cell 0: ") and complaint in found[0]

    def test_nothing_to_complain_about(self, complaints):
        view = nbformat.v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}})
        for notebook in (
            executed("bars(x)", stream("40 steps\n"), PICTURE, tags=["viz"]),
            executed("engine.watch()", view, tags=["viz"]),
            executed("assert x == y", tags=["check"]),
            executed("add(x)", REFUSAL, tags=["raises-exception"]),
            executed("simulate(x)\nprint(1)", stream("logged", "stderr"), stream("1"), tags=["warns"]),
            executed("check_mask(mask)", result(plain="Not yet", html="<b>Not yet</b>"), grade=True),
            executed("def mask(): ...", solution=True),
        ):
            assert complaints(notebook) == []

    @pytest.mark.parametrize("forward", ["", "layer by layer"])
    @pytest.mark.parametrize("backend", KERNELS)
    def test_every_kernel_says_what_an_engine_runs_on(self, complaints, backend, forward):
        """A notebook is right on a machine whose Metal kernel gave way, too."""
        words = f"computed with {kernel_words(backend, forward)}"
        for data in ({"plain": words}, {"plain": f'a "{words}"'}, {"plain": "step", "html": html.escape(words)}):
            assert complaints(executed("engine = Engine(model)\nstep", result(**data))) == []
        assert complaints(executed("engine = Engine(model)\nstep", result(plain="a step")))
