"""Find out how a model can be served by running it, without any list of model names.

The plain model computes three short sequences, unchunked; then they run again in two packed steps that mix chunks and
decodes over permuted blocks. The paged path is accepted only if the logits agree, if every layer called the paged
attention exactly once, and if the same comparison fails, as it should, with positions shifted by 3. Sliding windows
are narrowed for the comparison: a few tokens would never leave the real ones. A way that is accepted also has to agree
far from the start (`workbench.models.far_trial`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from workbench.base.short_traceback import ShortTraceback
from workbench.base.threads import num_threads
from workbench.kernels.attention.backend import AttentionBackend
from workbench.kernels.attention.selection import SELF_TESTED
from workbench.kernels.attention.stored import STORED_DTYPES
from workbench.models.far_trial import far_trial
from workbench.models.final_norm import FinalNorm, norm_candidates
from workbench.models.latents import LatentPatch
from workbench.models.layer_cache import LayerCache, LayerKV
from workbench.models.mixers import MixerPatch, find_mixers
from workbench.models.paged_cache import CacheSpec, PagedKVCache, flat_caches
from workbench.models.patch import Patch, patch_model
from workbench.models.preflight_result import PreflightResult, error_bound
from workbench.models.rounded_cache import round_as_stored
from workbench.models.state_cache import LayerState
from workbench.models.trial_steps import (
    BLOCK_SIZE,
    CONTROL_STEP,
    NARROW_WINDOW,
    NUM_SEQS,
    NUM_TRIAL_BLOCKS,
    POSITION_SHIFT,
    STEPS,
    pack_probe,
    packed_logits,
    probe_tokens,
)

log = logging.getLogger("workbench")

WORST_ROW = 10
ROUNDED = {mx.float16: 2e-3, mx.bfloat16: 1e-2, mx.int8: 2e-2}
"""Error of a typical row beside a plain model that rounds as a pool of a type does: a number near the middle of two
codes may become the other one, and many layers amplify it. That of SmolLM2 is a quarter of it or less."""

_SELECTS_POSITIONS = (
    "a layer reads the keys of a cache itself, as an indexer does that selects the positions to attend to: that takes "
    "a kernel over index keys, and one that attends to a list of positions"
)


class _Way(NamedTuple):
    """A way to serve a model, see `PreflightResult`."""

    mode: Literal["kernel", "gather"]
    mask_ndim: int = 0
    reads_arithmetic: bool = False


_WAYS = (_Way("kernel"), _Way("kernel", reads_arithmetic=True), _Way("gather", 4), _Way("gather", 5))
"""Ways to serve a model, the best one first."""


class UnsupportedModelError(ShortTraceback, ValueError):
    """The model cannot be served and is refused; the message gives the reason."""


class _Mismatch(Exception):
    """One way to serve the model does not give the plain model's logits; the message says how they differ."""


