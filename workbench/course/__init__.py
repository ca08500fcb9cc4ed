"""What the notebooks in ``notebooks/`` share: checkers for their exercises, and two small pictures.

A checker takes the reader's answer, tries it on cases whose result is known from somewhere else (the engine, the
simulation, a formula) and says by an example what is wrong with it:

    >>> from workbench.course import check_slots
    >>> check_slots(lambda block_table, position, block_size: position)
    Not yet: block_table=[7], position=0, block_size=16 gives 0, expected 112.
"""

from workbench.course.exercises import (
    check_cached_tokens,
    check_chunks,
    check_fewest_computed,
    check_find_seq_idx,
    check_knobs,
    check_mask,
    check_num_steps,
    check_recomputed,
    check_slots,
    check_smallest_budget,
    check_standstill,
    check_token_of,
    check_victim,
)
from workbench.course.pictures import Picture, bars, matrix
from workbench.course.verdict import Verdict

__all__ = [
    "Picture",
    "Verdict",
    "bars",
    "check_cached_tokens",
    "check_chunks",
    "check_fewest_computed",
    "check_find_seq_idx",
    "check_knobs",
    "check_mask",
    "check_num_steps",
    "check_recomputed",
    "check_slots",
    "check_smallest_budget",
    "check_standstill",
    "check_token_of",
    "check_victim",
    "matrix",
]
