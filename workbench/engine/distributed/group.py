"""The group of ranks in a job that ``mlx.launch`` describes in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from workbench.base.outside_files import read_json

LEADER = 0
"""The rank that schedules, samples and records."""
LEADER_HOST = "WORKBENCH_LEADER_HOST"
"""Environment variable with rank 0's address, for a launcher that does not set it."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """True in a process that ``mlx.launch``, or a launcher with the same variables, started as one of several."""
    if not environment.get("MLX_RANK"):
        return False
    hosts = environment.get("MLX_HOSTFILE")
    return hosts is None or Path(hosts).read_text().strip() != ""  # mlx.launch writes an empty file for one rank


def join_group() -> mx.distributed.Group:
    """Wait until all ranks have started, and return their group.

    Raises:
        OSError: A rank did not start, or MLX cannot reach it.
    """
    try:
        return mx.distributed.init(strict=True)
    except (RuntimeError, ValueError) as problem:
        raise OSError(f"the ranks could not be joined: {problem}; start all of them with mlx.launch") from problem


def sum_over_ranks(group: mx.distributed.Group, numbers: list[int]) -> list[int]:
    """Element by element, the sum of each rank's numbers; every rank calls this together."""
    total = mx.distributed.all_sum(mx.array(numbers, dtype=mx.int32), group=group, stream=mx.cpu)
    return np.array(total).tolist()


def leader_host(environment: Mapping[str, str] = os.environ) -> str:
    """The address at which the other ranks reach rank 0.

    MLX itself connects to the same one: the first in the ring's host file, JACCL's coordinator, or NCCL's host.

    Raises:
        OSError: The environment has none of these.
    """
    if named := environment.get(LEADER_HOST) or environment.get("NCCL_HOST_IP"):
        return named
    if coordinator := environment.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    if hostfile := environment.get("MLX_HOSTFILE"):
        return read_json(hostfile)[LEADER][0].rpartition(":")[0]
    raise OSError(f"rank 0 has no known address: set {LEADER_HOST} to one that the other ranks can reach, on all ranks")
