"""Recurrent layers over a packed batch: a state per request, and the model's own code sequence by sequence.

Everywhere else a token is a batch row, [T, 1]. A recurrent layer's mixer passes a state from token to token, so its
rows are laid out by sequence for this one call: all decodes as one batch [B, 1, ...] with their states stacked, each
chunk of a prompt as [1, L, ...] with the state that the chunk before left. The results are laid back in the order of
the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import ArraysCache

from workbench.kernels.attention.metadata import AttentionMetadata


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


class StateBatch:
    """The states that one call of the mixers leaves for each of its sequences.

    Attributes:
        arrays: For each layer its arrays, with an axis of sequences in front; None for one that was not written yet.
    """

    def __init__(self) -> None:
        self.arrays: dict[StateLayerCache, list[mx.array | None]] = {}


class State(NamedTuple):
    """The state of one sequence after some token: a row of a batch of states."""

    batch: StateBatch
    row: int


class States:
    """The states of a KV cache group that a later step may begin from.

    A request continues from the state after its last token, and a request with a hit in the prefix cache from the
    state at the end of a block. With drafts there is a state after each of them, because it is not known yet how many
    will be accepted. A state is found by the number of tokens that it covers, so a stale one is never taken.
    """

    def __init__(self) -> None:
        self._of_request: dict[Hashable, dict[int, State]] = {}
        self._of_block: dict[int, State] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the states that are kept."""
        kept = [*self._of_request.values(), self._of_block]
        batches = {id(state.batch): state.batch for states in kept for state in states.values()}
        return sum(
            array.nbytes
            for batch in batches.values()
            for arrays in batch.arrays.values()
            for array in arrays
            if array is not None
        )

    def find(self, name: Hashable, num_tokens: int, block: int | None) -> State | None:
        """The state after the first ``num_tokens`` tokens of a request, None if it is not kept.

        ``block`` is the block that ends with them, None if they end inside one.
        """
        if block is not None and (state := self._of_block.get(block)) is not None:
            return state
        return self._of_request.get(name, {}).get(num_tokens)

    def forget(self, names: Collection[Hashable], is_cached: Callable[[int], bool]) -> None:
        """Drop the states of requests other than these, and of blocks that are not cached."""
        for name in self._of_request.keys() - names:
            del self._of_request[name]
        for block in [block for block in self._of_block if not is_cached(block)]:
            del self._of_block[block]

    def keep(self, name: Hashable, states: dict[int, State], blocks: Mapping[int, int]) -> None:
        """Take the states of a step.

        Args:
            name: The request.
            states: Its states, by the number of tokens that they cover; those of the step before are dropped.
            blocks: The block that ends after a number of tokens.
        """
        self._of_request[name] = states
        for num_tokens, block in blocks.items():
            self._of_block[block] = states[num_tokens]


class MixerCall(NamedTuple):
    """A part of a packed batch for which a mixer is called once.

    Attributes:
        rows: The rows of the batch: a range of one sequence's rows, or one row of each of several sequences.
        gathered: ``rows`` for the second kind; None for the first.
        reads: The states that its sequences begin with; None for a sequence without a token before.
        writes: The states that it leaves.
    """

    rows: np.ndarray
    gathered: mx.array | None
    reads: Sequence[State] | None
    writes: StateBatch


