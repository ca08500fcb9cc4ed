"""Latencies, throughput, use and waste, computed from a trace and nothing else.

Definitions are those of vLLM's Prometheus metrics, whose names are given in brackets. A token exists at the end of
the step that sampled it: the step's start plus its timings. Latencies are counted in steps as well, because a
simulation has no clock: a request that arrives before step 3 and gets its first token in step 3 waited 1 step.

- TTFT [time_to_first_token_seconds]: from arrival to the first token. It is queue time
  [request_queue_time_seconds], arrival to first being scheduled, plus prefill time [request_prefill_time_seconds],
  first being scheduled to the first token.
- ITL [inter_token_latency_seconds]: between two tokens of a request that follow each other.
- Decode time [request_decode_time_seconds]: from the first token to the last.
- End-to-end latency [e2e_request_latency_seconds]: from arrival to the end of the step that finished the request.
- KV use [kv_cache_usage_perc]: blocks in block tables over all blocks, as a fraction.
- Wasted tokens: computed a second time because a preemption had thrown their KV away.
- Fragmentation: slots in owned blocks that hold no token yet, as a fraction of the slots in owned blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.trace import display
from workbench.trace.metrics_table import metrics_table


class Latency(NamedTuple):
    """A span in both units.

    Attributes:
        steps: Engine steps, counted as the module says.
        seconds: Wall-clock time; None where the trace has no clock.
    """

    steps: int
    seconds: float | None


@dataclass(frozen=True)
class RequestMetrics:
    """One request. A latency is None when its end has not been seen: the request had not got so far.

    Attributes:
        request_id: The request.
        num_prompt_tokens: Length of its prompt.
        num_cached_tokens: Prompt tokens found in the prefix cache at its first admission.
        num_recomputed_tokens: Tokens computed again after preemptions.
        num_preemptions: How often it lost its KV blocks.
        finish_reason: "length", "stop", "error" or "abort"; "" while it is under way.
        arrival_step: First step that could see it.
        first_scheduled_step: Step that computed its first chunk.
        finish_step: Step in which it ended.
        token_steps: For each output token the step that sampled it.
        token_times: For each output token when that step ended, in seconds; empty without a clock.
        queue: From arrival to being scheduled.
        prefill: From being scheduled to the first token.
        ttft: From arrival to the first token.
        decode: From the first token to the last.
        e2e: From arrival to the end.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    finish_reason: str
    arrival_step: int
    first_scheduled_step: int | None
    finish_step: int | None
    token_steps: tuple[int, ...]
    token_times: tuple[float, ...]
    queue: Latency | None
    prefill: Latency | None
    ttft: Latency | None
    decode: Latency | None
    e2e: Latency | None

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled."""
        return len(self.token_steps)

    @property
    def itl_steps(self) -> np.ndarray:
        """Steps between tokens that follow each other, int64 [num_output_tokens - 1]."""
        return np.diff(np.asarray(self.token_steps, np.int64))

    @property
    def itl_seconds(self) -> np.ndarray:
        """Seconds between tokens that follow each other, float64; empty without a clock."""
        return np.diff(np.asarray(self.token_times, np.float64))


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """Columns with one entry per step, after scheduling. Integers are int64; block counts are -1 where unknown.

    Attributes:
        step: Index of the step.
        time: Its start in seconds.
        duration: Its length in seconds.
        num_tokens: Tokens scheduled.
        num_decode_tokens: Of those, decodes.
        num_recomputed_tokens: Of those, computed a second time.
        num_cached_tokens: Tokens that did not have to be computed: prefix-cache hits of this step's admissions.
        token_budget: Tokens a step may hold.
        num_running: Running requests.
        num_waiting: Waiting requests.
        num_preempted: Requests preempted.
        free_blocks: Free KV blocks, cached ones included.
        cached_blocks: Free KV blocks whose content can still be found.
        owned_blocks: KV blocks in block tables.
        unused_slots: Slots of owned blocks that hold no token yet.
        block_size: Slots per KV block.
    """

    step: np.ndarray
    time: np.ndarray
    duration: np.ndarray
    num_tokens: np.ndarray
    num_decode_tokens: np.ndarray
    num_recomputed_tokens: np.ndarray
    num_cached_tokens: np.ndarray
    token_budget: np.ndarray
    num_running: np.ndarray
    num_waiting: np.ndarray
    num_preempted: np.ndarray
    free_blocks: np.ndarray
    cached_blocks: np.ndarray
    owned_blocks: np.ndarray
    unused_slots: np.ndarray
    block_size: int

    @property
    def num_prefill_tokens(self) -> np.ndarray:
        """Tokens scheduled that are not decodes."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def budget_use(self) -> np.ndarray:
        """Scheduled tokens over the budget, float64; NaN where no budget was recorded."""
        return _ratio(self.num_tokens, self.token_budget)

    @property
    def kv_use(self) -> np.ndarray:
        """Owned blocks over all blocks, float64; NaN where the pool's size is unknown."""
        return _ratio(self.owned_blocks, np.where(self.owned_blocks < 0, 0, self.owned_blocks + self.free_blocks))

    @property
    def fragmentation(self) -> np.ndarray:
        """Unused slots over the slots of owned blocks, float64; NaN where nothing is owned."""
        return _ratio(self.unused_slots, np.maximum(self.owned_blocks, 0) * self.block_size)


