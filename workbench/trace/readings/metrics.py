"""Latencies, throughput, utilization and waste, computed from a trace alone.

Latencies are defined in ``workbench.trace.readings.latency``. In brackets: vLLM's Prometheus metric of the same
meaning.

- KV use [kv_cache_usage_perc]: blocks in block tables, as a fraction of all blocks.
- Recomputed tokens: those computed once more because a preemption freed their KV blocks.
- Fragmentation: slots in owned blocks that hold no token yet, as a fraction of the slots in owned blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import np, picture, with_attached_methods
from workbench.base.tables import table_lines, terminal_width, wrapped
from workbench.base.text import counted, duration, printable, significant
from workbench.trace.fields import read_only
from workbench.trace.readings.latency import Latency
from workbench.trace.readings.narrate import end_words
from workbench.trace.readings.ordered import Ordered
from workbench.trace.readings.pauses import pauses_of
from workbench.trace.readings.run_clock import RunClock, idle_words
from workbench.trace.readings.speculation_metrics import SpeculationMetrics

if TYPE_CHECKING:
    from workbench.trace.find_request import ByRequest
    from workbench.trace.lines import LastToken
    from workbench.trace.trace import Trace


@dataclass(frozen=True, repr=False)
class RequestMetrics:
    """Metrics of one request. A latency is None if the trace does not contain both of its ends.

    Attributes:
        request_id: The request.
        num_prompt_tokens: Length of its prompt.
        num_cached_tokens: Prompt tokens found in the prefix cache at its first admission.
        num_recomputed_tokens: Tokens recomputed after preemptions.
        num_preemptions: Number of times it was preempted.
        finish_reason: "length", "stop", "error" or "abort"; "" until it has ended.
        arrival_step: First step whose scheduling could see it.
        first_scheduled_step: Step that computed its first chunk.
        finish_step: Step in which it ended.
        token_steps: Step that sampled each output token.
        token_times: End of that step in seconds, for each output token; empty without a clock.
        queue: From arrival to being scheduled.
        prefill: From being scheduled to the first token.
        ttft: From arrival to the first token.
        decode: From the first token to the last.
        e2e: From arrival to the end.
        age: From arrival to the end of the trace, for a request that has not ended.
        was_scheduled_before: It was scheduled before the trace begins, as far as the trace tells.
        had_tokens_before: It got its first token before the trace begins, likewise.
        token_before: Its latest token before the trace begins; None if there is none, or it is not known.
        hit_max_model_len: It ended for its length before it had max_tokens.
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
    age: Latency | None = None
    was_scheduled_before: bool = False
    had_tokens_before: bool = False
    token_before: LastToken | None = None
    hit_max_model_len: bool = False

    def __repr__(self) -> str:
        """One line: the size of the request, its latencies, and its end."""
        known = [(name, getattr(self, name)) for name in ("queue", "ttft", "e2e")]
        return ", ".join(
            [
                f"RequestMetrics({printable(self.request_id)}: {counted(self.num_prompt_tokens, 'prompt token')}",
                f"{counted(self.num_output_tokens, 'output token')}{self.of_part}",
                *(f"{name} {_words(latency)}" for name, latency in known if latency is not None),
                f"{self.end})",
            ]
        )

    @property
    def end(self) -> str:
        """Its end, such as "hit max_tokens"; "not ended" until then."""
        if not self.finish_reason:
            return "not ended"
        return end_words(self.finish_reason, hit_max_model_len=self.hit_max_model_len)

    @property
    def waited(self) -> Latency | None:
        """The time without a token of a request that has none, or was aborted before it; None for others."""
        return None if self.token_steps or self.had_tokens_before else self.e2e or self.age

    def unended(self, name: str) -> Latency | None:
        """The time so far, or until the request was aborted, of a "ttft", "queue" or "e2e"; None if it has ended."""
        if name == "e2e":
            return self.e2e if self.finish_reason == "abort" else self.age
        if getattr(self, name) is not None:
            return None
        is_queued = self.first_scheduled_step is None and not self.was_scheduled_before
        return self.waited if name == "ttft" or is_queued else None

    def so_far(self, name: str) -> Latency | None:
        """The time so far of a "ttft", "queue" or "e2e" that has not ended; None if it or the request has."""
        return None if self.age is None else self.unended(name)

    def at_least(self, name: str) -> Latency | None:
        """A latency, or else the time so far, or until the request was aborted; None if nothing is known."""
        latency: Latency | None = getattr(self, name)
        return latency or self.unended(name)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that the steps of the trace sampled (`outputs_before` counts those before a part)."""
        return len(self.token_steps)

    @property
    def of_part(self) -> str:
        """Words behind the number of output tokens if there were others before the trace; "" if there were none."""
        return " in this part" if self.had_tokens_before else ""

    @property
    def itl_steps(self) -> np.ndarray:
        """Steps between consecutive tokens, int64; the first gap begins with ``token_before`` if that is known."""
        return np.asarray(self.gaps("steps"), np.int64)

    @property
    def itl_seconds(self) -> np.ndarray:
        """Seconds between consecutive tokens, float64; empty without a clock."""
        return np.asarray(self.gaps("s"), np.float64)

    def gaps(self, unit: str) -> list[float]:
        """The same as plain numbers: seconds between consecutive tokens if ``unit`` is "s", and steps otherwise."""
        tokens: Sequence[float] = self.token_times if unit == "s" else self.token_steps
        if tokens and self.token_before is not None:
            tokens = (self.token_before.end if unit == "s" else self.token_before.step, *tokens)
        return [after - before for before, after in pairwise(tokens)]

    @property
    def lacks_gap(self) -> bool:
        """Whether its first token in the trace follows one that is not known, so that the gap is unknown too."""
        return bool(self.token_steps) and self.had_tokens_before and self.token_before is None


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """Columns with one entry per step, after scheduling. Integers are int64; unknown block counts are -1.

    Attributes:
        step: Index of the step.
        time: Its start in seconds.
        duration: Its length in seconds.
        num_tokens: Scheduled tokens.
        num_decode_tokens: Scheduled decode tokens.
        num_recomputed_tokens: Scheduled tokens that are recomputed after a preemption.
        num_cached_tokens: Prefix-cache hits of the requests admitted in this step, in tokens.
        token_budget: Maximum number of tokens in a step.
        num_running: Number of running requests.
        num_waiting: Number of waiting requests.
        num_preempted: Number of preempted requests.
        free_blocks: Free KV blocks, cached ones included.
        cached_blocks: Free KV blocks whose content is in the prefix cache.
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
        """Scheduled tokens that are not decodes."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def budget_use(self) -> np.ndarray:
        """Scheduled tokens as a fraction of the budget, float64; NaN if no budget was recorded."""
        return _ratio(self.num_tokens, self.token_budget)

    @property
    def kv_use(self) -> np.ndarray:
        """Owned blocks as a fraction of all blocks, float64; NaN if the pool's size is unknown."""
        return _ratio(self.owned_blocks, np.where(self.owned_blocks < 0, 0, self.owned_blocks + self.free_blocks))

    @property
    def fragmentation(self) -> np.ndarray:
        """Unused slots as a fraction of the slots of owned blocks, float64; NaN if no block is owned."""
        return _ratio(self.unused_slots, np.maximum(self.owned_blocks, 0) * self.block_size)


