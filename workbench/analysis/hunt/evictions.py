"""Judges an eviction policy: it must be told what happens, and name a block that its rule names.

The rules are written a second time here, each as a plain question about all released blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from workbench.analysis.hunt.watch import BrokenLaw
from workbench.scheduler.block_pool import BlockPool
from workbench.scheduler.eviction import Belady, Eviction, Lfu, S3Fifo, Session, Ttl, TwoZones
from workbench.trace.laws import Broken


class _Released(NamedTuple):
    digest: bytes
    time: int
    num_uses: int
    conversation: bytes  # as known when it was released


class _Zones:
    """The rules of `TwoZones` and `S3Fifo`: which queue of blocks each block is in.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: TwoZones | S3Fifo) -> None:
        self._policy = policy
        self._first: list[tuple[int, bytes]] = []
        self._second: list[tuple[int, bytes]] = []
        self._uses = Counter[bytes]()
        self._gone: list[bytes] = []

    def hit(self, digest: bytes) -> None:
        """A content is used again; S3-FIFO counts to three."""
        self._uses[digest] += self._uses[digest] < 3

    def release(self, block: int, digest: bytes) -> None:
        """A block goes into the queue of those that were used once, or into the other one."""
        if isinstance(self._policy, S3Fifo):
            returns = digest in self._gone
            self._gone = [other for other in self._gone if other != digest]
            (self._second if returns or self._uses[digest] > 1 else self._first).append((block, digest))
            return
        (self._second if self._uses[digest] else self._first).append((block, digest))
        while self._uses[digest] and len(self._second) > self._policy._protected * len(self._first + self._second):
            self._first.append(self._second.pop(0))
            self._uses[self._first[-1][1]] = 0

    def remove(self, block: int) -> None:
        """A block is used again, or has lost its content."""
        self._first = [entry for entry in self._first if entry[0] != block]
        self._second = [entry for entry in self._second if entry[0] != block]

    def victim(self) -> int:
        """The block that goes."""
        if isinstance(self._policy, TwoZones):
            return (self._first or self._second)[0][0]
        while True:
            total = len(self._first + self._second)
            if self._first and (not self._second or len(self._first) > self._policy._share * total):
                block, digest = self._first[0]
                if self._uses[digest] < 2 or not self._second:
                    self._gone = [*(other for other in self._gone if other != digest), digest][-total:]
                    return block
                self._second.append(self._first.pop(0))
            elif self._uses[self._second[0][1]]:
                self._uses[self._second[0][1]] -= 1
                self._second.append(self._second.pop(0))
            else:
                return self._second[0][0]


class Judged:
    """Stands between a pool and its policy.

    Attributes:
        law: The law that is judged.
        is_on: Whether it is.

    Raises:
        BrokenLaw: The pool tells the policy something else than what happens, or the policy names a wrong block.
    """

    law, is_on = "blocks", True

    def __init__(self, policy: Eviction, pool: BlockPool) -> None:
        self._policy, self._pool = policy, pool
        self._released: dict[int, _Released] = {}  # in order
        self._uses, self._copies = Counter[bytes](), Counter[bytes]()
        self._conversation: dict[bytes, bytes] = {}
        self._latest: dict[bytes, int] = {}
        self._times: dict[bytes, list[int]] = {}
        self._asked: dict[bytes, int] = {}  # the time of the latest event, after which the next use counts
        self._age = self._time = 0
        self._zones = _Zones(policy) if isinstance(policy, (TwoZones, S3Fifo)) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def foresee(self, prompts: Iterable[Sequence[bytes]]) -> None:
        """See `Eviction.foresee`."""
        told = list(prompts)
        for time, digest in ((time, digest) for time, digests in enumerate(told, 1) for digest in digests):
            self._times.setdefault(digest, []).append(time)
        self._policy.foresee(told)

    def admit(self, digests: Sequence[bytes]) -> None:
        """See `Eviction.admit`."""
        self._time += 1
        self._conversation.update(dict.fromkeys(digests, digests[0]) if digests else {})
        self._latest.update({digest: self._time for digest in digests[:1]})
        self._asked.update(dict.fromkeys(digests, self._time))
        self._policy.admit(digests)

    def expect_admissions(self, number: int) -> None:
        """Compare the admissions that the policy was told of with those that there were."""
        self._expect(self._time == number, f"{self._time} admissions are told, there were {number}")

    def cache(self, block: int, digest: bytes) -> None:
        """See `Eviction.cache`."""
        self._expect(self._pool.hash_of(block) == digest, "other content is cached")
        self._uses[digest] += 1
        self._copies[digest] += 1
        self._asked[digest] = self._time
        self._policy.cache(block, digest)

    def hit(self, block: int, digest: bytes) -> None:
        """See `Eviction.hit`."""
        self._expect(block not in self._released and self._pool.hash_of(block) == digest, "another block is found")
        self._uses[digest] += 1
        if self._zones is not None:
            self._zones.hit(digest)
        self._policy.hit(block, digest)

    def release(self, block: int, digest: bytes) -> None:
        """See `Eviction.release`."""
        is_held = block in self._released or self._pool.ref_count(block) > 0
        self._expect(not is_held and self._pool.hash_of(block) == digest, "another block is released")
        conversation = self._conversation.get(digest, digest)
        self._released[block] = _Released(digest, self._time, self._uses[digest] + self._age, conversation)
        self._latest.setdefault(conversation, self._time)
        self._asked[digest] = self._time
        if self._zones is not None:
            self._zones.release(block, digest)
        self._policy.release(block, digest)

    def remove(self, block: int, digest: bytes) -> None:
        """See `Eviction.remove`."""
        released = self._released.pop(block, None)
        self._expect(released is not None and released.digest == digest, "another block is used again")
        if self._zones is not None:
            self._zones.remove(block)
        self._policy.remove(block, digest)

    def forget(self, block: int, digest: bytes) -> None:
        """See `Eviction.forget`."""
        self._copies[digest] -= 1
        self._asked[digest] = self._time
        self._policy.forget(block, digest)

    def victim(self) -> int:
        """See `Eviction.victim`."""
        block = self._policy.victim()
        if self.is_on:
            right = self._right()
            self._expect(block in right, f"{block} goes, {self._policy} names {right}")
            self._age = self._released[block].num_uses
        return block

    def _right(self) -> list[int]:
        """The blocks that may go by the policy's rule; all released ones if its rule is not written here."""
        if self._zones is not None:
            return [self._zones.victim()]
        released = self._released
        key: dict[int, float] = dict.fromkeys(released, 0.0)
        if isinstance(self._policy, Lfu):
            key = {block: its.num_uses for block, its in released.items()}
        elif isinstance(self._policy, Ttl):
            oldest = min(its.time for its in released.values())
            sign = 1 if self._time - oldest > self._policy._ttl else -1
            key = {block: sign * its.time for block, its in released.items()}
        elif isinstance(self._policy, Session):
            key = {block: self._latest[its.conversation] for block, its in released.items()}
        elif isinstance(self._policy, Belady):
            key = {block: -self._next_use(its.digest) for block, its in released.items()}
        right = [block for block in released if key[block] == min(key.values())]
        return right[:1] if isinstance(self._policy, (Lfu, Ttl)) else right

    def _next_use(self, digest: bytes) -> float:
        if self._copies[digest] > 1:  # a copy is of no use
            return inf
        return min((time for time in self._times.get(digest, ()) if time > self._asked[digest]), default=inf)

    def _expect(self, holds: bool, message: str) -> None:
        if self.is_on and not holds:
            raise BrokenLaw(Broken(self.law, 0, "", f"an eviction is wrong: {message}"))
