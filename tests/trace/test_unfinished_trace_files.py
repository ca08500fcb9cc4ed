"""Trace files that are cut, still growing, or ended by a full disk."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import trace_helpers
from trace_checks import assert_same_trace, use_all_of
from trace_helpers import one_trace

from workbench.trace import (
    Trace,
    TraceError,
    storage,
)


def _line_ends(data: bytes) -> list[int]:
    return [index for index, byte in enumerate(data[:-2]) if byte == ord("\n")]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_cut_at_any_byte(tmp_path, whole, suffix, caplog):
    path, cut = tmp_path / f"t{suffix}", tmp_path / f"cut{suffix}"
    whole.save(path)
    data = path.read_bytes()
    first_line = data.index(b"\n") if suffix == ".jsonl" else 0
    steps = list(whole)
    lengths = set()
    edges = [end + shift for end in _line_ends(data) for shift in (-1, 0, 1, 2)] if suffix == ".jsonl" else []
    offsets = sorted({*range(300), *range(300, len(data), 17), *range(len(data) - 60, len(data)), *edges})
    for offset in offsets:
        cut.write_bytes(data[:offset])
        caplog.clear()
        try:
            part = Trace.load(cut)
        except TraceError as problem:
            assert "is not a trace" in str(problem)
            assert offset < first_line or (suffix == ".jsonl.gz" and not lengths), f"offset {offset}: {problem}"
            continue
        lengths.add(len(part))
        assert list(part) == steps[: len(part)]
        if offset < len(data) - 1:
            assert part.end == "cut" or suffix == ".jsonl.gz"  # a gzip file may lack only its checksum
        if part.end == "cut":
            assert len(part.problems) == 1
            assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert lengths == set(range(len(steps) + 1)) if suffix == ".jsonl" else max(lengths) == len(steps)


def test_saved_while_it_grows(tmp_path, whole):
    """A file that is written at any moment of a growing trace can be read."""
    growing = Trace(whole.meta)
    stop = threading.Event()

    def grow():
        arrivals = list(whole.requests.values())
        for record in whole:
            while arrivals and arrivals[0].arrival_step <= record.step:
                growing.add_request(arrivals.pop(0))
            growing.append(record)
            time.sleep(0.001)
        stop.set()

    thread = threading.Thread(target=grow)
    thread.start()
    while not stop.is_set():
        growing.save(tmp_path / "t.jsonl")
        loaded = Trace.load(tmp_path / "t.jsonl")
        assert list(loaded) == list(whole)[: len(loaded)]
    thread.join()


def test_a_killed_recording_is_readable(tmp_path):
    """Kill -9 in the middle of a run: every step that was appended is in the file."""
    program = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(trace_helpers.__file__)!r})
from trace_helpers import one_trace
from workbench.trace import Trace
source = one_trace(20)
traces = [Trace(source.meta) for _ in sys.argv[1:]]
writers = [trace.record_to(path) for trace, path in zip(traces, sys.argv[1:])]
for trace in traces:
    for info in source.requests.values():
        trace.add_request(info)
    for record in source[:15]:
        trace.append(record)
os.kill(os.getpid(), 9)
"""
    paths = [str(tmp_path / "plain.jsonl"), str(tmp_path / "zipped.jsonl.gz")]
    done = subprocess.run([sys.executable, "-c", program, *paths])
    assert done.returncode == -9
    expected = list(one_trace(20))[:15]
    for path in paths:
        loaded = Trace.load(path)
        assert list(loaded) == expected
        assert loaded.end == "cut"
        use_all_of(loaded)


def test_an_unfinished_file_can_be_read_while_it_grows(tmp_path, whole):
    trace = Trace(whole.meta)
    with trace.record_to(tmp_path / "live.jsonl"):
        for info in whole.requests.values():
            trace.add_request(info)
        for index, record in enumerate(whole):
            trace.append(record)
            assert len(Trace.load(tmp_path / "live.jsonl")) == index + 1
    loaded = Trace.load(tmp_path / "live.jsonl")
    assert_same_trace(trace, loaded)
    assert (loaded.end, loaded.problems) == ("", [])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_not_the_run(tmp_path, whole, caplog):
    trace = Trace(whole.meta)
    writer = trace.record_to(tmp_path / "t.jsonl")
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for info in whole.requests.values():
        trace.add_request(info)
    for record in whole:
        trace.append(record)
    assert len(trace) == len(whole)
    assert [record.message for record in caplog.records] == [
        f"recording to {writer.path} stopped: [Errno 28] No space left on device"
    ]


def test_a_recording_that_is_ended_while_a_step_comes(tmp_path, whole, monkeypatch):
    trace = Trace(whole.meta)
    for info in whole.requests.values():
        trace.add_request(info)
    writer = trace.record_to(tmp_path / "t.jsonl")
    trace.append(whole[0])
    write = writer.write

    def close_first(line):
        writer.write = write
        writer.close()
        write(line)

    monkeypatch.setattr(writer, "write", close_first)
    trace.append(whole[1])
    trace.append(whole[2])
    assert len(trace) == 3 and len(Trace.load(tmp_path / "t.jsonl")) == 1


def test_a_recording_misses_no_step_that_comes_while_it_catches_up(tmp_path, whole, monkeypatch):
    trace = Trace(whole.meta)
    for info in whole.requests.values():
        trace.add_request(info)
    trace.append(whole[0])
    engine = threading.Thread(target=lambda: [trace.append(record) for record in whole[1:]])
    lines_of = storage.lines_of

    def slow_lines(trace):
        yield from lines_of(trace)
        engine.start()
        engine.join(0.2)

    monkeypatch.setattr(storage, "lines_of", slow_lines)
    with trace.record_to(tmp_path / "t.jsonl"):
        engine.join()
    assert list(Trace.load(tmp_path / "t.jsonl")) == list(whole)
