"""The events of a recording with the lanes of each simdgroup side by side, as a GPU executes them.

The emulator runs the lanes one after the other from one meeting to the next, and a meeting is a barrier or a simd
function. Between two meetings the lanes are put side by side here: of all lanes, those that are furthest behind in the
compiled code go first, together with all others at the same place. Each lane keeps its order. A lane that is at another
place waits, and counts as diverged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.kernels.msl.recorded import (
    BARRIER_PASSED,
    BARRIER_WAIT,
    FAULT,
    RETURN,
    SIMD_FUNCTION,
    SIMD_WIDTH,
    SIMDGROUP_BARRIER,
)

if TYPE_CHECKING:
    from workbench.kernels.msl.recorded import RecordedLaunch

MEETINGS = (SIMDGROUP_BARRIER, SIMD_FUNCTION)


@dataclass(frozen=True, eq=False)
class Instructions:
    """The same events in the order of a simdgroup's instructions.

    Attributes:
        order: int [num_events], indices of events; those of an instruction follow each other.
        starts: int [num_instructions + 1], the part of ``order`` of each instruction.
        active: uint32 [num_instructions], mask of the lanes that take part; 0 for one of the whole threadgroup.
        existing: uint32 [num_instructions], mask of the lanes that the simdgroup has, those that returned early too; 0
            for the whole threadgroup.
    """

    order: np.ndarray
    starts: np.ndarray
    active: np.ndarray
    existing: np.ndarray

    def __len__(self) -> int:
        return len(self.active)

    def events(self, instruction: int) -> np.ndarray:
        """Indices of an instruction's events."""
        return self.order[self.starts[instruction] : self.starts[instruction + 1]]


def instructions_of(run: RecordedLaunch) -> Instructions:
    """Put the lanes of a recording side by side."""
    kinds, threads, sites, groups = (run.events[name].tolist() for name in ("kind", "thread", "site", "group"))
    maker = _Maker(sites, kinds, threads)
    group = None
    for event, kind in enumerate(kinds):
        if groups[event] != group:
            maker.flush_all()
            maker.begin(_num_threads(run, groups[event]))
            group = groups[event]
        simdgroup = threads[event] // SIMD_WIDTH
        if kind in (BARRIER_PASSED, FAULT):
            maker.flush_all()
            maker.add([event], 0 if kind == BARRIER_PASSED else 1 << threads[event] % SIMD_WIDTH, simdgroup)
        elif kind in MEETINGS:
            maker.flush(simdgroup)
            maker.add([event], int(run.events["detail"][event]), simdgroup)
        else:
            maker.lanes_of(simdgroup).setdefault(threads[event] % SIMD_WIDTH, []).append(event)
    maker.flush_all()
    starts = np.cumsum([0, *maker.lengths])
    return Instructions(
        np.array(maker.order, np.int64),
        starts,
        np.array(maker.active, np.uint32),
        np.array(maker.existing, np.uint32),
    )


def _num_threads(run: RecordedLaunch, group: int) -> int:
    """Threads of a recorded threadgroup, which is cut at the far edges of the grid."""
    sizes = zip(run.threadgroups[group], run.threadgroup, run.grid)
    return int(np.prod([min(per_group, whole - at * per_group) for at, per_group, whole in sizes]))


class _Maker:
    """Collects the events of lanes up to the next meeting, and the instructions that they become."""

    def __init__(self, sites: list[int], kinds: list[int], threads: list[int]) -> None:
        self.sites, self.kinds, self.threads = sites, kinds, threads
        self.order: list[int] = []
        self.lengths: list[int] = []
        self.active: list[int] = []
        self.existing: list[int] = []
        self._waiting: dict[int, dict[int, list[int]]] = {}
        self._lanes_of: dict[int, int] = {}

    def begin(self, num_threads: int) -> None:
        """Begin a threadgroup."""
        for simdgroup in range(-(-num_threads // SIMD_WIDTH)):
            lanes = min(SIMD_WIDTH, num_threads - simdgroup * SIMD_WIDTH)
            self._lanes_of[simdgroup] = (1 << lanes) - 1

    def lanes_of(self, simdgroup: int) -> dict[int, list[int]]:
        """The events since the last meeting, by lane."""
        return self._waiting.setdefault(simdgroup, {})

    def add(self, events: list[int], active: int, simdgroup: int) -> None:
        """Add an instruction."""
        self.order += events
        self.lengths.append(len(events))
        self.active.append(active)
        self.existing.append(self._lanes_of[simdgroup] if active else 0)

    def flush_all(self) -> None:
        """Make instructions of everything since the last meetings."""
        for simdgroup in sorted(self._waiting):
            self.flush(simdgroup)

    def flush(self, simdgroup: int) -> None:
        """Make instructions of a simdgroup's events since its last meeting."""
        lanes = self._waiting.pop(simdgroup, {})
        ahead = {lane: list(reversed(events)) for lane, events in lanes.items()}
        while ahead:
            next_place = min(self._place(events[-1]) for events in ahead.values())
            together = [lane for lane, events in sorted(ahead.items()) if self._place(events[-1]) == next_place]
            self.add([ahead[lane].pop() for lane in together], sum(1 << lane for lane in together), simdgroup)
            ahead = {lane: events for lane, events in ahead.items() if events}

    def _place(self, event: int) -> tuple[int, int, int]:
        """The place in the compiled code; a barrier and the end come after all that leads to them."""
        kind = self.kinds[event]
        return (kind == RETURN) + 0, (kind == BARRIER_WAIT) + 0, self.sites[event]
