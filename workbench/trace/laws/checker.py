"""The laws, checked after every step of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from workbench.trace.laws.books import Moment, compare, compare_record
from workbench.trace.laws.history import History
from workbench.trace.laws.law import EXCEPTIONS, LAWS, Broken
from workbench.trace.laws.prefixes import check_prefixes
from workbench.trace.laws.rules import RULES
from workbench.trace.laws.state import Limits, SchedulerState, Step

_PLACE = {rule.name: place for place, rule in enumerate(RULES)}


def check_laws(name: str, laws: Collection[str] | None) -> Collection[str]:
    """The laws that are named, or all for None.

    Args:
        name: The field or option that names them, for the error.
        laws: Their names.

    Raises:
        ValueError: There is no such law.
    """
    known = [law.name for law in LAWS]
    if unknown := sorted(set(laws or ()).difference(known)):
        raise ValueError(f"{name} names {unknown[0]!r}; the laws are {', '.join(known)}")
    return known if laws is None else laws


class Checker:
    """Checks the laws at every moment of a run, and keeps what is broken, each once per rule and request.

    Another scheduler is checked by its records: ``add()`` each request, then give each complete record to ``step()``.

    Args:
        limits: The limits in force.
        allow_exceptions: Leave out what a named exception allows, for our schedules; or the names of those that do.
        laws: Names of the laws to check; None for all.
        whole: The first step checked is the first of the run.
        with_tokens: Whether records hold the ids of the tokens.
        names_changes: Chunks name the changes of block tables, as those of a record; else the tables of the state are
            followed, which `scheduled` and `updated` need then.

    Attributes:
        broken: The broken laws in order.
        history: The run as counted from its steps.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 2}]})
        >>> checker = Checker(Limits.of(trace.config), allow_exceptions=False)
        >>> checker.add(trace.requests["a"])
        >>> [checker.step(record) for record in trace]
        [[], []]
    """

    def __init__(
        self,
        limits: Limits,
        *,
        allow_exceptions: bool | Collection[str] = True,
        laws: Collection[str] | None = None,
        whole: bool = True,
        with_tokens: bool = True,
        names_changes: bool = True,
    ) -> None:
        names = check_laws("laws", laws)
        self.broken: list[Broken] = []
        self.history = History(limits, whole=whole)
        self._laws = names
        every = [exception.name for exception in EXCEPTIONS] if allow_exceptions is True else []
        self._allowed = every if isinstance(allow_exceptions, bool) else allow_exceptions
        self._with_tokens = with_tokens
        self._names_changes = names_changes
        self._told: set[tuple[str, str]] = set()
        self._not_complete: deque[Step] = deque()
        self._choose_rules()

    def _choose_rules(self) -> None:
        limits = self.history.limits
        self._predicates = [
            rule.predicate
            for rule in RULES
            if not isinstance(rule.predicate, str) and rule.law in self._laws and rule.applies(limits)
        ]

    def relimit(self, limits: Limits, waiting: Sequence[str]) -> None:
        """Take over other limits, which are in force from the next step.

        Args:
            limits: The limits.
            waiting: The waiting requests in queue order.
        """
        self.history.relimit(limits, waiting)
        self._choose_rules()

    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request: Any, token_ids: list[int] | None = None, *, stops: Collection[int] | None = None) -> None:
        """A request arrives, before the step that may schedule it first.

        Args:
            request: Has ``request_id``, ``num_prompt_tokens``, ``max_tokens``, ``priority``, ``arrival_time`` and
                ``cache_salt``: a `workbench.trace.RequestInfo`, or a scheduler's request.
            token_ids: The scheduler's list of its tokens, to which it appends; None to begin with ``prompt_token_ids``.
            stops: All tokens that end it; None if others may, or text does.
        """
        feeds = token_ids is None
        if token_ids is None and self._with_tokens and request.prompt_token_ids:
            token_ids = list(request.prompt_token_ids)
        self.history.add(request, token_ids, feeds=feeds).stops = stops

    def abort(self, request_id: str) -> None:
        """A request is aborted. Only needed if its blocks are given back before the next step, which names it."""
        self.history.end(request_id)

    def add_running(self, request: Any, num_kv_computed: int, tables: Sequence[Sequence[int]]) -> None:
        """A request that ran before the first step; in order of admission.

        Args:
            request: As for ``add()``.
            num_kv_computed: Positions that have their KV.
            tables: Its block tables, one per KV cache group.
        """
        self.history.runs(self.history.add(request, None, whole=False), num_kv_computed, tables)

    def proposed(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Requests are given drafts that their next chunk is to verify."""
        for request_id, tokens in drafts.items():
            if (known := self.history.requests.get(request_id)) is not None:
                known.proposed = len(tokens)

    # -- steps -------------------------------------------------------------------------------------------------

    def step(
        self, record: Step, state: SchedulerState | None = None, *, next_aborted: Sequence[str] = ()
    ) -> list[Broken]:
        """Check a complete record.

        Args:
            record: A `workbench.trace.StepRecord`; of an asynchronous scheduler one iteration.
            state: The scheduler's state after the step.
            next_aborted: Requests that were aborted before ``free_blocks_end`` was counted.

        Returns:
            The laws that it broke.
        """
        first = len(self.broken)
        self.scheduled(record)
        for request_id, reason in record.finish_reasons.items():
            if reason == "error" and request_id not in record.waiting:  # that was refused, and never ran
                self.crashed(record.step, "its step failed", request_id)
        self._take_output(record)
        self.history.next_aborted = next_aborted
        self._look(record, state, "step")
        return self.broken[first:]

    def _take_output(self, record: Step) -> None:
        """Count the output that came in at the end of a step.

        When steps overlap it is that of the step before; also that of the step itself, if no other one followed.
        """
        reasons, in_flight, asynchronous = record.finish_reasons, self._not_complete, self.history.limits.asynchronous
        in_flight.append(record)
        own: set[str] = set()
        if asynchronous:
            own = {chunk.request_id for chunk in record.chunks if chunk.sampled is not None}.intersection(reasons)
        else:
            own.update(reasons)
        earlier = {name: reason for name, reason in reasons.items() if name not in own}
        if len(in_flight) > 1:
            self.history.updated(in_flight.popleft().chunks, earlier, with_tokens=self._with_tokens)
        else:
            self.history.updated(None, earlier)
        if own or not asynchronous:
            ended = {name: reasons[name] for name in own}
            self.history.updated(in_flight.popleft().chunks, ended, with_tokens=self._with_tokens)

    def scheduled(self, step: Step, state: SchedulerState | None = None) -> list[Broken]:
        """Check a step that was just scheduled; for a scheduler whose step is seen before it is complete.

        Args:
            step: The step.
            state: The scheduler's state.

        Returns:
            The laws that it broke.
        """
        history = self.history
        history.scheduled(step, None if self._names_changes or state is None else state.tables)
        for predicate in self._predicates:
            predicate(history, step)
        if state is not None and "utilisation" in self._laws:
            check_prefixes(history, step, state)
        return self._look(step, state, "scheduled")

    def updated(
        self,
        processed: Step,
        latest: Step,
        finish_reasons: Mapping[str, str],
        state: SchedulerState,
        *,
        failed: bool = False,
    ) -> list[Broken]:
        """Check a step whose output was just taken in.

        Args:
            processed: The step, complete.
            latest: The step that was scheduled last; the same when steps do not overlap.
            finish_reasons: The requests that ended with the output.
            state: The scheduler's state.
            failed: The step failed, also if its requests were aborted before.

        Returns:
            The laws that it broke.
        """
        self.history.updated(processed.chunks, finish_reasons)
        return self._look(latest, state, "updated", failed=failed)

    def look(self, state: SchedulerState) -> list[Broken]:
        """Check the whole of a scheduler's state, between steps."""
        compare(self.history, state, "rest")
        return self._take_found(self.history.num_steps)

    def crashed(self, step: int, problem: BaseException | str, request_id: str = "") -> list[Broken]:
        """Note an exception that ended a step, or a request of it."""
        said = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
        new = [Broken("crash", step, request_id, said)] if "crash" in self._laws else []
        self.broken += new
        return new

    def _look(self, step: Step, state: SchedulerState | None, moment: Moment, *, failed: bool = False) -> list[Broken]:
        """Compare the history with what the step and the state say, and take what was found."""
        history = self.history
        if moment == "scheduled":
            history.check_queues(step.running, step.waiting)
        elif self._names_changes:
            history.tables.updated(step, failed=failed or "error" in step.finish_reasons.values())
        if state is not None:
            compare(history, state, moment, names_changes=self._names_changes)
        else:
            compare_record(history, step, end=moment != "scheduled")
        history.tables.touched.clear()
        found = history.findings.by_rule
        return self._take_found(step.step) if found else []

    def _take_found(self, step: int) -> list[Broken]:
        found, self.history.findings.by_rule = self.history.findings.by_rule, {}
        new: list[Broken] = []
        for name in sorted(found, key=_PLACE.__getitem__):
            rule = RULES[_PLACE[name]]
            for request_id, detail, exception in found[name] if rule.law in self._laws else ():
                if exception in self._allowed or (name, request_id) in self._told:
                    continue
                self._told.add((name, request_id))
                new.append(Broken(rule.law, step, request_id, f"{rule.message}: {detail}", exception))
        self.broken += new
        return new
