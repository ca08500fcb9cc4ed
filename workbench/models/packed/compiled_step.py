"""A model's forward pass in compiled code, used if its logits are those of the layer-by-layer pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.attention.cpu.backend import shared_memory
from workbench.attention.cpu.layout import PAIRS_PER_ITEM, Shapes, make_scratch
from workbench.attention.metadata import AttentionMetadata
from workbench.models.cpu.barrier import make_barrier
from workbench.models.cpu.layer_loop import Batch, Buffers, Field, Model, run_layers
from workbench.models.forward import forward_rows
from workbench.models.layer_cache import PagedLayerCache
from workbench.models.packed.activations import float32_activations
from workbench.models.packed.description import Description, NotDescribed, rope_table
from workbench.models.paged_cache import PagedKVCache
from workbench.models.patch import patch_model
from workbench.models.preflight import (
    BLOCK_SIZE,
    NARROW_WINDOW,
    NUM_TRIAL_BLOCKS,
    POSITION_SHIFT,
    STEPS,
    TOLERANCE,
    PreflightResult,
    pack_probe,
    probe_tokens,
)
from workbench.models.remembered import NOTHING, Remembered
from workbench.threads import num_threads, thread_pool

log = logging.getLogger("workbench")

INT8_TOLERANCE = 0.2
"""Largest error with activations of 8 bits. A difference in the last bit of an input changes some codes, and after a
few layers many: two ways to compute differ as much as each does from float32 activations, 2 to 11 % for SmolLM2."""

FIRST_POSITIONS = 1024
"""Positions of the first table of RoPE; it doubles when a step needs more."""


class CompiledStep:
    """Runs packed batches of a described model over a pool.

    Args:
        description: The model.
        caches: The layers of the pool; their memory is written and read directly.
        model: A variant of the description's tables.
        embedding_scale: Factor on embeddings.
    """

    def __init__(
        self, description: Description, caches: Sequence[PagedLayerCache], model: Model, embedding_scale: float
    ) -> None:
        self._description, self._embedding_scale = description, np.float32(embedding_scale)
        num_blocks, block_size = caches[0].k_cache.shape[:2]
        self._shapes = Shapes(description.num_heads, description.num_kv_heads, description.head_dim, block_size)
        self._pool_size = num_blocks * block_size * description.num_kv_heads * description.head_dim
        layers = model.layers.copy()
        self._memory = []
        for row, cache in zip(layers, caches):
            mx.eval(cache.k_cache, cache.v_cache)
            keys, values = shared_memory(cache.k_cache), shared_memory(cache.v_cache)
            row[Field.K_CACHE], row[Field.V_CACHE] = keys.ctypes.data, values.ctypes.data
            row[Field.LEFT] = cache.layer.window - 1 if cache.layer.window > 0 else -1
            row[Field.CACHE_GROUP] = cache.group
            self._memory.append((keys, values))
        self._model = model._replace(layers=layers)
        self._lefts = layers[:, Field.LEFT].tolist()
        group = description.num_heads // description.num_kv_heads
        self._block_q = max(1, PAIRS_PER_ITEM // group)
        self._num_threads = num_threads()
        self._scratches = [make_scratch(self._shapes) for _ in range(self._num_threads)]
        self._barrier = make_barrier()
        self._cosines = self._sines = np.empty((0, 0, 0), np.float32)

    def run(
        self, token_ids: np.ndarray, positions: np.ndarray, rows: np.ndarray, *metadata: AttentionMetadata
    ) -> mx.array:
        """Compute a packed batch; its keys and values are in the pool afterwards.

        Args:
            token_ids: int32 [T].
            positions: int32 [T].
            rows: Rows whose logits are needed, int32.
            *metadata: The batch, with the tables of each KV cache group.

        Returns:
            Logits of ``rows``, float32 [len(rows), vocab_size], evaluated.
        """
        description, num_tokens = self._description, len(token_ids)
        embedded = description.embedding.product.matrix.rows(token_ids.astype(np.int64))
        if self._embedding_scale != 1.0:
            embedded *= self._embedding_scale
        self._extend_ropes(int(positions.max()) + 1)
        work, ranges = self._work(metadata[0])
        batch = Batch(
            embedded,
            positions,
            np.stack([of_group.write_slots for of_group in metadata]),
            rows,
            _stacked([of_group.block_table for of_group in metadata]),
            work,
            ranges,
            self._cosines,
            self._sines,
        )
        widths = (
            description.qkv_size,
            description.num_heads * description.head_dim,
            description.hidden_size,
            2 * description.hidden,
            description.hidden,
        )
        shared = [np.empty((num_tokens, width), np.float32) for width in widths]
        logits = np.empty((len(rows), description.vocab_size), np.float32)
        buffers = Buffers._make([*shared, logits])

        def work_of(thread: int) -> None:
            scratch = self._scratches[thread]
            sizes = (thread, self._num_threads, self._barrier)
            run_layers(self._model, batch, self._shapes, self._pool_size, buffers, scratch, *sizes)

        thread_pool(self._num_threads).run(work_of)
        result = mx.array(logits)
        mx.eval(result)
        return result

    def _work(self, metadata: AttentionMetadata) -> tuple[np.ndarray, np.ndarray]:
        """The work lists of the layers' windows, one after another, and each layer's part of them."""
        lists = {left: metadata.work_list(self._block_q, left) for left in dict.fromkeys(self._lefts)}
        ends = np.cumsum([0, *map(len, lists.values())])
        places = {left: (ends[index], ends[index + 1]) for index, left in enumerate(lists)}
        return np.concatenate(list(lists.values())), np.array([places[left] for left in self._lefts], np.int64)

    def _extend_ropes(self, length: int) -> None:
        """Make the tables of cosines and sines long enough."""
        if length <= self._cosines.shape[1]:
            return
        size = max(FIRST_POSITIONS, 1 << (length - 1).bit_length())
        tables = [rope_table(rope, self._description.head_dim, size) for rope in self._description.ropes]
        self._cosines = np.stack([cosines for cosines, _ in tables])
        self._sines = np.stack([sines for _, sines in tables])


def _stacked(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Block tables of all groups, int32 [num_groups, num_seqs, max_blocks]; a shorter one is filled up with 0."""
    if len(tables) == 1:
        return tables[0][None]
    width = max(table.shape[1] for table in tables)
    return np.stack([np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables])


