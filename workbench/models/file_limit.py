"""The process's limit on open files."""

from __future__ import annotations

import resource


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit on open files to a number, as far as the hard limit allows, and return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return wanted if soft == unlimited else soft
    soft = wanted if hard == unlimited else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
