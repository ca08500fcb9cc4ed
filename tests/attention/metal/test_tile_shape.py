"""Sizes of the tiled kernel's tiles."""

import pytest

from workbench.kernels.attention.metal.tile_shape import TileShape

APPLE_GPU = 32768
"""Bytes of threadgroup memory of every Apple GPU, from Apple's table of features."""


@pytest.mark.parametrize("head_dim", range(16, 641, 16))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_variant_fits_into_threadgroup_memory(head_dim, itemsize):
    for value_dim in range(16, 513, 16):
        shape = TileShape.choose(head_dim, itemsize, value_dim)
        assert shape.threadgroup_bytes <= APPLE_GPU
        assert shape.tile_kv >= 8 and shape.num_simdgroups >= 1
        assert head_dim % (8 * shape.width) == value_dim % (8 * shape.width) == 0
        rows_of_output = 8 * value_dim * 4  # what simdgroups exchange at the end of a decode
        assert shape.num_simdgroups == 1 or rows_of_output <= shape.threadgroup_bytes - 64


@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (128, 2), (256, 2), (256, 4)])
def test_plain_sizes_keep_their_tiles(head_dim, itemsize):
    tiles = {(64, 2): (4, 32), (128, 2): (4, 16), (256, 2): (2, 16), (256, 4): (2, 8)}
    shape = TileShape.choose(head_dim, itemsize)
    assert (shape.num_simdgroups, shape.tile_kv) == tiles[head_dim, itemsize]