@dataclass(frozen=True)
class Distribution:
    """What is told of many values; all None when there are none. Percentiles interpolate linearly."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: np.ndarray | list[float]) -> Distribution:
        """The distribution of some values."""
        values = np.asarray(values, np.float64)
        if not len(values):
            return cls(0)
        p50, p95, p99 = np.percentile(values, [50, 95, 99])
        return cls(len(values), float(values.mean()), float(p50), float(p95), float(p99), float(values.max()))

    @property
    def median(self) -> float | None:
        """The same as p50."""
        return self.p50


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers. Latencies are in ``unit``: "s", or "steps" where the trace has no clock.

    Attributes:
        unit: "s" or "steps".
        num_steps: Steps.
        num_requests: Requests that arrived.
        num_finished: Requests that ended, aborted ones included.
        num_scheduled_tokens: Tokens computed.
        num_output_tokens: Tokens sampled.
        num_recomputed_tokens: Tokens computed a second time.
        num_cached_tokens: Tokens found in the prefix cache.
        num_preemptions: Preemptions.
        duration: From the start of the first step to the end of the last, in ``unit``.
        output_throughput: Output tokens per ``unit``.
        total_throughput: Scheduled tokens per ``unit``.
        mean_budget_use: Mean over the steps that scheduled anything.
        mean_kv_use: Mean over all steps.
        peak_kv_use: Largest of any step.
        ttft: Time to first token.
        itl: Inter-token latency.
        queue: Queue time.
        prefill: Prefill time.
        e2e: End-to-end latency.
        first_step: The step the trace begins with; not 0 when those before were left out or forgotten.
    """

    unit: str
    num_steps: int
    num_requests: int
    num_finished: int
    num_scheduled_tokens: int
    num_output_tokens: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    duration: float
    output_throughput: float | None
    total_throughput: float | None
    mean_budget_use: float | None
    mean_kv_use: float | None
    peak_kv_use: float | None
    ttft: Distribution
    itl: Distribution
    queue: Distribution
    prefill: Distribution
    e2e: Distribution
    first_step: int = 0


@dataclass(frozen=True, eq=False)
class TraceMetrics:
    """All metrics of a trace.

    Attributes:
        summary: The run in a few numbers.
        requests: Each request, in order of arrival.
        steps: Columns with one entry per step.
    """

    summary: Summary
    requests: dict[str, RequestMetrics]
    steps: StepMetrics

    def __repr__(self) -> str:
        return metrics_table(self.summary)

    def _repr_html_(self) -> str | None:
        return display.html("metrics", self)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
