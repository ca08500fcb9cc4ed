"""The error of this room."""

from __future__ import annotations

from workbench.base.short_traceback import ShortTraceback


class TraceError(ShortTraceback, ValueError):
    """A trace that cannot be read or used, with the reason."""
