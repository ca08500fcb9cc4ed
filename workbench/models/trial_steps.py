"""Two small packed steps that mix chunks and decodes over permuted blocks, to compare ways to run a model with."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.models.final_norm import FinalNorm
from workbench.models.forward import forward_rows
from workbench.models.paged_cache import PagedKVCache

BLOCK_SIZE = 8
NUM_SEQS, NUM_TOKENS = 3, 9
BLOCK_TABLES = ((5, 2), (1, 6), (4, 3))
NUM_TRIAL_BLOCKS = 1 + max(max(table) for table in BLOCK_TABLES)
STEPS = (
    ((2, 0, 7), (0, 0, 8), (1, 0, 1)),
    ((0, 8, 1), (2, 7, 2), (1, 1, 8)),
)
"""Packed steps as (sequence, start, num_tokens): first chunks, then a decode beside chunks that end their prompt."""
CONTROL_STEP = STEPS[-1][:2]
POSITION_SHIFT = 3
NARROW_WINDOW = 5
"""Sliding windows are narrowed to this, in the plain model too, so that a few tokens are enough to test them."""


def probe_tokens(model: nn.Module) -> np.ndarray:
    """Random token ids inside every embedding table, int32 [NUM_SEQS, NUM_TOKENS]."""
    tables = [m.weight.shape[0] for m in model.modules() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
    return np.random.default_rng(0).integers(1, min(tables, default=32), (NUM_SEQS, NUM_TOKENS), dtype=np.int32)


def pack_probe(
    step: Sequence[tuple[int, int, int]], token_ids: np.ndarray, offsets: Sequence[int] = (0,) * NUM_SEQS
) -> tuple[AttentionMetadata, np.ndarray, np.ndarray]:
    """A packed step of the preflight: its metadata, positions and token ids; each sequence begins at its offset."""
    sequences, starts, counts = (np.array(column, dtype=np.int32) for column in zip(*step))
    ranges = [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts)]
    tables = np.array(BLOCK_TABLES, dtype=np.int32)[sequences]
    slots = [table[r // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + r % BLOCK_SIZE for table, r in zip(tables, ranges)]
    metadata = AttentionMetadata(
        cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seqused_k=starts + counts,
        block_table=tables,
        slot_mapping=np.concatenate(slots),
        block_size=BLOCK_SIZE,
    )
    tokens = np.concatenate([token_ids[seq, r] for seq, r in zip(sequences, ranges)])
    return metadata, np.concatenate(ranges) + np.repeat(np.array(offsets, np.int32)[sequences], counts), tokens


def packed_logits(
    model: nn.Module,
    kv_cache: PagedKVCache,
    metadata: AttentionMetadata,
    positions: np.ndarray,
    token_ids: np.ndarray,
    states: AttentionMetadata | None = None,
    final_norm: FinalNorm | None = None,
) -> np.ndarray:
    """Logits of each chunk's last row in a packed step; ``states`` is the batch as recurrent layers see it."""
    names = metadata.block_table[:, 0].tolist()
    kv_cache.begin_step(positions, metadata, metadata if states is None else states, names=names)
    try:
        logits = forward_rows(model, token_ids, kv_cache, metadata.cu_seqlens_q[1:] - 1, final_norm)
        mx.eval(logits, kv_cache.arrays)
    finally:
        kv_cache.end_step()
    return np.array(logits)
