"""The page of a recorded kernel: its source, the lanes and memory at every moment, forwards and backwards.

A recording draws itself in a notebook with ``run.watch()``, and is saved as one file with ``run.save_html(path)``.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.base.on_demand import imported
from workbench.base.whole_file import replace_text
from workbench.viz.bundle import bundle
from workbench.viz.export_html import offline_page

if TYPE_CHECKING:
    from collections.abc import Sequence

ENTRY = "kernel_run.js"
MAX_EVENTS = 1_000_000
"""Maximum number of events of a page; a browser holds about 60 bytes for each."""


class Number(Protocol):
    """A number of a recording, with its definition."""

    name: str
    array: str
    value: float
    best: float | None
    definition: str


class Recording(Protocol):
    """The drawn part of a `workbench.msl.KernelRun`."""

    kernel: str
    fault: Any
    events: Any

    @property
    def numbers(self) -> Sequence[Number]:
        """The numbers of the recording."""

    def packet(self) -> bytes:
        """The bytes that the page reads."""


def run_html(run: Recording) -> str:
    """The recording in a cell: one sentence, its fault, and its numbers with their definitions."""
    rows = [
        f"<tr><td>{escape(one.array)}</td><td>{escape(one.name)}</td><td style='text-align:right'>{one.value:,.4g}</td>"
        f"<td style='text-align:right'>{'' if one.best is None else f'{one.best:,.4g}'}</td>"
        f"<td style='text-align:left'>{escape(one.definition)}</td></tr>"
        for one in run.numbers
    ]
    fault = f"<pre style='color:#b3261e'>{escape(run.fault.message)}</pre>" if run.fault else ""
    head = "".join(f"<th>{name}</th>" for name in ("array", "number", "value", "at best", "definition"))
    return (
        f"<div><p>{escape(repr(run))}. <code>run.watch()</code> steps through it.</p>{fault}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def check_size(run: Recording) -> None:
    """Refuse a recording that is too large for a page.

    Raises:
        ValueError: It has too many events.
    """
    if len(run.events) > MAX_EVENTS:
        raise ValueError(
            f"the recording has {len(run.events):,} events, and the maximum of a page is {MAX_EVENTS:,}: record fewer "
            "threadgroups, or choose a smaller max_bytes"
        )


def watch(run: Recording) -> Any:
    """A view of the recording for a notebook: every moment, forwards and backwards.

    Raises:
        ValueError: The recording has too many events.
        ModuleNotFoundError: The extra notebook is not installed; the message says how to install it.
    """
    check_size(run)
    return imported("workbench.viz.kernel_run_widget", "KernelRunView", "run.watch()")(run)


def page(run: Recording) -> str:
    """The HTML of the page, which needs no network.

    Raises:
        ValueError: The recording has too many events.
    """
    check_size(run)
    return offline_page(
        title=f"Kernel {run.kernel}", summary=repr(run), packets={"packet": run.packet()}, module=bundle(ENTRY)
    )


def save_html(run: Recording, path: str | os.PathLike[str]) -> None:
    """Write the page as one file that needs no network.

    Args:
        run: The recording.
        path: The HTML file; replaced if it exists.

    Raises:
        ValueError: The recording has too many events.
        OSError: The file cannot be written; an earlier file of that name is left unchanged.
    """
    replace_text(Path(path), page(run))
