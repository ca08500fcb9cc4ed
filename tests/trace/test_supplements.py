"""Facts that become known about a step after its record was made: a line of the trace, and never a changed record."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path

import msgspec
import pytest
from trace_helpers import one_trace

from workbench.trace import (
    Keyframe,
    RequestInfo,
    StepRecord,
    Supplement,
    Trace,
    TraceError,
    TraceFollower,
    TraceMeta,
    TraceWriter,
)

VERSION_1 = Path(__file__).parents[1] / "data" / "trace-version-1"


def step(number: int) -> StepRecord:
    """An empty step as a scheduler records it, with its block tables."""
    record = StepRecord(number)
    record.attach_block_tables(16, [])
    return record


def steps(first: int, last: int) -> list[StepRecord]:
    """Empty steps, both ends included."""
    return [step(number) for number in range(first, last + 1)]


def trace_of(records) -> Trace:
    trace = Trace(TraceMeta(source="simulation"))
    for record in records:
        trace.append(record)
    return trace


def said(trace: Trace):
    return [(supplement.step, supplement.name, dict(supplement.facts)) for supplement in trace.supplements]


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


def test_a_fact_that_comes_late_leaves_the_record_as_it_was():
    trace = trace_of(steps(0, 3))
    record, encoded = trace[1], msgspec.json.encode(trace[1])
    trace.add_supplement(Supplement(1, "shadow", {"layer": 4}))
    assert trace[1] is record and msgspec.json.encode(record) == encoded
    assert trace.supplement(1, "shadow") == {"layer": 4}
    assert trace.supplement(1, "other") is None and trace.supplement(2, "shadow") is None
    trace.add_supplement(Supplement(3, "shadow", {"layer": 5}))
    trace.add_supplement(Supplement(1, "other", {}))
    assert said(trace) == [(1, "shadow", {"layer": 4}), (3, "shadow", {"layer": 5}), (1, "other", {})]
    assert trace.to_dict()["supplements"][0] == {
        "kind": "supplement",
        "step": 1,
        "name": "shadow",
        "facts": {"layer": 4},
    }


def test_what_does_not_fit_is_refused():
    trace = trace_of(steps(0, 1))
    trace.add_supplement(Supplement(1, "shadow"))
    with pytest.raises(TraceError, match="names step 2, the trace has 2 steps"):
        trace.add_supplement(Supplement(2, "shadow"))
    with pytest.raises(TraceError, match="step 1 has a supplement 'shadow' already"):
        trace.add_supplement(Supplement(1, "shadow"))
    with pytest.raises(TraceError, match="slice"):
        trace[:1].add_supplement(Supplement(0, "shadow"))
    assert said(trace) == [(1, "shadow", {})]


def test_a_slice_has_the_supplements_of_its_steps_also_those_that_come_later():
    trace = trace_of(steps(0, 9))
    part = trace[3:6]
    for number in (2, 5, 6):
        trace.add_supplement(Supplement(number, "shadow", {"step": number}))
    assert said(part) == [(5, "shadow", {"step": 5})]
    assert part.supplement(5, "shadow") == {"step": 5} and part.supplement(6, "shadow") is None
    assert said(part[:1]) == [] and said(trace[0:0]) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_recording_has_each_fact_when_it_comes(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    trace = trace_of(steps(0, 1))
    trace.add_supplement(Supplement(0, "shadow", {"early": True}))
    writer = trace.record_to(path)
    trace.append(step(2))
    trace.add_supplement(Supplement(1, "shadow", {"layer": 4}))
    assert said(Trace.load(path)) == said(trace)  # before anything is closed
    trace.append(step(3))
    trace.add_supplement(Supplement(2, "shadow", {"layer": 5}))
    writer.close("done")
    loaded = Trace.load(path)
    assert list(loaded) == list(trace) and said(loaded) == said(trace) and not loaded.problems
    loaded.save(tmp_path / "saved.jsonl")
    each = ["step", "supplement"]
    assert kinds(tmp_path / "saved.jsonl") == ["meta", *each, *each, *each, "step", "end"]
    again = Trace.load(tmp_path / "saved.jsonl")
    again.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "saved.jsonl").read_bytes()


def test_a_fact_may_come_after_the_end_of_its_recording(tmp_path):
    trace = trace_of(steps(0, 1))
    trace.record_to(tmp_path / "run.jsonl").close("done")
    trace.end = "done"
    trace.add_supplement(Supplement(1, "shadow", {"layer": 4}))
    assert trace.supplement(1, "shadow") == {"layer": 4}
    assert Trace.load(tmp_path / "run.jsonl").supplements == []


def test_a_fact_finds_the_trace_that_continues_the_run(tmp_path):
    old = trace_of(steps(0, 7))
    writer = old.record_to(tmp_path / "run.jsonl")
    old.add_supplement(Supplement(3, "shadow", {"in": "both"}))
    old.add_supplement(Supplement(5, "shadow", {"in": "both"}))
    new = old.continued_from(Keyframe(4))
    before = said(old)
    old.add_supplement(Supplement(6, "shadow", {"in": "new"}))  # by a thread that knows the old trace only
    old.add_supplement(Supplement(2, "shadow", {"in": "file"}))  # a step that is forgotten
    new.append(step(8))
    new.add_supplement(Supplement(8, "shadow", {"in": "new"}))
    writer.close("done")
    assert said(old) == before
    assert said(new) == [(5, "shadow", {"in": "both"}), (6, "shadow", {"in": "new"}), (8, "shadow", {"in": "new"})]
    assert {number: facts["in"] for number, _, facts in said(Trace.load(tmp_path / "run.jsonl"))} == {
        2: "file",
        3: "both",
        5: "both",
        6: "new",
        8: "new",
    }


def test_a_trace_that_is_continued_is_not_added_to(tmp_path):
    old = trace_of(steps(0, 7))
    new = old.continued_from(Keyframe(4))
    for add in (
        lambda: old.append(step(8)),
        lambda: old.add_request(RequestInfo("a", 1)),
        lambda: old.continued_from(Keyframe(5)),
    ):
        with pytest.raises(TraceError, match="continued by another one"):
            add()
    with old.record_to(tmp_path / "run.jsonl"):  # a recording is of the run
        new.append(step(8))
    assert [record.step for record in Trace.load(tmp_path / "run.jsonl")] == [4, 5, 6, 7, 8]


def test_no_fact_is_lost_between_two_threads(tmp_path):
    """One thread takes steps and forgets the old ones, another knows something about each step a little later."""
    trace = trace_of([])
    path = tmp_path / "run.jsonl"
    writer = trace.record_to(path)
    taken: queue.SimpleQueue[tuple[int, Trace] | None] = queue.SimpleQueue()

    def tell():
        while (item := taken.get()) is not None:
            number, found_in = item
            found_in.add_supplement(Supplement(number, "late", {"step": number}))

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    for number in range(2000):
        trace.append(step(number))
        taken.put((number, trace))
        if number % 40 == 39:
            trace = trace.continued_from(Keyframe(number - 20))
    taken.put(None)
    teller.join(60)
    writer.close("done")
    assert {supplement.step for supplement in trace.supplements} == {record.step for record in trace}
    assert {supplement.step for supplement in Trace.load(path).supplements} == set(range(2000))


def test_a_follower_sees_the_fact(tmp_path):
    meta = TraceMeta()
    with TraceWriter(tmp_path / "t-00000.jsonl", meta) as writer:
        follower = TraceFollower(tmp_path)
        for record in steps(0, 2):
            writer.write(record)
        writer.write(Supplement(1, "shadow", {"layer": 1}))
        assert follower.poll() == 3 and said(follower.trace) == [(1, "shadow", {"layer": 1})]
        assert follower.poll() == 0
    with TraceWriter(tmp_path / "t-00001.jsonl", meta) as writer:
        writer.write(Keyframe(3))
        writer.write(Supplement(2, "shadow", {"layer": 2}))  # of a step in the file before
        writer.write(StepRecord(3))
        late = TraceFollower(tmp_path / "t-00001.jsonl")
        assert follower.poll() == 1
        assert follower.trace.supplement(2, "shadow") == {"layer": 2}
        assert [record.step for record in late.trace] == [3] and late.trace.supplements == []
    follower.stop()
    late.stop()


def test_saving_and_loading_keeps_every_supplement_of_a_run(tmp_path):
    trace = one_trace()
    assert len(trace.supplements) >= 3
    trace[8:].save(tmp_path / "part.jsonl")
    part = Trace.load(tmp_path / "part.jsonl")
    assert said(part) == [entry for entry in said(trace) if entry[0] >= 8] != []
