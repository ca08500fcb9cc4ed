"""A hunt in several processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Event
from typing import Any

from workbench.analysis.hunt.search import Found, Search
from workbench.analysis.hunt.target import Tally, find_target

_ends: Event
"""In a process of a hunt: set when the hunt is to end."""


def search_in_processes(search: Search, jobs: int, policy: str | None) -> None:
    """Search in several processes, and merge what they find."""
    share = None if search.workloads is None else -(-search.workloads // jobs)
    target, limits = (search.target.name, policy, search.target.allows), (search.seconds, share)
    given = [(target, limits, f"{search.seed}.{job}", search.laws, search.database) for job in range(jobs)]
    context = multiprocessing.get_context("spawn")
    ends = context.Event()
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(ends,)) as pool:
        with _ignored_interrupts():  # the processes inherit it
            futures = [pool.submit(_search, each) for each in given]
        for future in futures:
            try:
                found, num_workloads, pairs, tally = future.result()
            except KeyboardInterrupt:  # what was found is kept
                ends.set()
                found, num_workloads, pairs, tally = future.result()
            search.num_workloads += num_workloads
            search.pairs |= pairs
            search.tally.merge(tally)
            search.tell(search, None)
            for each in found:
                search.keep(each)
                search.tell(search, each)


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def _begin(ends: Event) -> None:
    """In each process: Ctrl-C reaches it as ``ends``, through the first one."""
    global _ends
    _ends = ends


def _end_if_told(search: Search, found: Found | None) -> None:
    if _ends.is_set():
        raise KeyboardInterrupt


def _search(given: tuple[Any, ...]) -> tuple[list[Found], int, set[tuple[str, str]], Tally]:
    target, (seconds, workloads), seed, laws, database = given
    search = Search(find_target(*target), seconds, workloads, seed, laws, database, _end_if_told)
    with contextlib.suppress(KeyboardInterrupt):
        search.run()
    return search.found, search.num_workloads, search.pairs, search.tally
