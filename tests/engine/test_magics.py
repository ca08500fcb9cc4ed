"""The magics of ``%load_ext workbench``, and the completions that importing the package brings."""

import pytest

from workbench import Engine, EngineConfig, load_model, simulate
from workbench.base.ipython import complete_in, members_after, texts_for
from workbench.config import EVICTIONS, field_names

WORKLOAD = {"requests": [{"id": "first", "prompt": {"len": 9}, "max_tokens": 3}]}
ONE_SEAT = {"max_num_seqs": 1}


@pytest.fixture
def shell(monkeypatch):
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("WORKBENCH_HEADLESS", "1")
    shell = InteractiveShell(colors="nocolor")
    yield shell
    shell.history_manager.end_session()


@pytest.fixture
def run(shell, capsys):
    """A function that runs a cell, and gives its result and what it printed."""

    def run(cell):
        capsys.readouterr()
        result = shell.run_cell(cell).result
        return result, "".join(capsys.readouterr())

    run("%load_ext workbench")
    return run


@pytest.fixture
def engine(tiny_llama, shell):
    with Engine(tiny_llama, max_num_batched_tokens=4, block_size=4, num_blocks=64) as engine:
        shell.user_ns["engine"] = engine
        yield engine


def test_step_takes_steps_and_shows_the_last(run, engine, caplog):
    engine.add_request(list(range(5, 14)), max_tokens=3)
    record, _ = run("%step")
    assert record is engine.trace[0] and len(engine.trace) == 1
    record, _ = run("%step 2")
    assert record is engine.trace[2]
    record, _ = run("%step 99")
    assert record is engine.trace[-1] and engine.state == "idle"
    assert run("%step")[0] is None and "nothing to do" in caplog.text
    assert "count must be 1 or more, got 0" in run("%step 0")[1]
    with pytest.raises(KeyError, match="no request 'x'; it has r0"):
        engine.outputs["x"]


def test_explain_and_watch_take_the_notebooks_engine_before_its_traces(run, engine, shell):
    shell.user_ns["recorded"] = simulate(WORKLOAD)
    engine.generate([[5, 6, 7]], max_tokens=2)
    found, _ = run("%explain r0")
    assert found.request_id == "r0"
    found, _ = run("%explain -e recorded fir")
    assert found.request_id == "first"
    view, _ = run("%watch chunks kv_pool --height 300")
    assert view.options["panels"] == ["gantt", "pool"] and view.options["height"] == 300
    assert view._feed.controller is engine
    view, _ = run("%watch -e recorded")
    assert view._feed.trace is shell.user_ns["recorded"]


def test_ask_prints_the_answer_and_gives_its_steps(run, engine, shell, monkeypatch):
    asked = []
    monkeypatch.setattr(engine, "ask", lambda question, **options: asked.append((question, options)), raising=False)
    run("%%ask -n 7\nWhat is it?\nAnd why?\n")
    assert asked == [("What is it?\nAnd why?", {"max_tokens": 7})]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%step", "no variable that holds an engine"),
        ("%step -e nothing", "-e nothing"),
        ("%step many", "many"),
        ("%explain", "request"),
        ("%watch", "no variable that holds an engine or a trace"),
    ],
)
def test_a_magic_that_cannot_work_says_why_in_one_line(run, cell, words):
    _, said = run(cell)
    assert said.count("\n") == 1 and said.startswith("UsageError") and words in said


def test_one_of_several_engines_is_chosen_by_name_and_a_closed_one_does_not_count(run, engine, shell, tiny_llama):
    with Engine(tiny_llama, num_blocks=64) as other:
        shell.user_ns["other"] = other
        _, said = run("%step")
        assert "-e NAME: engine, other" in said
        other.add_request([5, 6], max_tokens=1)
        record, _ = run("%step -e other")
        assert record is other.trace[0]
    assert other.closed and not engine.closed
    engine.add_request([5, 6], max_tokens=1)
    record, _ = run("%step")
    assert record is engine.trace[0]


def test_an_error_in_a_magic_names_the_cell(run, engine, shell):
    from workbench.base.short_traceback import shorten_in

    shorten_in(shell)
    _, said = run("%watch chonks")
    assert len(said.strip().splitlines()) == 3 and "unknown 'chonks'" in said and "%tb" in said
    assert "line 1 of this cell: %watch chonks\n" in said


