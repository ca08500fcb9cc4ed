"""Scrapes of vLLM's ``/metrics``, recorded one after the other: what its counters and histograms say about a time.

A file holds any number of scrapes in Prometheus' text format. A comment with the time comes before each of them:

    while sleep 5; do echo "# scraped $(date +%s)"; curl -s localhost:8000/metrics; done >> metrics.prom

Counters and histograms hold sums since the server started, so the difference of two scrapes is what happened between
them. The mean of a latency is exact; a percentile is known up to its bucket.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from workbench.base.on_demand import extra_for
from workbench.base.outside_files import open_text
from workbench.base.text import shown
from workbench.trace.errors import TraceError
from workbench.trace.readings.metrics import amount, number

MARK = re.compile(r"^# scraped (\d+(?:\.\d+)?)\s*$", re.MULTILINE)
"""The comment before a scrape, with seconds since the epoch."""

LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}
"""vLLM's histogram of each latency. Queue, prefill and decode are the parts of a request's time in the engine."""

MAX_EPOCH = 1e10
"""Latest time of a scrape, in seconds since 1970: the year 2286. A larger number counts milliseconds."""

PARTS = ("queue", "prefill", "decode")

PERCENTILES = (0.5, 0.99)

CANNOT = (
    "which request was slow and behind whom it waited, what happened between two scrapes, a percentile more exactly "
    "than its bucket, or another setting (whatif, tune): counters hold no requests, arrivals or steps"
)


class Scrape(NamedTuple):
    """One scrape; samples of several engines (data-parallel ranks) are kept apart.

    Attributes:
        at: Seconds since the epoch.
        samples: Values by the sample's name and labels.
    """

    at: float
    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of all samples of a name with these labels; None if there is none."""
        found = [value for (each, given), value in self.samples.items() if each == name and labels.items() <= given]
        return sum(found) if found else None

    def values(self, name: str, label: str) -> dict[str, float]:
        """The samples of a name, added up by one of their labels."""
        sums: defaultdict[str, float] = defaultdict(float)
        for (each, given), value in self.samples.items():
            if each == name and (key := dict(given).get(label)) is not None:
                sums[key] += value
        return dict(sums)


class BucketRange(NamedTuple):
    """The bucket that holds a percentile: it is more than ``low`` and at most ``high``, in seconds."""

    low: float
    high: float

    def __str__(self) -> str:
        if self.high == float("inf"):
            return f"more than {amount(self.low, 's')}"
        return f"{amount(self.low, 's')} to {amount(self.high, 's')}" if self.low else f"up to {amount(self.high, 's')}"


@dataclass(frozen=True)
class BucketedLatency:
    """A latency between two scrapes.

    Attributes:
        count: Number of values.
        mean: Their mean in seconds, exact.
        percentiles: The bucket of each of ``PERCENTILES``.
    """

    count: int
    mean: float
    percentiles: tuple[BucketRange, ...]