@dataclass(frozen=True, repr=False)
class Distribution:
    """Mean, percentiles (interpolated linearly) and maximum of some values; all None if there are no values.

    Times that had not ended count as long as they were so far. As they can only grow, a statistic that would then be
    larger is a lower bound.

    Attributes:
        count: Number of values.
        num_open: Number of those that had not ended.
        bounds: Names of the statistics that are lower bounds.
        unit: "s" or "steps".

    Example:
        >>> Distribution.of([0.01, 0.02, 0.06])
        3 values: mean 30 ms, p50 20 ms, p95 56 ms, p99 59.2 ms, max 60 ms
    """

    count: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    num_open: int = 0
    bounds: tuple[str, ...] = ()
    unit: str = field(default="s", compare=False)

    @classmethod
    def of(cls, values: Iterable[float], open: Sequence[float] = (), unit: str = "s") -> Distribution:
        """The distribution of these values, and of times that had not ended."""
        ordered, num_open = Ordered(chain(map(float, values), map(float, open))), len(open)
        if not ordered:
            return cls(0, unit=unit)
        percents = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
        found = {name: percentile(ordered, percent) for name, percent in percents.items()}
        last = len(ordered) - 1
        grow = {name for name, percent in percents.items() if open and ordered[ceil(last * percent / 100)] >= min(open)}
        grow |= {"mean"} if open else set()
        bounds = tuple(sorted(grow))
        return cls(len(ordered), fmean(ordered), **found, num_open=num_open, bounds=bounds, unit=unit)

    @property
    def median(self) -> float | None:
        """The same as p50."""
        return self.p50

    def amount(self, name: str) -> str:
        """A statistic with its unit, marked if it is a lower bound."""
        return f"{AT_LEAST if name in self.bounds else ''}{amount(getattr(self, name), self.unit)}"

    def __repr__(self) -> str:
        if not self.count:
            return "no values"
        so_far = f", {self.num_open} of them times so far" if self.num_open else ""
        shown = ", ".join(f"{name} {self.amount(name)}" for name in STATISTICS)
        return f"{counted(self.count, 'value')}{so_far}: {shown}"


