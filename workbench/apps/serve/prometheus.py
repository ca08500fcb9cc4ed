"""The server's metrics in Prometheus' text format, under the names of vLLM's metrics of the same meaning.

Source of names and meanings: vLLM's metrics documentation (``vllm:`` prefix, ``model_name`` label).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.trace import RequestInfo, StepRecord
from workbench.trace.readings.latency import LatencyAccumulator
from workbench.trace.readings.prefix_hits import PrefixHits
from workbench.trace.readings.speculation_metrics import SpeculationCounter

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
PARTS = ("queue", "prefill", "decode")
"""Parts of a request's time, counted when it ends. The queue begins at the arrival, which is earlier than vLLM's."""
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Histogram:
    """Counts of values at or below each bound, their sum and their number."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def lines(self, name: str, label: str) -> list[str]:
        """The histogram as lines of Prometheus' text format."""
        lines, cumulative = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts):
            cumulative += count
            lines.append(f'{name}_bucket{{{label},le="{bound}"}} {cumulative}')
        return [*lines, f"{name}_sum{{{label}}} {self.total}", f"{name}_count{{{label}}} {cumulative}"]


class ServerMetrics:
    """Counters of an engine, updated from the records of its steps.

    Requests that arrived before the server are counted when they end, and otherwise ignored.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        name = engine.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._label = f'model_name="{name}",engine="0"'
        self._latencies = LatencyAccumulator()
        self._speculation = SpeculationCounter()
        self.prompt_tokens = self.preemptions = 0
        self.prefix_hits = PrefixHits()
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token_latency = Histogram(SECONDS)
        self.e2e_latency = Histogram(SECONDS)
        self.iteration_tokens = Histogram(TOKENS)
        self.parts = {part: Histogram(SECONDS) for part in PARTS}

    @property
    def generation_tokens(self) -> int:
        """Number of sampled tokens."""
        return self.time_to_first_token.count + self.inter_token_latency.count

    def add_step(self, record: StepRecord, arrivals: Sequence[RequestInfo]) -> None:
        """Count a step, and the requests that arrived before it."""
        for info in arrivals:
            self._latencies.arrive(info)
        self.preemptions += len(record.preempted)
        self.iteration_tokens.add(record.num_tokens)
        self.prefix_hits.add_step(record, self._num_prompt_tokens)
        self._speculation.add(record)
        times = self._latencies.add(record)
        times.add_to(self.time_to_first_token, self.inter_token_latency, self.e2e_latency)
        for ended in times.ended.values():
            for part, latency in (("queue", ended.queue), ("prefill", ended.prefill), ("decode", ended.decode)):
                if latency is not None and latency.seconds is not None:
                    self.parts[part].add(latency.seconds)
        self.prompt_tokens += sum(first.request.num_prompt_tokens for first in times.first_tokens.values())
        for reason in {**dict.fromkeys(record.aborted, "abort"), **record.finish_reasons}.values():
            self.finished[reason] += 1

    def _num_prompt_tokens(self, request_id: str) -> int | None:
        known = self._latencies.get(request_id)
        return None if known is None else known.request.num_prompt_tokens

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
        waiting = "vllm:num_requests_waiting_by_reason"
        samples = [
            f'{waiting}{{{label},reason="{r}"}} {n}' for r, n in (("capacity", scheduler.num_waiting), ("deferred", 0))
        ]
        add("gauge", waiting, "Waiting requests, by vLLM's reasons: all wait for capacity.", samples)
        used = 1 - scheduler.num_free_blocks / usable
        one("gauge", "vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", used)
        config = self._engine.config
        sizes = (
            f'block_size="{config.block_size}",num_gpu_blocks="{config.num_blocks}",'
            f'enable_prefix_caching="{config.enable_prefix_caching}"'
        )
        info = "vllm:cache_config_info"
        add("gauge", info, "Settings of the KV cache, as labels.", [f"{info}{{{label},{sizes}}} 1.0"])
        one("counter", "vllm:num_preemptions_total", "Preemptions.", self.preemptions)
        one("counter", "vllm:prompt_tokens_total", "Prompt tokens of answered requests.", self.prompt_tokens)
        one("counter", "vllm:generation_tokens_total", "Sampled tokens.", self.generation_tokens)
        found = self.prefix_hits
        one("counter", "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", found.queries)
        one("counter", "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", found.hits)
        success = "vllm:request_success_total"
        counts = [f'{success}{{{label},finished_reason="{reason}"}} {n}' for reason, n in self.finished.items()]
        add("counter", success, "Requests that ended, by reason.", counts)
        if self._engine.config.num_speculative_tokens:
            drafts = self._speculation.metrics()
            prefix = "vllm:spec_decode_num_"
            one("counter", f"{prefix}drafts_total", "Verifications of drafts.", drafts.num_verifications)
            one("counter", f"{prefix}draft_tokens_total", "Draft tokens.", drafts.num_drafts)
            one("counter", f"{prefix}accepted_tokens_total", "Accepted draft tokens.", drafts.num_accepted)
            per_position = f"{prefix}accepted_tokens_per_pos_total"
            accepted = dict(enumerate(drafts.accepted_per_position))
            counts = [
                f'{per_position}{{{label},position="{position}"}} {accepted.get(position, 0)}'
                for position in range(self._engine.config.num_speculative_tokens)
            ]
            add("counter", per_position, "Accepted draft tokens, by their position behind the known token.", counts)
        for name, meaning, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a request.", self.inter_token_latency),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", self.e2e_latency),
            ("vllm:request_queue_time_seconds", "From arrival to the first step.", self.parts["queue"]),
            ("vllm:request_prefill_time_seconds", "From the first step to the first token.", self.parts["prefill"]),
            ("vllm:request_decode_time_seconds", "From the first token to the last.", self.parts["decode"]),
            ("vllm:iteration_tokens_total", "Tokens of a step.", self.iteration_tokens),
        ):
            add("histogram", name, meaning, histogram.lines(name, label))
        return "\n".join(lines) + "\n"
