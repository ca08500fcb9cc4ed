"""Control of an engine from a view: breakpoints, steps taken phase by phase, forks and comparisons."""

import base64
import gc
import json
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
from viz_traces import ReplayingController, random_trace, workload

from workbench import Engine, EngineConfig, simulate
from workbench.analysis.fork import fork
from workbench.engine.packed_batch import prepare_unified
from workbench.models.capture import LayerCapture
from workbench.trace.readings.compare import compare
from workbench.viz.feed import Feed
from workbench.viz.layout.comparison import comparison_facts, encode_other
from workbench.viz.layout.packet import decode_packet
from workbench.viz.phases import describe_phase


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def recorded():
    """A run in which a request is preempted."""
    trace = next(t for t in map(random_trace, range(100)) if any(record.preempted for record in t))
    return trace


def run_until_it_stops(controller):
    controller.start()
    wait_for(lambda: controller.state != "running")
    return len(controller.trace) - 1


def first_step(trace, condition):
    return next(record.step for record in trace if condition(record))


def test_it_stops_after_a_preemption(recorded):
    controller = ReplayingController(recorded)
    controller.breakpoints.on_preemption()
    assert run_until_it_stops(controller) == first_step(recorded, lambda record: record.preempted)
    assert controller.breakpoints.stopped_by == (len(controller.trace) - 1, "a request is preempted")


def test_it_stops_when_free_blocks_fall_below_and_only_then(recorded):
    controller = ReplayingController(recorded)
    limit = sorted(record.free_blocks for record in recorded)[len(recorded) // 2]
    controller.breakpoints.on_free_blocks_below(max(1, limit))
    below = [record.free_blocks < max(1, limit) for record in recorded]
    falls = [step for step, now in enumerate(below) if now and not (step and below[step - 1])]
    stops = []
    while len(controller.trace) < len(recorded):
        stops.append(run_until_it_stops(controller))
    assert [step for step in stops if step < len(recorded) - 1] == [step for step in falls if step < len(recorded) - 1]


def test_it_stops_at_a_number_of_tokens_and_at_a_block(recorded):
    chunk = next(c for record in recorded for c in record.chunks if c.start > 0 and not c.is_decode)
    controller = ReplayingController(recorded)
    controller.breakpoints.on_num_kv_computed(chunk.request_id, chunk.end)
    reached = first_step(recorded, lambda r: r.num_kv_computed.get(chunk.request_id, 0) >= chunk.end)
    assert run_until_it_stops(controller) == reached
    controller = ReplayingController(recorded)
    controller.breakpoints.on_block(9)
    taken = first_step(recorded, lambda r: any(9 in c.new_block_ids for c in r.chunks))
    assert run_until_it_stops(controller) == taken


def test_a_custom_condition_and_one_that_raises(recorded):
    controller = ReplayingController(recorded)
    breakpoints = controller.breakpoints
    breakpoints.add(lambda record: 1 / 0, "broken")
    breakpoints.add(lambda record: record.step == 3, "step 3")
    assert run_until_it_stops(controller) == 3
    assert [item.label for item in breakpoints] == ["step 3"] and next(iter(breakpoints)).hits == 1


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("on_free_blocks_below", (0,)), ("on_block", ("7",)), ("on_num_kv_computed", ("r0", True)), ("remove", (99,))],
)
def test_nonsense_breakpoints_are_refused(recorded, method, arguments):
    breakpoints = ReplayingController(recorded).breakpoints
    with pytest.raises(ValueError, match=r"must be a whole number|no breakpoint"):
        getattr(breakpoints, method)(*arguments)
    assert len(breakpoints) == 0


def test_views_share_breakpoints_and_do_not_keep_the_engine(recorded):
    controller = ReplayingController(recorded)
    first, second = Feed(controller), Feed(controller)
    first.handle({"name": "add_breakpoint", "args": {"kind": "block", "block": 5}})
    assert second.status()["breakpoints"] == [[1, "block 5 is taken", 0]]
    second.handle({"name": "remove_breakpoint", "args": {"number": 1}})
    assert first.status()["breakpoints"] == []
    first.handle({"name": "add_breakpoint", "args": {"kind": "nonsense"}})
    assert "kind must be one of" in first.status()["message"]
    gone = weakref.ref(controller)
    del controller, first, second
    gc.collect()
    assert gone() is None