@pytest.mark.filterwarnings("ignore:`Completer.complete`")  # the call that a front end makes
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("%explain ", ["asked"]),
        ("%explain -e recorded f", ["first"]),
        ("%explain -e rec", ["recorded"]),
        ("%watch kv_", ["kv_pool"]),
        ("%watch --height 300 chunks kv_", ["kv_pool"]),
        ("%step -e eng", ["engine"]),
        ("%step -e rec", []),
        ("%%ask -e ", ["engine"]),
        ("%watch chunks --h", ["--height"]),
        ("%step -", ["--engine", "-e"]),
        ("%%ask --max", ["--max-tokens"]),
    ],
)
def test_arguments_of_a_magic_are_completed(run, engine, shell, text, found):
    engine.add_request([5, 6], request_id="asked", max_tokens=1)
    engine.step()
    shell.user_ns["recorded"] = simulate(WORKLOAD)
    _, matches = shell.complete(text.split(" ")[-1], text, len(text))
    assert sorted(matches) == found or (not found and "recorded" not in matches)


@pytest.mark.parametrize("jedi", [True, False])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trace.fork(max_num_b", "max_num_batched_tokens="),
        ("trace.fork(2, max_num_s", "max_num_seqs="),
        ("trace.whatif(block_s", "block_size="),
        ("engine.fork(block_s", "block_size="),
        ("engine.add_request('x', temp", "temperature="),
        ("engine.generate(['x'], max_t", "max_tokens="),
        ("engine.ask('x', top_", "top_p="),
        ("Engine('smollm2', watermar", "watermark="),
        ("simulate({}, block_s", "block_size="),
        ("simulate({}, config={'block_s", "block_size"),
        ('simulate({}, config={"seed": 1, "block_s', "block_size"),
        ("simulate({}, config=dict(seed=1, block_s", "block_size="),
        ("config.replace(block_s", "block_size="),
    ],
)
def test_fields_are_completed(shell, engine, jedi, text, found):
    from IPython.core.completer import provisionalcompleter

    shell.user_ns |= {"trace": simulate(WORKLOAD), "simulate": simulate, "Engine": Engine, "config": engine.config}
    shell.Completer.use_jedi = jedi
    complete_in(shell, field_names)
    complete_in(shell, field_names)
    with provisionalcompleter():
        texts = [completion.text for completion in shell.Completer.completions(text, len(text))]
    assert texts.count(found) == 1


@pytest.mark.parametrize("jedi", [True, False])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trace.metrics().", "summary"),
        ("trace.metrics().su", "summary"),
        ("trace.metrics().summary.hit", "hit_rate"),
        ("trace.fork(max_num_seqs=2).met", "metrics"),
        ("trace[0].not_sch", "not_scheduled"),
        ("trace[-1].chunks[0].limi", "limited_by"),
        ("trace.explain('a').pa", "parts"),
        ("engine.step().not_sch", "not_scheduled"),
        ("simulate({}).sa", "save"),
    ],
)
def test_members_of_a_result_are_completed_and_nothing_is_called(shell, engine, jedi, text, found):
    from IPython.core.completer import provisionalcompleter, rectify_completions

    shell.user_ns |= {"trace": simulate(WORKLOAD), "simulate": simulate, "engine": engine}
    shell.Completer.use_jedi = jedi
    complete_in(shell, field_names)
    steps = len(engine.trace)
    with provisionalcompleter():
        completions = list(rectify_completions(text, shell.Completer.completions(text, len(text))))
    results = [text[: each.start] + each.text for each in completions]
    begin = text[: text.rindex(".") + 1]
    assert results.count(f"{begin}{found}") == 1, results[:9]
    assert not any(result.startswith(f"{begin}_") for result in results)
    assert len(engine.trace) == steps


