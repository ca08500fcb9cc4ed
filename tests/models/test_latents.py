"""Latent attention in two forms: both are right, and a step's sequences take the one that needs less arithmetic."""

import inspect
import textwrap
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from latent_layers import LatentBatch, LatentCase, error_of
from msl_runs import skip_without_compiler
from tiny_models import tiny_model

from workbench.kernels.attention import AttentionMetadata, get_backend
from workbench.kernels.attention.metal.backend import MslBackend
from workbench.models import far_trial, latents, paged_layer
from workbench.models.layer_cache import LayerKV
from workbench.models.paged_cache import PagedKVCache
from workbench.models.preflight import preflight

skip_without_compiler()


class FirstKernel(MslBackend):
    """The kernel with one row and one head per threadgroup, as a backend."""

    def attend(self, q, k_cache, v_cache, metadata, options):
        return self.kernels.attend_v1(q, k_cache, v_cache, metadata, options)


@cache
def backend_of(name):
    return FirstKernel() if name == "first kernel" else get_backend(name)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("WORKBENCH_THREADS", "1")


BACKENDS = ("cpu", "gather", "dense", "msl", "first kernel")
LIMITS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3, "int8_per_token_head": 1e-3}
"""Errors of kernels that round queries and results to the type of the pool."""
MIXED = ((1, 50), (40, 40), (7, 30), (33, 90), (1, 3), (64, 100), (2, 2))


def limit(name, case):
    """Largest error relative to the largest element that rounding explains."""
    rounds = name in ("msl", "first kernel")
    coarsest = [case.stored] * rounds + [case.computed]
    return max(LIMITS[one] for one in coarsest)


def random_case(seed):
    """Random sizes, and chunks on both sides of the number of rows from which they are expanded."""
    rng = np.random.default_rng([seed, 7])

    def pick(*of):
        return of[int(rng.integers(len(of)))]

    sequences = tuple(
        (rows, rows + pick(0, 0, int(rng.integers(1, 90))))
        for rows in rng.permutation([1, int(rng.integers(2, 31)), *rng.integers(31, 34, 2), int(rng.integers(34, 80))])
        .astype(int)
        .tolist()[: int(rng.integers(1, 6))]
    )
    sizes = {"rank": pick(32, 64, 96), "rotary": pick(16, 32), "key": pick(16, 32, 48), "value": pick(16, 32, 48)}
    stored, computed = pick(("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"))
    if pick(False, True):
        stored, computed = pick("float16", "bfloat16", "int8_per_token_head"), "float32"
    more = {"block_size": pick(8, 16, 32), "shared_blocks": pick(0, 2), "num_heads": pick(1, 3, 8)}
    return LatentCase(sequences, **sizes, stored=stored, computed=computed, **more, seed=seed)


@pytest.mark.repeats(step=11)
@pytest.mark.parametrize("seed", range(48))
def test_both_forms_are_attention_by_its_definition(seed):
    """A float64 reference, the first kernel, the tiled one, and the other backends, over every type of pool.

    Every eleventh case has them all: float32, float16 for either type of rows, bfloat16, and codes.
    """
    case = random_case(seed)
    batch = LatentBatch(case)
    expected = batch.reference()
    for name in BACKENDS:
        if name == "first kernel" and case.stored == "int8_per_token_head":  # it does not read codes
            continue
        for ways in ({"expands": False}, {}, {"expands_all": True}):
            error = error_of(batch.run(backend_of(name), **ways), expected)
            assert error <= limit(name, case), (name, ways, case)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_matrices_are_expanded_too(bits, monkeypatch):
    batch = LatentBatch(LatentCase(MIXED, key=32, value=32, bits=bits, num_heads=5))
    expected = batch.reference()
    for most in (latents.MAX_BYTES, 1 << 15):  # all heads at once, and some after others
        monkeypatch.setattr(latents, "MAX_BYTES", most)
        for ways in ({}, {"expands_all": True}):
            assert error_of(batch.run(get_backend("cpu"), **ways), expected) <= LIMITS["float32"]


class Watched(type(get_backend("cpu"))):
    """The CPU backend, which notes its calls."""

    def __init__(self):
        self.calls = []

    def attend(self, q, k_cache, v_cache, metadata, options):
        self.calls.append((q.shape, k_cache.shape, v_cache.shape, metadata))
        return super().attend(q, k_cache, v_cache, metadata, options)