# -- a real engine ------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_llama):
    engine = Engine(tiny_llama, EngineConfig(max_num_batched_tokens=16, block_size=4, num_blocks=64))
    yield engine
    engine.close()


def test_a_step_is_taken_phase_by_phase(engine):
    feed = Feed(engine)
    feed.handle({"name": "add_request", "args": {"prompt": " ".join(f"w{i}" for i in range(5, 30)), "max_tokens": 4}})
    names = []
    while True:
        before = feed.status()["phase"]
        feed.handle({"name": "step_into"})
        wait_for(lambda before=before: feed.status()["phase"] != before)
        phase = feed.status()["phase"]
        if phase is None:
            break
        names.append(phase["name"])
        assert phase["facts"] and all(isinstance(text, str) for pair in phase["facts"] for text in pair)
        if phase["name"] == "prepare":
            assert dict(phase["facts"])["cu_seqlens_q"].endswith(": 0 16")
    assert names == ["schedule", "prepare", "layer 0", "layer 1", "forward", "sample"] and len(engine.trace) == 1
    assert feed.status()["message"] == ""


def test_a_phase_stays_readable_while_the_next_one_is_computed(engine, monkeypatch):
    seen = []

    def prepare(*args, **options):
        seen.append(engine.phase[0])
        return prepare_unified(*args, **options)

    monkeypatch.setattr("workbench.engine.step.prepare_unified", prepare)
    engine.add_request([5, 6, 7], max_tokens=1)
    assert [engine.step_into()[0] for _ in range(2)] == ["schedule", "prepare"]
    assert seen == ["schedule"]


def step_into(feed, **args):
    """Take one phase by a command of the view; returns the facts that the view gets."""
    before = feed.status()["phase"]
    feed.handle({"name": "step_into", "args": args})
    wait_for(lambda: feed.status()["phase"] is not before)
    assert feed.status()["message"] == ""
    return feed.status()["phase"]


def test_a_layer_is_shown_with_its_norms_and_its_weights(engine):
    feed = Feed(engine)
    engine.add_request(list(range(5, 30)), request_id="long", max_tokens=4)
    engine.add_request([40, 41, 42], request_id="short", max_tokens=4)
    engine.step()
    while (phase := step_into(feed))["name"] != "layer 1":
        pass
    layer = feed._visible.capture
    assert phase["layer"] == layer.layer == 1 and layer.step == 1 == len(engine.trace)
    for name, heads in {"q": 4, "k": 2, "v": 2, "out": 4}.items():
        norms, shown = np.linalg.norm(getattr(layer, name), axis=-1), phase["norms"][name]
        assert (shown["num_rows"], shown["heads"], shown["columns"]) == (12, heads, 12)
        picture = np.frombuffer(base64.b64decode(shown["picture"]), np.uint8).reshape(heads, 12)
        expected = norms.min() + picture.T / 255 * (norms.max() - norms.min())
        np.testing.assert_allclose(expected, norms, atol=(norms.max() - norms.min()) / 255)
    facts = dict(phase["facts"])
    assert facts["q"].startswith("float32 [12, 4, 16]: norm") and facts["out"].endswith("every number is finite")
    status = feed.status()
    assert status["capture"]["sequences"] == [("long", 9), ("short", 12)]
    # The weights of the last row of the first sequence, before the step is in the trace.
    assert (status["weights"]["row"], status["weights"]["request"], status["weights"]["position"]) == (8, "long", 24)
    feed.handle({"name": "show_weights", "args": {"row": 11}})
    assert feed.status()["weights"]["tokens"] == [engine.tokenizer.decode([token]) for token in (40, 41, 42)]
    assert step_into(feed)["name"] == "forward"
    assert "layer" not in step_into(feed)


