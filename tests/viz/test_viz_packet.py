"""Columns and packets, which send a browser the values of the records."""

import gc
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viz_traces import HOSTILE_TEXTS, ReplayingController, hostile_trace, random_trace

from workbench import simulate
from workbench.analysis.miss import Misses
from workbench.trace import Supplement
from workbench.trace.readings.narrate import shown
from workbench.viz.feed import Feed
from workbench.viz.layout.columns import (
    ARMS,
    FLAG_FIRST_TOKEN,
    FLAG_PARTIAL,
    LIMIT_SHIFT,
    LIMITS,
    TraceColumns,
    columns_of,
)
from workbench.viz.layout.packet import decode_packet, encode_packet, trace_facts
from workbench.viz.layout.shadow_launch import shadow_facts


def check_packet(trace, header, arrays, first, last):
    """Compare every value of a packet with the records of steps [first, last)."""
    requests = list(trace.requests)
    position = dict.fromkeys(("chunk", "event", "new_block", "work"), 0)
    texts = iter(header["texts"])
    strings = header["strings"]
    for row, record in enumerate(trace[first:last]):
        assert arrays["decode_tokens"][row] + arrays["prefill_tokens"][row] == record.num_tokens
        assert arrays["token_budget"][row] == record.token_budget
        assert arrays["free_blocks"][row] == record.free_blocks
        assert arrays["num_chunks"][row] == len(record.chunks)
        why = arrays["waiting_reason"][row]
        assert (header["reasons"][why]["sentence"] if why >= 0 else "") == shown(record.waiting_reason)
        for chunk in record.chunks:
            at = position["chunk"]
            position["chunk"] += 1
            flags = arrays["chunk.flags"][at]
            assert requests[arrays["chunk.request"][at]] == chunk.request_id
            assert (arrays["chunk.start"][at], arrays["chunk.num_tokens"][at]) == (chunk.start, chunk.num_tokens)
            assert ARMS[flags & 3] == chunk.arm and bool(flags & FLAG_PARTIAL) == chunk.is_partial_prefill
            assert LIMITS[flags >> LIMIT_SHIFT] == chunk.limited_by
            assert arrays["chunk.num_recomputed"][at] == chunk.num_recomputed_tokens
            assert arrays["chunk.num_cached"][at] == chunk.num_cached_tokens
            count = arrays["chunk.num_new_blocks"][at]
            new = arrays["new_block.id"][position["new_block"] : position["new_block"] + count]
            position["new_block"] += count
            assert tuple(new) == chunk.new_block_ids
            if chunk.sampled is None:
                assert arrays["chunk.sampled"][at] == -1 and np.isnan(arrays["chunk.latency"][at])
            else:
                assert arrays["chunk.sampled"][at] == chunk.sampled and next(texts) == chunk.text
                assert arrays["chunk.latency"][at] > 0
        for event in record.events:
            at = position["event"]
            position["event"] += 1
            assert requests[arrays["event.request"][at]] == event.request_id
            reason = arrays["event.reason"][at]
            said = header["reasons"][reason]["sentence"] if event.kind == "preempt" else (*strings, "")[reason]
            assert said == event.reason
    assert position["chunk"] == len(arrays["chunk.start"]) and next(texts, None) is None


@given(st.integers(0, 10_000), st.data())
@settings(max_examples=15, deadline=None)
def test_a_packet_has_the_values_of_the_records(seed, data):
    trace = random_trace(seed)
    columns = TraceColumns(trace)
    assert columns.update() == len(trace)
    first = data.draw(st.integers(0, len(trace)))
    last = data.draw(st.integers(first, len(trace)))
    header, arrays = decode_packet(encode_packet(columns, first, last))
    assert (header["first_step"], header["num_steps"]) == (first, last - first)
    assert [request["id"] for request in header["requests"]] == list(trace.requests)
    check_packet(trace, header, arrays, first, last)


