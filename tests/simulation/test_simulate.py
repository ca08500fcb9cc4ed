"""simulate(): the workload format, malformed workloads, and the end of a simulation."""

import json
import subprocess
import sys

import pytest
from trace_checks import said

from workbench import EngineConfig, SamplingParams, simulate
from workbench.simulation.arrivals import Arrival
from workbench.simulation.limits import MAX_PROMPT_TOKENS
from workbench.simulation.simulate import simulate_requests
from workbench.simulation.workload import made_up_token, read_workload


def one(**fields):
    return {"requests": [{"id": "a", "prompt": {"len": 5}, **fields}]}


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({}, "requests must be a list, got None"),
        ({"requests": {}}, "requests must be a list"),
        (
            {"requests": [], "model": "x"},
            "workload has an unknown field 'model'; the fields are config, requests, generate, cost_model",
        ),
        ({"request": []}, r"unknown field 'request' \(did you mean requests\?\)"),
        ({"requests": [], "config": [1]}, "config must be an object"),
        ({"requests": [], "config": {"max_seqs": 1}}, "unknown EngineConfig field 'max_seqs'"),
        ({"requests": [], "config": {"num_blocks": 0}}, "num_blocks must be from 2"),
        ({"requests": [5]}, r"requests\[0\] must be an object, got 5"),
        ({"requests": [{"prompt": [1]}]}, r"requests\[0\].id must be a string that is not empty, got None"),
        ({"requests": [{"id": 3, "prompt": [1]}]}, r"requests\[0\].id must be a string"),
        ({"requests": [{"id": "a", "prompt": [1]}] * 2}, r"requests\[1\].id 'a' is already the id of requests\[0\]"),
        (one(arrival=3), r"requests\[0\] has an unknown field 'arrival'"),
        (one(max_tokens=0), r"requests\[0\].max_tokens must be from 1 to .*, got 0"),
        (one(max_tokens=True), r"requests\[0\].max_tokens must be an integer"),
        (one(arrival_step=-1), r"requests\[0\].arrival_step must be from 0 to .*, got -1"),
        (one(abort_step="3"), r"requests\[0\].abort_step must be an integer from 0"),
        (one(priority=0.5), r"requests\[0\].priority must be an integer"),
        (one(prompt=None), r"requests\[0\].prompt must be a list of token ids, {len, seed} or {parts}, got None"),
        (one(prompt="text"), r"requests\[0\].prompt must be a list of token ids"),
        (one(prompt=[]), r"requests\[0\].prompt is empty: give at least one token"),
        (one(prompt=[1, -2]), r"requests\[0\].prompt\[1\] must be a token id from 0 to .*, got -2"),
        (one(prompt={}), r"requests\[0\].prompt.len is missing"),
        (one(prompt={"len": 0}), r"requests\[0\].prompt.len must be from 1 to .*, got 0"),
        (
            one(prompt={"len": 10**12}),
            rf"prompt.len must be from 1 to {MAX_PROMPT_TOKENS}, got 1000000000000",
        ),
        (one(prompt={"len": 3, "text": "x"}), r"requests\[0\].prompt has an unknown field 'text'"),
        (one(prompt={"parts": 3}), r"requests\[0\].prompt.parts must be a list of prompts, got 3"),
        (one(prompt={"parts": []}), r"requests\[0\].prompt is empty"),
        (one(prompt={"parts": [{"len": 2}, {"len": "x"}]}), r"requests\[0\].prompt.parts\[1\].len must be an integer"),
    ],
)
def test_malformed_workloads(workload, message):
    with pytest.raises(ValueError, match=message):
        simulate(workload)


def test_malformed_files(tmp_path):
    path = tmp_path / "workload.json"
    path.write_text('{"requests": [')
    with pytest.raises(ValueError, match=r"workload.json is not a JSON file: .* line 1 column 15"):
        simulate(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"workload.json must hold an object with config and requests, got a list"):
        simulate(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"workload.json is not a JSON file"):
        simulate(path)
    with pytest.raises(FileNotFoundError):
        simulate(tmp_path / "missing.json")


def test_a_file_and_a_dict_are_the_same(tmp_path):
    workload = one(max_tokens=3)
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(workload))
    assert list(simulate(path)) == list(simulate(workload))


def test_prompts_of_every_form():
    prompt = {"parts": [{"len": 2, "seed": "S"}, [7, 8], {"parts": [{"len": 1}]}]}
    _, (arrival,) = read_workload(one(prompt=prompt))
    assert list(arrival.prompt_token_ids) == [
        made_up_token("pS:0"),
        made_up_token("pS:1"),
        7,
        8,
        made_up_token("pa:0"),
    ]


def test_null_stands_for_the_default():
    fields = {"config": {"num_blocks": None}, **one(max_tokens=None, priority=None, arrival_step=None, abort_step=None)}
    config, (arrival,) = read_workload(fields)
    assert config == EngineConfig()
    assert (arrival.sampling.max_tokens, arrival.priority, arrival.arrival_step, arrival.abort_step) == (16, 0, 0, None)


def test_sampled_tokens_depend_on_request_and_position_alone():
    workload = one(max_tokens=4)
    for config in (None, {"max_num_batched_tokens": 2}):
        trace = simulate(workload, config=config)
        sampled = [chunk.sampled for step in trace for chunk in step.chunks if chunk.sampled is not None]
        assert sampled == [made_up_token(f"a:{position}") for position in range(5, 9)]


