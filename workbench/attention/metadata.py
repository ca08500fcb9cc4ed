"""What attention is told about a packed batch, shared by all layers of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from workbench.attention.work_list import build_work_list

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the rows of a packed batch belong and where their keys and values lie.

    Sequence i owns the query rows ``[cu_seqlens_q[i], cu_seqlens_q[i + 1])``; they are the last tokens of its
    context of ``seqused_k[i]`` KV positions. KV position p of sequence i lies in block
    ``block_table[i, p // block_size]`` at offset ``p % block_size``.

    Nothing is checked here: whoever makes the arrays validates them once per step
    (`workbench.attention.validate.validate_metadata`), not once per layer.

    Attributes:
        cu_seqlens_q: int32 [num_seqs + 1].
        seqused_k: int32 [num_seqs].
        block_table: int32 [num_seqs, max_blocks]; entries past a sequence's last block are never read.
        slot_mapping: int64 [T], the slot ``block * block_size + offset`` that each row's K and V are written
            to; None when nothing is to be written.
        block_size: Tokens per KV block.
    """

    cu_seqlens_q: np.ndarray
    seqused_k: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray | None
    block_size: int
    _work_lists: dict[tuple[int, int, int | None], np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.seqused_k)

    @property
    def num_tokens(self) -> int:
        """Rows of the packed batch, T."""
        return int(self.cu_seqlens_q[-1])

    @cached_property
    def query_lens(self) -> np.ndarray:
        """Query rows of each sequence, int32 [num_seqs]."""
        return np.diff(self.cu_seqlens_q)

    @cached_property
    def write_index(self) -> tuple[mx.array, mx.array]:
        """Block and offset that each row is written to, as MLX int32 arrays [T]."""
        import mlx.core as mx

        if self.slot_mapping is None:
            raise ValueError("slot_mapping is None: this batch has nothing to write; pass int64 [T]")
        block, offset = np.divmod(self.slot_mapping, self.block_size)
        return mx.array(block.astype(np.int32)), mx.array(offset.astype(np.int32))

    @cached_property
    def used_blocks(self) -> tuple[mx.array, np.ndarray]:
        """The blocks that hold any context of this batch (MLX int32), and the block table counted in them."""
        import mlx.core as mx

        num_blocks = -(-self.seqused_k // self.block_size)
        held = np.arange(self.block_table.shape[1]) < num_blocks[:, None]
        blocks, places = np.unique(self.block_table[held], return_inverse=True)
        table = np.zeros_like(self.block_table)
        table[held] = places
        return mx.array(blocks), table

    @cached_property
    def mlx_cu_seqlens_q(self) -> mx.array:
        """``cu_seqlens_q`` as an MLX array."""
        import mlx.core as mx

        return mx.array(self.cu_seqlens_q)

    @cached_property
    def mlx_seqused_k(self) -> mx.array:
        """``seqused_k`` as an MLX array."""
        import mlx.core as mx

        return mx.array(self.seqused_k)

    @cached_property
    def mlx_block_table(self) -> mx.array:
        """``block_table`` as an MLX array."""
        import mlx.core as mx

        return mx.array(self.block_table)

    def work_list(self, block_q: int, window: int = -1, kv_split: int | None = None) -> np.ndarray:
        """The work list of this batch, built once per combination of arguments.

        Args:
            block_q: Query rows per item at most.
            window: Left window as in flash-attn, -1 for none.
            kv_split: KV positions per item at most, None for no split.

        Returns:
            int32 [num_items, 7], see `workbench.attention.work_list.build_work_list`.
        """
        key = (block_q, window, kv_split)
        if key not in self._work_lists:
            self._work_lists[key] = build_work_list(
                self.cu_seqlens_q, self.seqused_k, block_q=block_q, window=window, kv_split=kv_split
            )
        return self._work_lists[key]