def test_columns_grow_with_the_trace():
    recorded = random_trace(11)
    controller = ReplayingController(recorded)
    columns = columns_of(controller.trace)
    while controller.step() is not None:
        if len(controller.trace) % 3 == 0:
            columns_of(controller.trace)
    at_once = TraceColumns(recorded)
    at_once.update()
    columns_of(controller.trace)
    assert encode_packet(columns) == encode_packet(at_once)


def test_columns_are_shared_and_freed_with_their_trace():
    trace = random_trace(2)
    columns = weakref.ref(columns_of(trace))
    assert columns_of(trace) is columns()
    gone = weakref.ref(trace)
    del trace
    gc.collect()
    assert gone() is None and columns() is None


def test_first_tokens_are_distinguished_from_later_ones():
    trace = random_trace(4)
    _, arrays = decode_packet(encode_packet(columns_of(trace)))
    first = (arrays["chunk.flags"] & FLAG_FIRST_TOKEN) > 0
    assert first.sum() == len({c.request_id for record in trace for c in record.chunks if c.sampled is not None})
    requests = list(trace.requests.values())
    step_of = np.repeat(np.arange(len(trace)), arrays["num_chunks"])
    for at in np.flatnonzero(first):
        info = requests[arrays["chunk.request"][at]]
        assert arrays["chunk.latency"][at] == step_of[at] + 1 - info.arrival_step


def test_times_work_items_and_texts_travel():
    trace = hostile_trace()
    header, arrays = decode_packet(encode_packet(columns_of(trace)))
    assert header["texts"] == list(HOSTILE_TEXTS)
    assert header["requests"][0]["prompt"] == HOSTILE_TEXTS[1]
    assert arrays["time"].tolist() == [0, 0.5, 1, 1.5, 2] and arrays["end"].tolist() == [0.25, 0.75, 1.25, 1.75, 2.25]
    assert [header["strings"][name] for name in arrays["phase.name"]] == ["forward"] * 5
    assert arrays["phase.begin"].tolist() == [0.0] * 5 and arrays["phase.seconds"].tolist() == [0.25] * 5
    assert arrays["chunk.latency"].tolist() == [0.25, 0.5, 0.5, 0.5, 0.5]
    assert arrays["work.kv_end"].tolist() == [3, 4, 5, 6, 7]
    assert len(header["kernels"]) == 1 and header["kernels"][0]["backend"] == "cpu"


def test_text_that_is_not_unicode_is_replaced():
    trace = hostile_trace(["fine", "\ud800 lone surrogate"])
    header, _ = decode_packet(encode_packet(columns_of(trace)))
    assert header["texts"][0] == "fine" and header["texts"][1].endswith(" lone surrogate")


# -- the feed of one view -------------------------------------------------------------------------------------


def view_of(packets):
    """The steps and requests of a view after these packets, in order and without gaps."""
    steps, requests = 0, 0
    for header, _ in map(decode_packet, packets):
        assert header["first_step"] <= steps and header["first_request"] <= requests, "a gap"
        steps = max(steps, header["first_step"] + header["num_steps"])
        requests = max(requests, header["first_request"] + len(header["requests"]))
    return steps, requests


@pytest.mark.parametrize("confirms", [True, False])
def test_a_feed_sends_every_step(confirms):
    recorded = random_trace(8, num_requests=14)
    controller = ReplayingController(recorded)
    feed = Feed(controller)
    packets = [feed.next_packet()]
    assert feed.next_packet() is None
    while controller.step() is not None:
        if len(controller.trace) % 4 == 0:
            packets.append(feed.next_packet())
            if confirms:
                feed.confirm()
    packets.append(feed.next_packet() or packets[-1])
    assert view_of(packets) == (len(recorded), len(recorded.requests))
    assert feed.next_packet() is None


def test_a_confirmed_feed_sends_no_step_twice():
    controller = ReplayingController(random_trace(8))
    feed = Feed(controller)
    feed.next_packet()
    seen = 0
    while controller.step() is not None:
        header, _ = decode_packet(feed.next_packet())
        assert (header["first_step"], header["num_steps"]) == (seen, 1)
        assert "facts" not in header or seen == 0
        seen += 1
        feed.confirm()


