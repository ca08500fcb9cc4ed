"""Inputs and outputs of one attention layer in one step, kept for inspection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from workbench.kernels.attention.gather import gather_positions
from workbench.kernels.attention.stored import value_dim_of
from workbench.kernels.attention.work_list import first_visible

if TYPE_CHECKING:
    from workbench.models.layer_cache import AttentionCall


def _no_rows() -> np.ndarray:
    return np.empty((0, 0, 0), dtype=np.float32)


@dataclass(eq=False)
class LayerCapture:
    """One layer's attention in one step as numpy arrays, which are empty until the step has run.

    Attributes:
        layer: Index of the layer.
        step: Index of the captured step, -1 until then.
        request_ids: The request of each sequence.
        q: Queries after RoPE, float32 [T, num_heads, head_dim].
        k: This step's keys after RoPE, float32 [T, num_kv_heads, head_dim].
        v: This step's values, float32 [T, num_kv_heads, head_dim].
        out: Output of attention, float32 [T, num_heads, head_dim].
        cu_seqlens_q: Sequence i owns rows [cu_seqlens_q[i], cu_seqlens_q[i + 1]).
        seqused_k: KV length of each sequence.
        keys: Keys of each sequence's whole context, float32 [kv_len, num_kv_heads, head_dim], read back from the
            pool through the block table: the numbers that the pool's elements stand for, of whatever type.
        values: Values of each sequence's whole context, likewise.
        softmax_scale: Scale of the logits.
        window: Sliding window, -1 for full attention.
        softcap: Soft cap of the logits, 0 for none.
        reach: The positions that a row sees, see `workbench.kernels.attention.options`.
        sinks: One logit per head, or None.
    """

    layer: int
    step: int = -1
    request_ids: list[str] = field(default_factory=list, repr=False)
    q: np.ndarray = field(default_factory=_no_rows, repr=False)
    k: np.ndarray = field(default_factory=_no_rows, repr=False)
    v: np.ndarray = field(default_factory=_no_rows, repr=False)
    out: np.ndarray = field(default_factory=_no_rows, repr=False)
    cu_seqlens_q: list[int] = field(default_factory=list, repr=False)
    seqused_k: list[int] = field(default_factory=list, repr=False)
    keys: list[np.ndarray] = field(default_factory=list, repr=False)
    values: list[np.ndarray] = field(default_factory=list, repr=False)
    softmax_scale: float = 1.0
    window: int = -1
    softcap: float = 0.0
    reach: int = -1
    sinks: np.ndarray | None = field(default=None, repr=False)

    def fill(self, step: int, call: AttentionCall, request_ids: Sequence[str]) -> None:
        """Copy all arrays of a call: its caches change with the next step."""
        metadata = call.metadata
        self.step = step
        self.request_ids = list(request_ids)
        self.q, self.k, self.v, self.out = (_copy(array) for array in (call.queries, call.keys, call.values, call.out))
        self.cu_seqlens_q = metadata.cu_seqlens_q.tolist()
        self.seqused_k = metadata.seqused_k.tolist()
        options = call.options
        self.softmax_scale = options.softmax_scale
        self.window = options.left_window + 1 if options.left_window >= 0 else -1
        self.softcap, self.reach = options.softcap, options.reach
        self.sinks = None if options.sinks is None else _copy(options.sinks)
        for seq, length in enumerate(self.seqused_k):
            self.keys.append(_copy(gather_positions(call.k_cache, metadata, seq, 0, length)))
            values = gather_positions(call.v_cache, metadata, seq, 0, length)
            self.values.append(_copy(values[..., : value_dim_of(call.v_cache, options)]))

    def weights(self, row: int) -> np.ndarray:
        """Attention weights of a packed row over its sequence's context, float64 [num_heads, kv_len].

        The weights of future positions and of positions outside a sliding window are 0. With sinks a row sums to
        less than 1.

        Raises:
            ValueError: No step has run since the capture was requested, or there is no such row.
        """
        if self.step < 0:
            raise ValueError(f"layer {self.layer} has not been captured yet: run a step first")
        if not 0 <= row < len(self.q):
            raise ValueError(f"row must be from 0 to {len(self.q) - 1}, got {row}")
        seq = int(np.searchsorted(self.cu_seqlens_q, row, side="right")) - 1
        length = self.seqused_k[seq]
        position = length - self.cu_seqlens_q[seq + 1] + row
        first = int(first_visible(position, self.reach))
        query = self.q[row].astype(np.float64)
        keys = self.keys[seq][first : position + 1].astype(np.float64)
        group_size = query.shape[0] // keys.shape[1]
        logits = np.einsum("hd,khd->hk", query, keys.repeat(group_size, axis=1)) * self.softmax_scale
        if self.softcap:
            logits = self.softcap * np.tanh(logits / self.softcap)
        highest = logits.max(axis=1, keepdims=True)
        sink_weight: np.ndarray | float = 0.0
        if self.sinks is not None:
            sinks = self.sinks.astype(np.float64)[:, None]
            highest = np.maximum(highest, sinks)
            sink_weight = np.exp(sinks - highest)
        exponentials = np.exp(logits - highest)
        weights = np.zeros((query.shape[0], length))
        weights[:, first : position + 1] = exponentials / (exponentials.sum(axis=1, keepdims=True) + sink_weight)
        return weights


def _copy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))
