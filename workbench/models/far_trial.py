"""Trials far from the start: at positions and lengths that a short trial never reaches, on a small copy of the model.

A rule of a model that begins at a position or at a length is invisible before it. So the plain model runs once at
length, and then behind long contexts: around every number that its code or its arguments name, at the end of its
positions, and at several lengths between. The keys and values of these contexts are random numbers, which all layers
share, so that a long context takes milliseconds. The paged ways run the same, and have to give the same logits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList, make_prompt_cache

from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.models.far_context import BLOCK_SIZE, Case, Pool, behind
from workbench.models.final_norm import FinalNorm
from workbench.models.forward import forward_rows
from workbench.models.layer_cache import LayerKV
from workbench.models.mixers import MixerPatch
from workbench.models.model_code import fingerprint, named_numbers, position_limit
from workbench.models.paged_cache import CacheSpec, PagedKVCache, flat_caches
from workbench.models.patch import patch_model
from workbench.models.small_copy import own_or_small
from workbench.models.state_cache import LayerState
from workbench.models.trial_steps import probe_tokens

if TYPE_CHECKING:
    from workbench.kernels.attention.backend import AttentionBackend
    from workbench.models.preflight_result import PreflightResult

log = logging.getLogger("workbench")

CHUNK = 3
"""Rows behind a long context that are computed at once; one more follows alone."""
LONGEST_RUN, LONGEST_GATHERED_RUN = 2049, 257
"""Tokens that the plain model is given at once: one more than mlx-lm gives it; gathered context takes their square."""
_MAX_SCORES = 5e7
"""Scores of all heads and layers that the plain model may compute at once."""
_MAX_NAMED, _NUM_BETWEEN = 24, 6
_NUM_LARGE, _LONGEST_LARGE = 3, 33
"""Lengths that are tried of a large model that cannot be copied."""
_MAX_CONTEXT_BYTES = 32 * 2**20
_FEW_ROWS = 10
"""Rounding in few rows, in units of that of a typical row of many: keys with a near tie make it larger."""

Forward = Callable[[PagedKVCache, list[AttentionMetadata], np.ndarray, np.ndarray], np.ndarray]
"""Computes a packed step: the pool, the batch as each cache sees it, positions and tokens; the logits of all rows."""

Compute = Callable[[Sequence[Case], int], list[np.ndarray]]
"""Gives the logits of cases with a seed."""


@dataclass
class FarTrial:
    """Cases of a model, for every way to serve it.

    Attributes:
        model: The small copy, or the model itself.
        caches: Contents of the entries of its cache argument.
        final_norm: Dotted name of its final norm, None if all rows are projected.
        longest: Length of the run without a context.
        contexts: Lengths of contexts.
    """

    model: nn.Module
    caches: tuple[CacheSpec, ...]
    final_norm: str | None
    mode: str
    mask_ndim: int
    reads_arithmetic: bool
    longest: int
    contexts: tuple[int, ...]
    _made: dict[int, list[Case]] = field(default_factory=dict)
    _found: WeakKeyDictionary[AttentionBackend, dict[str, str]] = field(default_factory=WeakKeyDictionary)

    def cases(self, seed: int) -> list[Case]:
        """The cases with the tokens and contexts of a seed."""
        if seed not in self._made:
            generator = np.random.default_rng(seed)
            high = int(probe_tokens(self.model).max()) + 1
            made = []
            for context, count in ((0, self.longest), *((context, CHUNK + 1) for context in self.contexts)):
                token_ids = generator.integers(1, max(2, high), count, dtype=np.int32)
                try:
                    expected = self._plain(context, token_ids, seed)
                except Exception as problem:  # nothing to compare with
                    log.debug("the plain model does not run behind %d tokens: %r", context, problem)
                    continue
                made.append(Case(context, token_ids, expected))
            self._made[seed] = made
        return self._made[seed]

    def _plain(self, context: int, token_ids: np.ndarray, seed: int) -> np.ndarray:
        """The plain model's logits, of a run or behind a context."""
        tokens = mx.array(token_ids)[None]
        if not context:
            return self._logits([tokens], make_prompt_cache(self.model))
        return self._logits([tokens[:, :-1], tokens[:, -1:]], self._behind(context, seed))

    def _behind(self, context: int, seed: int) -> list[Any]:
        specs, shared = iter(flat_caches(self.caches)), dict[LayerKV, tuple[mx.array, mx.array]]()
        return [behind(entry, specs, context, seed, shared) for entry in make_prompt_cache(self.model)]

    def _logits(self, parts: Sequence[mx.array], entries: list[Any]) -> np.ndarray:
        """Logits of tokens that the plain model is given in parts."""
        logits = [self.model(part, cache=entries) for part in parts]
        return np.array(mx.concatenate(logits, axis=1)[0].astype(mx.float32))

    def difference(
        self, backend: AttentionBackend, bound: float, way: str = "by layer", forward: Forward | None = None
    ) -> str:
        """The difference between a way and the plain model, and its place; empty if rounding explains it.

        Args:
            backend: Attention over the pool.
            bound: Largest error of a row that rounding explains, relative to the spread of the logits.
            way: Name of the way: what is found is remembered.
            forward: Computes packed steps; None for the model's own layers.
        """
        found = self._found.setdefault(backend, {})
        if way not in found:
            compute = self.by_layer(backend) if forward is None else self.through(backend, forward)
            found[way] = self._difference(compute, bound)
        return found[way]

    def _difference(self, compute: Compute, bound: float) -> str:
        """See `difference`.

        A mixture of experts chooses others at a near tie, so one row of a case may differ, and a case is tried again
        with other tokens.
        """
        failed: list[int] = []
        for seed in (0, 1, 2):
            cases = self.cases(seed)
            tried = failed or list(range(len(cases)))
            computed = compute([cases[index] for index in tried], seed)
            errors = {index: _error(logits, cases[index]) for index, logits in zip(tried, computed)}
            allowed = {index: bound * (_FEW_ROWS if cases[index].context else 1) for index in errors}
            failed = [index for index, error in errors.items() if not error <= allowed[index]]
            if not failed:
                return ""
        first = failed[0]
        return f"logits {cases[first].place} differ from the plain model's by {errors[first]:.1e} of their spread"

    def by_layer(self, backend: AttentionBackend) -> Compute:
        """Computes cases by the model's own layers over a pool."""

        def compute(cases: Sequence[Case], seed: int) -> list[np.ndarray]:
            patches: list[Any] = []
            if self.mode == "kernel":
                patches += patch_model(self.model, backend, self.reads_arithmetic)
            paths = [path for one in flat_caches(self.caches) if isinstance(one, LayerState) for path in one.mixers]
            patches += [MixerPatch(self.model, paths)] if paths else []
            norm = FinalNorm(self.model, self.final_norm) if self.final_norm is not None else None
            try:
                return self.through(backend, functools.partial(_forward, self.model, norm))(cases, seed)
            finally:
                for patch in [*patches, *([norm] if norm is not None else [])]:
                    patch.restore()

        return compute

    def through(self, backend: AttentionBackend, forward: Forward) -> Compute:
        """Computes cases by a way through packed steps."""

        def compute(cases: Sequence[Case], seed: int) -> list[np.ndarray]:
            batches = self._batches(cases)
            return [logits for batch in batches for logits in _run(self, batch, seed, backend, forward)]

        return compute

    def num_heads(self, backend: AttentionBackend) -> int:
        """Number of query heads, in mode "kernel"."""
        seen: list[int] = []

        def forward(kv_cache: PagedKVCache, *step: Any) -> np.ndarray:
            logits = _forward(self.model, None, kv_cache, *step)
            seen.append(kv_cache.layers[0].num_heads)
            return logits

        patches = patch_model(self.model, backend, self.reads_arithmetic)
        try:
            _run(self, [Case(0, np.ones(2, np.int32), np.empty(0))], 0, backend, forward)
        finally:
            for patch in patches:
                patch.restore()
        return seen[0]

    def _batches(self, cases: Sequence[Case]) -> Iterator[list[Case]]:
        """Cases that run together: all with a kernel, one far and one near with gathered context."""
        alone, behind = [case for case in cases if not case.context], [case for case in cases if case.context]
        yield from ([case] for case in alone)
        if self.mode == "kernel":
            yield from [behind] if behind else []
        else:
            yield from ([case] for case in behind)


