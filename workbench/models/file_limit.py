"""Keeps the process's limit on open files while mlx-lm is imported.

``mlx_lm.utils`` sets both limits when it is imported (2,048 and 4,096). That takes files away from a process which was
allowed more, for good, because a lowered hard limit cannot be raised again; and the import fails in a process which is
allowed less. Here the soft limit is raised where it is lower, and the hard limit stays.
"""

from __future__ import annotations

import importlib.machinery
import resource
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

WANTED_FILES = 2048
"""Open files that loading a large model may need (mlx-lm's number)."""

_MODULE = "mlx_lm.utils"


class _KeepFileLimit(MetaPathFinder):
    """Finds one module as Python does, and lets its loader keep the limit."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, or None for every other module."""
        if fullname != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = spec and spec.loader
        if loader:
            loader.exec_module = partial(_run_without_setrlimit, loader.exec_module)
        return spec


def _run_without_setrlimit(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run a module while ``resource.setrlimit`` has no effect, then raise the soft limit."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        run(module)
    finally:
        resource.setrlimit = setrlimit
    raise_file_limit(WANTED_FILES)


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit on open files to a number, as far as the hard limit allows, and return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return wanted if soft == unlimited else soft
    soft = wanted if hard == unlimited else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def keep_file_limit() -> None:
    """Keep the limit when mlx-lm is imported later."""
    if _MODULE not in sys.modules and not any(isinstance(finder, _KeepFileLimit) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KeepFileLimit())