@dataclass(frozen=True, repr=False)
class Summary:
    """A run in a few numbers. Latencies are in ``unit``: "s", or "steps" if the trace has no clock.

    Attributes:
        unit: "s" or "steps".
        num_steps: Number of steps.
        num_requests: Number of requests that arrived.
        num_finished: Number of requests that ended, aborted ones included.
        num_scheduled_tokens: Number of computed tokens.
        num_output_tokens: Number of sampled tokens.
        num_recomputed_tokens: Number of tokens recomputed after a preemption.
        num_cached_tokens: Number of tokens found in the prefix cache, after preemptions too.
        hit_rate: Share of the prompt tokens of admitted requests that the prefix cache had when they were first
            admitted (`workbench.trace.readings.prefix_hits`).
        num_preemptions: Number of preemptions.
        duration: From the start of the first step to the end of the last, idle time included, in ``unit``.
        output_throughput: Output tokens per ``unit`` of ``duration``.
        total_throughput: Scheduled tokens per ``unit`` of ``duration``.
        mean_budget_use: Mean over the steps that scheduled at least one token.
        mean_kv_use: Mean over all steps.
        peak_kv_use: Maximum over all steps.
        ttft: Time to first token.
        itl: Inter-token latency.
        queue: Time until scheduled.
        prefill: Prefill time.
        e2e: End-to-end latency.
        first_step: The first step of the trace; not 0 if earlier steps were left out or forgotten.
        clock: Idle time, and the wait before the first step.
        num_aborted: Number of requests that were aborted.
        num_failed: Number of requests that ended with an error.
        num_unknown_gaps: Number of tokens without an inter-token latency, as the token before is not known.
    """

    unit: str
    num_steps: int
    num_requests: int
    num_finished: int
    num_scheduled_tokens: int
    num_output_tokens: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    hit_rate: float | None
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
    clock: RunClock = field(default_factory=RunClock)
    num_aborted: int = 0
    num_failed: int = 0
    num_unknown_gaps: int = 0

    @property
    def has_idle(self) -> bool:
        """Whether the engine worked, and was idle in between."""
        return self.unit == "s" and bool(self.clock.idle and self.clock.at_work)

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Output tokens and scheduled tokens per ``unit``, without idle time."""
        if not self.has_idle:
            return self.output_throughput, self.total_throughput
        return self.num_output_tokens / self.clock.at_work, self.num_scheduled_tokens / self.clock.at_work

    def __repr__(self) -> str:
        return _table(self, SpeculationMetrics())

    def _repr_html_(self) -> str | None:
        return picture("Summary", self)


@with_attached_methods
@dataclass(frozen=True, eq=False)
class TraceMetrics:
    """All metrics of a trace.

    Attributes:
        summary: The run in a few numbers.
        requests: Metrics of each request, in order of arrival: a table when it is shown, and with ``to_pandas()``
            (`workbench.trace.readings.metrics_by_request`).
        columns: The fields of StepMetrics as plain arrays, by name.
        block_size: Slots per KV block.
        speculation: The fate of drafts, and of rows computed ahead.
        trace: The trace that was read; None for metrics of several traces.
    """

    summary: Summary
    requests: ByRequest[RequestMetrics]
    columns: Mapping[str, array[Any]]
    block_size: int
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    trace: Trace | None = None

    @cached_property
    def steps(self) -> StepMetrics:
        """Columns with one entry per step."""
        columns = {name: read_only(np.array(column)) for name, column in self.columns.items()}
        return StepMetrics(**columns, block_size=self.block_size)

    @property
    def pauses_note(self) -> str:
        """The pauses of a person, which latencies include as a client saw them, and rates leave out; "" for none."""
        pauses = pauses_of(self.trace) if self.trace is not None and self.summary.clock.idle else []
        if not pauses:
            return ""
        seconds = duration(sum(end - begin for begin, end in pauses))
        return f"latencies include {seconds} in which the engine was stopped while requests were there; rates do not"

    def __repr__(self) -> str:
        note = wrapped(self.pauses_note, terminal_width()) if self.pauses_note else []
        return "\n".join([_table(self.summary, self.speculation), *note])

    def _repr_html_(self) -> str | None:
        return picture("TraceMetrics", self)


def _words(latency: Latency) -> str:
    return counted(latency.steps, "step") if latency.seconds is None else duration(latency.seconds)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


def percentile(ordered: Sequence[float] | Ordered, percent: float) -> float:
    """A percentile of sorted values, interpolated as ``numpy.percentile`` does by default."""
    place = (len(ordered) - 1) * (percent / 100)
    index = int(place)
    low, high, part = ordered[index], ordered[min(index + 1, len(ordered) - 1)], place - index
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)


WORTH_SAYING = 0.01
"""Share of a run's duration from which on the wait before it is stated."""