def test_every_view_sees_phases_that_were_taken_elsewhere(engine):
    first, second = Feed(engine), Feed(engine)
    engine.add_request([5, 6, 7], max_tokens=4)
    while step_into(first)["name"] != "layer 0":
        pass
    assert second.status()["phase"]["name"] == "layer 0" and second.status()["weights"]["row"] == 2
    engine.step_into()
    assert first.status()["phase"]["name"] == second.status()["phase"]["name"] == "layer 1"
    engine.step()
    assert engine.phase is None and first.status()["phase"] is None and second.status()["phase"] is None


def test_a_chosen_row_stays_and_the_forward_pass_can_be_finished_at_once(engine):
    feed = Feed(engine)
    engine.add_request(list(range(5, 30)), max_tokens=4)
    while step_into(feed)["name"] != "layer 0":
        pass
    assert feed.status()["weights"]["row"] == 15
    feed.handle({"name": "show_weights", "args": {"row": 3}})
    assert step_into(feed)["name"] == "layer 1"
    assert (feed.status()["weights"]["layer"], feed.status()["weights"]["row"]) == (1, 3)
    engine.step()
    while step_into(feed)["name"] != "layer 0":
        pass
    assert feed.status()["weights"]["row"] == 8  # another step, other rows
    assert step_into(feed, layers=False)["name"] == "forward"


def test_nan_in_a_layer_is_reported():
    array = np.ones((600, 2, 4), np.float32)
    array[7, 1, 2] = np.nan
    layer = LayerCapture(3, 0, ["r0"], array, array, array, array, [0, 600], [600])
    phase = describe_phase("layer 3", layer)
    assert "1 of 4800 numbers are NaN or infinite" in dict(phase["facts"])["out"]
    shown = phase["norms"]["k"]
    assert (shown["num_rows"], shown["columns"], shown["least"], shown["most"]) == (600, 256, 0.0, 2.0)
    json.dumps(phase, allow_nan=False)


def test_a_breakpoint_pauses_a_real_run(engine):
    engine.add_request([5, 6, 7], max_tokens=20)
    engine.breakpoints.add(lambda record: record.step == 4, "step 4")
    engine.start()
    wait_for(lambda: engine.state != "running")
    assert engine.state == "paused" and len(engine.trace) == 5
    assert len(engine.run(progress=False)[0].token_ids) == 20


def saved(feed, **args):
    """The page that a view saves."""
    feed._download = None
    feed.handle({"name": "save_html", "args": args})
    wait_for(lambda: feed._download is not None)
    return feed._download


def test_a_fork_is_simulated_and_compared(engine):
    for start in range(3):
        engine.add_request(list(range(5 + start, 25 + start)), max_tokens=5)
    engine.run(progress=False)
    feed = Feed(engine)
    assert feed.other_packet() is None
    feed.handle({"name": "fork", "args": {"at_step": 0, "changes": {"max_num_batched_tokens": 64}}})
    wait_for(lambda: feed._other is not None or feed.status()["message"])
    header, _ = decode_packet(feed.other_packet())
    assert header["comparison"]["same_tokens"] is True and header["comparison"]["first_divergence"]["step"] == 0
    assert header["facts"]["config"]["max_num_batched_tokens"] == 64
    assert feed.other_packet() is None
    assert header["comparison"]["fork"]["up_to"] == engine.trace[-1].step
    assert b'id="other"' in saved(feed) and b'id="place"' not in saved(feed)
    place = {"view": "scheduler", "step": 2, "request": "request-1"}
    closed = saved(feed, place=place, comparison=False)
    assert b'id="other"' not in closed and b'id="place"' in closed
    assert b'id="other"' in saved(feed, place=place, comparison=True)
    for wrong in ({"view": 3, "step": 2}, {"view": "all"}, "all", {"view": "all", "step": "</script>"}):
        feed.handle({"name": "save_html", "args": {"place": wrong}})
        assert feed.status()["message"]
    engine.add_request([5, 6, 7], max_tokens=2)
    engine.run(progress=False)
    assert b'id="other"' not in saved(feed), "the run has grown, so it is not the one that was simulated"
    feed.handle({"name": "fork", "args": {"at_step": 0, "changes": {"max_num_seqs": -1}}})
    wait_for(lambda: "max_num_seqs" in feed.status()["message"])
    refused = feed.status()["not_simulated"]
    assert refused["changes"] == {"max_num_seqs": -1} and refused["at_step"] == 0
    assert refused["reason"] == feed.status()["message"]
    feed.handle({"name": "fork", "args": {"at_step": 0, "changes": {"max_num_seqs": 3}}})
    assert feed.status()["not_simulated"] is None, "the reason is about the change before"
    wait_for(lambda: feed._fork_facts["changes"] == {"max_num_seqs": 3})