def test_each_sequence_takes_its_form_in_one_step():
    """Decodes and short chunks attend to latents, long ones to keys and values, over a pool of their blocks alone."""
    case = LatentCase(((1, 50), (40, 40), (7, 30), (33, 90), (64, 100)), key=32, value=32, shared_blocks=1)
    batch, backend = LatentBatch(case), Watched()
    out = batch.run(backend)
    (expanded, absorbed) = backend.calls
    assert absorbed[0] == (1 + 7 + 33, case.num_heads, case.rank + case.rotary)
    assert absorbed[3].seqused_k.tolist() == [50, 30, 90]
    assert expanded[0] == (40 + 64, case.num_heads, case.key + case.rotary)
    assert expanded[3].seqused_k.tolist() == [40, 100]
    num_blocks = len({*batch.metadata.block_table[1, :3].tolist(), *batch.metadata.block_table[4, :7].tolist()})
    assert expanded[1] == (num_blocks, 16, case.num_heads, case.key + case.rotary)
    assert expanded[2] == (num_blocks, 16, case.num_heads, case.value)
    assert error_of(out, batch.reference()) <= LIMITS["float32"]


def brute_saving(rows, context, rank, rotary, key, value, cost=1):
    """Multiplications of a head that the expanded form saves, counted one row and position at a time."""
    absorbed = expanded = 0
    for row in range(rows):
        for _ in range(context - rows + row + 1):
            absorbed += (rank + rotary) + rank
            expanded += (key + rotary) + value
        absorbed += (key * rank + rank * value) * cost
    for _ in range(context):
        expanded += (rank * key + rank * value) * cost
    return absorbed - expanded


def test_the_saving_is_counted_exactly():
    rng = np.random.default_rng(3)
    for _ in range(60):
        rows = int(rng.integers(1, 40))
        context = rows + int(rng.integers(0, 60))
        rank, rotary, key, value = (int(size) for size in rng.integers(1, 70, 4))
        layer = LatentCase((), rank=rank, rotary=rotary, key=key, value=value).layer
        saved = latents.saved_multiplications(np.int64(rows), np.int64(context), layer)
        assert saved == brute_saving(rows, context, rank, rotary, key, value)
        assert latents.saved_multiplications(np.int64(rows), np.int64(context), layer, 1.5) == brute_saving(
            rows, context, rank, rotary, key, value, 1.5
        )


