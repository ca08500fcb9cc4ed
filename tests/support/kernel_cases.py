"""Paged batches for the kernel tests: the cases, their arrays, and the allowed distance from float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from reference import reference_attention

from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.stored import from_stored

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
UNIT_ROUNDOFF = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}
"""Allowed error of rounding the result to its dtype, relative to each element; float32 is part of the other error."""

FLOAT32_TOLERANCE = 2e-6
"""Maximum error of the arithmetic, relative to the largest element of the result, in every dtype."""

NOT_A_BLOCK = 2**30
"""Value of unused block-table entries: reading the block would be reported as out of bounds."""


@dataclass(frozen=True)
class Case:
    """One launch: sequences as (query rows, KV length) pairs, and the launch's other parameters."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "float32"
    left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    kv_split: int | None = None
    shared_prefix: int = 0
    seed: int = 0
    value_dim: int = 0
    latent: bool = False
    chunk_size: int = 0

    @property
    def size_of_values(self) -> int:
        """Elements of a value per head."""
        return self.value_dim or self.head_dim

    def __str__(self) -> str:
        heads = f"{self.num_heads}x{self.num_kv_heads}x{self.head_dim}"
        heads += f"to{self.value_dim}" * bool(self.value_dim) + "latent" * self.latent
        extras = [f"w{self.left}"] * (self.left >= 0) + [f"cap{self.softcap:g}"] * bool(self.softcap)
        extras += ["sinks"] * self.sinks + [f"split{self.kv_split}"] * bool(self.kv_split)
        extras += [f"chunks{self.chunk_size}"] * bool(self.chunk_size)
        extras += ["shared"] * bool(self.shared_prefix)
        rows, context = sum(q for q, _ in self.sequences), max(kv for _, kv in self.sequences)
        batch = f"{len(self.sequences)}seqs_{rows}rows_{context}kv"
        return "-".join([heads, self.dtype, f"bs{self.block_size}", batch, *extras, f"seed{self.seed}"])


@dataclass
class Batch:
    """The arrays of a case."""

    case: Case
    q: mx.array
    k_cache: mx.array
    v_cache: mx.array
    metadata: AttentionMetadata
    sinks: mx.array | None = None
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.case.head_dim**-0.5

    @property
    def options(self) -> AttentionOptions:
        """Options of ``attend``."""
        case = self.case
        value_dim = case.size_of_values if case.latent else 0
        return AttentionOptions(self.scale, (case.left, 0), case.softcap, self.sinks, case.chunk_size, value_dim)

    @property
    def inputs(self) -> tuple[mx.array, mx.array, mx.array, AttentionMetadata]:
        """Positional arguments of ``attend``."""
        return self.q, self.k_cache, self.v_cache, self.metadata

    def reference(self) -> np.ndarray:
        """The result in float64."""
        return reference_attention(
            as_float64(self.q),
            as_float64(from_stored(self.k_cache)),
            as_float64(from_stored(self.v_cache))[..., : self.case.size_of_values],
            cu_seqlens_q=self.metadata.cu_seqlens_q,
            seqused_k=self.metadata.seqused_k,
            block_table=self.metadata.block_table,
            softmax_scale=self.scale,
            left=self.case.left,
            softcap=self.case.softcap,
            sinks=None if self.sinks is None else np.array(self.sinks),
            chunk_size=self.case.chunk_size,
        )


