"""Facts of a run at each of its steps, from its records alone: what a picture of the run may show.

Written without the code of the views and of `workbench.trace.readings`, so that pictures can be compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FREE, CACHED, OWNED = "free", "cached", "owned"
STATE_AFTER = {
    "arrived": "waiting",
    "aborted": "aborted",
    "preempted": "preempted",
    "admitted": "running",
    "resumed": "running",
    "finished": "finished",
}


ENDS = {"length": "hit max_tokens", "stop": "model ended", "error": "failed", "abort": "aborted"}
"""Words for the reasons for which requests finish."""


@dataclass
class Token:
    """An output token: the step that gave it, its id, whether it was a draft, and the text that came with it."""

    step: int
    id: int
    drafted: bool
    text: str


@dataclass
class Moment:
    """A run after the scheduling of a step; states are those at its end.

    Attributes:
        record: The step's record.
        states: State of every request that has arrived.
        tables: Block tables by group of every request that holds blocks.
        holders: The requests that hold a block, in order of admission, for each block in use.
        cached: Free blocks with content.
        changed: The last step in which a block's state, first holder or number of holders changed, up to the
            scheduling of this one.
        fresh: The blocks that the scheduling of this step changed, without those that the end of the step before gave
            back.
        queue: Free blocks in the order in which they are handed out.
        computed: KV progress of every request that holds blocks.
        tokens: Output tokens so far of every request.
    """

    record: Any
    states: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    holders: dict[int, list[str]] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    changed: dict[int, int] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    queue: list[int] = field(default_factory=list)
    computed: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, list[Token]] = field(default_factory=dict)

    def chunk(self, request_id: str) -> Any:
        """The chunk of a request in this step, None if it was not scheduled."""
        return next((chunk for chunk in self.record.chunks if chunk.request_id == request_id), None)

    def pool_state(self, block: int) -> str:
        """The state of a block."""
        return OWNED if self.holders.get(block) else CACHED if block in self.cached else FREE


class Facts:
    """The moments of a run.

    Attributes:
        order: Ids of the requests in order of arrival.
        moments: One per record.
    """

    def __init__(self, trace: Any) -> None:
        self.trace, self.records = trace, list(trace)
        self.order = list(trace.requests)
        self.groups = trace.kv_cache_groups
        attention = [index for index, group in enumerate(self.groups) if group.is_attention]
        self.shown_group = attention[0] if attention else 0
        self.num_blocks = trace.num_blocks
        self.timed = bool(self.records and self.records[-1].end)
        self.moments: list[Moment] = []
        self._tables: dict[str, list[list[int]]] = {}
        self._holders: dict[int, list[str]] = {}
        self._cached: set[int] = set()
        self._queue = list(range(1, trace.num_blocks or 1))
        self._states: dict[str, str] = {}
        self._computed: dict[str, int] = {}
        self._tokens: dict[str, list[Token]] = {request_id: [] for request_id in self.order}
        self._changed: dict[int, int] = {}
        self._scheduled: dict[int, tuple[str, str | None, int]] = {}
        self._at_end: dict[int, tuple[str, str | None, int]] = {}
        for record in self.records:
            self._step(record)

    def window_of(self, record: Any) -> int:
        """Tokens that a row attends to: by the launch's first layer, or else by the configuration; 0 for all."""
        if record.kernel and record.kernel.windows:
            return max(0, record.kernel.windows[0])
        given = self.trace.meta.config.get("kv_cache_groups") or [{}]
        return given[self.shown_group].get("sliding_window", 0)

    def _step(self, record: Any) -> None:
        for request_id in (*record.aborted, *record.preempted):
            self._let_go(request_id)
        for chunk in record.chunks:
            self._schedule(chunk)
        at_end = record.num_cached_end
        published = record.cached_block_ids
        self._apply(record.pool, published[: len(published) - at_end])
        for name, state in STATE_AFTER.items():
            self._states.update(dict.fromkeys(getattr(record, name), state))
        for chunk in record.chunks:
            if chunk.sampled is not None:
                tokens = [*((token, True) for token in chunk.sampled_before), (chunk.sampled, False)]
                texts = [chunk.text, *[""] * len(tokens)]
                self._tokens[chunk.request_id] += [
                    Token(record.step, token, drafted, text) for (token, drafted), text in zip(tokens, texts)
                ]
        moment = Moment(
            record,
            dict(self._states),
            {request_id: [list(table) for table in tables] for request_id, tables in self._tables.items()},
            {block: list(names) for block, names in self._holders.items()},
            {block for block in self._cached if block not in self._holders},
            queue=[block for block in self._queue if block not in self._holders],
            computed=dict(self._computed),
            tokens={request_id: list(tokens) for request_id, tokens in self._tokens.items()},
        )
        for block in range(1, self.num_blocks or 1):
            now = self._state_of(block)
            if now != self._at_end.get(block, (FREE, None, 0)):
                moment.fresh.add(block)
                self._changed[block] = record.step
            self._scheduled[block] = now
        moment.changed = dict(self._changed)
        self.moments.append(moment)
        for request_id in record.finished:
            self._let_go(request_id)
        self._apply(record.pool_end, published[len(published) - at_end :])
        self._at_end = {block: self._state_of(block) for block in range(1, self.num_blocks or 1)}
        for block, state in self._scheduled.items():
            if state != self._at_end[block]:
                self._changed[block] = record.step

    def _state_of(self, block: int) -> tuple[str, str | None, int]:
        names = self._holders.get(block, [])
        state = OWNED if names else CACHED if block in self._cached else FREE
        return state, names[0] if names else None, len(names)

    def _let_go(self, request_id: str) -> None:
        self._tables.pop(request_id, None)
        self._computed.pop(request_id, None)
        for names in self._holders.values():
            if request_id in names:
                names.remove(request_id)
        self._holders = {block: names for block, names in self._holders.items() if names}

    def _schedule(self, chunk: Any) -> None:
        changes = [(chunk.new_block_ids, chunk.removed)]
        changes += [(change.new_block_ids, change.removed) for change in chunk.other_groups]
        tables = self._tables.setdefault(chunk.request_id, [[] for _ in self.groups])
        for table, (_, removed) in zip(tables, changes):
            for place in removed:
                names = self._holders.get(table[place], [])
                if chunk.request_id in names:
                    names.remove(chunk.request_id)
                    if not names:
                        del self._holders[table[place]]
                table[place] = 0
        for table, (added, _) in zip(tables, changes):
            table += added
            for block in added:
                if block and chunk.request_id not in self._holders.setdefault(block, []):
                    self._holders[block].append(chunk.request_id)
        self._computed[chunk.request_id] = chunk.start + chunk.num_tokens

    def _apply(self, change: Any, published: tuple[int, ...]) -> None:
        self._cached -= set(change.evicted)
        self._cached |= set(published)
        moved = {*change.front, *change.back}
        rest = [block for block in self._queue if block not in moved and block not in self._holders]
        self._queue = [*change.front, *rest, *change.back]

    def __len__(self) -> int:
        return len(self.moments)

    def __getitem__(self, step: int) -> Moment:
        return self.moments[step]

    def end_of(self, who: str, record: Any) -> str:
        """The end of a request that finishes in a step: its reason, and which of two lengths it is."""
        reason = record.finish_reasons.get(who, "")
        if reason == "length" and len(self[-1].tokens[who]) < self.trace.requests[who].max_tokens:
            return "hit max_model_len"
        return ENDS.get(reason, reason)

    def events(self, step: int) -> list[tuple[int, str, str, str]]:
        """Step, kind, request and reason of what happened in a step, in the order of the log."""
        record = self.records[step]
        hits = {chunk.request_id: chunk.num_cached_tokens for chunk in record.chunks}

        def hit(request_id: str) -> str:
            return f"{hits[request_id]} tokens found in the prefix cache" if hits.get(request_id) else ""

        def end(request_id: str) -> str:
            return self.end_of(request_id, record)

        return [
            *((record.step, "arrive", name, "") for name in record.arrived),
            *((record.step, "abort", name, "") for name in record.aborted),
            *((record.step, "preempt", name, str(record.preempt_reasons.get(name, ""))) for name in record.preempted),
            *((record.step, "admit", name, hit(name)) for name in record.admitted),
            *((record.step, "resume", name, hit(name)) for name in record.resumed),
            *((record.step, "finish", name, end(name)) for name in record.finished),
        ]

    def latencies(self, step: int) -> dict[str, tuple[bool, float]]:
        """For each request that got a token in a step: whether it was its first, and the time since the one before.

        In seconds, or in steps without a clock; the first counts from the arrival.
        """
        record, found = self.records[step], {}
        for chunk in record.chunks:
            if chunk.sampled is None:
                continue
            earlier = [token.step for token in self.moments[step].tokens[chunk.request_id] if token.step < record.step]
            info = self.trace.requests[chunk.request_id]
            if earlier:
                since = self.records[earlier[-1]].end if self.timed else earlier[-1] + 1
            else:
                since = info.arrival_time if self.timed else info.arrival_step
            now = record.end if self.timed else record.step + 1
            found[chunk.request_id] = not earlier, now - since
        return found

    def unused_slots(self, step: int) -> int:
        """KV slots in block tables of attention that hold no token."""
        moment, unused = self.moments[step], 0
        for request_id, tables in moment.tables.items():
            for group, table in zip(self.groups, tables):
                if group.is_attention:
                    unused += len(table) * group.block_size - moment.computed[request_id]
        return unused


def holders_in_words(names: list[str], order: list[str]) -> str:
    """The requests that hold a block, the first in front and the others in order of arrival; at most four are named."""
    names = [names[0], *sorted(names[1:], key=order.index)]
    named = [*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