def preflight(model: nn.Module, backend: AttentionBackend, kv_cache_dtype: str = "auto") -> PreflightResult:
    """Find out how ``model`` can be served with an attention backend.

    The model is unchanged afterwards.

    Args:
        model: The model.
        backend: The attention backend.
        kv_cache_dtype: Element type of the pool, such as "float16"; "auto" for that of the model's keys and values.

    Raises:
        UnsupportedModelError: It cannot be served; the message gives the reason.
    """
    entries = make_prompt_cache(model)
    caches = _flat(entries)
    states = [cache for cache in caches if type(cache) is ArraysCache]
    windows = {id(cache): _window_of(index, cache) for index, cache in enumerate(caches) if cache not in states}
    chunk_sizes = [cache.chunk_size if isinstance(cache, ChunkedKVCache) else 0 for cache in caches]
    token_ids = probe_tokens(model)
    for cache in caches:
        if id(cache) in windows:
            _narrow(cache, windows[id(cache)])
    watching: AbstractContextManager[list[list[str]]] = find_mixers(model, states) if states else nullcontext([])
    try:
        with watching as mixers:
            reference = np.array(model(mx.array(token_ids), cache=entries).astype(mx.float32))
    except Exception as problem:
        raise UnsupportedModelError(f"the plain model does not run here: {_one_line(problem)}") from problem
    if not np.isfinite(reference).all():
        why = "its weights are damaged, or it rules tokens out with infinity"
        raise UnsupportedModelError(f"the plain model's logits are not finite: {why}")
    widest: dict[int, int] = {}  # one layer's cache is asked for the mask of all layers of its kind
    for cache in caches:
        if id(cache) in windows:
            widest[windows[id(cache)]] = max(widest.get(windows[id(cache)], 0), cache.widest_mask)
    paths = iter(mixers)
    kept: list[LayerKV | LayerState] = []
    for index, cache in enumerate(caches):
        if id(cache) not in windows:
            kept.append(_layer_state(index, cache, next(paths)))
            continue
        window = windows[id(cache)]
        of_layer = _layer_kv(index, cache, window, max(widest[window], widest.get(-1, 0)) - window)
        kept.append(replace(of_layer, chunk_size=chunk_sizes[index]))
    own_bound, pool_bound = error_bound(kept), None
    if kv_cache_dtype != "auto":
        stored = STORED_DTYPES[kv_cache_dtype]
        pool_bound = ROUNDED.get(stored)
        kept = [replace(one, dtype=stored) if isinstance(one, LayerKV) else one for one in kept]
    specs = _with_layers([entry.caches if isinstance(entry, CacheList) else entry for entry in entries], kept)
    for cache in caches:
        vars(cache).clear()  # it refers to itself (`_narrow`), so its keys and values would stay for a while
    trial = _Trial(model, specs, token_ids, reference, own_bound, pool_bound)

    reasons: list[str] = []
    for way in _WAYS:
        try:
            result = trial.run(way, backend, reasons[1] if way.mode == "gather" else "")
        except _Mismatch as problem:
            reasons.append(str(problem))
            continue
        difference = _far_difference(model, result, backend)
        if difference and result.expands_latents:
            log.info("latents are not expanded: %s", difference)
            result = result.without_expansion
            difference = _far_difference(model, result, backend)
        if difference:
            reasons.append(difference)
            if backend.name in SELF_TESTED:  # its kernel may be at fault
                continue
            raise UnsupportedModelError(f"paged attention does not reproduce the model: {difference}")
        if result.mode == "gather":
            log.info("attention gathers context instead of running a kernel: %s", result.reason)
        return result
    by_kernel, gathered = [_SELECTS_POSITIONS] * 2 if _SELECTS_POSITIONS in reasons else reasons[1:3]
    ways = f"with a kernel, {by_kernel}; with gathered context, {gathered}"
    raise UnsupportedModelError(
        f"paged attention does not reproduce the model: {by_kernel if by_kernel == gathered else ways}"
    )


def _flat(entries: Sequence[Any]) -> list[Any]:
    """The caches in the entries of a model's cache argument."""
    return [one for entry in entries for one in (entry.caches if isinstance(entry, CacheList) else (entry,))]


def _far_difference(model: nn.Module, result: PreflightResult, backend: AttentionBackend) -> str:
    """The difference between an accepted way and the plain model far from the start; empty without one."""
    num_threads()  # a wrong setting is not a fault of the model
    try:
        far = far_trial(model, result)
        return far.difference(backend, error_bound(far.caches))
    except Exception as problem:
        return f"far from the start, {_why_it_fails(problem)}"


def _with_layers(specs: Sequence[Any], flat: Sequence[LayerKV | LayerState]) -> tuple[CacheSpec, ...]:
    """Caches one after another in the places of others; a tuple among these is a list of caches."""
    rest = iter(flat)
    return tuple(tuple(next(rest) for _ in spec) if isinstance(spec, tuple) else next(rest) for spec in specs)


def _expanding(flat: Sequence[LayerKV | LayerState], kv_cache: PagedKVCache) -> list[LayerKV | LayerState]:
    """The same caches with the keys and values that their layers' latents can be expanded to."""
    expandable = iter([layer.expandable for layer in kv_cache.kernel_layers])
    return [replace(one, expanded=next(expandable, None)) if isinstance(one, LayerKV) else one for one in flat]


