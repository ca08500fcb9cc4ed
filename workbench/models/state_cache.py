"""Recurrent layers over a packed batch: a state per request, and the model's own code sequence by sequence.

Everywhere else a token is a batch row, [T, 1]. A recurrent layer's mixer passes a state from token to token, so its
rows are laid out by sequence for this one call: all decodes as one batch [B, 1, ...] with their states stacked, each
chunk of a prompt as [1, L, ...] with the state that the chunk before left. The results are laid back in the order of
the rows.

A mixer is a module that is handed a layer's state and hands it to no other module. `find_mixers` watches the plain
model run to find them, so there is no list of them. A mixer's class is replaced by a subclass until `restore`; with
mlx-lm's own caches it does what it did before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import ArraysCache

from workbench.attention.metadata import AttentionMetadata
from workbench.models.class_patch import ClassPatch, subclass_that_calls


@dataclass(frozen=True)
class LayerState:
    """The state that one recurrent layer keeps per request.

    Attributes:
        shapes: Shape of each array without the axis of requests.
        dtypes: Element type of each array.
        mixers: Dotted names of the modules that read and write it.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    mixers: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one request's state."""
        return sum(int(np.prod(shape)) * dtype.size for shape, dtype in zip(self.shapes, self.dtypes))


class StateSlots:
    """The places of requests' states in the arrays of a KV cache group's layers, by the block that stands for a state.

    The pool of blocks is larger than the number of states that requests can have at a time, so a block has a slot only
    while a request holds it.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._slot_of: dict[int, int] = {}

    def place(self, blocks: Sequence[int], held: Collection[int] | None) -> np.ndarray:
        """The slots of a step's sequences, int32.

        Args:
            blocks: The block that stands for each sequence's state.
            held: Blocks that any request holds, in this step or not; the slots of others are free. None keeps all.
        """
        if held is not None:
            for block in self._slot_of.keys() - {*held, *blocks}:
                self._free.append(self._slot_of.pop(block))
        for block in blocks:
            if block not in self._slot_of:
                self._slot_of[block] = self._free.pop()
        return np.array([self._slot_of[block] for block in blocks], dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Slots without a block."""
        return len(self._free)


class StateStep:
    """The rows of a packed batch by sequence, for all recurrent layers of a KV cache group.

    Args:
        metadata: The batch.
        slots: Slot of each sequence's state.
    """

    def __init__(self, metadata: AttentionMetadata, slots: np.ndarray) -> None:
        lengths = metadata.query_lens
        begins = metadata.seqused_k == lengths  # no token of the sequence has run before
        decodes = np.flatnonzero((lengths == 1) & ~begins)
        chunks = np.flatnonzero((lengths > 1) | ((lengths == 1) & begins))
        first_rows = metadata.cu_seqlens_q[:-1]
        self.num_rows = metadata.num_tokens
        self.decode_rows = mx.array(first_rows[decodes]) if len(decodes) else None
        self.decode_slots = mx.array(slots[decodes])
        self.chunks = [
            (int(first_rows[seq]), int(first_rows[seq] + lengths[seq]), int(slots[seq]), bool(begins[seq]))
            for seq in chunks.tolist()
        ]
        order = [first_rows[decodes], *(np.arange(start, stop) for start, stop, _, _ in self.chunks)]
        rows = np.concatenate(order)
        self.order = None if (rows == np.arange(len(rows))).all() else mx.array(np.argsort(rows).astype(np.int32))


