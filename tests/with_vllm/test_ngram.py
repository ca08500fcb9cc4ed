"""N-gram drafts against vLLM's own proposer."""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

if importlib.util.find_spec("numba") is None:
    # vLLM compiles its function with numba; without it the same lines run as plain Python.
    uncompiled = ModuleType("numba")
    uncompiled.jit = uncompiled.njit = lambda **options: lambda function: function
    uncompiled.prange, uncompiled.get_num_threads, uncompiled.set_num_threads = range, lambda: 1, lambda number: None
    sys.modules["numba"] = uncompiled

from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

from workbench.engine.speculation.ngram import find_drafts


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 20])
def test_drafts_equal_those_of_vllm(vocabulary):
    rng = np.random.default_rng(vocabulary)
    found = 0
    for _ in range(5000):
        tokens = rng.integers(0, vocabulary, rng.integers(1, 60)).astype(np.int32)
        if rng.random() < 0.3:  # a text that repeats
            tokens = np.concatenate([tokens, tokens[: rng.integers(1, len(tokens) + 1)]])
        shortest = int(rng.integers(1, 6))
        longest, count = shortest + int(rng.integers(0, 5)), int(rng.integers(1, 9))
        theirs = _find_longest_matched_ngram_and_propose_tokens(
            tokens, min_ngram=shortest, max_ngram=longest, max_model_len=10_000, k=count
        )
        ours = find_drafts(tokens.tolist(), count, shortest, longest)
        assert ours == theirs.tolist(), (tokens.tolist(), shortest, longest, count)
        found += len(ours) > 0
    assert found > 200
