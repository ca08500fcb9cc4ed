"""The last puzzle: a part of the attention kernel as it ships, where two simdgroups' halves of a softmax are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.apps.course.verdict import Verdict

if TYPE_CHECKING:
    from workbench.kernels.msl import MetalKernel

TASK = (
    "a decode's simdgroups each computed part of the positions. Merge another's maximum and total (shared_sums[2 * "
    "place.row] and the entry behind it) into row_state.maximum and row_state.total, in units of log2, and define "
    "rescale and other_rescale, the factors of both outputs."
)

_BEGIN = "const float other_maximum = shared_sums[2 * place.row];"
_END = "#pragma unroll"

_SEQUENCES = (
    (((1, 200), (1, 37)), 64),
    (((1, 3), (1, 150), (2, 90)), 32),
    (((1, 500),), 64),
)
"""(query rows, KV length) of the sequences of each case, and the size of a head."""


def shipped_part() -> str:
    """The lines of paged_varlen.metal that the puzzle is about."""
    from workbench.kernels.attention.metal.launch import metal_source

    source = metal_source("paged_varlen")
    begin = source.index(_BEGIN)
    return source[begin : source.index(_END, begin)].rstrip()


def check_tile(answer: str, seed: int) -> Verdict:
    """Judge an answer: the shipped kernel runs with it, on random batches, against float64."""
    from workbench.kernels import msl
    from workbench.kernels.attention.metal.launch import PagedVarlenKernels
    from workbench.kernels.attention.probe import ERROR_LIMIT, Probe, float64_attention, probe_batch, relative_error

    part = shipped_part()

    def make(**text: Any) -> MetalKernel:
        if text["name"] == "paged_varlen":
            assert part in text["source"]
            text["source"] = text["source"].replace(part, f'#line 1 "answer"\n{answer}\n')
        return msl.metal_kernel(**text)

    for number, (sequences, head_dim) in enumerate(_SEQUENCES):
        probe = Probe(
            "puzzle", sequences, num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=8, dtype="float32"
        )
        batch = probe_batch(probe, seed + number)
        try:
            kernels = PagedVarlenKernels(make)
            result = kernels.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.options)
        except msl.MslError as fault:
            where = f" in line {fault.line} of the answer" if fault.file == "answer" else ""
            return Verdict(False, f"{str(fault).split(chr(10) + '  by thread')[0].split(': ', 1)[-1]}{where}.")
        error = relative_error(result, float64_attention(batch))
        if not error <= ERROR_LIMIT["float32"]:
            if not np.isfinite(np.array(result)).all():
                hint = "-INFINITY minus -INFINITY is not a number: a simdgroup without a position has such a maximum."
            else:
                hint = "The larger maximum is the common one; exp2(m - M) shrinks the side with the smaller one."
            lengths = ", ".join(str(length) for _, length in sequences)
            return Verdict(False, f"with KV lengths {lengths} the error is {error:.2g} of the largest element. {hint}")
    return Verdict(True, f"{len(_SEQUENCES)} batches agree with float64, through the kernel as it ships.")
