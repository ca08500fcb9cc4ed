"""One forward pass per step: an unmodified mlx-lm model over the paged KV pool."""

from __future__ import annotations

import os
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from workbench.attention.backend import AttentionBackend, get_backend
from workbench.attention.dtypes import dtype_name
from workbench.attention.metadata import AttentionMetadata
from workbench.attention.selection import FALLBACK, SELF_TESTED, select_backend
from workbench.engine.config import EngineConfig
from workbench.engine.packed_batch import PackedBatch
from workbench.models.final_norm import FinalNorm
from workbench.models.forward import forward_rows
from workbench.models.load import LoadedModel
from workbench.models.paged_cache import PagedKVCache, bytes_per_block
from workbench.models.preflight import PreflightResult, preflight, preflight_once
from workbench.models.swap import Swap, swap_for
from workbench.trace.records import KernelLaunch


class ModelRunner:
    """Holds a model, its KV pool and its attention backend, and runs packed batches.

    Attributes:
        model: The mlx-lm model. While it is held here its attention dispatches on the cache it is given, and it
            still works with mlx-lm's own caches.
        preflight: How the model is served, and how that was found out.
        kv_cache: The block pool.
        backend_name: Name of the attention backend.
        fallback_reason: Why it is not the backend "auto" stands for here; empty when it is.
        evaluates_whole_model: Compute the whole model in a step that samples nothing too, for a model whose layers
            wait for other processes.
    """

    evaluates_whole_model = False

    def __init__(self, model: nn.Module | LoadedModel, config: EngineConfig) -> None:
        """Preflight the model and allocate its KV pool.

        Args:
            model: A loaded model, or an mlx-lm model alone.
            config: ``num_blocks``, ``block_size`` and ``attention_backend`` are used.

        Raises:
            UnsupportedModelError: The model cannot be served; the message gives the reason.
            ValueError: The KV pool is larger than this machine's memory.
            RuntimeError: The attention backend cannot run on this machine.
        """
        self.loaded = None if isinstance(model, nn.Module) else model
        self.model: nn.Module = model if isinstance(model, nn.Module) else model.model
        self.backend, self.preflight, self.fallback_reason = _tried_backend(model, config)
        self.backend_name = self.backend.name
        pool = (self.preflight.layers, config.num_blocks, config.block_size)
        _check_pool_fits(config, bytes_per_block(self.preflight.layers, config.block_size))
        changes: list[Swap | FinalNorm] = []
        if self.preflight.mode == "kernel":
            self.kv_cache = PagedKVCache.for_kernel(*pool, self.backend)
            changes += swap_for(self.model, self.backend)
        else:
            self.kv_cache = PagedKVCache.for_gathering(*pool, self.preflight.mask_ndim)
        path = self.preflight.final_norm
        self._final_norm = FinalNorm(self.model, path) if path is not None else None
        self._latest: tuple[PackedBatch, AttentionMetadata] | None = None
        if self._final_norm is not None:
            changes.append(self._final_norm)
        self._restore = weakref.finalize(self, _restore, changes)

    @property
    def mode(self) -> str:
        """How attention is served: "kernel" or "gather", see `PreflightResult`."""
        return self.preflight.mode

    def close(self) -> None:
        """Leave the model as it was before. A runner that is no longer referred to does so by itself."""
        self._restore()

    @property
    def latest(self) -> PackedBatch | None:
        """The packed batch that ran last, from which `prepare_unified` reuses what still holds."""
        return self._latest[0] if self._latest is not None else None

    def forward(self, packed: PackedBatch) -> mx.array:
        """Run the model once on a packed batch; its keys and values are in the pool afterwards.

        Returns:
            Logits of ``packed.logits_rows`` in their order, float32 [len(logits_rows), vocab_size], evaluated.

        Raises:
            ValueError: The batch was packed for another block size, or names blocks outside the pool.
        """
        self._check(packed)
        metadata = AttentionMetadata(
            packed.cu_seqlens_q,
            packed.seqused_k,
            packed.block_table,
            packed.slot_mapping,
            packed.block_size,
        )
        self._latest = (packed, metadata)
        rows = packed.logits_rows
        samples = len(rows) > 0
        self.kv_cache.begin_step(packed.positions, metadata)
        try:
            wanted = rows if samples else np.zeros(1, dtype=np.int32)
            logits = forward_rows(self.model, packed.token_ids, self.kv_cache, wanted, self._final_norm)
            # Where nothing samples only the pool is evaluated: what follows the last layer's attention is not computed.
            mx.eval(*([logits] if samples or self.evaluates_whole_model else []), self.kv_cache.arrays)
            if not samples:
                logits = mx.zeros((0, logits.shape[1]), dtype=mx.float32)
                mx.eval(logits)  # a person may look at it from another thread, which has other streams
        finally:
            self.kv_cache.end_step()
        if any(reads != 1 for reads in self.kv_cache.reads):
            raise RuntimeError(f"attention ran {self.kv_cache.reads} times per layer; the preflight saw 1 each")
        return logits

    def _check(self, packed: PackedBatch) -> None:
        """Refuse a batch that does not belong to this pool: MLX does not check where it reads and writes."""
        if packed.block_size != self.kv_cache.block_size:
            raise ValueError(
                f"the batch was packed for block_size {packed.block_size}, the pool has {self.kv_cache.block_size}"
            )
        largest = int(packed.block_table.max())
        if largest >= self.kv_cache.num_blocks:
            index = int(packed.block_table.max(axis=1).argmax())
            raise ValueError(
                f"{packed.sequence_name(index)}: block id {largest} is outside the pool of "
                f"{self.kv_cache.num_blocks} blocks"
            )
        if self.mode == "gather":
            context = packed.block_table.shape[1] * packed.block_size
            gathered = packed.num_tokens * context * max(layer.bytes_per_token for layer in self.preflight.layers)
            if 2 * gathered > _physical_memory():
                raise ValueError(
                    f"{packed.num_tokens} tokens with a context of {context} need {gathered / 2**30:.1f} GiB of "
                    f"gathered keys and values per layer ({self.preflight.reason}): lower max_num_batched_tokens"
                )

    def kernel_launch(self, packed: PackedBatch) -> KernelLaunch:
        """What the attention of the latest step was handed, for its record.

        Raises:
            ValueError: ``packed`` is not the batch that ran last.
        """
        if self._latest is None or self._latest[0] is not packed:
            raise ValueError("kernel_launch describes the batch that ran last: call forward(packed) before")
        layers = self.preflight.layers
        windows = self.preflight.windows if len(set(self.preflight.windows)) > 1 else self.preflight.windows[:1]
        shape: dict[str, Any] = {
            "num_heads": self.preflight.num_heads,
            "num_kv_heads": layers[0].num_kv_heads,
            "head_dim": layers[0].k_head_dim,
            "dtype": dtype_name(layers[0].dtype),
        }
        if self.mode == "gather":
            details = {"reason": self.preflight.reason}
            return KernelLaunch(backend="model", windows=windows, details=details, **shape)
        # Backends count a window as flash-attn does: the tokens to the left, without the token itself.
        left = tuple(window - 1 if window > 0 else -1 for window in windows)
        launch = self.backend.describe(self._latest[1], windows=left, **shape)
        return msgspec.structs.replace(launch, windows=windows)

    @property
    def bytes_per_block(self) -> int:
        """Bytes one KV block takes over all layers."""
        return bytes_per_block(self.preflight.layers, self.kv_cache.block_size)

    def describe(self) -> dict[str, Any]:
        """Facts about the model and how it is served, for the head of a trace."""
        layers = self.preflight.layers
        facts: dict[str, Any] = {
            "num_layers": len(layers),
            "num_heads": self.preflight.num_heads,
            "num_kv_heads": layers[0].num_kv_heads,
            "head_dim": layers[0].k_head_dim,
            "kv_dtype": dtype_name(layers[0].dtype),
            "windows": sorted(set(self.preflight.windows)),
            "attention_backend": self.backend_name,
            "attention_mode": self.mode,
            "kv_bytes_per_block": self.bytes_per_block,
            "preflight_error": self.preflight.max_error,
        }
        if self.fallback_reason:
            facts["attention_fallback_reason"] = self.fallback_reason
        if self.loaded is not None:
            facts |= {
                "name": self.loaded.name,
                "architecture": self.loaded.architecture,
                "num_parameters": self.loaded.num_parameters,
                "dtype": self.loaded.dtype,
                "vocab_size": self.loaded.vocab_size,
            }
        return facts


