"""Eviction policies of the prefix cache: each names the cached block that loses its content next.

vLLM's rule is the order of the free queue, "lru", and needs no object. Every other policy is an `Eviction`, which sees
each cached block that no request holds, and names the next one to go when the pool has no block without content left.
"""

from __future__ import annotations

import copy
import heapq
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.base.field_checks import integer, number, refuse_misspelt_methods, suggestion
from workbench.base.text import shown


class Eviction(ABC):
    """Chooses the cached block that loses its content next, among those that no request holds.

    A policy keeps a memory: one object serves one run. A block is *released* when the last request that held it lets it
    go, and *removed* when a request holds it again because of a hit or when it loses its content. Blocks of one request
    are released from its last to its first.

    Attributes:
        time: Number of requests admitted so far.
    """

    time: int = 0

    def __init_subclass__(cls) -> None:
        refuse_misspelt_methods(cls, Eviction)

    @abstractmethod
    def release(self, block: int, digest: bytes) -> None:
        """No request holds a cached block any more.

        Args:
            block: Its id.
            digest: The hash of its content and of all tokens before it.
        """

    @abstractmethod
    def remove(self, block: int, digest: bytes) -> None:
        """A released block is used again, or has lost its content."""

    @abstractmethod
    def victim(self) -> int:
        """The released block that goes next."""

    def admit(self, digests: Sequence[bytes]) -> None:
        """A request is admitted for the first time; ``digests`` are the hashes of its prompt's full blocks."""
        self.time += 1

    def foresee(self, prompts: Iterable[Sequence[bytes]]) -> None:  # noqa: B027
        """Learn the future, in a simulation; most policies do without.

        Args:
            prompts: For each request to come, in the order of admission, the hashes of the full blocks that it can
                find: those that end before the last token of its prompt.
        """

    def cache(self, block: int, digest: bytes) -> None:  # noqa: B027 (most policies go by releases alone)
        """A held block has new content."""

    def hit(self, block: int, digest: bytes) -> None:  # noqa: B027
        """A request found a block, released or held by others."""

    def forget(self, block: int, digest: bytes) -> None:  # noqa: B027
        """A block has lost its content; if it was released, ``remove`` came before."""

    def copy(self) -> Eviction:
        """A policy in the same state that can be changed without changing this one."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _ByPriority(Eviction):
    """The released block with the lowest priority goes; of equal ones the one that was released first."""

    def __init__(self) -> None:
        self._released: dict[int, tuple[Any, int]] = {}
        self._heap: list[tuple[Any, int, int]] = []
        self._num_pushed = 0

    def _push(self, block: int, priority: Any) -> None:
        self._num_pushed += 1
        self._released[block] = (priority, self._num_pushed)
        heapq.heappush(self._heap, (priority, self._num_pushed, block))
        if len(self._heap) > 4 * len(self._released) + 64:
            self._heap = [(*entry, block) for block, entry in self._released.items()]
            heapq.heapify(self._heap)

    def remove(self, block: int, digest: bytes) -> None:
        """See `Eviction.remove`."""
        self._released.pop(block, None)

    def victim(self) -> int:
        """See `Eviction.victim`."""
        while True:
            priority, order, block = self._heap[0]
            if self._released.get(block) == (priority, order):
                return block
            heapq.heappop(self._heap)


class Lfu(_ByPriority):
    """The least frequently used content goes, with ageing: LFU-DA (Arlitt et al., 1999).

    A block's priority is its number of uses plus the age of the cache, which is the priority of the block that went
    last. So content that was popular long ago does not stay forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[bytes] = Counter()
        self._age = 0

    def cache(self, block: int, digest: bytes) -> None:
        """See `Eviction.cache`."""
        self._uses[digest] += 1

    def hit(self, block: int, digest: bytes) -> None:
        """See `Eviction.hit`."""
        self._uses[digest] += 1

    def release(self, block: int, digest: bytes) -> None:
        """See `Eviction.release`."""
        self._push(block, self._uses[digest] + self._age)

    def victim(self) -> int:
        """See `Eviction.victim`."""
        block = super().victim()
        self._age = self._released[block][0]
        return block