def make_compiled_step(
    model: nn.Module, result: PreflightResult, kv_cache: PagedKVCache, remembered: Remembered = NOTHING
) -> tuple[CompiledStep | None, str]:
    """The compiled forward pass of a model, if it gives the logits of the pass through the model's own layers.

    Both run the steps of the preflight on a small pool, whose windows are narrowed. The same comparison with shifted
    positions has to fail. A model whose activations are 8 bits is compared with float32 activations first, and then
    as it is.

    Args:
        model: The mlx-lm model; it is unchanged afterwards.
        result: The result of its preflight.
        kv_cache: The pool to run on.
        remembered: A variant that passed in an earlier start is not compared again.

    Returns:
        The compiled pass, or None and the reason.
    """
    backend = kv_cache.backend
    if result.mode != "kernel" or backend is None or backend.name != "cpu":
        return None, "attention does not run in compiled code"
    try:
        with float32_activations(model) as are_int8:
            step, variant = _compared(model, result, kv_cache, remembered, TOLERANCE[mx.float32])
        if are_int8:
            step, _ = _compared(model, result, kv_cache, remembered, INT8_TOLERANCE, variant)
    except _Refused as reason:
        return None, str(reason)
    return step, ""


class _Refused(Exception):
    """The model has no compiled pass; the message says why."""


def _compared(
    model: nn.Module,
    result: PreflightResult,
    kv_cache: PagedKVCache,
    remembered: Remembered,
    tolerance: float,
    only: int | None = None,
) -> tuple[CompiledStep, int]:
    """The compiled pass of a model as it is, and the number of its variant.

    Args:
        model: See `make_compiled_step`.
        result: Likewise.
        kv_cache: Likewise.
        remembered: Likewise.
        tolerance: Largest error of the logits.
        only: The only variant that may pass; None for all.

    Raises:
        _Refused: No variant passes.
    """
    try:
        description = Description(model, kv_cache.kernel_layers, result.num_heads)
    except NotDescribed as unknown:
        raise _Refused(f"the model has {unknown}") from None
    except Exception as problem:  # modules of any shape are looked at
        raise _Refused(f"the model cannot be described ({type(problem).__name__}: {problem})") from None
    variants = list(description.variants())
    name = "compiled step" if only is None else "compiled step, int8"
    if (passed := remembered.get(name)) is not None:
        return CompiledStep(description, kv_cache.kernel_layers, *variants[passed]), passed
    backend = kv_cache.backend
    assert backend is not None
    narrow = [layer.with_window(min(layer.window, NARROW_WINDOW)) for layer in result.layers]
    trial = PagedKVCache.for_kernel(narrow, NUM_TRIAL_BLOCKS, BLOCK_SIZE, backend)
    token_ids = probe_tokens(model)
    steps = [pack_probe(step, token_ids) for step in STEPS]
    patches = patch_model(model, backend)
    try:
        expected = [_logits_by_layer(model, trial, *step) for step in steps]
    finally:
        for patch in patches:
            patch.restore()
    errors: dict[float, float] = {}
    for number, (tables, scale) in enumerate(variants):
        if only not in (None, number):
            continue
        candidate = CompiledStep(description, trial.kernel_layers, tables, scale)
        error = max(_error(candidate, step, logits) for step, logits in zip(steps, expected))
        control = _error(candidate, steps[-1], expected[-1], shift=POSITION_SHIFT)
        errors[error] = control
        apart = 4 if only is None else 2  # 4 as in the preflight
        if error <= tolerance and control > max(tolerance, apart * error):
            remembered.put(name, number)
            return CompiledStep(description, kv_cache.kernel_layers, tables, scale), number
    best = min(errors)
    raise _Refused(
        f"its logits in compiled code differ by {best:.1e} of their spread, "
        f"and by {errors[best]:.1e} with positions shifted by {POSITION_SHIFT}"
    )


def _logits_by_layer(
    model: nn.Module, kv_cache: PagedKVCache, metadata: AttentionMetadata, positions: np.ndarray, token_ids: np.ndarray
) -> np.ndarray:
    """Logits of each chunk's last row, computed layer by layer."""
    kv_cache.begin_step(positions, metadata)
    try:
        logits = forward_rows(model, token_ids, kv_cache, metadata.cu_seqlens_q[1:] - 1, None)
        mx.eval(logits, kv_cache.arrays)
    finally:
        kv_cache.end_step()
    return np.array(logits)


def _error(
    candidate: CompiledStep,
    step: tuple[AttentionMetadata, np.ndarray, np.ndarray],
    expected: np.ndarray,
    shift: int = 0,
) -> float:
    """Error of the worst row, relative to the spread of the logits; infinity if it is not a number."""
    metadata, positions, token_ids = step
    rows = metadata.cu_seqlens_q[1:] - 1
    logits = np.array(candidate.run(token_ids, positions + np.int32(shift), rows, metadata))
    error = float(np.sqrt(np.square(logits - expected).mean(axis=1)).max() / expected.std())
    return error if np.isfinite(error) else float("inf")
