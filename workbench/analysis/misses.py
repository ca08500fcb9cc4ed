"""``trace.why_missed()``, and what misses cost a whole run: tokens lost by reason, and what would have saved them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from workbench.analysis.fork import fork, in_the_same_memory, recorded_config
from workbench.analysis.miss import Misses, by_admission, lost_by_reason
from workbench.analysis.prefix_history import PrefixHistory
from workbench.base.on_demand import picture
from workbench.base.text import counted, settings_text
from workbench.scheduler.policy import PolicyView, SchedulingPolicy
from workbench.scheduler.request import Request
from workbench.trace import Trace
from workbench.trace.window import find_in

_histories: WeakKeyDictionary[Trace, PrefixHistory] = WeakKeyDictionary()
_lock = threading.Lock()


def history_of(trace: Trace) -> PrefixHistory:
    """The history of a trace's prefix cache up to its newest step; only new steps are read.

    Raises:
        ValueError: The trace's configuration is not one of this scheduler's.
    """
    with _lock:
        history = _histories.get(trace)
        if history is None or history.contents.is_outdated:
            history = _histories[trace] = PrefixHistory(trace)
        history.advance()
        return history


def why_missed(trace: Trace, request_id: str) -> Misses:
    """Why a request did not find more of its tokens in the prefix cache.

    Args:
        trace: The trace of an engine, of a simulation, or recorded from another engine.
        request_id: The request, or the beginning of its id if no other begins so.

    Returns:
        For each of its admissions and each KV cache group the first block that was not found, with the reason. Empty if
        it was never admitted, or prefixes are not cached.

    Raises:
        ValueError: The trace has no such request, or its configuration is not one of this scheduler's.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": id, "prompt": {"len": 40, "seed": "s"}, "max_tokens": 1, "arrival_step": step}
        ...             for step, id in enumerate("ab")]
        >>> [miss] = simulate({"requests": requests}).why_missed("b")
        >>> miss.found, miss.block, miss.reason, miss.tokens
        (32, 2, 'not full', 8)
    """
    found = find_in([trace], request_id)
    return Misses(history_of(trace).misses.get(found, ()))


class CachedFirst(SchedulingPolicy):
    """Of the waiting requests the one goes first that finds the most tokens in the prefix cache."""

    def waiting_order(self, view: PolicyView) -> list[Request]:
        """By the length of the hit, the longest first."""
        return sorted(view.waiting, key=lambda request: view.num_left(request) - request.num_tokens)


class Change(NamedTuple):
    """A change of the configuration, and what it does to the misses in a simulation of the same requests.

    Attributes:
        change: The change, such as "num_blocks=2048".
        lost: Tokens that would be looked up and not found.
        saved: The same number without the change, less ``lost``; below 0 if the change costs hits.
    """

    change: str
    lost: int
    saved: int


@dataclass(frozen=True, repr=False)
class MissTable:
    """The misses of a whole run.

    Attributes:
        num_admissions: Number of admissions, those after a preemption included.
        looked_up: Tokens that they looked up.
        found: Tokens that they found.
        lost: Tokens that they did not find, by reason, the most first.
        changes: Changes that would have saved some of them; empty if these are unknown.
        unknown: Why they are unknown; "" if they are known.
        by_rules: The rules of their simulation, if these are not those of the recorded engine; otherwise "".
    """

    num_admissions: int
    looked_up: int
    found: int
    lost: dict[str, int]
    changes: tuple[Change, ...] = ()
    unknown: str = ""
    by_rules: str = ""

    @property
    def heading(self) -> str:
        """The tokens that were looked up, and how many of them were found."""
        if not self.num_admissions:
            return "no request was admitted with a prefix cache: nothing was looked up"
        return (
            f"{counted(self.num_admissions, 'admission')} looked up {counted(self.looked_up, 'token')} and found "
            f"{self.found:,} "
            f"({self.found / self.looked_up:.1%})"
        )

    def _repr_html_(self) -> str | None:
        return picture("MissTable", self)

    def __repr__(self) -> str:
        if not self.num_admissions:
            return self.heading
        lines = [
            self.heading,
            "",
            f"{'lost':>10}  {'share':>6}  reason",
        ]
        total = sum(self.lost.values())
        lines += [f"{tokens:>10,}  {tokens / total:>6.1%}  {reason}" for reason, tokens in self.lost.items()]
        lines.append("")
        if self.unknown:
            return "\n".join([*lines, f"what would have saved tokens is unknown: {self.unknown}"])
        lines.append(f"{'saved':>10}  {'lost':>8}  change, simulated with the same requests{self.by_rules}")
        lines += [f"{change.saved:>10,}  {change.lost:>8,}  {change.change}" for change in self.changes]
        return "\n".join(lines)


def misses_table(trace: Trace, *, changes: bool = True) -> MissTable:
    """The misses of a whole run by reason, and the changes that would have saved tokens.

    Args:
        trace: The trace.
        changes: Simulate the requests with more blocks, with blocks of other sizes, and in another order.

    Raises:
        ValueError: The trace's configuration is not one of this scheduler's.

    Example:
        >>> from workbench import misses_table, simulate
        >>> requests = [{"id": name, "prompt": {"len": 40, "seed": 1}, "max_tokens": 1} for name in "ab"]
        >>> table = misses_table(simulate({"requests": requests}), changes=False)
        >>> str(table).splitlines()[0]
        '2 admissions looked up 80 tokens and found 32 (40.0%)'
    """
    misses = [miss for its in history_of(trace).misses.values() for miss in its]
    admissions = list(by_admission(misses))
    lost = lost_by_reason(misses)
    result = MissTable(
        num_admissions=len(admissions),
        looked_up=sum(groups[0].looked_up for groups in admissions),
        found=sum(groups[0].hit for groups in admissions),
        lost=dict(sorted(lost.items(), key=lambda item: -item[1])),
        by_rules=" by vLLM's rules, not SGLang's" if trace.meta.is_of_sglang else "",
    )
    if not changes or not admissions:
        return result
    if not all(map(history_of(trace).contents.is_known, trace.requests.values())):
        return replace(result, unknown="the recording has neither token ids nor hashes of all prompts")
    if trace.keyframe is not None or trace[0].step:
        return replace(result, unknown="the trace does not begin with the first step")
    unchanged = _num_lost(fork(trace))
    compared = []
    for name, change in _changes(trace):
        try:
            num_lost = _num_lost(fork(trace, **change))
        except ValueError:  # a size that these groups cannot have
            continue
        compared.append(Change(name, num_lost, unchanged - num_lost))
    return replace(result, changes=tuple(sorted(compared, key=lambda change: -change.saved)))


def _changes(trace: Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    config = recorded_config(trace)
    num_blocks, size = config.num_pool_blocks, config.block_size
    for factor in (2, 4):
        yield f"num_blocks={num_blocks * factor}", {"num_blocks": num_blocks * factor}
    for other in (size // 2, size * 2):
        resized = in_the_same_memory(config, {"block_size": other}) if other else {}
        if "num_blocks" in resized:
            yield settings_text(resized), resized
    yield "waiting requests with the longest hit first", {"policy": CachedFirst()}


def _num_lost(trace: Trace) -> int:
    misses = [miss for its in history_of(trace).misses.values() for miss in its]
    return sum(lost_by_reason(misses).values())