class Ttl(Eviction):
    """Content is kept for a time after its latest use, as a provider may promise it.

    Content whose time is over goes first, the oldest before others. While every released block is within its time, the
    one that was released last goes: what was promised stays.

    Args:
        ttl: Number of admitted requests for which content is kept.
    """

    def __init__(self, ttl: int = 64) -> None:
        self._ttl = integer("ttl", ttl, 0)
        self._time_of: dict[int, int] = {}  # of each released block
        self._released: OrderedDict[int, OrderedDict[int, None]] = OrderedDict()  # by that time, in order

    def release(self, block: int, digest: bytes) -> None:
        """See `Eviction.release`."""
        self._time_of[block] = self.time
        self._released.setdefault(self.time, OrderedDict())[block] = None

    def remove(self, block: int, digest: bytes) -> None:
        """See `Eviction.remove`."""
        if (time := self._time_of.pop(block, None)) is not None:
            del self._released[time][block]
            if not self._released[time]:
                del self._released[time]

    def victim(self) -> int:
        """See `Eviction.victim`."""
        time = next(iter(self._released))
        if self.time - time <= self._ttl:
            time = next(reversed(self._released))
        # The blocks of one request were released from its last to its first: its last goes before its first.
        return next(iter(self._released[time]))

    def __repr__(self) -> str:
        return f"Ttl(ttl={self._ttl})"


class TwoZones(Eviction):
    """Segmented LRU: content that was used again lives in a protected zone, and what was used once goes first.

    Args:
        protected: Largest share of the released blocks in the protected zone; its oldest go back to the first zone.
    """

    def __init__(self, protected: float = 0.8) -> None:
        self._protected = number("protected", protected, 0.0, 1.0)
        self._used_again: set[bytes] = set()
        self._zones: tuple[OrderedDict[int, bytes], OrderedDict[int, bytes]] = (OrderedDict(), OrderedDict())

    def hit(self, block: int, digest: bytes) -> None:
        """See `Eviction.hit`."""
        self._used_again.add(digest)

    def release(self, block: int, digest: bytes) -> None:
        """See `Eviction.release`."""
        first, second = self._zones
        if digest not in self._used_again:
            first[block] = digest
            return
        second[block] = digest
        while len(second) > self._protected * (len(first) + len(second)):
            oldest, content = second.popitem(last=False)
            self._used_again.discard(content)
            first[oldest] = content

    def remove(self, block: int, digest: bytes) -> None:
        """See `Eviction.remove`."""
        for zone in self._zones:
            zone.pop(block, None)

    def victim(self) -> int:
        """See `Eviction.victim`."""
        first, second = self._zones
        return next(iter(first or second))

    def __repr__(self) -> str:
        return f"TwoZones(protected={self._protected:g})"


class Session(Eviction):
    """The conversation that was used the longest time ago goes, as a whole and from its end; LRU of sessions.

    A conversation is all content that begins with the same block.
    """

    def __init__(self) -> None:
        self._first: dict[bytes, bytes] = {}  # of each content the first block of its prompt
        self._latest: dict[bytes, int] = {}  # time of each conversation's latest use
        self._released: dict[bytes, OrderedDict[int, None]] = {}
        self._conversation: dict[int, bytes] = {}  # of each released block
        self._heap: list[tuple[int, int, bytes]] = []  # times of use of conversations with released blocks, also old
        self._num_pushed = 0
        self._valid: dict[bytes, int] = {}  # the number of the entry that counts

    def admit(self, digests: Sequence[bytes]) -> None:
        """See `Eviction.admit`."""
        super().admit(digests)
        if digests:
            self._latest[digests[0]] = self.time
            if digests[0] in self._released:
                self._push(digests[0])
            self._first.update(dict.fromkeys(digests, digests[0]))

    def _push(self, first: bytes) -> None:
        self._num_pushed += 1
        self._valid[first] = self._num_pushed
        heapq.heappush(self._heap, (self._latest[first], self._num_pushed, first))

    def release(self, block: int, digest: bytes) -> None:
        """See `Eviction.release`."""
        first = self._first.get(digest, digest)
        self._latest.setdefault(first, self.time)
        self._conversation[block] = first
        if first not in self._released:
            self._push(first)
        self._released.setdefault(first, OrderedDict())[block] = None

    def remove(self, block: int, digest: bytes) -> None:
        """See `Eviction.remove`."""
        if (first := self._conversation.pop(block, None)) is not None:
            del self._released[first][block]
            if not self._released[first]:
                del self._released[first], self._valid[first]

    def victim(self) -> int:
        """See `Eviction.victim`."""
        while True:
            _, number_of, oldest = self._heap[0]
            if self._valid.get(oldest) == number_of:
                return next(iter(self._released[oldest]))
            heapq.heappop(self._heap)


