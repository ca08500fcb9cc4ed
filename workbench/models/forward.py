"""The one call of the model in a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import mlx.core as mx
import numpy as np

from workbench.models.final_norm import FinalNorm
from workbench.models.paged_cache import PagedKVCache
from workbench.models.patch import compiled_operations


def forward_rows(
    model: Callable[..., mx.array],
    token_ids: np.ndarray | mx.array,
    kv_cache: PagedKVCache,
    rows: np.ndarray | mx.array,
    final_norm: FinalNorm | None,
) -> mx.array:
    """Call the model once on a packed batch.

    Args:
        model: The model, patched if ``kv_cache`` needs it.
        token_ids: Packed tokens, int32 [T].
        kv_cache: The pool, in a step.
        rows: Rows whose logits are needed, int32 [num_rows], not empty.
        final_norm: Selects the rows before the head; None to project all rows and select afterwards.

    Returns:
        Logits of ``rows``, float32 [num_rows, vocab_size], not evaluated.
    """
    tokens, wanted = mx.array(token_ids)[:, None], mx.array(rows)
    with compiled_operations(kv_cache.backend), nullcontext() if final_norm is None else final_norm.selecting(wanted):
        logits = model(tokens, cache=kv_cache.argument)
    if final_norm is None:
        logits = logits[wanted]
    return logits.squeeze(1).astype(mx.float32)
