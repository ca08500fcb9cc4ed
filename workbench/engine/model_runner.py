"""One forward pass per step: an unmodified mlx-lm model over the paged KV pool."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from workbench.base.device import default_device, gpu_name, why_cpu
from workbench.base.keyword_fields import BackendName
from workbench.config import EngineConfig
from workbench.engine.cache_groups import choose_groups
from workbench.engine.forward.compiled import CompiledPath
from workbench.engine.forward.gathering import GatheringPath
from workbench.engine.forward.layer_by_layer import LayerByLayer
from workbench.engine.forward.path import ChosenPath, ForwardOutput
from workbench.engine.forward.replayed import ReplayedPath
from workbench.engine.memory import limit_memory, with_room_for_states
from workbench.engine.packed_batch import PackedBatch
from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.dtypes import dtype_name
from workbench.kernels.attention.selection import FALLBACK, SELF_TESTED, get_backend, select_backend
from workbench.models.adapters import Adapters
from workbench.models.final_norm import FinalNorm
from workbench.models.latents import LatentPatch
from workbench.models.load import LoadedModel
from workbench.models.mixers import MixerPatch
from workbench.models.packed.activations import float32_activations
from workbench.models.paged_cache import PagedKVCache, bytes_per_block, flat_caches
from workbench.models.patch import Patch, patch_model
from workbench.models.preflight import preflight
from workbench.models.preflight_once import preflight_once
from workbench.models.preflight_result import PreflightResult
from workbench.models.remembered import NOTHING, Remembered
from workbench.models.served_model import ServedModel
from workbench.models.state_cache import LayerState
from workbench.trace.kv_groups import KVCacheGroup
from workbench.trace.readings.computed_by import kernel_words

Change = Patch | LatentPatch | FinalNorm | MixerPatch | Adapters
"""A change of the model that is undone when it is served no more."""

PATHS: tuple[type[ChosenPath], ...] = (CompiledPath, ReplayedPath, LayerByLayer, GatheringPath)
"""The ways through a model, the fastest first."""


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
        adapters: The adapters (LoRA) of requests.
        backend_name: Name of the attention backend.
        fallback_reason: Why it is not the backend "auto" stands for here; empty when it is.
        path: The way through the model, chosen at load.
        not_taken: The faster ways, each with the reason why the model cannot take it.
        watched_path: The way that a step takes while something looks at a layer.
    """

    def __init__(
        self,
        model: nn.Module | LoadedModel,
        config: EngineConfig,
        *,
        one_table: bool = True,
        computes_all: bool = False,
        backend: BackendName | None = None,
        memory: Sequence[mx.array] | None = None,
    ) -> None:
        """Preflight the model and allocate its KV pool.

        Args:
            model: A loaded model, or an mlx-lm model alone.
            config: ``num_blocks``, ``block_size``, ``kv_cache_groups`` and ``attention_backend`` are used.
            one_table: Batches have one block table per sequence; False for a table per KV cache group, in which
                windowed layers give blocks back.
            computes_all: See `ServedModel`.
            backend: The attention backend; None for that of the configuration.
            memory: The arrays of another runner's pool, whose place this one takes; None to make them.

        Raises:
            UnsupportedModelError: The model cannot be served; the message gives the reason.
            ValueError: The KV pool is larger than this machine's memory, or ``memory`` is of another form.
            RuntimeError: The attention backend cannot run on this machine.
        """
        self.loaded = None if isinstance(model, nn.Module) else model
        self.model: nn.Module = model if isinstance(model, nn.Module) else model.model
        remembered = self.loaded.remembered if self.loaded is not None else NOTHING  # before anything is patched
        self.backend, self.preflight, self.fallback_reason = _tried_backend(
            model, config.replace(attention_backend=backend) if backend else config
        )
        self.backend_name = self.backend.name
        limit_memory()
        caches, states = flat_caches(self.preflight.caches), self.preflight.states
        config, groups = choose_groups(config, caches, one_table=one_table)
        attention = (group for group in config.cache_groups if group.is_attention)
        self.bytes_per_block = bytes_per_block(caches, next(attention, KVCacheGroup()).block_size, groups)
        self.state_bytes = sum(state.nbytes for state in states)
        page_bytes: Counter[int] = Counter()
        for cache, group in zip(caches, groups):
            page_bytes[group] += cache.nbytes if isinstance(cache, LayerState) else 0
        self.config = with_room_for_states(config, self.bytes_per_block, self.state_bytes, max(page_bytes.values()))
        self.groups = self.config.cache_groups
        first = next((group for group in self.groups if group.is_attention), self.groups[0])
        changes: list[Change] = []
        self._restore = weakref.finalize(self, _restore, changes)
        try:
            self._take_model(changes, first.block_size, groups, remembered, computes_all, memory)
        except BaseException:
            self._restore()
            raise

    def __repr__(self) -> str:
        blocks = f"{self.config.num_blocks} KV blocks of {self.bytes_per_block:,} bytes"
        return f"ModelRunner({type(self.model).__name__}, attention by {self.backend_name}, {blocks})"

    def _take_model(
        self,
        changes: list[Change],
        block_size: int,
        groups: Sequence[int],
        remembered: Remembered,
        computes_all: bool,
        memory: Sequence[mx.array] | None,
    ) -> None:
        """Give the model a paged pool, and choose the way through it; changes of it go to ``changes`` at once."""
        if states := self.preflight.states:
            changes.append(MixerPatch(self.model, [path for state in states for path in state.mixers]))
        reader = self.backend if self.preflight.mode == "kernel" else None
        pool = (self.preflight.caches, self.config.num_pool_blocks, block_size, reader)
        reads_arithmetic = self.preflight.reads_arithmetic
        # Graphs of a GPU hold the pool's arrays. A bare module is run by tests that measure its memory.
        grows = default_device() == "cpu" and self.loaded is not None
        self.kv_cache = PagedKVCache(*pool, groups, self.preflight.mask_ndim, reads_arithmetic, memory, grows)
        if reader is not None:
            changes += patch_model(self.model, reader, reads_arithmetic)
        one_table = len(self.groups) == 1 and self.preflight.mode != "gather"
        self._valid_form = (block_size, self.kv_cache.num_blocks, ()) if one_table else None
        path = self.preflight.final_norm
        final_norm = FinalNorm(self.model, path) if path is not None else None
        if final_norm is not None:
            changes.append(final_norm)
        mixers = [path for state in self.preflight.states for path in state.mixers]
        self.adapters = Adapters(self.model, self.config.max_loras, self.config.max_lora_rank, mixers)
        changes.append(self.adapters)
        parts = (self.model, self.preflight, self.kv_cache, self.backend, final_norm, self.config, self.adapters)
        self._served = served = ServedModel(*parts, remembered, computes_all)
        self.path, self.not_taken = choose(served)
        if self.config.batch_invariant:
            self._make_invariant()
        watched = LayerByLayer(served, "a layer is looked at")
        self.watched_path = watched if self.preflight.mode == "kernel" else self.path

    def _make_invariant(self) -> None:
        """Give rows the same bits in every batch.

        Raises:
            ValueError: The model cannot be served so.
        """
        if not isinstance(self.path, CompiledPath):
            problem = f"takes compiled code on a CPU, and the model cannot take it: {self.not_taken[CompiledPath.name]}"
        elif any(window > 0 for window in self.preflight.windows):
            problem = "does not work with sliding windows: where a sum begins depends on the chunk"
        else:
            self.path.step.make_invariant()
            return
        raise ValueError(f"batch_invariant=True {problem}; set it to False")

    def wait_for_compiled(self) -> None:
        """Take steps layer by layer, because faster code is being compiled."""
        self.not_taken = {CompiledPath.name: "its code is being compiled"}
        self.path = LayerByLayer(self._served, "compiled code is not ready")

    @property
    def mode(self) -> str:
        """Mode of the attention: "kernel" or "gather", see `PreflightResult`."""
        return self.preflight.mode

    def close(self) -> None:
        """Leave the model as it was before. A runner that is garbage collected does so by itself."""
        self._restore()

    def forward(self, packed: PackedBatch) -> ForwardOutput:
        """Run the model once, see `ForwardPath.run`; layer by layer if something looks at one. `_check` may raise."""
        if (packed.block_size, packed.num_blocks, packed.by_group) != self._valid_form:
            self._check(packed)
        if (last := max(int(one.block_table.max(initial=0)) for one in packed.metadata)) >= self.kv_cache.num_reserved:
            self.reserve(last + 1)
        watched = any(layer.taps for layer in self.kv_cache.kernel_layers)
        return (self.watched_path if watched else self.path).run(packed)

    def reserve(self, num_blocks: int) -> None:
        """Have memory for the first blocks of the pool, see `PagedKVCache.reserve`."""
        self.path.let_go_of_memory()
        self.kv_cache.reserve(num_blocks)

    def _check(self, packed: PackedBatch) -> None:
        """Reject a batch that does not belong to this pool: MLX does not check where it reads and writes.

        One that was packed for this pool, with one table per sequence, is valid by construction.

        Raises:
            ValueError: The batch was packed for another block size, or names blocks outside the pool.
        """
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
        if isinstance(self.path, GatheringPath):
            self.path.check(packed)

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
            "preflight_bound": self.preflight.bound,
            "forward": self.path.name,
            "forward_not_taken": self.not_taken,
            "device": default_device(),
            "runs_on": self.runs_on,
        }
        if layers:
            facts |= {
                "num_kv_heads": layers[0].num_kv_heads,
                "head_dim": layers[0].key_dim,
                "value_dim": layers[0].value_dim,
                "kv_layout": "latents" if layers[0].latent else "keys and values",
                "kv_dtype": dtype_name(layers[0].dtype),
            }
            if layers[0].latent:
                facts["expands_latents"] = self.preflight.expands_latents
        if self.preflight.states:
            facts |= {"num_recurrent_layers": len(self.preflight.states), "state_bytes_per_request": self.state_bytes}
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

    @cached_property
    def runs_on(self) -> str:
        """Device and kernel as a reader calls them, such as "Metal kernel on Apple M3"."""
        if default_device() == "gpu":
            words = f"{kernel_words(self.backend_name if self.mode == 'kernel' else 'model')} on {gpu_name()}"
            reason = self.fallback_reason or self.preflight.reason
            return f"{words}, not the Metal kernel: {reason}" if reason else words
        way = "compiled code" if isinstance(self.path, CompiledPath) else self.path.name
        return f"CPU, {way}: {why_cpu()}"


