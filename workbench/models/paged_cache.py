"""The block pool of a whole model, and the model's cache argument that is made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.models.gathered_layer import GatheredLayerCache
from workbench.models.layer_cache import (
    LayerCache,
    LayerKV,
    LayerStep,
    Memory,
)
from workbench.models.paged_layer import PagedLayerCache
from workbench.models.state_cache import LayerState, StateLayerCache, States, StateStep

CacheSpec = LayerKV | LayerState | tuple["LayerKV | LayerState", ...]
"""Contents of an entry of a model's cache argument; a tuple for an entry that is a list of caches."""

FIRST_BLOCKS = 64
"""Blocks that a pool that grows has memory for at first; then the memory doubles. Zeros for all 512 blocks that an
engine has by default take 0.3 s for SmolLM2."""

SMALL_POOL = 2**25
"""Bytes up to which a pool is taken whole (32 MiB): that takes no time that anybody sees."""

Kept = tuple[Collection[Hashable], Sequence[Callable[[int], bool]]]
"""Requests whose recurrent states have to stay, and for each KV cache group whether a block's has to."""


def flat_caches(specs: Sequence[CacheSpec]) -> list[LayerKV | LayerState]:
    """The entries one after another, without lists inside them."""
    return [one for spec in specs for one in (spec if isinstance(spec, tuple) else (spec,))]


