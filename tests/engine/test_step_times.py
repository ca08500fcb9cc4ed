"""A step begins and ends once: everything that tells a step's duration, or the run's, tells the same."""

import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, Trace, simulate
from workbench.analysis.explain import Explainer
from workbench.apps.demo import describe
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import StepRecord
from workbench.trace.formats.export import chrome_events
from workbench.trace.readings.durations import measured_steps
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import decode_packet, encode_packet, trace_facts

MICROSECOND = 1e-6
ROOT = Path(__file__).parents[2]
DENO = Path(sys.executable).with_name("deno")
DRAFTS = {"num_speculative_tokens": 2, "speculative": {"method": "ngram"}}
STORE = """
import {{ Store }} from {module};
const store = new Store();
store.append(new DataView(Deno.readFileSync({packet}).buffer));
const steps = [...Array(store.numSteps).keys()];
console.log(JSON.stringify([steps.map((step) => store.duration(step)), store.clock.duration, store.phases(3)]));
"""


class Clock:
    """A clock that only the model moves: a forward pass takes a second, and nothing else takes any time."""

    def __init__(self):
        self.now = 5.0

    def __call__(self):
        return self.now


def engine_with(clock, **config):
    return Engine(
        tiny_loaded_model("llama"),
        EngineConfig(max_num_batched_tokens=32, num_blocks=64, block_size=4, **config),
        clock=clock,
    )


def run(clock=time.perf_counter, **config):
    """A run of six requests, and the seconds that it took by the same clock."""
    rng = random.Random(0)
    with engine_with(clock, **config) as engine:
        if isinstance(clock, Clock):
            forward = engine.runner.forward

            def slowly(packed):
                logits = forward(packed)
                clock.now += 1.0
                return logits

            engine.runner.forward = slowly
        for index in range(6):
            prompt = [rng.randrange(3, 60) for _ in range(20)]
            engine.add_request(prompt, SamplingParams(max_tokens=5 + index, ignore_eos=True))
        begin = clock()
        engine.run(progress=False)
        return engine.trace, clock() - begin


def recorded(kind):
    """A recording of vLLM."""
    return Trace.load(ROOT / f"tests/data/vllm-recorded/{kind}/b_mixed.jsonl.gz")


