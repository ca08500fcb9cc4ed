"""Progress bars, which are shown if tqdm is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class _NoBar:
    """A progress bar that is not shown."""

    n = total = 0

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


def progress_bar(total: int | None, title: str, unit: str, *, shown: bool, **options: Any) -> Any:
    """A context manager whose ``update(n)`` reports n more of ``total``: tqdm's bar if it is shown and installed.

    Importing tqdm takes as long as importing MLX: a bar that is not shown does without.
    """
    bar = _tqdm() if shown else None
    return bar(total=total, desc=title, unit=unit, **options) if bar else _NoBar()


def with_progress(items: Iterable[T], title: str, unit: str, *, shown: bool, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar of their number if it is shown and tqdm installed."""
    bar = _tqdm() if shown else None
    return bar(items, desc=title, unit=unit, total=total) if bar else items


def _tqdm() -> Any:
    try:
        return importlib.import_module("tqdm.auto").tqdm
    except ModuleNotFoundError:
        return None
