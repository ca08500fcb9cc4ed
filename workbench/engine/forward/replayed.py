"""Replay the graph of a decode step, so that Python does not build it again in each step.

Python builds MLX's graph of a step operation by operation: 30 layers take milliseconds in which a GPU waits. Steps that
decode the same number of sequences have the same graph, and only their arrays differ: tokens, positions, block tables
and work items. ``mx.compile`` records such a graph once and replays it with other arrays. The KV pool goes in and comes
out; nothing else holds its arrays then, so MLX still writes keys and values in place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.engine.forward.layer_by_layer import LayerByLayer
from workbench.engine.packed_batch import PackedBatch
from workbench.kernels.attention.metadata import FEW_ELEMENTS, AttentionMetadata
from workbench.kernels.attention.metal.launch import LaunchArrays, LaunchKey, PagedVarlenKernels
from workbench.models.final_norm import FinalNorm
from workbench.models.forward import forward_rows
from workbench.models.model_code import position_limit
from workbench.models.paged_cache import PagedKVCache
from workbench.models.preflight_result import TOLERANCE, TOLERANCE_FLOAT32_GPU
from workbench.models.served_model import ServedModel

log = logging.getLogger("workbench")

MAX_GRAPHS = 64
"""Recorded graphs that are kept; when there would be more, all are dropped and recorded again."""

Launches = list[list[LaunchKey]]
"""Keys of the launches of a step, for each KV cache group."""


class ReplayedPath(LayerByLayer):
    """Replays the graphs of decode steps; other steps are computed layer by layer.

    A graph is recorded when its shape comes up for the second time, because many shapes come up only once. The first
    step that replays a graph is also computed layer by layer, at its positions and far from them. If logits differ, no
    graph is replayed any more.

    Attributes:
        not_replayed: Why no graph is replayed; empty if graphs are.

    Args:
        served: The model, without recurrent states.
        kernels: The kernels of the attention backend.
    """

    name = "replayed"

    def __init__(self, served: ServedModel, kernels: PagedVarlenKernels) -> None:
        super().__init__(served)
        self._kernels, self._kv_cache = kernels, served.kv_cache
        self._recorder = _Recorder(served.model, served.kv_cache, served.final_norm)
        self._launches: dict[int, Launches] = {}
        self._checked = False
        self.not_replayed = ""
        self._forget()

    @classmethod
    def make(cls, served: ServedModel) -> Self | str:
        """See `ChosenPath.make`."""
        if served.preflight.mode != "kernel":
            return "its attention does its own arithmetic"
        if served.preflight.states:
            return "it has recurrent layers"
        if served.computes_all:
            return "its layers wait for other processes"
        kernels = served.backend.replayable_kernels
        return cls(served, kernels) if kernels is not None else f"{served.backend.name!r} attention has no graph"

    @property
    def num_recorded(self) -> int:
        """Graphs recorded so far."""
        return self._recorder.num_recorded

    def graph(self, packed: PackedBatch) -> tuple[mx.array, Mapping[str, str]]:
        """See `LayerByLayer.graph`; the pool has new arrays after a replay."""
        decodes = is_decode(packed.metadata[0]) and not packed.adapters
        if decodes and len(packed.logits_rows) and (values := self._replayed(packed)) is not None:
            return values, self._details
        values, _ = super().graph(packed)
        if decodes:  # keep the launches that the layers have made, for other steps of as many sequences
            self._launches[packed.num_seqs] = [self._kernels.keys(of_group) for of_group in packed.metadata]
        reason = self.not_replayed or (
            "no graph of its shape was recorded" if decodes else "it holds a prompt chunk or adapters"
        )
        return values, {"forward": LayerByLayer.name, "forward_reason": reason}

    def _replayed(self, packed: PackedBatch) -> mx.array | None:
        """The logits of a decode step by a recorded graph, not evaluated; None if there is none."""
        launches = self._launches.get(packed.num_tokens)
        if self.not_replayed or launches is None:
            return None
        batches = [self._batch(of_group, keys) for of_group, keys in zip(packed.metadata, launches)]
        if threading.get_ident() != self._thread or len(self._seen) >= MAX_GRAPHS:
            self._forget()
        shape = packed.num_tokens, len(packed.logits_rows), *(_shape(batch) for _, one in batches for batch in one)
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        inputs = mx.array(packed.token_ids), mx.array(packed.positions), mx.array(packed.logits_rows), batches
        return self._replay(inputs, packed.metadata, launches)

    def _batch(self, metadata: AttentionMetadata, keys: list[LaunchKey]) -> tuple[Any, list[LaunchArrays]]:
        """Everything that the layers of a group read of a batch."""
        vars(metadata)["mlx_block_table"] = mx.array(_widened(metadata.block_table))
        for key in keys:
            metadata.derived[key] = self._kernels.prepare(key, metadata)
        return metadata.write_index, [metadata.derived[key].batch for key in keys]

    def _replay(self, inputs: Any, metadata: Sequence[AttentionMetadata], launches: Launches) -> mx.array | None:
        self._recorder.metadata, self._recorder.launches = metadata, launches
        if self._checked:
            return self._run_graph(inputs)
        before, (token_ids, positions, rows, batches) = self.num_recorded, inputs
        end = position_limit(self._recorder.model) - 1
        far = mx.minimum(positions + end // 2, end)
        # The keys and values that are written last are those that stay.
        for place in (positions, far, positions):
            expected = self._layer_by_layer((token_ids, place, rows, batches), metadata)
            logits = self._run_graph((token_ids, place, rows, batches))
            if logits is None or self.num_recorded != before:
                return logits
            mx.eval(logits, self._kv_cache.arrays)
            error = _error(np.array(logits), expected)
            if not error <= self._tolerance:
                self._give_up(f"its logits differ by {error:.1e} of their spread")
                return None
        self._checked = True
        return logits

    def _run_graph(self, inputs: Any) -> mx.array | None:
        """Logits by a recorded graph, not evaluated; None if it cannot be recorded."""
        try:
            logits, arrays = self._graph(inputs, self._recorder.weights, self._kv_cache.arrays)
        except Exception as problem:  # code of the model that cannot be recorded, such as a decision by a value
            self._give_up(f"{type(problem).__name__}: {problem}")
            return None
        self._kv_cache.replace_arrays(arrays)
        return logits

    def _layer_by_layer(self, inputs: Any, metadata: Sequence[AttentionMetadata]) -> np.ndarray:
        token_ids, positions, rows, _ = inputs
        logits = self._recorder.forward(token_ids, positions, rows, metadata)
        mx.eval(logits, self._kv_cache.arrays)
        return np.array(logits)

    @property
    def _tolerance(self) -> float:
        return max(TOLERANCE_FLOAT32_GPU, *(TOLERANCE[layer.layer.dtype] for layer in self._kv_cache.layers))

    def _give_up(self, reason: str) -> None:
        self.not_replayed = reason
        log.warning("the graphs of decode steps are not replayed: %s", reason)

    def _forget(self) -> None:
        """Drop all graphs."""
        self._thread = threading.get_ident()
        self._seen: set[tuple[Any, ...]] = set()
        self._graph = mx.compile(self._recorder)


class _Recorder:
    """Computes a step from arrays that stand for those of any step of the same shape.

    It knows nothing of the graph that is made from it: MLX's object would otherwise keep itself alive.

    Attributes:
        model: The model.
        metadata: The step to record, with the tables of each KV cache group.
        launches: Its launches.
        num_recorded: Graphs recorded so far.
    """

    def __init__(self, model: nn.Module, kv_cache: PagedKVCache, final_norm: FinalNorm | None) -> None:
        self.model, self._kv_cache, self._final_norm = model, kv_cache, final_norm
        self.metadata: Sequence[AttentionMetadata] = ()
        self.launches: Launches = []
        self.num_recorded = 0
        self._places = [(m, name) for m in model.modules() for name in m if isinstance(m[name], mx.array)]

    @property
    def weights(self) -> list[mx.array]:
        """The model's arrays. They are inputs of a graph: a weight that is replaced later takes effect."""
        return [module[name] for module, name in self._places]

    @weights.setter
    def weights(self, arrays: list[mx.array]) -> None:
        for (module, name), array in zip(self._places, arrays, strict=True):
            module[name] = array

    def __call__(self, inputs: Any, weights: list[mx.array], arrays: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        token_ids, positions, rows, batches = inputs
        stand_ins = []
        for metadata, keys, (write_index, launches) in zip(self.metadata, self.launches, batches):
            derived = {key: metadata.derived[key].with_batch(batch) for key, batch in zip(keys, launches)}
            stand_in = replace(metadata, derived=derived)
            vars(stand_in)["write_index"] = tuple(write_index)
            stand_ins.append(stand_in)
        real, real_weights = self._kv_cache.arrays, self.weights
        self._kv_cache.replace_arrays(arrays)
        self.weights = weights
        try:
            logits = self.forward(token_ids, positions, rows, stand_ins)
            recorded = self._kv_cache.arrays
        finally:
            self._kv_cache.replace_arrays(real)
            self.weights = real_weights
        self.num_recorded += 1
        return logits, recorded

    def forward(
        self, token_ids: mx.array, positions: mx.array, rows: mx.array, metadata: Sequence[AttentionMetadata]
    ) -> mx.array:
        """Logits of a step, layer by layer, not evaluated."""
        self._kv_cache.begin_step(positions, *metadata)
        try:
            logits = forward_rows(self.model, token_ids, self._kv_cache, rows, self._final_norm)
            self._kv_cache.check_reads()
        finally:
            self._kv_cache.end_step()
        return logits


def _widened(block_table: np.ndarray) -> np.ndarray:
    """A block table whose width is a power of two, so that shapes recur; 0 fills it up."""
    rows, width = block_table.shape
    table = np.zeros((rows, max(FEW_ELEMENTS, 1 << (width - 1).bit_length())), block_table.dtype)
    table[:, :width] = block_table
    return table


def _shape(batch: LaunchArrays) -> tuple[int, ...]:
    """Numbers that decide the shapes of a decode step's launch, together with its number of rows."""
    (work_items, block_table), _, num_partial_rows = batch
    return work_items.shape[0], block_table.shape[1], num_partial_rows


def _error(logits: np.ndarray, expected: np.ndarray) -> float:
    """Error of the worst row, relative to the spread of the logits."""
    return float(np.sqrt(np.square(logits - expected).mean(axis=1)).max() / expected.std())


def is_decode(metadata: AttentionMetadata) -> bool:
    """Whether every sequence of a batch has one row."""
    return metadata.num_tokens == metadata.num_seqs and bool((metadata.query_lens == 1).all())
