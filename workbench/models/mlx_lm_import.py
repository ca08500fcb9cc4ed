"""Importing mlx-lm: only the modules that are used, and without its limit on open files.

``import mlx_lm.models.llama`` runs ``mlx_lm/__init__.py``, which imports a converter, a generator and transformers:
more than a second for nothing that a GGUF model needs. Here it runs when something of it is asked for.

``mlx_lm.utils`` sets both limits on open files when it is imported (2,048 and 4,096). That takes files away from a
process which was allowed more, for good, because a lowered hard limit cannot be raised again; and the import fails in a
process which is allowed less. Here the soft limit is raised where it is lower, and the hard limit stays.

transformers, which both import, says on standard error that PyTorch is missing. Nothing here needs it.
"""

from __future__ import annotations

import importlib.machinery
import os
import resource
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from threading import RLock
from types import ModuleType
from typing import Any
from unittest.mock import patch

from workbench.models.file_limit import raise_file_limit

WANTED_FILES = 2048
"""Open files that loading a large model may need (mlx-lm's number)."""

Run = Callable[[ModuleType], None]


def _run_when_used(run: Run, module: ModuleType) -> None:
    """Let a package run when a name is asked for that it does not have yet; its modules can be imported without."""
    lock, has_begun = RLock(), False

    def missing(name: str) -> Any:
        nonlocal has_begun
        with lock:
            if not has_begun:
                has_begun = True
                try:
                    run(module)
                except BaseException:
                    has_begun = False
                    raise
        if name not in vars(module):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return vars(module)[name]

    module.__getattr__ = missing  # type: ignore[method-assign]


def _run_without_setrlimit(run: Run, module: ModuleType) -> None:
    """Run a module while ``resource.setrlimit`` has no effect, then raise the soft limit."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        run(module)
    finally:
        resource.setrlimit = setrlimit
    raise_file_limit(WANTED_FILES)


def _run_without_advice(run: Run, module: ModuleType) -> None:
    """Run transformers without its advice to install PyTorch."""
    with patch.dict(os.environ, TRANSFORMERS_NO_ADVISORY_WARNINGS="1"):
        run(module)


_RUNS: dict[str, Callable[[Run, ModuleType], None]] = {
    "mlx_lm": _run_when_used,
    "mlx_lm.utils": _run_without_setrlimit,
    "transformers": _run_without_advice,
}


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and lets those of a table run in their own way."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, or None for every other module."""
        if fullname not in _RUNS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = spec and spec.loader
        if loader:
            loader.exec_module = partial(_RUNS[fullname], loader.exec_module)
        return spec


def prepare_import() -> None:
    """Let mlx-lm, if it is imported later, be imported in this way."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
