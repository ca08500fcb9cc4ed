"""A step's changes to the pool of KV blocks, handing out aside: the content it lost and the blocks it got back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from workbench.trace.fields import MAX_BLOCKS

Runs = tuple[Annotated[int, msgspec.Meta(gt=-MAX_BLOCKS, lt=MAX_BLOCKS)], ...]
"""Block ids in order. A negative number stands for a run: (7, -3) is 7, 6, 5, 4, 3, and (3, -7, 9) is 3 to 7 and 9."""


def pack(blocks: Iterable[int]) -> Runs:
    """Block ids, with runs of neighbours by their ends.

    Example:
        >>> pack([7, 6, 5, 12]), unpack((7, -5, 12))
        ((7, -5, 12), [7, 6, 5, 12])
    """
    packed: list[int] = []
    previous, step = -2, 0
    for block in blocks:
        distance = block - previous
        if step and distance == step and block:
            packed[-1] = -block
        elif not step and block and (distance == 1 or distance == -1):
            step = distance
            packed.append(-block)
        else:
            step = 0
            packed.append(block)
        previous = block
    return tuple(packed)


def unpack(runs: Runs) -> list[int]:
    """The block ids of which ``pack`` made these runs."""
    blocks: list[int] = []
    for entry in runs:
        if entry >= 0:
            blocks.append(entry)
        else:
            step = 1 if -entry > blocks[-1] else -1
            blocks.extend(range(blocks[-1] + step, -entry + step, step))
    return blocks


def length_of(runs: Runs) -> int:
    """Number of block ids; more than any pool has if the runs make no sense."""
    if runs and (runs[0] < 0 or any(first < 0 and last < 0 for first, last in pairwise(runs))):
        return MAX_BLOCKS
    return sum(1 if last >= 0 else abs(-last - first) for first, last in pairwise((0, *runs)))


class PoolChange(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The net change of a block pool in one part of a step.

    Blocks that were handed out are not named again: they are in the ``new_block_ids`` of the chunks. After those have
    left the free queue, it is ``front``, then what was there before, then ``back``. The content of an evicted block is
    the one with which the block was named last in a record's ``cached_block_ids``.

    Attributes:
        evicted_runs: ``evicted``, packed.
        front_runs: ``front``, packed.
        back_runs: ``back``, packed.
    """

    evicted_runs: Runs = msgspec.field(default=(), name="evicted")
    front_runs: Runs = msgspec.field(default=(), name="front")
    back_runs: Runs = msgspec.field(default=(), name="back")

    @classmethod
    def of(cls, evicted: Iterable[int] = (), front: Iterable[int] = (), back: Iterable[int] = ()) -> PoolChange:
        """The change with these blocks; without any the constant, which a file leaves out."""
        change = cls(pack(evicted), pack(front), pack(back))
        return change if change != NO_CHANGE else NO_CHANGE

    @property
    def evicted(self) -> list[int]:
        """Cached blocks that lost their content, in order: they were handed out again, or for another reason."""
        return unpack(self.evicted_runs)

    @property
    def front(self) -> list[int]:
        """Blocks given back that are handed out next, in the order of the queue."""
        return unpack(self.front_runs)

    @property
    def back(self) -> list[int]:
        """Blocks given back that are handed out last, in the order of the queue."""
        return unpack(self.back_runs)

    def then(self, later: PoolChange) -> PoolChange:
        """This change and a later one in which no block was handed out."""
        if later is NO_CHANGE:
            return self
        if self is NO_CHANGE:
            return later
        evicted = dict.fromkeys(self.evicted + later.evicted)
        return PoolChange.of(evicted, later.front + self.front, self.back + later.back)


NO_CHANGE = PoolChange()


class PoolLog:
    """Notes what a pool does, call by call, and tells the net change."""

    def __init__(self) -> None:
        self._evicted: list[int] = []
        self._given_back: list[tuple[Sequence[int], Sequence[int]]] = []

    def evict(self, block: int) -> None:
        """A cached block has lost its content."""
        self._evicted.append(block)

    def give_back(self, front: Sequence[int], back: Sequence[int]) -> None:
        """Blocks were put before and behind the free queue, in its order."""
        self._given_back.append((front, back))

    def take(self, is_free: Callable[[int], bool]) -> PoolChange:
        """The net change since the last call.

        Args:
            is_free: Whether a block is in the free queue now: it may have been handed out again.
        """
        if not (self._evicted or self._given_back):
            return NO_CHANGE
        front: dict[int, None] = {}  # from its end to its beginning
        back: dict[int, None] = {}
        for to_front, to_back in self._given_back:
            for block in reversed(to_front):
                back.pop(block, None)
                front.pop(block, None)
                front[block] = None
            for block in to_back:
                front.pop(block, None)
                back.pop(block, None)
                back[block] = None
        change = PoolChange.of(dict.fromkeys(self._evicted), filter(is_free, reversed(front)), filter(is_free, back))
        self._evicted.clear()
        self._given_back.clear()
        return change
