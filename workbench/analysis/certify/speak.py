"""Speaks the protocol of a certificate for a scheduler that the hunt can drive."""

from __future__ import annotations

import json
import os
import sys
from io import TextIOWrapper
from typing import Any, TextIO

from workbench.analysis.certify.neutral import judge, read_neutral, simulated_workload, steps_of
from workbench.analysis.hunt.search import shape
from workbench.analysis.hunt.workloads import FEATURES
from workbench.simulation.workload import read_workload


def speak(scheduler: str, lines: TextIO = sys.stdin) -> None:
    """Answer workloads with the schedules of a scheduler until the input ends.

    Args:
        scheduler: "workbench", "vllm", "vllm:module:Class" or "module:factory".
        lines: The workloads, a line of JSON each.

    Raises:
        ValueError: There is no such scheduler.
    """
    from workbench.analysis.hunt.target import find_target

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a scheduler prints is not an answer
    target = None if scheduler == "workbench" else find_target(scheduler)
    if isinstance(lines, TextIOWrapper):
        lines.reconfigure(errors="replace")  # a line that is not UTF-8 gets an answer, too
    for line in lines:
        print(json.dumps(_answer(target, line)), file=answers, flush=True)


def _answer(target: Any, line: str) -> dict[str, Any]:
    from workbench.analysis.hunt.schedule import schedule_of

    try:
        workload = read_neutral(line)
    except ValueError as problem:
        return {"unsupported": str(problem)}
    try:
        simulated = simulated_workload(workload)
        read_workload(simulated)
        if target is None:
            return {"id": workload["id"], "steps": steps_of(judge(workload))}
    except (ValueError, RuntimeError) as problem:  # a setting that nobody knows, or a workload that nobody can serve
        return {"id": workload["id"], "unsupported": str(problem)}
    if unknown := sorted(_needs(workload) - set(target.features)):
        return {"id": workload["id"], "unsupported": f"no {', '.join(unknown)}"}
    dropped: set[str] = set()
    steps, end = schedule_of(target, simulated, dropped=dropped)
    if end.startswith("refused"):
        return {"id": workload["id"], "unsupported": end}
    if lacking := dropped & set(workload["config"]):
        return {"id": workload["id"], "unsupported": f"no {', '.join(sorted(lacking))}"}
    told = [{**step, "finished": list(step["finished"])} for step in steps]
    for step in told:
        del step["free_blocks"]
    return {"id": workload["id"], "steps": told}


_NAMES = {"windows": "groups", "scheduled_tokens": "caps", "active_seqs": "caps", "watermark": "pools"}


def _needs(workload: dict[str, Any]) -> set[str]:
    """The features of schedulers that a workload uses, of `workbench.analysis.hunt.workloads.FEATURES`."""
    needs = {_NAMES.get(name, name) for name in shape(simulated_workload(workload))}
    if workload["config"].get("scheduler_reserve_full_isl") is False:
        needs.add("pools")
    return needs & set(FEATURES)