class StateLayerCache:
    """The states of one recurrent layer, and the step it serves; the model's code gets it in place of an ArraysCache.

    Attributes:
        layer: Shapes and element types.
        arrays: The states of all slots, [num_slots, ...] each.
        group: Index of the layer's KV cache group.
    """

    def __init__(self, layer: LayerState, num_slots: int, group: int = 0) -> None:
        self.layer = layer
        self.arrays = [mx.zeros((num_slots, *shape), dtype) for shape, dtype in zip(layer.shapes, layer.dtypes)]
        self.group = group
        self._num_calls = 0
        self._step: StateStep | None = None

    def make_mask(self, *_args: object, **_kwargs: object) -> None:
        """No mask: no sequence is padded."""

    def begin_step(self, step: StateStep) -> None:
        """Serve a packed batch until `end_step`."""
        self._num_calls = 0
        self._step = step

    def end_step(self) -> None:
        """Drop everything that belongs to the step."""
        self._step = None

    @property
    def num_reads(self) -> float:
        """Calls per mixer since the step began; 1 if the model is served correctly."""
        return self._num_calls / len(self.layer.mixers)

    def run(self, mixer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a mixer once for all decodes and once for each chunk.

        Args:
            mixer: The model's own code, which is called with an ArraysCache in place of this object.
            args: Its arguments; arrays of [T, 1, ...] and [T] are taken apart by sequence.
            kwargs: Likewise.

        Returns:
            Its result, with arrays of [T, 1, ...].

        Raises:
            RuntimeError: No step is in progress.
        """
        step = self._step
        if step is None:
            raise RuntimeError("no step is in progress: call the model through ModelRunner.forward")
        self._num_calls += 1
        results = []
        states: list[mx.array | None]
        if step.decode_rows is not None:
            states = [array[step.decode_slots] for array in self.arrays]
            results.append(
                self._call(mixer, args, kwargs, partial(_take, step, step.decode_rows), states, step.decode_slots)
            )
        for start, stop, slot, begins in step.chunks:
            states = [None if begins else array[slot : slot + 1] for array in self.arrays]
            made = self._call(mixer, args, kwargs, partial(_cut, step, start, stop), states, mx.array([slot]))
            results.append(tree_map(lambda array: array.swapaxes(0, 1) if _is_rows(array) else array, made))
        return _laid_back(results, step.order)

    def _call(
        self,
        mixer: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        part: Callable[[Any], Any],
        states: Sequence[mx.array | None],
        slots: mx.array,
    ) -> Any:
        """Call a mixer for a part of the rows, and keep the states that it leaves."""
        given = ArraysCache(len(states))
        for place, state in enumerate(states):
            given[place] = state
        result = mixer(
            *(given if value is self else part(value) for value in args),
            **{name: given if value is self else part(value) for name, value in kwargs.items()},
        )
        for array, before, after in zip(self.arrays, states, given.cache):
            if after is not before and after is not None:
                array[slots] = after.astype(array.dtype)
        return result


def _is_rows(value: Any) -> bool:
    return isinstance(value, mx.array) and value.ndim >= 2


def _take(step: StateStep, rows: mx.array, value: Any) -> Any:
    """An argument for the decodes: the rows of an array."""
    return value[rows] if isinstance(value, mx.array) and value.ndim and value.shape[0] == step.num_rows else value


def _cut(step: StateStep, start: int, stop: int, value: Any) -> Any:
    """An argument for a chunk: its rows as one sequence, [1, L, ...]; of positions, [T], the first."""
    if not isinstance(value, mx.array) or value.ndim == 0 or value.shape[0] != step.num_rows:
        return value
    if value.ndim == 1:
        return value[start : start + 1]
    return value[start:stop].swapaxes(0, 1)


def _laid_back(results: Sequence[Any], order: mx.array | None) -> Any:
    """The results of all parts as one, in the order of the rows."""
    leaves = [tree_flatten(result) if not isinstance(result, mx.array) else [("", result)] for result in results]
    whole = []
    for parts in zip(*leaves, strict=True):
        name, rows = parts[0][0], parts[0][1]
        if _is_rows(rows):
            rows = mx.concatenate([part for _, part in parts]) if len(parts) > 1 else rows
            rows = rows if order is None else rows[order]
        whole.append((name, rows))
    if isinstance(results[0], mx.array):
        return whole[0][1]
    return type(results[0])(tree_unflatten(whole))


# -- mixers ---------------------------------------------------------------------------------------------------


class MixerPatch(ClassPatch):
    """A hold on the mixers of a model, whose calls go through a `StateLayerCache` if they are given one.

    Args:
        model: The model.
        paths: Dotted names of the mixers.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        modules = dict(model.named_modules())
        super().__init__([modules[path] for path in paths], _by_sequence)


@cache
def _by_sequence(mixer_class: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a mixer that leaves the layout of its rows to the layer's cache."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, StateLayerCache):
                return value.run(partial(mixer_class.__call__, self), args, kwargs)
        return mixer_class.__call__(self, *args, **kwargs)

    return subclass_that_calls(mixer_class, call)


@contextmanager
def find_mixers(model: nn.Module, caches: Sequence[Any]) -> Iterator[list[list[str]]]:
    """Watch the model run inside the block.

    Args:
        model: The model; unchanged afterwards.
        caches: The state caches that it is given in the block.

    Yields:
        For each cache the dotted names of its mixers, complete when the block ends.
    """
    found: list[list[str]] = [[] for _ in caches]
    handed_on: list[set[int]] = []  # for each module that is running, the caches that it has handed to another one
    seen = [set[str]() for _ in caches]

    def call(path: str, base: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        given = [i for i, one in enumerate(caches) if any(value is one for value in (*args, *kwargs.values()))]
        if handed_on:
            handed_on[-1].update(given)
        handed_on.append(set())
        result = base(module, *args, **kwargs)
        below = handed_on.pop()
        if handed_on:
            handed_on[-1].update(below)
        for index in given:
            if index not in below and path not in seen[index]:
                seen[index].add(path)
                found[index].append(path)
        return result

    watched = []
    for path, module in model.named_modules():
        if path:
            watched.append((module, type(module)))
            module.__class__ = _watched(type(module), partial(call, path))
    try:
        yield found
    finally:
        for module, original in reversed(watched):
            module.__class__ = original


def _watched(base: type[nn.Module], call: Callable[..., Any]) -> type[nn.Module]:
    """A subclass whose calls go through a function."""

    def watch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(base.__call__, self, args, kwargs)

    return subclass_that_calls(base, watch)
