"""Sizes of the tiled kernel's tiles and their cost in threadgroup memory."""

from __future__ import annotations

from dataclasses import dataclass

THREADGROUP_MEMORY = 32768
"""Bytes of threadgroup memory that every Apple GPU grants a threadgroup."""

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class TileShape:
    """The tile of the tiled kernel for one head_dim and element size.

    A tile is 8 pairs of (query row, head) per simdgroup against ``tile_kv`` KV positions.

    Attributes:
        head_dim: Elements per head.
        itemsize: Bytes per element of q and of the KV cache.
        num_simdgroups: Simdgroups per threadgroup.
        tile_kv: KV positions per tile.
        width: Number of elements that a lane loads at once.
    """

    head_dim: int
    itemsize: int
    num_simdgroups: int
    tile_kv: int
    width: int

    @classmethod
    def choose(cls, head_dim: int, itemsize: int) -> TileShape:
        """The tile of a head_dim and element size: as large as registers and 32 KB of threadgroup memory allow.

        Four simdgroups with 32 positions, or 16 from head_dim 128 on, are the sizes of MLX's own attention kernel.
        Above 128, a lane would hold more than 64 registers of output and the queries would take too much threadgroup
        memory, so two simdgroups remain.

        Raises:
            ValueError: ``head_dim`` is not a multiple of 16 from 16 to 256.
        """
        if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim is {head_dim}; the Metal kernel takes multiples of 16 from 16 to {MAX_HEAD_DIM}: "
                'use attention_backend="gather"'
            )
        width = 4 if head_dim % 32 == 0 else 2
        shape = cls(head_dim, itemsize, 4 if head_dim <= 128 else 2, 32 if head_dim < 128 else 16, width)
        while shape.threadgroup_bytes > THREADGROUP_MEMORY:
            shape = cls(head_dim, itemsize, shape.num_simdgroups, shape.tile_kv // 2, width)
        return shape

    @property
    def tile_pairs(self) -> int:
        """Number of (query row, head) pairs in a tile."""
        return 8 * self.num_simdgroups

    @property
    def threads(self) -> int:
        """Threads per threadgroup."""
        return 32 * self.num_simdgroups

    @property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory: queries, one tile of keys or values, and the sums that simdgroups exchange."""
        row_bytes = self.head_dim * self.itemsize + 16
        return (self.tile_pairs + self.tile_kv) * row_bytes + 2 * 8 * 4

    def block_q(self, heads_per_kv_head: int) -> int:
        """Maximum number of query rows in a work item, with the query heads of a KV head packed into the tile."""
        return max(1, self.tile_pairs // heads_per_kv_head)

    def head_slices(self, heads_per_kv_head: int) -> int:
        """Number of tiles that the query heads of one KV head need."""
        return -(-heads_per_kv_head // self.tile_pairs)
