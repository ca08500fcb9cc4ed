"""The laws, checked after every step of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from workbench.laws.history import History
from workbench.laws.law import LAWS, Broken
from workbench.laws.moment import Moment
from workbench.laws.rules import RULES
from workbench.laws.state import Limits, SchedulerState, Step


class Checker:
    """Checks the laws at every moment of a run, and keeps what is broken, each once per rule and request.

    Args:
        limits: The limits in force.
        allow_exceptions: Leave out what a named exception allows; for our schedules.
        laws: Names of the laws to check; None for all.
        whole: The first step checked is the first of the run.

    Attributes:
        broken: The broken laws in order.
        history: The run as counted from its steps.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        allow_exceptions: bool = True,
        laws: Collection[str] | None = None,
        whole: bool = True,
    ) -> None:
        names = [law.name for law in LAWS]
        if unknown := sorted(set(laws or ()).difference(names)):
            raise ValueError(f"laws names {unknown[0]!r}; the laws are {', '.join(names)}")
        self.broken: list[Broken] = []
        self.history = History(limits, whole=whole)
        rules = [rule for rule in RULES if laws is None or rule.law in laws]
        self._after_scheduling = [rule[:3] for rule in rules if rule.when != "updated"]
        self._after_output = [rule[:3] for rule in rules if rule.when != "scheduled"]
        self._checks_crashes = laws is None or "crash" in laws
        self._allow_exceptions = allow_exceptions
        self._told: set[tuple[str, str]] = set()

    def scheduled(
        self,
        step: Step,
        state: SchedulerState | None = None,
        tables: Mapping[str, Sequence[list[int]]] | None = None,
    ) -> list[Broken]:
        """Check a step that was just scheduled.

        Args:
            step: The step.
            state: The scheduler's state; None in a trace, which has ``tables`` instead.
            tables: The block tables of the scheduled requests.

        Returns:
            The laws that it broke.
        """
        history = self.history
        if state is not None:
            if state.limits is not history.limits:
                history.relimit(state.limits, step.waiting)
            for name in step.arrived:
                if (request := state.requests.get(name)) is not None:
                    history.add(name, request, request.token_ids)
            tables = {name: request.block_tables for name, request in state.requests.items()}
        history.scheduled(step, tables or {})
        return self._check(Moment(history, step, state, True))

    def updated(
        self, processed: Step, latest: Step, finish_reasons: Mapping[str, str], state: SchedulerState
    ) -> list[Broken]:
        """Check a step whose output was just taken in.

        Args:
            processed: The step, complete.
            latest: The step that was scheduled last; the same when steps do not overlap.
            finish_reasons: The requests that ended with the output.
            state: The scheduler's state.

        Returns:
            The laws that it broke.
        """
        self.history.updated(processed.chunks, finish_reasons)
        return self.look(latest, state)

    def look(self, latest: Step, state: SchedulerState | None = None, next_aborted: Sequence[str] = ()) -> list[Broken]:
        """Check the end of a step whose output the history has counted."""
        return self._check(Moment(self.history, latest, state, False, tuple(next_aborted)))

    def crashed(self, step: int, problem: BaseException | str, request_id: str = "") -> list[Broken]:
        """Note an exception that ended a step, or a request of it."""
        said = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
        new = [Broken("crash", step, request_id, said)] if self._checks_crashes else []
        self.broken += new
        return new

    def _check(self, moment: Moment) -> list[Broken]:
        new: list[Broken] = []
        for law, predicate, message in self._after_scheduling if moment.scheduled else self._after_output:
            for request_id, detail, *named in predicate(moment):
                exception = named[0] if named else ""
                if (exception and self._allow_exceptions) or (message, request_id) in self._told:
                    continue
                self._told.add((message, request_id))
                new.append(Broken(law, moment.step.step, request_id, f"{message}: {detail}", exception))
        moment.history.found.clear()
        self.broken += new
        return new
