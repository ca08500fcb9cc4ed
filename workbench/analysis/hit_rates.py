"""Hits in the prefix cache by session, turn, depth and adapter, from recordings alone.

Every rate is a share of prompt tokens, counted once for each request, at its first admission: tokens found in the
prefix cache, of all tokens of the prompts. That is vLLM's rate, hits by queries, without those of preempted requests.

- Turn: a request continues an earlier one if its prompt begins with that one's prompt and output, and is longer. It is
  the turn after that one's; a first turn continues none. Without token ids, `workbench.analysis.loops` finds them.
- Session: the requests that continue one another, also in another recording if their contents say so. A request that
  nothing continues is alone. Equal ids in two recordings are two requests.
- Depth: the place of a token in its prompt, and so in the tree of prefixes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from workbench.analysis.loops import Turn, find_loops, turns_of
from workbench.base.text import counted, printable
from workbench.trace.readings.contents import Contents, Numbers, kind_of
from workbench.trace.readings.metrics import RequestMetrics
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.run_zero import seconds_late
from workbench.trace.trace import Trace

DEPTHS = (0, 256, 1024, 4096, 16384, 65536, 262144)
"""The first token of each range of depths."""

MAX_SHOWN = 8


@dataclass
class HitRate:
    """Hits of some requests.

    Attributes:
        num_requests: Number of requests with tokens here.
        looked_up: Tokens of their prompts.
        found: Of these, tokens that were in the prefix cache.
    """

    num_requests: int = 0
    looked_up: int = 0
    found: int = 0

    def add(self, looked_up: int, found: int) -> None:
        """Count one more request."""
        self.num_requests += 1
        self.looked_up += looked_up
        self.found += found

    @property
    def rate(self) -> float:
        """The share that was found."""
        return self.found / self.looked_up if self.looked_up else 0.0

    def __str__(self) -> str:
        return f"{self.rate:.1%} of {counted(self.looked_up, 'token')}" if self.looked_up else "no prompt was looked up"


class _Key(NamedTuple):
    """A request of several recordings: ids are those of one."""

    recording: int
    request_id: str

    def __str__(self) -> str:
        return f"{self.recording}/{self.request_id}"


class _Row(NamedTuple):
    """A request that was admitted.

    Attributes:
        key: The request.
        arrival: Its place in the order of arrivals.
        request: Its metrics.
        adapter: Its adapter.
        blocks: A number for each full block of its prompt and output, with all before it; empty without token ids.
        tokens: Its prompt and output, likewise.
        size: Number of tokens of a block.
    """

    key: _Key
    arrival: float
    request: RequestMetrics
    adapter: str
    blocks: Sequence[int] = ()
    tokens: Sequence[int] = ()
    size: int = 1

    @property
    def looked_up(self) -> int:
        """Length of its prompt."""
        return self.request.num_prompt_tokens

    @property
    def found(self) -> int:
        """Tokens of its prompt that were in the prefix cache."""
        return min(self.request.num_cached_tokens, self.looked_up)

    def continues(self, other: _Row) -> bool:
        """Whether it continues a request with whose full blocks it begins."""
        start = len(other.blocks) * other.size
        tail = other.tokens[start:]
        length = other.looked_up + len(other.request.token_steps)
        return length < self.looked_up and self.tokens[start : start + len(tail)] == tail


@dataclass
class HitRates:
    """Hits in the prefix cache.

    Attributes:
        total: All requests that were admitted.
        by_turn: By turn, 1 for the first; empty if sessions are unknown or there are none.
        by_session: By the id of a session's first request, with the number of its recording if two have this id;
            sessions of one turn are left out.
        by_depth: By the first token of a range of depths (`DEPTHS`).
        by_adapter: By the name of the adapter, "" without one.
        no_sessions: Why there are no sessions; "" if there are.
    """

    total: HitRate = field(default_factory=HitRate)
    by_turn: dict[int, HitRate] = field(default_factory=dict)
    by_session: dict[str, HitRate] = field(default_factory=dict)
    by_depth: dict[int, HitRate] = field(default_factory=dict)
    by_adapter: dict[str, HitRate] = field(default_factory=dict)
    no_sessions: str = ""

    def __str__(self) -> str:
        if not self.total.looked_up:
            return "hit rate of prompt tokens: none, as no request was admitted for the first time"
        lines = [f"hit rate of prompt tokens: {self.total}, at first admissions"]
        shown = {_depth(start): rate for start, rate in self.by_depth.items()}
        lines.append(_row("by depth in the prompt", shown))
        if set(self.by_adapter) - {""}:
            lines.append(_row("by adapter", {name or "none": rate for name, rate in self.by_adapter.items()}))
        if self.no_sessions:
            return "\n".join([*lines, f"  no sessions: {self.no_sessions}"])
        lines.append(_row("by turn (a prompt that begins with an earlier prompt and its answer)", self.by_turn))
        worst = dict(sorted(self.by_session.items(), key=lambda item: item[1].rate)[:3])
        middle = median(rate.rate for rate in self.by_session.values())
        title = (
            f"by session: {counted(len(self.by_session), 'session')} of several turns, median {middle:.1%}; the lowest"
        )
        return "\n".join([*lines, _row(title, worst)])


def hit_rates(traces: Iterable[Trace], after: Mapping[str, str] | None = None) -> HitRates:
    """The hits of one recording, or of several.

    Args:
        traces: Recordings or simulations with a prefix cache.
        after: The request that each one continues, where that is known already, as in a simulation, in which every id
            is that of one request.

    Returns:
        The rates; their ``str()`` has a line for each.
    """
    found, numbers, traces = HitRates(), Numbers(), list(traces)
    late = seconds_late(dict(enumerate(traces)))
    rows: list[_Row] = []
    hashed: list[list[Turn]] = []
    unknown = ""
    for recording, trace in enumerate(traces):
        kind = kind_of(trace)
        outputs = _outputs(trace) if kind == "tokens" else {}
        if kind == "hits":
            unknown = "the recording has neither token ids nor hashes of blocks, which would tell them"
        elif kind == "hashes":
            turns = turns_of(trace, Contents(trace, numbers), late[recording])
            hashed.append([turn._replace(request_id=str(_Key(recording, turn.request_id))) for turn in turns])
        for name, request in metrics(trace).requests.items():
            if request.first_scheduled_step is not None:
                info = trace.requests[name]
                arrival = late[recording] + info.arrival_time if info.arrival_time else float(info.arrival_step)
                row = _Row(_Key(recording, name), arrival, request, info.adapter)
                if kind == "tokens":
                    tokens = (*info.prompt_token_ids, *outputs.get(name, ()))
                    blocks = _blocks(numbers, info.cache_salt, tokens, trace.block_size)
                    row = row._replace(blocks=blocks, tokens=tokens, size=trace.block_size)
                rows.append(row)
    for row in rows:
        _count(found, row)
    continued = _continued(hashed, {str(row.key): row.key for row in rows})
    of_id = {row.key.request_id: row.key for row in rows}
    continued |= {of_id[name]: of_id[other] for name, other in (after or {}).items() if {name, other} <= of_id.keys()}
    found.no_sessions = unknown or _count_sessions(found, sorted(rows, key=lambda row: row.arrival), continued)
    found.by_depth = dict(sorted(found.by_depth.items()))
    found.by_adapter = dict(sorted(found.by_adapter.items()))
    return found


def _count(found: HitRates, row: _Row) -> None:
    found.total.add(row.looked_up, row.found)
    found.by_adapter.setdefault(row.adapter, HitRate()).add(row.looked_up, row.found)
    for start, end in zip(DEPTHS, (*DEPTHS[1:], 2**62)):
        if row.looked_up > start:
            here = found.by_depth.setdefault(start, HitRate())
            here.add(min(row.looked_up, end) - start, max(0, min(row.found, end) - start))


def _continued(recordings: Sequence[list[Turn]], keys: Mapping[str, _Key]) -> dict[_Key, _Key]:
    """The request that each one continues by its hashes: one of the same recording, if no other has a longer one."""
    turns = [turn for recording in recordings for turn in recording]
    lengths = {turn.request_id: turn.num_tokens for turn in turns}
    found: dict[_Key, _Key] = {}
    longest: dict[str, int] = {}
    for some in (*recordings, *([turns] if len(recordings) > 1 else [])):
        for name, each in find_loops(some).follow_ups.items():
            if name in keys and each.after in keys and lengths[each.after] > longest.get(name, 0):
                found[keys[name]], longest[name] = keys[each.after], lengths[each.after]
    return found


def _count_sessions(found: HitRates, rows: Sequence[_Row], after: Mapping[_Key, _Key]) -> str:
    """Count turns and sessions; return why there are none.

    Args:
        found: The rates to add to.
        rows: The requests in order of arrival.
        after: The request that each one continues, as far as it is known without tokens.
    """
    latest: dict[tuple[int | None, str, int], _Row] = {}
    """Of each last block of a prompt and its output, in a recording or in any: the latest request."""
    known: dict[_Key, tuple[_Key, int]] = {}
    """The session and the turn of each request."""
    turns: dict[int, HitRate] = defaultdict(HitRate)
    sessions: dict[_Key, HitRate] = defaultdict(HitRate)
    for row in rows:
        places = [(each, row.adapter, block) for block in reversed(row.blocks) for each in (row.key.recording, None)]
        begun = (other for place in places if (other := latest.get(place)) is not None and row.continues(other))
        before = next((other.key for other in begun), after.get(row.key))
        session, turn = known.get(before, (row.key, 0)) if before is not None else (row.key, 0)
        known[row.key] = session, turn + 1
        for each in (row.key.recording, None) if row.blocks else ():
            latest[each, row.adapter, row.blocks[-1]] = row
        for rate in (turns[turn + 1], sessions[session]):
            rate.add(row.looked_up, row.found)
    several = {key: rate for key, rate in sessions.items() if rate.num_requests > 1}
    same_id = Counter(key.request_id for key in known)
    found.by_session = {
        key.request_id if same_id[key.request_id] == 1 else f"{key.request_id} of recording {key.recording + 1}": rate
        for key, rate in several.items()
    }
    if not found.by_session:
        return "no prompt begins with an earlier prompt and its answer"
    found.by_turn = dict(sorted(turns.items()))
    return ""


def _outputs(trace: Trace) -> dict[str, list[int]]:
    """The output tokens of each request."""
    outputs: dict[str, list[int]] = defaultdict(list)
    for record in trace:
        for chunk in record.chunks:
            if chunk.sampled is not None and not chunk.discarded:
                outputs[chunk.request_id] += [*chunk.sampled_before, chunk.sampled]
    return outputs


def _blocks(numbers: Numbers, salt: str, tokens: tuple[int, ...], size: int) -> list[int]:
    """A number for each full block of tokens, with all before it."""
    blocks: list[int] = []
    for place in range(0, len(tokens) - size + 1, size):
        blocks.append(numbers.of((blocks[-1] if blocks else salt, tokens[place : place + size])))
    return blocks


def _depth(start: int) -> str:
    place = DEPTHS.index(start)
    return f"{start}-{DEPTHS[place + 1] - 1}" if place + 1 < len(DEPTHS) else f"from {start}"


def _row(title: str, rates: dict[str, HitRate] | dict[int, HitRate]) -> str:
    cells = [f"{printable(str(name))}: {rate.rate:.1%} of {rate.looked_up:,}" for name, rate in rates.items()]
    more = f", and {len(cells) - MAX_SHOWN} more" if len(cells) > MAX_SHOWN else ""
    return f"  {title}: {', '.join(cells[:MAX_SHOWN])}{more}"
