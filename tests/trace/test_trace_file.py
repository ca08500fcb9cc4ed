"""Trace files: exact round trips, cut files, files that are no traces, and files that lie."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
import time
from random import Random

import msgspec
import numpy as np
import pytest
import trace_helpers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_helpers import one_trace, traces

from workbench.trace import (
    SCHEMA_VERSION,
    Chunk,
    KernelLaunch,
    RequestInfo,
    StepRecord,
    Trace,
    TraceError,
    TraceMeta,
    TraceWriter,
    file,
    storage,
)
from workbench.viz.layout.columns import columns_of

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def assert_same_trace(one: Trace, other: Trace) -> None:
    assert one.meta == other.meta
    assert dict(one.requests) == dict(other.requests)
    assert list(one.requests) == list(other.requests)
    assert list(one) == list(other)
    assert one.supplements == other.supplements
    assert [record.block_tables for record in one] == [record.block_tables for record in other]
    for mine, theirs in zip(one, other):
        np.testing.assert_array_equal(mine.slot_mapping, theirs.slot_mapping)


def use_all_of(trace: Trace) -> None:
    """Use a loaded trace as views do: nothing may fail."""
    for index, record in enumerate(trace):
        assert len(record.positions) == len(record.slot_mapping) == record.num_tokens
        assert not len(record.slot_mapping) or record.slot_mapping.min() >= 0
        _ = record.events, record.not_scheduled, record.block_tables, repr(record)
        try:
            record.mask()
        except ValueError as problem:
            assert "cells" in str(problem)
        if trace.num_blocks is not None and trace.num_blocks < 10_000:
            trace.pool_state(index)
    for supplement in trace.supplements:
        assert trace.supplement(supplement.step, supplement.name) is supplement.facts
    assert columns_of(trace).num_steps == len(trace)
    assert repr(trace.metrics())
    assert trace.to_dict()


@settings(same_folder, max_examples=40)
@given(traces(), st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_round_trip(tmp_path, trace, suffix):
    trace.save(tmp_path / f"t{suffix}")
    loaded = Trace.load(tmp_path / f"t{suffix}")
    assert_same_trace(trace, loaded)
    assert loaded.end == trace.end
    assert loaded.problems == []
    loaded.save(tmp_path / f"again{suffix}")
    assert (tmp_path / f"t{suffix}").read_bytes() == (tmp_path / f"again{suffix}").read_bytes()


def test_the_file_of_a_run_is_readable_lines(tmp_path):
    trace = one_trace()
    assert any(record.preempted for record in trace)
    assert any(chunk.num_cached_tokens for record in trace for chunk in record.chunks)
    trace.save(tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0]["kind"] == "meta"
    assert lines[0]["schema_version"] == SCHEMA_VERSION
    assert lines[-1] == {"kind": "end", "reason": "done", "num_steps": len(trace)}
    seen = set()
    for line in lines[1:-1]:
        if line["kind"] == "request":
            seen.add(line["request_id"])
        else:
            assert seen.issuperset(line.get("arrived", ()))


# -- cut files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    return one_trace(12)


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


# -- whole or not at all ---------------------------------------------------------------------------------------


def test_save_replaces_only_when_complete(tmp_path, whole, monkeypatch):
    path = tmp_path / "t.jsonl"
    path.write_text("what was there before")
    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "close", lambda self, reason="": (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            whole.save(path)
    assert path.read_text() == "what was there before"
    assert os.listdir(tmp_path) == ["t.jsonl"]
    whole.save(path, progress=True)
    assert list(Trace.load(path, progress=True)) == list(whole)
    assert os.listdir(tmp_path) == ["t.jsonl"]


def test_other_endings_are_refused(tmp_path, whole):
    for name in ("t.json", "t.gz", "t", "t.jsonl.zip"):
        with pytest.raises(TraceError, match=rf"saved as \.jsonl or \.jsonl\.gz, not as '{name}'"):
            whole.save(tmp_path / name)
    with pytest.raises(OSError, match="nowhere"):
        whole.save(tmp_path / "nowhere" / "t.jsonl")
    assert os.listdir(tmp_path) == []


def test_values_that_json_has_no_word_for(tmp_path):
    trace = Trace(TraceMeta(config={"block_size": 4, "path": os}))
    trace.add_request(RequestInfo("lone \ud800 surrogate", 1, prompt="\udfff", sampling={"sampler": len}))
    details = {"bytes": np.int64(7), "per_block": np.arange(3)}
    trace.append(StepRecord(0, kernel=KernelLaunch("cpu", details=details)))
    trace.save(tmp_path / "t.jsonl")
    loaded = Trace.load(tmp_path / "t.jsonl")
    assert list(loaded.requests) == ["lone \ufffd surrogate"]
    assert loaded[0].kernel.details == {"bytes": 7, "per_block": [0, 1, 2]}
    assert loaded.requests["lone \ufffd surrogate"].sampling == {"sampler": repr(len)}


# -- files that are no traces ----------------------------------------------------------------------------------


def refused(tmp_path, content: bytes | str, name="t.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError) as refusal:
        Trace.load(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


META = b'{"kind":"meta","schema_version":1,"config":{"block_size":4,"num_blocks":10}}\n'


def test_another_version_is_refused_by_name(tmp_path):
    for version in (0, SCHEMA_VERSION + 1, 99):
        message = refused(tmp_path, f'{{"kind":"meta","schema_version":{version},"new":[1]}}\n{{"kind":"odd"}}\n')
        assert f"schema version {version}" in message
        assert f"versions 1 to {SCHEMA_VERSION}" in message


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "it is empty"),
        (b"\n", "no kind and schema_version"),
        (b"\x00" * 100, "is not a trace"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is not a trace"),
        (b'{"kind":"meta"}\n', "no kind and schema_version"),
        (b'{"kind":"meta","schema_version":"1"}\n', "no kind and schema_version"),
        (b"[" * 100_000 + b"\n", "is not a trace"),
        (b'{"kind":"step","schema_version":1,"step":0}\n', "not a trace from its beginning"),
        (b'{"meta": {"vllm": "0.33.0"}}\n{"step": 0}\n', "no kind and schema_version"),
        (META + META, "line 2: the meta line must be the first"),
        (META + b'{"kind":"end"}\n{"kind":"step","step":0}\n', "line 3: nothing may follow the end line"),
        (META + b'{"kind":"end","num_steps":3}\n', "line 2: the end line counts 3 steps"),
        (META + b'{"kind":"step","step":\n{"kind":"end"}\n', "line 2"),
        (META + b"\n", "line 2"),
        (META + b'{"kind":"surprise"}\n', "line 2: Invalid value 'surprise'"),
        (META + b'{"kind":"step","step":0,"x":' + b"[" * 100_000 + b"\n", "line 2"),
        (gzip.compress(b"not a trace at all\n", mtime=0), "no kind and schema_version"),
        (gzip.compress(META, mtime=0)[:-6] + b"\x55" * 6, "damaged gzip"),
    ],
)
def test_what_is_no_trace(tmp_path, content, reason):
    assert reason in refused(tmp_path, content)


def test_limits_on_size(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "MAX_LINE_BYTES", 10_000)
    assert "a line of more than 10000 bytes" in refused(tmp_path, META + b'{"kind":"step"' + b" " * 3_000_000)
    monkeypatch.setattr(file, "MAX_FILE_BYTES", 1_000_000)
    lines = b"".join(b'{"kind":"step","step":%d}\n' % step for step in range(100_000))
    bomb = gzip.compress(META + lines)
    assert len(bomb) < len(lines) / 5
    assert "more than 1000000 bytes" in refused(tmp_path, bomb, "bomb.jsonl.gz")


def test_several_gzip_streams_in_one_file(tmp_path, whole):
    whole.save(tmp_path / "t.jsonl")
    data = (tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "t.jsonl.gz").write_bytes(b"".join(gzip.compress(data[i : i + 500]) for i in range(0, len(data), 500)))
    assert_same_trace(Trace.load(tmp_path / "t.jsonl.gz"), whole)


# -- files that lie --------------------------------------------------------------------------------------------

REQUEST = {"kind": "request", "request_id": "a", "num_prompt_tokens": 8}
CHUNK = ["a", 0, 8, False, "new_final", 5, "complete", [1, 2], 0, 0, ""]


def step(number: int = 0, **fields) -> dict:
    return {"kind": "step", "step": number, **fields}


def supplement(number: int, **fields) -> dict:
    return {"kind": "supplement", "step": number, "name": "shadow", "facts": {"layer": 0}, **fields}


def changed(index: int, value) -> dict:
    chunk = list(CHUNK)
    chunk[index] = value
    return step(admitted=["a"], chunks=[chunk])


@pytest.mark.parametrize(
    "lines, reason",
    [
        ([REQUEST, REQUEST], "request 'a' arrives twice"),
        ([{**REQUEST, "prompt_token_ids": [1, 2]}], "num_prompt_tokens 8 and 2 prompt_token_ids"),
        ([{**REQUEST, "num_prompt_tokens": 10**12}], "num_prompt_tokens"),
        ([{**REQUEST, "num_prompt_tokens": 10**40}], "num_prompt_tokens"),
        ([{**REQUEST, "num_prompt_tokens": 0}], "num_prompt_tokens"),
        ([{**REQUEST, "arrival_time": -1.0}], "arrival_time"),
        ([{**REQUEST, "max_tokens": -1}], "max_tokens"),
        ([step(0), step(2)], "step 2 follows step 0"),
        ([step(0), step(0)], "step 0 follows step 0"),
        ([step(-1)], "step"),
        ([step(0, time=-0.5)], "time"),
        ([step(0, free_blocks=10)], "more free blocks than the pool's 9"),
        ([step(0, free_blocks=-1)], "free_blocks"),
        ([step(0, cached_block_ids=[2**40])], "cached_block_ids"),
        ([step(0, cached_block_ids=[10])], "cached_block_ids holds block 10, the pool has blocks 0 to 9"),
        ([step(0, unscheduled_block_ids={"a": [10]})], "unscheduled_block_ids holds block 10"),
        ([step(0, waiting=["ghost"])], "waiting of step 0 names 'ghost'"),
        ([REQUEST, step(chunks=[CHUNK])], "scheduled in step 0 but not admitted"),
        ([REQUEST, changed(1, -1)], "chunks"),
        ([REQUEST, changed(1, 4_000_000_000)], "chunks"),
        ([REQUEST, changed(2, 2_000_000_000)], "chunks"),
        ([REQUEST, changed(2, 0)], "chunks"),
        ([REQUEST, changed(2, 9)], "computes tokens [0, 9), its 2 blocks hold 8"),
        ([REQUEST, changed(7, [1])], "its 1 blocks hold 4"),
        ([REQUEST, changed(7, [1, 10])], "block 10, the pool has blocks 0 to 9"),
        ([REQUEST, changed(7, [1, -2])], "chunks"),
        ([REQUEST, changed(8, 4)], "4 cached tokens but starts at 0"),
        ([REQUEST, changed(4, "later")], "chunks"),
        ([REQUEST, changed(6, "mood")], "chunks"),
        ([REQUEST, changed(5, -7)], "chunks"),
        ([REQUEST, step(admitted=["a"], chunks=[CHUNK], token_budget=7)], "schedules 8 tokens, its token_budget is 7"),
        ([REQUEST, step(admitted=["a"], chunks=[CHUNK, CHUNK])], "schedules a request twice"),
        (
            [REQUEST, step(admitted=["a"], chunks=[CHUNK]), step(1, chunks=[["a", 9, *CHUNK[2:]]])],
            "starts at 9, computed so far are 8",
        ),
        (
            [REQUEST, step(admitted=["a"], finished=["a"], chunks=[CHUNK]), step(1, chunks=[CHUNK])],
            "scheduled in step 1 but not admitted",
        ),
        (
            [REQUEST, {**changed(0, "a"), "kernel": {"backend": "cpu", "work_items": [[3, 0, 8, 0, 8, 0, 1]]}}],
            "does not fit the chunks",
        ),
        (
            [REQUEST, {**changed(0, "a"), "kernel": {"backend": "cpu", "work_items": [[0, 0, 8, 0, 99, 0, 1]]}}],
            "does not fit the chunks",
        ),
        (
            [REQUEST, step(admitted=["a"], chunks=[CHUNK]), step(1, resumed=["a"], chunks=[CHUNK])],
            "admitted in step 1 but runs already",
        ),
        ([step(0), {"kind": "keyframe", "step": 0}], "a keyframe must come before the first step"),
        ([{"kind": "keyframe", "step": 3, "free_block_ids": [1, 1]}], "names a block twice"),
        ([{"kind": "keyframe", "step": 3, "block_tables": {"a": [1]}}], "holds blocks but has no request line"),
        (
            [REQUEST, {"kind": "keyframe", "step": 3, "block_tables": {"a": [1]}, "num_kv_computed": {"a": 5}}],
            "5 tokens computed, its 1 blocks hold 4",
        ),
        ([{"kind": "keyframe", "step": 3}, step(5)], "step 5 follows step 2"),
        ([supplement(0)], "supplement 'shadow' names step 0, the trace has 0 steps"),
        ([step(0), supplement(1)], "names step 1, the trace has 1 steps"),
        ([step(0), supplement(10**9)], "names step 1000000000"),
        ([step(0), supplement(2**40)], "step"),
        ([step(0), supplement(-1)], "step"),
        ([step(0), supplement(0), supplement(0)], "step 0 has a supplement 'shadow' already"),
        ([step(0), supplement(0, name="")], "name"),
        ([step(0), supplement(0, name="n" * 101)], "name"),
        ([step(0), supplement(0, name=7)], "name"),
        ([step(0), supplement(0, facts=[1])], "facts"),
        ([{"kind": "keyframe", "step": 3}, supplement(3)], "names step 3, the trace has 0 steps"),
    ],
)
def test_contents_that_contradict_themselves(tmp_path, lines, reason):
    message = refused(tmp_path, META + b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    assert reason in message
    assert f"line {1 + len(lines)}:" in message


@pytest.mark.parametrize(
    "config",
    [{"block_size": 0}, {"block_size": -16}, {"block_size": "16"}, {"block_size": 10**9}, {"num_blocks": 10**10}],
)
def test_pools_that_cannot_be(tmp_path, config):
    message = refused(tmp_path, json.dumps({"kind": "meta", "schema_version": 1, "config": config}) + "\n")
    assert f"config {next(iter(config))} must be an integer from 1" in message
    with pytest.raises(TraceError, match=next(iter(config))):
        Trace(TraceMeta(config=config))


def test_long_names_are_not_repeated_in_full(tmp_path):
    line = json.dumps(step(waiting=["w" * 100_000])).encode()
    assert len(refused(tmp_path, META + line + b"\n")) < 400


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    yield path


STRANGE = [
    None,
    True,
    -1,
    0,
    1,
    7,
    10**9,
    2**63,
    10**30,
    1.5,
    -0.0,
    1e300,
    "",
    "a",
    "\u0000",
    [],
    {},
    [[]],
    ["r0"],
    {"r0": 1},
]


@settings(same_folder, max_examples=150)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_fuzz_of_values(tmp_path, random, num_changes):
    """Any value of a good file is replaced by another: the file is refused, or all views work on it."""
    path = tmp_path / "t.jsonl"
    FUZZ_SOURCE.save(path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for _ in range(num_changes):
        line = random.choice(lines)
        *where, last = random.choice([found for found in leaves(line) if found])
        container = line
        for key in where:
            container = container[key]
        choice = random.random()
        if choice < 0.7:
            container[last] = random.choice(STRANGE)
        elif isinstance(container, list) and choice < 0.9:
            container.insert(last, random.choice(STRANGE))
        else:
            del container[last]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        trace = Trace.load(path)
    except TraceError:
        return
    use_all_of(trace)


@settings(same_folder, max_examples=100)
@given(st.randoms(use_true_random=False), st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_fuzz_of_bytes(tmp_path, random: Random, suffix):
    path = tmp_path / f"t{suffix}"
    FUZZ_SOURCE.save(path)
    data = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data))
        kind = random.randrange(4)
        if kind == 0:
            data[at] = random.randrange(256)
        elif kind == 1:
            del data[at : at + random.randint(1, 50)]
        elif kind == 2:
            data[at:at] = random.randbytes(random.randint(1, 10))
        else:
            data[at:at] = data[at : at + random.randint(1, 200)]
    path.write_bytes(data)
    try:
        trace = Trace.load(path)
    except TraceError:
        return
    use_all_of(trace)


FUZZ_SOURCE = one_trace(10)


def test_lines_are_encoded_as_they_are_decoded():
    chunk = Chunk("a", 0, 1, False, "decode", None, "complete")
    record = StepRecord(3, chunks=(chunk,), timings={"forward": 0.25})
    assert msgspec.json.decode(file.encode_line(record), type=StepRecord) == record
