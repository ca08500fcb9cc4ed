"""Chrome traces: what Perfetto needs, and every chunk at its place."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from trace_helpers import one_trace, traces

from workbench import simulate
from workbench.trace import Trace, TraceMeta
from workbench.trace.formats import export
from workbench.trace.formats.export import chrome_events


def slices(events, process):
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


@settings(max_examples=30, deadline=None)
@given(traces())
def test_any_trace(trace):
    events = json.loads(json.dumps(list(chrome_events(trace))))
    tracks = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2
    }
    assert list(tracks.values()) == list(trace.requests)
    for event in events:
        assert event["ph"] in "XCiM"
        assert event["ph"] != "X" or event["dur"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    chunks = [event for event in slices(events, 2) if "step" in event.get("args", {})]
    found = Counter((tracks[event["tid"]], event["args"]["step"], event["args"]["tokens"]) for event in chunks)
    expected = Counter(
        (chunk.request_id, record.step, f"[{chunk.start}, {chunk.end})") for record in trace for chunk in record.chunks
    )
    assert found == expected
    by_track = defaultdict(list)
    for event in slices(events, 2):
        by_track[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():  # slices of a track may nest but not cross
        spans.sort()
        assert all(end <= start + 0.01 for (_, end), (start, _) in pairwise(spans))


def test_a_timed_trace():
    trace = one_trace()
    events = list(chrome_events(trace))
    steps = [event for event in slices(events, 1) if event["name"].startswith("step ")]
    assert [event["ts"] for event in steps] == [pytest.approx(record.time * 1e6) for record in trace]
    for event, record in zip(steps, trace):
        assert event["dur"] == pytest.approx(record.duration * 1e6, abs=0.01)
    phases = Counter(event["name"] for event in slices(events, 1))
    assert phases["forward"] == sum("forward" in record.timings for record in trace)
    counters = [event for event in events if event["ph"] == "C"]
    assert [event["args"]["free"] for event in counters if event["name"] == "KV blocks"] == [
        record.free_blocks for record in trace
    ]
    assert [event["args"]["tokens"] for event in counters if event["name"] == "token budget"] == [
        record.token_budget for record in trace
    ]
    kinds = Counter(event["name"] for event in events if event["ph"] == "i")
    assert kinds["preempt"] == sum(len(record.preempted) for record in trace) > 0
    assert kinds["finish"] == sum(len(record.finished) for record in trace) > 0
    ends = [event["ts"] for event in events if event["name"] == "finish"]
    assert ends == [pytest.approx(record.end * 1e6) for record in trace for _ in record.finished]
    names = {event["name"] for event in slices(events, 2)}
    assert {"waiting", "preempted", "decode"} <= names


def test_a_simulation_has_a_millisecond_per_step(tmp_path):
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 3}, "max_tokens": 2, "arrival_step": 1}]})
    trace.to_chrome_trace(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["displayTimeUnit"] == "ms"
    steps = [event for event in slices(content["traceEvents"], 1)]
    assert [(event["ts"], event["dur"]) for event in steps] == [(1000.0 * n, 1000.0) for n in range(len(trace))]


def test_files(tmp_path, monkeypatch):
    trace = one_trace()
    trace.to_chrome_trace(tmp_path / "t.json")
    trace.to_chrome_trace(tmp_path / "t.json.gz")
    plain = json.loads((tmp_path / "t.json").read_bytes())
    assert plain == json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert plain["otherData"] == {"source": "engine"}
    Trace(TraceMeta()).to_chrome_trace(tmp_path / "empty.json")
    assert len(json.loads((tmp_path / "empty.json").read_bytes())["traceEvents"]) == 3

    def broken(trace):
        yield from chrome_events(trace)
        raise OSError("disk full")

    monkeypatch.setattr(export, "chrome_events", broken)
    before = (tmp_path / "t.json").read_bytes()
    with pytest.raises(OSError, match="disk full"):
        trace.to_chrome_trace(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.json", "t.json", "t.json.gz"]


def test_times_count_from_the_first_arrival_in_a_part_too():
    trace = late_run()
    events = list(chrome_events(trace))
    assert [event["ts"] for event in events if event["name"] == "waiting"] == [0.0, 1e6]
    starts = [event["ts"] for event in slices(events, 1) if event["name"].startswith("step ")]
    assert starts == [pytest.approx((record.time - 3.0) * 1e6) for record in trace]
    of_part = [event["ts"] for event in slices(list(chrome_events(trace[2:])), 1) if event["name"].startswith("step ")]
    assert of_part == starts[2:]


def late_run():
    """A run whose recorder started three seconds before the first request, and whose first step began two later."""
    requests = [{"id": name, "prompt": {"len": 9}, "arrival_time": 0.0} for name in "ab"]
    records = simulate({"requests": requests, "cost_model": {"fixed": 0.5}})
    trace = Trace(records.meta)
    for number, (_, info) in enumerate(records.arrivals()):
        trace.add_request(msgspec.structs.replace(info, arrival_time=3.0 + number))
    for record in records:
        trace.append(msgspec.structs.replace(record, time=record.time + 5.0, end=record.end + 5.0))
    return trace


def test_slices_begin_at_their_first_step():
    events = list(chrome_events(simulate({"requests": [{"id": "a", "prompt": [5], "max_tokens": 9}]})[4:6]))
    assert [event["ts"] for event in slices(events, 1)] == [0.0, 1000.0]


def test_who_runs_when_a_slice_begins_does_not_wait_in_it():
    requests = [{"id": name, "prompt": [5], "max_tokens": 9} for name in "ab"]
    part = simulate({"config": {"max_num_seqs": 1}, "requests": requests})[4:12]
    waits = [event for event in chrome_events(part) if event["name"] == "waiting"]
    assert [event["tid"] for event in waits] == [2], "b waits for a, and a runs"
