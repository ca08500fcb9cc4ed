"""Recordings with hashes from anywhere: a changed file is read, or refused by name."""

import gzip
import json
import random
from pathlib import Path

from fuzz_readers import replay
from tiers import examples

from workbench.trace import Trace

RECORDING = Path(__file__).parents[1] / "data" / "vllm-private" / "sessions-sync-default.jsonl.gz"
ODD = (None, -1, 0, 1.5, 2**70, True, "", "x", "G" * 16, "0" * 17, "ab" * 900, [], [1], {}, {"a": 1})
NEW = ("prefix_hashes", "key_id", "block_size", "num_lookahead_tokens", "block_hashes", "facts", "name", "step")


def changed(value, rng, depth=0):
    """The value with something odd in one place; places of the new fields more often than others."""
    if not isinstance(value, dict) or depth == 3 or not value:
        return rng.choice(ODD)
    known = [name for name in value if name in NEW]
    name = rng.choice(known if known and rng.random() < 0.7 else list(value))
    if rng.random() < 0.15:
        return {key: kept for key, kept in value.items() if key != name}
    return {**value, name: changed(value[name], rng, depth + 1) if rng.random() < 0.6 else rng.choice(ODD)}


def test_changed_recordings_are_read_or_refused_by_name(tmp_path):
    lines = gzip.decompress(RECORDING.read_bytes()).splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    rng = random.Random(32)
    outcomes = {True: 0, False: 0}
    for _ in range(examples(400)):
        kind = rng.choice(["meta", "request", "supplement", "supplement", "request", "step"])
        place = rng.choice([index for index, its in enumerate(kinds) if its == kind])
        line = json.dumps(changed(json.loads(lines[place]), rng)).encode()
        data = b"\n".join([*lines[:place], line, *lines[place + 1 :]]) + b"\n"
        outcomes[replay("trace", data, tmp_path)] += 1
    assert min(outcomes.values()) > 5, outcomes


def test_a_clock_that_runs_backwards_is_read(tmp_path):
    lines = gzip.decompress(RECORDING.read_bytes()).splitlines()
    place = next(i for i, line in enumerate(lines) if b'"kind":"step","step":61,' in line)
    line = json.dumps({**json.loads(lines[place]), "time": 1.5}).encode()
    assert replay("trace", b"\n".join([*lines[:place], line, *lines[place + 1 :]]) + b"\n", tmp_path)


def test_the_recording_is_read_as_it_is(tmp_path):
    assert Trace.load(RECORDING).meta.prefix_hashes
    assert replay("trace", gzip.decompress(RECORDING.read_bytes()), tmp_path)
