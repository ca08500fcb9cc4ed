"""Runs of `stalled_process`, and what an explanation of their recordings must say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.analysis.explain import Explainer
from workbench.trace import Trace

SUPPORT = Path(__file__).parent
LATE = 3.0
"""A step that takes this many times what the roofline gives was really late, planted or not."""


@dataclass(frozen=True)
class Judged:
    """The answers about a run.

    Attributes:
        named: Whether the planted stall is named, at its step and with its length; true without one.
        cause: The causes in the machine that are named for it.
        claimed: Sentences about other stalls, and whether the process's clock confirms them.
        num_hit: Number of requests that were in the planted step or waited for it.
        blamed: Those of them whose explanation leaves a part of the stall to a request or to another cause.
    """

    named: bool
    cause: str
    claimed: tuple[tuple[str, bool], ...]
    num_hit: int
    blamed: tuple[str, ...]


def run(seed: int, kind: str, folder: Path, clock: str = "real") -> tuple[dict[str, Any], Trace]:
    """A run's own account of its times, by the real or a made clock, and its recording in an empty folder."""
    search = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    environ = {**os.environ, "WORKBENCH_TRACE_DIR": str(folder), "PYTHONPATH": search}
    command = [sys.executable, str(SUPPORT / "stalled_process.py"), str(seed), kind, clock]
    done = subprocess.run(command, env=environ, check=True, timeout=120, capture_output=True, text=True)
    (path,) = folder.iterdir()
    return json.loads(done.stdout), Trace.load(path)


def judge(said: dict[str, Any], trace: Trace) -> Judged:
    """Compare a recording's stalls and explanations with what the process did."""
    assert not trace.problems and len(trace) == len(said["took"])
    planted, stalls = said["planted"], {stall.step: stall for stall in trace.stalls()}
    at = planted["step"] if planted else -1
    stall = stalls.pop(at, None)
    late = [took >= LATE * priced for took, priced in zip(said["took"], said["priced"])]
    claimed = tuple(
        (str(other), late[step] or late[step - 1]) for step, other in stalls.items()
    )  # its end counts there
    if not planted or stall is None:
        return Judged(not planted, "", claimed, 0, ())
    explainer, step, blamed = Explainer(trace), trace[at], []
    hit = list(dict.fromkeys([*(chunk.request_id for chunk in step.chunks), *step.waiting, *step.running]))
    for request_id in hit:
        why = explainer.explain(request_id)
        part = next((part for part in why.parts if part.kind == "stall"), None)
        here = sum(other.excess for other in why.stalls)
        is_whole = part is not None and (request_id in step.arrived or part.amount >= 0.98 * here)
        is_sum = math.isclose(math.fsum(each.amount for each in why.parts), why.total)
        if (
            part is None
            or part.culprits
            or not is_whole
            or not is_sum
            or (why.biggest_avoidable is part and why.confirmation)
        ):
            blamed.append(request_id)
    named = math.isclose(stall.excess, planted["seconds"], rel_tol=0.1)
    return Judged(named, stall.causes, claimed, len(hit), tuple(blamed))
