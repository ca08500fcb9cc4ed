"""The result of a shadow launch, in the form that the kernel panel draws; a trace file may hold anything there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from workbench.trace.records import BlockId, Count, WorkItem

Position = tuple[Count, Count, Count]
Bytes = Annotated[int, msgspec.Meta(ge=0)]


class TracedLaunch(msgspec.Struct, frozen=True):
    """One kernel of a shadow launch.

    Attributes:
        threadgroups: Threadgroups that ran.
        buffers: For each buffer its counts of bytes by name.
        kv_blocks: For each threadgroup that read the KV cache its position in the grid and the blocks it read; the
            first coordinate is its work item.
        kv_bytes: Bytes of K and V that each of them read, each byte counted once.
    """

    threadgroups: Count = 0
    buffers: dict[str, dict[str, Bytes]] = {}
    kv_blocks: tuple[tuple[Position, tuple[BlockId, ...]], ...] = ()
    kv_bytes: tuple[Bytes, ...] = ()


class ShadowLaunch(msgspec.Struct, frozen=True):
    """A step's attention of one layer as the Metal kernel computed it beside the engine.

    Attributes:
        layer: Index of the layer.
        faults: Descriptions of the faults that were found.
        max_difference: Largest difference from the engine's own attention, or "not finite".
        block_q: Maximum number of query rows per work item.
        work_items: The kernel's work items.
        launches: The kernels that ran.
    """

    layer: Count = 0
    faults: tuple[str, ...] = ()
    max_difference: float | str = ""
    block_q: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1
    work_items: tuple[WorkItem, ...] = ()
    launches: tuple[TracedLaunch, ...] = ()


def shadow_facts(found: Mapping[str, Any], num_chunks: int) -> dict[str, Any] | None:
    """The facts of a step's supplement "shadow", checked; None if they have another form.

    Args:
        found: The facts.
        num_chunks: Sequences of its step.
    """
    try:
        shadow = msgspec.convert(found, ShadowLaunch)
    except msgspec.ValidationError:
        return None
    fits = all(item.seq < num_chunks for item in shadow.work_items) and all(
        len(launch.kv_bytes) in (0, len(launch.kv_blocks))
        and (not launch.kv_bytes or all(at[0] < len(shadow.work_items) for at, _ in launch.kv_blocks))
        for launch in shadow.launches
    )
    return msgspec.to_builtins(shadow) if fits else None
