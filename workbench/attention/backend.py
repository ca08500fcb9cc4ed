"""What every attention backend can do, and how one is chosen by name."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.trace.records import KernelLaunch, WorkItem

if TYPE_CHECKING:
    import mlx.core as mx

    from workbench.attention.metadata import AttentionMetadata

_HOMES = {
    "cpu": ("workbench.attention.cpu", "CpuBackend"),
    "gather": ("workbench.attention.gather", "GatherBackend"),
    "dense": ("workbench.attention.dense", "DenseBackend"),
    "metal": ("workbench.attention.metal.backend", "MetalBackend"),
    "cuda": ("workbench.attention.metal.backend", "CudaBackend"),
    "msl": ("workbench.attention.metal.backend", "MslBackend"),
}

WHOLE = 2**31 - 1
"""In a tile shape: all rows, or all KV positions, of a sequence at once."""

BACKEND_NAMES = ("auto", "metal", "cuda", "cpu", "gather", "dense", "msl")
"""Names that ``EngineConfig(attention_backend=...)`` and ``paged_varlen_attention(backend=...)`` take."""


class AttentionBackend(ABC):
    """Paged varlen attention over one layer's KV cache.

    All backends are causal: a row sees the positions of its own sequence up to its own. ``window_size`` is
    ``(left, right)`` as in flash-attn: a row at position p sees [p - left, p], and everything before when
    left is -1. Right must be 0 or -1; both mean the same here, because causality is the tighter bound.

    K and V of a batch are written before any row is read, so a row may read what a batch mate has written.

    Attributes:
        name: The backend's name in ``BACKEND_NAMES``.
    """

    name: str

    def write(
        self, k: mx.array, v: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata
    ) -> None:
        """Write the batch's keys and values to their slots, in place.

        The objects ``k_cache`` and ``v_cache`` hold the new data afterwards. MLX writes in place only while
        nobody else holds the buffer: keep no reshaped or sliced view of a cache alive, and never hand a cache
        to ``mx.async_eval``; otherwise every write copies the whole cache.

        Args:
            k: [T, num_kv_heads, head_dim], cast to the cache's dtype.
            v: [T, num_kv_heads, head_dim].
            k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            v_cache: Like ``k_cache``.
            metadata: The batch; its ``slot_mapping`` says where rows go.
        """
        index = metadata.write_index
        k_cache[index] = k.astype(k_cache.dtype)
        v_cache[index] = v.astype(v_cache.dtype)

    @abstractmethod
    def attend(
        self,
        q: mx.array,
        k_cache: mx.array,
        v_cache: mx.array,
        metadata: AttentionMetadata,
        *,
        softmax_scale: float,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of every packed row over its own context, from caches that are already filled.

        Args:
            q: [T, num_heads, head_dim].
            k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            v_cache: Like ``k_cache``.
            metadata: The batch.
            softmax_scale: Factor on q · k.
            window_size: (left, right) as in flash-attn.
            softcap: Scores become ``softcap * tanh(score / softcap)``; 0 turns it off.
            sinks: [num_heads], a score per head that takes part in the softmax and has no value.

        Returns:
            [T, num_heads, head_dim] in q's dtype.
        """

    def write_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        k_cache: mx.array,
        v_cache: mx.array,
        metadata: AttentionMetadata,
        *,
        softmax_scale: float,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """``write`` and then ``attend``: what a layer of a model calls."""
        self.write(k, v, k_cache, v_cache, metadata)
        return self.attend(
            q,
            k_cache,
            v_cache,
            metadata,
            softmax_scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
        )

    def describe(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        windows: tuple[int, ...] = (-1,),
    ) -> KernelLaunch:
        """What the layers of a step hand to this backend, for the record of the step.

        Args:
            metadata: The batch.
            num_heads: Query heads.
            num_kv_heads: KV heads.
            head_dim: Elements per head.
            dtype: Element type of q and of the cache, such as "float32".
            windows: Left window of each layer as in flash-attn, -1 for none; one entry when all layers agree.
        """
        block_q, block_kv = self.tile_shape(num_heads, num_kv_heads, head_dim)
        items = metadata.work_list(block_q, windows[0])
        return KernelLaunch(
            backend=self.name,
            block_q=block_q if block_q != WHOLE else int(metadata.query_lens.max(initial=1)),
            block_kv=block_kv if block_kv != WHOLE else int(metadata.seqused_k.max(initial=1)),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            windows=windows,
            work_items=msgspec.convert(items.tolist(), tuple[WorkItem, ...]),
        )

    @abstractmethod
    def tile_shape(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
        """Query rows per work item and KV positions per inner tile; WHOLE where sequences are not cut."""


def resolve_backend_name(name: str) -> str:
    """The backend that "auto" stands for on this machine; other names are returned as they are.

    Raises:
        ValueError: ``name`` is not one of ``BACKEND_NAMES``.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(f"attention backend is {name!r}; it must be one of {', '.join(BACKEND_NAMES)}")
    if name != "auto":
        return name
    import mlx.core as mx

    if mx.default_device() == mx.gpu:
        return "metal" if mx.metal.is_available() else "cuda"
    return "cpu"


def why_not_here(name: str) -> str:
    """Why the backend of that name cannot run on this machine; empty when it can."""
    import mlx.core as mx

    if name == "metal" and not mx.metal.is_available():
        return "it needs an Apple GPU"
    if name == "cuda" and not mx.cuda.is_available():
        return "it needs an NVIDIA GPU and mlx[cuda13]"
    return ""


@cache
def _load(name: str) -> AttentionBackend:
    module, class_name = _HOMES[name]
    backend: Any = getattr(importlib.import_module(module), class_name)
    return backend()


def get_backend(name: str = "auto") -> AttentionBackend:
    """The attention backend of that name; backends hold no state, so every caller gets the same object.

    Raises:
        ValueError: ``name`` is not one of ``BACKEND_NAMES``.
        RuntimeError: The backend cannot run on this machine.
    """
    name = resolve_backend_name(name)
    reason = why_not_here(name)
    if reason:
        others = ", ".join(other for other in _HOMES if not why_not_here(other))
        raise RuntimeError(f"attention backend {name!r} is not available here: {reason}; use one of auto, {others}")
    return _load(name)
