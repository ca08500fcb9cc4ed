"""The difference between two schedulers: the same workloads through both, and the first step that differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from workbench.analysis.hunt.between import report, surface
from workbench.analysis.hunt.between.search import Comparison
from workbench.analysis.hunt.between.sides import Asked, both

__all__ = ["compare_schedulers"]


def compare_schedulers(
    a: str,
    b: str,
    *,
    seconds: float | None = 60,
    workloads: int | None = None,
    seed: int = 0,
    python: str = "",
    out: Path | None = None,
    tell: Callable[[Comparison], None] = lambda comparison: None,
) -> tuple[Comparison, list[str]]:
    """Compare two schedulers.

    Args:
        a: The first one: "workbench", "vllm", "vllm:module:Class", "module:factory", a release, a folder or environment
            with vLLM, a checkout of Workbench, or a changed file.
        b: The second one.
        seconds: Time limit; None for none.
        workloads: Largest number of workloads; None for no limit.
        seed: Chooses the workloads.
        python: The interpreter of vLLM's environment for a side that names none; "" for this one.
        out: Folder for the findings; None to write nothing.
        tell: Called with the comparison now and then.

    Returns:
        The comparison, and the names of the folders of its findings.

    Raises:
        ValueError: One of them is not a scheduler, or cannot be started.
    """
    places = both(a, b, python)
    as_vllm = any(place.scheduler.startswith("vllm") for place in places)
    with contextlib.ExitStack() as opened:
        sides = [opened.enter_context(contextlib.closing(Asked(place, as_vllm=as_vllm))) for place in places]
        comparison = Comparison(sides[0], sides[1], seconds, workloads, seed, tell)
        with contextlib.suppress(KeyboardInterrupt):  # what was found is kept
            comparison.run()
        static = None
        packages = [side.package for side in sides]
        if packages[0] is not None and packages[1] is not None:
            hooks = list(dict.fromkeys(name for side in sides for name in side.hooks))
            static = surface.compare(packages[0], packages[1], hooks)
        names = report.write(out, comparison, static) if out is not None else []
    return comparison, names
