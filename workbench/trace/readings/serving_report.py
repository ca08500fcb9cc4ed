"""The report of ``vllm bench serve`` on a trace: its rows, names and definitions (vLLM 0.33.0, benchmarks/serve.py).

A request that ended with "error" or "abort" counts as failed and is left out of all other rows, as in vLLM. Two peaks
are counted by whole seconds from the first arrival: tokens that came in a second, requests that were open in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from workbench.base.field_checks import number
from workbench.trace.readings.latency import FAILED
from workbench.trace.readings.metrics import RequestMetrics, percentile
from workbench.trace.readings.metrics_collector import metrics as metrics_of

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

PERCENTILES = (99.0,)
_WIDTH = 50


@dataclass(frozen=True)
class LatencyRows:
    """One latency: its title and name in the report, and its values in milliseconds, smallest first."""

    title: str
    name: str
    ms: Sequence[float]

    def lines(self, percentiles: Sequence[float]) -> list[str]:
        """Its part of the report; without values every row is 0, as in vLLM."""
        ms = self.ms or (0.0,)
        rows = {"Mean": fmean(ms), "Median": percentile(ms, 50)}
        rows |= {f"P{percent:g}": percentile(ms, percent) for percent in percentiles}
        return [f"{self.title:-^{_WIDTH}}", *(_row(f"{row} {self.name} (ms):", value) for row, value in rows.items())]


@dataclass(frozen=True)
class ServingReport:
    """A run as ``vllm bench serve`` reports it.

    Attributes:
        num_successful: Requests that ended with "stop" or "length".
        num_failed: All other requests that arrived.
        request_rate: Requests per second that were to arrive; None if all arrived at the start.
        duration: From the first arrival to the last end, in seconds.
        num_input_tokens: Prompt tokens of the successful requests.
        num_output_tokens: Their output tokens.
        peak_output_tokens: Most output tokens in a second.
        peak_concurrent: Most requests open in a second.
        latencies: TTFT, TPOT (without the first token), ITL and E2EL.
        percentiles: Percentiles that are shown.
    """

    num_successful: int
    num_failed: int
    request_rate: float | None
    duration: float
    num_input_tokens: int
    num_output_tokens: int
    peak_output_tokens: int
    peak_concurrent: int
    latencies: tuple[LatencyRows, ...]
    percentiles: tuple[float, ...]

    @classmethod
    def of(
        cls, trace: Trace, *, percentiles: Iterable[float] = PERCENTILES, request_rate: float | None = None
    ) -> ServingReport:
        """The report on a trace.

        Args:
            trace: A run with a clock.
            percentiles: Percentiles of each latency, 0 to 100.
            request_rate: The load, for the report's row.

        Raises:
            ValueError: A percentile is out of range, or the trace has no clock.

        Example:
            >>> from workbench import simulate
            >>> from workbench import CostModel
            >>> workload = {"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 2}]}
            >>> trace = simulate(workload, cost_model=CostModel(fixed=0.5))
            >>> ServingReport.of(trace, percentiles=[90]).peak_output_tokens
            1
        """
        percents = tuple(number("a percentile", percent, 0, 100) for percent in percentiles)
        metrics = metrics_of(trace)
        ended = [request for request in metrics.requests.values() if request.finish_reason not in ("", *FAILED)]
        done = [request for request in ended if request.token_times]
        if len(done) < len(ended):
            raise ValueError("the trace has no clock, so it has no seconds to report; give simulate a cost_model")
        spans = [_open_seconds(request) for request in done]
        begin, end = min((b for b, _ in spans), default=0.0), max((e for _, e in spans), default=0.0)
        tokens: Counter[int] = Counter(int(at - begin) for request in done for at in request.token_times)
        concurrent: Counter[int] = Counter()
        for first, last in spans:
            concurrent.update(range(int(first - begin), int(last - begin) + 1))
        return cls(
            num_successful=len(done),
            num_failed=len(metrics.requests) - len(done),
            request_rate=request_rate,
            duration=end - begin,
            num_input_tokens=sum(request.num_prompt_tokens for request in done),
            num_output_tokens=sum(request.num_output_tokens for request in done),
            peak_output_tokens=max(tokens.values(), default=0),
            peak_concurrent=max(concurrent.values(), default=0),
            latencies=_latencies(done, spans),
            percentiles=percents,
        )

    def __str__(self) -> str:
        def rate(count: int) -> float:
            return count / self.duration if self.duration else 0.0

        rows = [
            ("Successful requests:", self.num_successful),
            ("Failed requests:", self.num_failed),
            *([("Request rate configured (RPS):", self.request_rate)] if self.request_rate is not None else []),
            ("Benchmark duration (s):", self.duration),
            ("Total input tokens:", self.num_input_tokens),
            ("Total generated tokens:", self.num_output_tokens),
            ("Request throughput (req/s):", rate(self.num_successful)),
            ("Output token throughput (tok/s):", rate(self.num_output_tokens)),
            ("Peak output token throughput (tok/s):", float(self.peak_output_tokens)),
            ("Peak concurrent requests:", self.peak_concurrent),
            ("Total token throughput (tok/s):", rate(self.num_input_tokens + self.num_output_tokens)),
        ]
        lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}", *(_row(*row) for row in rows)]
        for latency in self.latencies:
            lines += latency.lines(self.percentiles)
        return "\n".join([*lines, "=" * _WIDTH])


def _open_seconds(request: RequestMetrics) -> tuple[float, float]:
    """Its arrival and its end, in seconds since the start of the trace."""
    assert request.ttft is not None and request.ttft.seconds is not None
    arrival = request.token_times[0] - request.ttft.seconds
    return arrival, request.token_times[-1]


def _latencies(done: Sequence[RequestMetrics], spans: Sequence[tuple[float, float]]) -> tuple[LatencyRows, ...]:
    firsts = [request.token_times[0] - begin for request, (begin, _) in zip(done, spans, strict=True)]
    wholes = [end - begin for begin, end in spans]
    pairs = zip(done, firsts, wholes, strict=True)
    per_token = [(whole - first) / (r.num_output_tokens - 1) for r, first, whole in pairs if r.num_output_tokens > 1]
    gaps = [gap for request in done for gap in request.gaps("s")]
    values = (
        ("Time to First Token", "TTFT", firsts),
        ("Time per Output Token (excl. 1st token)", "TPOT", per_token),
        ("Inter-token Latency", "ITL", gaps),
        ("End-to-end Latency", "E2EL", wholes),
    )
    return tuple(
        LatencyRows(title, name, sorted(1e3 * second for second in seconds)) for title, name, seconds in values
    )


def _row(name: str, value: float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"
