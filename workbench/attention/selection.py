"""Choosing an attention backend for a model, after trying it on this very machine."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from workbench.attention.backend import AttentionBackend, get_backend, resolve_backend_name
from workbench.attention.metal.backend import MetalSourceBackend
from workbench.attention.probe import ERROR_LIMIT, Probe, probe_batch, relative_error, to_float64

log = logging.getLogger("workbench")

FALLBACK = "gather"
"""The backend that needs nothing but MLX operations."""

SELF_TESTED = ("metal", "cuda")
"""Backends whose compiler and hardware this project's own tests may never have met."""

SELF_TEST_SEQUENCES = ((1, 700), (40, 400), (1, 33), (5, 5))
"""A decode and a chunk that are split, a decode that is not and a short prompt."""


@dataclass(frozen=True)
class Selection:
    """The backend that was chosen and why.

    Attributes:
        backend: The backend to use.
        fallback_reason: Why it is not the one "auto" would take; empty when it is.
        self_test_error: Largest error against gather relative to the largest element, None without a self-test.
        self_test_seconds: How long the self-test took, compiling included.
    """

    backend: AttentionBackend
    fallback_reason: str = ""
    self_test_error: float | None = None
    self_test_seconds: float = 0.0


def select_backend(
    name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> Selection:
    """The backend of that name for a model's layers, self-tested when it runs on a GPU.

    With "auto", a kernel that has no variant for the model or fails its self-test gives way to gather, and the
    selection says why. A backend that was asked for by name is never replaced.

    Args:
        name: One of `workbench.attention.BACKEND_NAMES`.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Elements per head.
        block_size: Tokens per KV block.
        dtype: Element type of the KV cache, such as "float16".

    Raises:
        ValueError: ``name`` is unknown, or the named backend has no variant for the model.
        RuntimeError: The named backend cannot run here or fails its self-test.
    """
    backend = get_backend(name)
    if not isinstance(backend, MetalSourceBackend):
        return Selection(backend)
    probe = Probe("self-test", SELF_TEST_SEQUENCES, num_heads, num_kv_heads, head_dim, block_size, dtype)
    started = time.perf_counter()
    error = None
    try:
        backend.check_supported(head_dim, block_size, dtype)
        if backend.name not in SELF_TESTED:
            return Selection(backend)
        error = self_test(backend, probe)
        problem: Exception = RuntimeError(
            f"the {backend.name} kernel differs from gather by {error:.1e} of the largest element (allowed: "
            f"{ERROR_LIMIT[dtype]:.0e}); run `workbench kernel check` and report what it prints"
        )
        passed = error <= ERROR_LIMIT[dtype]
    except (ValueError, RuntimeError) as raised:
        problem, passed = raised, False
    seconds = time.perf_counter() - started
    if passed:
        return Selection(backend, self_test_error=error, self_test_seconds=seconds)
    if name != "auto":
        raise problem
    reason = " ".join(str(problem).split())
    log.warning("attention falls back from %s to %s: %s", resolve_backend_name(name), FALLBACK, reason)
    return Selection(get_backend(FALLBACK), reason, error, seconds)


def self_test(backend: AttentionBackend, probe: Probe) -> float:
    """Largest difference between a backend and gather on a probe, relative to the largest element."""
    batch = probe_batch(probe)
    return relative_error(batch.run(backend), to_float64(batch.run(get_backend(FALLBACK))))
