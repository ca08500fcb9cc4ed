"""Metrics as a table of plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.trace.metrics import Distribution, Summary

_LATENCIES = (
    ("time to first token", "ttft"),
    ("  in the queue", "queue"),
    ("  in prefill", "prefill"),
    ("inter-token latency", "itl"),
    ("end to end", "e2e"),
)


def metrics_table(summary: Summary) -> str:
    """The summary of a run, ready to print."""
    unit = summary.unit
    lines = [
        f"{summary.num_finished} of {summary.num_requests} requests ended in {summary.num_steps} steps"
        + (f", {summary.duration:.3f} s" if unit == "s" else "")
        + (f" (from step {summary.first_step} on: those before are not in this trace)" if summary.first_step else ""),
        f"tokens: {summary.num_scheduled_tokens} scheduled, {summary.num_output_tokens} sampled, "
        f"{summary.num_cached_tokens} found in the prefix cache, {summary.num_recomputed_tokens} computed again "
        f"({summary.num_preemptions} preemptions)",
        f"throughput: {number(summary.output_throughput)} output and {number(summary.total_throughput)} scheduled "
        f"tokens per {'second' if unit == 's' else 'step'}",
        f"use: token budget {percent(summary.mean_budget_use)}, KV blocks {percent(summary.mean_kv_use)} "
        f"(peak {percent(summary.peak_kv_use)})",
        "",
        f"{'latency in ' + unit:<22}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}{'count':>8}",
    ]
    for title, name in _LATENCIES:
        distribution: Distribution = getattr(summary, name)
        values = (distribution.mean, distribution.p50, distribution.p95, distribution.p99, distribution.max)
        lines.append(f"{title:<22}" + "".join(f"{number(value):>10}" for value in values) + f"{distribution.count:>8}")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """A number with three or four digits that say something; a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A fraction as a percentage; a dash for none."""
    return "-" if value is None else f"{value:.1%}"