def one_chunk(rows, context, block_size=16):
    table = np.arange(-(-context // block_size), dtype=np.int32)[None]
    return AttentionMetadata(np.array([0, rows], np.int32), np.array([context], np.int32), table, None, block_size)


DEEPSEEK = LatentCase((), num_heads=16, rank=512, rotary=64, key=128, value=128).layer


def test_the_form_changes_at_the_count():
    def saving(rows, context):
        return brute_saving(rows, context, 512, 64, 128, 128, latents.MATRIX_COST)

    for context in (512, 2048, 8192):
        expanded = [latents.forms_of(one_chunk(rows, context), DEEPSEEK) is not None for rows in range(1, 300)]
        first = expanded.index(True) + 1
        assert all(expanded[first - 1 :]) and first >= latents.MIN_ROWS
        assert saving(first, context) > 0 >= saving(first - 1, context)
        assert 150 < first < 257
    few = [latents.forms_of(one_chunk(rows, rows), DEEPSEEK) is not None for rows in (1, 31, 32, 33)]
    assert few == [False, False, True, True]


def test_more_heads_than_fit_are_launched_after_others(monkeypatch):
    case = LatentCase(((40, 90), (33, 33)), num_heads=7)
    batch = LatentBatch(case)
    expected = batch.reference()
    blocks = 6 + 3
    of_a_head = blocks * 16 * (case.key + case.rotary + case.value) * 4
    for fitting, launches in ((7, [7]), (6, [4, 3]), (3, [3, 3, 1]), (1, [1] * 7)):
        monkeypatch.setattr(latents, "MAX_BYTES", fitting * of_a_head)
        backend = Watched()
        assert error_of(batch.run(backend, expands_all=True), expected) <= LIMITS["float32"]
        assert [call[0][1] for call in backend.calls] == launches
        assert all(np.prod(k) + np.prod(v) <= fitting * of_a_head / 4 for _, k, v, _ in backend.calls)


def test_threads_change_no_bit(monkeypatch):
    """Each makes keys and values of some heads."""
    batch = LatentBatch(LatentCase(MIXED, num_heads=5))
    alone = np.array(batch.run(get_backend("cpu"), expands_all=True))
    assert error_of(mx.array(alone), batch.reference()) <= LIMITS["float32"]
    for threads in (2, 3, 8):
        monkeypatch.setenv("WORKBENCH_THREADS", str(threads))
        backend = Watched()
        assert np.array_equal(np.array(batch.run(backend, expands_all=True)), alone)
        heads = [q[1] for q, *_ in backend.calls if q[2] == 32]
        assert len(heads) == min(threads, 5) and sum(heads) == 5


def test_a_sequence_that_does_not_fit_stays_absorbed(monkeypatch):
    case = LatentCase(((33, 33), (64, 640), (40, 40)))
    of_a_position = (case.key + case.rotary + case.value) * 4
    monkeypatch.setattr(latents, "MAX_BYTES", 100 * of_a_position)
    batch, backend = LatentBatch(case), Watched()
    out = batch.run(backend, expands_all=True)
    assert [call[3].seqused_k.tolist() for call in backend.calls if call[0][2] == 32] == [
        [33]
    ] * 2  # two heads at a time
    assert error_of(out, batch.reference()) <= LIMITS["float32"]


def test_the_memory_beside_the_pool_is_bounded(monkeypatch):
    """At the peak there are keys and values once more than the bound says, while they are put in order."""
    case = LatentCase(((64, 2048),), num_heads=16, rank=64, rotary=16, key=64, value=64)
    batch = LatentBatch(case)
    whole = 2048 * case.layer.expanded.bytes_per_token
    peaks = {}
    for share in (1, 8):
        monkeypatch.setattr(latents, "MAX_BYTES", whole // share)
        batch.run(get_backend("cpu"), expands_all=True)
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        batch.run(get_backend("cpu"), expands_all=True)
        peaks[share] = mx.get_peak_memory() - held
    others = 4 * batch.pool.nbytes
    assert whole < peaks[1] <= 2 * whole + others
    assert whole / 8 < peaks[8] <= 2 * whole / 8 + others < whole


def test_the_pool_does_not_change():
    layers = [DEEPSEEK, replace(DEEPSEEK, expanded=None)]
    sizes = {PagedKVCache([layer, layer], 8, 16, get_backend("cpu")).nbytes for layer in layers}
    assert sizes == {2 * 8 * 16 * 576 * 4}
    both = PagedKVCache(layers, 8, 16, get_backend("cpu"), groups=[0, 1])  # one array, whatever form a layer takes
    assert len({id(layer.k_cache) for layer in both.layers}) == 1


def test_layers_with_windows_or_chunks_are_not_expanded():
    for change in ({"window": 8}, {"chunk_size": 8}):
        assert latents.forms_of(one_chunk(64, 64), replace(DEEPSEEK, **change)) is None
    assert latents.forms_of(one_chunk(64, 64), replace(DEEPSEEK, expanded=None)) is None


# -- planted faults ------------------------------------------------------------------------------------------------

LAYER = paged_layer.PagedLayerCache
FAULTS = {
    "scale of the rotary part": (
        LAYER,
        "_attend_in_forms",
        "* softmax_scale, rotated], axis=-1)[e",
        "* softmax_scale, rotated * softmax_scale], axis=-1)[e",
    ),
    "scale of the other part": (
        LAYER,
        "_attend_in_forms",
        "[queries.rows * softmax_scale, rotated]",
        "[queries.rows, rotated]",
    ),
    "values are the keys": (latents, "attend_expanded", "down(latents)", "up(latents, transpose=False)"),
    "keys by the transpose": (latents, "attend_expanded", "up(latents, transpose=False)", "down(latents)"),
    "rotary keys of latents": (
        latents,
        "attend_expanded",
        "stored[..., rank:]",
        "stored[..., : stored.shape[-1] - rank]",
    ),
    "table off by one": (latents, "_compact", "block_table=table", "block_table=np.roll(table, 1, axis=1)"),
    "table of the pool": (
        latents,
        "_compact",
        "block_table=table",
        "block_table=self.metadata.block_table % len(blocks)",
    ),
    "padding is visible": (latents, "_compact", "derived={}", "derived={}, seqused_k=self.metadata.seqused_k + 1"),
    "a position is lost": (latents, "_compact", "derived={}", "derived={}, seqused_k=self.metadata.seqused_k - 1"),
    "rows in another order": (latents.Forms, "joined", "rows if self.order is None else rows[self.order]", "rows"),
    "absorbed rows of the expanded": (
        LAYER,
        "_attend_in_forms",
        "queries.rows[part.mlx_rows]",
        "queries.rows[: len(part.rows)]",
    ),
    "nothing is written": (LAYER, "_attend_in_forms", "self.backend.write(", "(lambda *_: None)("),
    "heads of the first launch": (latents, "attend_expanded", "queries[:, first:end]", "queries[:, : end - first]"),
    "matrices of the first heads": (latents.HeadMatrices, "of_heads", "array[first:end]", "array[: end - first]"),
}


def planted(monkeypatch, home, name, old, new):
    """Put a function with one change in the place of the original."""
    original = latents.Part.compact.func if name == "_compact" else getattr(home, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, (name, old)
    source = "from __future__ import annotations\n" + source.replace("@cached_property\n", "").replace(old, new)
    scope = {}
    exec(compile(source, name, "exec"), inspect.getmodule(original).__dict__, scope)
    changed = list(scope.values())[-1]
    if name == "_compact":
        monkeypatch.setattr(latents.Part, "compact", property(changed))
        return
    monkeypatch.setattr(home, name, changed)
    if hasattr(paged_layer, name):
        monkeypatch.setattr(paged_layer, name, changed)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_every_planted_fault_is_found(fault, monkeypatch):
    """Without a fault the comparison passes."""
    case = LatentCase(((33, 90), (1, 50), (40, 40), (64, 100)), key=32, value=32)
    monkeypatch.setattr(latents, "MAX_BYTES", 100_000)
    if fault is not None:
        planted(monkeypatch, *FAULTS[fault])
    batch = LatentBatch(case)
    expected = batch.reference()
    try:
        found = [error_of(batch.run(get_backend("cpu"), **ways), expected) for ways in ({}, {"expands_all": True})]
    except (ValueError, IndexError) as problem:
        assert fault is not None, problem
        return
    assert (max(found) <= LIMITS["float32"]) == (fault is None), found


# -- found by what a model does ------------------------------------------------------------------------------------

ARCHITECTURES = (
    *("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_k3", "kimi_linear"),
    *("longcat_flash", "mistral4"),
)


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_preflight_finds_the_matrices(architecture):
    result = preflight(tiny_model(architecture), get_backend("cpu"))
    assert {layer.expanded for layer in result.layers} == {LayerKV(4, 24, 16, mx.float32)}
    assert result.expands_latents and not result.without_expansion.expands_latents


def test_an_expansion_that_is_wrong_is_not_used(monkeypatch):
    """The model is served over its latents then, by the same kernel."""
    for fault in ("scale of the rotary part", "table off by one", "nothing is written"):
        with monkeypatch.context() as change:
            planted(change, *FAULTS[fault])
            result = preflight(tiny_model("deepseek_v3"), get_backend("cpu"))
            assert (result.mode, result.expands_latents) == ("kernel", False), fault
    assert preflight(tiny_model("deepseek_v3"), get_backend("cpu")).expands_latents


def test_an_expansion_that_is_wrong_far_from_the_start_is_not_used(monkeypatch):
    expand = latents.attend_expanded

    def wrong(queries, k_cache, part, *rest):
        out = expand(queries, k_cache, part, *rest)
        return out * 1.5 if part.metadata.seqused_k.max() > 100 else out

    monkeypatch.setattr(paged_layer, "attend_expanded", wrong)
    monkeypatch.setattr(far_trial, "_MADE", {})  # what was found about models of this kind
    result = preflight(tiny_model("deepseek_v3"), get_backend("cpu"))
    assert (result.mode, result.expands_latents) == ("kernel", False)


def test_a_model_that_does_more_between_is_served_over_its_latents():
    model = tiny_model("deepseek_v3")
    for layer in model.layers:
        attention = layer.self_attn
        attention.inner = inner = attention.pop("unembed_out")
        object.__setattr__(attention, "unembed_out", lambda rows, inner=inner: inner(0.5 * rows))
    result = preflight(model, get_backend("cpu"))
    assert (result.mode, result.expands_latents) == ("kernel", False)