def build(case: Case) -> Batch:
    """Random q, K and V over permuted blocks; NaN in every slot that belongs to no position."""
    rng = np.random.default_rng([case.seed, len(case.sequences), case.head_dim])
    query_lens = np.array([q for q, _ in case.sequences])
    kv_lens = np.array([kv for _, kv in case.sequences])
    num_blocks = -(-kv_lens // case.block_size)
    pool = int(num_blocks.sum()) + 3
    free = iter(rng.permutation(pool).tolist())
    table = np.full((len(kv_lens), int(num_blocks.max()) + 1), NOT_A_BLOCK, dtype=np.int32)
    shared = case.shared_prefix // case.block_size
    for seq, count in enumerate(num_blocks):
        own = min(shared, kv_lens[seq] // case.block_size) if seq else 0
        own = min(own, num_blocks[0] if kv_lens[0] >= case.shared_prefix else 0)
        table[seq, :own] = table[0, :own]
        table[seq, own:count] = [next(free) for _ in range(count - own)]

    written = np.zeros((pool, case.block_size), dtype=bool)
    for seq, kv_len in enumerate(kv_lens):
        positions = np.arange(kv_len)
        written[table[seq, positions // case.block_size], positions % case.block_size] = True

    slots = (pool, case.block_size, case.num_kv_heads)
    dtype = DTYPES[case.dtype]
    k_cache, v_cache = (
        mx.array(np.where(written[..., None, None], normal(rng, (*slots, dim)), np.nan)).astype(dtype)
        for dim in (case.head_dim, case.size_of_values)
    )
    metadata = AttentionMetadata(
        np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        kv_lens.astype(np.int32),
        table,
        None,
        case.block_size,
    )
    return Batch(
        case,
        mx.array(normal(rng, (int(query_lens.sum()), case.num_heads, case.head_dim))).astype(dtype),
        k_cache,
        k_cache if case.latent else v_cache,
        metadata,
        mx.array(normal(rng, case.num_heads) * 2) if case.sinks else None,
    )


def normal(rng: np.random.Generator, shape: Any) -> np.ndarray:
    """Standard normal float32."""
    return rng.standard_normal(shape, dtype=np.float32)


def as_float64(x: mx.array) -> np.ndarray:
    """An MLX array of any float type as float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def error_over_tolerance(result: np.ndarray, expected: np.ndarray, dtype: str) -> float:
    """The largest error as a multiple of the allowed error; inf if a finite element is expected and NaN or infinite.

    The allowed error is one rounding to the dtype, plus 2e-6 of the largest element for the float32 arithmetic before.
    """
    finite = np.isfinite(expected)
    if not np.array_equal(result[~finite], expected[~finite], equal_nan=True) or not np.isfinite(result[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    result, expected = result[finite], expected[finite]
    allowed = UNIT_ROUNDOFF[dtype] * np.abs(expected) + FLOAT32_TOLERANCE * np.abs(expected).max()
    return float((np.abs(result - expected) / allowed).max())


def assert_close(result: mx.array, expected: np.ndarray, dtype: str, slack: float = 1.0) -> None:
    """Fail with the factor if the error is larger than ``slack`` times the allowed error."""
    error = error_over_tolerance(as_float64(result), expected, dtype)
    assert error <= slack, f"the largest error is {error:.2f} times what {dtype} allows"


HEAD_COUNTS = ((4, 4), (8, 2), (5, 1))
DECODES = (((1, 523), (1, 37), (1, 2011)), ((1, 1), (1, 128), (1, 2048)))
MIXED = (((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011)))


def _published(sequences: tuple[tuple[int, int], ...], heads: tuple[int, int], **options: Any) -> Case:
    return Case(sequences, *heads, head_dim=128, block_size=16, dtype="float16", **options)


def published_edge_1() -> dict[str, Case]:
    """The 6 decode batches that compare a first kernel with a reference."""
    return {
        f"edge1-v1-reference-heads{heads}-seqs{index}": _published(sequences, heads)
        for heads in HEAD_COUNTS
        for index, sequences in enumerate(DECODES)
    }


def published_edge_2() -> dict[str, Case]:
    """The same 6 batches, to compare two kernels with each other."""
    return {name.replace("edge1-v1-reference", "edge2-tiled-v1"): case for name, case in published_edge_1().items()}


def published_edge_3() -> dict[str, Case]:
    """The 24 batches that compare the second kernel with a reference. Their window of 128 counts the row."""
    return {
        f"edge3-tiled-reference-heads{heads}-seqs{index}-window{window}-softcap{softcap}": _published(
            sequences, heads, left=window - 1 if window else -1, softcap=softcap or 0.0
        )
        for heads in HEAD_COUNTS
        for index, sequences in enumerate(MIXED)
        for window in (None, 128)
        for softcap in (None, 50.0)
    }


HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32)
BATCH_SIZES = ((1, 2, 6), (7,), (8, 9, 64))
RANDOM_HEADS = (((1, 1), (2, 2), (3, 1), (4, 1), (4, 2), (6, 2)), ((8, 1), (9, 3), (10, 1), (16, 1), (40, 1)))
KV_SPLITS = ((None, 8, 16, 64), (4096,))


class Variant(NamedTuple):
    """A part of the random launches that shares compiled kernels.

    The text of a kernel depends on its template, on inputs of fewer than 8 elements, which MLX passes as `constant`
    pointers (cu_seqlens_q, seqused_k, sinks), and on whether contexts are split.
    """

    dtype: str
    head_dim: int
    block_size: int
    batch_sizes: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    kv_splits: tuple[int | None, ...]


VARIANTS = tuple(
    Variant(
        dtype,
        head_dim,
        BLOCK_SIZES[(row + column) % 3],
        BATCH_SIZES[(row + 2 * column) % 3],
        RANDOM_HEADS[(row + column) % 2],
        KV_SPLITS[(row + column // 2) % 2],
    )
    for row, dtype in enumerate(DTYPES)
    for column, head_dim in enumerate(HEAD_DIMS)
)
"""Every pair of dtype and head_dim, and each of both with every block size, range of batch sizes, heads and splits."""


def random_case(seed: int) -> Case:
    """A random launch; every 25th has contexts of up to 4,096 positions, the others of up to 300."""
    rng = np.random.default_rng([20, seed])
    round_, index = divmod(seed, len(VARIANTS))
    variant = VARIANTS[index]
    num_seqs = variant.batch_sizes[round_ % len(variant.batch_sizes)]
    is_long = seed % 25 == 0
    fewest = 5 if variant.heads is RANDOM_HEADS[0] else 1
    heads = variant.heads[:fewest] if num_seqs == 64 or is_long else variant.heads
    num_heads, num_kv_heads = heads[rng.integers(len(heads))]
    sequences: list[tuple[int, int]] = []
    for seq in range(num_seqs):
        kind = rng.random()
        if kind < 0.1 and num_seqs > 1:
            rows = 0
        elif kind < 0.55 or (num_seqs == 64 and kind < 0.95):
            rows = 1
        else:
            rows = int(rng.integers(2, 48 if num_seqs < 6 else 20))
        longest = 4096 if is_long and seq == 0 else 300 if num_seqs < 6 else 120
        sequences.append((rows, rows + int(rng.integers(0, longest - rows))))
    if not any(rows for rows, _ in sequences):
        sequences[-1] = (1, max(1, sequences[-1][1]))
    return Case(
        tuple(sequences),
        num_heads,
        num_kv_heads,
        variant.head_dim,
        variant.block_size,
        variant.dtype,
        left=int(rng.choice([-1, -1, 0, 1, 7, 31, 32, 100])),
        softcap=float(rng.choice([0.0, 0.0, 1.5, 30.0])),
        sinks=bool(rng.random() < 0.3),
        kv_split=variant.kv_splits[rng.integers(len(variant.kv_splits))],
        shared_prefix=int(rng.choice([0, 0, 32])),
        seed=seed,
    )


KINDS: dict[str, dict[str, Any]] = {
    "512": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 512},
    "320": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 320},
    "192 and 128": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 192, "value_dim": 128},
    "96 and 64": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 96, "value_dim": 64},
    "48 and 80": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 48, "value_dim": 80},
    "latents of 512 + 64": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True},
    "latents of 64 + 16": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 80, "value_dim": 64, "latent": True},
    "latents of 256 + 32": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 288, "value_dim": 256, "latent": True},
    "chunks": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "chunk_size": 48},
    "chunks of 7": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "chunk_size": 7},
}
"""Sizes and reaches that are not those of plain attention, by name."""


def kind_case(kind: str, seed: int) -> Case:
    """A small random batch of a kind, with the other options drawn."""
    rng = np.random.default_rng([seed, len(kind), sum(map(ord, kind))])
    options = KINDS[kind]
    rows = [1, int(rng.integers(2, 30)), 1, int(rng.integers(1, 9))]
    sequences = tuple((count, count + int(rng.integers(0, longest))) for count, longest in zip(rows, (300, 60, 1, 90)))
    return Case(
        sequences,
        **options,
        block_size=int(rng.choice(BLOCK_SIZES)),
        dtype=list(DTYPES)[seed % 3],
        left=-1 if "chunk_size" in options else int(rng.choice([-1, 0, 7, 32])),
        softcap=float(rng.choice([0.0, 1.5, 30.0])),
        sinks=bool(rng.random() < 0.5),
        kv_split=[None, 8, 64][int(rng.integers(3))],
        seed=seed,
    )