def simulated(**config):
    requests = [
        {"id": f"r{i}", "prompt": {"len": 10 + 7 * i}, "max_tokens": 3 + i, "arrival_step": i} for i in range(6)
    ]
    workload = {
        "config": {"max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 90, **config},
        "requests": requests,
    }
    return simulate(workload, cost_model=CostModel(fixed=0.01, per_prefill_token=0.001, per_sequence=0.002))


TRACES = {
    "synchronous": lambda: run()[0],
    "asynchronous": lambda: run(async_scheduling=True)[0],
    "drafts": lambda: run(**DRAFTS)[0],
    "asynchronous drafts": lambda: run(async_scheduling=True, **DRAFTS)[0],
    "recorded": lambda: recorded("sync"),
    "recorded, asynchronous": lambda: recorded("async"),
    "simulated": simulated,
    "simulated, asynchronous": lambda: simulated(async_scheduling=True),
}


def in_the_dashboard(trace, folder):
    """The durations of the steps and of the run, as the dashboard's own code tells them, and the phases of a step."""
    packet, script = folder / "packet", folder / "store.mjs"
    packet.write_bytes(encode_packet(columns_of(trace), extra={"facts": trace_facts(trace)}))
    module = json.dumps((ROOT / "workbench/viz/js/store.js").as_uri())
    script.write_text(STORE.format(module=module, packet=json.dumps(str(packet))))
    command = [DENO, "run", "--quiet", "--no-lock", "--no-config", "--allow-read", script]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


@pytest.mark.parametrize("name", TRACES)
def test_everything_tells_the_same_durations(name, tmp_path):
    trace = TRACES[name]()
    durations = pytest.approx([record.duration for record in trace], abs=MICROSECOND)
    whole = pytest.approx(trace[-1].end - trace[0].time, abs=MICROSECOND)
    assert sum(record.duration for record in trace) > 0
    for before, after in pairwise(trace):
        assert before.time <= before.end <= after.time <= after.end, "steps overlap"

    metrics = trace.metrics()
    assert list(metrics.columns["duration"]) == durations
    assert metrics.summary.duration == whole

    events = [event for event in chrome_events(trace) if event["ph"] == "X" and event["pid"] == 1]
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [event["dur"] / 1e6 for event in steps] == durations
    assert (steps[-1]["ts"] + steps[-1]["dur"] - steps[0]["ts"]) / 1e6 == whole
    for track in {event["tid"] for event in events}:
        spans = sorted((e["ts"], -e["dur"]) for e in events if e["tid"] == track and not e["name"].startswith("step "))
        assert all(start - length <= after + 0.01 for (start, length), (after, _) in pairwise(spans)), "phases cross"

    _, arrays = decode_packet(encode_packet(columns_of(trace)))
    assert list(arrays["end"] - arrays["time"]) == durations
    assert arrays["end"][-1] - arrays["time"][0] == whole
    if DENO.exists():
        in_steps, of_run, phases = in_the_dashboard(trace, tmp_path)
        assert in_steps == durations
        assert of_run == whole
        assert [phase["name"] for phase in phases] == list(trace[3].timings)
        assert [phase["seconds"] for phase in phases] == pytest.approx(list(trace[3].timings.values()), abs=MICROSECOND)

    explainer = Explainer(trace)
    pieces = {piece.record.step: piece.end - piece.begin for piece in explainer._stretches if piece.is_step}
    assert [pieces.get(record.step, 0.0) for record in trace] == durations
    for request_id, request in metrics.requests.items():
        if request.e2e is not None and request.token_times:
            explained = explainer.explain(request_id)
            assert explained.total == pytest.approx(request.e2e.seconds, abs=MICROSECOND)
            assert sum(part.amount for part in explained.parts) == pytest.approx(explained.total, abs=MICROSECOND)

    if trace.meta.source.startswith(("engine", "simulation")):  # else the time before a step can be part of its work
        assert all(step.seconds == step.record.duration for step in measured_steps(trace))
    assert f"{trace[3].duration * 1000:6.0f} ms" in describe(trace[3])

    trace.save(tmp_path / "trace.jsonl")
    assert list(Trace.load(tmp_path / "trace.jsonl")) == list(trace)


@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}, DRAFTS, {"async_scheduling": True, **DRAFTS}])
def test_a_step_lasts_as_long_as_its_forward_pass_if_nothing_else_takes_time(config):
    trace, seconds = run(Clock(), **config)
    passes = [record for record in trace if record.duration]
    assert {record.duration for record in passes} == {1.0}
    assert all(record.chunks for record in passes)
    assert trace[-1].end - trace[0].time == sum(record.duration for record in trace) == seconds > 10
    assert all(record.timings["forward"] == 1.0 for record in passes)
    for request in trace.metrics().requests.values():  # a token a second, or several with drafts
        assert set(request.gaps("s")) <= {0.0, 1.0}
        assert request.token_times[0] == trace[request.token_steps[0]].end


@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}])
def test_a_run_lasts_no_longer_than_the_wall_clock_says(config):
    trace, seconds = run(**config)
    assert 0 < sum(record.duration for record in trace) <= trace[-1].end - trace[0].time + 1e-6 <= seconds + 2e-6


def test_time_in_which_somebody_looks_at_a_step_is_not_the_engines():
    clock = Clock()
    with engine_with(clock) as engine:
        engine.add_request(list(range(3, 20)), SamplingParams(max_tokens=2))
        while not isinstance(looked := engine.step_into(layers=True), StepRecord):
            clock.now += 100.0
        after = engine.step()
    assert looked.duration == 0.0 and looked.time == 0.0
    assert after.time >= 500.0


def test_an_asynchronous_step_of_an_old_file_begins_when_the_one_before_it_ends():
    trace = recorded("async")
    ahead = [record for record in trace if record.phase_starts]
    assert len(ahead) > 10
    for record in ahead:
        assert record.phase_starts["schedule"] < 0
        assert record.phases[-1].end == pytest.approx(record.end, abs=1e-9)
        assert all(phase.begin >= record.time - 1e-9 for phase in record.phases[1:])
    assert not any(record.phase_starts for record in recorded("sync"))
