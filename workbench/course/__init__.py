"""Shared parts of the notebooks in ``notebooks/``: checkers for their exercises, and two small pictures.

A checker tries the reader's answer on cases whose results are known from elsewhere (the engine, the simulation, a
formula), and shows a case in which the answer is wrong:

    >>> from workbench.course import check_slots
    >>> check_slots(lambda block_table, position, block_size: position)
    Not yet: block_table=[7], position=0, block_size=16 gives 0, expected 112.

Importing this package chooses the CPU, in float32, unless WORKBENCH_DEVICE names another device: the notebooks compare
logits to the last digits, and tokens of one schedule with tokens of another.
"""

import os

from workbench.course.exercises import (
    check_cached_tokens,
    check_chunks,
    check_could_differ,
    check_fewest_computed,
    check_fewest_seats,
    check_find_seq_idx,
    check_first_block,
    check_knobs,
    check_mask,
    check_num_chunks,
    check_num_steps,
    check_recomputed,
    check_slots,
    check_smallest_budget,
    check_standstill,
    check_token_of,
    check_tokens_kept,
    check_victim,
)
from workbench.course.faults import check_repair
from workbench.course.pictures import Picture, bars, matrix
from workbench.course.verdict import Verdict
from workbench.ground.device import DEVICE_VARIABLE

os.environ.setdefault(DEVICE_VARIABLE, "cpu")

__all__ = [
    "Picture",
    "Verdict",
    "bars",
    "check_cached_tokens",
    "check_chunks",
    "check_could_differ",
    "check_fewest_computed",
    "check_fewest_seats",
    "check_find_seq_idx",
    "check_first_block",
    "check_knobs",
    "check_mask",
    "check_num_chunks",
    "check_num_steps",
    "check_recomputed",
    "check_repair",
    "check_slots",
    "check_smallest_budget",
    "check_standstill",
    "check_token_of",
    "check_tokens_kept",
    "check_victim",
    "matrix",
]
