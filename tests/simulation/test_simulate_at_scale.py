"""Runs at scale: the same run as with a full trace, in memory that does not grow with it."""

import gc
import json
import os
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workbench import EngineConfig
from workbench.base.text import duration as words
from workbench.simulation.arrivals import read_generated, timed_arrival
from workbench.simulation.at_scale import BIN_WIDTH, MAX_WINDOWS, LatencyHistogram, simulate_at_scale
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.simulate import simulate_requests
from workbench.trace import Trace
from workbench.trace.readings.run_clock import IDLE_SECONDS

MODEL = CostModel(fixed=0.004, per_sequence=2e-5, per_prefill_token=5e-5, per_kv_token=2e-8)
CONFIG = EngineConfig(max_num_batched_tokens=512, max_num_seqs=24, num_blocks=220)


def requests(count: int = 300, rate: float = 60.0):
    return read_generated(
        {
            "num_requests": count,
            "prompt": {"uniform": [5, 200]},
            "output": {"uniform": [1, 40]},
            "arrivals": {"process": "bursts", "rate": rate, "size": 5},
        }
    )


@pytest.fixture(scope="module")
def full() -> Trace:
    return simulate_requests(CONFIG, requests(), lambda request: 0, cost_model=MODEL)


def with_aborts():
    """The same requests, of which every seventh is aborted, before it arrives, while it waits or while it runs."""
    for index, arrival in enumerate(requests()):
        yield replace(arrival, abort_step=int(2.2 * index) + index % 21 + 8 if index % 7 == 0 else None)


def latencies(trace: Trace) -> dict[str, list[float]]:
    """Every latency of a whole run by its definition: a token exists at the end of the step that sampled it."""
    tokens = {request_id: [] for request_id in trace.requests}
    ends = {}
    for record in trace:
        end = record.end
        for chunk in record.chunks:
            if chunk.sampled is not None:
                tokens[chunk.request_id].append(end)
        ends |= dict.fromkeys(record.aborted, record.time) | dict.fromkeys(record.finished, end)
    arrived = {request_id: info.arrival_time for request_id, info in trace.requests.items()}
    return {
        "ttft": [times[0] - arrived[request_id] for request_id, times in tokens.items() if times],
        "itl": [gap for times in tokens.values() for gap in np.diff(times)],
        "e2e": [end - arrived[request_id] for request_id, end in ends.items()],
    }


@pytest.mark.parametrize("arrivals", [requests, with_aborts])
def test_the_summary_is_that_of_the_full_trace(arrivals):
    full = simulate_requests(CONFIG, arrivals(), lambda request: 0, cost_model=MODEL)
    summary, expected = simulate_at_scale(CONFIG, arrivals(), MODEL), full.metrics().summary
    assert expected.num_preemptions > 0, "the workload must cause preemptions"
    assert any(record.aborted for record in full) == (arrivals is with_aborts)
    assert summary.end == full.end == "done"
    assert summary.num_steps == expected.num_steps and summary.num_requests == summary.num_finished == 300
    assert summary.num_aborted == expected.num_aborted == sum(len(record.aborted) for record in full)
    assert str(summary).splitlines()[0] == str(full.metrics()).splitlines()[0]
    assert summary.num_tokens == expected.num_scheduled_tokens
    assert summary.num_scheduled == sum(len(record.chunks) for record in full)
    assert summary.num_output_tokens == expected.num_output_tokens
    assert summary.num_preemptions == expected.num_preemptions
    assert summary.num_recomputed_tokens == expected.num_recomputed_tokens
    assert summary.num_cached_tokens == expected.num_cached_tokens
    assert summary.duration == pytest.approx(full[-1].end - full[0].time)
    for name, by_definition in latencies(full).items():
        ours, theirs = getattr(summary, name).distribution(), getattr(expected, name)
        assert (ours.count, ours.mean) == (len(by_definition), pytest.approx(np.mean(by_definition)))
        assert ours.count == theirs.count
        assert (ours.mean, ours.max) == pytest.approx((theirs.mean, theirs.max))
        assert ours.p50 == pytest.approx(theirs.p50, rel=0.03)
        # The two of 300 events around this percentile lie far apart: one side interpolates, the other counts.
        assert ours.p99 == pytest.approx(theirs.p99, rel=0.06)


