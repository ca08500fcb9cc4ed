"""The server's metrics in Prometheus' text format, under vLLM's names where they mean the same.

Names and meanings: vLLM's metrics documentation (``vllm:`` prefix, ``model_name`` label).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.trace import RequestInfo, StepRecord

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Histogram:
    """Counts of values at or below each bound, their sum and their number."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, label: str) -> list[str]:
        """The samples of the histogram."""
        lines, cumulative = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts):
            cumulative += count
            lines.append(f'{name}_bucket{{{label},le="{bound}"}} {cumulative}')
        return [*lines, f"{name}_sum{{{label}}} {self.total}", f"{name}_count{{{label}}} {cumulative}"]


class _Progress:
    """When an open request arrived, how long its prompt is, and when its last token came."""

    def __init__(self, info: RequestInfo) -> None:
        self.arrived = info.arrival_time
        self.num_prompt_tokens = info.num_prompt_tokens
        self.last_token: float | None = None


class ServerMetrics:
    """Counts what the steps of an engine say. Times are the engine's, from its records.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        name = engine.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._label = f'model_name="{name}"'
        self._open: dict[str, _Progress] = {}
        self.prompt_tokens = self.generation_tokens = self.preemptions = 0
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token_latency = Histogram(SECONDS)
        self.e2e_latency = Histogram(SECONDS)
        self.iteration_tokens = Histogram(TOKENS)

    def add_step(self, record: StepRecord, arrivals: Sequence[RequestInfo]) -> None:
        """Count a step, and the requests that arrived before it."""
        now = record.time + sum(record.timings.values())
        for info in arrivals:
            self._open[info.request_id] = _Progress(info)
        self.preemptions += len(record.preempted)
        self.iteration_tokens.add(record.num_tokens)
        for chunk in record.chunks:
            progress = self._open.get(chunk.request_id)
            if progress is None:  # open before the server began
                continue
            if chunk.request_id in record.admitted:
                self.prefix_cache_queries += progress.num_prompt_tokens
                self.prefix_cache_hits += chunk.num_cached_tokens
            if chunk.sampled is not None:
                self._add_token(progress, now)
        for request_id, reason in (dict.fromkeys(record.aborted, "abort") | dict(record.finish_reasons)).items():
            self.finished[reason] += 1
            if (progress := self._open.pop(request_id, None)) is not None:
                self.e2e_latency.add(now - progress.arrived)

    def _add_token(self, progress: _Progress, now: float) -> None:
        self.generation_tokens += 1
        if progress.last_token is None:
            self.prompt_tokens += progress.num_prompt_tokens
            self.time_to_first_token.add(now - progress.arrived)
        else:
            self.inter_token_latency.add(now - progress.last_token)
        progress.last_token = now

    def render(self) -> str:
        """All metrics as text."""
        scheduler, label = self._engine.scheduler, self._label
        usable = self._engine.config.num_usable_blocks
        lines: list[str] = []

        def add(kind: str, name: str, meaning: str, samples: list[str]) -> None:
            lines.extend([f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *samples])

        def one(kind: str, name: str, meaning: str, value: float) -> None:
            add(kind, name, meaning, [f"{name}{{{label}}} {value}"])

        one("gauge", "vllm:num_requests_running", "Requests in the running list.", scheduler.num_running)
        one("gauge", "vllm:num_requests_waiting", "Requests in the waiting queue.", scheduler.num_waiting)
        used = 1 - scheduler.num_free_blocks / usable
        one("gauge", "vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", used)
        one("counter", "vllm:num_preemptions_total", "Preemptions.", self.preemptions)
        one("counter", "vllm:prompt_tokens_total", "Prompt tokens of answered requests.", self.prompt_tokens)
        one("counter", "vllm:generation_tokens_total", "Sampled tokens.", self.generation_tokens)
        one("counter", "vllm:prefix_cache_queries_total", "Tokens looked up in it.", self.prefix_cache_queries)
        one("counter", "vllm:prefix_cache_hits_total", "Tokens found in it.", self.prefix_cache_hits)
        success = "vllm:request_success_total"
        counts = [f'{success}{{{label},finished_reason="{reason}"}} {n}' for reason, n in self.finished.items()]
        add("counter", success, "Requests that ended, by reason.", counts)
        for name, meaning, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a request.", self.inter_token_latency),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", self.e2e_latency),
            ("vllm:iteration_tokens_total", "Tokens of a step.", self.iteration_tokens),
        ):
            add("histogram", name, meaning, histogram.lines(name, label))
        return "\n".join(lines) + "\n"
