"""Progress on standard error: bars, which need tqdm, and a line that changes, where somebody watches."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class _NoBar:
    """A progress bar that is not shown."""

    n = total = 0
    disable = True

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        pass

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        pass

    def refresh(self) -> None:
        pass


class StatusLine:
    """A line on standard error, which the next one replaces. In a pipe or a file only the last one is written."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, line: str) -> None:
        """Show a line in place of the one before."""
        self._last = line
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def above(self, text: str) -> None:
        """Write lines that stay, above the line that changes."""
        print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr)

    def end(self) -> None:
        """Leave the last line, ended."""
        print("" if sys.stderr.isatty() else self._last, file=sys.stderr)


def _is_watched() -> bool:
    """Whether progress is seen: in a pipe or a file, every state of a bar would stay."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def progress_bar(total: int | None, title: str, unit: str, *, shown: bool, **options: Any) -> Any:
    """A context manager whose ``update(n)`` reports n more of ``total``: tqdm's bar if it is shown and installed.

    In a pipe or a file there is none. Importing tqdm takes as long as importing MLX: a bar that is not shown does
    without.
    """
    bar = _tqdm() if shown else None
    return bar(total=total, desc=title, unit=unit, **options) if bar else _NoBar()


def end_bar(bar: Any, left: int) -> None:
    """Show a bar as it ended: full if nothing is ``left``. Its total was an estimate, and work may end early.

    The width in a notebook follows from ``reset`` alone, which would begin the time again.
    """
    if bar.disable:
        return
    done, began = bar.n, bar.start_t
    bar.reset(done + left)
    bar.start_t = began
    bar.update(done)
    bar.refresh()


def with_progress(items: Iterable[T], title: str, unit: str, *, shown: bool, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar of their number if it is shown and tqdm installed."""
    bar = _tqdm() if shown else None
    return bar(items, desc=title, unit=unit, total=total) if bar else items


def _tqdm() -> Any:
    if not _is_watched():
        return None
    try:
        return importlib.import_module("tqdm.auto").tqdm
    except ModuleNotFoundError:
        return None
