"""The names of steps in a profile: the recorder writes them, and the join of a recording with a profile reads them."""

from __future__ import annotations

import re

MARK_NAME = "workbench step {step}: {moment}"
"""Name of a mark in the profile of an engine's process."""

SCHEDULED, OUTPUT = "scheduled", "output"
"""The moments of a step that are marked: ``schedule`` has returned, and the step's output is about to be processed."""

_NAME = re.compile(r"workbench step (\d{1,18}): (scheduled|output)")


def mark_of(name: str) -> tuple[int, str] | None:
    """The step and the moment of a mark, by its name; None for another event.

    Example:
        >>> mark_of(MARK_NAME.format(step=12, moment=SCHEDULED))
        (12, 'scheduled')
        >>> mark_of("aten::mm")
    """
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), found[2])
