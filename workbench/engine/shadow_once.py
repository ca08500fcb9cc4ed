"""The newest step's attention once more, through the Metal source on the emulator: `Engine.shadow`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from workbench.base.connected import start_connected
from workbench.engine.model_runner import ModelRunner
from workbench.engine.packed_batch import PackedBatch
from workbench.engine.shadow import ask, copied_call
from workbench.kernels.attention.metal import shadow_worker
from workbench.kernels.attention.probe import ERROR_LIMIT
from workbench.trace.readings.computed_by import computed_by

if TYPE_CHECKING:
    from workbench.models.layer_cache import AttentionCall
    from workbench.trace import StepRecord


@dataclass(frozen=True)
class ShadowRun:
    """The Metal kernel's result from a step's own queries, keys and values, beside that of the engine.

    Attributes:
        step: Index of the step.
        layer: Index of the layer.
        computed_by: The kernel that the engine computed the step with.
        max_difference: Largest difference between the two results; inf if one is not finite or there is none.
        largest: Largest element of the engine's result.
        bound: Largest difference that rounding explains.
        faults: Faults that the emulator found, such as a read outside a buffer.
        facts: The step's supplement "shadow": launches, threadgroups, bytes and blocks that they read.
    """

    step: int
    layer: int
    computed_by: str
    max_difference: float
    largest: float
    bound: float
    faults: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def agrees(self) -> bool:
        """Whether the kernel ran without a fault and rounding explains the difference."""
        return not self.faults and self.max_difference <= self.bound

    def __repr__(self) -> str:
        where = f"Step {self.step}, layer {self.layer}: the Metal kernel on the emulator"
        if self.faults:
            return f"{where} has a fault: {self.faults[0]}"
        threadgroups = sum(launch["threadgroups"] for launch in self.facts["launches"])
        verdict = "agrees with" if self.agrees else "DIFFERS from"
        return (
            f"{where} {verdict} the engine's result ({self.computed_by}): largest difference "
            f"{self.max_difference:.1e} of values up to {self.largest:.2g}, allowed are {self.bound:.1e}; "
            f"{threadgroups} threadgroups, every access checked"
        )

    def _repr_html_(self) -> str:
        return f"<div>{'✓' if self.agrees else '✗'} {escape(repr(self))}.</div>"


def why_no_shadow(runner: ModelRunner, record: StepRecord, packed: PackedBatch | None, layer: int) -> str:
    """Why the newest step cannot be run again; empty if it can."""
    if runner.mode != "kernel":
        return "the model's attention does its own arithmetic, and the kernel does not serve it"
    if runner.preflight.states:
        return "running a step of a model with recurrent layers again would change their states"
    if packed is None or record.kernel is None:
        return f"step {record.step} has computed nothing"
    num_layers = len(runner.kv_cache.kernel_layers)
    if not isinstance(layer, int) or not 0 <= layer < num_layers:
        return f"layer must be from 0 to {num_layers - 1}, got {layer!r}"
    return ""


def shadow_once(runner: ModelRunner, record: StepRecord, packed: PackedBatch, layer: int) -> ShadowRun:
    """Run a step again layer by layer, and one layer's attention through the Metal source.

    The step must be the newest one, so that the pool still holds its context. The pool has the same bits afterwards.

    Args:
        runner: The runner that has run the step.
        record: The record of the step.
        packed: Its packed batch.
        layer: Index of the layer.
    """
    call = call_of(runner, packed, layer)
    process, connection = start_connected("-m", shadow_worker.__name__)
    try:
        facts = ask(connection, call)
    except EOFError:
        facts = {"faults": ["the shadow process ended"], "launches": []}
    finally:
        connection.close()
        process.wait(timeout=30)
    difference, largest = facts.get("max_difference"), float(np.abs(call["out"]).max())
    assert record.kernel is not None
    return ShadowRun(
        step=record.step,
        layer=layer,
        computed_by=computed_by(record.kernel),
        max_difference=difference if isinstance(difference, float) else float("inf"),
        largest=largest,
        bound=2 * ERROR_LIMIT[call["dtype"]] * largest,
        faults=tuple(facts["faults"]),
        facts={"layer": layer, **facts},
    )


def call_of(runner: ModelRunner, packed: PackedBatch, layer: int) -> dict[str, Any]:
    """One layer's attention call in the newest step, see `workbench.engine.shadow.copied_call`."""
    pool, copied = runner.kv_cache, list[dict[str, Any]]()

    def tap(call: AttentionCall) -> None:
        copied.append(copied_call(call))

    kept = []
    for one in pool.kernel_layers:
        slots = packed.metadata[one.group].slot_mapping
        assert slots is not None  # a batch that was computed has written its keys and values
        blocks = mx.array(np.unique(slots // pool.block_size))
        kept.append((one, blocks, one.k_cache[blocks], one.v_cache[blocks]))
    mx.eval([arrays for _, *arrays in kept])
    taps = pool.kernel_layers[layer].taps
    taps.append(tap)
    try:
        runner.forward(packed)
    finally:
        taps.remove(tap)
        for one, blocks, keys, values in kept:
            one.k_cache[blocks], one.v_cache[blocks] = keys, values
        mx.eval(pool.arrays)
    return copied[0]
