"""The second process of a shadow launch: runs attention calls through the Metal source on the CPU.

A call is a dictionary of arrays and numbers, a result is JSON. ``workbench.engine.shadow`` is the other end.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import mlx.core as mx

    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions


def run_call(call: dict[str, np.ndarray]) -> dict[str, Any]:
    """Run one layer's attention through the tiled Metal kernel and compare it with the result of the engine's backend.

    Args:
        call: ``q`` [T, num_heads, head_dim], ``k_blocks`` and ``v_blocks`` [blocks, block_size, num_kv_heads,
            stored_dim] of the blocks in use, their ``block_ids`` in the pool, the ``block_table`` as indices into
            them, ``cu_seqlens_q``, ``seqused_k``, ``softmax_scale``, ``left_window``, ``chunk_size``, ``value_dim``,
            ``softcap``, ``out``, ``dtype``, and ``sinks`` for a layer that has them.

    Returns:
        See `workbench.engine.shadow.ShadowLauncher`.
    """
    import mlx.core as mx

    from workbench.kernels.attention.metal.launch import PagedVarlenKernels, launch_dtype
    from workbench.kernels.attention.metal.tile_shape import TileShape
    from workbench.kernels.msl import MslCompilerMissing, MslError, metal_kernel

    dtype = getattr(mx, str(call["dtype"]))
    k_cache, v_cache, metadata, options = attention_of(call)
    # The unit of traced reads: the key or value of one position in one KV head.
    num_kv_heads, stored_dim = k_cache.shape[2:]
    row_bytes = stored_dim * dtype.size
    launches: list[tuple[str, Any]] = []

    def counted_kernel(**text: Any) -> Any:
        kernel = metal_kernel(**text)
        reads_cache = "k_cache" in text["input_names"]

        def launch(**arguments: Any) -> list[mx.array]:
            traced = {"k_cache": row_bytes, "v_cache": row_bytes} if reads_cache else None
            outputs = kernel(**arguments, statistics=True, trace_buffers=traced)
            launches.append((text["name"], kernel.last_statistics))
            return outputs

        return launch

    kernels = PagedVarlenKernels(counted_kernel)
    result: dict[str, Any] = {"dtype": str(call["dtype"]), "faults": []}
    start = time.perf_counter()
    try:
        dtype = launch_dtype(dtype)
        out = kernels.attend(mx.array(call["q"]).astype(dtype), k_cache, v_cache, metadata, options)
        difference = np.abs(np.array(out.astype(mx.float32)) - call["out"])
        num_heads, head_dim = call["q"].shape[1:]
        value_dim = call["out"].shape[2]
        sizes = num_heads, num_kv_heads, head_dim, dtype.size
        plan = kernels.plan(metadata, *sizes, options.reach, value_dim=value_dim)
        result["work_items"] = plan.work_list.tolist()
        result["block_q"] = TileShape.choose(head_dim, dtype.size, value_dim).block_q(num_heads // num_kv_heads)
        result["max_difference"] = float(difference.max()) if np.isfinite(difference).all() else "not finite"
    except (MslError, MslCompilerMissing, ValueError) as problem:
        result["faults"].append(f"{type(problem).__name__}: {problem}")
    result["seconds"] = time.perf_counter() - start
    rows_per_block = k_cache.shape[1] * num_kv_heads

    def blocks_of(rows: Sequence[int]) -> list[int]:
        """Pool ids of the blocks that contain the given rows."""
        return call["block_ids"][np.unique(np.array(rows, dtype=np.int64) // rows_per_block)].tolist()

    result["launches"] = [
        {
            "kernel": name,
            "threadgroups": statistics.threadgroups,
            "threadgroup_memory": statistics.threadgroup_memory,
            "buffers": {
                buffer: {
                    "bytes_read": traffic.bytes_read,
                    "bytes_read_once_per_threadgroup": traffic.distinct_bytes_read,
                    "bytes_written": traffic.bytes_written,
                    "size": traffic.size,
                }
                for buffer, traffic in statistics.buffers.items()
            },
            "kv_blocks": [
                [list(position), blocks_of(rows)] for position, rows in statistics.rows_read.get("k_cache", {}).items()
            ],
            "kv_bytes": [
                row_bytes * (len(rows) + len(statistics.rows_read["v_cache"].get(position, ())))
                for position, rows in statistics.rows_read.get("k_cache", {}).items()
            ],
        }
        for name, statistics in launches
    ]
    return result


def attention_of(call: dict[str, Any]) -> tuple[mx.array, mx.array, AttentionMetadata, AttentionOptions]:
    """The caches, the batch and the options of a call, as `run_call` takes it."""
    import mlx.core as mx

    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.options import AttentionOptions

    dtype = getattr(mx, str(call["dtype"]))
    k_cache, v_cache = (mx.array(call[name]).astype(dtype) for name in ("k_blocks", "v_blocks"))
    metadata = AttentionMetadata(
        call["cu_seqlens_q"], call["seqused_k"], call["block_table"], None, int(k_cache.shape[1])
    )
    options = AttentionOptions(
        softmax_scale=float(call["softmax_scale"]),
        window_size=(int(call["left_window"]), 0),
        softcap=float(call["softcap"]),
        sinks=mx.array(call["sinks"]) if "sinks" in call else None,
        chunk_size=int(call["chunk_size"]),
        value_dim=int(call["value_dim"]),
    )
    return k_cache, k_cache if options.value_dim else v_cache, metadata, options


def main() -> None:
    """Serve calls until the engine ends the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then closes the connection
    engine = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            call = engine.recv()
            try:
                result = run_call(call)
            except Exception as problem:
                result = {"faults": [f"{type(problem).__name__}: {problem}"]}
            engine.send_bytes(json.dumps(result).encode())


if __name__ == "__main__":
    main()
