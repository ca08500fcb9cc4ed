"""A model's forward pass in compiled code; `workbench.models.packed.step_check` finds out whether it is right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from workbench.base.threads import num_threads
from workbench.kernels.attention.cpu_backend import kernel_memory, shared_memory
from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.cpu.attention.layout import PAIRS_PER_ITEM, Shapes, make_scratch
from workbench.kernels.cpu.kernels import ROWS
from workbench.kernels.cpu.layer_loop import (
    NUM_FACTORED,
    NUM_PARTS,
    Batch,
    Buffers,
    FactorField,
    Field,
    Model,
    input_sizes,
    make_barrier,
    run_layers,
)
from workbench.kernels.cpu.threads import thread_pool
from workbench.models.packed.description import Description, rope_table
from workbench.models.paged_layer import PagedLayerCache

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
        _, block_size, _, stored_dim = caches[0].k_cache.shape
        sizes = description.num_heads, description.num_kv_heads, description.head_dim, description.head_dim
        self._shapes = Shapes(*sizes, block_size, stored_dim, stored_dim)
        self._caches, self._model = caches, model._replace(layers=model.layers.copy())
        self._find_memory()
        layers = self._model.layers
        for row, cache in zip(layers, caches):
            row[Field.LEFT] = cache.layer.window - 1 if cache.layer.window > 0 else -1
            row[Field.BLOCK_TABLE] = cache.group
        self._lefts = layers[:, Field.LEFT].tolist()
        group = description.num_heads // description.num_kv_heads
        self._block_q = max(1, PAIRS_PER_ITEM // group)
        self._input_size, self._sums_size = _input_sizes(model)
        self._num_threads = num_threads()
        self._scratches = [make_scratch(self._shapes) for _ in range(self._num_threads)]
        self._barrier = make_barrier()
        self.places, self.vocab_size = description.places, description.vocab_size
        self._no_adapters = (
            np.empty((0, len(layers), NUM_FACTORED, NUM_PARTS, len(FactorField)), np.int64),
            np.empty(0, np.int64),
        )
        self._cosines = self._sines = np.empty((0, 0, 0), np.float32)

    def _find_memory(self) -> None:
        """Take the addresses of the pool's arrays, which are others when the pool has grown."""
        self._first: mx.array | None = self._caches[0].k_cache
        self._pool_size = self._caches[0].k_cache.size
        self._memory: list[tuple[np.ndarray, np.ndarray]] = []
        for row, cache in zip(self._model.layers, self._caches):
            mx.eval(cache.k_cache, cache.v_cache)
            keys, values = kernel_memory(cache.k_cache), kernel_memory(cache.v_cache)
            row[Field.K_CACHE], row[Field.V_CACHE] = keys.ctypes.data, values.ctypes.data
            self._memory.append((keys, values))
        self._like = np.empty(0, self._memory[0][0].dtype)

    def let_go_of_memory(self) -> None:
        """Hold no array of the pool until the next step, which takes the addresses again."""
        self._first = None
        self._memory.clear()

    def make_invariant(self) -> None:
        """Compute every row of attention as a part of a chunk, so that its bits do not depend on the batch."""
        self._shapes = self._shapes._replace(max_decode_group=0)

    def run(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        *metadata: AttentionMetadata,
        adapters: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> mx.array:
        """Compute a packed batch; its keys and values are in the pool afterwards.

        Args:
            token_ids: int32 [T].
            positions: int32 [T].
            rows: Rows whose logits are needed, int32.
            *metadata: The batch, with the tables of each KV cache group.
            adapters: See `workbench.models.adapters.Adapters.compiled`; None if no row has one.

        Returns:
            Logits of ``rows``, float32 [len(rows), vocab_size], evaluated.
        """
        (logits,) = self.run_in_slices(max(1, len(rows)), token_ids, positions, rows, *metadata, adapters=adapters)
        return logits

    def run_in_slices(
        self,
        size: int,
        token_ids: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        *metadata: AttentionMetadata,
        adapters: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Iterator[mx.array]:
        """See `run`; the head projects so many rows at a time, when the rows before them have been taken."""
        if self._caches[0].k_cache is not self._first:
            self._find_memory()
        logits = self._room(rows[:size])
        embedded = self._description.embedding.product.matrix.rows(token_ids.astype(np.int64))
        if self._embedding_scale != 1.0:
            embedded *= self._embedding_scale
        self._extend_ropes(int(positions.max()) + 1)
        work, ranges = self._work(metadata[0])
        batch = Batch(
            embedded,
            positions,
            np.stack([of_group.write_slots for of_group in metadata]),
            rows[:size],
            _stacked([of_group.block_table for of_group in metadata]),
            work,
            ranges,
            self._cosines,
            self._sines,
            *(adapters or self._no_adapters),
        )
        self._compute(self._model, batch, logits)
        yield logits
        head = self._model._replace(layers=self._model.layers[:0])  # ``embedded`` holds the output of the layers
        for first in range(size, len(rows), size):
            logits = self._room(rows[first : first + size])
            self._compute(head, batch._replace(rows=rows[first : first + size]), logits)
            yield logits

    def _room(self, rows: np.ndarray) -> mx.array:
        """An array for the logits of some rows, which MLX fills with zeros in the meantime."""
        logits = mx.zeros((len(rows), self.vocab_size))
        mx.async_eval(logits)
        return logits

    def _compute(self, model: Model, batch: Batch, logits: mx.array) -> None:
        """Run the layers of a model and its head."""
        mx.eval(logits)
        # A copy of many logits would take milliseconds.
        buffers = self._buffers(len(batch.embedded), shared_memory(logits))

        def work_of(thread: int) -> None:
            scratch = self._scratches[thread]
            sizes = (thread, self._num_threads, self._barrier)
            run_layers(model, batch, self._shapes, self._pool_size, self._like, buffers, scratch, *sizes)

        thread_pool(self._num_threads).run(work_of)

    def _buffers(self, num_tokens: int, logits: np.ndarray) -> Buffers:
        """Memory for a step: queries, keys and values, outputs of projections, and gates are never needed together."""
        sizes, rows = self._description, min(num_tokens, ROWS)
        qkv, out, gate_up = (rows, sizes.qkv_size), (rows, sizes.hidden_size), (rows, 2 * sizes.hidden)
        attended = (num_tokens, sizes.num_heads * sizes.head_dim)
        first = max(math.prod(qkv), math.prod(out))
        memory = np.empty(max(first + math.prod(attended), math.prod(gate_up)), np.float32)
        return Buffers(
            memory[: math.prod(qkv)].reshape(qkv),
            memory[first : first + math.prod(attended)].reshape(attended),
            memory[: math.prod(out)].reshape(out),
            memory[: math.prod(gate_up)].reshape(gate_up),
            np.empty(rows * self._input_size, np.float32),
            np.empty(rows * self._sums_size, np.float32),
            logits,
        )

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


def _input_sizes(model: Model) -> tuple[int, int]:
    """Elements of a row's prepared input, and of the sums of its groups, for the products that need the most."""
    sizes = np.array([input_sizes(product) for product in model.products])
    fields = (Field.QKV, Field.OUT, Field.GATE_UP, Field.DOWN)
    ranges = [(row[field], row[field + 1]) for row in model.layers for field in fields]
    size, sums_size = np.max([sizes[first:last].sum(axis=0) for first, last in [*ranges, (-1, None)]], axis=0)
    return int(size), int(sums_size)


def _stacked(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Block tables of all groups, int32 [num_groups, num_seqs, max_blocks]; a shorter one is filled up with 0."""
    if len(tables) == 1:
        return tables[0][None]
    width = max(table.shape[1] for table in tables)
    return np.stack([np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables])