def test_a_configuration_replaces_or_changes_that_of_the_workload():
    workload = {"config": {"max_num_batched_tokens": 2, "num_blocks": 40}, **one()}
    assert simulate(workload).config["max_num_batched_tokens"] == 2
    changed = simulate(workload, config={"max_num_batched_tokens": 3}).config
    assert (changed["max_num_batched_tokens"], changed["num_blocks"]) == (3, 40)
    replaced = simulate(workload, config=EngineConfig(max_num_batched_tokens=3)).config
    assert replaced["num_blocks"] == EngineConfig().num_blocks


def test_ends():
    assert simulate({"requests": []}).end == "done"
    assert len(simulate({"requests": []})) == 0
    done = simulate(one(max_tokens=3))
    assert (done.end, len(done)) == ("done", 3)
    cut = simulate(one(max_tokens=30), max_steps=5)
    assert (cut.end, len(cut)) == ("max_steps", 5)
    too_large = {"config": {"num_blocks": 2, "block_size": 4}, **one()}
    with pytest.raises(
        ValueError, match=r"num_blocks=2 is too small for request 'a': 5 prompt tokens.*raise num_blocks"
    ):
        simulate(too_large)
    stuck = simulate(too_large, as_vllm=True)
    assert (stuck.end, len(stuck)) == ("stuck", 4)
    assert said(stuck[-1]) == {"a": "no free KV blocks: needs 2 more for 5 tokens, 1 free"}
    with pytest.raises(ValueError, match="max_steps must be >= 1, got 0"):
        simulate(one(), max_steps=0)


def test_waiting_for_an_arrival_or_an_abort_is_not_being_stuck():
    late = simulate(one(arrival_step=20, max_tokens=1))
    assert (late.end, len(late)) == ("done", 21)
    workload = {
        "config": {"num_blocks": 3, "block_size": 4},
        "requests": [
            {"id": "too big", "prompt": {"len": 9}, "abort_step": 9},
            {"id": "small", "prompt": {"len": 3}, "max_tokens": 1},
        ],
    }
    trace = simulate(workload)
    assert trace.end == "done"
    assert trace[9].aborted == ("too big",) and trace[9].finished == ("small",)


def test_time_passes_behind_a_request_that_can_never_run():
    trace = simulate(
        {
            "config": {"num_blocks": 4, "block_size": 4},
            "cost_model": {"fixed": 0.01},
            "requests": [
                {"id": "too large", "prompt": {"len": 100}, "arrival_time": 0.0},
                {"id": "later", "prompt": {"len": 4}, "arrival_time": 50.0},
            ],
        },
        as_vllm=True,
    )
    assert trace.end == "stuck" and len(trace) < 20
    assert trace[-1].waiting == ("too large", "later") and trace[-1].time >= 50


def test_an_abort_before_the_arrival_or_after_the_end():
    ended = simulate(one(max_tokens=1, abort_step=5))
    assert (ended.end, len(ended)) == ("done", 1)
    early = simulate(one(arrival_step=3, abort_step=1))
    assert early[3].arrived == early[3].aborted == ("a",) and early.end == "done"


def test_the_trace_describes_the_requests():
    trace = simulate(one(max_tokens=2, arrival_step=1, priority=4))
    info = trace.requests["a"]
    assert (info.num_prompt_tokens, info.max_tokens, info.arrival_step, info.priority) == (5, 2, 1, 4)
    assert info.prompt_token_ids == tuple(made_up_token(f"pa:{i}") for i in range(5))
    assert trace.meta.source == "simulation" and "workbench" in trace.meta.versions
    assert all(step.timings == {} and step.kernel is None and step.time == 0.0 for step in trace)


def test_a_simulation_can_be_saved_and_loaded(tmp_path):
    trace = simulate(one(max_tokens=3))
    trace.save(tmp_path / "t.jsonl")
    loaded = type(trace).load(tmp_path / "t.jsonl")
    assert list(loaded) == list(trace) and loaded.end == "done"
    assert [step.block_tables for step in loaded] == [step.block_tables for step in trace]


def test_requests_with_given_tokens_and_a_change_of_configuration():
    """A what-if run has the same arrivals and tokens, and another configuration from some step on."""
    arrivals = [Arrival("a", list(range(40)), SamplingParams(max_tokens=3))]
    before, after = EngineConfig(max_num_batched_tokens=10), EngineConfig(max_num_batched_tokens=20)
    trace = simulate_requests(before, arrivals, lambda request: request.num_tokens, config_at={1: after})
    assert [step.num_tokens for step in trace] == [10, 20, 10, 1, 1]
    assert [chunk.sampled for step in trace for chunk in step.chunks] == [None, None, 40, 41, 42]


def test_progress_is_shown_when_asked(capsys, monkeypatch):
    monkeypatch.setattr("workbench.base.progress._is_watched", lambda: True)
    simulate(one(), progress=True)
    assert "simulation" in capsys.readouterr().err
    simulate(one())
    assert capsys.readouterr().err == ""


def test_a_simulation_needs_no_mlx():
    script = (
        "import sys, workbench\n"
        "workbench.simulate({'requests': [{'id': 'a', 'prompt': [1, 2, 3]}]})\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'numba')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
