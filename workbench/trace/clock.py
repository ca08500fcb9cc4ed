"""The time of day of a recording, by the clock of the machine that made it: an alert says 12:08, not "after 96 s".

A recording has the wall clock of its beginning, and counts seconds from there with a clock that is never set. If the
wall clock was set meanwhile, later times of day are off by the drift that the last line of a recording has.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

CLOCK = re.compile(r"(?:(\d{4}-\d\d-\d\d)[T ])?(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?")
"""A time of day, with a date or without: 12:08, 12:08:03, 2026-01-31T12:08:03."""


def is_time_of_day(text: str) -> bool:
    """Whether a text is a time of day."""
    return CLOCK.fullmatch(text.strip()) is not None


def time_of_day(created: float, seconds: float, *, date: bool = False) -> str:
    """The local time of day of a moment; "" without the wall clock of the beginning.

    Args:
        created: Wall clock of the beginning, seconds since the epoch; 0 for none.
        seconds: The moment, in seconds since the beginning.
        date: Write the date before it.
    """
    if not created:
        return ""
    moment = datetime.fromtimestamp(created + seconds)
    return moment.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")


def seconds_at(name: str, text: str, created: float, end: float) -> float:
    """The moment of a time of day, in seconds since the beginning of a recording; negative for one before it.

    Args:
        name: Name of the value, for messages.
        text: The time of day, local to this machine. Without a date it is on a day of the recording.
        created: Wall clock of the beginning, seconds since the epoch.
        end: The end of the recording, in seconds since its beginning.

    Raises:
        ValueError: It is not a time of day, the recording has no wall clock, or it is more than an hour away.
    """
    match = CLOCK.fullmatch(text.strip())
    if match is None or int(match[2]) > 23 or int(match[3]) > 59 or float(match[4] or 0) >= 60:
        raise ValueError(f"{name} must be a time of day such as 12:08, 12:08:03 or 2026-01-31T12:08:03, got {text!r}")
    if not created:
        raise ValueError(f"{name} {text} is a time of day, and this trace does not say when it began: give seconds")
    begin = datetime.fromtimestamp(created)
    last = begin + timedelta(seconds=end)
    day = datetime.fromisoformat(match[1]) if match[1] else datetime(begin.year, begin.month, begin.day)
    moment = day + timedelta(hours=int(match[2]), minutes=int(match[3]), seconds=float(match[4] or 0))
    hour, one_day = timedelta(hours=1), timedelta(days=1)
    while not match[1] and moment < begin and moment + one_day <= (last if moment >= begin - hour else last + hour):
        moment += one_day
    if not begin - hour <= moment <= last + hour:
        raise ValueError(
            f"{name} {text} is not in the recording, which lasts from {begin:%Y-%m-%d %H:%M:%S} to "
            f"{last:%Y-%m-%d %H:%M:%S} (local time)"
        )
    return (moment - begin).total_seconds()