def test_a_prepared_packet_is_sent_as_it_is(monkeypatch):
    """The event loop of a server does no work for it, also when the server's trace has lost steps meanwhile."""
    traces = [random_trace(8), random_trace(4)]
    whole = Feed(traces[0]).next_packet()
    feed, view = Feed(lambda: traces[0]), SimpleNamespace(packet=b"", other=b"", status={}, download=b"")
    feed.prepare()
    del traces[0]
    monkeypatch.setattr("workbench.viz.feed.encode_packet", None)
    feed.update(view)
    assert view.packet == whole


def test_a_view_that_asks_again_gets_everything():
    feed = Feed(random_trace(8))
    whole = feed.next_packet()
    feed.handle({"id": 1, "name": "resend", "args": {}})
    assert feed.next_packet() == whole


@pytest.mark.parametrize(
    "command", [{}, {"name": None}, {"name": "__class__"}, {"name": "launch"}, {"name": ["start"]}]
)
def test_an_unknown_command_is_refused_with_a_message(command):
    feed = Feed(ReplayingController(random_trace(8)))
    feed.handle(command)
    assert "unknown command" in feed.status()["message"]


def test_a_recording_cannot_be_run():
    feed = Feed(random_trace(8))
    feed.handle({"name": "start"})
    assert "recording" in feed.status()["message"] and not feed.status()["live"]


def test_commands_reach_the_engine_and_its_errors_the_view():
    controller = ReplayingController(random_trace(8))
    feed = Feed(controller)
    feed.handle({"name": "add_request", "args": {"prompt": "hello", "max_tokens": 3}})
    feed.handle({"name": "abort", "args": {"request_id": "r1"}})
    assert controller.added == [("hello", {"max_tokens": 3})] and controller.aborted == ["r1"]
    status = feed.status()
    assert (status["live"], status["state"], status["name"], status["message"]) == (True, "paused", "replay", "")
    feed.handle({"name": "add_request", "args": {"prompt": ""}})
    assert feed.status()["message"] == "prompt must not be empty"
    feed.handle({"name": "add_request", "args": {"prompt": "again"}})
    assert feed.status()["message"] == ""


