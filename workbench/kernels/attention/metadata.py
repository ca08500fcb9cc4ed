"""The description of a packed batch for attention, shared by all layers of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.kernels.attention.work_list import build_work_list

if TYPE_CHECKING:
    import mlx.core as mx


FEW_ELEMENTS = 8
"""MLX passes inputs with fewer elements to a kernel as constants, which takes another compiled variant of it."""


def filled_up(table: np.ndarray) -> np.ndarray:
    """A table [rows, columns] of at least `FEW_ELEMENTS` elements: rows of 0 are added where it has fewer."""
    rows, columns = table.shape
    missing = -(-FEW_ELEMENTS // columns) - rows
    return np.pad(table, ((0, missing), (0, 0))) if missing > 0 else table


def check_filled_up(*tables: mx.array) -> None:
    """Check that a kernel gets tables of `FEW_ELEMENTS` elements or more.

    Raises:
        RuntimeError: MLX would pass one as constants, and compile another variant of the kernel in the middle of a run.
    """
    for table in tables:
        if table.size < FEW_ELEMENTS:
            raise RuntimeError(
                f"a table has {table.size} elements, which takes another kernel; fill it up to {FEW_ELEMENTS}"
            )


def mlx_copy(attribute: str) -> cached_property[mx.array]:
    """A property with the MLX array of a NumPy attribute, made on first use."""

    def convert(owner: object) -> mx.array:
        import mlx.core as mx

        return mx.array(getattr(owner, attribute))

    return cached_property(convert)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """The sequence of each row of a packed batch, and the place of its keys and values in the cache.

    Sequence i owns the query rows ``[cu_seqlens_q[i], cu_seqlens_q[i + 1])``; they are the last tokens of its
    context of ``seqused_k[i]`` KV positions. KV position p of sequence i lies in block
    ``block_table[i, p // block_size]`` at offset ``p % block_size``.

    The arrays are not checked here but once per step, by the code that makes them:
    `workbench.kernels.attention.validate` for `paged_varlen_attention`, the engine for its own batches.

    Attributes:
        cu_seqlens_q: int32 [num_seqs + 1].
        seqused_k: int32 [num_seqs].
        block_table: int32 [num_seqs, max_blocks]; entries past a sequence's last block are never read.
        slot_mapping: int64 [T], the slot ``block * block_size + offset`` that each row's K and V are written
            to; None for a batch that writes nothing.
        block_size: Tokens per KV block.
        derived: Work lists, plans of launches and the like, made from the batch once and shared by all layers. A key
            begins with the maker.
    """

    cu_seqlens_q: np.ndarray
    seqused_k: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray | None
    block_size: int
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the batch."""
        return len(self.seqused_k)

    @property
    def num_tokens(self) -> int:
        """Number of rows of the packed batch, T."""
        return int(self.cu_seqlens_q[-1])

    @cached_property
    def query_lens(self) -> np.ndarray:
        """Number of query rows of each sequence, int32 [num_seqs]."""
        return np.diff(self.cu_seqlens_q)

    @property
    def write_slots(self) -> np.ndarray:
        """``slot_mapping`` of a batch that writes, int64 [T].

        Raises:
            ValueError: ``slot_mapping`` is None.
        """
        if self.slot_mapping is None:
            raise ValueError("slot_mapping is None: this batch has nothing to write; pass int64 [T]")
        return self.slot_mapping

    @cached_property
    def write_index(self) -> tuple[mx.array, mx.array]:
        """Block and offset of the slot that each row is written to, as MLX int32 arrays [T]."""
        import mlx.core as mx

        block, offset = np.divmod(self.write_slots, self.block_size)
        return mx.array(block.astype(np.int32)), mx.array(offset.astype(np.int32))

    @cached_property
    def used_blocks(self) -> tuple[mx.array, np.ndarray]:
        """Ids of the blocks that hold context of this batch (MLX int32), and the block table as indices into them."""
        import mlx.core as mx

        num_blocks = -(-self.seqused_k // self.block_size)
        held = np.arange(self.block_table.shape[1]) < num_blocks[:, None]
        blocks, places = np.unique(self.block_table[held], return_inverse=True)
        table = np.zeros_like(self.block_table)
        table[held] = places
        return mx.array(blocks), table

    mlx_cu_seqlens_q = mlx_copy("cu_seqlens_q")
    mlx_seqused_k = mlx_copy("seqused_k")

    @cached_property
    def mlx_block_table(self) -> mx.array:
        """``block_table`` as an MLX array of at least `FEW_ELEMENTS` elements; rows of 0 fill it up."""
        import mlx.core as mx

        return mx.array(filled_up(self.block_table))

    def work_list(self, block_q: int, window: int = -1, kv_split: int | None = None) -> np.ndarray:
        """The work list of this batch, built once per combination of arguments.

        Args:
            block_q: Maximum number of query rows in an item.
            window: The reach of rows: a left window, -1 for all, or -n for chunks of n.
            kv_split: Maximum number of KV positions in an item, None for no split.

        Returns:
            int32 [num_items, 7], see `workbench.kernels.attention.work_list.build_work_list`.
        """
        key = (build_work_list, block_q, window, kv_split)
        if key not in self.derived:
            self.derived[key] = build_work_list(
                self.cu_seqlens_q, self.seqused_k, block_q=block_q, window=window, kv_split=kv_split
            )
        return self.derived[key]
