"""Two schedulers under the same workloads: equal ones do not differ; a planted change is named by kind and place."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tiers import examples

import workbench
from workbench.analysis.hunt.between import compare_schedulers
from workbench.analysis.hunt.between.differ import KINDS, Difference, consequence, difference
from workbench.analysis.hunt.between.place import Decided, Line
from workbench.analysis.hunt.between.search import Apart, Comparison
from workbench.analysis.hunt.between.sides import Asked, place_of
from workbench.analysis.hunt.between.surface import compare
from workbench.apps.cli import main
from workbench.trace import Trace

SCHEDULER = Path(workbench.__file__).parent / "scheduler"


@pytest.fixture(autouse=True)
def time_to_shrink(monkeypatch):
    """A busy machine would shrink less."""
    monkeypatch.setattr("workbench.analysis.hunt.between.search.SHRINK_SECONDS", 90.0)


def changed_file(folder, name, before, after):
    """A file of the scheduler with a change of one line."""
    text = (SCHEDULER / name).read_text()
    assert text.count(before) == 1
    (folder / name).write_text(text.replace(before, after))
    return folder / name, text[: text.index(before)].count("\n") + 1


def test_equal_schedulers_do_not_differ(tmp_path):
    shutil.copytree(SCHEDULER, tmp_path / "workbench" / "scheduler")
    count = examples(200)
    comparison, names = compare_schedulers(
        "workbench", str(tmp_path), seconds=None, workloads=count, out=tmp_path / "out"
    )
    assert (comparison.num_workloads, comparison.num_different, names) == (count, 0, [])
    facts = json.loads((tmp_path / "out" / "between.json").read_text())
    assert facts["kinds"] == {} and facts["surface"]["changed"] == {}


@pytest.mark.parametrize(
    "name, before, after, kinds, function",
    [
        ("block_pool.py", "in reversed(block_table):", "in block_table:", {"block order"}, "BlockPool.free_blocks"),
        ("scheduler.py", "if not batch.preempted:  #", "if True:  #", {"admission"}, "Scheduler.schedule"),
        ("scheduler.py", "num_computed = min(victim", "num_computed = 1 + min(victim", None, ""),  # only tells a reader
        (
            "scheduler.py",
            "return max(cap, self.config.max_num_batched_tokens // num_requests)",
            "return min(cap, self.config.max_num_batched_tokens // num_requests)",
            {"chunk size"},
            "Scheduler._long_prefill_cap",
        ),
        (  # seen where it happens, and not where another block is evicted because of it
            "kv_cache_manager.py",
            "last = min(num_computed, num_known) // self.block_size",
            "last = min(num_computed, num_known) // self.block_size - 1",
            {"prefix hit"},
            "KVCacheManager.cache_full_blocks",
        ),
    ],
)
def test_a_changed_line_is_named(name, before, after, kinds, function, tmp_path):
    file, line = changed_file(tmp_path, name, before, after)
    comparison, _ = compare_schedulers("workbench", str(file), seconds=None, workloads=examples(480))
    if kinds is None:
        assert comparison.found == []
        return
    if kinds == {"prefix hit"}:
        assert {each.difference.kind for each in comparison.found} == kinds
        assert sum((each.leads_to for each in comparison.found), Counter()).total()
    fits = [each for each in comparison.found if each.difference.kind in kinds and each.decided.by_trial]
    assert fits, [each.difference for each in comparison.found]
    for each in fits:
        assert [(found.function, found.number) for found in each.decided.lines_b] == [(function, line)]
        assert each.decided.lines_a[0].text == (SCHEDULER / name).read_text().splitlines()[line - 1].strip()
        assert each.decided.place == f"scheduler/{name} {function}"


def test_the_files_of_a_comparison(tmp_path, capsys):
    file, _ = changed_file(tmp_path, "block_pool.py", "in reversed(block_table):", "in block_table:")
    command = ["hunt", "--between", "workbench", str(file), "--workloads", "100", "--out", str(tmp_path / "out")]
    assert main(command) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["workloads"] == 100 and summary["findings"]
    folder = tmp_path / "out" / summary["findings"][0]
    facts = json.loads((folder / "finding.json").read_text())
    assert facts["kind"] in KINDS and facts["by_trial"] and facts["num_requests"] <= 3
    assert facts["lines_b"][0]["text"] == "for block in block_table:"
    a, b = (Trace.load(folder / f"{side}.jsonl.gz") for side in "ab")
    step = facts["step"]
    tables = [[record.block_tables_by_group for record in trace] for trace in (a, b)]
    assert tables[0][:step] == tables[1][:step] and tables[0][step] != tables[1][step]
    page = (folder / "page.html").read_text()
    assert "for block in reversed(block_table):" in page and f"Step {step}: {facts['kind']}" in page
    assert main(["hunt", "replay", str(folder)]) == 2 and "a difference of two schedulers" in capsys.readouterr().err
    told = (tmp_path / "out" / "between.md").read_text()
    assert f"({folder.name}/report.md)" in told and "for block in block_table:" in told


def test_schedulers_without_a_common_source_tell_what_ran(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    comparison, _ = compare_schedulers("workbench", "planted:generous", seconds=None, workloads=50)
    found = next(each for each in comparison.found if each.difference.kind == "chunk size")
    assert not found.decided.by_trial and len(found.workload["requests"]) == 1


def test_steps_that_are_impossible_have_a_page(tmp_path):
    """A trace of them cannot be loaded: a chunk of no token."""
    before = "plan.longest = self.max_model_len - start - 1"
    file, _ = changed_file(tmp_path, "scheduler.py", before, "plan.longest = -(self.max_model_len - start - 1)")
    _, names = compare_schedulers("workbench", str(file), seconds=None, workloads=60, out=tmp_path / "out")
    assert names and all((tmp_path / "out" / name / "page.html").exists() for name in names)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--between", "workbench", "nonsense"], "'nonsense' is not a scheduler and not a folder or file"),
        (["--between", "workbench", "."], "the folder has no bin/python, no vllm and no workbench/scheduler"),
        (["--between", "workbench", "vllm"], "needs vLLM"),
        (["--between", "workbench", "workbench", "--only", "blocks"], "--only does not go with --between"),
        (["--python", "python3"], "--python is for --between"),
    ],
)
def test_bad_options_are_named(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["hunt", *options, "--workloads", "1", "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_a_file_stands_for_one_of_the_scheduler(tmp_path):
    (tmp_path / "mine.py").write_text("from workbench.scheduler import scheduler\n")
    with pytest.raises(ValueError, match=r"Workbench has no scheduler/mine\.py"):
        place_of(str(tmp_path / "mine.py"))


def step(**changes):
    chunk = {"id": "a", "start": 0, "num_tokens": 4, "num_drafts": 0}
    base = {"chunks": [chunk], "hits": {"a": 0}, "preempted": [], "blocks": {"a": [[1, 2]]}, "finished": {}}
    return {**base, "free_blocks": 3, **changes}


CHUNK = {"id": "a", "start": 0, "num_tokens": 4, "num_drafts": 0}
OTHER = {"id": "b", "start": 4, "num_tokens": 1, "num_drafts": 0}


@pytest.mark.parametrize(
    "kind, config, a, b",
    [
        ("preemption", {}, step(preempted=["b"]), step()),
        ("preemption victim", {}, step(preempted=["b"]), step(preempted=["c"])),
        ("preemption victim", {}, step(preempted=["b", "c"]), step(preempted=["c", "b"])),
        ("admission", {}, step(), step(hits={})),
        ("prefix hit", {}, step(), step(hits={"a": 2})),
        ("running request", {}, step(chunks=[CHUNK, OTHER]), step()),
        ("asynchronous placeholders", {"async_scheduling": True}, step(chunks=[CHUNK, OTHER]), step()),
        ("asynchronous placeholders", {"async_scheduling": True}, step(), step(chunks=[{**CHUNK, "start": 1}])),
        ("order", {}, step(chunks=[CHUNK, OTHER]), step(chunks=[OTHER, CHUNK])),
        # The first one takes the budget of the other, which was to be admitted or continued.
        ("chunk size", {}, step(chunks=[CHUNK, OTHER]), step(chunks=[{**CHUNK, "num_tokens": 5}])),
        (
            "chunk size",
            {"async_scheduling": True},
            step(chunks=[CHUNK, OTHER]),
            step(chunks=[{**CHUNK, "num_tokens": 5}]),
        ),
        ("drafts", {}, step(chunks=[CHUNK, OTHER], hits={"b": 4}), step(chunks=[{**CHUNK, "num_drafts": 1}], hits={})),
        ("admission", {}, step(chunks=[CHUNK, OTHER], hits={"b": 4}), step(hits={})),
        ("drafts", {}, step(), step(chunks=[{**CHUNK, "num_drafts": 1}])),
        ("chunk size", {}, step(), step(chunks=[{**CHUNK, "num_tokens": 3}])),
        ("block order", {}, step(), step(blocks={"a": [[2, 1]]})),
        ("block count", {}, step(), step(blocks={"a": [[1, 2, 3]]})),
        ("window", {"kv_cache_groups": [{"kind": "sliding_window"}]}, step(), step(blocks={"a": [[0, 2]]})),
        ("state", {"kv_cache_groups": [{"kind": "mamba"}]}, step(), step(blocks={"a": [[0, 2]]})),
        ("finish", {}, step(), step(finished={"a": "length"})),
        ("blocks freed", {}, step(), step(free_blocks=4)),
        ("prefix hit", {}, step(cached=[1]), step(cached=[1, 2])),
        ("prefix hit", {"block_size": 2}, step(hits={"a": 2}), step(hits={"a": 2}, blocks={"a": [[3, 2]]})),
        ("block order", {"block_size": 2}, step(hits={"a": 2}), step(hits={"a": 2}, blocks={"a": [[1, 3]]})),
    ],
)
def test_the_kind_of_a_difference(kind, config, a, b):
    runs = [{"steps": [step(), each], "end": "done"} for each in (a, b)]
    found = difference(*runs, config)
    assert found is not None and (found.kind, found.step) == (kind, 1)
    assert difference(runs[0], runs[0], config) is None


@pytest.mark.parametrize("value", ["absent", None])
@pytest.mark.parametrize("name", ["cached", "free_blocks", "blocks", "finished", "preempted", "hits"])
def test_a_field_that_one_side_leaves_out_is_not_compared(name, value):
    """Neither always nor now and then; what both tell still is, in that step and in the next one."""
    full = step(cached=[1, 2], preempted=["b"], finished={"a": "length"})
    less = {key: each for key, each in full.items() if key != name} | ({} if value else {name: None})
    told, silent = ({"steps": [one, other, one], "end": "done"} for one, other in ((full, full), (full, less)))
    for pair in ((told, silent), (silent, told)):
        assert difference(*pair, {}) is None and consequence(*pair, {}) == ""
    longer = {**full, "chunks": [{**CHUNK, "num_tokens": 5}]}
    assert difference(silent, {"steps": [full, longer, full], "end": "done"}, {}).kind == "chunk size"
    later = {"steps": [full, full, step(preempted=["b"], finished={"a": "length"}, cached=[1])], "end": "done"}
    assert (difference(silent, later, {}).kind, difference(silent, later, {}).step) == ("prefix hit", 2)


def test_a_part_of_a_field_that_one_side_leaves_out_is_not_compared():
    def run(*steps):
        return {"steps": steps, "end": "done"}

    few = {key: each for key, each in CHUNK.items() if key != "num_drafts"}
    assert difference(run(step(chunks=[{**CHUNK, "num_drafts": 2}])), run(step(chunks=[few])), {}) is None
    found = difference(run(step(chunks=[few])), run(step(chunks=[{**CHUNK, "num_tokens": 5}])), {})
    assert found.kind == "chunk size"
    assert difference(run(step(blocks={})), run(step()), {}) is None
    found = difference(run(step()), run(step(blocks={"a": [[1, 2], [3]]})), {})  # a group more
    assert (found.kind, found.message) == ("block count", "a has 1 block table in A, 2 in B")
    config = {"kv_cache_groups": [{"kind": "mamba"}]}  # which has no draft model's group
    tables = [step(blocks={"a": [[1, 2], last]}) for last in ([3], [4])]
    assert difference(run(tables[0]), run(tables[1]), config).kind == "block order"


@pytest.mark.parametrize(
    "kind, ends",
    [("refusal", ("done", "refused: no")), ("crash", ("crash: here", "done")), ("progress", ("stuck", "done"))],
)
def test_the_kind_of_an_end(kind, ends):
    found = difference(*({"steps": [step()], "end": end} for end in ends), {})
    assert found is not None and (found.kind, found.step) == (kind, 1)


def test_a_crash_while_an_output_comes_in_is_not_the_end_that_it_prevents():
    ends = {"finished": {"a": "length"}, "free_blocks": 5}
    runs = [{"steps": [step(**ends)], "end": "done"}, {"steps": [step()], "end": "crash: here"}]
    for pair in (runs, runs[::-1]):
        assert difference(*pair, {}).kind == "crash"
    runs[1]["steps"].append(step())
    assert difference(*runs, {}).kind == "finish"  # it crashes later


def test_what_a_difference_of_blocks_alone_leads_to():
    quiet, loud = step(blocks={"a": [[2, 1]]}), step(hits={})
    runs = [{"steps": [step(), step(), step()], "end": "done"}, {"steps": [step(), quiet, loud], "end": "done"}]
    assert difference(*runs, {}).kind == "block order" and consequence(*runs, {}) == "admission"
    runs[1]["steps"] = [step(), quiet, quiet]
    assert consequence(*runs, {}) == ""
    runs[1]["steps"] = [loud, step(finished={"a": "length"}), step()]
    assert consequence(*runs, {}) == ""  # the first difference is not of blocks alone


def test_cases_of_one_place_are_told_as_one():
    """With all that they lead to, and the workload that showed it first."""
    line = Line("scheduler.py", "Scheduler.schedule", 7, "pass")
    one, other = (
        Apart(Difference("block order", 0, ""), {"config": {}, "requests": requests}, Decided([], [line]), *numbers)
        for requests, *numbers in (([{}], 3, 40, 9.0, Counter(admission=2)), ([{}, {}], 2, 8, 1.5, Counter(finish=1)))
    )
    comparison = Comparison.__new__(Comparison)
    comparison.found = [other, one]
    comparison._merge()
    (told,) = comparison.found
    assert told is one and (told.num_seen, told.num_workloads, told.seconds) == (5, 8, 1.5)
    assert told.leads_to == {"admission": 2, "finish": 1}


def test_two_runs_that_wait_forever_may_be_given_up_in_different_steps():
    waits = step(chunks=[], hits={}, blocks={})
    runs = [{"steps": [step(), *[waits] * count], "end": "stuck"} for count in (2, 9)]
    assert difference(*runs, {}) is None
    runs[1]["steps"].append(step())
    assert difference(*runs, {}).kind == "progress"


def test_what_no_run_shows(tmp_path):
    for side, text in (
        (
            "a",
            "class Scheduler(Base):\n    num: int = 0\n    def schedule(self): ...\n    def gone(self): ...\n"
            "def moves(): ...",
        ),
        (
            "b",
            "class Scheduler(Other):\n    num: int = 1\n    def schedule(self, more=False): ...\n"
            "    def new(self): ...",
        ),
    ):
        (tmp_path / side / "v1/core").mkdir(parents=True)
        (tmp_path / side / "v1/core/scheduler.py").write_text(text)
    (tmp_path / "b/v1/core/utils.py").write_text("def moves(): ...")
    found = compare(tmp_path / "a", tmp_path / "b", ["Scheduler.schedule", "Scheduler.update"])
    assert found.removed == {"Scheduler.gone()": "(self)"} and found.added == {"Scheduler.new()": "(self)"}
    assert found.moved == {"moves()": ("v1/core/scheduler.py", "v1/core/utils.py")}
    assert found.changed == {
        "class Scheduler": ("Base", "Other"),
        "Scheduler.num": ("int = 0", "int = 1"),
        "Scheduler.schedule()": ("(self)", "(self, more=False)"),
    }
    assert found.hooks == ["Scheduler.schedule"]


def test_a_side_in_a_step_that_does_not_end_is_closed(tmp_path, monkeypatch):
    (tmp_path / "sleepy.py").write_text(
        "import time\n\nclass Sleepy:\n    features = ()\n    def add(self, request): time.sleep(600)\n\n"
        "def make(config): return Sleepy()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workbench.analysis.hunt.between.sides.CLOSE_SECONDS", 0.1)
    side = Asked(place_of("sleepy:make"), as_vllm=False)
    request = {"id": "r", "prompt": {"len": 1}, "max_tokens": 1}
    side.send({"workload": {"config": {"num_blocks": 20}, "requests": [request]}})
    side.close()
    assert side._process.returncode == -9


def test_a_file_that_is_not_code_does_not_stop_a_comparison(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "template.py").write_text("def (\n")
        (tmp_path / name / "code.py").write_text(f"def {name}(): ...\n")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.removed, found.added) == ({"a()": "()"}, {"b()": "()"})
