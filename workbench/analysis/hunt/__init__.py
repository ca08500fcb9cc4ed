"""The hunt: random workloads through any scheduler, the laws after every step, and each fault as a small case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

from workbench.analysis.hunt.finding import Finding, finding_of, write_folder
from workbench.analysis.hunt.progress import smallest_change
from workbench.analysis.hunt.search import Found, Search
from workbench.analysis.hunt.target import find_target
from workbench.base.field_checks import number
from workbench.trace.laws.checker import check_laws

__all__ = ["Finding", "hunt"]


def hunt(
    scheduler: str = "workbench",
    *,
    seconds: float | None = 60,
    workloads: int | None = None,
    seed: int = 0,
    policy: str | None = None,
    laws: Collection[str] | None = None,
    allow: Collection[str] | None = None,
    out: Path | str | None = None,
    jobs: int = 1,
    tell: Callable[[Search, Found | None], None] = lambda search, found: None,
) -> list[Finding]:
    """Search a scheduler for broken laws.

    Args:
        scheduler: "workbench", "vllm", "vllm:module:Class" or "module:factory" (`workbench.analysis.hunt.protocol`).
        seconds: Time limit; None for none.
        workloads: Largest number of workloads; None for no limit.
        seed: Chooses the workloads.
        policy: "module:Class" of a policy for Workbench's scheduler.
        laws: Names of the laws to check; None for all.
        allow: Names of the exceptions that are not findings; None for every one of Workbench's, and for none elsewhere.
        out: Folder that gets a folder for each finding; None to write nothing.
        jobs: Number of processes, each with its own workloads.
        tell: Called with the search now and then, and with each new fault.

    Returns:
        The distinct findings, each with its smallest case.

    Raises:
        ValueError: There is no such scheduler, law or exception, or no time.

    Example:
        >>> from workbench import hunt
        >>> hunt(seconds=None, workloads=20)
        []
    """
    if seconds is not None:
        number("seconds", seconds, 0, low_open=True)
    check_laws("laws (--only)", laws)
    target = find_target(scheduler, policy, allow)
    database = Path(out) / ".hypothesis" if out else None
    search = Search(target, seconds, workloads, seed, laws, database, tell)
    if jobs > 1:
        from workbench.analysis.hunt.processes import search_in_processes  # a web page has no processes

        search_in_processes(search, jobs, policy)
    else:
        with contextlib.suppress(KeyboardInterrupt):  # what was found is kept
            search.run()
    return [described(search, found, out) for found in search.found]


def described(search: Search, found: Found, out: Path | str | None) -> Finding:
    """A fault as a finding, written to its folder if there is one."""
    change = smallest_change(found.workload, search.ends) if found.fault.law == "progress" else ""
    finding = finding_of(search.target, found, change)
    return finding if out is None else write_folder(Path(out), search.target, finding, found.workload)
