"""Compiled entry points that are kept on disk from one process to the next."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

from workbench.cache_folder import cache_folder


def entry_point(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that Python calls, and everything it calls, once per machine instead of per process.

    numba notices a change of the file a function stands in, but not of the files it calls into. So the code is kept
    in a folder named after the sources of compiled code: another version has another folder. Where the folder
    cannot be written, the function is compiled in every process.
    """
    options = {"nogil": True, "error_model": "numpy"}
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(_code_folder())
        return numba.njit(function, cache=True, **options)
    except (OSError, RuntimeError):  # numba's word for "no folder of mine can be written" is RuntimeError
        return numba.njit(function, **options)
    finally:
        numba.config.CACHE_DIR = before


def _code_folder() -> Path:
    folder = cache_folder() / "numba" / _source_digest()
    if not folder.exists():
        _announce(folder)
    return folder


@cache
def _announce(folder: Path) -> None:
    """Say once that there is no code yet, because the first use takes a while."""
    print(f"compiling the CPU attention kernels into {folder}: about 10 seconds, once", file=sys.stderr, flush=True)


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in (folder / "simd.py", folder / "matmul_tiles.py", *sorted(folder.glob("cpu_*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
