"""Compiled entry points, kept on disk from one process to the next."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba

from workbench.attention.cpu.simd import config, jit
from workbench.cache_folder import cache_folder


def entry_point(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that Python calls, and everything it calls, once per machine instead of per process.

    If the folder of `kept_code` cannot be written, the function is compiled in every process.
    """
    try:
        with kept_code(function):
            return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except (OSError, RuntimeError):  # numba raises RuntimeError when it can write to none of its cache folders
        return jit(function)


@contextmanager
def kept_code(function: Callable[..., Any]) -> Iterator[None]:
    """Let numba keep what is declared inside the block in a folder for the present sources.

    numba notices a change in the file of a function, but not in the files of the functions it calls. So the code is
    kept in a folder named after a digest of all sources of compiled code: those in this package, which all compiled
    code uses, and those beside the function. Each version has a different folder.

    Raises:
        OSError: The folder cannot be written.
    """
    before = config.CACHE_DIR
    try:
        config.CACHE_DIR = str(_code_folder(Path(function.__code__.co_filename).parent))
        yield
    finally:
        config.CACHE_DIR = before


def _code_folder(sources: Path) -> Path:
    folder = cache_folder() / "numba" / _source_digest(sources)
    if not folder.exists():
        _announce(folder)
    return folder


@cache
def _announce(folder: Path) -> None:
    """Say once that the code is not compiled yet, because the first use takes a while."""
    print(f"compiling kernels for this CPU into {folder}: up to a minute, once", file=sys.stderr, flush=True)


@cache
def _source_digest(sources: Path) -> str:
    digest = hashlib.sha256()
    for folder in sorted({Path(__file__).parent, sources}):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