def far_trial(model: nn.Module, result: PreflightResult) -> FarTrial:
    """The far trial of a model.

    Args:
        model: The model. One that is large and cannot be built again runs little.
        result: The way to serve it that a short trial has found.
    """
    flags = [(one.latent, one.masked, one.expanded) for one in result.layers]
    key = fingerprint(model), result.mode, result.mask_ndim, result.reads_arithmetic, result.final_norm, tuple(flags)
    if key in _MADE:
        return _MADE[key]
    copy = own_or_small(model)
    made = _made(model if copy is None else copy, result, copy is None)
    if copy is not None and copy is not model:  # findings about a model itself hold for its weights
        while len(_MADE) >= _MAX_MADE:
            del _MADE[next(iter(_MADE))]
        _MADE[key] = made
    return made


_MADE: dict[Any, FarTrial] = {}
_MAX_MADE = 16


def _made(model: nn.Module, result: PreflightResult, is_large: bool) -> FarTrial:
    entries = make_prompt_cache(model)
    mx.eval(model(mx.array(probe_tokens(model)[:1]), cache=entries))
    flat = [one for entry in entries for one in (entry.caches if isinstance(entry, CacheList) else (entry,))]
    specs = iter([_spec(one, spec) for one, spec in zip(flat, flat_caches(result.caches), strict=True)])
    caches = tuple(
        tuple(next(specs) for _ in entry.caches) if isinstance(entry, CacheList) else next(specs) for entry in entries
    )
    layers = [one for one in flat_caches(caches) if isinstance(one, LayerKV)]
    limit = position_limit(model)
    num_maps = sum(2 * layer.num_kv_heads for layer in layers) or 1
    run = LONGEST_RUN if result.mode == "kernel" and not result.states else LONGEST_GATHERED_RUN
    longest = min(limit, run, int((_MAX_SCORES / num_maps) ** 0.5), _LONGEST_LARGE if is_large else run)
    token_bytes = max((layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim) * 4 for layer in layers), default=1)
    end = min(limit, _MAX_CONTEXT_BYTES // token_bytes) - CHUNK - 1
    # Behind a context, a mask that is wider than its cache (PLaMo 3) sees less than in one pass over the same tokens.
    is_judged = layers and not any(layer.mask_excess for layer in layers)
    contexts = _contexts(model, end, _NUM_LARGE if is_large else _MAX_NAMED) if is_judged else ()
    parts = (model, caches, result.final_norm, result.mode, result.mask_ndim, result.reads_arithmetic)
    return FarTrial(*parts, longest, contexts)


def _contexts(model: nn.Module, end: int, num_named: int) -> tuple[int, ...]:
    """Lengths of contexts: ends of the positions, lengths between, and those from which rows cross a named number."""
    if end <= 9:
        return ()
    between = np.geomspace(9, end, min(num_named, _NUM_BETWEEN)).astype(int).tolist()
    named = [number - 2 for number in named_numbers(model) if 9 <= number - 2 < end]
    return tuple(sorted({*between, end, *named[-num_named:]}))


def _spec(cache: Any, spec: LayerKV | LayerState) -> LayerKV | LayerState:
    """The contents of a cache of the copy."""
    if isinstance(spec, LayerState):
        return LayerState(
            tuple(tuple(a.shape[1:]) for a in cache.cache), tuple(a.dtype for a in cache.cache), spec.mixers
        )
    sizes = cache.keys.shape[1], cache.keys.shape[-1], cache.values.shape[-1]
    sizes_of = dict(zip(("num_kv_heads", "k_head_dim", "v_head_dim"), sizes))
    return replace(spec, **sizes_of, dtype=cache.keys.dtype)


def _run(
    trial: FarTrial, cases: Sequence[Case], seed: int, backend: AttentionBackend, forward: Forward
) -> list[np.ndarray]:
    """The logits of cases in packed steps: all but the last row of each behind its context, then the last rows."""
    flat = flat_caches(trial.caches)
    pool_of = Pool(flat, cases, seed)
    kv_cache = PagedKVCache(
        trial.caches,
        pool_of.num_blocks,
        BLOCK_SIZE,
        backend if trial.mode == "kernel" else None,
        list(range(len(flat))),
        trial.mask_ndim,
        trial.reads_arithmetic,
    )
    for layer in kv_cache.kernel_layers:
        layer.checks_masks = layer.expands_all = True
    pool_of.fill(kv_cache)
    has_states = any(isinstance(one, LayerState) for one in flat)
    if has_states or not any(case.context for case in cases):
        return _split(forward(kv_cache, *pool_of.step(0, [len(case.token_ids) for case in cases])), cases)
    first = forward(kv_cache, *pool_of.step(0, [len(case.token_ids) - 1 for case in cases]))
    last = forward(kv_cache, *pool_of.step(-1, [1] * len(cases)))
    sizes = [len(case.token_ids) - 1 for case in cases]
    return [np.concatenate([a, b[None]]) for a, b in zip(np.split(first, np.cumsum(sizes)[:-1]), last)]


def _split(logits: np.ndarray, cases: Sequence[Case]) -> list[np.ndarray]:
    return np.split(logits, np.cumsum([len(case.token_ids) for case in cases])[:-1])


def _forward(
    model: nn.Module,
    final_norm: FinalNorm | None,
    kv_cache: PagedKVCache,
    metadata: list[AttentionMetadata],
    positions: np.ndarray,
    token_ids: np.ndarray,
) -> np.ndarray:
    """A packed step by the model's own layers."""
    names = list(range(metadata[0].num_seqs))
    kv_cache.begin_step(positions, *metadata, names=names)
    try:
        logits = forward_rows(model, token_ids, kv_cache, np.arange(len(token_ids)), final_norm)
        mx.eval(logits, kv_cache.arrays)
        kv_cache.check_reads()
    finally:
        kv_cache.end_step()
    return np.array(logits)


def _error(logits: np.ndarray, case: Case) -> float:
    """Error of the second worst row of a few, or of a typical one of many, relative to the spread of the logits."""
    if logits.shape != case.expected.shape:
        return float("inf")
    errors = np.sort(np.sqrt(np.square(logits - case.expected).mean(axis=1))) / (case.expected.std() or 1.0)
    error = float(errors[-2] if case.context else np.median(errors))
    return error if np.isfinite(error) else float("inf")