class S3Fifo(Eviction):
    """Three queues (Yang et al., SOSP 2023): a small one for newcomers, a main one, and a memory of those that went.

    New content enters the small queue. It moves to the main one if it is used again before it leaves, or soon after it
    left. The main queue gives content that was used a second chance.

    Args:
        small: Share of the blocks that the small queue may hold.
    """

    def __init__(self, small: float = 0.1) -> None:
        self._share = number("small", small, 0.0, 1.0)
        self._small: OrderedDict[int, bytes] = OrderedDict()
        self._main: OrderedDict[int, bytes] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._uses: Counter[bytes] = Counter()

    def hit(self, block: int, digest: bytes) -> None:
        """See `Eviction.hit`."""
        self._uses[digest] = min(3, self._uses[digest] + 1)

    def release(self, block: int, digest: bytes) -> None:
        """See `Eviction.release`."""
        if self._gone.pop(digest, True) is None or self._uses[digest] > 1:
            self._main[block] = digest
        else:
            self._small[block] = digest

    def remove(self, block: int, digest: bytes) -> None:
        """See `Eviction.remove`."""
        self._small.pop(block, None)
        self._main.pop(block, None)

    def victim(self) -> int:
        """See `Eviction.victim`."""
        while True:
            total = len(self._small) + len(self._main)
            if self._small and (len(self._small) > self._share * total or not self._main):
                block, digest = next(iter(self._small.items()))
                if self._uses[digest] > 1 and self._main:
                    del self._small[block]
                    self._main[block] = digest
                    continue
                self._gone[digest] = None
                while len(self._gone) > total:
                    self._gone.popitem(last=False)
                return block
            block, digest = next(iter(self._main.items()))
            if not self._uses[digest]:
                return block
            self._uses[digest] -= 1
            self._main.move_to_end(block)


class Belady(_ByPriority):
    """The content that is used again last goes, which needs the future: a ceiling, not a policy.

    With one request at a time, where hits do not change the order of accesses, no policy finds more. ``foresee`` gives
    it the prompts that will come.
    """

    _NEVER = -(2.0**62)

    def __init__(self) -> None:
        super().__init__()
        self._times: dict[bytes, list[int]] = {}
        self._holders: dict[bytes, set[int]] = {}

    def foresee(self, prompts: Iterable[Sequence[bytes]]) -> None:
        """See `Eviction.foresee`."""
        for time, digests in enumerate(prompts, start=self.time + 1):
            for digest in digests:
                self._times.setdefault(digest, []).append(time)

    def admit(self, digests: Sequence[bytes]) -> None:
        """See `Eviction.admit`."""
        super().admit(digests)
        for digest in digests:
            self._order(digest)

    def cache(self, block: int, digest: bytes) -> None:
        """See `Eviction.cache`."""
        self._holders.setdefault(digest, set()).add(block)
        self._order(digest)

    def release(self, block: int, digest: bytes) -> None:
        """See `Eviction.release`."""
        self._push(block, self._priority(digest))

    def forget(self, block: int, digest: bytes) -> None:
        """See `Eviction.forget`."""
        holders = self._holders[digest]
        holders.discard(block)
        if not holders:
            del self._holders[digest]
        self._order(digest)

    def _order(self, digest: bytes) -> None:
        """Something has changed for a content: put the released blocks that hold it into their new places."""
        for block in self._holders.get(digest, ()):
            if block in self._released:
                self._push(block, self._priority(digest))

    def _priority(self, digest: bytes) -> float:
        """The later the next use, the lower. A copy of what another block holds as well is of no use."""
        if len(self._holders.get(digest, ())) > 1:
            return self._NEVER
        times = self._times.get(digest, ())
        place = bisect_right(times, self.time)
        return -float(times[place]) if place < len(times) else self._NEVER


EVICTIONS: dict[str, type[Eviction]] = {
    "lfu": Lfu,
    "ttl": Ttl,
    "two_zones": TwoZones,
    "session": Session,
    "s3fifo": S3Fifo,
    "belady": Belady,
}
"""Policies by the word of ``EngineConfig.eviction``; "lru" has no object."""


def make_eviction(eviction: str | Eviction) -> Eviction:
    """The policy of a run: a fresh one for a word other than "lru", a copy of an object.

    Raises:
        ValueError: There is no such policy.
    """
    if isinstance(eviction, Eviction):
        return eviction.copy()
    if not isinstance(eviction, str) or eviction not in EVICTIONS:
        words = ", ".join(["lru", *EVICTIONS])
        raise ValueError(
            f"eviction must be one of {words}, or an Eviction, got {shown(eviction)}{suggestion(eviction, EVICTIONS)}"
        )
    return EVICTIONS[eviction]()
