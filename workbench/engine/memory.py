"""Memory for weights, KV cache and activations: how much there is, and MLX's limits.

An Apple GPU shares the memory of the machine. Metal recommends a working set for it, beyond which the system pages; a
model that fits into memory and not into the working set is slow without a reason that anybody can see. So sizes are
checked against the working set, as mlx-lm does.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from workbench.base.device import runs_on_gpu
from workbench.scheduler.admission import most_blocks

if TYPE_CHECKING:
    from workbench.config import EngineConfig

log = logging.getLogger("workbench")

MAX_CACHE_BYTES = 2 * 2**30
"""Maximum size of MLX's cache of freed buffers. Its own limit is nearly all memory. Every number of tokens in a step
has buffers of another size, so the cache of a server would grow to it."""

CPU_CACHE_BYTES = 2**18
"""Maximum size of that cache on a machine without a GPU: small buffers are used again, and large ones, such as logits,
go back to the C library, which gives their memory to the arrays of the next step, NumPy's too."""

AUTO_SHARE_GPU = 0.6
AUTO_SHARE_CPU = 0.2
"""Share of the free memory that ``num_blocks="auto"`` takes for the KV cache. On a CPU the machine has other work."""

_OUT_OF_MEMORY = re.compile(r"malloc|allocat|out of memory|insufficient memory", re.IGNORECASE)


def usable_memory() -> int:
    """Bytes that MLX can use: Metal's recommended working set on an Apple GPU, else the memory of the machine."""
    info: dict[str, Any] = mx.device_info()
    for name in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if isinstance(size := info.get(name), int) and size > 0:
            return size
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # Pythons that were built for an old macOS do not know the first
        info = mx.device_info(mx.gpu)
        return int(info.get("memory_size", 8 * 2**30))


def limit_memory() -> dict[str, int]:
    """Set MLX's limits for this process: the cache limit, and on an Apple GPU the wired limit, as mlx-lm does.

    Returns:
        The limits that were set, in bytes by name; none on other GPUs, or if a Mac computes on its CPU.
    """
    if not runs_on_gpu() and not mx.metal.is_available():
        mx.set_cache_limit(CPU_CACHE_BYTES)
        return {"cache_limit": CPU_CACHE_BYTES}
    if not (runs_on_gpu() and mx.metal.is_available()):
        return {}
    working_set = usable_memory()
    limits = {"wired_limit": working_set, "cache_limit": min(MAX_CACHE_BYTES, working_set // 8)}
    mx.set_wired_limit(limits["wired_limit"])
    mx.set_cache_limit(limits["cache_limit"])
    return limits


def choose_num_blocks(config: EngineConfig, block_bytes: int) -> int:
    """The number of KV blocks that ``num_blocks="auto"`` stands for, when the weights have been loaded.

    A share of the free memory, and no more blocks than ``max_num_seqs`` sequences of ``max_model_len`` tokens can fill.

    Args:
        config: The configuration.
        block_bytes: Bytes of one block over all layers.

    Raises:
        ValueError: There is no room for two blocks.
    """
    memory, taken = usable_memory(), mx.get_active_memory()
    share, on_gpu = config.gpu_memory_utilization, runs_on_gpu()
    free = max(0, memory - taken)
    if share is not None and on_gpu:
        room = int(share * memory) - taken
    else:
        room = int((share or (AUTO_SHARE_GPU if on_gpu else AUTO_SHARE_CPU)) * free)
    fitting = room // max(1, block_bytes)  # blocks that stand for recurrent states alone have no bytes
    if fitting < 2:
        name = "num_blocks='auto'" if share is None else f"gpu_memory_utilization={share:g}"
        raise ValueError(
            f"{name} takes {max(0, room) / 2**30:.2f} of the free {free / 2**30:.2f} GiB, less than two blocks of "
            f"{block_bytes / 2**20:.2f} MiB: raise gpu_memory_utilization, lower block_size={config.block_size}, or "
            "load a smaller model"
        )
    if config.max_model_len is None:
        return fitting
    in_flight = config.max_num_batched_tokens * (2 if config.async_scheduling else 1)
    return min(fitting, 1 + config.max_num_seqs * most_blocks(config.cache_groups, config.max_model_len, in_flight))


def with_room_for_states(config: EngineConfig, block_bytes: int, state_bytes: int, page_bytes: int) -> EngineConfig:
    """A configuration whose pool fits, with the number of blocks that "auto" stands for.

    With prefix caching every block of the pool may stand for a state. If there is no room for that many, states are not
    cached, which the log says.

    Args:
        config: The configuration.
        block_bytes: Bytes of keys and values of one block over all layers.
        state_bytes: Bytes of the recurrent states of a request; 0 without.
        page_bytes: Bytes of the states that one block stands for: those of one KV cache group.

    Raises:
        ValueError: It does not fit.
    """
    cached = page_bytes if config.enable_prefix_caching else 0
    if config.num_blocks == "auto":
        blocks = choose_num_blocks(config, block_bytes + cached)
        config = config.replace(num_blocks=blocks, gpu_memory_utilization=None)
    memory, num_blocks = usable_memory(), config.num_pool_blocks
    taken = mx.get_active_memory() if runs_on_gpu() else 0
    taken += config.max_num_seqs * (1 + config.num_speculative_tokens) * state_bytes
    if cached and num_blocks * (block_bytes + cached) > memory - taken:
        log.warning(
            "enable_prefix_caching becomes False: the recurrent states of num_blocks=%d would take up to %.1f GiB "
            "(%.2f MiB each); lower num_blocks, or raise block_size=%d",
            *(num_blocks, num_blocks * cached / 2**30, cached / 2**20, config.block_size),
        )
        config = config.replace(enable_prefix_caching=False)
    check_pool_fits(num_blocks, block_bytes, memory, taken)
    return config


def check_pool_fits(num_blocks: int, block_bytes: int, memory: int, weights: int = 0) -> None:
    """Reject a pool that is larger than memory, before the attempt to allocate it ends the process.

    Args:
        num_blocks: Blocks in the pool.
        block_bytes: Bytes of one block over all layers.
        memory: `usable_memory`.
        weights: Bytes of it that are taken already, by the model and by recurrent states.

    Raises:
        ValueError: It does not fit; the message gives the largest number of blocks that does.
    """
    if num_blocks * block_bytes > memory - weights:
        taken = f", of which {weights / 2**30:.1f} GiB hold the model" if weights else ""
        raise ValueError(
            f"num_blocks={num_blocks} needs {num_blocks * block_bytes / 2**30:.1f} GiB of KV cache "
            f"({block_bytes / 2**20:.2f} MiB per block), this machine has {memory / 2**30:.1f} GiB{taken}: "
            f"use at most {max(0, memory - weights) // max(1, 2 * block_bytes)} blocks"
        )


def explained(problem: Exception, config: EngineConfig, num_tokens: int) -> Exception:
    """An error of MLX's allocator with what to do about it; every other exception as it is.

    Args:
        problem: The exception that a forward pass raised.
        config: The configuration.
        num_tokens: Rows of the batch.
    """
    if not isinstance(problem, RuntimeError) or not _OUT_OF_MEMORY.search(str(problem)):
        return problem
    return MemoryError(
        f"no memory for a step of {num_tokens} tokens ({problem}): lower "
        f"max_num_batched_tokens={config.max_num_batched_tokens} or num_blocks={config.num_blocks}"
    )
