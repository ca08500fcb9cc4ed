"""Words for chunks in labels and tooltips; ``js/words.js`` has the same ones for the live views."""

from __future__ import annotations

from workbench.trace.records import Arm, LimitedBy

ROLES: dict[Arm, str] = {
    "decode": "decode",
    "new_final": "whole prompt",
    "intermediate": "part of a prompt",
    "cached_final": "last chunk",
}
"""Roles of a chunk by its ``arm``. That word alone would mislead: "cached_final" is unrelated to the prefix cache."""


def role_of(arm: Arm) -> str:
    """The role of a chunk."""
    return ROLES[arm]


def limit_of(limited_by: LimitedBy) -> str:
    """The reason why a chunk is not longer."""
    if limited_by == "complete":
        return "not limited"
    return f"limited by {limited_by.replace('_', ' ')}"
