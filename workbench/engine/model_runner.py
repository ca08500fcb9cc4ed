"""One forward pass per step: an unmodified mlx-lm model over the paged KV pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np

from workbench.attention.backend import AttentionBackend
from workbench.attention.dtypes import dtype_name
from workbench.attention.metadata import AttentionMetadata
from workbench.attention.selection import FALLBACK, SELF_TESTED, get_backend, select_backend
from workbench.config import EngineConfig
from workbench.device import runs_on_gpu
from workbench.engine.cache_groups import choose_groups
from workbench.engine.memory import check_pool_fits, choose_num_blocks, explained, limit_memory, usable_memory
from workbench.engine.packed_batch import PackedBatch
from workbench.models.final_norm import FinalNorm
from workbench.models.forward import forward_rows
from workbench.models.load import LoadedModel
from workbench.models.packed.activations import float32_activations
from workbench.models.paged_cache import PagedKVCache, bytes_per_block, flat_caches
from workbench.models.patch import Patch, patch_model
from workbench.models.preflight import PreflightResult, preflight
from workbench.models.preflight_once import preflight_once
from workbench.models.remembered import NOTHING, Remembered
from workbench.models.replayed_step import ReplayedStep
from workbench.models.state_cache import MixerPatch
from workbench.trace.records import KernelLaunch

if TYPE_CHECKING:
    from workbench.models.packed.compiled_step import CompiledStep


class ModelRunner:
    """Holds a model, its KV pool and its attention backend, and runs packed batches.

    Attributes:
        config: The configuration, with the model's KV cache groups and the number of blocks that "auto" stands for.
        groups: The KV cache groups.
        bytes_per_block: Bytes of one KV block.
        state_bytes: Bytes of the recurrent state of a request, 0 without.
        model: The mlx-lm model. While it is held here its attention dispatches on the cache it is given, and it
            still works with mlx-lm's own caches.
        preflight: The way in which the model is served, and the check that found it.
        kv_cache: The block pool.
        backend_name: Name of the attention backend.
        fallback_reason: Why it is not the backend "auto" stands for here; empty when it is.
        evaluates_whole_model: Compute the whole model in a step that samples nothing too, for a model whose layers
            wait for other processes.
        compiled_step: The forward pass in compiled code, for steps in which nothing looks at a layer; None if the
            model has none.
        not_compiled: Why it has none.
        replayed_step: Replays MLX's graph of decode steps; None if the attention backend does not allow it.
        also_evaluated: Makes arrays from the logits of a step that MLX computes, evaluated together with them, so that
            the step waits once: `Sampler.prepare`. None for nothing else.
    """

    evaluates_whole_model = False
    also_evaluated: Callable[[mx.array], list[mx.array]] | None = None

    def __init__(self, model: nn.Module | LoadedModel, config: EngineConfig, *, one_table: bool = True) -> None:
        """Preflight the model and allocate its KV pool.

        Args:
            model: A loaded model, or an mlx-lm model alone.
            config: ``num_blocks``, ``block_size``, ``kv_cache_groups`` and ``attention_backend`` are used.
            one_table: Batches have one block table per sequence; False for a table per KV cache group, in which
                windowed layers give blocks back.

        Raises:
            UnsupportedModelError: The model cannot be served; the message gives the reason.
            ValueError: The KV pool is larger than this machine's memory.
            RuntimeError: The attention backend cannot run on this machine.
        """
        self.loaded = None if isinstance(model, nn.Module) else model
        self.model: nn.Module = model if isinstance(model, nn.Module) else model.model
        remembered = self.loaded.remembered if self.loaded is not None else NOTHING  # before anything is patched
        self.backend, self.preflight, self.fallback_reason = _tried_backend(model, config)
        self.backend_name = self.backend.name
        limit_memory()
        caches, states = flat_caches(self.preflight.caches), self.preflight.states
        config, groups = choose_groups(config, caches, one_table=one_table)
        self.groups = config.cache_groups
        first = next((group for group in self.groups if group.is_attention), self.groups[0])
        self.bytes_per_block = bytes_per_block(caches, first.block_size, groups)
        if config.num_blocks == "auto":
            config = config.replace(num_blocks=choose_num_blocks(config, self.bytes_per_block))
        self.config = config
        self.state_bytes = sum(state.nbytes for state in states)
        taken = (mx.get_active_memory() if runs_on_gpu() else 0) + config.max_num_seqs * self.state_bytes
        check_pool_fits(config.num_pool_blocks, self.bytes_per_block, _physical_memory(), taken)
        changes: list[Patch | FinalNorm | MixerPatch] = []
        self._restore = weakref.finalize(self, _restore, changes)
        try:
            self._take_model(changes, first.block_size, groups, remembered)
        except BaseException:
            self._restore()
            raise
        self._describe_launches()
        self._latest: tuple[PackedBatch, AttentionMetadata] | None = None

    def _take_model(
        self,
        changes: list[Patch | FinalNorm | MixerPatch],
        block_size: int,
        groups: Sequence[int],
        remembered: Remembered,
    ) -> None:
        """Give the model a paged pool; every change of the model goes to ``changes`` as soon as it is made."""
        pool = (self.preflight.caches, self.config.num_pool_blocks, block_size)
        if states := self.preflight.states:
            changes.append(MixerPatch(self.model, [path for state in states for path in state.mixers]))
        if self.preflight.mode == "kernel":
            self.kv_cache = PagedKVCache.for_kernel(*pool, self.backend, groups, self.config.max_num_seqs)
            changes += patch_model(self.model, self.backend)
        else:
            mask_ndim = self.preflight.mask_ndim
            self.kv_cache = PagedKVCache.for_gathering(*pool, mask_ndim, groups, self.config.max_num_seqs)
        self.compiled_step, self.not_compiled = _compiled(self.model, self.preflight, self.kv_cache, remembered)
        path = self.preflight.final_norm
        self._final_norm = FinalNorm(self.model, path) if path is not None else None
        if self._final_norm is not None:
            changes.append(self._final_norm)
        kernels = self.backend.replayable_kernels if self.preflight.mode == "kernel" and not states else None
        self.replayed_step: ReplayedStep | None = None
        if kernels is not None:
            self.replayed_step = ReplayedStep(self.model, self.kv_cache, self._final_norm, kernels)

    def _describe_launches(self) -> None:
        """Make the part of a record's launch that is the same in every step."""
        layers, windows = self.preflight.layers, self.preflight.windows
        windows = windows if len(set(windows)) > 1 else windows[:1]
        self._shape: dict[str, Any] = {"num_heads": self.preflight.num_heads}
        if layers:
            self._shape |= {
                "num_kv_heads": layers[0].num_kv_heads,
                "head_dim": layers[0].k_head_dim,
                "dtype": dtype_name(layers[0].dtype),
            }
        # Backends count a window as flash-attn does: the tokens to the left, without the token itself.
        self._left_windows = tuple(window - 1 if window > 0 else -1 for window in windows)
        details = {"reason": self.preflight.reason}
        self._launch = KernelLaunch(backend="model", windows=windows, details=details, **self._shape)

    @property
    def mode(self) -> str:
        """Mode of the attention: "kernel" or "gather", see `PreflightResult`."""
        return self.preflight.mode

    def close(self) -> None:
        """Leave the model as it was before. A runner that is garbage collected does so by itself."""
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
        metadata = [
            AttentionMetadata(
                packed.cu_seqlens_q, packed.seqused_k, tables.block_table, tables.slot_mapping, tables.block_size
            )
            for tables in packed.by_group or (packed,)
        ]
        self._latest = (packed, metadata[0])
        rows = packed.logits_rows
        samples = len(rows) > 0
        tapped = any(layer.taps for layer in self.kv_cache.kernel_layers)
        if self.compiled_step is not None and not tapped:
            return self.compiled_step.run(packed.token_ids, packed.positions, rows, *metadata)
        replays = samples and not tapped and not self.evaluates_whole_model
        try:
            replayed = self._replayed(packed, metadata) if replays else None
            logits = replayed if replayed is not None else self._layer_by_layer(packed, metadata)
            # If nothing samples, only the pool is evaluated, and nothing after the last layer's attention is computed.
            results = [logits] if samples or self.evaluates_whole_model else []
            if samples and self.also_evaluated is not None:
                results += self.also_evaluated(logits)
            try:
                mx.eval(results, self.kv_cache.arrays)
            except RuntimeError as problem:
                raise explained(problem, self.config, packed.num_tokens) from problem
            if not samples:  # with its values in it: another thread, which has other streams, may read it
                logits = mx.array(np.zeros((0, logits.shape[1]), dtype=np.float32))
        finally:
            self.kv_cache.end_step()
        return logits

    def _layer_by_layer(self, packed: PackedBatch, metadata: Sequence[AttentionMetadata]) -> mx.array:
        """The logits of a step, not evaluated; those of one row if no row samples."""
        wanted = packed.logits_rows if len(packed.logits_rows) else np.zeros(1, dtype=np.int32)
        self.kv_cache.begin_step(packed.positions, *metadata, held=packed.held)
        logits = forward_rows(self.model, packed.token_ids, self.kv_cache, wanted, self._final_norm)
        self.kv_cache.check_reads()
        if self.replayed_step is not None:
            self.replayed_step.learn(metadata)
        return logits

    def _replayed(self, packed: PackedBatch, metadata: Sequence[AttentionMetadata]) -> mx.array | None:
        """The logits of a decode step whose graph has been recorded, not evaluated; None for any other step."""
        if self.replayed_step is None:
            return None
        return self.replayed_step.logits(packed.token_ids, packed.positions, packed.logits_rows, metadata)

    def _check(self, packed: PackedBatch) -> None:
        """Reject a batch that does not belong to this pool: MLX does not check where it reads and writes."""
        pool = self.kv_cache
        if packed.block_size != pool.block_size:
            raise ValueError(f"the batch was packed for block_size {packed.block_size}, the pool has {pool.block_size}")
        if max(1, len(packed.by_group)) != len(self.groups):
            raise ValueError(
                f"the batch has tables of {max(1, len(packed.by_group))} KV cache groups, the model has "
                f"{len(self.groups)}: pack it with groups=runner.groups"
            )
        for tables in packed.by_group or (packed,):
            largest = tables.block_table.max(axis=1)
            if largest.max() >= pool.num_blocks:
                name, block = packed.sequence_name(int(largest.argmax())), largest.max()
                raise ValueError(f"{name}: block id {block} is outside the pool of {pool.num_blocks} blocks")
        if self.mode == "gather" and self.preflight.layers:
            self._check_gathered(packed)

    def _check_gathered(self, packed: PackedBatch) -> None:
        """Reject a batch whose gathered keys and values would not fit into memory."""
        context = packed.block_table.shape[1] * packed.block_size
        gathered = packed.num_tokens * context * max(layer.bytes_per_token for layer in self.preflight.layers)
        if 2 * gathered > _physical_memory():
            raise ValueError(
                f"{packed.num_tokens} tokens with a context of {context} need {gathered / 2**30:.1f} GiB of "
                f"gathered keys and values per layer ({self.preflight.reason}): lower "
                f"max_num_batched_tokens={self.config.max_num_batched_tokens}"
            )

    def kernel_launch(self, packed: PackedBatch) -> KernelLaunch:
        """The launch of the latest step's attention, for its record.

        Raises:
            ValueError: ``packed`` is not the batch that ran last.
        """
        if self._latest is None or self._latest[0] is not packed:
            raise ValueError("kernel_launch describes the batch that ran last: call forward(packed) before")
        if self.mode == "gather" or not self.preflight.layers:
            return self._launch
        launch = self.backend.describe(self._latest[1], windows=self._left_windows, **self._shape)
        return msgspec.structs.replace(launch, windows=self._launch.windows)

    def describe(self) -> dict[str, Any]:
        """Facts about the model and how it is served, for the head of a trace."""
        layers = self.preflight.layers
        facts: dict[str, Any] = {
            "num_layers": len(layers),
            "num_heads": self.preflight.num_heads,
            "windows": sorted(set(self.preflight.windows)),
            "attention_backend": self.backend_name,
            "attention_mode": self.mode,
            "kv_bytes_per_block": self.bytes_per_block,
            "preflight_error": self.preflight.max_error,
        }
        if layers:
            facts |= {
                "num_kv_heads": layers[0].num_kv_heads,
                "head_dim": layers[0].k_head_dim,
                "kv_dtype": dtype_name(layers[0].dtype),
            }
        if self.preflight.states:
            facts |= {"num_recurrent_layers": len(self.preflight.states), "state_bytes_per_request": self.state_bytes}
        if self.compiled_step is not None:
            facts["forward"] = "compiled"
        if self.fallback_reason:
            facts["attention_fallback_reason"] = self.fallback_reason
        if self.loaded is not None:
            facts |= {
                "name": self.loaded.name,
                "architecture": self.loaded.architecture,
                "num_parameters": self.loaded.num_parameters,
                "dtype": self.loaded.dtype,
                "activations": self.loaded.activations,
                "vocab_size": self.loaded.vocab_size,
            }
        return facts


