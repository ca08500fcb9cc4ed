"""The folder for files that can be made or fetched again, kept between runs.

Machine code is run from it, so it must be ours: folders and files that others own or can write are refused. A library
that was made here has the checksum of its content in its name.
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


def cached(*parts: str) -> Path:
    """Path of a file or folder in the cache folder; it may not exist yet.

    Raises:
        UnsafeCacheFolder: Others own it or a folder on the way to it, or can change them.
    """
    path = cache_folder()
    for part in parts:
        path /= part
        _check_ours(path)
    return path


def kept(path: Path) -> Path | None:
    """The file that `keep` left for a path; None if there is none, or only damaged ones, which are removed.

    Raises:
        UnsafeCacheFolder: Others own it, or can change it.
    """
    for found in path.parent.glob(f"{path.stem}-*{path.suffix}"):
        _check_ours(found)
        if found == _with_digest(found, path):
            return found
        found.unlink(missing_ok=True)
    return None


def keep(made: Path, path: Path) -> Path:
    """Move a finished file into the cache folder, with the SHA-256 of its content in its name.

    Args:
        made: The file, on the same disk.
        path: Its path without the checksum; the name says what the file was made from.

    Returns:
        Its path. Processes that make a file at once do not interfere.
    """
    target = _with_digest(made, path)
    made.chmod(0o600)
    os.replace(made, target)
    return target


def _with_digest(content: Path, path: Path) -> Path:
    import hashlib

    with content.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return path.with_name(f"{path.stem}-{digest[:32]}{path.suffix}")


def _check_ours(path: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        found = path.stat()
    except OSError:  # it does not exist yet, or using it says what is wrong
        return
    if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    raise UnsafeCacheFolder(
        f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; everything in the cache "
        f"folder must belong to user {os.getuid()} and be writable by nobody else, because machine code is run from "
        f"it: chmod go-w {path}, or set WORKBENCH_CACHE to another folder"
    )


def make_folder(folder: Path) -> None:
    """Make a folder in the cache folder, and those above it that are missing, for this user alone (mode 0700)."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