def test_a_slice_begins_where_its_steps_begin():
    whole = random_trace(5, num_requests=14)
    part = whole[len(whole) // 2 :]
    header, arrays = decode_packet(Feed(part).next_packet())
    start = header["facts"]["start"]
    assert header["facts"]["first_step"] == part[0].step and header["num_steps"] == len(part)
    before = whole.pool_state(part[0].step - 1, "end")
    assert {rid: tuple(table) for rid, table in start["tables"].items()} == before.block_tables
    ended = {rid for record in whole[: part[0].step] for rid in record.finished}
    assert ended and not ended & part.requests.keys()
    first = int(arrays["num_pool_changes"][0])
    owned = {b for b, state in zip(arrays["pool.block"][:first], arrays["pool.state"][:first]) if state == 3}
    assert owned == set(np.flatnonzero(whole.pool_state(part[0].step).state == 3))


def test_a_shadow_launch_is_sent_when_it_is_done():
    whole = hostile_trace(["a", "b", "c"])
    controller = ReplayingController(whole)
    controller.step()
    controller.step()
    feed = Feed(controller)
    header, _ = decode_packet(feed.next_packet())
    assert header["supplements"] == [] and len(header["kernels"]) == 1
    feed.confirm()
    assert feed.next_packet() is None
    controller.trace.add_supplement(Supplement(0, "other", {"layer": 3}))
    assert feed.next_packet() is None
    found = {"layer": 3, "faults": [], "max_difference": 1e-7, "launches": [], "seconds": 0.5}
    controller.trace.add_supplement(Supplement(1, "shadow", found))
    header, _ = decode_packet(feed.next_packet())
    facts = {"layer": 3, "faults": [], "max_difference": 1e-7, "launches": [], "block_q": 1, "work_items": []}
    assert header["supplements"] == [[1, "shadow", facts]] and header["num_steps"] == 0
    assert feed.next_packet() is None
    feed.handle({"name": "resend"})
    assert decode_packet(feed.next_packet())[0]["supplements"] == [[1, "shadow", facts]]


TRACED = {
    "layer": 0,
    "faults": [],
    "max_difference": 1e-7,
    "block_q": 8,
    "work_items": [[0, 0, 3, 0, 3, 0, 1]],
    "launches": [{"threadgroups": 1, "buffers": {}, "kv_blocks": [[[0, 1, 0], [4, 5]]], "kv_bytes": [96]}],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"launches": "none"},
        {"layer": -1},
        {"block_q": 0},
        {"work_items": [[7, 0, 3, 0, 3, 0, 1]]},
        {"work_items": []},
        {"launches": [TRACED["launches"][0] | {"kv_bytes": [1, 2]}]},
        {"launches": [TRACED["launches"][0] | {"kv_blocks": [[[0, 0], [2**40]]]}]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_shadow_launch_of_another_form_is_not_sent(changes):
    """A trace file may hold anything in these details, and the page must not have to handle it."""
    assert json.loads(json.dumps(shadow_facts(TRACED, 1))) == TRACED
    assert shadow_facts(TRACED | changes, 1) is None


def test_changes_of_the_tables_of_all_groups_are_in_a_packet():
    groups = [{"kind": "sliding_window", "sliding_window": 6}, {"kind": "full_attention"}, {"kind": "mamba"}]
    requests = [
        {"id": f"r{i}", "prompt": {"len": 20 + i, "seed": "s"}, "max_tokens": 9, "arrival_step": 2 * i}
        for i in range(3)
    ]
    trace = simulate({"config": {"block_size": 4, "num_blocks": 60, "kv_cache_groups": groups}, "requests": requests})
    header, arrays = decode_packet(encode_packet(columns_of(trace), extra={"facts": trace_facts(trace)}))
    facts = header["facts"]
    assert [group["kind"] for group in facts["groups"]] == ["sliding_window", "full_attention", "mamba"]
    assert facts["layout_group"] == 0 and facts["groups"][0]["window"] == 6
    tables = {request_id: [[], [], []] for request_id in trace.requests}
    at = new = chunk_at = 0
    for record in trace:
        for chunk in record.chunks:
            mine = tables[chunk.request_id]
            count = arrays["chunk.num_new_blocks"][chunk_at]
            mine[0] += arrays["new_block.id"][new : new + count].tolist()
            new += count
            for _ in range(arrays["chunk.num_table_changes"][chunk_at]):
                group, is_removed, value = (
                    arrays[f"table_change.{name}"][at] for name in ("group", "is_removed", "value")
                )
                if is_removed:
                    mine[group][value] = 0
                else:
                    mine[group].append(value)
                at += 1
            chunk_at += 1
            assert tuple(mine) == record.block_tables_by_group[chunk.request_id]
    assert at == len(arrays["table_change.value"]) and 0 in tables["r2"][0]


def test_an_admission_says_why_it_found_no_more():
    requests = [
        {"id": "a", "prompt": {"len": 20, "seed": "s"}, "max_tokens": 2},
        {"id": "b", "prompt": {"parts": [{"len": 10, "seed": "s"}, {"len": 9}]}, "max_tokens": 2, "arrival_step": 5},
    ]
    trace = simulate({"config": {"block_size": 4, "num_blocks": 60}, "requests": requests})
    header, arrays = decode_packet(encode_packet(columns_of(trace)))
    misses = [header["strings"][index] if index >= 0 else "" for index in arrays["chunk.miss"]]
    [miss] = trace.why_missed("b")
    assert misses == ["", "", miss.why, ""] and "token 10" in miss.why


def test_the_prefix_cache_is_replayed_only_for_requests_that_begin_alike(monkeypatch):
    asked = []

    def why_missed(_, request_id):
        asked.append(request_id)
        return Misses()

    monkeypatch.setattr("workbench.analysis.misses.why_missed", why_missed)
    prompts = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [1, 9, 3], "d": [8, 2, 3]}
    columns_of(simulate({"requests": [{"id": id, "prompt": p, "max_tokens": 2} for id, p in prompts.items()]}))
    assert asked == ["a", "b"]
