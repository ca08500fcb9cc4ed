"""The time of day at which a run was recorded, as every answer about it prints it."""

from __future__ import annotations

import msgspec

from workbench.trace.clock import time_of_day
from workbench.trace.readings.metrics import amount
from workbench.trace.trace import Trace


def recorded_when(trace: Trace) -> str:
    """The local times of the first and the last step, and what the wall clock did meanwhile.

    Args:
        trace: A run, or a part of one.

    Returns:
        Such as "from 2026-01-31 12:08:03 to 2026-01-31 12:20:00 (local time)", or "at 2026-01-31 12:08:03 (local
        time)" for a run within this second; "" for a run without a wall clock.
    """
    if not len(trace) or not trace.meta.created or not trace[-1].end:
        return ""
    first, last = (time_of_day(trace.meta.created, at, date=True) for at in (trace[0].time, trace[-1].end))
    words = f"{f'at {first}' if first == last else f'from {first} to {last}'} (local time"
    drift = trace.clock_drift
    if drift is not msgspec.UNSET:
        words += f"; the wall clock {'lost' if drift < 0 else 'gained'} {amount(abs(drift), 's')} meanwhile"
    return f"{words})"
