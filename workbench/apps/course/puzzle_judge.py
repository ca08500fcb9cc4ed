"""Judges answers to puzzles about GPU kernels: a kernel's body is run on this CPU, compared, and its work is counted.

A right answer gives the right numbers on random sizes with every check on, and keeps the puzzle's limits on reads,
barriers and threadgroup memory. A wrong one gets a hint that names the mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.apps.course import tile_puzzle
from workbench.apps.course.puzzle_list import PUZZLES
from workbench.apps.course.puzzles import Case, Puzzle, Work
from workbench.apps.course.verdict import Verdict
from workbench.base.field_checks import choice
from workbench.base.text import significant
from workbench.kernels import msl

if TYPE_CHECKING:
    from workbench.kernels.msl import MslError

NUM_CASES = 3
"""Launches of an answer, each with other sizes and numbers."""

HINTS = {
    "out of bounds": "Is there a thread with nothing to do, or an index that is one too far?",
    "threadgroup out of bounds": "Is the threadgroup array as long as its largest index plus one?",
    "output not written": "Which thread writes that element?",
    "device race": "Two threads write one element: each element of an output has one thread.",
    "array out of bounds": "Is the threadgroup array as long as its largest index plus one?",
    "threadgroup race": "One thread reads what another writes: put a threadgroup_barrier between the two lines.",
    "threadgroup uninitialised": "If another thread writes it, put a threadgroup_barrier between write and read.",
    "barrier after return": "All threads have to reach a barrier: do not return before it, guard the loads and stores.",
    "return past barrier": "All threads have to reach a barrier: do not return before it, guard the loads and stores.",
    "different barriers": "All threads have to reach the same barrier: take it out of the if.",
    "divergence": "All threads have to reach a barrier: take it out of the if or the loop that only some run.",
    "simd after return": "simd functions need all 32 lanes: do not return before them.",
    "different simd operations": "simd functions need all 32 lanes: take the call out of the if.",
    "return past simd": "simd functions need all 32 lanes: do not return before them.",
    "write to input": "Inputs are read only: write to the output.",
    "time limit": "Does the loop end for every thread?",
}
"""A hint for each kind of fault that answers have."""


def check_kernel(name: str, source: str, *, seed: int = 0) -> Verdict:
    """Judge an answer to a puzzle about kernels.

    Args:
        name: The puzzle, such as "map"; `workbench.course.PUZZLES` has them all.
        source: The body of a Metal kernel; a puzzle's ``task`` names its inputs and outputs.
        seed: Chooses the numbers.

    Returns:
        Whether it is right; otherwise the fault or the first wrong number, and a hint.

    Raises:
        ValueError: There is no such puzzle.

    Example:
        >>> from workbench import course
        >>> course.check_kernel("map", "uint i = thread_position_in_grid.x; y[i] = x[i];")
        Not yet: y[0] is 5.625, expected 15.62, with sizes (32,). Which number has to be added?
    """
    is_tile = choice("name", name, (*PUZZLES, "paged_tile")) == "paged_tile"
    if why := msl.why_unavailable():
        return Verdict(False, f"kernels cannot run here: {why}")
    if not isinstance(source, str) or not source.strip():
        return Verdict(False, f"the answer is empty: {tile_puzzle.TASK if is_tile else PUZZLES[name].task}")
    if is_tile:
        return tile_puzzle.check_tile(source, seed)
    puzzle = PUZZLES[name]
    rng, works = np.random.default_rng(seed), []
    for size in range(NUM_CASES):
        case = puzzle.make(rng, size)
        try:
            outputs, work = run_case(puzzle, case, source)
        except msl.MslError as fault:
            return Verdict(False, _of_fault(fault))
        if wrong := _first_wrong(puzzle, case, outputs):
            return Verdict(False, wrong)
        works.append(work)
    for work in works:
        if complaint := next(filter(None, (limit(work) for limit in puzzle.limits)), ""):
            return Verdict(False, f"the numbers are right, but {complaint}")
    return Verdict(True, f"{NUM_CASES} sizes agree. {_work_done(works[-1])}")


def run_case(puzzle: Puzzle, case: Case, source: str) -> tuple[dict[str, np.ndarray], Work]:
    """Run an answer once, with every check on.

    Raises:
        MslError: The kernel does not compile, or has a fault.
    """
    import mlx.core as mx

    kernel = msl.metal_kernel(puzzle.name, list(case.inputs), list(case.expected), source, header=puzzle.header)
    arguments: dict[str, Any] = {
        "inputs": [mx.array(array) for array in case.inputs.values()],
        "output_shapes": [array.shape for array in case.expected.values()],
        "output_dtypes": [mx.array(array.flat[:1]).dtype for array in case.expected.values()],
        "grid": case.grid,
        "threadgroup": case.threadgroup,
        "template": list(case.template.items()),
    }
    outputs = kernel(**arguments, statistics=True, time_limit=20)
    assert kernel.last_statistics is not None
    run = kernel.record(**arguments) if puzzle.recorded else None
    return dict(zip(case.expected, map(np.array, outputs))), Work(kernel.last_statistics, run, case)


def _of_fault(fault: MslError) -> str:
    """The fault with its line and a hint."""
    message = str(fault).split("\n  by thread", 1)[0]
    where = f" in line {fault.line}" if fault.line and fault.file.endswith(".source") else ""
    hint = HINTS.get(fault.kind, "")
    return f"{message.split(': ', 1)[-1].rstrip('.')}{where}. {hint}".strip()


def _first_wrong(puzzle: Puzzle, case: Case, outputs: Mapping[str, np.ndarray]) -> str:
    """The first wrong number, with a hint; "" if all are right."""
    for name, expected in case.expected.items():
        result = outputs[name]
        near = np.abs(result - expected) <= case.tolerance * np.maximum(1.0, np.abs(expected))
        if near.all():
            continue
        place = tuple(int(i) for i in np.argwhere(~near)[0])
        where = ", ".join(map(str, place))
        hint = next((words for looks, words in puzzle.hints if looks(case, result)), "")
        told = f"{name}[{where}] is {result[place]:.4g}, expected {expected[place]:.4g}"
        return f"{told}, with sizes {', '.join(str(a.shape) for a in case.inputs.values())}. {hint}".strip()
    return ""


def _work_done(work: Work) -> str:
    """The work of a launch in a sentence."""
    parts = [f"{name} {significant(work.reads(name))}x" for name in work.case.inputs if name in work.counts.buffers]
    barriers = work.barriers()
    return f"Loads of an element: {', '.join(parts)}; barriers: {significant(barriers)}."
