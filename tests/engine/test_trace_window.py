"""An engine that forgets its oldest steps: what is left is the same as in an engine that keeps them all."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from workbench import Engine, EngineConfig, SamplingParams
from workbench.trace import Keyframe, Trace, TraceError
from workbench.trace.line_codec import encode_line
from workbench.trace.run_zero import run_zero
from workbench.viz.feed import Feed
from workbench.viz.layout.packet import decode_packet

# A pool so small that requests are preempted, and prompts that share their beginning.
CONFIG = EngineConfig(max_num_batched_tokens=32, max_num_seqs=4, block_size=4, num_blocks=24, max_model_len=64)
KEEP = 40


def serve_requests(engine, after_step=lambda: None):
    """Requests of random shape, some waiting all the time, a few of them aborted."""
    draw = random.Random(3)
    for name in range(60):
        prompt = [7] * 8 + [draw.randrange(3, 120) for _ in range(draw.randint(1, 20))]
        sampling = SamplingParams(max_tokens=draw.randint(1, 25), ignore_eos=True)
        engine.add_request(prompt, sampling, request_id=f"q{name}")
        if name % 9 == 4:
            engine.abort(f"q{name - 1}")
        engine.step()
        after_step()
        while engine.scheduler.num_waiting > 2:
            engine.step()
            after_step()
    while engine.step() is not None:
        after_step()


def same(record):
    """The part of a record that does not depend on the clock."""
    return record.chunks, record.running, record.waiting, record.aborted, record.free_blocks_end, record.block_tables


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def runs(request, tiny_llama, tmp_path_factory):
    """An engine that forgets and one that does not, after the same requests, and a recording of the first."""
    path = tmp_path_factory.mktemp("window") / "run.jsonl"
    config = CONFIG.replace(async_scheduling=request.param == "asynchronous")
    with_window = Engine(tiny_llama, config, keep_steps=KEEP)
    whole = Engine(tiny_llama, config)
    writer = with_window.trace.record_to(path)
    lengths, feeds, packets = [], [Feed(lambda: with_window.trace), Feed(with_window)], [[], []]

    def watch():
        lengths.append(len(with_window.trace))
        for feed, sent in zip(feeds, packets):
            feed.confirm()
            if len(lengths) % 7 == 0 and (packet := feed.next_packet()):
                sent.append(packet)

    serve_requests(with_window, watch)
    watch()
    serve_requests(whole)
    writer.close("done")
    yield with_window, whole, path, lengths, packets
    with_window.close()
    whole.close()


@pytest.mark.repeats(step=2)
def test_the_run_is_the_same_and_the_window_bounded(runs):
    windowed, whole, _, lengths, _ = runs
    trace, first = windowed.trace, windowed.trace[0].step
    assert len(whole.trace) > 4 * KEEP and any(r.preempted for r in whole.trace) and any(r.aborted for r in whole.trace)
    ahead = windowed.config.async_scheduling  # a keyframe is then that of the step after the one in flight
    assert max(lengths) <= KEEP and min(lengths[KEEP:]) >= KEEP // 2 - ahead
    assert first % (KEEP // 2) == ahead and trace[-1].step == len(whole.trace) - 1
    assert [same(record) for record in trace] == [same(record) for record in whole.trace[first:]]
    assert len(trace.requests) < len(whole.trace.requests) / 2
    assert f"steps {first} to {trace[-1].step}" in repr(trace)


def test_the_pool_is_the_same_at_every_step(runs):
    windowed, whole, *_ = runs
    trace, first = windowed.trace, windowed.trace[0].step
    zero = run_zero(whole.trace)  # the two ran at different times
    expected = whole.trace[first:].keyframe
    assert replace(trace.keyframe, zero=zero, last_tokens=expected.last_tokens) == expected
    latest = {}
    for record in whole.trace[:first]:
        latest |= {chunk.request_id: record.step for chunk in record.chunks if chunk.accepted}
        for name in (*record.finished, *record.aborted):
            latest.pop(name, None)
    assert {name: token.step for name, token in trace.keyframe.last_tokens.items()} == latest
    assert latest and all(0 < token.end <= trace[0].end for token in trace.keyframe.last_tokens.values())
    assert trace.keyframe.zero < trace[0].time and run_zero(trace) == trace.keyframe.zero
    for index in [*range(len(trace)), 3, 0]:
        for moment in ("scheduled", "end"):
            here, there = trace.pool_state(index, moment), whole.trace.pool_state(first + index, moment)
            assert here.consistent and here.block_tables == there.block_tables
            assert np.array_equal(here.free_queue, there.free_queue) and np.array_equal(here.state, there.state)


def test_metrics_count_what_is_left(runs):
    windowed, whole, *_ = runs
    first = windowed.trace[0].step
    here, there = windowed.trace.metrics(), whole.trace[first:].metrics()
    assert here.summary.num_scheduled_tokens == there.summary.num_scheduled_tokens
    assert np.array_equal(here.steps.owned_blocks, there.steps.owned_blocks)
    assert np.array_equal(here.steps.unused_slots, there.steps.unused_slots)
    assert f"from step {first} on" in str(here) and "from step" not in str(whole.trace.metrics())


def test_a_recording_holds_the_whole_run(runs):
    _, whole, path, *_ = runs
    recorded = Trace.load(path)
    assert [same(record) for record in recorded] == [same(record) for record in whole.trace]
    assert list(recorded.requests) == list(whole.trace.requests)


def test_what_is_left_can_be_saved(runs, tmp_path):
    trace = runs[0].trace
    trace.save(tmp_path / "window.jsonl.gz")
    loaded = Trace.load(tmp_path / "window.jsonl.gz")
    assert loaded.keyframe == trace.keyframe and not loaded.problems
    assert [encode_line(record) for record in loaded] == [encode_line(record) for record in trace]
    assert [record.block_tables for record in loaded] == [record.block_tables for record in trace]
    assert loaded.arrivals() == trace.arrivals()


@pytest.mark.parametrize("view", [0, 1])
def test_a_view_goes_on_with_the_new_trace(runs, view):
    windowed, *_, packets = runs
    headers = [decode_packet(packet)[0] for packet in packets[view]]
    anew = [header for header in headers if header["first_step"] == 0]
    assert len(anew) > 3 and all("facts" in header for header in anew)
    position, base = 0, 0
    for header in headers:
        if header["first_step"] == 0:
            position, base = 0, header["facts"]["first_step"]
        assert header["first_step"] == position
        position += header["num_steps"]
    assert base == windowed.trace[0].step


def test_a_fork_needs_the_beginning(runs):
    with pytest.raises(ValueError, match="keeps every step"):
        runs[0].fork(max_num_seqs=2)
    assert len(runs[1].fork(max_num_seqs=2)) > KEEP


def test_refusals(tiny_llama, runs):
    with pytest.raises(ValueError, match="keep_steps must be from 16"):
        Engine(tiny_llama, CONFIG, keep_steps=4)
    trace = runs[0].trace
    with pytest.raises(TraceError, match="cannot continue from step 2: it has steps"):
        trace.continued_from(Keyframe(2))
    with pytest.raises(TraceError, match="slice"):
        trace[2:].continued_from(Keyframe(trace[3].step))
