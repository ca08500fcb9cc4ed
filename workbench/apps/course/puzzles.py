"""A puzzle about GPU kernels: its launches, and the limits on the work of a right answer.

`workbench.apps.course.puzzle_list` has the puzzles, and `workbench.apps.course.puzzle_judge` judges answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from workbench.base.text import significant

if TYPE_CHECKING:
    from workbench.kernels.msl import KernelRun, LaunchStatistics


@dataclass(frozen=True)
class Case:
    """One launch of a puzzle.

    Attributes:
        inputs: Arrays by name.
        expected: The right outputs by name.
        grid: Number of threads (x, y, z).
        threadgroup: Threads per threadgroup.
        template: Values of template parameters.
        tolerance: Largest difference from ``expected``.
    """

    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    template: Mapping[str, int] = field(default_factory=dict)
    tolerance: float = 0.0


@dataclass(frozen=True)
class Work:
    """The counted work of one launch.

    Attributes:
        counts: Counts of the whole launch.
        run: The recording of its first threadgroup; None if no limit needs it.
        case: The launch.
    """

    counts: LaunchStatistics
    run: KernelRun | None
    case: Case

    def reads(self, name: str) -> float:
        """Loads of an element of a buffer by all threads, on average."""
        return self.counts.buffers[name].bytes_read / self.case.inputs[name].nbytes

    def barriers(self) -> float:
        """Barriers that a threadgroup passes."""
        return self.counts.threadgroup_barriers / max(1, self.counts.threadgroups)


Limit = Callable[[Work], str]
"""Gives the complaint about a launch that does too much; "" for one that keeps the limit."""


@dataclass(frozen=True)
class Puzzle:
    """A puzzle.

    Attributes:
        name: Its name for `check_kernel`.
        task: The task in one sentence.
        make: Makes the launch of a size (0, 1, 2, ...) with random numbers.
        limits: Limits on the work of a right answer.
        header: Text before the kernel, such as a function to use.
        hints: Hints for wrong numbers, by what they look like: a function of result and expected result.
        recorded: Whether a limit needs a recording.
    """

    name: str
    task: str
    make: Callable[[np.random.Generator, int], Case]
    limits: Sequence[Limit] = ()
    header: str = ""
    hints: Sequence[tuple[Callable[[Case, np.ndarray], bool], str]] = ()
    recorded: bool = False

    def __repr__(self) -> str:
        return f"{self.name}: {self.task}"


def _enough(most: float) -> str:
    return "none is needed" if most == 0 else "one is enough" if most == 1 else f"{significant(most)} are enough"


def most_reads(name: str, times: Callable[[Case], float] | float, why: str) -> Limit:
    """At most so many loads of an element of a buffer, on average."""

    def limit(work: Work) -> str:
        most, found = times(work.case) if callable(times) else times, work.reads(name)
        return (
            f"it loads each element of {name} {significant(found)} times, and {_enough(most)}: {why}"
            if found > most
            else ""
        )

    return limit


def most_barriers(most: Callable[[Case], float] | float, why: str) -> Limit:
    """At most so many barriers for a threadgroup."""

    def limit(work: Work) -> str:
        allowed, found = most(work.case) if callable(most) else most, work.barriers()
        return f"it passes {significant(found)} barriers, and {_enough(allowed)}: {why}" if found > allowed else ""

    return limit


def most_memory(num_bytes: int, why: str) -> Limit:
    """At most so much threadgroup memory."""

    def limit(work: Work) -> str:
        found = work.counts.threadgroup_memory
        told = f"it uses {found:,} bytes of threadgroup memory, and {num_bytes:,} are enough: {why}"
        return told if found > num_bytes else ""

    return limit


def needs(uses: Callable[[Work], bool], why: str) -> Limit:
    """The answer has to use what the puzzle is about."""
    return lambda work: "" if uses(work) else why
