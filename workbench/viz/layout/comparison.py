"""Two traces of one workload side by side: the facts a view needs beside the columns of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.trace.checks import TraceError
from workbench.trace.compare import compare
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import encode_packet, trace_facts

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


def comparison_facts(a: Trace, b: Trace) -> dict[str, Any]:
    """What ``workbench.trace.compare`` finds, as plain data.

    Returns:
        ``badge``, ``same_tokens``, ``unit``, ``notes``, ``first_divergence`` ({step, request, what} or None) and
        ``rows`` (request, then TTFT, ITL and recomputed tokens of a and b, None where there is no value), the largest
        change first; or only ``refused`` with the reason why the traces cannot be compared.
    """
    try:
        found = compare(a, b)
    except TraceError as problem:
        return {"refused": str(problem)}
    parted = found.first_divergence
    return {
        "badge": found.badge,
        "same_tokens": found.same_tokens,
        "unit": found.unit,
        "notes": list(found.notes),
        "first_divergence": parted and {"step": parted.step, "request": parted.request_id, "what": parted.what},
        "rows": [
            [
                request.request_id,
                request.ttft_a,
                request.ttft_b,
                request.itl_a,
                request.itl_b,
                request.a.num_recomputed_tokens,
                request.b.num_recomputed_tokens,
            ]
            for request in found.requests
        ],
    }


def encode_other(a: Trace, b: Trace) -> bytes:
    """The packet of the trace ``b`` that a view of ``a`` compares it with."""
    return encode_packet(columns_of(b), extra={"facts": trace_facts(b), "comparison": comparison_facts(a, b)})
