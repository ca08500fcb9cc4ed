"""Random requests served by a model, as ``workbench bench`` measures them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.config import EngineConfig, SamplingParams
from workbench.trace import Trace

if TYPE_CHECKING:
    from workbench.distributed.job import MakeEngine

BLOCK_SIZE = 16


@dataclass(frozen=True)
class RandomRequests:
    """Requests of one length that all arrive at the start.

    Attributes:
        count: Number of requests.
        input_len: Prompt tokens of each.
        output_len: Output tokens of each.
        seed: Seed of the prompts.
    """

    count: int
    input_len: int
    output_len: int
    seed: int = 0

    def config(self, *, max_num_seqs: int, **others: Any) -> EngineConfig:
        """A configuration whose KV blocks suffice for all running requests.

        Args:
            max_num_seqs: Maximum number of running requests.
            **others: Other EngineConfig fields.
        """
        blocks_per_request = -(-(self.input_len + self.output_len) // BLOCK_SIZE)
        return EngineConfig(
            max_num_seqs=max_num_seqs,
            block_size=BLOCK_SIZE,
            num_blocks=1 + blocks_per_request * min(self.count, max_num_seqs),
            enable_prefix_caching=False,
            **others,
        )


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


def measure(
    make_engine: MakeEngine, vocab_size: int, requests: RandomRequests, config: EngineConfig, trace_path: Path | None
) -> BenchResult:
    """Serve random requests with a warm engine.

    Args:
        make_engine: Makes an engine of a configuration.
        vocab_size: Number of token ids to draw from.
        requests: The requests.
        config: Configuration of the engine.
        trace_path: File to which the trace is saved, None for no file.
    """
    rng = random.Random(requests.seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    with make_engine(config) as engine:  # compiles the kernels and touches the weights
        engine.add_request(prompt(8), SamplingParams(max_tokens=2))
        engine.run(progress=False)
    with make_engine(config) as engine:
        # Record while it runs: when another rank of the job is lost, this process ends at once and cannot save.
        recording = engine.trace.record_to(trace_path) if trace_path else None
        started = time.process_time()
        for _ in range(requests.count):
            sampling = SamplingParams(max_tokens=requests.output_len, ignore_eos=True)
            engine.add_request(prompt(requests.input_len), sampling)
        engine.run()
        cpu_seconds = time.process_time() - started
        description = str(engine)
    if recording is not None:
        recording.close("done")
    return BenchResult(description, engine.trace, cpu_seconds, recording.num_steps if recording else None)
