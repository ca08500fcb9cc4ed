"""The model's own layers, one after another, over the pool."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import mlx.core as mx
import numpy as np

from workbench.engine.forward.path import ChosenPath, ForwardOutput
from workbench.engine.memory import explained
from workbench.engine.packed_batch import PackedBatch
from workbench.engine.sampler import Logits, most_likely_rows
from workbench.models.forward import forward_rows
from workbench.models.served_model import ServedModel


class LayerByLayer(ChosenPath):
    """Calls the model once; each layer's attention is ours, and can be looked at.

    Args:
        served: The model.
        reason: Why a faster path was not taken, for the records.
    """

    name = "layer by layer"

    def __init__(self, served: ServedModel, reason: str = "") -> None:
        self._served = served
        self._details = {"forward": self.name} | ({"forward_reason": reason} if reason else {})

    @classmethod
    def make(cls, served: ServedModel) -> Self | str:
        """See `ChosenPath.make`."""
        return cls(served) if served.preflight.mode == "kernel" else "its attention does its own arithmetic"

    def run(self, packed: PackedBatch) -> ForwardOutput:
        """See `ForwardPath.run`. If nothing samples, nothing after the last layer's attention is computed."""
        served, samples = self._served, len(packed.logits_rows) > 0
        try:
            values, details = self.graph(packed)
            best = most_likely_rows(values)
            try:
                mx.eval([values, best] if samples else [values] if served.computes_all else [], served.kv_cache.arrays)
            except RuntimeError as problem:
                raise explained(problem, served.config, packed.num_tokens) from problem
        finally:
            served.kv_cache.end_step()
        if samples:
            logits = Logits(values, np.asarray(best).tolist())
        else:  # with its values in it: another thread, which has other streams, may read it
            logits = Logits(mx.array(np.zeros((0, values.shape[1]), np.float32)), [])
        return logits, served.launch(packed.metadata[0], details)

    def graph(self, packed: PackedBatch) -> tuple[mx.array, Mapping[str, str]]:
        """The logits of a step, not evaluated, those of one row if no row samples; and details for its launch."""
        served = self._served
        rows = packed.logits_rows if len(packed.logits_rows) else np.zeros(1, dtype=np.int32)
        served.kv_cache.begin_step(
            packed.positions, *packed.metadata, names=packed.request_ids, num_kept=packed.num_kept, kept=packed.kept
        )
        adapters: AbstractContextManager[None] = nullcontext()
        if packed.adapters:
            adapters = served.adapters.selecting(packed.adapters, packed.cu_seqlens_q, rows)
        with adapters:
            values = forward_rows(served.model, packed.token_ids, served.kv_cache, rows, served.final_norm)
        served.kv_cache.check_reads()
        return values, self._details