def choose(served: ServedModel) -> tuple[ChosenPath, dict[str, str]]:
    """The fastest way through a model, and why it cannot take the faster ones."""
    refused: dict[str, str] = {}
    for kind in PATHS:
        made = kind.make(served)
        if not isinstance(made, str):
            return made, refused
        refused[kind.name] = made
    raise AssertionError("every model can take the last path")


def _restore(changes: list[Change]) -> None:
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
            if isinstance(model, nn.Module):
                return preflight(model, backend, config.kv_cache_dtype)
            return preflight_once(model, backend, config.kv_cache_dtype)

    backend = get_backend(config.attention_backend)
    result = check(model, backend)
    reason = result.reason if config.attention_backend == "auto" and backend.name in SELF_TESTED else ""
    if result.mode == "kernel":
        layers = {
            (layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.latent, dtype_name(layer.dtype))
            for layer in (*result.layers, *(one.expanded for one in result.layers if one.expanded is not None))
        }
        for num_kv_heads, head_dim, value_dim, latent, dtype in sorted(layers):
            chosen = select_backend(
                config.attention_backend,
                num_heads=result.num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                latent=latent,
                block_size=config.block_size,
                dtype=dtype,
            )
            reason = reason or chosen.fallback_reason
    if not reason:
        return backend, result, ""
    fallback = get_backend(FALLBACK)
    return fallback, check(model, fallback), reason
