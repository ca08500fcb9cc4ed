"""Meetings of events: pairs and triples that happen within two steps, which guide a hunt to what has not happened yet.

Lines of code do not tell workloads apart, because 300 random ones reach nearly all. Faults live where events meet: a
preemption of a request whose output is in flight, a hit on blocks that were given back a step ago. Each step has a set
of events for each request; a pair is two events of the same request, or of any two, in the same step or up to two steps
apart. Nearly all pairs that exist are met within some thousand random workloads, and some of them once in a thousand:
workloads with a rare pair are kept, and changed to make others.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from workbench.analysis.hunt.drive import Run
from workbench.analysis.hunt.workloads import CONFIG_BYTES, MAX_REQUESTS, REQUEST_BYTES, WORKLOAD_BYTES

EVENTS = (
    "arrives",
    "is admitted",
    "is resumed",
    "hits the prefix cache",
    "has a part of its prompt computed",
    "has its prompt completed",
    "decodes",
    "has drafts",
    "has all drafts accepted",
    "has some drafts accepted",
    "has all drafts rejected",
    "is preempted",
    "loses a chunk of the same step",
    "has an output in flight",
    "loses an output in flight",
    "reaches its last token",
    "stops",
    "is aborted",
    "waits for a grammar",
    "gets a block",
    "gives a block back",
    "finds the pool empty",
    "finds the budget spent",
)
"""Events of a request in a step."""

WINDOW = 3
"""Steps in which events meet."""

MOST_KEPT = 600
"""Workloads that are kept to be changed, the latest ones."""

RARE = 0.004
"""A pair is rare if no larger share of the runs met it."""

CANDIDATES = 6
"""Of so many kept workloads the one with the rarest pair is changed."""

Pair = tuple[tuple[bool, ...], tuple[int, ...], int]
"""Two events that met under some settings."""

_BIT = {name: 1 << index for index, name in enumerate(EVENTS)}
_CONTEXTS = ("async_scheduling", "num_speculative_tokens", "kv_cache_groups")
"""Settings under which the same events are another meeting."""


class Meetings:
    """The meetings of the runs so far.

    Attributes:
        is_rare: A pair of the latest run was met by few runs so far.
        rarest: The pair of the latest run that was met least often; None if it had none.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[bool, ...], dict[tuple[int, ...], int]] = {}
        self._times: Counter[Pair] = Counter()
        self._num_runs = 0
        self.is_rare = False
        self.rarest: Pair | None = None

    def times(self, pair: Pair | None) -> int:
        """Number of runs that met a pair."""
        return self._times[pair] if pair is not None else 0

    def begin(self, config: Mapping[str, Any]) -> None:
        """A run begins."""
        context = tuple(bool(config.get(name)) for name in _CONTEXTS)
        self._context, self._of_context = context, self._seen.setdefault(context, {})
        self._met: dict[tuple[int, ...], int] = {}
        self._window: deque[tuple[dict[str, int], int]] = deque(maxlen=WINDOW)
        self._events: dict[str, int] = {}
        self._tables: dict[str, int] = {}
        self.is_rare, self.rarest = False, None

    def scheduled(self, run: Run, plan: Any) -> None:
        """Take the events of a step that was just scheduled."""
        self.end_step()
        events = self._events
        in_flight = {chunk.request_id for earlier in run.in_flight for chunk in earlier.chunks}
        self._mark(plan.arrived, "arrives")
        self._mark(plan.aborted, "is aborted")
        self._mark(plan.admitted, "is admitted")
        self._mark(plan.resumed, "is resumed")
        self._mark(plan.preempted or (), "is preempted")
        self._mark([name for name, why in plan.passed_over.items() if why.kind == "grammar"], "waits for a grammar")
        tokens = 0
        for chunk in plan.chunks:
            name, tokens = chunk.request_id, tokens + chunk.num_tokens
            admitted = events.get(name, 0) & (_BIT["is admitted"] | _BIT["is resumed"])
            if admitted and chunk.start:
                self._mark((name,), "hits the prefix cache")
            if chunk.drafts:
                self._mark((name,), "has drafts")
            if chunk.is_partial_prefill:
                self._mark((name,), "has a part of its prompt computed")
            else:
                is_decode = chunk.num_tokens == 1 + len(chunk.drafts) and not admitted
                self._mark((name,), "decodes" if is_decode else "has its prompt completed")
            held = sum(sum(map(bool, table)) for table in run.scheduler.block_tables(name))
            before = 0 if admitted else self._tables.get(name, 0)
            if held != before:
                self._mark((name,), "gets a block" if held > before else "gives a block back")
            self._tables[name] = held
        names = set(events)
        self._mark(names & in_flight, "has an output in flight")
        self._mark(
            [name for name in (*(plan.preempted or ()), *plan.aborted) if name in in_flight],
            "loses an output in flight",
        )
        self._mark(getattr(plan, "unscheduled_block_ids", ()), "loses a chunk of the same step")
        if not run.num_free():
            self._mark(names, "finds the pool empty")
        if tokens >= run.config.get("max_num_batched_tokens", 512):
            self._mark(names, "finds the budget spent")

    def updated(self, plan: Any, ended: Mapping[str, str]) -> None:
        """Take the events of an output that came in."""
        for chunk in plan.chunks:
            if chunk.drafts and not chunk.is_padded and not chunk.is_partial_prefill:
                taken = "all" if chunk.num_accepted >= len(chunk.drafts) else "some" if chunk.num_accepted else ""
                self._mark((chunk.request_id,), f"has {taken} drafts accepted" if taken else "has all drafts rejected")
        for name, why in ended.items():
            self._mark((name,), "stops" if why == "stop" else "reaches its last token")

    def _mark(self, names: Any, event: str) -> None:
        bit = _BIT[event]
        for name in names:
            self._events[name] = self._events.get(name, 0) | bit

    def end_step(self) -> None:
        """Count the meetings of the events so far with those of the steps before."""
        events, self._events = self._events, {}
        if not events:
            return
        every = 0
        for mask in events.values():
            every |= mask
        self._window.append((events, every))
        around = 0
        for apart, (earlier, its_every) in enumerate(reversed(self._window)):
            around |= its_every
            for index in _indices(every):
                self._add((0, apart, index), its_every)
            for name, mask in events.items():
                if its_mask := earlier.get(name):
                    for index in _indices(mask):
                        self._add((1, apart, index), its_mask)
        for index in _indices(every):
            for other in _indices(around):
                self._add((2, index, other), around)

    def _add(self, key: tuple[int, ...], mask: int) -> None:
        self._met[key] = self._met.get(key, 0) | mask

    def finish(self) -> None:
        """The run is over: count its pairs."""
        self.end_step()
        self._num_runs += 1
        fewest = 1 << 60
        for key, mask in self._met.items():
            self._of_context[key] = self._of_context.get(key, 0) | mask
            for index in _indices(mask) if key[0] < 2 else ():
                pair = (self._context, key, index)
                self._times[pair] = times = self._times[pair] + 1
                if times < fewest:
                    fewest, self.rarest = times, pair
        self.is_rare = fewest <= max(1, self._num_runs * RARE)

    def count_in_settings(self) -> int:
        """Number of distinct pairs, those under other settings counted again."""
        return sum(mask.bit_count() for seen in self._seen.values() for key, mask in seen.items() if key[0] < 2)

    def count(self) -> tuple[int, int]:
        """Number of distinct pairs and triples, whatever the settings."""
        seen: dict[tuple[int, ...], int] = {}
        for of_context in self._seen.values():
            for key, mask in of_context.items():
                seen[key] = seen.get(key, 0) | mask
        pairs = sum(mask.bit_count() for key, mask in seen.items() if key[0] < 2)
        triples = {
            tuple(sorted({key[1], key[2], index}))
            for key, mask in seen.items()
            if key[0] == 2
            for index in _indices(mask)
        }
        return pairs, sum(len(triple) == 3 for triple in triples)