def test_the_length_of_a_run_begins_with_its_first_step_as_that_of_its_trace_does():
    arrivals = [replace(a, arrives_at=a.arrives_at + 3, arrival_time=a.arrival_time + 3) for a in requests(1200)]
    metrics = simulate_requests(CONFIG, iter(arrivals), lambda request: 0, cost_model=MODEL).metrics()
    summary = simulate_at_scale(CONFIG, iter(arrivals), MODEL)
    assert summary.duration == pytest.approx(metrics.summary.duration)
    said, of_trace = str(summary).splitlines()[0], str(metrics).splitlines()[0]
    assert said == of_trace and said.startswith("1,200 of 1,200 requests ended in ")


def test_a_run_with_pauses_says_which_of_them_are_idle_time():
    arrivals = list(requests(20, rate=0.5))
    summary = simulate_at_scale(CONFIG, iter(arrivals), MODEL)
    metrics = simulate_requests(CONFIG, iter(arrivals), lambda request: 0, cost_model=MODEL).metrics()
    said = f" with {words(summary.idle)} idle (pauses over {IDLE_SECONDS} s)"
    assert summary.idle > 1 and said in str(summary) and said in " ".join(str(metrics).split())


@pytest.mark.parametrize("feature", [{"async_scheduling": True}, {"num_speculative_tokens": 3}], ids=str)
def test_the_summary_of_steps_ahead_is_that_of_the_full_trace(feature):
    config = CONFIG.replace(num_blocks=120, **feature)

    def arrivals():
        return [replace(arrival, accepts=(2, 0, 3, 1)) for arrival in with_aborts()]

    full = simulate_requests(config, arrivals(), lambda request: 0, cost_model=MODEL)
    summary, expected = simulate_at_scale(config, iter(arrivals()), MODEL), full.metrics().summary
    chunks = [chunk for record in full for chunk in record.chunks]
    assert any(record.preempted for record in full) and any(record.aborted for record in full)
    if "async_scheduling" in feature:
        assert any(chunk.discarded for chunk in chunks), "an abort must throw an output away"
    else:
        assert {chunk.num_accepted for chunk in chunks if chunk.drafts} == {0, 1, 2, 3}
    assert summary.end == "done" and summary.num_steps == len(full)
    assert summary.num_requests == summary.num_finished == 300
    assert summary.num_tokens == sum(chunk.num_tokens for chunk in chunks)
    assert summary.num_scheduled == len(chunks)
    assert summary.num_output_tokens == sum(len(chunk.accepted) for chunk in chunks)
    assert summary.num_preemptions == sum(len(record.preempted) for record in full)
    assert summary.num_recomputed_tokens == sum(chunk.num_recomputed_tokens for chunk in chunks)
    assert summary.num_cached_tokens == sum(chunk.num_cached_tokens for chunk in chunks)
    for name in ("ttft", "itl", "e2e"):
        ours, theirs = getattr(summary, name).distribution(), getattr(expected, name)
        assert (ours.count, ours.mean, ours.max) == pytest.approx((theirs.count, theirs.mean, theirs.max))


def test_a_stretch_kept_whole_equals_that_stretch_of_the_full_trace(full, tmp_path):
    summary = simulate_at_scale(CONFIG, requests(), MODEL, record_steps=range(100, 140))
    part = summary.recorded
    assert len(part) == 40 and part.keyframe.step == 100
    for ours, theirs in zip(part, full[100:140], strict=True):
        assert ours.chunks == theirs.chunks and ours.block_tables == theirs.block_tables
        assert ours.time == pytest.approx(theirs.time)
    assert part.keyframe.last_tokens == full[100:].keyframe.last_tokens and part.keyframe.last_tokens
    part.save(tmp_path / "part.jsonl")
    loaded = Trace.load(tmp_path / "part.jsonl")
    assert loaded[-1].block_tables == full[139].block_tables
    assert loaded.pool_state(0).num_blocks == CONFIG.num_blocks


