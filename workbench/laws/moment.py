"""One moment of a run, as the laws' predicates see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from workbench.laws.history import History
from workbench.laws.state import Limits, SchedulerState, Step


class Moment(NamedTuple):
    """The facts that a predicate sees.

    Attributes:
        history: The run as counted from its steps, this one included.
        step: The step that was scheduled last.
        state: The scheduler's state; None in a trace.
        scheduled: The moment is the one after scheduling; else the output of a step has come in.
        next_aborted: Requests that are known to be aborted before the next step.
    """

    history: History
    step: Step
    state: SchedulerState | None
    scheduled: bool
    next_aborted: tuple[str, ...] = ()

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self.history.limits


Findings = Iterator[tuple[str, str] | tuple[str, str, str]]
"""Request id, what is wrong, and the named exception that allows it, if there is one."""
