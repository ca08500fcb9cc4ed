"""A KV cache of narrower numbers: half the memory, logits within a stated bound, and visible wherever it is used."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from plain_model import random_prompts
from tiers import examples
from tiny_models import VOCAB_SIZE, tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, msl
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import Segment, pack
from workbench.kernels.attention import paged_varlen_attention
from workbench.kernels.attention.stored import SCALE_BYTES, STORED_DTYPES, from_stored, to_stored

NARROW = ("float16", "bfloat16", "int8_per_token_head")
ELEMENTS = {"float16": "float16", "bfloat16": "bfloat16", "int8_per_token_head": "int8"}
BYTES_OF_A_ROW = {"float32": 64 * 4, "float16": 64 * 2, "bfloat16": 64 * 2, "int8_per_token_head": 64 + 4}
PERPLEXITY_CHANGE = {"float16": 1e-3, "bfloat16": 1e-2, "int8_per_token_head": 5e-3}
NUM_TOKENS, BLOCK_SIZE = examples(600), 16
FIRST = 2 * NUM_TOKENS // 3 - 1
TABLE = np.random.default_rng(0).permutation(np.arange(1, 40)).tolist()
TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def token_ids(smollm2):
    return smollm2.tokenizer.encode(TEXT.read_text())[:NUM_TOKENS]


MADE: dict = {}


def logits_of(loaded, token_ids, dtype, spoil=None):
    """`compute_logits`, once for each type of a pool that nobody spoils."""
    if spoil is not None:
        return compute_logits(loaded, token_ids, dtype, spoil)
    if dtype not in MADE:
        MADE[dtype] = compute_logits(loaded, token_ids, dtype, None)
    return MADE[dtype]


def compute_logits(loaded, token_ids, dtype, spoil):
    """Logits of every token, from two chunks and a decode over scattered blocks."""
    runner = ModelRunner(loaded, EngineConfig(num_blocks=40, block_size=BLOCK_SIZE, kv_cache_dtype=dtype))
    try:
        rows = []
        for start, stop in ((0, FIRST), (FIRST, len(token_ids) - 1), (len(token_ids) - 1, len(token_ids))):
            if spoil is not None and start:
                spoil(runner)
            segment = Segment(TABLE, start, stop - start, token_ids[start:stop], stop - start)
            logits, _ = runner.forward(pack([segment], BLOCK_SIZE, num_blocks=40))
            parts = [*getattr(logits, "slices", ()), logits.values]  # those of a long prompt come in slices
            rows.append(np.concatenate([np.array(part) for part in parts]))
        return np.concatenate(rows), runner
    finally:
        runner.close()


def typical_error(logits, expected):
    """As the preflight measures it."""
    return np.median(np.sqrt(np.square(logits - expected).mean(axis=1))) / expected.std()


def perplexity(logits, token_ids):
    logits = logits[:-1].astype(np.float64)
    rows = np.arange(len(logits))
    return np.exp(
        (
            np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - logits[rows, token_ids[1:]]
        ).mean()
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_logits_of_a_text_are_within_the_bound(smollm2, token_ids, dtype):
    expected, exact = logits_of(smollm2, token_ids, "auto")
    logits, runner = logits_of(smollm2, token_ids, dtype)
    facts = runner.describe()
    assert exact.describe()["kv_dtype"] == "float32" and facts["kv_dtype"] == ELEMENTS[dtype]
    assert facts["forward"] == exact.describe()["forward"] == "compiled"
    ratio = BYTES_OF_A_ROW[dtype] / BYTES_OF_A_ROW["float32"]
    assert facts["kv_bytes_per_block"] == ratio * exact.describe()["kv_bytes_per_block"]
    assert 0 < typical_error(logits, expected) <= facts["preflight_bound"]
    assert abs(perplexity(logits, token_ids) / perplexity(expected, token_ids) - 1) < PERPLEXITY_CHANGE[dtype]


@pytest.mark.parametrize("dtype", NARROW)
def test_a_block_in_the_place_of_another_is_beyond_the_bound(smollm2, token_ids, dtype):
    def swap(runner):
        first, second = TABLE[3:5]
        for layer in runner.kv_cache.layers:
            keys = raw(layer.k_cache)
            keys[[first, second]] = keys[[second, first]]

    assert_beyond_the_bound(smollm2, token_ids, dtype, swap)


def test_scales_of_the_next_block_are_beyond_the_bound(smollm2, token_ids):
    def shift(runner):
        for layer in runner.kv_cache.layers:
            for cache in layer.state:
                scales = raw(cache)[..., -SCALE_BYTES:]
                scales[TABLE[:20]] = scales[TABLE[1:21]]

    assert_beyond_the_bound(smollm2, token_ids, "int8_per_token_head", shift)


def raw(cache):
    """The memory of a cache; NumPy has no bfloat16."""
    return np.asarray(cache.view(mx.uint16) if cache.dtype == mx.bfloat16 else cache)


def assert_beyond_the_bound(loaded, token_ids, dtype, spoil):
    """Logits after the first chunk, when the pool has been spoilt, differ by more than the stated bound."""
    expected, _ = logits_of(loaded, token_ids, dtype)
    logits, runner = logits_of(loaded, token_ids, dtype, spoil)
    assert np.array_equal(logits[:FIRST], expected[:FIRST])
    assert typical_error(logits[FIRST:], expected[FIRST:]) > runner.describe()["preflight_bound"]


@pytest.mark.parametrize("dtype", NARROW)
def test_the_pool_holds_rounded_keys_and_values(smollm2, token_ids, dtype):
    _, exact = logits_of(smollm2, token_ids, "auto")
    _, runner = logits_of(smollm2, token_ids, dtype)
    ours, theirs = runner.kv_cache.layers[0], exact.kv_cache.layers[0]
    for narrow, wide in ((ours.k_cache, theirs.k_cache), (ours.v_cache, theirs.v_cache)):
        assert mx.array_equal(narrow, to_stored(wide, STORED_DTYPES[dtype])).item()


def test_codes_are_within_half_a_step_of_their_numbers():
    rng = np.random.default_rng(3)
    numbers = (rng.normal(size=(50, 2, 64)) * 10.0 ** rng.integers(-6, 6, (50, 2, 1))).astype(np.float32)
    numbers[7] = 0.0
    stored = to_stored(mx.array(numbers), mx.int8)
    assert stored.shape == (50, 2, 64 + SCALE_BYTES)
    step = np.abs(numbers).max(axis=-1, keepdims=True) / 127
    assert (np.abs(np.array(from_stored(stored)) - numbers) <= 0.5001 * step).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_has_none(number):
    numbers = np.ones((2, 64), np.float32)
    numbers[1, 9] = number
    finite = np.isfinite(np.array(from_stored(to_stored(mx.array(numbers), mx.int8))))
    assert finite[0].all() and not finite[1].any()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 4), 24), ((40, 2), 32)])
def test_attention_widens_exactly(dtype, heads, head_dim):
    rng = np.random.default_rng(1)
    lens = ((1, 37), (5, 70), (20, 20), (1, 1))
    q = mx.array(rng.normal(size=(sum(n for n, _ in lens), heads[0], head_dim)).astype(np.float32))
    k, v = (mx.array(rng.normal(size=(25, 16, heads[1], head_dim)).astype(np.float32)) for _ in range(2))
    k, v = (to_stored(x, STORED_DTYPES[dtype]) for x in (k, v))
    batch = {
        "cu_seqlens_q": np.cumsum([0, *(n for n, _ in lens)]).astype(np.int32),
        "seqused_k": np.array([length for _, length in lens], np.int32),
        "block_table": rng.permutation(np.arange(1, 25))[:20].reshape(4, 5).astype(np.int32),
        "softmax_scale": head_dim**-0.5,
        "backend": "cpu",
    }
    wide = paged_varlen_attention(q, *(from_stored(x).astype(mx.float32) for x in (k, v)), **batch)
    narrow = paged_varlen_attention(q, k, v, **batch)
    if k.dtype == mx.int8:  # scales are applied to scores and weights, which rounds once more
        assert mx.allclose(narrow, wide, rtol=0, atol=2e-6).item()
    else:
        assert mx.array_equal(narrow, wide).item()


@pytest.mark.repeats(step=3)
@pytest.mark.skipif(bool(msl.why_unavailable()), reason=msl.why_unavailable())
@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float16", 2e-3), ("bfloat16", 1.6e-2), ("int8_per_token_head", 2e-3)]
)
def test_the_metal_source_reads_it(dtype, rounding):
    """It also rounds queries and outputs to the type of the pool, or to float16."""
    rng = np.random.default_rng(1)
    q = mx.array(rng.normal(size=(6, 4, 64)).astype(np.float32))
    k, v = (mx.array(rng.normal(size=(12, 8, 2, 64)).astype(np.float32)) for _ in range(2))
    k, v = (to_stored(x, STORED_DTYPES[dtype]) for x in (k, v))
    batch = {
        "cu_seqlens_q": np.array([0, 1, 6], np.int32),
        "seqused_k": np.array([37, 29], np.int32),
        "block_table": rng.permutation(np.arange(1, 12))[:10].reshape(2, 5).astype(np.int32),
        "softmax_scale": 64**-0.5,
    }
    ours, theirs = (np.array(paged_varlen_attention(q, k, v, **batch, backend=name)) for name in ("msl", "cpu"))
    assert 0 < np.abs(ours - theirs).max() < rounding * np.abs(theirs).max()


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("backend", ["cpu", "gather", "dense"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gemma2", "falcon_h1"])
def test_every_way_through_a_model_takes_it(architecture, backend):
    loaded, likely = tiny_loaded_model(architecture), {}
    for dtype in ("auto", "float16", "int8_per_token_head"):
        config = EngineConfig(
            **{"num_blocks": 100, "block_size": 8, "max_model_len": 100, "max_num_batched_tokens": 16},
            **{"attention_backend": backend, "kv_cache_dtype": dtype},
        )
        with Engine(loaded, config) as engine:
            for tokens in random_prompts([29, 3, 17], VOCAB_SIZE).values():
                engine.add_request(tokens, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1))
            outputs = engine.run(progress=False)
            likely[dtype] = [max(probabilities.values()) for output in outputs for probabilities in output.logprobs[:1]]
            assert engine.trace.config["kv_cache_dtype"] == dtype
            stored = ELEMENTS.get(dtype, "float32")
            assert engine.describe()["kv_dtype"] == engine.trace[0].kernel.dtype == stored
    for dtype, largest in (("float16", 0.05), ("int8_per_token_head", 0.5)):  # logits of random weights are far apart
        assert 0 < np.abs(np.subtract(likely["auto"], likely[dtype])).max() < largest


def test_scales_travel_with_their_blocks():
    """Shared prefixes, preemption and drafts: tokens are those of a run without any of them."""
    loaded, prompts = tiny_loaded_model("llama"), random_prompts([40, 41, 50], VOCAB_SIZE)
    shared = prompts[next(iter(prompts))][:32]
    texts = []
    for settings in (
        {"enable_prefix_caching": False, "num_blocks": 200},
        {"num_blocks": 30, "num_speculative_tokens": 3, "speculative": {"method": "ngram", "prompt_lookup_min": 1}},
    ):
        config = EngineConfig(
            **{"block_size": 4, "max_model_len": 120, "max_num_batched_tokens": 48},
            **{"kv_cache_dtype": "int8_per_token_head"},
            **settings,
        )
        with Engine(loaded, config) as engine:
            for _ in range(2):
                for tokens in prompts.values():
                    params = SamplingParams(max_tokens=20, ignore_eos=True)
                    engine.add_request([*shared, *tokens], params)
                texts.append([output.token_ids for output in engine.run(progress=False)])
            events = engine.trace
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert sum(len(record.preempted) for record in events) > 0
    chunks = [chunk for record in events for chunk in record.chunks]
    assert sum(chunk.num_cached_tokens for chunk in chunks) > 0 and any(chunk.drafts for chunk in chunks)


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of .*'float16'.*, got 'int3'"):
        EngineConfig(kv_cache_dtype="int3")
