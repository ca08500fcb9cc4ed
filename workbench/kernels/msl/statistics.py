"""Counts of the memory accesses of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.kernels.msl.launch import Binding, Finished, position_of


@dataclass(frozen=True)
class BufferTraffic:
    """Traffic between a launch and one buffer.

    Attributes:
        bytes_read: Bytes loaded by all threads.
        bytes_written: Bytes stored.
        distinct_bytes_read: Bytes loaded, counting each element once per threadgroup: the traffic from memory if
            threadgroups kept everything they read and shared nothing.
        size: Size of the buffer in bytes.
    """

    bytes_read: int
    bytes_written: int
    distinct_bytes_read: int
    size: int


@dataclass(frozen=True)
class LaunchStatistics:
    """The counts of one launch.

    Loads and stores are those of the compiled kernel: a value that the compiler keeps in a register is loaded once.

    Attributes:
        seconds: Duration of the launch on this machine; it says nothing about a GPU.
        threadgroups: Number of threadgroups that ran.
        threadgroup_barriers: Number of barriers passed, one per threadgroup and barrier.
        simdgroup_barriers: Number of simdgroup barriers passed, one per simdgroup and barrier.
        simd_operations: Number of reductions, shuffles and ballots, one per simdgroup and call.
        matrix_multiplications: Number of 8x8 multiply-accumulates, one per simdgroup and call (1,024 FLOP each).
        threadgroup_memory: Bytes of threadgroup memory per threadgroup.
        threadgroup_bytes_read: Bytes loaded from threadgroup memory.
        threadgroup_bytes_written: Bytes stored to threadgroup memory.
        buffers: Traffic by buffer name.
        rows_read: For each buffer of ``trace_buffers``, the rows that each threadgroup read, ascending, by position of
            the threadgroup in the grid.
        accesses: Number of loads and stores that were checked.
        fiber_switches: Number of switches from one thread to another.
    """

    seconds: float
    threadgroups: int
    threadgroup_barriers: int
    simdgroup_barriers: int
    simd_operations: int
    matrix_multiplications: int
    threadgroup_memory: int
    threadgroup_bytes_read: int = 0
    threadgroup_bytes_written: int = 0
    buffers: dict[str, BufferTraffic] = field(default_factory=dict)
    rows_read: dict[str, dict[tuple[int, int, int], tuple[int, ...]]] = field(default_factory=dict)
    accesses: int = 0
    fiber_switches: int = 0


_COUNTS = (
    "threadgroup_barriers", "simdgroup_barriers", "simd_operations", "matrix_multiplications",
    "threadgroup_bytes_read", "threadgroup_bytes_written", "accesses", "fiber_switches",
)  # fmt: skip
"""Counts that the runtime has under the same name."""


def statistics_of(finished: Finished, bindings: Sequence[Binding]) -> LaunchStatistics:
    """The counts of a launch that has ended."""
    launch = finished.launch
    rows: dict[str, dict[tuple[int, int, int], list[int]]] = {b.name: {} for b in bindings if b.traced_row_bytes}
    for number, buffer, row in finished.rows_read:
        rows[bindings[buffer].name].setdefault(position_of(number, launch), []).append(row)
    return LaunchStatistics(
        seconds=finished.seconds,
        threadgroups=launch.num_threadgroups,
        threadgroup_memory=launch.threadgroup_memory_bytes,
        buffers={
            binding.name: BufferTraffic(
                struct.bytes_read, struct.bytes_written, struct.distinct_bytes_read, binding.data.nbytes
            )
            for binding, struct in zip(bindings, finished.buffers)
        },
        rows_read={
            name: {position: tuple(sorted(found)) for position, found in sorted(positions.items())}
            for name, positions in rows.items()
        },
        **{name: getattr(launch, name) for name in _COUNTS},
    )
