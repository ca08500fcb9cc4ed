"""Modules that are imported when they are first used: numpy, and tqdm behind a progress bar.

Scheduling, simulating, comparing and drawing need neither, so they run where numpy is not installed, such as in a web
page, and `import workbench` stays light.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")


class OnDemand(ModuleType):
    """Stands for a module that is imported at the first use of one of its names.

    Args:
        name: Full name of the module.
    """

    def __getattr__(self, attribute: str) -> Any:
        """A name of the module.

        Raises:
            ModuleNotFoundError: The module is not installed.
        """
        if attribute.startswith("__"):  # asked for by tools that look at any module
            raise AttributeError(attribute)
        value = getattr(importlib.import_module(self.__name__), attribute)
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = OnDemand("numpy")


class _NoBar:
    """A progress bar that is not shown."""

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        pass


def progress_bar(total: int | None, title: str, unit: str, *, shown: bool) -> Any:
    """A context manager whose ``update(n)`` reports n more of ``total``: tqdm's bar if it is shown."""
    if not shown:
        return _NoBar()
    from tqdm.auto import tqdm

    return tqdm(total=total, desc=title, unit=unit)


def with_progress(items: Iterable[T], title: str, unit: str, *, shown: bool, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar of their number if it is shown."""
    if not shown:
        return items
    from tqdm.auto import tqdm

    return tqdm(items, desc=title, unit=unit, total=total)
