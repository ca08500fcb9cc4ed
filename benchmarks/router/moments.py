"""The replicas as they were at the moment of each decision, from what the client and KV events say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.analysis.fleet.routers import PowerOfTwo, Router
from workbench.simulation.arrivals import Arrival
from workbench.trace.formats.kv_events.events import BlockRemoved, BlockStored
from workbench.trace.formats.kv_events.recording import KVEvents

Prefix = tuple[Any, ...]
"""The blocks of a prompt from its beginning, each in the one before: ``((None, block 0), block 1)``."""


@dataclass
class Moment:
    """A replica at one moment, as routers see it."""

    index: int
    block_size: int
    num_in_flight: int = 0
    num_prefill_tokens: int = 0
    cached: set[Prefix] = field(default_factory=set)

    def num_cached_tokens(self, request: Arrival) -> int:
        """Prompt tokens in the prefix cache, without the last one."""
        prompt, size, prefix = tuple(request.prompt_token_ids), self.block_size, (None,)
        for start in range(0, (len(prompt) - 1) // size * size, size):
            prefix = (prefix, prompt[start : start + size])
            if prefix not in self.cached:
                return start
        return (len(prompt) - 1) // size * size


class CacheContents:
    """The content of one replica's prefix cache at any time, by its KV events."""

    def __init__(self, events: KVEvents) -> None:
        self._batches = sorted(events.batches, key=lambda batch: batch.seq)
        self._next = 0
        self._prefix_of: dict[Any, Prefix] = {}
        self.prefixes: set[Prefix] = set()

    def advance(self, time: float) -> None:
        """Take in the events that were sent before a time."""
        while self._next < len(self._batches) and self._batches[self._next].ts <= time:
            for event in self._batches[self._next].events:
                if isinstance(event, BlockStored):
                    prefix = self._prefix_of[event.parent_block_hash] if event.parent_block_hash else (None,)
                    for place, digest in enumerate(event.block_hashes):
                        tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
                        prefix = self._prefix_of[digest] = (prefix, tuple(tokens))
                        self.prefixes.add(prefix)
                elif isinstance(event, BlockRemoved):
                    self.prefixes -= {self._prefix_of[digest] for digest in event.block_hashes}
            self._next += 1


def decide_again(
    router: Router,
    requests: Sequence[Arrival],
    rows: Sequence[dict[str, Any]],
    contents: Sequence[CacheContents],
    block_size: int,
) -> tuple[int, list[str]]:
    """Let a router decide about every request at the loads that were recorded at its moment.

    Args:
        router: The simulated router, started.
        requests: The requests in the order in which they were sent.
        rows: When the client sent each, got its first token and its last, and the real router's ``replica``.
        contents: The prefix caches.
        block_size: Tokens in a block.

    Returns:
        The number of equal decisions, and a line for each other one.
    """
    equal, others = 0, []
    expected: dict[str, int] = {}  # prompt tokens that a request was expected to compute
    for number, (request, row) in enumerate(zip(requests, rows)):
        now = row["sent"]
        moments = []
        for index, content in enumerate(contents):
            content.advance(now)
            sent = [one for one in rows[:number] if one["replica"] == index]
            moments.append(
                Moment(
                    index,
                    block_size,
                    num_in_flight=sum(one["end"] > now for one in sent),
                    num_prefill_tokens=sum(expected[one["id"]] for one in sent if one["first"] > now),
                    cached=content.prefixes,
                )
            )
        real = row["replica"]
        decision = router.choose(request, moments)
        tied = isinstance(router, PowerOfTwo) and len({moment.num_in_flight for moment in moments}) == 1
        if decision.replica == real or tied:
            equal += 1
        else:
            others.append(f"{row['id']}: {decision.replica} {decision.scores}, not {real}")
        router.sent(request, real)
        tokens = len(request.prompt_token_ids)
        expected[row["id"]] = tokens - (moments[real].num_cached_tokens(request) if router.reads_prefixes else 0)
    return equal, others
