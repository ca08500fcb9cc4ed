"""The rows of a serving table, from the timelines of its requests. Standard library only.

The definitions are those of vLLM's ``bench serve``. TTFT is the time from arrival to the first token, ITL the time
between consecutive events. TPOT of a request is the time from its first token to its last, divided by the number of
tokens after the first. TTFT is split into queue (arrival until work on the prompt begins) and prefill (the rest).
Percentiles interpolate linearly.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from serving.replay import Timeline
from serving.workloads import Workload


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def serving_metrics(workload: Workload, timelines: list[Timeline]) -> dict[str, float]:
    """All rows by name; times in seconds, throughput per second."""
    num_input = sum(len(request.prompt) for request in workload.requests)
    num_output = sum(request.output_tokens for request in workload.requests)
    duration = max(timeline.token_times[-1] for timeline in timelines)
    spans: dict[str, list[float]] = {
        "ttft": [t.token_times[0] - t.arrival for t in timelines],
        "queue": [t.scheduled - t.arrival for t in timelines],
        "prefill": [t.token_times[0] - t.scheduled for t in timelines],
        "tpot": [
            (t.token_times[-1] - t.token_times[0]) / (request.output_tokens - 1)
            for t, request in zip(timelines, workload.requests, strict=True)
            if request.output_tokens > 1
        ],
        "itl": [later - earlier for t in timelines for earlier, later in pairwise(t.token_times)],
    }
    rows = {
        "duration_s": duration,
        "requests_per_s": len(timelines) / duration,
        "output_tokens_per_s": num_output / duration,
        "total_tokens_per_s": (num_input + num_output) / duration,
    }
    for name, values in spans.items():
        rows[f"mean_{name}_s"] = statistics.fmean(values)
        rows[f"median_{name}_s"] = statistics.median(values)
        rows[f"p99_{name}_s"] = percentile(values, 99)
    return rows


def compare_outputs(ours: list[Timeline], theirs: list[Timeline], decode) -> dict[str, int | None]:
    """Number of requests with the same output, and the earliest token (or character) at which one differs.

    Tokens are compared if both sides have them, otherwise texts; ``decode`` turns our tokens into text. A leading space
    is ignored, because mlx-lm's server leaves it out.
    """
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        one, other = (a.tokens, b.tokens) if b.tokens else (decode(a.tokens).lstrip(" "), b.text.lstrip(" "))
        if one != other:
            common = next((i for i, (x, y) in enumerate(zip(one, other)) if x != y), min(len(one), len(other)))
            differences.append(common)
    return {
        "requests": len(ours),
        "equal": len(ours) - len(differences),
        "first_difference": min(differences, default=None),
    }
