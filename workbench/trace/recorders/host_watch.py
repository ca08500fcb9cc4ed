"""Causes of stalls that a machine counts: garbage collection, waits for a CPU, steal, and pages read from disk.

The engine's process only notes long collections. The writer's process reads the counters in /proc, five times a second
and after each long step, so that they cost the engine nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from workbench.trace.lines import Supplement
from workbench.trace.readings.durations import leaves_work
from workbench.trace.recorders.messages import Pause
from workbench.trace.records import StepRecord

HOST = "host"
"""Name of the supplement."""

READ_SECONDS = 0.2
"""Time between two readings."""

LONG_SECONDS, LONG_FACTOR = 0.05, 4.0
"""A step is long if it takes this much, and this many times what steps usually take."""


class _Counters(NamedTuple):
    """Since the start of the engine's thread, or of the machine."""

    cpu_wait: float = 0.0
    steal: float = 0.0
    major_faults: float = 0.0


class HostWatch:
    """Notes what the machine did during long steps.

    Args:
        pid: The engine's process.
        thread: The thread that schedules.
    """

    def __init__(self, pid: int, thread: int) -> None:
        self._task = Path(f"/proc/{pid}/task/{thread}")
        self._before, self._read_at = self._read(), time.monotonic()
        self._usual = 0.0
        self._busy_since: float | None = None
        self._collecting = 0.0

    def pause(self, message: Pause) -> None:
        """Garbage was collected."""
        self._collecting += message.ended - message.started

    def step(self, record: StepRecord) -> Supplement | None:
        """The facts about a step and the time before it, if they were long and the counters say something."""
        usual, seconds = self._usual, record.duration
        if record.chunks:  # follows the shorter half of the steps: a fifth of the way down, a hundredth up
            self._usual = seconds if not usual else usual + 0.2 * (seconds - usual) if seconds < usual else usual * 1.02
        if self._busy_since is not None:
            seconds = max(seconds, record.end - self._busy_since)
        self._busy_since = record.end if leaves_work(record) else None
        is_long = usual > 0 and seconds > max(LONG_SECONDS, LONG_FACTOR * usual)
        if not is_long and time.monotonic() - self._read_at < READ_SECONDS:
            return None
        now, before = self._read(), self._before
        self._before, self._read_at = now, time.monotonic()
        facts = {name: round(after - then, 4) for name, after, then in zip(now._fields, now, before) if after > then}
        if self._collecting:
            facts["collecting"] = round(self._collecting, 4)
        self._collecting = 0.0
        return Supplement(record.step, HOST, facts) if is_long and facts else None

    def _read(self) -> _Counters:
        """The counters; zeros without a /proc."""
        try:
            tick, page = 1.0 / os.sysconf("SC_CLK_TCK"), (self._task / "stat").read_text()
            cpus = Path("/proc/stat").read_text().split("\n", 1)[0].split()
            waited = int((self._task / "schedstat").read_text().split()[1]) * 1e-9
            return _Counters(waited, int(cpus[8]) * tick, float(page.rpartition(")")[2].split()[9]))
        except (OSError, ValueError, IndexError, AttributeError):
            return _Counters()
