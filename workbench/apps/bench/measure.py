"""Requests served by a warm engine as they arrive, as ``workbench bench`` measures them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.apps.bench.datasets import BenchRequest
from workbench.config import EngineConfig, SamplingParams
from workbench.trace import Trace

if TYPE_CHECKING:
    from workbench.engine.distributed.job import MakeEngine
    from workbench.engine.engine import Engine

BLOCK_SIZE = 16


@dataclass(frozen=True)
class BenchResult:
    """Measurements of a benchmark.

    Attributes:
        engine: Description of the engine.
        trace: All steps.
        cpu_seconds: Processor time of this process.
        num_saved: Steps in the trace file, None without one.
    """

    engine: str
    trace: Trace
    cpu_seconds: float
    num_saved: int | None


def config_for(requests: Sequence[BenchRequest], *, max_num_seqs: int, **others: Any) -> EngineConfig:
    """A configuration without prefix caching whose KV blocks suffice for the longest requests at all seats.

    Args:
        requests: The requests.
        max_num_seqs: Maximum number of running requests.
        **others: Other EngineConfig fields, ``num_blocks`` among them.
    """
    largest = sorted((-(-request.num_tokens // BLOCK_SIZE) for request in requests), reverse=True)
    fields = {"num_blocks": 1 + sum(largest[:max_num_seqs]), "enable_prefix_caching": False, **others}
    return EngineConfig(max_num_seqs=max_num_seqs, block_size=BLOCK_SIZE, **fields)


def measure(
    make_engine: MakeEngine,
    requests: Sequence[BenchRequest],
    config: EngineConfig,
    *,
    request_rate: float | None = None,
    seed: int = 0,
    trace_path: Path | None = None,
) -> BenchResult:
    """Serve requests with a warm engine.

    Args:
        make_engine: Makes an engine of a configuration.
        requests: The requests, in order of arrival.
        config: Configuration of the engine.
        request_rate: Arrivals per second, Poisson; None if all arrive at the start.
        seed: Seed of the arrivals.
        trace_path: File to which the trace is saved, None for no file.
    """
    rng, at, arrivals = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in requests:
        arrivals.append(at)
        at += rng.expovariate(request_rate) if request_rate else 0.0
    with make_engine(config) as engine:  # compiles the kernels and touches the weights
        engine.add_request(list(requests[0].prompt[:8]), SamplingParams(max_tokens=2))
        engine.run(progress=False)
    with make_engine(config) as engine:
        # Record while it runs: when another rank of the job is lost, this process ends at once and cannot save.
        recording = engine.trace.record_to(trace_path) if trace_path else None
        started = time.process_time()
        _serve(engine, requests, arrivals)
        cpu_seconds = time.process_time() - started
        description = str(engine)
    if recording is not None:
        recording.close("done")
    return BenchResult(description, engine.trace, cpu_seconds, recording.num_steps if recording else None)


def _serve(engine: Engine, requests: Sequence[BenchRequest], arrivals: Sequence[float]) -> None:
    """Add each request when its time has come, and step while there is one."""
    begin, place = time.perf_counter(), 0
    while place < len(requests):
        now = time.perf_counter() - begin
        while place < len(requests) and arrivals[place] <= now:
            sampling = SamplingParams(max_tokens=requests[place].output_len, ignore_eos=True)
            engine.add_request(list(requests[place].prompt), sampling)
            place += 1
        if place < len(requests) and engine.step() is None:
            time.sleep(max(0.0, arrivals[place] - (time.perf_counter() - begin)))
    engine.run()
