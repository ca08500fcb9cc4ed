"""A packed batch as bytes, which rank 0 sends to the other ranks in every step.

The bytes are little-endian int32. The other fields of a packed batch follow from these numbers; the receiving rank
computes them with the same function as rank 0, and so checks every rule again.

    4             num_seqs, num_tokens, num_block_ids, block_size
    num_seqs      position of each sequence's first token
    num_seqs      number of tokens in each sequence
    num_seqs      number of its last rows whose logits are wanted
    num_seqs      number of blocks of each sequence
    num_tokens    token ids
    num_block_ids block tables, one after another
"""

from __future__ import annotations

import numpy as np

from workbench.engine.packed_batch import PackedBatch, pack

_INT = np.dtype("<i4")
_HEADER = 4
_COLUMNS = 4


def encode(packed: PackedBatch) -> bytes:
    """The bytes of a packed batch: 16, and 16 per sequence, 4 per token and 4 per block of its sequences."""
    num_tokens = np.diff(packed.cu_seqlens_q)
    samples = np.diff(np.searchsorted(packed.logits_rows, packed.cu_seqlens_q))
    num_blocks = packed.table_lengths
    block_ids = packed.block_table[np.arange(packed.block_table.shape[1]) < num_blocks[:, None]]
    header = np.array([packed.num_seqs, packed.num_tokens, len(block_ids), packed.block_size])
    columns = (packed.seqused_k - num_tokens, num_tokens, samples, num_blocks)
    return np.concatenate([header, *columns, packed.token_ids, block_ids]).astype(_INT).tobytes()


def decode(data: bytes, num_blocks: int | None = None) -> PackedBatch:
    """The packed batch of these bytes.

    Args:
        data: Result of `encode`.
        num_blocks: Size of this rank's pool.

    Raises:
        ValueError: The bytes are not a packed batch.
    """
    if len(data) < _HEADER * _INT.itemsize or len(data) % _INT.itemsize:
        raise ValueError(f"{len(data)} bytes are not a packed batch")
    numbers = np.frombuffer(data, dtype=_INT)
    num_seqs, num_tokens, num_block_ids, block_size = map(int, numbers[:_HEADER])
    expected = _HEADER + _COLUMNS * num_seqs + num_tokens + num_block_ids
    if min(num_seqs, num_tokens, num_block_ids) < 0 or len(numbers) != expected:
        raise ValueError(
            f"{len(numbers)} numbers are not a packed batch of {num_seqs} sequences and {num_tokens} tokens"
        )
    body = numbers[_HEADER:]
    starts, counts, samples, table_lengths = body[: _COLUMNS * num_seqs].reshape(_COLUMNS, num_seqs)
    token_ids, block_ids = np.split(body[_COLUMNS * num_seqs :], [num_tokens])
    if counts.sum() != num_tokens or table_lengths.sum() != num_block_ids or min(counts.min(), table_lengths.min()) < 0:
        raise ValueError(f"the sequences of a packed batch do not add up to {num_tokens} tokens and their blocks")
    if (samples < 0).any() or (samples > counts).any():  # gigabytes of rows would be made of them
        raise ValueError("a sequence of a packed batch wants logits of more rows than it has, or of less than none")
    tokens = np.split(token_ids, np.cumsum(counts)[:-1])
    tables = np.split(block_ids, np.cumsum(table_lengths)[:-1])
    segments = zip(tables, starts, counts, tokens, samples, [""] * num_seqs)
    return pack(list(segments), block_size, num_blocks=num_blocks)
