"""The requests of a file as they were understood, in a few words: a wrong unit is seen at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from workbench.base.text import counted, significant
from workbench.simulation.arrivals import Arrival
from workbench.trace.readings.metrics import number

MANY_TOKENS = 2**22
"""Prompt tokens beyond which prefixes are compared in larger blocks, in the time that a glance may take."""


def summary_of(arrivals: Sequence[Arrival], block_size: int | None = None) -> str:
    """Number, span, rate, lengths and shared prefixes of requests.

    Args:
        arrivals: The requests.
        block_size: Tokens in which prefixes are compared, as those of a KV block; None for 16, or 256 if the prompts
            are very long.
    """
    if not arrivals:
        return "no requests"
    prompts = [len(arrival.prompt_token_ids) for arrival in arrivals]
    total = sum(prompts)
    block_size = block_size or (16 if total <= MANY_TOKENS else 256)
    lines = [
        f"{counted(len(arrivals), 'request')} {_span(arrivals)}",
        f"prompts of {_range(prompts)}, outputs of {_range([arrival.max_tokens for arrival in arrivals])}",
        f"{_num_shared(arrivals, block_size) / total:.0%} of {counted(total, 'prompt token')} repeat the "
        f"beginning of an earlier prompt, in whole blocks of {block_size}",
    ]
    return "; ".join(lines)


def summary_of_generated(spec: Mapping[str, Any]) -> str:
    """The same of requests that are made one by one, from their description under ``generate``."""
    arrivals = spec.get("arrivals") or {"process": "at_once"}
    process = arrivals["process"].replace("_", " ")
    rate = f", {significant(arrivals['rate'], 6)} per second" if "rate" in arrivals else ""
    return (
        f"{counted(spec['num_requests'], 'generated request')} ({process}{rate}); prompts of "
        f"{_lengths_words(spec['prompt'])}, outputs of {_lengths_words(spec['output'])}; no shared prefixes"
    )


def _lengths_words(spec: Any) -> str:
    """A distribution of lengths as `read_lengths` of `workbench.simulation.arrivals` takes it, as a person says it."""
    if isinstance(spec, int):
        return counted(spec, "token")
    ((kind, value),) = spec.items()
    if kind == "choices":
        total = sum(weight for weight, _ in value)
        return " or ".join(f"{tokens:,} ({weight / total:.0%})" for weight, tokens in value) + " tokens"
    if kind == "uniform":
        return f"{value[0]:,} to {value[1]:,} tokens"
    ends = [f"{words} {value[name]:,}" for name, words in (("min", "at least"), ("max", "at most")) if name in value]
    bounds = f"; {', '.join(ends)}" if ends else ""
    return f"{value['median']:,} tokens in the middle (lognormal, sigma {value['sigma']:g}{bounds})"


def arrival_rate(times: Sequence[float]) -> float:
    """Requests per second: all of them, in the time from the first arrival to the last; 0 if they arrive together.

    Args:
        times: Their arrivals in seconds.
    """
    span = max(times, default=0.0) - min(times, default=0.0)
    return len(times) / span if span else 0.0


def arrival_times(arrivals: Sequence[Arrival]) -> list[float]:
    """The arrivals of requests in seconds; one without a time comes at the start."""
    return [0.0 if arrival.arrives_at is None else arrival.arrival_time for arrival in arrivals]


def rate_words(rate: float | None) -> str:
    """An `arrival_rate` as text, for a table; a dash for None."""
    return "-" if rate is None else significant(rate) if rate else "together"


def _span(arrivals: Sequence[Arrival]) -> str:
    if all(arrival.arrives_at is None for arrival in arrivals):
        steps = [arrival.arrival_step for arrival in arrivals]
        return f"at steps {min(steps)} to {max(steps)}" if max(steps) else "that arrive together"
    times = arrival_times(arrivals)
    rate = arrival_rate(times)
    return f"in {max(times) - min(times):,.6g} s ({rate_words(rate)} per second)" if rate else "that arrive together"


def _range(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return counted(low, "token") if low == high else f"{low:,} to {high:,} tokens (mean {number(fmean(lengths))})"


def _num_shared(arrivals: Sequence[Arrival], block_size: int) -> int:
    """Prompt tokens in whole blocks that an earlier prompt began with."""
    seen: set[int] = set()
    num_shared = 0
    for arrival in arrivals:
        prompt = arrival.prompt_token_ids
        prefix = hash((arrival.cache_salt, arrival.adapter))
        for start in range(0, len(prompt) - len(prompt) % block_size, block_size):
            prefix = hash((prefix, tuple(prompt[start : start + block_size])))
            num_shared += block_size if prefix in seen else 0
            seen.add(prefix)
    return num_shared
