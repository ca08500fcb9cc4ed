"""The facts that a comparison of two traces shows beside the columns of both."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from workbench.base.text import counted
from workbench.trace.errors import TraceError
from workbench.trace.readings.compare import Comparison, compare
from workbench.trace.readings.metrics import number
from workbench.trace.readings.two_sides import NOTHING, ROUNDING, extremes, longest_of, most_blocks
from workbench.viz import svg
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import encode_packet, trace_facts

if TYPE_CHECKING:
    from workbench.trace.readings.two_sides import Measure, RequestComparison
    from workbench.trace.trace import Trace

SAME_COUNTS = "no number of steps, blocks, preemptions or cached tokens changes"


def comparison_facts(a: Trace, b: Trace) -> dict[str, Any]:
    """The result of `workbench.trace.readings.compare.compare` as plain data.

    Returns:
        ``badge``, ``verdict``, ``measures`` (name, value of a, value of b, and the change as text; the longest
        times only if the verdict names them), ``same_tokens``,
        ``unit``, ``notes``, ``first_divergence`` ({step, request, what} or None), ``rows`` (request, then TTFT, ITL and
        recomputed tokens of a and b; a missing value is None), the largest change first, ``differences`` (the index of
        the first different token of each request that has one), ``mean``, the same numbers
        of all requests, and ``rounding``, the share of two times up to which their difference
        is none. If the traces cannot be compared, only ``refused``, the reason.
    """
    try:
        found = compare(a, b)
    except TraceError as problem:
        return {"refused": str(problem)}
    parted = found.first_divergence
    return {
        "badge": found.badge,
        "verdict": (told := verdict(found)),
        "measures": [
            [each.name, *each.values(), each.words]
            for each in (*found.measures, *(longest for longest in _longest_of(found) if longest.name in told))
        ],
        "same_tokens": found.same_tokens,
        "unit": found.unit,
        "counts_only": found.counts_only,
        "notes": list(found.notes),
        "first_divergence": parted and {"step": parted.step, "request": parted.request_id, "what": parted.what},
        "rows": [
            [
                request.request_id,
                *_latencies(found, request),
                request.a.num_recomputed_tokens,
                request.b.num_recomputed_tokens,
            ]
            for request in found.requests
        ],
        "differences": {
            request.request_id: difference.index
            for request in found.requests
            if found.same_tokens is False and (difference := request.token_difference)
        },
        "mean": _means(found),
        "rounding": ROUNDING,
    }


def _latencies(found: Comparison, request: RequestComparison) -> list[float | None]:
    """TTFT and ITL of both runs, each None if the runs have no times and no equal steps."""
    if found.counts_only:
        return [None] * 4
    return [request.ttft_a, request.ttft_b, request.itl_a, request.itl_b]


def _means(found: Comparison) -> list[float | None]:
    """The mean of each number of a row: the latencies as among the measures, the recomputed tokens of all requests."""
    known = {measure.name: (measure.a, measure.b) for measure in found.measures}
    means: list[float | None] = []
    for name in ("mean TTFT", "mean ITL"):
        means += known.get(name, (None, None))
    recomputed = [(request.a.num_recomputed_tokens, request.b.num_recomputed_tokens) for request in found.requests]
    return means + ([fmean(column) for column in zip(*recomputed)] if recomputed else [None, None])


def _longest_of(found: Comparison) -> list[Measure]:
    """The longest times of both runs; none if the runs have no times and no equal steps."""
    return [] if found.counts_only else longest_of(found.requests, found.unit)


def verdict(found: Comparison) -> str:
    """The comparison in one line: of its measures and the longest times, the ones that get worst and best.

    Example: "worse: mean ITL 42 ms -> 72 ms (71% longer); better: longest TTFT 9.6 s -> 8.4 s (12% shorter)". Without
    times it has the numbers of steps, and of KV blocks in use. Values that stay the same are left out.
    """
    # A rate per step counts the steps.
    weighed = [each for each in found.measures if each.unit or each.is_of_unserved or found.unit == "s"]
    times = [] if found.counts_only else [*weighed, *_longest_of(found)]
    changed = any(each.share for each in (*found.measures, *times))
    ends = _ends_words(found)
    if not (changed or ends) and found.first_divergence is None and found.same_tokens is not False:
        return NOTHING
    if found.counts_only:
        counts = [change_words(each.name, number(each.a), number(each.b)) for each in found.measures]
        return "; ".join(filter(None, counts)) or "; ".join(filter(None, (SAME_COUNTS, _moved_words(found))))
    if found.unit == "s":
        return extremes(times)
    steps = change_words("steps", *map(str, map(len, (found.a, found.b))))
    most = [most_blocks(trace) for trace in (found.a, found.b)]
    blocks = "" if None in most else change_words("most KV blocks in use", *map(str, most))
    moved = any(each.share for each in times)
    return "; ".join(filter(None, (steps, extremes(times), blocks, "" if steps or moved or blocks else ends)))


def _moved_words(found: Comparison) -> str:
    """The number of requests that other steps or chunks compute, and the first of them; "" for none."""
    moved, parted = sum(each.divergence is not None for each in found.requests), found.first_divergence
    if parted is None:
        return ""
    first = f"that of {svg.shorten(parted.request_id, 24)} in step {parted.step}"
    return f"the work of {counted(moved, 'request')} moves to other steps or chunks, first {first}"


def _ends_words(found: Comparison) -> str:
    """The numbers of requests that end later and earlier in steps; "" if none does."""
    spans = [(each.a.e2e, each.b.e2e) for each in found.requests]
    changes = [after.steps - before.steps for before, after in spans if before is not None and after is not None]
    later, earlier = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    named = {"later": later, "earlier": earlier}
    return ", ".join(f"{counted(n, 'request')} {'ends' if n == 1 else 'end'} {when}" for when, n in named.items() if n)


def change_words(name: str, before: str, after: str) -> str:
    """A change as the views write it; "" if both values read alike."""
    return "" if before == after else f"{name} {before} -> {after}"


def encode_other(a: Trace, b: Trace, fork: dict[str, Any] | None = None, unchanged: Trace | None = None) -> bytes:
    """The packet of the trace ``b`` that a view of ``a`` compares it with.

    Args:
        a: The trace of the view.
        b: The other trace.
        fork: For a simulated run, ``at_step`` and ``changes``: the step and the configuration from which it differs;
            and ``up_to``, the last step of ``a`` that it was simulated from. If times were predicted, ``measures`` has
            the facts of a comparison whose values have ranges, in place of those of the two traces.
        unchanged: ``a`` as it was, if it was simulated like ``b``, which is compared with this one: its packet follows
            the other, so that pictures and numbers are of the same two runs.
    """
    comparison = comparison_facts(a if unchanged is None else unchanged, b)
    if fork is not None:
        comparison["fork"] = {name: value for name, value in fork.items() if name != "measures"}
        if "refused" not in comparison:
            measures = dict(fork.get("measures", {}))
            comparison["mean"][:2] = measures.pop("mean_ttft", comparison["mean"][:2])
            comparison |= measures
    packet = encode_packet(columns_of(b), extra={"facts": trace_facts(b), "comparison": comparison})
    if unchanged is None:
        return packet
    return packet + encode_packet(columns_of(unchanged), extra={"facts": trace_facts(unchanged)})
