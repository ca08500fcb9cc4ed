"""Spread simulations over the workers of an executor."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PROCESSES = sys.platform != "emscripten"
"""Whether the platform has processes; a web page has none, and simulates one run after another."""


def spread_out(
    function: Callable[..., T],
    shared: Any,
    tasks: Sequence[tuple[Any, ...]],
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    apart: bool = False,
) -> Iterator[tuple[int, T]]:
    """Call a function for each task, and give the results as they become known.

    Args:
        function: A function of a module, called as ``function(shared, *task)``.
        shared: An argument of all calls, such as a workload; it is pickled once.
        tasks: The other arguments of each call.
        executor: Any `concurrent.futures.Executor`, such as Dask's ``client.get_executor()``; None for processes here.
        jobs: Number of processes without an executor; None for one per core, 1 for calls in this process.
        apart: Take a process for a single call too, unless ``jobs`` is 1.

    Yields:
        The index of a task and its result.
    """
    num_processes = min(jobs or os.cpu_count() or 1, len(tasks))
    is_here = not tasks or jobs == 1 or not PROCESSES or (num_processes == 1 and not apart)
    if executor is None and is_here:
        yield from ((index, function(shared, *task)) for index, task in enumerate(tasks))
        return
    from concurrent.futures import as_completed

    with ExitStack() as stack:
        packed: bytes | Path
        if executor is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="workbench-", ignore_cleanup_errors=True))
            # In a file, which may be large, it is neither held here nor copied with each task.
            packed = Path(folder, "shared.pickle")
            with packed.open("wb") as file:
                pickle.dump((function, shared), file)
            executor = _processes(num_processes)
            stack.callback(executor.shutdown, cancel_futures=True)
        else:
            packed = pickle.dumps((function, shared))
        futures = {executor.submit(_call, packed, task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()


def _processes(jobs: int) -> Executor:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # Spawn processes instead of forking: this one may have threads of MLX or of a server.
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts)


def _ignore_interrupts() -> None:
    """Ctrl-C ends the process that waits, and this one with it."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


@lru_cache(maxsize=2)
def _unpacked(packed: bytes | Path) -> tuple[Callable[..., Any], Any]:
    if isinstance(packed, bytes):
        return pickle.loads(packed)  # noqa: S301 - from the process that spreads the calls
    with packed.open("rb") as file:
        return pickle.load(file)  # noqa: S301 - likewise


def _call(packed: bytes | Path, task: tuple[Any, ...]) -> Any:
    """One call, in a worker, which unpacks what all calls share once."""
    function, shared = _unpacked(packed)
    return function(shared, *task)