@pytest.mark.parametrize("at_step", [0, 3])
def test_a_run_that_has_not_ended_is_simulated_to_its_end_on_both_sides(engine, monkeypatch, at_step):
    """A setting has not caused the steps that the run has not come to yet."""
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    for start in range(3):
        engine.add_request(list(range(5 + start, 25 + start)), max_tokens=9)
    for _ in range(4):
        engine.step()
    seats = engine.config.max_num_seqs

    def compared(**changes):
        feed = Feed(engine)
        feed.handle({"name": "fork", "args": {"at_step": at_step, "changes": changes}})
        return decode_packet(feed.other_packet())[0]

    header = compared(max_num_seqs=seats)
    assert header["comparison"]["first_divergence"] is None
    assert "nothing changes" in header["comparison"]["verdict"], header["comparison"]["verdict"]
    assert header["num_steps"] > len(engine.trace)
    header = compared(max_num_batched_tokens=2)
    whole = engine.fork(at_step=at_step)
    assert header["comparison"]["verdict"].startswith(f"steps {len(whole)} -> ")


def test_a_recording_is_simulated_if_it_has_its_first_steps(monkeypatch):
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    trace = simulate(workload())
    feed = Feed(trace)
    feed.confirm()
    assert feed.status()["can"] == ["save_html", "fork", "tune"]
    feed.handle({"name": "fork", "args": {"at_step": 0, "changes": {"max_num_batched_tokens": 16}}})
    assert feed.status()["message"] == ""
    other = decode_packet(feed.other_packet())[0]
    simulated = fork(trace, max_num_batched_tokens=16)
    assert other["num_steps"] == len(simulated) != len(trace)
    assert feed.status()["can"] == ["save_html", "fork", "tune"], "again, with another setting"
    assert Feed(trace[3:]).status()["can"] == Feed(trace, other=simulated).status()["can"] == ["save_html", "tune"]
    alone = pickle.loads(pickle.dumps(trace[3:]))
    assert Feed(alone).status()["can"] == ["save_html"], "the steps before are not at hand"
    feed.handle({"name": "start", "args": {}})
    assert "only a live engine can be controlled" in feed.status()["message"]
    monkeypatch.setattr(feed, "_working", True)
    feed.watching = True
    feed.handle({"name": "fork", "args": {"at_step": 0, "changes": {"max_num_seqs": 2}}})
    assert "still being computed" in feed.status()["not_simulated"]["reason"], "the view waits for no answer"


def test_a_result_of_an_unknown_type_is_described():
    class Made:
        def __init__(self):
            self.positions, self._hidden, self.count = list(range(100)), [1], 3

    facts = dict(describe_phase("prepare", Made())["facts"])
    assert list(facts) == ["positions"] and facts["positions"].endswith("… 100 in all")


# -- comparing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "counts"), [({"long_prefill_token_threshold": 8}, True), ({"num_blocks": 24}, False)]
)
def test_a_comparison_says_the_same_as_compare(change, counts):
    a = random_trace(3)
    b = simulate(workload(3), config=change, max_steps=900)
    facts, found = comparison_facts(a, b), compare(a, b)
    assert found.counts_only == counts
    assert facts["badge"] == found.badge and facts["first_divergence"]["step"] == found.first_divergence.step
    assert [row[0] for row in facts["rows"]] == [request.request_id for request in found.requests]
    times = [None, None] if counts else [found.requests[0].ttft_a, found.requests[0].ttft_b]
    assert facts["rows"][0][1:3] == times
    header, _ = decode_packet(encode_other(a, b))
    assert header["num_steps"] == len(b) and header["comparison"]["badge"] == found.badge


def test_a_comparison_with_another_workload_gives_a_reason():
    facts = comparison_facts(random_trace(3), random_trace(4, num_requests=5))
    assert list(facts) == ["refused"] and "requests" in facts["refused"]


