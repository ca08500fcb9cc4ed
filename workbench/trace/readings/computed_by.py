"""The kernel that computed a step's attention, in plain words."""

from __future__ import annotations

from workbench.base.text import counted
from workbench.trace.records import KernelLaunch

KERNELS = {
    "metal": "Metal kernel",
    "cuda": "CUDA kernel",
    "cpu": "CPU kernel",
    "msl": "Metal kernel on the emulator",
    "gather": "MLX operations over gathered context",
    "dense": "MLX's attention under one mask",
    "model": "the model's own attention",
}
"""Words for each attention backend."""


def kernel_words(backend: str, forward: str = "") -> str:
    """Words for an attention backend and a way through the model, such as "Metal kernel, layer by layer".

    Args:
        backend: Name of the backend.
        forward: Name of the way, as a launch's ``details`` have it; "" if it is not known.
    """
    if (backend, forward) == ("cpu", "compiled"):
        return "compiled code on the CPU"
    return ", ".join(filter(None, (KERNELS.get(backend, f"{backend} attention"), forward)))


def computed_by(launch: KernelLaunch) -> str:
    """Words for the kernel that a step was computed with."""
    return kernel_words(launch.backend, str(launch.details.get("forward", "")))


def expanded_words(launch: KernelLaunch) -> str:
    """Words for the rows whose latents were expanded, such as "latents expanded for 64 rows of 1 chunk"; "" if none."""
    rows, chunks = launch.details.get("expanded_rows", 0), launch.details.get("expanded_sequences", 0)
    return f"latents expanded for {counted(rows, 'row')} of {counted(chunks, 'chunk')}" if rows else ""
