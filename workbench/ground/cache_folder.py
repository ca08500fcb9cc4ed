"""The folder for files that can be made or fetched again, kept between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder of this package; it may not exist yet.

    ``WORKBENCH_CACHE`` names it. The default is ``inference-workbench`` in the platform's cache folder:
    ``~/Library/Caches`` on macOS, ``$XDG_CACHE_HOME`` or ``~/.cache`` elsewhere.
    """
    if named := os.environ.get("WORKBENCH_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "inference-workbench"
