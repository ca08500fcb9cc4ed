"""The ranks of a job, as ``mlx.launch`` describes them in the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

LEADER = 0
"""The rank that schedules, samples and records."""
LEADER_HOST = "WORKBENCH_LEADER_HOST"
"""Names rank 0's address where the environment of the launcher does not."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """True in a process that ``mlx.launch`` (or anything that speaks its variables) started as one of several."""
    if not environment.get("MLX_RANK"):
        return False
    hosts = environment.get("MLX_HOSTFILE")
    return hosts is None or Path(hosts).read_text().strip() != ""  # the ring's launcher leaves it empty for one rank


def join_group() -> mx.distributed.Group:
    """The group of all ranks; waits until every one of them has come.

    Raises:
        OSError: A rank did not come, or MLX has no way to reach it.
    """
    try:
        return mx.distributed.init(strict=True)
    except (RuntimeError, ValueError) as problem:
        raise OSError(f"the ranks could not be joined: {problem}; start all of them with mlx.launch") from problem


def leader_host(environment: Mapping[str, str] = os.environ) -> str:
    """The address under which the other ranks reach rank 0.

    It is the one that MLX itself connects to: the first of the ring's host file, JACCL's coordinator, or NCCL's host.

    Raises:
        OSError: None of these is given.
    """
    if named := environment.get(LEADER_HOST) or environment.get("NCCL_HOST_IP"):
        return named
    if coordinator := environment.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    if hostfile := environment.get("MLX_HOSTFILE"):
        return json.loads(Path(hostfile).read_text())[LEADER][0].rpartition(":")[0]
    raise OSError(f"rank 0 has no known address: set {LEADER_HOST} to one that the other ranks can reach, on all ranks")
