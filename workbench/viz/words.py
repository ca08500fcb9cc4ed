"""Words for chunks in labels and tooltips; ``js/words.js`` has the same ones for the live views."""

from __future__ import annotations

from workbench.trace.records import Arm, LimitedBy

KINDS: dict[Arm, str] = {
    "decode": "decode",
    "new_final": "whole prompt",
    "intermediate": "part of a prompt",
    "cached_final": "last chunk of a prompt",
}
"""Kind of a chunk by its arm. The arm's name alone would mislead: "cached_final" is unrelated to the prefix cache."""


def kind_of(arm: Arm) -> str:
    """The kind of a chunk."""
    return KINDS[arm]


def limit_of(limited_by: LimitedBy) -> str:
    """The reason why a chunk is not longer."""
    if limited_by == "complete":
        return "not limited"
    return f"limited by {limited_by.replace('_', ' ')}"
