"""The CPU attention kernel: runs a work list over a paged KV cache. All arithmetic is in float32.

The online softmax follows one rule everywhere: the running maximum starts at -inf and stays there, with weights of 0,
as long as nothing was visible; the only division comes at the end, and only if something was summed. There is no
epsilon and no clamp, because both turn small logits into wrong numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.kernels.cpu.attention.compiled import EntryPoint
from workbench.kernels.cpu.attention.layout import Scoring, Shapes, make_scratch
from workbench.kernels.cpu.attention.processor import LANES

CACHE_TYPES: dict[str, type[Any]] = {"float32": np.float32, "float16": np.int16, "bfloat16": np.uint16, "int8": np.int8}
"""The type of the array that holds keys or values, by the type of its numbers."""

run_work_list = EntryPoint("workbench.kernels.cpu.attention.kernel_code:run_work_list")
"""Runs a thread's items of a work list; see `workbench.kernels.cpu.attention.kernel_code` for the arguments."""


def example_of(dtype: str) -> tuple[Any, ...]:
    """Arguments of `run_work_list`, for a cache of numbers of a type."""
    shapes, heads = Shapes(1, 1, LANES, LANES, 1, LANES, LANES), np.zeros(1, np.float32)
    floats, items, cache = np.zeros(LANES, np.float32), np.zeros((1, 7), np.int32), np.zeros(LANES, CACHE_TYPES[dtype])
    scoring = Scoring(np.float32(1.0), np.float32(0.0), -1, heads, heads)
    return floats, cache, cache, floats, items, items, shapes, scoring, make_scratch(shapes), 0, 1


def work_list_address(dtype: str) -> int:
    """Address of `run_work_list` for a cache of numbers of a type, such as "float16"."""
    return run_work_list.address(*example_of(dtype))