def _compiled(
    model: nn.Module, result: PreflightResult, kv_cache: PagedKVCache, remembered: Remembered
) -> tuple[CompiledStep | None, str]:
    """The forward pass in compiled code, or None and the reason; only packed weights have one."""
    if not any(hasattr(module, "num_packed_weights") for module in model.modules()):
        return None, "its weights are not packed"
    if result.states:
        return None, "it has recurrent layers"
    from workbench.models.packed.step_check import make_compiled_step

    return make_compiled_step(model, result, kv_cache, remembered)


def _restore(changes: list[Patch | FinalNorm | MixerPatch]) -> None:
    for change in changes:
        change.restore()


def _tried_backend(
    model: nn.Module | LoadedModel, config: EngineConfig
) -> tuple[AttentionBackend, PreflightResult, str]:
    """The attention backend, how it serves the model, and why it is not the one "auto" stands for here.

    A kernel on a GPU has to reproduce the model, like any backend, and its own self-test on the model's shapes.
    """

    def check(model: nn.Module | LoadedModel, backend: AttentionBackend) -> PreflightResult:
        with float32_activations(model if isinstance(model, nn.Module) else model.model):
            return preflight(model, backend) if isinstance(model, nn.Module) else preflight_once(model, backend)

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


def _physical_memory() -> int:
    """Bytes that MLX can use."""
    return usable_memory()