def test_a_stretch_that_begins_with_an_abort_can_be_loaded(tmp_path):
    full = simulate_requests(CONFIG, with_aborts(), lambda request: 0, cost_model=MODEL)
    first = next(record.step for record in full if record.aborted)
    part = simulate_at_scale(CONFIG, with_aborts(), MODEL, record_steps=range(first, first + 5)).recorded
    part.save(tmp_path / "part.jsonl")
    loaded = Trace.load(tmp_path / "part.jsonl")
    assert loaded[0].aborted == full[first].aborted
    assert all(loaded.pool_state(index).consistent for index in range(5))


def memory_of_a_run(keep=lambda arrival: None):
    """Bytes that Python has allocated after every 50th of 750 requests; ``keep`` sees every request."""
    sizes = []

    def watched():
        for index, arrival in enumerate(requests(750, 20.0)):
            keep(arrival)
            if index % 50 == 49:
                gc.collect()  # empties CPython's free lists as well
                sizes.append(tracemalloc.get_traced_memory()[0])
            yield arrival

    tracemalloc.start()
    summary = simulate_at_scale(CONFIG.replace(enable_prefix_caching=False, num_blocks=2000), watched(), MODEL)
    tracemalloc.stop()
    assert summary.num_finished == 750
    return sizes


@pytest.mark.parametrize("keep, grows", [("lambda arrival: None", False), ("[].append", True)])
def test_memory_does_not_grow_with_the_number_of_requests(keep, grows):
    # In another process: threads that other tests left behind allocate memory here.
    code = f"import test_simulate_at_scale as t; print(t.memory_of_a_run({keep}))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
    )
    sizes = json.loads(done.stdout)
    assert (max(sizes[10:]) > 1.1 * max(sizes[2:6])) == grows


def test_the_time_line_is_bounded_and_adds_up():
    summary = simulate_at_scale(CONFIG, requests(800, 30.0), MODEL)
    line = summary.time_line
    assert summary.num_steps > MAX_WINDOWS >= len(line.windows) > MAX_WINDOWS // 2 and line.steps_per_window > 1
    assert sum(window.num_steps for window in line.windows) == summary.num_steps
    assert sum(window.num_tokens for window in line.windows) == summary.num_tokens
    assert all(window.num_steps == line.steps_per_window for window in line.windows[:-1])
    starts = [window.start for window in line.windows]
    assert starts == sorted(starts)


def test_ends():
    too_long = [timed_arrival("a", [1] * 50, 2, 0.0), timed_arrival("b", [2] * 9000, 2, 0.0)]
    too_long.append(timed_arrival("c", [3] * 5, 2, 9.0))
    with pytest.raises(ValueError, match=r"num_blocks=.* is too small for request 'b'"):
        simulate_at_scale(CONFIG, too_long, MODEL)
    given_up = [replace(too_long[1], abort_step=40), too_long[2]]
    assert simulate_at_scale(CONFIG, given_up, MODEL).end == "done"
    summary = simulate_at_scale(CONFIG, requests(), MODEL, max_steps=7)
    assert (summary.end, summary.num_steps) == ("max_steps", 7)
    assert simulate_at_scale(CONFIG, [], MODEL).num_steps == 0
    assert "TTFT: none" in repr(simulate_at_scale(CONFIG, [], MODEL))


def test_histogram_percentiles_are_right_to_a_bin():
    rng = random.Random(4)
    values = [rng.lognormvariate(-2, 1.5) for _ in range(20_000)]
    histogram = LatencyHistogram()
    for value in values[:10_000]:
        histogram.add(value)
    for value in values[10_000:]:
        histogram.add(value)
    for percent in (1, 50, 95, 99, 99.9):
        assert histogram.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=1.5 * BIN_WIDTH)
    assert histogram.distribution().mean == pytest.approx(np.mean(values)) and histogram.max == max(values)
    assert LatencyHistogram().percentile(50) is None
