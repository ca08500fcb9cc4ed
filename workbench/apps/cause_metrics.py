"""The causes of latencies of recordings that grow, as metrics in Prometheus' text format.

Names have no colon: prometheus_client replaces it for a Prometheus that asks for OpenMetrics, and for nobody else.
Labels take their values from fixed lists, and from the names of ranks; no request, user or text is in them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workbench.analysis.cause_totals import REASONS, CauseTotals, totals_of
from workbench.analysis.causes import KINDS
from workbench.trace import Trace

log = logging.getLogger("workbench")

UPDATE_SECONDS = 5.0
"""Shortest time between two updates."""

SHARE = 0.1
"""Share of the time that updates of long recordings may take; they come less often then."""


class CauseCollector(Collector):
    """Metrics of the counters of several ranks.

    Args:
        traces: Gives the recordings by the names of their ranks; the name of a single one is "".
    """

    def __init__(self, traces: Callable[[], Mapping[str, Trace]]) -> None:
        self._traces = traces
        self._totals: dict[str, CauseTotals] = {}
        self._blocks: dict[str, int] = {}
        self._lock = threading.Lock()

    def update(self) -> None:
        """Count what is new in the recordings."""
        traces = self._traces()
        with self._lock:
            self._totals = totals_of(traces, self._totals)
            self._blocks = {name: (trace.num_blocks or 1) - 1 for name, trace in traces.items()}

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        with self._lock:
            yield from self._latencies()
            yield from self._state()

    def _latencies(self) -> Iterator[Metric]:
        for by, meaning in (("ttft", "times to first token"), ("e2e", "times from arrival to the end")):
            seconds = CounterMetricFamily(
                f"workbench_{by}_cause_seconds", f"Seconds of requests' {meaning}, by cause.", labels=("rank", "cause")
            )
            requests = CounterMetricFamily(
                f"workbench_{by}_requests", f"Number of requests in workbench_{by}_cause_seconds.", labels=("rank",)
            )
            for rank, totals in self._totals.items():
                requests.add_metric([rank], totals.num_requests[by])
                for cause in KINDS:
                    seconds.add_metric([rank, cause], totals.seconds[by][cause])
            yield from (seconds, requests)

    def _state(self) -> Iterator[Metric]:
        def counter(name: str, meaning: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"workbench_{name}", meaning, labels=("rank", *labels))

        def gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"workbench_{name}", meaning, labels=("rank", *labels))

        waited = counter(
            "waited_seconds", "Seconds of all requests in steps that left them waiting, by reason.", "reason"
        )
        waiting = gauge("waiting_requests", "Requests that the newest step left waiting, by reason.", "reason")
        running = gauge("running_requests", "Requests that run after the newest step.")
        used = gauge("kv_blocks_used_ratio", "Share of the KV blocks in use after the newest step.")
        steps, preemptions = counter("steps", "Steps."), counter("preemptions", "Preemptions.")
        newest = gauge("newest_step_time_seconds", "Wall clock of the end of the newest step, since the epoch.")
        for rank, totals in self._totals.items():
            for reason in REASONS:
                waited.add_metric([rank, reason], totals.waited[reason])
                waiting.add_metric([rank, reason], totals.waiting[reason])
            steps.add_metric([rank], totals.num_steps)
            preemptions.add_metric([rank], totals.num_preemptions)
            if (record := totals.newest) is None:
                continue
            running.add_metric([rank], len(set(record.running) - {*record.finished, *record.aborted}))
            if blocks := self._blocks[rank]:
                used.add_metric([rank], 1.0 - record.free_blocks_end / blocks)
            if totals.created:
                newest.add_metric([rank], totals.created + record.end)
        yield from (waited, waiting, running, used, steps, preemptions, newest)


@contextmanager
def serve_causes(traces: Callable[[], Mapping[str, Trace]], port: int) -> Iterator[int]:
    """Serve the metrics of recordings at a port of 127.0.0.1, and keep them fresh, until the context ends.

    Args:
        traces: See `CauseCollector`.
        port: The port; 0 chooses a free one.

    Yields:
        The port.

    Raises:
        OSError: The port cannot be used.
    """
    collector, registry = CauseCollector(traces), CollectorRegistry()
    collector.update()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, "127.0.0.1", registry)
    except OSError as problem:
        hint = "choose another one with --metrics-port"
        raise OSError(f"port {port} of 127.0.0.1 cannot be used: {problem.strerror}; {hint}") from problem
    stop = threading.Event()

    def keep_fresh() -> None:
        pause = UPDATE_SECONDS
        while not stop.wait(pause):
            begin = time.thread_time()
            try:
                collector.update()
            except Exception:
                log.exception("an update of metrics failed")
            pause = max(UPDATE_SECONDS, (time.thread_time() - begin) / SHARE)

    updates = threading.Thread(target=keep_fresh, name="workbench-causes", daemon=True)
    updates.start()
    try:
        yield server.server_port
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join()
        updates.join(UPDATE_SECONDS)
