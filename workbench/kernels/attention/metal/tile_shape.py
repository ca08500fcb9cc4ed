"""Sizes of the tiled kernel's tiles and their cost in threadgroup memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

THREADGROUP_MEMORY = 32768
"""Bytes of threadgroup memory that every Apple GPU grants a threadgroup."""

MAX_HEAD_DIM, MAX_VALUE_DIM = 640, 512
"""A lane holds VALUE_DIM / 4 sums of the output: 128 registers of 32 bits at 512."""

WIDE_VALUE_DIM = 128
"""From more elements of a value on, half as many simdgroups share a tile, because a lane holds more registers."""


@dataclass(frozen=True)
class TileShape:
    """The tile of the tiled kernel for the sizes of one kind of head.

    A tile is 8 pairs of (query row, head) per simdgroup against ``tile_kv`` KV positions.

    Attributes:
        head_dim: Elements of a query or key per head.
        value_dim: Elements of a value per head.
        itemsize: Bytes per element of q and of the KV cache.
        num_simdgroups: Simdgroups per threadgroup; with one, keys and values are read straight from the cache.
        tile_kv: KV positions per tile.
        width: Number of elements that a lane loads at once.
    """

    head_dim: int
    value_dim: int
    itemsize: int
    num_simdgroups: int
    tile_kv: int
    width: int

    @classmethod
    def choose(cls, head_dim: int, itemsize: int, value_dim: int = 0) -> TileShape:
        """The tile of a head_dim and element size: as large as registers and 32 KB of threadgroup memory allow.

        Four simdgroups with 32 positions, or 16 from head_dim 128 on, are the sizes of MLX's own attention kernel.
        Above 128, a lane would hold more than 64 registers of output and the queries would take too much threadgroup
        memory, so two simdgroups remain. One is left if the queries of two and a tile of 8 positions do not fit.

        Args:
            head_dim: Elements of a query or key per head.
            itemsize: Bytes per element.
            value_dim: Elements of a value per head, 0 for as many as a key has.

        Raises:
            ValueError: A size is not a multiple of 16, or too large.
        """
        value_dim = value_dim or head_dim
        for name, dim, largest in (("head_dim", head_dim, MAX_HEAD_DIM), ("value_dim", value_dim, MAX_VALUE_DIM)):
            if dim % 16 or not 16 <= dim <= largest:
                raise ValueError(
                    f"{name} is {dim}; the Metal kernel takes multiples of 16 from 16 to {largest}: "
                    'use attention_backend="gather"'
                )
        width = 4 if head_dim % 32 == value_dim % 32 == 0 else 2
        widest = max(head_dim, value_dim)
        simdgroups, tile_kv = 4 if value_dim <= WIDE_VALUE_DIM else 2, 32 if widest < 128 else 16
        shape = cls(head_dim, value_dim, itemsize, simdgroups, tile_kv, width)
        while shape.threadgroup_bytes > THREADGROUP_MEMORY:
            if tile_kv > 8:
                tile_kv //= 2
            else:
                simdgroups //= 2
                tile_kv = 16 if simdgroups == 1 else 8
            shape = replace(shape, num_simdgroups=simdgroups, tile_kv=tile_kv)
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
        query_bytes, tile_bytes = (
            dim * self.itemsize + 16 for dim in (self.head_dim, max(self.head_dim, self.value_dim))
        )
        staged = self.tile_kv if self.num_simdgroups > 1 else 0
        return self.tile_pairs * query_bytes + staged * tile_bytes + 2 * 8 * 4

    def block_q(self, heads_per_kv_head: int) -> int:
        """Maximum number of query rows in a work item, with the query heads of a KV head packed into the tile."""
        return max(1, self.tile_pairs // heads_per_kv_head)

    def head_slices(self, heads_per_kv_head: int) -> int:
        """Number of tiles that the query heads of one KV head need."""
        return -(-heads_per_kv_head // self.tile_pairs)
