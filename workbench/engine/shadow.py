"""Shadow launches: run a step's attention through the Metal source as well, on a machine without an Apple GPU."""

from __future__ import annotations

import json
import queue
import threading
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from workbench.base.connected import start_connected
from workbench.config import EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.engine.stages import Computed, StepPart
from workbench.kernels.attention.dtypes import dtype_name
from workbench.kernels.attention.metal import shadow_worker
from workbench.trace import StepRecord, Supplement, Trace

if TYPE_CHECKING:
    from workbench.models.layer_cache import AttentionCall


def start_shadow(config: EngineConfig, runner: ModelRunner) -> ShadowLauncher | None:
    """The shadow launcher that a configuration asks for, or None.

    Raises:
        ValueError: There is no such layer, or the model does not use our attention.
    """
    asked = config.shadow_metal
    if asked is None or runner.backend_name == "metal":  # an Apple GPU runs the Metal source anyway
        return None
    layers = runner.kv_cache.layers
    if runner.mode != "kernel":
        raise ValueError(
            "shadow_metal needs a model whose attention the kernel serves; this one does its own arithmetic"
        )
    if asked["layer"] >= len(layers):
        raise ValueError(f'shadow_metal["layer"] must be from 0 to {len(layers) - 1}, got {asked["layer"]}')
    return ShadowLauncher(runner, asked["layer"], asked["every"])


class ShadowLauncher(StepPart):
    """Hands one layer's attention of every n-th step to a second process, which runs the Metal source on it.

    The engine does not wait: it copies the step's blocks, and everything else happens in the other process. A step is
    skipped while that process is busy with an earlier one. The result is added to the trace when it is there, as the
    step's supplement "shadow":

        layer, dtype, seconds; ``max_difference`` from the backend that ran; ``faults`` that were found; the kernel's
        own ``work_items`` (fields of a WorkItem) and ``block_q``; and for each launch its threadgroups, bytes per
        buffer, ``kv_blocks``: which blocks each threadgroup read, by its position in the grid (work item, KV head or
        a slice of its query heads), and ``kv_bytes``: bytes of K and V that each of them read, each byte once.

    Args:
        runner: The runner whose layer is launched again.
        layer: Index of the layer.
        every: Launch every n-th step.
    """

    def __init__(self, runner: ModelRunner, layer: int, every: int) -> None:
        self._layer = layer
        self._every = every
        self._calls = -1
        self._copied: dict[str, Any] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        runner.kv_cache.kernel_layers[layer].taps.append(self._tap)
        thread = threading.Thread(target=_serve, args=(self._jobs, self._idle), name="shadow-metal", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    def _tap(self, call: AttentionCall) -> None:
        self._calls += 1
        if self._calls % self._every or not self._idle.is_set():
            return
        self._copied = copied_call(call)

    def recorded(self, record: StepRecord, computed: Computed, trace: Trace) -> Trace:
        """Launch the step again, see `launch`."""
        self.launch(record, trace)
        return trace

    def launch(self, record: StepRecord, trace: Trace) -> None:
        """Hand over the copies that were made in the step that has just run, if there are any.

        Args:
            record: The record of the step.
            trace: The trace that holds the record and is given the result.
        """
        arrays, self._copied = self._copied, None
        if arrays is not None and record.kernel is not None:  # a step that failed has none
            self._idle.clear()
            self._jobs.put(_Job(arrays, self._layer, record.step, trace))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the present launch; False when the time is up."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        """End the second process."""
        self._end()


@dataclass(frozen=True)
class _Job:
    """A layer's attention call in one step, and the trace that its result belongs to."""

    arrays: dict[str, Any]
    layer: int
    step: int
    trace: Trace


def _serve(jobs: queue.SimpleQueue[_Job | None], idle: threading.Event) -> None:
    """Pass jobs to the second process, which the first of them starts, and add what it answers to their traces."""
    process = connection = None
    while (job := jobs.get()) is not None:
        try:
            if process is None or connection is None or process.poll() is not None:
                process, connection = start_connected("-m", shadow_worker.__name__)
            facts = ask(connection, job.arrays)
        except EOFError:
            facts = {"faults": ["the shadow process ended"]}
        except OSError as problem:
            facts = {"faults": [f"the shadow process could not be reached: {problem}"]}
        job.trace.add_supplement(Supplement(job.step, "shadow", {"layer": job.layer, **facts}))
        del job  # so that no trace is kept alive until the next job comes
        idle.set()
    if process is not None and connection is not None:
        connection.close()
        process.wait(timeout=30)


def copied_call(call: AttentionCall) -> dict[str, Any]:
    """Copies of all that a layer's attention call reads and gives back, see `shadow_worker.run_call`."""
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
        "softmax_scale": call.options.softmax_scale,
        "left_window": call.options.left_window,
        "chunk_size": call.options.chunk_size,
        "value_dim": call.options.value_dim,
        "softcap": call.options.softcap,
        "dtype": dtype_name(call.k_cache.dtype),
    }
    if call.options.sinks is not None:
        arrays["sinks"] = _float32(call.options.sinks)
    return arrays


def ask(connection: Connection, arrays: dict[str, Any]) -> dict[str, Any]:
    """Let the second process run one call, and return its answer."""
    connection.send(arrays)
    return json.loads(connection.recv_bytes())


def _float32(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))
