"""Choose an attention backend: by name, and for a model after a test on this machine."""

from __future__ import annotations

import importlib
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from workbench.base.device import runs_on_gpu
from workbench.base.field_checks import suggestion
from workbench.config import BACKEND_NAMES

if TYPE_CHECKING:
    from workbench.kernels.attention.backend import AttentionBackend
    from workbench.kernels.attention.probe import Probe

log = logging.getLogger("workbench")

_HOMES = {
    "metal": ("workbench.kernels.attention.metal.backend", "MetalBackend"),
    "cuda": ("workbench.kernels.attention.metal.backend", "CudaBackend"),
    "cpu": ("workbench.kernels.attention.cpu_backend", "CpuBackend"),
    "gather": ("workbench.kernels.attention.gather", "GatherBackend"),
    "dense": ("workbench.kernels.attention.dense", "DenseBackend"),
    "msl": ("workbench.kernels.attention.metal.backend", "MslBackend"),
}

FALLBACK: Final = "gather"
"""The backend that needs nothing but MLX operations."""

SELF_TESTED = ("metal", "cuda")
"""Backends whose compiler and hardware this project's own tests may never have met."""

SELF_TEST_SEQUENCES = {
    "whole contexts": ((1, 33), (5, 5)),
    "split contexts": ((1, 700), (40, 400), (1, 33), (5, 5)),
    "long contexts": ((1, 9000), (5, 4100), (1, 33)),
}
"""Without and with contexts that are split over KV: together they need every kernel that a model can need. Windows are
tried by the preflight."""


_PASSED: WeakKeyDictionary[AttentionBackend, dict[tuple, Selection]] = WeakKeyDictionary()
"""Self-tests that passed in this process, by backend and by the shapes of a model."""


def resolve_backend_name(name: str) -> str:
    """The backend that "auto" stands for on this machine; other names are returned as they are.

    Raises:
        ValueError: ``name`` is not one of ``BACKEND_NAMES``.
    """
    if name not in BACKEND_NAMES:
        hint = suggestion(name, BACKEND_NAMES)
        raise ValueError(f"attention backend is {name!r}; it must be one of {', '.join(BACKEND_NAMES)}{hint}")
    if name != "auto":
        return name
    if not runs_on_gpu():
        return "cpu"
    import mlx.core as mx

    return "metal" if mx.metal.is_available() else "cuda"


def why_unavailable(name: str) -> str:
    """Why the backend of that name cannot run on this machine; empty when it can."""
    import mlx.core as mx

    if name == "metal" and not mx.metal.is_available():
        return "it needs an Apple GPU"
    if name == "cuda" and not mx.cuda.is_available():
        return "it needs an NVIDIA GPU and mlx[cuda13]"
    return ""


def get_backend(name: str = "auto") -> AttentionBackend:
    """The attention backend of that name. Backends hold no state, so every caller gets the same object.

    Raises:
        ValueError: ``name`` is not one of ``BACKEND_NAMES``.
        RuntimeError: The backend cannot run on this machine.
    """
    name = resolve_backend_name(name)
    if reason := why_unavailable(name):
        others = ", ".join(other for other in _HOMES if not why_unavailable(other))
        raise RuntimeError(f"attention backend {name!r} is not available here: {reason}; use one of auto, {others}")
    return _load(name)


@cache
def _load(name: str) -> AttentionBackend:
    module, class_name = _HOMES[name]
    return getattr(importlib.import_module(module), class_name)()


@dataclass(frozen=True)
class Selection:
    """A backend and why it was chosen.

    Attributes:
        backend: The backend to use.
        fallback_reason: Why it is not the backend that "auto" would take; empty when it is.
        self_test_error: Largest error against float64 relative to the largest element, None without a self-test.
        self_test_seconds: Duration of the self-test, compilation included.
    """

    backend: AttentionBackend
    fallback_reason: str = ""
    self_test_error: float | None = None
    self_test_seconds: float = 0.0


def select_backend(
    name: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    value_dim: int = 0,
    latent: bool = False,
) -> Selection:
    """The backend of that name for a model's layers, self-tested when it runs on a GPU.

    With "auto", a kernel that has no variant for the model or fails its self-test gives way to gather, and the
    selection says why. A backend that was requested by name is never replaced.

    Args:
        name: One of `workbench.kernels.attention.BACKEND_NAMES`.
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads.
        head_dim: Elements per head.
        block_size: Tokens per KV block.
        dtype: Element type of the KV cache, such as "float16".
        value_dim: Elements of a value per head, 0 for as many as a key has.
        latent: Whether a value is the first ``value_dim`` elements of its key.

    Raises:
        ValueError: ``name`` is unknown, or the named backend has no variant for the model.
        RuntimeError: The named backend cannot run here or fails its self-test.
    """
    backend = get_backend(name)
    sizes = (head_dim, block_size, dtype) if value_dim in (0, head_dim) else (head_dim, block_size, dtype, value_dim)
    if backend.name not in SELF_TESTED:
        backend.check_supported(*sizes)
        return Selection(backend)

    from workbench.kernels.attention.probe import ERROR_LIMIT, Probe

    variant = (num_heads, num_kv_heads, head_dim, block_size, dtype)
    passes = _PASSED.setdefault(backend, {})
    if (*variant, value_dim, latent) in passes:
        return passes[*variant, value_dim, latent]
    started = time.perf_counter()
    error = None
    try:
        backend.check_supported(*sizes)
        with _progress(f"compiling and checking the {backend.name} attention kernel (head_dim {head_dim}, {dtype})"):
            error = max(
                self_test(backend, Probe(test, sequences, *variant, value_dim=value_dim, latent=latent))
                for test, sequences in SELF_TEST_SEQUENCES.items()
            )
        problem: Exception = RuntimeError(
            f"the {backend.name} kernel differs from float64 by {error:.1e} of the largest element (allowed: "
            f"{ERROR_LIMIT[dtype]:.0e}); run `workbench kernel check` and report what it prints"
        )
        passed = error <= ERROR_LIMIT[dtype]
    except (ValueError, RuntimeError) as raised:
        problem, passed = raised, False
    seconds = time.perf_counter() - started
    if passed:
        selection = Selection(backend, self_test_error=error, self_test_seconds=seconds)
        passes[*variant, value_dim, latent] = selection
        return selection
    if name != "auto":
        raise problem
    reason = " ".join(str(problem).split())
    log.warning("attention falls back from %s to %s: %s", resolve_backend_name(name), FALLBACK, reason)
    return Selection(get_backend(FALLBACK), reason, error, seconds)


def self_test(backend: AttentionBackend, probe: Probe) -> float:
    """Largest difference between a backend and float64 on a probe, relative to the largest element; inf for NaN.

    Not between two backends of the GPU: MLX's own attention multiplies float32 in TF32 on some of them, and a kernel
    that is exact would stand accused.
    """
    from workbench.kernels.attention.probe import float64_attention, probe_batch, relative_error

    batch = probe_batch(probe)
    error = relative_error(batch.run(backend), float64_attention(batch))
    return math.inf if math.isnan(error) else error


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Say on standard error what takes long, and how long it took."""
    print(f"{what} ... ", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        yield
    finally:
        print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