AT_LEAST = ">="
"""Stands before a value that is a lower bound."""


def still_without(count: int, what: str = "first token") -> str:
    """Some requests without a first token or an end, and how they count."""
    has, counts = ("has", "counts") if count == 1 else ("have", "count")
    return f"{counted(count, 'request')} {has} no {what}, and {counts} with the time so far"


LATENCIES = (
    ("time to first token", "ttft"),
    ("  until scheduled", "queue"),
    ("  in prefill", "prefill"),
    ("inter-token latency", "itl"),
    ("end to end", "e2e"),
)
"""Title and field of each latency of a summary; an indented one is a part of the one above it."""

STATISTICS = ("mean", "p50", "p95", "p99", "max")
"""Statistics of a latency in tables."""


def ended_words(num_ended: int, num_requests: int, num_aborted: int = 0, num_failed: int = 0) -> str:
    """The number of requests of a run that ended, and of those among them that were aborted or failed."""
    unusual = {"abort": num_aborted, "error": num_failed}
    ends = ", ".join(f"{count:,} {end_words(reason)}" for reason, count in unusual.items() if count)
    return f"{num_ended:,} of {counted(num_requests, 'request')} ended{f' ({ends})' if ends else ''}"


def heading_lines(summary: Summary, speculation: SpeculationMetrics) -> list[str]:
    """The lines above the latencies of a run: its size, tokens, throughput, use, and drafts if there are any."""
    unit, rates = summary.unit, summary.rates
    ended = ended_words(summary.num_finished, summary.num_requests, summary.num_aborted, summary.num_failed)
    after_preemptions = " (after preemptions too)" if summary.num_preemptions and summary.num_cached_tokens else ""
    return [
        f"{ended} in {counted(summary.num_steps, 'step')}"
        + (_clock_words(summary.clock) if unit == "s" else "")
        + (f" (from step {summary.first_step} on: earlier steps are not in this trace)" if summary.first_step else ""),
        f"tokens: {summary.num_scheduled_tokens:,} scheduled, {summary.num_output_tokens:,} sampled, "
        f"{summary.num_cached_tokens:,} found in the prefix cache{after_preemptions}, "
        f"{summary.num_recomputed_tokens:,} recomputed ({counted(summary.num_preemptions, 'preemption')})",
        f"throughput: {number(rates[0])} output and {number(rates[1])} scheduled tokens per "
        f"{'second' if unit == 's' else 'step'}{' without idle time' if summary.has_idle else ''}",
        f"use: token budget {percent(summary.mean_budget_use)}, KV blocks {percent(summary.mean_kv_use)} "
        f"(peak {percent(summary.peak_kv_use)})",
        *_speculation_lines(speculation),
    ]


