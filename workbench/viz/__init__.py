"""Views of a trace: static pictures, a notebook widget, a served dashboard and a single-file page.

All of them are drawn from a Trace alone. A live engine is a trace that still grows, with a few methods to control it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import imported

if TYPE_CHECKING:
    from workbench.viz.app import make_app, serve
    from workbench.viz.attention_weights import weights_html
    from workbench.viz.cursor import cursor_of
    from workbench.viz.widget import TraceView

_HOMES = {
    "cursor_of": "cursor",
    "make_app": "app",
    "serve": "app",
    "weights_html": "attention_weights",
}

__all__ = ["cursor_of", "make_app", "serve", "watch", "weights_html"]


def watch(source: Any, **options: Any) -> TraceView:
    """Show a trace or an engine in a notebook cell; see `workbench.viz.widget.watch`."""
    from workbench.viz.widget import watch as watch_in_notebook

    return watch_in_notebook(source, **options)


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name in _HOMES:
        return imported(f"{__name__}.{_HOMES[name]}", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