def test_commands_do_not_wait_for_the_engine(recorded):
    controller = ReplayingController(recorded)
    release, paused = threading.Event(), []
    controller.pause = lambda: paused.append(release.wait(60))
    feed = Feed(controller)
    feed.handle({"name": "pause"})
    assert not paused
    release.set()


def test_captured_weights_are_shown_over_their_tokens(engine):
    feed = Feed(engine)
    feed.handle({"name": "show_weights", "args": {"row": 0}})
    assert "nothing has been captured" in feed.status()["message"]
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    engine.add_request(prompt, max_tokens=4)
    engine.add_request([20, 21, 22], max_tokens=4)
    engine.step()
    feed.handle({"name": "capture", "args": {"layer": 1}})
    assert feed.status()["capture"] == {"layer": 1, "step": -1, "sequences": []}
    engine.step()
    feed.handle({"name": "show_weights", "args": {"row": 0}})
    shown = feed.status()["weights"]
    assert (shown["step"], shown["request"], shown["position"]) == (1, "r0", 9)
    first = engine.trace[0].chunks[0].sampled
    assert shown["tokens"] == [engine.tokenizer.decode([token]) for token in [*prompt, first]]
    scaled = np.frombuffer(base64.b64decode(shown["weights"]), np.uint8).reshape(shown["num_heads"], 10)
    weights = scaled / 255 * np.array(shown["largest"])[:, None]
    assert np.allclose(weights, feed._visible.capture.weights(0), atol=0.003)
    assert np.allclose(weights.sum(axis=1), 1, atol=0.02)
    feed.handle({"name": "show_weights", "args": {"row": 99}})
    assert "row must be from 0 to" in feed.status()["message"]
    feed.handle({"name": "capture", "args": {"layer": 17}})
    assert "layer must be from 0 to 1" in feed.status()["message"]


def test_weights_as_html_escape_their_tokens():
    from workbench.viz.attention_weights import weights_html

    html = weights_html(np.array([[0.2, 0.8], [0.4, 0.6]]), ["<script>", "&"])
    assert "<script>" not in html and "&lt;script&gt;" in html and "0.7000" in html
    with pytest.raises(ValueError, match="2 texts for 3 positions"):
        weights_html(np.ones(3), ["a", "b"])


def test_a_view_that_looks_again_and_again_has_one_thread(recorded, monkeypatch):
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    looked = []

    def slow_facts(trace):
        begun.release()
        go_on.acquire()
        looked.append(trace)
        return {"looks": len(looked)}

    monkeypatch.setattr("workbench.viz.feed.incident_facts", slow_facts)
    feeds = [Feed(lambda: recorded) for _ in range(2)]
    for _ in range(500):
        for feed in feeds:
            feed.handle({"name": "look"})
    assert begun.acquire(timeout=60)
    assert sum(thread.name == "workbench-incident" for thread in threading.enumerate()) == 2
    for _ in range(4):  # each view looks once more for all that it asked meanwhile
        go_on.release()
    wait_for(lambda: not any(thread.name == "workbench-incident" for thread in threading.enumerate()))
    assert len(looked) == 4
    go_on.release()
    feeds[0].handle({"name": "look"})
    wait_for(lambda: len(looked) == 5)


@pytest.mark.parametrize("agrees", [True, False])
def test_the_newest_step_is_checked_on_metal_from_a_view(engine, monkeypatch, agrees):
    """The emulator needs a compiler: its result is made up here, as tests/engine/test_shadow.py has real ones."""

    class Run:
        def __repr__(self):
            return "agrees with" if agrees else "DIFFERS from"

    Run.agrees, asked = agrees, []
    monkeypatch.setattr(engine, "shadow", lambda step: asked.append(step) or Run())
    engine.add_request([5, 6, 7], max_tokens=3)
    engine.step()
    feed = Feed(engine)
    assert "shadow" in feed.status()["can"]
    feed.handle({"name": "shadow", "args": {"step": 0}})
    wait_for(lambda: feed.status()["message"])
    assert asked == [0] and feed.status()["message"] == repr(Run())
    assert feed.status()["kind"] == ("note" if agrees else "problem")