def _table(summary: Summary, speculation: SpeculationMetrics) -> str:
    """The summary of a run as a table of plain text."""
    width = terminal_width()
    note = open_note(summary)
    return "\n".join(
        [
            *(piece for line in heading_lines(summary, speculation) for piece in wrapped(line, width)),
            "",
            *latency_lines({name: getattr(summary, name) for _, name in LATENCIES}, width),
            *(wrapped(note, width) if note else ()),
        ]
    )


def latency_lines(found: Mapping[str, Distribution], width: int | None) -> list[str]:
    """The lines of a table of latencies, by their fields in a summary, as wide as a terminal."""
    rows = [["latency", *STATISTICS, "count"]]
    for title, name in LATENCIES:
        if name in found:
            amounts = (found[name].amount(each) for each in STATISTICS)
            rows.append([title, *amounts, f"{found[name].count:,}"])
    return table_lines(rows, left=(0,), width=width)


def run_length(seconds: float) -> str:
    """The length of a run, with more digits than a latency has."""
    return f"{seconds:,.3f} s" if seconds >= 1 else amount(seconds, "s")


def _clock_words(clock: RunClock) -> str:
    """The length of a run, the idle time in it, and the wait before it."""
    length, since_arrival = run_length(clock.duration), run_length(clock.since_arrival)
    has_waited = clock.before > WORTH_SAYING * clock.duration
    wait = f"; {since_arrival} from the first arrival on" if has_waited else ""
    return f", {length}{idle_words(clock.idle)}{wait}"


def open_note(summary: Summary) -> str:
    """The meaning of lower bounds among the latencies, and which gaps are unknown; "" without any."""
    count, unknown = summary.ttft.num_open, summary.num_unknown_gaps
    parts = [f"{still_without(count)}; {AT_LEAST} marks what is at least that"] if count else []
    if unknown:
        parts.append(f"the gap before {counted(unknown, 'token')} is unknown: the token before is not in the trace")
    return "; ".join(parts)


def _speculation_lines(speculation: SpeculationMetrics) -> list[str]:
    lines = []
    if speculation.num_drafts:
        rates = ", ".join(f"{rate:.0%}" for rate in speculation.acceptance_rates)
        lines.append(
            f"drafts: {speculation.num_drafts}, {percent(speculation.acceptance_rate)} accepted (by position {rates}); "
            f"{number(speculation.mean_acceptance_length)} tokens per verification, "
            f"{number(speculation.tokens_per_step)} per request and step that samples"
        )
    if speculation.num_wasted_rows:
        lines.append(
            f"rows and KV slots for nothing: {speculation.num_rejected_rows} of rejected drafts, "
            f"{speculation.num_discarded_rows} of requests that had ended"
        )
    return lines


def number(value: float | None) -> str:
    """A number with four significant digits; a dash for None."""
    return "-" if value is None else significant(value, 4)


def percent(value: float | None) -> str:
    """A fraction as a percentage; a dash for None."""
    return "-" if value is None else f"{value:.1%}"


def amount(value: float | None, unit: str) -> str:
    """A latency with three significant digits, with its unit; a dash for None. Many steps are written out.

    Args:
        value: The latency in ``unit``.
        unit: "s" or "steps".
    """
    if value is None:
        return "-"
    if unit == "steps":
        text = significant(value)
        return f"{text} step{'' if text == '1' else 's'}"
    return duration(value)
