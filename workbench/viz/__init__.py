"""Views of a trace: static pictures, a notebook widget, a served dashboard and a single-file page.

All of them are drawn from a Trace alone. A live engine is a trace that still grows, with a few methods to control it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.viz.widget import TraceView

__all__ = ["watch"]


def watch(source: Any, **options: Any) -> TraceView:
    """Show a trace or an engine in a notebook cell; see `workbench.viz.widget.watch`."""
    from workbench.viz.widget import watch as watch_in_notebook

    return watch_in_notebook(source, **options)