@pytest.mark.parametrize("jedi", [True, False])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trace.explain('", {"first", "second"}),
        ('trace.explain("s', {"second"}),
        ("trace.explain(request_id='f", {"first"}),
        ("trace.to_link(step=1, request_id='f", {"first"}),
        ("engine.output('", {"asked"}),
        ("engine.trace.explain('a", {"asked"}),
        ("trace.view('kv_", {"kv_pool"}),
        ("trace.watch(panels=['chunks', 'kv_", {"kv_pool"}),
        ("trace.watch(theme='d", {"dark"}),
        ("trace.slowest(5, by='t", {"ttft"}),
        ("trace.fork(max_num_seqs=2, policy='", {"fcfs", "priority"}),
        ("EngineConfig(policy='", {"fcfs", "priority"}),
        ("Engine('smollm2', policy='f", {"fcfs"}),
        ("Engine(device='", {"auto", "cpu"}),
        ('engine.outputs["', {"asked"}),
        ('trace.requests["f', {"first"}),
        ('step.block_tables["', {"first"}),
        ("step.block_tables_by_group['f", {"first"}),
        ('step.num_kv_computed["f', {"first"}),
        ('step.not_scheduled["', {"second"}),
    ],
)
def test_texts_of_an_argument_are_completed(shell, engine, jedi, text, found):
    from IPython.core.completer import provisionalcompleter, rectify_completions

    trace = simulate({"requests": [*WORKLOAD["requests"], {"id": "second", "prompt": {"len": 3}}]})
    engine.add_request([5, 6], request_id="asked", max_tokens=1)
    engine.step()
    step = simulate({"requests": [{"id": n, "prompt": {"len": 3}} for n in ("first", "second")]}, config=ONE_SEAT)[0]
    shell.user_ns |= {"trace": trace, "step": step, "engine": engine, "Engine": Engine, "EngineConfig": EngineConfig}
    shell.Completer.use_jedi = jedi
    complete_in(shell, field_names)
    with provisionalcompleter():
        completions = list(rectify_completions(text, shell.Completer.completions(text, len(text))))
    assert not [each.text for each in completions if "=" in each.text or "%" in each.text]
    begin = max(text.rfind("'"), text.rfind('"')) + 1
    assert {(text[: each.start] + each.text)[begin:] for each in completions} >= found
    assert not {(text[: each.start] + each.text)[begin:] for each in completions} & ({"first", "second"} - found)


@pytest.mark.parametrize("jedi", [True, False])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Engine('", ["models/", "smollm2", "tiny.gguf"]),
        ('Engine("sm', ["smollm2"]),
        ("Engine('smollm2', draft_model='t", ["tiny.gguf"]),
        ("Engine(model='models/", ["models/llama/", "models/small.gguf"]),
        ("load_model('", ["models/", "smollm2", "tiny.gguf"]),
    ],
)
def test_only_models_are_completed_where_one_is_named(shell, jedi, text, found, tmp_path, monkeypatch):
    from IPython.core.completer import provisionalcompleter, rectify_completions

    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    for name in ("tiny.gguf", "models/small.gguf", "notes.txt", ".hidden.gguf"):
        (tmp_path / name).touch()
    shell.user_ns |= {"Engine": Engine, "load_model": load_model}
    shell.Completer.use_jedi = jedi
    complete_in(shell, field_names)
    with provisionalcompleter():
        completions = list(rectify_completions(text, shell.Completer.completions(text, len(text))))
    begin = max(text.rfind("'"), text.rfind('"')) + 1
    assert sorted((text[: each.start] + each.text)[begin:] for each in completions) == found


@pytest.mark.parametrize("text", ["Engine('", "engine.view(panels=['", "trace.view(step=1, theme=1, x='"])
def test_no_field_is_offered_inside_a_text(shell, engine, text):
    from IPython.core.completer import provisionalcompleter

    shell.user_ns |= {"trace": simulate(WORKLOAD), "Engine": Engine}
    complete_in(shell, field_names)
    with provisionalcompleter():
        texts = [completion.text for completion in shell.Completer.completions(text, len(text))]
    assert not [text for text in texts if text.endswith("=")]


def test_the_words_of_a_field_are_completed_and_a_config_has_no_sampling_fields(shell):
    from IPython.core.completer import provisionalcompleter

    shell.user_ns |= {"trace": simulate(WORKLOAD), "EngineConfig": EngineConfig, "simulate": simulate}
    complete_in(shell, field_names)

    def found(text):
        with provisionalcompleter():
            return {completion.text for completion in shell.Completer.completions(text, len(text))}

    for text in ('EngineConfig(eviction="', 'trace.whatif(eviction="', 'trace.fork(2, eviction="'):
        assert found(text) == set(EVICTIONS), text
    assert texts_for(EngineConfig, "", "no_field") == []
    fields = found('simulate({}, config={"max_')
    assert "max_model_len" in fields and "max_tokens" not in fields