class PagedKVCache:
    """The block pool of a whole model: one cache per layer and kind of cache.

    Args:
        specs: Contents of each entry of the model's cache argument.
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        backend: The attention backend that reads and writes the pool, which needs `workbench.models.patch`; None to
            gather the context for the model's own attention.
        groups: KV cache group of each cache; None for one group.
        mask_ndim: Axes of the masks without a backend: 4 for MLX's attention, 5 if the model groups its query heads
            itself.
        reads_arithmetic: See `workbench.models.preflight_result.PreflightResult`.
        memory: `arrays` of another pool of this form without recurrent states, whose place this one takes; None to make
            them.
        grows: Take memory for a few blocks of a large pool at first, and for more when `reserve` is called.

    Attributes:
        argument: The model's ``cache`` argument.
        layers: The caches of attention in it.
        states: The caches of recurrent layers in it.
        num_blocks: Blocks in the pool.
        num_reserved: Blocks that there is memory for.
        block_size: Tokens per block.
        backend: The attention backend, None if the model computes attention itself.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        backend: AttentionBackend | None,
        groups: Sequence[int] | None = None,
        mask_ndim: int = 4,
        reads_arithmetic: bool = False,
        memory: Sequence[mx.array] | None = None,
        grows: bool = False,
    ) -> None:
        wanted, taken = flat_caches(specs), iter(memory or ())
        is_large = num_blocks * bytes_per_block(wanted, block_size, groups) > SMALL_POOL
        self.num_reserved = min(num_blocks, FIRST_BLOCKS) if grows and is_large else num_blocks
        if memory:
            self.num_reserved = memory[0].shape[0]
        groups = groups or [0] * len(wanted)
        arrays: dict[tuple[LayerKV, int], Memory] = {}
        flat: list[LayerCache | StateLayerCache] = []
        for one, place, group in zip(wanted, _places(wanted, groups), groups):
            if isinstance(one, LayerState):
                flat.append(StateLayerCache(one, group))
                continue
            assert place is not None
            if place not in arrays:
                slots = (self.num_reserved, block_size, one.num_kv_heads)
                shapes = [(*slots, dim) for dim in one.stored_dims[: 1 if one.latent else 2]]
                if memory is None:
                    made = [mx.zeros(shape, dtype=one.dtype) for shape in shapes]
                else:
                    made = [_of_form(next(taken), shape, one.dtype) for shape in shapes]
                arrays[place] = made[0], made[-1]
            if backend is None:
                flat.append(GatheredLayerCache(one, arrays[place], mask_ndim, group))
            else:
                flat.append(PagedLayerCache(one, arrays[place], backend, group))
        rest = iter(flat)
        self.argument: list[Any] = [
            CacheList(*(next(rest) for _ in spec)) if isinstance(spec, tuple) else next(rest) for spec in specs
        ]
        for layer in flat:
            if isinstance(layer, PagedLayerCache):
                layer.reads_arithmetic = reads_arithmetic
        self.layers = [one for one in flat if isinstance(one, LayerCache)]
        self.states = [one for one in flat if isinstance(one, StateLayerCache)]
        self.backend = backend
        self.num_blocks, self.block_size = num_blocks, block_size
        self._kept = {state.group: States() for state in self.states}
        index: dict[int, int] = {}
        self._indices = [
            tuple(index.setdefault(id(array), len(index)) for array in layer.state) for layer in self.layers
        ]
        mx.eval(self.arrays)

    @property
    def kernel_layers(self) -> list[PagedLayerCache]:
        """Layers whose attention is computed by the backend: all of them, or none."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayerCache)]

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that a step writes, once, for ``mx.eval`` (never for ``mx.async_eval``)."""
        keys_and_values = {id(array): array for layer in self.layers for array in layer.state}
        return [*keys_and_values.values(), *(array for state in self.states for array in state.arrays)]

    def replace_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Put other keys and values in the place of `arrays`, one for one; only for a model without states."""
        for layer, (keys, values) in zip(self.layers, self._indices):
            layer.k_cache, layer.v_cache = arrays[keys], arrays[values]

    def reserve(self, num_blocks: int) -> None:
        """Have memory for the first blocks of the pool, at least so many; what is written stays."""
        if num_blocks <= self.num_reserved:
            return
        self.num_reserved = min(self.num_blocks, max(num_blocks, 2 * self.num_reserved))
        owned, arrays = len({id(array) for layer in self.layers for array in layer.state}), self.arrays
        for index in range(owned):  # one by one: the old one and the new one are in memory meanwhile
            more = (self.num_reserved - arrays[index].shape[0], *arrays[index].shape[1:])
            arrays[index] = mx.concatenate([arrays[index], mx.zeros(more, arrays[index].dtype)])
            mx.eval(arrays[index])
            self.replace_arrays(arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, and of the states that are kept."""
        arrays = {id(array): array.nbytes for layer in self.layers for array in layer.state}
        return sum(arrays.values()) // self.num_reserved * self.num_blocks + sum(
            states.nbytes for states in self._kept.values()
        )

    def begin_step(
        self,
        positions: np.ndarray | mx.array,
        *metadata: AttentionMetadata,
        names: Sequence[Hashable] = (),
        num_kept: np.ndarray | None = None,
        kept: Kept | None = None,
    ) -> None:
        """Serve a packed batch.

        Args:
            positions: int32 [T].
            *metadata: The batch with the tables of each KV cache group.
            names: The name of each sequence; for recurrent layers, as the rest, see `StateStep`.
            num_kept: For each sequence the number of its last rows whose states are kept; None for one.
            kept: The states that have to stay; None for all.
        """
        rows = mx.array(positions)
        steps = [LayerStep(rows, of_group) for of_group in metadata]
        for layer in self.layers:
            layer.begin_step(steps[layer.group])
        if not self.states:
            return
        if num_kept is None:
            num_kept = np.ones(metadata[0].num_seqs, np.int32)
        of_states = {
            group: StateStep(metadata[group], states, names, num_kept, kept and (kept[0], kept[1][group]))
            for group, states in self._kept.items()
        }
        for state in self.states:
            state.begin_step(of_states[state.group])

    def end_step(self) -> None:
        """Drop everything in the layers that belongs to the step."""
        for layer in self.layers:
            layer.end_step()
        for state in self.states:
            state.end_step()

    @property
    def reads(self) -> list[float]:
        """Number of calls of each layer in this step; 1 everywhere if the model is served correctly."""
        return [*(layer.num_reads for layer in self.layers), *(state.num_reads for state in self.states)]

    def check_reads(self) -> None:
        """Raise RuntimeError if a layer was not called exactly once in this step."""
        if any(reads != 1 for reads in self.reads):
            raise RuntimeError(f"attention ran {self.reads} times per layer; the preflight saw 1 each")


def _of_form(array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """The array, if it has a shape and a type.

    Raises:
        ValueError: It has others.
    """
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"the pool's arrays are {array.dtype} {array.shape} instead of {dtype} {shape}")
    return array


def bytes_per_block(
    caches: Sequence[LayerKV | LayerState], block_size: int, groups: Sequence[int] | None = None
) -> int:
    """Bytes of one block of the pool, keys and values.

    Args:
        caches: The caches that the model uses.
        block_size: Tokens per block.
        groups: KV cache group of each cache; None for one group.
    """
    return block_size * sum(place[0].bytes_per_token for place in set(_places(caches, groups)) if place is not None)


def _places(caches: Sequence[LayerKV | LayerState], groups: Sequence[int] | None) -> list[tuple[LayerKV, int] | None]:
    """The array that each layer keeps its keys and values in: equal places are one array.

    The n-th layer of each group shares an array with the n-th layers of the others, as in vLLM: a block belongs to one
    group at a time. Layers of another shape have arrays for themselves. A state has no place in the pool: None.
    """
    counts: Counter[tuple[int, LayerKV]] = Counter()
    places: list[tuple[LayerKV, int] | None] = []
    for layer, group in zip(caches, groups or [0] * len(caches)):
        if isinstance(layer, LayerState):
            places.append(None)
            continue
        shape = replace(layer, window=-1, mask_excess=0, chunk_size=0, masked=False, expanded=None)
        places.append((shape, counts[group, shape]))
        counts[group, shape] += 1
    return places
