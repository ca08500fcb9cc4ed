"""Shared parts of the notebooks in ``notebooks/``: checkers for their exercises, and two small pictures.

A checker tries the reader's answer on cases whose results are known from elsewhere (the engine, the simulation, a
formula), and shows a case in which the answer is wrong:

    >>> from workbench import course
    >>> course.check_slots(lambda block_table, position, block_size: position)
    Not yet: block_table=[7], position=0, block_size=16 gives 0, expected 112.
"""

from typing import TYPE_CHECKING, Any

from workbench.apps.course.exercises import (
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
    check_prompt_share,
    check_recomputed,
    check_slots,
    check_smallest_budget,
    check_standstill,
    check_token_of,
    check_tokens_kept,
    check_victim,
)
from workbench.apps.course.pictures import Picture, bars, matrix
from workbench.apps.course.verdict import Verdict
from workbench.base.on_demand import imported

if TYPE_CHECKING:
    from workbench.apps.course.arena import check_eviction, league
    from workbench.apps.course.bugs import planted, unplanted
    from workbench.apps.course.faults import FAULTS, check_repair, code_of, hunt_code
    from workbench.apps.course.puzzle_judge import check_kernel
    from workbench.apps.course.puzzle_list import PUZZLES

_HOMES = {
    "PUZZLES": "puzzle_list",
    "check_kernel": "puzzle_judge",
    "FAULTS": "faults",
    "check_eviction": "arena",
    "check_repair": "faults",
    "code_of": "faults",
    "hunt_code": "faults",
    "league": "arena",
    "planted": "bugs",
    "unplanted": "bugs",
}
"""Parts that only one notebook uses, with the rooms that they need."""

__all__ = [
    "FAULTS",
    "PUZZLES",
    "Picture",
    "Verdict",
    "bars",
    "check_cached_tokens",
    "check_chunks",
    "check_could_differ",
    "check_eviction",
    "check_fewest_computed",
    "check_fewest_seats",
    "check_find_seq_idx",
    "check_first_block",
    "check_kernel",
    "check_knobs",
    "check_mask",
    "check_num_chunks",
    "check_num_steps",
    "check_prompt_share",
    "check_recomputed",
    "check_repair",
    "check_slots",
    "check_smallest_budget",
    "check_standstill",
    "check_token_of",
    "check_tokens_kept",
    "check_victim",
    "code_of",
    "hunt_code",
    "league",
    "matrix",
    "planted",
    "unplanted",
]


def __getattr__(name: str) -> Any:
    """Import what one notebook uses when it is first used."""
    if name in _HOMES:
        return imported(f"{__name__}.{_HOMES[name]}", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