def _restore(changes: list[Swap | FinalNorm]) -> None:
    for change in changes:
        change.restore()


def _tried_backend(
    model: nn.Module | LoadedModel, config: EngineConfig
) -> tuple[AttentionBackend, PreflightResult, str]:
    """The attention backend, how it serves the model, and why it is not the one "auto" stands for here.

    A kernel on a GPU has to reproduce the model, like any backend, and its own self-test on the model's shapes.
    """
    check = preflight if isinstance(model, nn.Module) else preflight_once
    backend = get_backend(config.attention_backend)
    result = check(model, backend)
    reason = result.reason if config.attention_backend == "auto" and backend.name in SELF_TESTED else ""
    if result.mode == "kernel":
        layers = {(layer.num_kv_heads, layer.k_head_dim, dtype_name(layer.dtype)) for layer in result.layers}
        for num_kv_heads, head_dim, dtype in sorted(layers):
            chosen = select_backend(
                config.attention_backend,
                num_heads=result.num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=config.block_size,
                dtype=dtype,
            )
            reason = reason or chosen.fallback_reason
    if not reason:
        return backend, result, ""
    fallback = get_backend(FALLBACK)
    return fallback, check(model, fallback), reason


def _check_pool_fits(config: EngineConfig, block_bytes: int) -> None:
    """Refuse a pool that no allocation could hold, before the attempt ends the process."""
    memory = _physical_memory()
    if config.num_blocks * block_bytes > memory:
        raise ValueError(
            f"num_blocks={config.num_blocks} needs {config.num_blocks * block_bytes / 2**30:.1f} GiB of KV cache "
            f"({block_bytes / 2**20:.2f} MiB per block), this machine has {memory / 2**30:.1f} GiB: "
            f"use at most {memory // (2 * block_bytes)} blocks"
        )


def _physical_memory() -> int:
    """Bytes of main memory, which GPUs of Apple share."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
