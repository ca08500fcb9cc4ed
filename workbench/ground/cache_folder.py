"""The folder for files that can be made or fetched again, kept between runs.

Machine code is run from it, so it must be ours: a folder that others own or can write is refused.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


class UnsafeCacheFolder(PermissionError):
    """The cache folder can be changed by others, whose code would run as this user."""


def cache_folder() -> Path:
    """The user's cache folder of this package; it may not exist yet.

    ``WORKBENCH_CACHE`` names it. The default is ``inference-workbench`` in the platform's cache folder:
    ``~/Library/Caches`` on macOS, ``$XDG_CACHE_HOME`` or ``~/.cache`` elsewhere.

    Raises:
        UnsafeCacheFolder: Others own it, or can write in it. Windows has no such modes, and is not checked.
    """
    folder = _named_folder()
    if sys.platform != "win32":
        _check_ours(folder)
    return folder


def _named_folder() -> Path:
    if named := os.environ.get("WORKBENCH_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "inference-workbench"


def _check_ours(folder: Path) -> None:
    try:
        found = folder.stat()
    except OSError:  # it does not exist yet, or using it says what is wrong
        return
    if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    raise UnsafeCacheFolder(
        f"the cache folder {folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; it "
        f"must belong to user {os.getuid()} and be writable by nobody else, because machine code is run from it: "
        f"chmod go-w {folder}, or set WORKBENCH_CACHE to another folder"
    )


def make_folder(folder: Path) -> None:
    """Make a folder in the cache folder, and those above it that are missing, for this user alone (mode 0700)."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