def _indices(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Corpus:
    """The bytes of workloads that reached new meetings, and changes of them.

    Args:
        seed: Chooses the changes.
    """

    def __init__(self, seed: int | str) -> None:
        self._rng = random.Random(f"corpus {seed}")
        self._kept: deque[tuple[bytes, Pair | None]] = deque(maxlen=MOST_KEPT)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, choices: bytes, rarest: Pair | None = None) -> None:
        """Keep a workload with its rarest pair."""
        self._kept.append((choices, rarest))

    def changed(self, times: Callable[[Pair | None], int]) -> bytes:
        """A kept workload with some bytes, a request or the configuration from elsewhere.

        Args:
            times: Tells how many runs met a pair.
        """
        rng = self._rng
        candidates = [rng.choice(self._kept) for _ in range(CANDIDATES)]
        made, other = bytearray(min(candidates, key=lambda one: times(one[1]))[0]), rng.choice(self._kept)[0]
        way = rng.randrange(4)
        if way == 0:  # a request of another one
            start, source = (CONFIG_BYTES + rng.randrange(MAX_REQUESTS) * REQUEST_BYTES for _ in range(2))
            made[start : start + REQUEST_BYTES] = other[source : source + REQUEST_BYTES]
        elif way == 1:  # the configuration of another one
            made[:CONFIG_BYTES] = other[:CONFIG_BYTES]
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            made[rng.randrange(WORKLOAD_BYTES if rng.random() < 0.6 else CONFIG_BYTES)] = rng.randrange(256)
        return bytes(made)
