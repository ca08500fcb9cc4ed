"""The digest of a salt in a trace: no list of words finds the salt, and no two processes have the same digest."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import workbench
from workbench import simulate
from workbench.base.cache_salt import digest_of
from workbench.trace import TraceMeta
from workbench.trace.recorders.assembler import Assembler
from workbench.trace.recorders.block_hashes import BlockHasher
from workbench.trace.recorders.messages import Arrival

WORDS = ("alice", "bob", "", "\ud800")
CONFIG = {"block_size": 4, "num_blocks": 16, "max_num_batched_tokens": 16, "max_num_seqs": 4}


def in_another_process(word):
    code = "import sys; from workbench.base.cache_salt import digest_of; print(digest_of(sys.argv[1]))"
    env = {**os.environ, "PYTHONPATH": str(Path(workbench.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", code, word], env=env, capture_output=True, text=True).stdout.strip()


def recorded(salt, key=None):
    """The salt that a recording of vLLM has."""
    hasher = None if key is None else BlockHasher(key, TraceMeta(source="vllm", config=CONFIG))
    assembler = Assembler(CONFIG, hasher=hasher)
    return assembler._arrive(Arrival("r", 4, 8, 0, 0.0, 0.0, [1, 2, 3, 4], salt)).cache_salt


def test_equal_salts_have_equal_digests_of_16_digits():
    digests = [digest_of(word) for word in WORDS]
    assert digests == [digest_of(word) for word in WORDS] and len({*digests}) == len(WORDS)
    assert [len(digest) for digest in digests] == [16, 16, 0, 16]


def test_a_list_of_words_does_not_find_a_salt():
    for make in (hashlib.sha256, hashlib.blake2b, hashlib.md5, hashlib.sha1):
        assert make(b"alice").hexdigest()[:16] not in (digest_of("alice"), recorded("alice"), recorded("alice", b"k"))


def test_traces_of_two_processes_are_not_linked():
    first, second = in_another_process("alice"), in_another_process("alice")
    assert len({first, second, digest_of("alice")}) == 3 and len(first) == len(second) == 16
    assert recorded("alice") == digest_of("alice") and recorded("") == ""


def test_ranks_with_the_key_of_their_run_agree():
    assert recorded("alice", b"one") == recorded("alice", b"one") != recorded("alice", b"other")
    assert recorded("alice", b"one") != digest_of("alice")


def test_a_run_is_simulated_again_with_digests_in_place_of_salts():
    requests = [
        {"id": f"r{i}", "prompt": {"len": 20, "seed": "s"}, "cache_salt": salt, "arrival_step": 3 * i, "max_tokens": 2}
        for i, salt in enumerate(["alice", "bob", "alice", "", "", "bob"])
    ]
    hidden = [request | {"cache_salt": digest_of(request["cache_salt"])} for request in requests]
    runs = [simulate({"config": CONFIG, "requests": each}) for each in (requests, hidden)]
    cached = [[chunk.num_cached_tokens for step in run for chunk in step.chunks] for run in runs]
    assert cached[0] == cached[1] and sum(cached[0]) > 0
    again = runs[1].fork(max_num_batched_tokens=8)
    assert sum(chunk.num_cached_tokens for step in again for chunk in step.chunks) == sum(cached[0])