class StateStep:
    """The rows of a packed batch by sequence, for all recurrent layers of a KV cache group.

    Decodes are one call of a mixer, and each chunk of a prompt is one. A sequence with drafts is called for its rows
    one after another, so that the state after each is kept, together with the other sequences that have drafts.

    Args:
        metadata: The batch.
        states: The states of the group, which get those of this step.
        names: The name of each sequence, by which its state is found in the next step.
        num_kept: For each sequence the number of last rows whose states are kept: one, and one more for each draft.
        kept: Names whose states are still needed, and whether a block's is; None keeps all.

    Raises:
        RuntimeError: The state that a sequence continues from is not there.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        states: States,
        names: Sequence[Hashable],
        num_kept: np.ndarray,
        kept: tuple[Collection[Hashable], Callable[[int], bool]] | None = None,
    ) -> None:
        size = metadata.block_size
        self.num_rows = metadata.num_tokens
        reads: list[State | None] = []
        starts = (metadata.seqused_k - metadata.query_lens).tolist()
        for name, table, start in zip(names, metadata.block_table, starts, strict=True):
            block = int(table[start // size - 1]) if start % size == 0 else None
            found = states.find(name, start, block) if start else None
            if start and found is None and (kept is None or name in kept[0]):  # a request that has ended needs none
                raise RuntimeError(f"request {name!r} has no recurrent state after its first {start} tokens")
            reads.append(found)
        if kept is not None:
            states.forget(*kept)
        self.calls: list[MixerCall] = []
        made: list[dict[int, State]] = [{} for _ in names]
        ends = metadata.cu_seqlens_q[1:] - num_kept  # the row of the first state that is kept
        alone = (ends == metadata.cu_seqlens_q[:-1]) & np.array([state is not None for state in reads])
        self._add(np.flatnonzero(alone), ends, reads, made, metadata)
        for seq in np.flatnonzero(~alone).tolist():
            batch = StateBatch()
            first, state = int(metadata.cu_seqlens_q[seq]), reads[seq]
            rows = np.arange(first, int(ends[seq]) + 1)
            self.calls.append(MixerCall(rows, None, None if state is None else [state], batch))
            made[seq][starts[seq] + len(rows)] = reads[seq] = State(batch, 0)
        for draft in range(1, int(num_kept.max())):
            self._add(np.flatnonzero(num_kept > draft), ends + draft, reads, made, metadata)
        for name, table, of_sequence in zip(names, metadata.block_table, made):
            blocks = {length: int(table[length // size - 1]) for length in of_sequence if length % size == 0}
            states.keep(name, of_sequence, {length: block for length, block in blocks.items() if block})
        rows = np.concatenate([call.rows for call in self.calls])
        self.order = None if (rows == np.arange(len(rows))).all() else mx.array(np.argsort(rows).astype(np.int32))

    def _add(
        self,
        sequences: np.ndarray,
        rows: np.ndarray,
        reads: list[State | None],
        made: list[dict[int, State]],
        metadata: AttentionMetadata,
    ) -> None:
        """Add a call for one row of each of these sequences; they continue from the states that it leaves."""
        if not len(sequences):
            return
        batch, chosen = StateBatch(), rows[sequences]
        before = [state for seq in sequences.tolist() if (state := reads[seq]) is not None]
        self.calls.append(MixerCall(chosen, mx.array(chosen), before, batch))
        lengths = metadata.seqused_k - (metadata.cu_seqlens_q[1:] - rows) + 1
        for row, seq in enumerate(sequences.tolist()):
            made[seq][int(lengths[seq])] = reads[seq] = State(batch, row)


class StateLayerCache:
    """The states of one recurrent layer, and the step it serves; the model's code gets it in place of an ArraysCache.

    Attributes:
        layer: Shapes and element types.
        group: Index of the layer's KV cache group.
    """

    def __init__(self, layer: LayerState, group: int = 0) -> None:
        self.layer = layer
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

    @property
    def arrays(self) -> list[mx.array]:
        """The states that the step in progress has written."""
        calls = self._step.calls if self._step is not None else ()
        return [array for call in calls for array in call.writes.arrays.get(self, ()) if array is not None]

    def run(self, mixer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a mixer once for all decodes and once for each chunk, see `StateStep`.

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
        return _laid_back([self._call(mixer, args, kwargs, call, step.num_rows) for call in step.calls], step.order)

    def _call(
        self, mixer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: MixerCall, num_rows: int
    ) -> Any:
        """Call a mixer for a part of the rows, and keep the states that it leaves."""
        made = call.writes.arrays.setdefault(self, [None] * len(self.layer.shapes))
        before = [
            self._read(call.reads, place) if written is None and call.reads is not None else written
            for place, written in enumerate(made)
        ]
        given = ArraysCache(len(before))
        for place, state in enumerate(before):
            given[place] = state
        rows = call.gathered
        part = partial(_take, rows, num_rows) if rows is not None else partial(_cut, call.rows, num_rows)
        result = mixer(
            *(given if value is self else part(value) for value in args),
            **{name: given if value is self else part(value) for name, value in kwargs.items()},
        )
        for place, (state, after) in enumerate(zip(before, given.cache)):
            if after is not state and after is not None:
                if tuple(after.shape[1:]) != self.layer.shapes[place]:
                    raise NotImplementedError(
                        f"a recurrent state grows with its first tokens, to {self.layer.shapes[place]}: sequences of "
                        "different ages would need states of one size to be computed together"
                    )
                made[place] = mx.contiguous(after)  # not a view, which would keep the rows of a whole chunk
        if rows is None:
            return tree_map(lambda array: array.swapaxes(0, 1) if _is_rows(array) else array, result)
        return result

    def _read(self, states: Sequence[State], place: int) -> mx.array | None:
        """One of the arrays of several sequences' states; None if no mixer has written it."""
        parts = []
        for batch, group in groupby(states, key=lambda state: state.batch):
            array, rows = batch.arrays[self][place], [state.row for state in group]
            if array is None:
                return None
            parts.append(array if rows == list(range(len(array))) else array[mx.array(rows)])
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def _is_rows(value: Any) -> bool:
    return isinstance(value, mx.array) and value.ndim >= 2


def _take(rows: mx.array, num_rows: int, value: Any) -> Any:
    """An argument for one row of each sequence: the rows of an array."""
    return value[rows] if isinstance(value, mx.array) and value.ndim and value.shape[0] == num_rows else value


def _cut(rows: np.ndarray, num_rows: int, value: Any) -> Any:
    """An argument for a chunk: its rows as one sequence, [1, L, ...]; of positions, [T], the first."""
    if not isinstance(value, mx.array) or value.ndim == 0 or value.shape[0] != num_rows:
        return value
    start = int(rows[0])
    if value.ndim == 1:
        return value[start : start + 1]
    return value[start : start + len(rows)].swapaxes(0, 1)


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
