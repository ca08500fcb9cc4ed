"""Meetings of events: pairs and triples that happen within two steps, which guide a hunt to what has not happened yet.

Lines of code do not tell workloads apart, because 300 random ones reach nearly all. Faults live where events meet: a
preemption of a request whose output is in flight, a hit on blocks that were given back a step ago. Each step has a set
of events for each request; a pair is two events of the same request, or of any two, in the same step or up to two steps
apart. Workloads that reached new meetings are kept, and changed to make others.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
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

RECENT = 40
"""The workload that is changed is about this many behind the latest one, on average."""

_BIT = {name: 1 << index for index, name in enumerate(EVENTS)}
_CONTEXTS = ("async_scheduling", "num_speculative_tokens", "kv_cache_groups")
"""Settings under which the same events are another meeting."""


class Meetings:
    """The meetings of the runs so far.

    Attributes:
        is_new: The latest run had a meeting that no earlier one had.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[bool, ...], dict[tuple[int, ...], int]] = {}
        self.is_new = False

    def begin(self, config: Mapping[str, Any]) -> None:
        """A run begins."""
        context = tuple(bool(config.get(name)) for name in _CONTEXTS)
        self._of_context = self._seen.setdefault(context, {})
        self._window: deque[tuple[dict[str, int], int]] = deque(maxlen=WINDOW)
        self._events: dict[str, int] = {}
        self._tables: dict[str, int] = {}
        self.is_new = False

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
        before = self._of_context.get(key, 0)
        if before | mask != before:
            self._of_context[key] = before | mask
            self.is_new = True

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
        self._kept: deque[bytes] = deque(maxlen=MOST_KEPT)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, choices: bytes) -> None:
        """Keep a workload."""
        self._kept.append(choices)

    def changed(self) -> bytes:
        """A kept workload with some bytes, a request or the configuration from elsewhere."""
        rng = self._rng
        late = min(len(self._kept) - 1, int(rng.expovariate(1 / RECENT)))  # what was kept late had the rarer meetings
        made, other = bytearray(self._kept[-1 - late]), rng.choice(self._kept)
        way = rng.randrange(4)
        if way == 0:  # a request of another one
            start, source = (CONFIG_BYTES + rng.randrange(MAX_REQUESTS) * REQUEST_BYTES for _ in range(2))
            made[start : start + REQUEST_BYTES] = other[source : source + REQUEST_BYTES]
        elif way == 1:  # the configuration of another one
            made[:CONFIG_BYTES] = other[:CONFIG_BYTES]
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            made[rng.randrange(WORKLOAD_BYTES if rng.random() < 0.6 else CONFIG_BYTES)] = rng.randrange(256)
        return bytes(made)
