"""A running server, asked for its ``/metrics`` again and again: what is kept of the answers is small and bounded."""

from __future__ import annotations

import threading
import time
from collections import deque
from http.client import HTTPException
from math import isfinite
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from workbench.base.text import shown
from workbench.trace.errors import TraceError
from workbench.trace.formats.kv_events.live import LiveEvents
from workbench.trace.formats.scrapes import Scrape, Scrapes, Window, samples_of, vllm_only, window_between

FETCH_SECONDS = 5.0
"""Time that a server has for its answer; one that hangs may not answer at all."""

MAX_ANSWER_BYTES = 2**26
"""Maximum length of an answer that is read."""

POLL_SECONDS = 2.0
"""Time between two looks at a server."""

MAX_MOMENTS = 1800
"""Moments that are kept: an hour."""

RECENT = 31
"""Scrapes that are kept whole: a minute."""


class Moment(NamedTuple):
    """The state of a server at a look, and the changes since the look before. None: the server does not say it.

    Attributes:
        at: Seconds since the epoch.
        running: Number of running requests.
        waiting: Number of waiting ones.
        deferred: Number of those that wait for an event outside the scheduler.
        kv_use: Share of the KV blocks in use, of the engine that has most.
        hit_rate: Share of the prompt tokens looked up since then that were in the prefix cache.
        queue: Mean seconds that requests waited which ended since then: vLLM counts a wait at the end.
        ttft: Mean seconds to the first tokens since then.
        preemptions: Preemptions since then.
        tokens: Output tokens per second since then.
        cached_blocks: Number of blocks in the prefix cache, by KV events.
    """

    at: float
    running: float | None = None
    waiting: float | None = None
    deferred: float | None = None
    kv_use: float | None = None
    hit_rate: float | None = None
    queue: float | None = None
    ttft: float | None = None
    preemptions: float | None = None
    tokens: float | None = None
    cached_blocks: int | None = None


def moment_of(window: Window, cached_blocks: int | None = None) -> Moment:
    """The end of a time between two scrapes, and what happened in it."""
    last = window.last
    queries, hits = (window.increase(f"vllm:prefix_cache_{what}_total") for what in ("queries", "hits"))
    output = window.increase("vllm:generation_tokens_total")
    use = [share for share in last.values("vllm:kv_cache_usage_perc", "engine").values() if isfinite(share)]
    means = [None if (found := window.latency(name)) is None else found.mean for name in ("queue", "ttft")]
    return Moment(
        at=last.at,
        running=_finite(last.total("vllm:num_requests_running")),
        waiting=_finite(last.total("vllm:num_requests_waiting")),
        deferred=_finite(last.total("vllm:num_requests_waiting_by_reason", reason="deferred")),
        kv_use=max(use) if use else None,
        hit_rate=hits / queries if queries and hits is not None else None,
        queue=means[0],
        ttft=means[1],
        preemptions=window.increase("vllm:num_preemptions_total"),
        tokens=None if output is None else output / window.seconds,
        cached_blocks=cached_blocks,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def metrics_address(url: str) -> str:
    """The address of a server's metrics.

    Args:
        url: Its address, with or without /metrics.

    Raises:
        ValueError: It is not the address of a server.
    """
    hint = "must be the address of a server, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as problem:
        raise ValueError(f"{shown(url)} {hint}: {problem}") from None
    if not is_address or parts.query or parts.fragment:
        raise ValueError(f"{shown(url)} {hint}")
    return url if parts.path.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"


def fetch_scrape(url: str) -> Scrape:
    """One scrape of a running server.

    Args:
        url: Its address, with or without /metrics.

    Raises:
        ValueError: It is not the address of a server.
        TraceError: The answer is not vLLM's metrics.
        OSError: The server does not answer.
    """
    address = metrics_address(url)
    until = time.monotonic() + FETCH_SECONDS
    text = bytearray()
    try:
        with urlopen(address, timeout=FETCH_SECONDS) as answer:  # noqa: S310 - the user's own address
            kind = answer.headers.get_content_type()
            if kind == "text/html":
                raise TraceError(f"{address} is a web page (text/html), not the metrics of a vLLM server")
            while piece := answer.read1(2**16):
                text += piece
                if len(text) > MAX_ANSWER_BYTES:
                    raise TraceError(
                        f"{address} answers with more than {MAX_ANSWER_BYTES >> 20} MiB: not vLLM's metrics"
                    )
                if time.monotonic() > until:
                    raise TimeoutError(f"{address} did not finish its answer in {FETCH_SECONDS:g} s")
    except HTTPError as problem:
        hint = "a vLLM server has its metrics there; is this the server, and not a proxy that hides them?"
        with problem:
            raise TraceError(f"{address} answers with HTTP status {problem.code}: {hint}") from None
    except URLError as problem:
        raise OSError(f"{address} does not answer: {problem.reason}; does vLLM serve there?") from None
    except HTTPException as problem:
        raise TraceError(f"{address} does not speak HTTP: {type(problem).__name__}: {problem}") from None
    scrape = Scrape(time.time(), samples_of(address, text.decode("utf-8", "replace")))
    return vllm_only(address, [scrape])[0]


def fetch_scrapes(url: str, seconds: float) -> Scrapes:
    """Two scrapes of a running server.

    Args:
        url: Its address, with or without /metrics.
        seconds: Time between the scrapes.

    Raises:
        ValueError: It is not the address of a server.
        TraceError: The answer is not vLLM's metrics.
        OSError: The server does not answer.
    """
    first = fetch_scrape(url)
    time.sleep(seconds)
    return Scrapes(Path(urlsplit(url).netloc), (first, fetch_scrape(url)))


class ServerFollower:
    """A running server, looked at every two seconds on a separate thread.

    Args:
        url: Its address.
        events: Its KV events; None if they are not known.
        seconds: Time between two looks.

    Attributes:
        url: Its address.
        moments: Its answers, the oldest first; a look without an answer is a moment without values.
        problem: Why the last look failed; "" if it did not.

    Raises:
        ValueError: The address is not one.
        TraceError: The answer is not vLLM's metrics.
        OSError: The server does not answer.
    """

    def __init__(self, url: str, events: LiveEvents | None = None, *, seconds: float = POLL_SECONDS) -> None:
        self.url, self.events, self.problem = url, events, ""
        self.moments: deque[Moment] = deque(maxlen=MAX_MOMENTS)
        self._seconds = seconds
        self._recent: deque[Scrape] = deque([fetch_scrape(url)], maxlen=RECENT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="workbench-metrics", daemon=True)

    def __enter__(self) -> ServerFollower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(FETCH_SECONDS + self._seconds)

    def _follow(self) -> None:
        while not self._stop.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """Ask the server once."""
        try:
            scrape = fetch_scrape(self.url)
        except (OSError, ValueError) as problem:
            self.problem = str(problem)
            self.moments.append(Moment(time.time()))
            return
        self.problem = ""
        before = self._recent[-1]
        if scrape.at <= before.at:  # the clock was set back
            self._recent.clear()
            self.moments.clear()
        else:
            window = window_between(before, scrape)
            if window.restarted:
                self._recent.clear()
            self.moments.append(moment_of(window, None if self.events is None else self.events.num_cached))
        self._recent.append(scrape)

    @property
    def minute(self) -> Scrapes | None:
        """The scrapes of the last minute, from a restart on; None before the second one."""
        recent = tuple(self._recent)
        return Scrapes(Path(urlsplit(self.url).netloc), recent) if len(recent) > 1 else None
