"""Sizes of the tiled kernel's tiles."""

import pytest

from workbench.kernels.attention.metal.tile_shape import TileShape

APPLE_GPU = 32768
"""Bytes of threadgroup memory of every Apple GPU, from Apple's table of features."""


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_variant_fits_into_threadgroup_memory(head_dim, itemsize):
    shape = TileShape.choose(head_dim, itemsize)
    assert shape.threadgroup_bytes <= APPLE_GPU
    assert shape.tile_kv >= 8 and head_dim % (8 * shape.width) == 0
