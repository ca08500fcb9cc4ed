"""Step after step on the engine's thread, until there is nothing to do, a pause or a breakpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sized

from workbench.engine.engine_thread import EngineThread
from workbench.trace import StepRecord
from workbench.trace.breakpoints import Breakpoints

log = logging.getLogger("workbench")

Step = Callable[[], StepRecord | None]
"""Takes one step; None when there is nothing to do."""


class RunLoop:
    """Runs an engine's steps, in the foreground or in the background.

    Args:
        thread: Where steps are taken.
        inbox: What was asked of the engine and waits for its next step.
        breakpoints: Looked at after every step.

    Attributes:
        running: Steps are being taken one after another, or are about to be.
    """

    def __init__(self, thread: EngineThread, inbox: Sized, breakpoints: Breakpoints) -> None:
        self.running = False
        self._thread = thread
        self._inbox = inbox
        self._breakpoints = breakpoints
        self._pause = threading.Event()
        self._handover = threading.Lock()  # between a loop that finds nothing to do and a start() that brings work

    def run(self, step: Step, after_step: Callable[[StepRecord], None]) -> None:
        """Take steps and wait for the end. Ctrl-C pauses and is raised then.

        Args:
            step: Takes one.
            after_step: Called with each record.
        """
        self._pause.clear()
        self._thread.call(lambda: self._loop(step, after_step), interrupt=self._pause.set)

    def start(self, step: Step) -> None:
        """Take steps in the background; returns at once."""
        self._pause.clear()
        with self._handover:
            if self.running:
                return
            self.running = True
            self._thread.submit(lambda: self._loop_unattended(step))

    def pause(self) -> None:
        """Stop after the step that is under way, and wait for it."""
        self.pause_soon()
        self._thread.call(lambda: None)

    def pause_soon(self) -> None:
        """Stop after the step that is under way."""
        self._pause.set()

    def _loop_unattended(self, step: Step) -> None:
        """The loop where nobody waits for what it raises."""
        try:
            self._loop(step, lambda record: None)
        except Exception:
            log.exception("the engine stopped: a step could not be taken")

    def _loop(self, step: Step, after_step: Callable[[StepRecord], None]) -> None:
        self.running = True
        self._breakpoints.stopped_by = None
        try:
            while not self._pause.is_set():
                if (record := step()) is None:
                    with self._handover:
                        if not self._inbox:
                            self.running = False
                            return
                    continue
                after_step(record)
                if self._breakpoints.check(record):
                    return
        finally:
            self.running = False