@dataclass(frozen=True)
class Window:
    """The time between two scrapes.

    Attributes:
        first: The earlier scrape.
        last: The later one.
        restarted: Whether a counter became smaller between two scrapes: the server was restarted, and sums count
            from then on.
    """

    first: Scrape
    last: Scrape
    restarted: bool = False

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.last.at - self.first.at

    def increase(self, name: str, **labels: str) -> float | None:
        """The increase of a counter; None if the server has no such counter."""
        end = self.last.total(name, **labels)
        if end is None:
            return None
        grown = end - (0.0 if self.restarted else self.first.total(name, **labels) or 0.0)
        return grown if isfinite(grown) else None

    def latency(self, name: str) -> BucketedLatency | None:
        """One of ``LATENCIES`` over the requests, or tokens, of this time; None if there were none."""
        metric = LATENCIES[name]
        count, total = self.increase(f"{metric}_count"), self.increase(f"{metric}_sum")
        if not count or total is None:
            return None
        bounds = sorted((float(bound), bound) for bound in self.last.values(f"{metric}_bucket", "le"))
        below = [(bound, self.increase(f"{metric}_bucket", le=text) or 0.0) for bound, text in bounds]
        ranges = []
        for percentile in PERCENTILES:
            low = 0.0
            for bound, seen in below:
                if seen >= percentile * count:
                    ranges.append(BucketRange(low, bound))
                    break
                low = bound
        return BucketedLatency(round(count), total / count, tuple(ranges))

    @property
    def num_finished(self) -> float:
        """Number of requests that ended."""
        return self.increase("vllm:request_success_total") or 0.0

    @property
    def num_steps(self) -> float | None:
        """Number of steps that vLLM counted; None if it counts none."""
        return self.increase("vllm:iteration_tokens_total_count")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        seconds = self.seconds
        output, prompt = (self.increase(f"vllm:{kind}_tokens_total") for kind in ("generation", "prompt"))
        rates = [f"{self.num_finished / seconds:.2f} requests ended per second"]
        rates += [
            f"{number(tokens / seconds)} {name} tokens/s"
            for name, tokens in (("prompt", prompt), ("output", output))
            if tokens is not None
        ]
        yield ", ".join(rates)
        if self.num_steps:
            tokens = self.increase("vllm:iteration_tokens_total_sum") or 0.0
            yield (
                f"{self.num_steps:,.0f} steps of {number(tokens / self.num_steps)} tokens on average, at most "
                f"{amount(seconds / self.num_steps, 's')} each"
            )
        for name, metric in LATENCIES.items():
            if (found := self.latency(name)) is not None:
                shown = ", ".join(f"p{100 * p:.0f} {each}" for p, each in zip(PERCENTILES, found.percentiles))
                yield f"{name}: mean {amount(found.mean, 's')}, {shown} ({found.count} values, {metric})"
        parts = {name: each.mean for name in PARTS if (each := self.latency(name)) is not None}
        if whole := sum(parts.values()):
            shares = ", ".join(f"{name} {value / whole:.0%}" for name, value in parts.items())
            yield f"a request's time in the engine: {shares}"
        yield from self._cache_lines()

    def _cache_lines(self) -> Iterator[str]:
        queries, hits = (self.increase(f"vllm:prefix_cache_{what}_total") for what in ("queries", "hits"))
        if queries and hits is not None:
            yield f"prefix cache: {hits / queries:.0%} of {queries:.0f} prompt tokens found"
        preemptions = self.increase("vllm:num_preemptions_total")
        if preemptions is not None:
            yield f"{preemptions:,.0f} preemptions"


@dataclass(frozen=True, eq=False)
class Scrapes:
    """The scrapes of one server.

    Attributes:
        path: The file.
        scrapes: At least two, in order of time.
    """

    path: Path
    scrapes: tuple[Scrape, ...]

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The times between two scrapes that follow each other."""
        return tuple(window_between(first, last) for first, last in pairwise(self.scrapes))

    @cached_property
    def whole(self) -> Window:
        """From the first scrape, or the first one after the latest restart, to the last."""
        begin = max((i for i, window in enumerate(self.windows, start=1) if window.restarted), default=0)
        if begin == len(self.scrapes) - 1:  # restarted just before the last scrape
            return self.windows[-1]
        return Window(self.scrapes[begin], self.scrapes[-1])

    @property
    def num_restarts(self) -> int:
        """Number of restarts that a counter shows."""
        return sum(window.restarted for window in self.windows)

    @property
    def settings(self) -> dict[str, str]:
        """The labels of ``vllm:cache_config_info``: block size, number of blocks and so on."""
        for name, labels in self.scrapes[-1].samples:
            if name == "vllm:cache_config_info":
                return dict(labels)
        return {}

    def _gauge(self, name: str) -> str | None:
        given = [value for scrape in self.scrapes if (value := scrape.total(name)) is not None]
        if not (values := list(filter(isfinite, given))):
            return "unknown" if given else None
        return f"{sum(values) / len(values):.1f} on average, at most {max(values):.0f}"

    def _kv_use(self) -> str | None:
        given = [scrape.values("vllm:kv_cache_usage_perc", "engine").values() for scrape in self.scrapes]
        values = [max(known) for by_engine in given if (known := list(filter(isfinite, by_engine)))]
        if not values:
            return "unknown" if any(given) else None
        return f"{sum(values) / len(values):.0%} on average, at most {max(values):.0%}"

    def __repr__(self) -> str:
        whole = self.whole
        lines = [f"{len(self.scrapes)} scrapes of {self.path.name} over {whole.seconds:.1f} s"]
        if self.num_restarts:
            lines.append(
                f"the server was restarted {self.num_restarts} times: what follows is from the last restart on"
            )
        settings = self.settings
        known = {"block_size": "block size", "num_gpu_blocks": "KV blocks", "enable_prefix_caching": "prefix caching"}
        if shown := [f"{words} {settings[name]}" for name, words in known.items() if settings.get(name)]:
            lines.append(", ".join(shown))
        lines += whole._lines()
        gauges = {
            "running requests": self._gauge("vllm:num_requests_running"),
            "waiting requests": self._gauge("vllm:num_requests_waiting"),
            "use of KV blocks": self._kv_use(),
        }
        lines += [f"{name} at the scrapes: {said}" for name, said in gauges.items() if said]
        reasons: defaultdict[str, float] = defaultdict(float)
        for scrape in self.scrapes:
            for reason, value in scrape.values("vllm:num_requests_waiting_by_reason", "reason").items():
                reasons[reason] += value / len(self.scrapes)
        if any(reasons.values()):
            shown = [f"{reason} {value:.1f}" for reason, value in reasons.items() if value]
            lines.append(f"waiting by reason, on average: {', '.join(shown)}")
        lines += [
            "can answer: rates, mean latencies, the share of time spent waiting, hits in the prefix cache, preemptions",
            f"cannot answer: {CANNOT}",
        ]
        return "\n".join(lines)


def window_between(first: Scrape, last: Scrape) -> Window:
    """The time between two scrapes; a counter or a histogram that is smaller in the later one shows a restart."""
    counts = ((key, value) for key, value in first.samples.items() if key[0].endswith(("_total", "_count")))
    return Window(first, last, any(key in last.samples and last.samples[key] < value for key, value in counts))


def is_scrapes(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds scrapes, by its beginning."""
    with open_text(path, errors="replace") as file:
        return MARK.search(file.read(4096)) is not None


