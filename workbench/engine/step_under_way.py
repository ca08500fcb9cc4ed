"""The step an engine is in, when it is left in the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.engine.pipeline import Phases
from workbench.trace import StepRecord


class StepUnderWay:
    """Takes a step in one go, or phase by phase, and finishes in one go what was begun phase by phase.

    Every method is for the engine's thread alone. ``begin`` starts a step, or returns None when there is nothing to do;
    it is handed in each time, because an engine that is dropped should not have to wait for the garbage collector.

    Attributes:
        phase: (name, what was made) of the latest phase while its step is not over, for whoever looks on; else None.
    """

    def __init__(self) -> None:
        self._phases: Phases | None = None
        self.phase: tuple[str, Any] | None = None

    @property
    def begun(self) -> bool:
        """A step has been begun and is not over."""
        return self._phases is not None

    def finish(self, begin: Callable[[], Phases | None]) -> StepRecord | None:
        """Take what is left of the step, or a whole one where none has been begun."""
        phases = self._phases or begin()
        self._phases = self.phase = None
        if phases is None:
            return None
        while True:
            try:
                next(phases)
            except StopIteration as stop:
                return stop.value

    def advance(
        self, begin: Callable[[], Phases | None], *, stop_at_layers: bool
    ) -> tuple[str, Any] | StepRecord | None:
        """Take the next phase of the step, or the first of a new one; the record after the last."""
        choice = stop_at_layers if self.begun else None  # a generator that has not started takes nothing else
        self._phases = self._phases or begin()
        if self._phases is None:
            return None
        try:
            self.phase = self._phases.send(choice)
        except BaseException as ended:
            self._phases = self.phase = None
            if isinstance(ended, StopIteration):
                return ended.value
            raise
        return self.phase

    def give_up(self) -> None:
        """Leave what is left of the step undone."""
        phases = self._phases
        self._phases = self.phase = None
        if phases is not None:
            phases.close()
