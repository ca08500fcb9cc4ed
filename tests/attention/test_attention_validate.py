"""paged_varlen_attention rejects malformed arguments by name, before it computes anything."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import Case, build

from workbench.kernels.attention import paged_varlen_attention


def arguments(**changes: Any) -> dict[str, Any]:
    """Valid arguments: rows 0 to 2 of sequence 0, none of sequence 1, row 3 of sequence 2; 9 blocks of 8 tokens."""
    good = {
        "q": mx.ones((4, 6, 32)),
        "k_cache": mx.ones((9, 8, 2, 32)),
        "v_cache": mx.ones((9, 8, 2, 32)),
        "cu_seqlens_q": np.array([0, 3, 3, 4], np.int32),
        "seqused_k": np.array([10, 5, 17], np.int32),
        "block_table": np.array([[1, 2, -7], [3, -7, -7], [4, 5, 8]], np.int32),
        "softmax_scale": 0.2,
    }
    return good | changes


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


MALFORMED = {
    "starts late": ({"cu_seqlens_q": int32([1, 3, 3, 4])}, r"cu_seqlens_q\[0\] \(sequence 0\) is 1; it must be 0"),
    "decreases": ({"cu_seqlens_q": int32([0, 3, 2, 4])}, "sequence 1: cu_seqlens_q decreases from 3 to 2"),
    "ends early": ({"cu_seqlens_q": int32([0, 3, 3, 3])}, r"ends at 3 \(sequence 2\).* 4"),
    "ends late": ({"cu_seqlens_q": int32([0, 3, 3, 5])}, r"ends at 5 \(sequence 2\).* 4"),
    "too few": ({"cu_seqlens_q": int32([0, 4])}, "cu_seqlens_q has 2 entries and seqused_k has 3"),
    "empty": ({"cu_seqlens_q": int32([]), "seqused_k": int32([]), "block_table": int32(np.zeros((0, 3)))}, "0 entries"),
    "short context": ({"seqused_k": int32([2, 5, 17])}, "sequence 0: .* at least the sequence's 3 query rows"),
    "no context": ({"seqused_k": int32([10, 5, 0])}, "sequence 2: seqused_k is 0"),
    "negative context": ({"seqused_k": int32([10, -1, 17])}, "sequence 1: seqused_k is -1"),
    "too few blocks": ({"seqused_k": int32([10, 25, 17])}, "sequence 1: seqused_k is 25, which takes 4 blocks of 8"),
    "block too large": ({"block_table": int32([[1, 2, 0], [3, 0, 0], [4, 9, 8]])}, r"sequence 2: .*is 9.* \[0, 9\)"),
    "block negative": ({"block_table": int32([[1, -1, 0], [3, 0, 0], [4, 5, 8]])}, r"sequence 0: .*\[0, 1\] is -1"),
    "block of no rows": ({"block_table": int32([[1, 2, 0], [99, 0, 0], [4, 5, 8]])}, r"sequence 1: .*\[1, 0\] is 99"),
    "table rows": ({"block_table": int32([[1, 2, 0], [3, 0, 0]])}, "block_table has 2 rows; .* 3"),
    "table shape": ({"block_table": int32([1, 2, 3])}, r"block_table has shape \(3,\); it must have 2 dimensions"),
    "ragged table": ({"block_table": [[1, 2], [3], [4, 5, 8]]}, "block_table has rows of different lengths"),
    "cu shape": ({"cu_seqlens_q": int32([[0, 3, 3, 4]])}, "cu_seqlens_q has shape .* 1 dimension"),
    "cu dtype": ({"cu_seqlens_q": np.array([0, 3, 3, 4])}, "cu_seqlens_q has dtype int64; it must be int32"),
    "mlx dtype": ({"seqused_k": mx.array([10.0, 5.0, 17.0])}, "seqused_k has dtype .*float32; it must be int32"),
    "float list": ({"seqused_k": [10.0, 5.0, 17.0]}, "seqused_k holds something other than integers"),
    "huge": ({"seqused_k": [10, 5, 2**31]}, "seqused_k holds something other than integers in the range of int32"),
    "q shape": ({"q": mx.ones((4, 192))}, r"q has shape \(4, 192\); it must be \[T, num_heads, head_dim\]"),
    "q dtype": ({"q": mx.ones((4, 6, 32), mx.int32)}, "q has dtype .*int32; it must be float32, float16 or bfloat16"),
    "q type": ({"q": np.ones((4, 6, 32), np.float32)}, "q is a ndarray; it must be an mlx.core.array"),
    "cache shape": ({"k_cache": mx.ones((72, 2, 32))}, "k_cache has shape .*num_blocks, block_size"),
    "caches differ": ({"v_cache": mx.ones((9, 8, 2, 32), mx.float16)}, "k_cache is .* they must agree"),
    "head_dim": ({"q": mx.ones((4, 6, 64))}, "q has head_dim 64 and the caches have 32"),
    "heads": ({"q": mx.ones((4, 5, 32))}, "q has 5 heads, which is not a multiple of the caches' 2 KV heads"),
    "no heads": ({"q": mx.ones((4, 0, 32))}, "only T and num_blocks may be 0"),
    "sinks": ({"sinks": mx.ones(2)}, r"sinks has shape \(2,\); it must be \[num_heads\] = \[6\]"),
    "scale": ({"softmax_scale": float("nan")}, "softmax_scale is nan; it must be finite"),
    "softcap": ({"softcap": -1.0}, "softcap is -1.0; it must be finite and at least 0"),
    "left": ({"window_size": (-2, 0)}, "window_size has left -2"),
    "right": ({"window_size": (4, 1)}, "window_size has right 1; it must be 0 or -1"),
    "window": ({"window_size": (4,)}, "window_size is .*two integers"),
    "backend": ({"backend": "flash"}, "attention backend is 'flash'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_arguments_are_refused(name, monkeypatch):
    changes, message = MALFORMED[name]
    monkeypatch.setattr(
        "workbench.kernels.attention.gather.GatherBackend.attend", lambda *_, **__: pytest.fail("computed")
    )
    with pytest.raises(ValueError, match=message):
        paged_varlen_attention(**arguments(**{"backend": "gather", **changes}))


@pytest.mark.parametrize("backend", ["auto", "cpu", "gather", "dense"])
@pytest.mark.parametrize("as_what", [np.asarray, mx.array, np.ndarray.tolist])
def test_metadata_may_be_numpy_mlx_or_lists(backend, as_what):
    batch = build(Case(((3, 20), (0, 4), (1, 9)), 4, 2, head_dim=32, block_size=8, left=6, softcap=3.0, sinks=True))
    metadata = batch.metadata
    result = paged_varlen_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        cu_seqlens_q=as_what(metadata.cu_seqlens_q),
        seqused_k=as_what(metadata.seqused_k),
        block_table=as_what(metadata.block_table),
        backend=backend,
        **vars(batch.options),
    )
    np.testing.assert_allclose(np.array(result), batch.reference(), rtol=1e-5, atol=1e-6)


def test_entries_past_a_context_are_not_checked():
    paged_varlen_attention(**arguments())
    with pytest.raises(ValueError, match="sequence 0"):
        paged_varlen_attention(**arguments(seqused_k=int32([17, 5, 17])))


def test_right_0_and_minus_1_are_the_same():
    results = [paged_varlen_attention(**arguments(window_size=(3, right))) for right in (0, -1)]
    np.testing.assert_array_equal(np.array(results[0]), np.array(results[1]))


def test_a_batch_of_no_sequences():
    nothing = {
        "cu_seqlens_q": [0], "seqused_k": [], "block_table": np.zeros((0, 1), np.int32), "q": mx.ones((0, 6, 32))
    }  # fmt: skip
    assert paged_varlen_attention(**arguments(**nothing)).shape == (0, 6, 32)
