"""Hashes of blocks in recordings: which prefixes are equal, and nothing else."""

import os
import random
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import vllm_double
from vllm_recordings import RecordingDouble

from workbench.simulation.workload import read_workload
from workbench.trace import Trace, TraceMeta
from workbench.trace.recorders.block_hashes import BlockHasher
from workbench.trace.recorders.messages import Arrival
from workbench.trace.recorders.run_key import KEY_BYTES, run_key
from workbench.trace.recorders.settings import RecordingSettings

DIGITS = 16


def arrival(tokens, *, salt="", lora="", inputs=()):
    return Arrival("r", len(tokens), 8, 0, 0.0, 0.0, list(tokens), salt, lora, list(inputs))


def hashes_of(tokens, *, key=b"key", block_size=4, lookahead=0, output=(), **content):
    hasher = BlockHasher(key, TraceMeta(config={"block_size": block_size}), lookahead)
    text = hasher.begin(arrival(tokens, **content)) + hasher.end("r", output)
    return [text[place : place + DIGITS] for place in range(0, len(text), DIGITS)]


def common(a, b):
    return next((place for place, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_hashes_are_equal_exactly_as_far_as_prefixes_are(lookahead):
    rng = random.Random(lookahead)
    for _ in range(300):
        one = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        other = [*one[: rng.randint(0, len(one))], *[rng.randrange(3) for _ in range(rng.randint(1, 20))]]
        cut = rng.randint(1, len(other))
        first, second = (
            hashes_of(one, lookahead=lookahead),
            hashes_of(other[:cut], lookahead=lookahead, output=other[cut:]),
        )
        assert len(second) == max(0, len(other) - lookahead) // 4
        assert common(first, second) == max(0, common(one, other) - lookahead) // 4


def test_adapter_salt_inputs_and_key_are_part_of_a_hash():
    tokens = list(range(16))
    plain = hashes_of(tokens)
    for content in ({"salt": "s"}, {"lora": "l"}, {"key": b"other"}):
        assert common(plain, hashes_of(tokens, **content)) == 0
    image = hashes_of(tokens, inputs=[("image", 6, 4)])
    assert common(plain, image) == 1  # block 1 is the first that holds it
    assert common(image, hashes_of(tokens, inputs=[("another", 6, 4)])) == 1
    assert common(image, hashes_of(tokens, inputs=[("image", 7, 3)])) == 1
    assert hashes_of([]) == []


def record_double(workload, folder, monkeypatch, **environ):
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(folder))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config, arrivals = read_workload(workload)
    scheduler = RecordingDouble(config)
    vllm_double.drive(scheduler, arrivals)
    scheduler.shutdown()
    (path,) = folder.iterdir()
    return path


WORKLOAD = {
    "config": {"block_size": 4, "num_blocks": 64},
    "requests": [
        {"id": name, "prompt": {"len": length, "seed": "s"}, "max_tokens": 9, "arrival_step": step}
        for name, length, step in (("a", 21, 0), ("b", 30, 4), ("c", 3, 9))
    ],
}


def test_a_default_recording_has_hashes_and_no_tokens(tmp_path, monkeypatch):
    path = record_double(WORKLOAD, tmp_path / "default", monkeypatch)
    trace = Trace.load(path)
    assert not trace.problems and trace.meta.prefix_hashes.block_size == 4
    a, b, c = (trace.requests[name].block_hashes for name in "abc")
    assert (len(a), len(b), c) == (5 * DIGITS, 7 * DIGITS, "") and b.startswith(a)
    ended = {name: text for said in trace.supplements for name, text in said.facts.items()}
    assert {name: len(text) // DIGITS for name, text in ended.items()} == {"a": 7 - 5, "b": 9 - 7, "c": 3}
    assert not any(info.prompt_token_ids for info in trace.requests.values())


def test_hashes_can_be_left_out_and_token_ids_are_for_the_user_alone(tmp_path, monkeypatch):
    public = record_double(WORKLOAD, tmp_path / "off", monkeypatch, WORKBENCH_TRACE_HASHES="0")
    trace = Trace.load(public)
    assert not trace.meta.prefix_hashes and not trace.supplements
    assert not any(info.block_hashes for info in trace.requests.values())
    private = record_double(WORKLOAD, tmp_path / "tokens", monkeypatch, WORKBENCH_TRACE_TOKENS="1")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) != 0o600


def test_ranks_share_a_key_in_a_file_that_the_last_one_removes(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_key("run", {}) as one:
        (path,) = tmp_path.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(one) == KEY_BYTES
        script = (
            "from workbench.trace.recorders.run_key import run_key\nwith run_key('run', {}) as key: print(key.hex())"
        )
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        said = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
        assert said.stdout.strip() == one.hex()
        assert path.exists()  # this rank still records
    assert not list(tmp_path.iterdir())
    with run_key("run", {}) as later, run_key("", {}) as alone, run_key("", {}) as other:
        assert len({one, later, alone, other}) == 4


def test_the_file_of_a_killed_run_is_not_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = Path(tmp_path) / f"workbench-{os.getuid()}-run.key"
    left.write_bytes(b"x" * KEY_BYTES)
    left.chmod(0o600)
    with run_key("run", {}) as key:
        assert key != b"x" * KEY_BYTES
    left.write_bytes(b"x" * KEY_BYTES)
    left.chmod(0o644)
    with pytest.raises(PermissionError, match="can be read by others"), run_key("run", {}):
        pass


def test_the_launcher_can_give_the_key():
    secret = "0123456789abcdef" * 2
    with run_key("", {"WORKBENCH_TRACE_KEY": secret}) as one, run_key("x", {"WORKBENCH_TRACE_KEY": secret}) as other:
        assert one == other
    with pytest.raises(ValueError, match="32 characters"):
        RecordingSettings.from_environment({"WORKBENCH_TRACE_KEY": "short"})


def test_the_header_says_nothing_about_the_key(tmp_path, monkeypatch):
    secret = "a launcher's secret of 32 characters or more"
    path = record_double(WORKLOAD, tmp_path / "x", monkeypatch, WORKBENCH_TRACE_KEY=secret, WORKBENCH_TRACE_GZIP="0")
    with run_key("", {"WORKBENCH_TRACE_KEY": secret}) as key:
        text = path.read_text()
        assert key.hex() not in text and secret not in text
        assert BlockHasher(key, TraceMeta(config={"block_size": 4})).described == Trace.load(path).meta.prefix_hashes
