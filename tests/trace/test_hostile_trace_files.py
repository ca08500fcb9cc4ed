"""Files that are not traces, and files that lie."""

from __future__ import annotations

import gzip
import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from trace_checks import same_folder, use_all_of
from trace_helpers import one_trace

from workbench.trace import (
    SCHEMA_VERSION,
    Trace,
    TraceError,
    TraceMeta,
    file,
)


def refused(tmp_path, content: bytes | str, name="t.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError) as refusal:
        Trace.load(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


META = b'{"kind":"meta","schema_version":4,"config":{"block_size":4,"num_blocks":10}}\n'


def test_another_version_is_refused_by_name(tmp_path):
    for version in (0, 1, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1, 99):
        message = refused(tmp_path, f'{{"kind":"meta","schema_version":{version},"new":[1]}}\n{{"kind":"odd"}}\n')
        assert f"schema version {version}" in message
        assert f"reads version {SCHEMA_VERSION}" in message


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
        (b'{"kind":"step","schema_version":4,"step":0}\n', "not a trace from its beginning"),
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
        ([{"kind": "keyframe", "step": 3, "free_block_ids": [1, -4, 3]}], "names a block twice"),
        ([{"kind": "keyframe", "step": 3, "free_block_ids": [9, -8, 10]}], "holds block 10, the pool has"),
        ([{"kind": "keyframe", "step": 3, "free_block_ids": [1, 1 - 2**22]}], "more blocks than the pool's 9"),
        ([{"kind": "keyframe", "step": 3, "cached_block_ids": [-3]}], "more blocks than the pool's 9"),
        ([{"kind": "keyframe", "step": 3, "cached_block_ids": [1, -(2**22)]}], "cached_block_ids"),
        ([{"kind": "keyframe", "step": 3, "block_tables": {"a": [1]}}], "holds blocks but has no request line"),
        (
            [REQUEST, {"kind": "keyframe", "step": 3, "block_tables": {"a": [1]}, "num_kv_computed": {"a": 5}}],
            "5 tokens computed, its 1 blocks hold 4",
        ),
        ([{"kind": "keyframe", "step": 3}, step(5)], "step 5 follows step 2"),
        ([supplement(0)], "supplement 'shadow' names step 0, the trace has 0 steps"),
        ([step(0), supplement(1)], "names step 1, the trace has 1 step"),
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
    message = refused(tmp_path, json.dumps({"kind": "meta", "schema_version": 4, "config": config}) + "\n")
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


@settings(same_folder, max_examples=examples(150))
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


@settings(same_folder, max_examples=examples(100))
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
