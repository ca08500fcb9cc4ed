"""Caches of the plain model whose keys and values are rounded as a pool stores them.

A pool of few bits cannot give the logits of a model that keeps all of them, and a mixture of experts makes much of
little. Compared with a plain model that rounds in the same places, its path is right or wrong to the last bits.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from workbench.kernels.attention.stored import from_stored, to_stored
from workbench.models.layer_cache import LayerKV


def round_as_stored(cache: Any, layer: LayerKV) -> None:
    """Let one of mlx-lm's caches keep what a pool would keep.

    Args:
        cache: The cache of a layer.
        layer: The layer in the pool. Latents and the rotary parts of their keys are one row there, with one scale.
    """
    update_and_fetch = cache.update_and_fetch

    def rounded(rows: mx.array) -> mx.array:
        return from_stored(to_stored(rows, layer.dtype)).astype(rows.dtype)

    def update_rounded(keys: mx.array, values: mx.array) -> Any:
        if not layer.latent:
            return update_and_fetch(rounded(keys), rounded(values))
        rows = rounded(mx.concatenate([keys, values], axis=-1))
        return update_and_fetch(*mx.split(rows, [keys.shape[-1]], axis=-1))

    cache.update_and_fetch = update_rounded
