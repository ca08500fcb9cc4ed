"""Work beside the caller: on another thread, or at once in a web page, whose Python has no threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

HAS_THREADS = sys.platform != "emscripten"
"""Whether this Python can start threads."""


def in_background(work: Callable[[], object], name: str) -> None:
    """Run work on another thread, or before this returns if there are no threads.

    Args:
        work: A function without arguments that raises nothing.
        name: Name of the thread.
    """
    if HAS_THREADS:
        threading.Thread(target=work, name=name, daemon=True).start()
    else:
        work()