def test_objects_of_others_are_not_asked_for_texts():
    class Other:
        def explain(self, request_id: str) -> None:
            raise AssertionError

    trace = simulate(WORKLOAD)
    assert "ttft_p99=" in texts_for(trace, "tune") and "itl_mean=" in texts_for(trace, "tune", "slo")
    assert texts_for(trace, "tune", None, "ttft_p99=1s,e2e_m") == ["ttft_p99=1s,e2e_mean=", "ttft_p99=1s,e2e_max="]
    assert texts_for(Other(), "explain") == [] and texts_for(None, "explain") == []
    assert texts_for(simulate(WORKLOAD), "_no_such") == [] and texts_for(simulate(WORKLOAD), "no_such") == []


def test_other_functions_complete_as_before(shell):
    from IPython.core.completer import provisionalcompleter

    shell.user_ns["other"] = lambda mine=1, seed=2: None
    complete_in(shell, field_names)
    with provisionalcompleter():
        texts = [completion.text for completion in shell.Completer.completions("other(", 6)]
    assert texts.count("mine=") == 1 and texts.count("seed=") == 1 and "block_size=" not in texts


# -- %%metal -------------------------------------------------------------------------------------------------------


@pytest.fixture
def metal(run, shell):
    """A function that runs a ``%%metal`` cell over the variable x."""
    import mlx.core as mx

    from workbench.kernels.msl import why_unavailable

    if reason := why_unavailable():
        pytest.skip(reason)
    shell.user_ns["x"] = mx.arange(64).astype(mx.float32)
    launch = "%%metal y=float32[64] --inputs x --grid 64 --threadgroup 32"
    return lambda body, options="": run(f"{launch} {options}\nuint i = thread_position_in_grid.x;\n{body}")


def test_a_kernel_runs_in_a_cell_and_gives_variables(metal, shell):
    found, _ = metal("y[i] = 2 * x[i];")
    assert shell.user_ns["y"].tolist() == [2.0 * i for i in range(64)]
    assert "no fault" in repr(found) and found.run.number("bytes read", "x") == 128
    assert "lines per access" in found._repr_html_() and found.on_gpu == {}
    found, _ = metal("float m = x[i];\ny[i] = m;", "--record 2 --watch m")
    assert len(found.run.threadgroups) == 2 and "m" in found.run.names


def test_a_fault_in_a_cell_has_its_line_and_carets(metal, shell):
    shell.user_ns.pop("y", None)
    found, _ = metal("y[i] = 2 * x[i + 1];")
    assert found.outputs == {} and "y" not in shell.user_ns
    *_, quoted, carets = repr(found).splitlines()
    assert quoted == "  at cell:3: y[i] = 2 * x[i + 1];"
    assert carets == " " * len("  at cell:3: ") + "^" + "~" * (len("y[i] = 2 * x[i + 1];") - 1)


def test_errors_of_the_compiler_are_at_the_lines_of_the_cell(metal):
    _, said = metal("\nconst float a = 1.0f;\ny[i] = z[i] + a;")
    assert "cell:5: use of undeclared identifier 'z'" in said and "^~~~" in said


def test_what_a_cell_lacks_is_named(run, metal):
    _, said = run("%%metal y=float32[64] --inputs q --grid 64 --threadgroup 32\ny[0] = 1;")
    assert "the notebook has no variable q" in said
    _, said = run("%%metal y=float32 --grid 64 --threadgroup 32\ny[0] = 1;")
    assert "--outputs y is 'float32': write DTYPE[SHAPE]" in said


def test_a_gpu_runs_the_same_cell(metal, monkeypatch):
    """MLX's GPU is stood for: its result is compared, and WATCH means nothing there."""
    import mlx.core as mx

    from workbench.kernels.msl import metal_kernel

    made = []

    def on_gpu(**kernel):
        made.append(kernel)
        launch = metal_kernel(**kernel | {"name": "gpu"})
        return lambda **arguments: [output + 0.5 for output in launch(**arguments)]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", on_gpu)
    found, _ = metal("y[i] = 2 * x[i];")
    assert found.differences == {"y": 0.5} and "y on the GPU differs by at most 5.0e-01" in repr(found)
    assert made[0]["header"] == "#define WATCH(x)\n"


def test_a_completion_asks_an_object_nothing():
    """An object of the user's may do anything when one of its attributes is read."""

    class Lively:
        def __getattr__(self, name):
            raise RuntimeError(f"asked for {name}")

    assert members_after(Lively(), ".run()") == set()
