"""A trace that is read while it is written."""

import gzip
import threading

import pytest
from trace_helpers import one_trace

from workbench.trace import TraceError, TraceFollower, TraceMeta, TraceWriter
from workbench.trace.line_codec import encode_line
from workbench.trace.lines import RequestInfo
from workbench.trace.records import StepRecord
from workbench.trace.storage import lines_of


def write_slowly(trace, writer):
    """Yields after every line."""
    for line in lines_of(trace):
        writer.write(line)
        yield line


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_every_step_is_there_as_soon_as_it_is_written(name, tmp_path):
    whole = one_trace()
    writer = TraceWriter(tmp_path / name, whole.meta)
    follower = TraceFollower(tmp_path / name)
    assert follower.trace.meta == whole.meta
    num_steps = 0
    for line in write_slowly(whole, writer):
        assert follower.poll() == isinstance(line, StepRecord)
        num_steps += isinstance(line, StepRecord)
        assert len(follower.trace) == num_steps
    assert follower.trace.end == ""
    writer.close("done")
    assert follower.poll() == 0
    assert follower.trace.end == "done"
    assert list(follower.trace) == list(whole)
    assert [record.block_tables for record in follower.trace] == [record.block_tables for record in whole]
    follower.stop()


def test_a_line_that_is_half_written_waits(tmp_path):
    whole = one_trace()
    path = tmp_path / "run.jsonl"
    lines = b"".join(map(encode_line, [whole.meta, *lines_of(whole)]))
    first = lines.index(b"\n") + 1
    path.write_bytes(lines[:first])
    with path.open("ab") as file:
        follower = TraceFollower(path)
        for start in range(first, len(lines), 97):
            file.write(lines[start : start + 97])
            file.flush()
            follower.poll()
    assert list(follower.trace) == list(whole)
    follower.stop()


def test_a_recording_is_followed_into_its_next_file(tmp_path):
    whole = one_trace()
    meta = whole.meta
    half = len(whole) // 2
    parts = [whole[:half], whole[half:]]
    follower = None
    for index, part in enumerate(parts):
        writer = TraceWriter(tmp_path / f"t-0000{index}.jsonl", meta)
        follower = follower or TraceFollower(tmp_path)
        for _ in write_slowly(part, writer):
            follower.poll()
        writer.close("done" if index else "")
    follower.poll()
    assert follower.path.name == "t-00001.jsonl"
    assert [record.step for record in follower.trace] == [record.step for record in whole]
    assert list(follower.trace.requests) == list(whole.requests)
    assert follower.trace.end == "done"
    for index in range(len(whole)):
        assert follower.trace.pool_state(index).free_queue.tolist() == whole.pool_state(index).free_queue.tolist()
    follower.stop()


def test_a_follower_that_comes_late_begins_at_the_keyframe(tmp_path):
    whole = one_trace()
    half = len(whole) // 2
    whole[half:].save(tmp_path / "t-00001.jsonl.gz")
    follower = TraceFollower(tmp_path)
    assert [record.step for record in follower.trace] == list(range(half, len(whole)))
    assert follower.trace[0].block_tables == whole[half].block_tables
    follower.stop()


def test_the_thread_reads_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.trace.follower.POLL_SECONDS", 0.001)
    whole = one_trace()
    writer = TraceWriter(tmp_path / "run.jsonl", whole.meta)
    seen = threading.Event()
    with TraceFollower(tmp_path / "run.jsonl") as follower:
        monkeypatch.setattr(follower, "poll", lambda poll=follower.poll: (poll(), seen.set()))
        for _ in write_slowly(whole, writer):
            pass
        seen.clear()
        assert seen.wait(20)
        seen.clear()
        assert seen.wait(20)
        assert len(follower.trace) == len(whole)
    assert not follower._thread.is_alive()
    writer.close()


def test_damage_ends_the_following_with_its_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("workbench.trace.follower.POLL_SECONDS", 0.001)
    path = tmp_path / "run.jsonl"
    meta, info = TraceMeta(config={"block_size": 4}), RequestInfo("a", 3)
    path.write_bytes(encode_line(meta) + encode_line(info))
    follower = TraceFollower(path)
    follower.start()
    with path.open("ab") as file:
        file.write(b'{"kind":"step","step":-1}\n')
    follower._thread.join(20)
    assert "line 3" in follower.problem and "step" in follower.problem
    assert list(follower.trace.requests) == ["a"]
    follower.stop()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.jsonl", b"", "no complete first line"),
        ("run.jsonl", b'{"kind":"meta"', "no complete first line"),
        ("run.jsonl", b"nonsense\n", "not a trace"),
        ("run.jsonl", b'{"kind":"meta","schema_version":99}\n', "version 99"),
        ("run.jsonl.gz", b"not gzip\n", "damaged gzip"),
        ("run.jsonl.gz", gzip.compress(b"nonsense\n", mtime=0), "not a trace"),
        ("run.txt", b"", "saved as .jsonl"),
    ],
)
def test_what_is_not_a_trace_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message):
        TraceFollower(tmp_path / name)


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no trace file"):
        TraceFollower(tmp_path)
