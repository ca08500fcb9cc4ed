"""Shadow launches: a step's attention through the Metal source too, on a machine without an Apple GPU."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from workbench.attention.dtypes import dtype_name
from workbench.attention.metal.shadow_worker import pack_arrays, receive, send
from workbench.engine.config import EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.trace import StepRecord

if TYPE_CHECKING:
    from workbench.models.paged_cache import AttentionCall


def start_shadow(config: EngineConfig, runner: ModelRunner) -> ShadowLauncher | None:
    """The shadow launcher that a configuration asks for, or None.

    Raises:
        ValueError: The layer is not there, or the model's attention is its own.
    """
    asked = config.shadow_metal
    if asked is None or runner.backend_name == "metal":  # on an Apple GPU the launch itself is the one to look at
        return None
    layers = runner.kv_cache.layers
    if runner.mode != "kernel":
        raise ValueError(
            "shadow_metal needs a model whose attention the kernel serves; this one does its own arithmetic"
        )
    if asked["layer"] >= len(layers):
        raise ValueError(f'shadow_metal["layer"] must be from 0 to {len(layers) - 1}, got {asked["layer"]}')
    return ShadowLauncher(runner, asked["layer"], asked["every"])


class ShadowLauncher:
    """Hands one layer's attention of every n-th step to a second process, which runs the Metal source on it.

    The engine is not held up: the step's blocks are copied, everything else happens elsewhere, and a step is passed
    over while the process is still busy with an earlier one. The result is put into ``kernel.details["shadow"]`` of
    the step's record when it comes:

        layer, dtype, seconds; ``max_difference`` from the backend that ran; ``faults`` that were found; the kernel's
        own ``work_items`` (fields of a WorkItem) and ``block_q``; and for each launch its threadgroups, bytes per
        buffer, ``kv_blocks``: which blocks each threadgroup read, by its position in the grid (work item, KV head or
        a slice of its query heads), and ``kv_bytes``: bytes of K and V that each of them read, each byte once.

    Until then it holds {"layer": ..., "pending": True}.

    Args:
        runner: Whose layer is looked at.
        layer: Index of the layer.
        every: Every n-th step.
    """

    def __init__(self, runner: ModelRunner, layer: int, every: int) -> None:
        self._layer = layer
        self._every = every
        self._calls = -1
        self._pending: dict[str, Any] | None = None
        self._jobs: queue.SimpleQueue[tuple[dict[str, Any], dict[str, Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        runner.kv_cache.layers[layer].taps.append(self._tap)
        thread = threading.Thread(target=_serve, args=(self._jobs, self._idle), name="shadow-metal", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    def _tap(self, call: AttentionCall) -> None:
        self._calls += 1
        if self._calls % self._every or not self._idle.is_set():
            return
        metadata = call.metadata
        blocks, table = metadata.used_blocks
        arrays = {
            "q": _float32(call.queries),
            "k_blocks": _float32(call.k_cache[blocks]),
            "v_blocks": _float32(call.v_cache[blocks]),
            "out": _float32(call.out),
            "block_ids": np.array(blocks),
            "block_table": table,
            "cu_seqlens_q": metadata.cu_seqlens_q,
            "seqused_k": metadata.seqused_k,
            "softmax_scale": call.softmax_scale,
            "window": call.window,
            "dtype": dtype_name(call.k_cache.dtype),
        }
        if call.sinks is not None:
            arrays["sinks"] = _float32(call.sinks)
        self._idle.clear()
        self._pending = {"layer": self._layer, "pending": True}
        self._jobs.put((arrays, self._pending))

    def attach(self, record: StepRecord) -> None:
        """Give the record of the step that has just run the place where its result will appear."""
        if self._pending is not None and record.kernel is not None:
            record.kernel.details["shadow"] = self._pending
        self._pending = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the launch under way; False when the time is up."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        """End the second process."""
        self._end()


def _serve(jobs: queue.SimpleQueue[Any], idle: threading.Event) -> None:
    """Feed the second process, which is started by the first job, and put what it answers where it belongs."""
    process: subprocess.Popen[bytes] | None = None
    while (job := jobs.get()) is not None:
        arrays, result = job
        try:
            if process is None or process.poll() is not None:
                command = [sys.executable, "-m", "workbench.attention.metal.shadow_worker"]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            send(process.stdin, pack_arrays(arrays))
            answer = receive(process.stdout)
            result.update({"faults": ["the shadow process ended"]} if answer is None else json.loads(answer))
        except OSError as problem:
            result["faults"] = [f"the shadow process could not be reached: {problem}"]
        result.pop("pending", None)
        idle.set()
    if process is not None:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()


def _float32(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))
