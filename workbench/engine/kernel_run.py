"""A threadgroup of a step's attention, recorded: from the step of an engine into the Metal kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from workbench.config import EngineConfig
from workbench.engine.live import LIVE
from workbench.engine.replay import attention_call
from workbench.engine.replay_needs import step_with_chunks
from workbench.kernels.attention.metal.launch import PagedVarlenKernels, launch_dtype
from workbench.kernels.attention.metal.shadow_worker import attention_of
from workbench.kernels.msl import KernelRun, metal_kernel
from workbench.models.load import LoadedModel, load_model
from workbench.trace.records import StepRecord, WorkItem

if TYPE_CHECKING:
    from workbench.trace import Trace

WATCHED = ("row.maximum", "row.total")
"""Maximum and sum of the online softmax, which change with every tile of KV positions."""

MAX_POOL_BYTES = 1 << 28
"""Up to this size of a cache, blocks keep their numbers in the pool; beyond it they are numbered from 0 on."""


class _Recorded(Exception):
    """Ends the launch once the kernel of interest has run; holds its recording."""

    def __init__(self, run: KernelRun) -> None:
        super().__init__("recorded")
        self.run = run


def of_step(record: StepRecord, item: int | WorkItem = 0, **options: Any) -> KernelRun:
    """Record a work item of a step, see `workbench.engine.engine.Engine.kernel_run`.

    Raises:
        ValueError: No open engine has taken this step.
    """
    for engine in LIVE:
        if not engine.closed and any(own is record for own in reversed(engine.trace)):
            return engine.kernel_run(item, record, **options)
    raise ValueError(
        f"step {record.step} is not a step of an open engine, which has the model: for one that was saved, "
        f"trace.kernel_run({record.step}, model, item) computes it again with the model that was recorded"
    )


def of_trace(
    trace: Trace,
    step: int,
    model: str | Path | LoadedModel,
    item: int | WorkItem = 0,
    *,
    config: EngineConfig | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    **options: Any,
) -> KernelRun:
    """Compute a step of a recording again, and record the threadgroup of the Metal kernel for one of its work items.

    Args:
        trace: As in `Trace.replay`: token ids from the first step on, and one KV cache group.
        step: Index of the step.
        model: The model that was recorded.
        item: Index in the kernel's own work list, or an item of the step's.
        config: As in `Trace.replay`.
        adapters: As in `Trace.replay`.
        **options: ``layer``, ``kv_head`` and ``watch`` of `kernel_run`.

    Raises:
        ValueError: The trace lacks what this needs, or there is no such step, item, layer or KV head; the message says
            what.
    """
    record = step_with_chunks(trace, step)
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    call = attention_call(trace, record, loaded, options.get("layer", 0), config=config, adapters=adapters)
    return kernel_run(call, record, item, **options, made="computed again")


def kernel_run(
    call: dict[str, Any],
    record: StepRecord,
    item: int | WorkItem,
    *,
    layer: int = 0,
    kv_head: int = 0,
    watch: Sequence[str] = WATCHED,
    made: str = "",
) -> KernelRun:
    """Record the threadgroup that computes a work item of a step.

    Args:
        call: The layer's attention call in the step, see `workbench.engine.shadow.copied_call`.
        record: The record of the step.
        item: Index in the kernel's own work list, or an item of the step's.
        layer: Index of the layer.
        kv_head: KV head of the threadgroup.
        watch: Variables of the kernel whose values are recorded after every assignment.
        made: A remark about the numbers of the call; "" if they are the step's own.

    Raises:
        ValueError: There is no such item or KV head.
    """
    call = _with_pool_ids(call)
    k_cache, v_cache, metadata, options = attention_of(call)
    dtype, (_, _, num_kv_heads, _) = launch_dtype(k_cache.dtype), k_cache.shape
    q = mx.array(call["q"]).astype(dtype)
    (_, num_heads, head_dim), value_dim = q.shape, call["out"].shape[2]
    if not 0 <= kv_head < num_kv_heads:
        raise ValueError(f"kv_head is {kv_head}: the layer has {num_kv_heads}, from 0 on")

    def recorder(**text: Any) -> Any:
        kernel = metal_kernel(**text)

        def launch(**arguments: Any) -> list[mx.array]:
            raise _Recorded(kernel.record(**arguments, threadgroups=[(index, kv_head, 0)], watch=watch))

        return launch

    kernels = PagedVarlenKernels(recorder)
    kernels.max_dispatch_flop = math.inf
    sizes = num_heads, num_kv_heads, head_dim, dtype.size
    plan = kernels.plan(metadata, *sizes, options.reach, value_dim=value_dim)
    items = [WorkItem(*row) for row in plan.work_list.tolist()]
    index = _index_of(item, items)
    try:
        kernels.attend(q, k_cache, v_cache, metadata, options)
    except _Recorded as recorded:
        chosen = items[index]
        about = f"step {record.step}, layer {layer}, KV head {kv_head}, work item {index} of {len(items)}: "
        about += f"{record.chunks[chosen.seq].request_id}, {_span_words(chosen)}"
        about += f"{_others_words(item, items, index)}{made and f'; {made}'}"
        return replace(recorded.run, about=about)
    raise ValueError(f"step {record.step} has no attention to record")


def _index_of(item: int | WorkItem, items: list[WorkItem]) -> int:
    """The index of a work item in the kernel's list.

    Raises:
        ValueError: There is none.
    """
    if isinstance(item, WorkItem):
        for index, own in enumerate(items):
            has_row = own.seq == item.seq and own.q_start <= item.q_start < own.q_start + own.num_rows
            if has_row and own.kv_start <= item.kv_start < own.kv_end:
                return index
        raise ValueError(f"{item} has no rows and KV positions in common with the kernel's {len(items)} work items")
    if not 0 <= item < len(items):
        raise ValueError(f"item is {item}: the kernel has {len(items)} work items in this step, from 0 on")
    return item


def _span_words(item: WorkItem) -> str:
    return f"rows [{item.q_start}, {item.q_start + item.num_rows}), KV [{item.kv_start}, {item.kv_end})"


def _others_words(asked: int | WorkItem, items: list[WorkItem], index: int) -> str:
    """Why the recorded item is not the one of the step that was asked for, and which items have its first row.

    "" for an item of the kernel's list, or one that is in it.
    """
    if not isinstance(asked, WorkItem) or _span_words(asked) == _span_words(items[index]):
        return ""
    row = asked.q_start
    has_row = [own.seq == asked.seq and own.q_start <= row < own.q_start + own.num_rows for own in items]
    having = [i for i, is_one in enumerate(has_row) if is_one]
    named = f"item {having[0]}" if len(having) == 1 else f"items {', '.join(map(str, having[:-1]))} and {having[-1]}"
    return (
        f". The step's own item has {_span_words(asked)}. The Metal kernel has its own list of work, because its tiles "
        f"hold all query heads of a KV head and it cuts long KV into parts; row {row} is in its {named}"
    )


def _with_pool_ids(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its blocks where the pool has them, unless that takes too much memory."""
    ids, size = call["block_ids"], int(call["block_ids"].max(initial=0)) + 1
    if size * call["k_blocks"][:1].nbytes > MAX_POOL_BYTES:
        return call
    whole = dict(call, block_table=ids[call["block_table"]].astype(np.int32))
    for name in ("k_blocks", "v_blocks"):
        pool = np.zeros((size, *call[name].shape[1:]), call[name].dtype)
        pool[ids] = call[name]
        whole[name] = pool
    return whole
