"""The interface of every attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.kernels.attention.stored import to_stored
from workbench.trace.records import KernelLaunch, WorkItem

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    from workbench.kernels.attention.metadata import AttentionMetadata
    from workbench.kernels.attention.metal.launch import PagedVarlenKernels
    from workbench.kernels.attention.options import AttentionOptions

WHOLE = 2**31 - 1
"""In a tile shape: all rows, or all KV positions, of a sequence at once."""


class AttentionBackend(ABC):
    """Paged varlen attention over one layer's KV cache.

    All backends are causal: a row sees the positions of its sequence up to its own, or the last of them that the
    layer's window reaches (`AttentionOptions`).

    K and V of a batch are written before any row is read, so a row may read what a batch mate has written.

    Attributes:
        name: The backend's name in `workbench.kernels.attention.BACKEND_NAMES`.
    """

    name: str

    @property
    def replayable_kernels(self) -> PagedVarlenKernels | None:
        """The kernels, if all they do is to add operations to MLX's graph, so that a step's graph can be replayed."""
        return None

    def check_supported(self, head_dim: int, block_size: int, dtype: str, value_dim: int = 0) -> None:
        """Raise ValueError, with what to do, when the backend has no variant for a model. The default takes all.

        Args:
            head_dim: Elements per head.
            block_size: Tokens per KV block.
            dtype: Element type of the KV cache, such as "float16".
            value_dim: Elements of a value per head, given if they are not as many as those of a key.
        """
        return None

    def write(
        self, k: mx.array, v: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata
    ) -> None:
        """Write the batch's keys and values to their slots, in place.

        The objects ``k_cache`` and ``v_cache`` hold the new data afterwards. MLX writes in place only while no other
        array shares the buffer: keep no reshaped or sliced view of a cache alive, and never hand a cache to
        ``mx.async_eval``. Otherwise every write copies the whole cache.

        Args:
            k: Keys, [T, num_kv_heads, head_dim]; stored as `workbench.kernels.attention.stored` says.
            v: Values, [T, num_kv_heads, value_dim]; not read in latent attention.
            k_cache: Cached keys, [num_blocks, block_size, num_kv_heads, stored_dim].
            v_cache: Cached values, likewise; in latent attention, the same object as ``k_cache``.
            metadata: The batch, with a ``slot_mapping``.
        """
        index = metadata.write_index
        k_cache[index] = to_stored(k, k_cache.dtype)
        if v_cache is not k_cache:
            v_cache[index] = to_stored(v, v_cache.dtype)

    @abstractmethod
    def attend(
        self, q: mx.array, k_cache: mx.array, v_cache: mx.array, metadata: AttentionMetadata, options: AttentionOptions
    ) -> mx.array:
        """Attention of every packed row over its own context, from caches that are already filled.

        Args:
            q: Queries, [T, num_heads, head_dim].
            k_cache: Cached keys, [num_blocks, block_size, num_kv_heads, stored_dim].
            v_cache: Cached values, likewise; in latent attention, the same object as ``k_cache``.
            metadata: The batch.
            options: Scale, window, soft cap, sinks and sizes of the layer.

        Returns:
            [T, num_heads, value_dim] in q's dtype.
        """

    def wait_for(self, *arrays: mx.array) -> None:
        """Wait for arrays that `write` and `attend` would wait for one after another. The default waits for none."""
        return None

    def in_shares(
        self, first: int, end: int, compute: Callable[[int, int], tuple[mx.array, mx.array]]
    ) -> list[tuple[int, int, tuple[mx.array, mx.array]]]:
        """Compute a pair of arrays for each share of some heads, at the same time if the backend has threads for it.

        Args:
            first: First head.
            end: End of the heads.
            compute: Is given the first head of a share and its end. Its inputs have been waited for (`wait_for`).

        Returns:
            The shares in order, with their arrays.
        """
        return [(first, end, compute(first, end))]

    def write_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        k_cache: mx.array,
        v_cache: mx.array,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> mx.array:
        """``write`` and then ``attend``, as a layer of a model does."""
        self.wait_for(q, k, v)
        self.write(k, v, k_cache, v_cache, metadata)
        return self.attend(q, k_cache, v_cache, metadata, options)

    def describe(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        windows: tuple[int, ...] = (-1,),
        value_dim: int = 0,
    ) -> KernelLaunch:
        """The launch of a step's layers, for the record of the step.

        Args:
            metadata: The batch.
            num_heads: Number of query heads.
            num_kv_heads: Number of KV heads.
            head_dim: Elements per head.
            dtype: Element type of q and of the cache, such as "float32".
            windows: The reach of rows in each layer: a left window as in flash-attn, -1 for all, -n for chunks of n;
                one entry when all layers agree.
            value_dim: Elements of a value per head, 0 for as many as a key has.
        """
        sizes = num_heads, num_kv_heads, head_dim, value_dim or head_dim
        items, tile, details = self._plan(metadata, sizes, dtype, windows[0])
        block_q, block_kv = tile
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
            **details,
        )

    def _plan(
        self, metadata: AttentionMetadata, sizes: tuple[int, int, int, int], dtype: str, window: int
    ) -> tuple[np.ndarray, tuple[int, int], dict[str, Any]]:
        """The work list of a launch, its `tile_shape`, and the other fields of its `KernelLaunch`."""
        *heads, value_dim = sizes
        tile = self.tile_shape(*heads) if value_dim == heads[2] else self.tile_shape(*sizes)
        return metadata.work_list(tile[0], window), tile, {}

    def tile_shape(self, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int = 0) -> tuple[int, int]:
        """Query rows per work item and KV positions per inner tile; WHOLE, the default, when sequences are not cut.

        ``value_dim`` is given for layers whose values have another size than keys.
        """
        return WHOLE, WHOLE