def read_scrapes(path: str | os.PathLike[str]) -> Scrapes:
    r"""Scrapes of vLLM's metrics, each after a comment ``# scraped SECONDS``.

    Args:
        path: A file in Prometheus' text format.

    Raises:
        TraceError: There are fewer than two scrapes, one is malformed, their times do not increase, or they are not
            vLLM's.
        OSError: The file cannot be read.
        ModuleNotFoundError: prometheus_client, of the extra ``serve``, is not installed; vLLM brings it.

    Example:
        >>> sample = 'vllm:generation_tokens_total{engine="0"}'
        >>> _ = Path("metrics.prom").write_text(f"# scraped 10\n{sample} 50\n# scraped 15\n{sample} 300\n")
        >>> read_scrapes("metrics.prom").whole.increase("vllm:generation_tokens_total")
        250.0
    """
    with open_text(path, errors="replace") as file:
        _, *pieces = MARK.split(file.read())
    scrapes = []
    for place, (at, text) in enumerate(zip(pieces[::2], pieces[1::2]), start=1):
        if float(at) > MAX_EPOCH:
            raise TraceError(
                f"{path}, scrape {place}: its time must be in seconds since 1970, at most {MAX_EPOCH:g}, got "
                f"{shown(at)}"
            )
        if text.strip():  # an empty one: the server did not answer
            scrapes.append(Scrape(float(at), samples_of(f"{path}, scrape {place}", text)))
    if len(scrapes) < 2:
        raise TraceError(
            f"{path} holds {len(scrapes)} scrapes, and at least 2 are needed: write a line '# scraped SECONDS' before "
            "each of them"
        )
    for place, (before, after) in enumerate(pairwise(scrapes), start=2):
        if after.at <= before.at:
            raise TraceError(f"{path}, scrape {place}: its time {after.at} must be later than {before.at}")
    return Scrapes(Path(path), tuple(vllm_only(path, scrapes)))


def vllm_only(place: str | os.PathLike[str], scrapes: list[Scrape]) -> list[Scrape]:
    """The scrapes, if they are vLLM's.

    Raises:
        TraceError: The last one has no sample of vLLM.
    """
    names = sorted({name for name, _ in scrapes[-1].samples})
    if not any(name.startswith("vllm:") for name in names):
        others = f"the first of these is {shown(names[0])}" if names else "there are none"
        raise TraceError(
            f"{place} holds no metrics of vLLM: their names begin with vllm:, and {others}; it is another server, or "
            "vLLM was started with --disable-log-stats"
        )
    return scrapes


def samples_of(place: str, text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples of a text in Prometheus' format.

    Raises:
        TraceError: It is another text.
        ModuleNotFoundError: prometheus_client is not installed.
    """
    with extra_for("reading scrapes"):
        from prometheus_client.parser import text_string_to_metric_families

    try:
        return {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (ValueError, OverflowError, LookupError) as problem:
        raise TraceError(f"{place}: not Prometheus' text format: {str(problem)[:200]}") from None