def _narrowed(cache: LayerKV | LayerState) -> LayerKV | LayerState:
    """The same cache with its window narrowed to NARROW_WINDOW tokens."""
    return cache if isinstance(cache, LayerState) else cache.with_window(min(cache.window, NARROW_WINDOW))


def _narrow(cache: Any, window: int) -> None:
    """Narrow a layer's sliding window to NARROW_WINDOW tokens.

    If a model asks for a mask of another width than its cache has, the difference is kept and shows in the logits.
    ``cache.widest_mask`` is the widest that it asked for.
    """
    cache.widest_mask = 0
    if isinstance(cache, ChunkedKVCache):  # the model makes the masks
        return
    make_mask = cache.make_mask

    def make_narrow_mask(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("window_size")
        if asked is not None:
            difference = asked - window if window > 0 else 0
            kwargs["window_size"] = min(asked, NARROW_WINDOW + difference)
            cache.widest_mask = max(cache.widest_mask, asked)
        return make_mask(*args, **kwargs)

    cache.make_mask = make_narrow_mask
    if isinstance(cache, RotatingKVCache):
        cache.max_size = min(window, NARROW_WINDOW)


def _window_of(index: int, cache: Any) -> int:
    """Sliding window of a layer, from the cache that mlx-lm would use for it."""
    if type(cache) in (KVCache, ChunkedKVCache):
        return -1
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return cache.max_size
    kinds = {
        "RotatingKVCache": "a sliding window that keeps its first tokens",
        "LayerCache": "a window beside keys that are compressed over several positions",
    }
    name = type(cache).__name__
    raise UnsupportedModelError(
        f"layer {index} uses a {name}: {kinds.get(name, 'an unknown kind of cache')} cannot live in the paged KV "
        "pool; models whose layers use KVCache, RotatingKVCache, ChunkedKVCache or ArraysCache can be served"
    )


def _layer_kv(index: int, cache: Any, window: int, excess: int) -> LayerKV:
    """Shape and type of the keys and values that the plain run left in a layer's cache."""
    if cache.keys is None:
        raise UnsupportedModelError(f"layer {index} never stored keys in its cache")
    _, num_kv_heads, _, k_head_dim = cache.keys.shape
    v_head_dim, excess = cache.values.shape[-1], max(0, excess) if window > 0 else 0
    return LayerKV(num_kv_heads, k_head_dim, v_head_dim, cache.keys.dtype, window, excess)


def _layer_state(index: int, cache: ArraysCache, mixers: list[str]) -> LayerState:
    """Shapes and types of the state that the plain run left in a layer's cache, and the modules that read it."""
    if not mixers:
        raise UnsupportedModelError(
            f"layer {index} hands its recurrent state to no module: nothing can be put in between"
        )
    arrays: list[Any] = cache.cache
    if any(array is None or array.shape[0] != NUM_SEQS for array in arrays):
        raise UnsupportedModelError(f"layer {index} left a part of its recurrent state empty, or without a batch axis")
    return LayerState(tuple(tuple(a.shape[1:]) for a in arrays), tuple(a.dtype for a in arrays), tuple(mixers))


def _one_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"


def _why_it_fails(problem: Exception) -> str:
    """The reason for an exception of a model that runs on a packed batch; the common ones in plain English."""
    if isinstance(problem, AttributeError) and isinstance(problem.obj, LayerCache):
        if problem.name in ("keys", "values"):
            return _SELECTS_POSITIONS
        return f"the model uses {problem.name!r} of mlx-lm's own caches, which a paged cache does not have"
    if isinstance(problem, NotImplementedError):  # an attention backend's, or a patch's
        return str(problem)
    if "Only length-1 arrays can be converted" in str(problem):
        return "the model computes the positions of one sequence, and a packed batch has several"
    return f"the model fails ({_one_line(problem)})"


@dataclass
class _Trial:
    """Serves the model in one way and compares the logits with those of the plain run.

    Attributes:
        model: The model.
        caches: Contents of the entries of its cache argument.
        token_ids: Tokens of the sequences.
        reference: The plain model's logits.
        own_bound: Error of a typical row that rounding explains, in the model's own type.
        pool_bound: The same for a pool that rounds, beside a plain model that does too; None for one that does not.
    """

    model: nn.Module
    caches: tuple[CacheSpec, ...]
    token_ids: np.ndarray
    reference: np.ndarray
    own_bound: float
    pool_bound: float | None
    _rounded: dict[tuple[CacheSpec, ...], np.ndarray] = field(default_factory=dict)

    def run(self, way: _Way, backend: AttentionBackend, reason: str) -> PreflightResult:
        """Try one way to serve the model.

        Layers that ask for attention over latents, or pass masks, get another description, and the way is tried again.

        Raises:
            _Mismatch: The model cannot be served in this way.
        """
        original = self.caches
        while True:
            asked: list[LayerKV] = []
            if self.pool_bound is not None:
                self.reference = self._rounded_reference()
            try:
                return self._run(way, backend, reason, asked)
            except _Mismatch:
                rest = iter(asked)
                flat = [next(rest, one) if isinstance(one, LayerKV) else one for one in flat_caches(self.caches)]
                if flat == flat_caches(self.caches):
                    self.caches = original
                    raise
                self.caches = _with_layers(self.caches, flat)

    def _rounded_reference(self) -> np.ndarray:
        """The plain model's logits, with keys and values rounded as the pool stores them."""
        if self.caches not in self._rounded:
            entries = make_prompt_cache(self.model)
            layers = [
                (cache, layer)
                for cache, layer in zip(_flat(entries), flat_caches(self.caches))
                if isinstance(layer, LayerKV)
            ]
            for cache, layer in layers:
                _narrow(cache, layer.window)
                round_as_stored(cache, layer)
            logits = self.model(mx.array(self.token_ids), cache=entries)
            self._rounded[self.caches] = np.array(logits.astype(mx.float32))
            for cache, _ in layers:
                vars(cache).clear()  # it refers to itself
        return self._rounded[self.caches]

    def _run(self, way: _Way, backend: AttentionBackend, reason: str, asked: list[LayerKV]) -> PreflightResult:
        """`run` with the layers as they are described; ``asked`` gets the descriptions that the model asks for."""
        mode, mask_ndim, reads_arithmetic = way
        flat = flat_caches(self.caches)
        paths = [path for one in flat if isinstance(one, LayerState) for path in one.mixers]
        groups = [int(isinstance(one, LayerState)) for one in flat]
        patches: list[Patch | MixerPatch | LatentPatch] = [MixerPatch(self.model, paths)] if paths else []
        reader = backend if mode == "kernel" else None

        def pool(flat: Sequence[LayerKV | LayerState]) -> PagedKVCache:
            narrow = _with_layers(self.caches, [_narrowed(one) for one in flat])
            made = PagedKVCache(narrow, NUM_TRIAL_BLOCKS, BLOCK_SIZE, reader, groups, mask_ndim, reads_arithmetic)
            for layer in made.kernel_layers:
                layer.checks_masks = layer.expands_all = True
            return made

        kv_cache = pool(flat)
        if mode == "kernel":
            patches += patch_model(self.model, backend, reads_arithmetic)
        else:
            windows = [one.window for one in flat if isinstance(one, LayerKV)]
            for window, layer_cache in zip(windows, kv_cache.layers):
                _narrow(layer_cache, window)
        try:
            final_norm, errors = self._with_any_norm(kv_cache)
            control_error = float(np.median(self._step_errors(kv_cache, CONTROL_STEP, None, shift=POSITION_SHIFT)))
            expanding = _expanding(flat, kv_cache)
            if expanding != flat and len(more := self._errors_expanded(pool(expanding), final_norm)):
                flat, errors = expanding, np.concatenate([errors, more])
        finally:
            for patch in patches:
                patch.restore()
            layers = [one for one in flat if isinstance(one, LayerKV)]
            for one, layer in zip(layers, kv_cache.kernel_layers):
                latent, masked = one.latent or layer.wants_latent, one.masked or layer.wants_masks
                asked.append(replace(one, latent=latent, masked=masked))
        if not control_error > max(self.own_bound, 4 * np.median(errors)):
            raise _Mismatch(
                f"positions shifted by {POSITION_SHIFT} change the logits by {control_error:.1e}, too little to "
                "tell right from wrong"
            )
        num_heads = kv_cache.layers[0].num_heads if kv_cache.layers else 0
        caches = _with_layers(self.caches, flat)
        layers = [one for one in flat if isinstance(one, LayerKV)]
        return PreflightResult(
            mode,
            tuple(layers),
            num_heads,
            final_norm,
            float(errors.max()),
            control_error,
            reason,
            mask_ndim,
            caches if caches != tuple(layers) else (),
            reads_arithmetic,
        )

    def _errors_expanded(self, kv_cache: PagedKVCache, final_norm: str | None) -> np.ndarray:
        """Errors of the rows if the latents of every chunk are expanded; none if they are too large."""
        norm = FinalNorm(self.model, final_norm) if final_norm is not None else None
        try:
            return self._errors(kv_cache, norm)
        except _Mismatch as problem:
            log.info("latents are not expanded: %s", problem)
            return np.empty(0)
        finally:
            if norm is not None:
                norm.restore()

    def _with_any_norm(self, kv_cache: PagedKVCache) -> tuple[str | None, np.ndarray]:
        """The first norm that can select rows, or None, and the errors of the rows when it does."""
        for path in norm_candidates(self.model):
            final_norm = FinalNorm(self.model, path)
            try:
                return path, self._errors(kv_cache, final_norm)
            except _Mismatch:
                continue
            finally:
                final_norm.restore()
        return None, self._errors(kv_cache, None)

    def _errors(self, kv_cache: PagedKVCache, final_norm: FinalNorm | None) -> np.ndarray:
        """Errors of the rows of both steps.

        Raises:
            _Mismatch: They are larger than rounding explains.
        """
        errors = np.concatenate([self._step_errors(kv_cache, step, final_norm) for step in STEPS])
        typical, worst = float(np.median(errors)), float(errors.max())
        bound = max(self.own_bound, self.pool_bound or 0.0)
        if not (typical <= bound and worst <= WORST_ROW * bound):  # also true of a NaN
            raise _Mismatch(
                f"logits differ from the plain model's by {typical:.1e} of their spread, and by {worst:.1e} in one row"
            )
        return errors

    def _step_errors(
        self,
        kv_cache: PagedKVCache,
        step: Sequence[tuple[int, int, int]],
        final_norm: FinalNorm | None,
        shift: int = 0,
    ) -> np.ndarray:
        """Errors of the logits of each chunk's last row, in one packed step.

        With ``shift``, positions are shifted and no sequence gets its recurrent state.
        """
        metadata, positions, token_ids = pack_probe(step, self.token_ids)
        states = replace(metadata, seqused_k=metadata.query_lens) if shift else metadata
        shifted = positions + np.int32(shift)
        try:
            computed = packed_logits(self.model, kv_cache, metadata, shifted, token_ids, states, final_norm)
        except Exception as problem:
            raise _Mismatch(_why_it_fails(problem)) from problem
        if any(reads != 1 for reads in kv_cache.reads):
            reads = " or ".join(f"{number:g}" for number in sorted(set(kv_cache.reads)))
            raise _Mismatch(f"layers called the paged attention {reads} times, expected once each")
        expected = np.stack([self.reference[seq, start + count - 1] for seq, start, count in step])
        if computed.shape != expected.shape:
            raise _Mismatch(f"logits have shape {computed.shape}, expected {expected.shape}")
        return np.sqrt(np.square(computed - expected).mean(axis=1)) / expected.std()
