"""The error of this room."""

from __future__ import annotations


class TraceError(ValueError):
    """A trace that cannot be read or used, with the reason."""
