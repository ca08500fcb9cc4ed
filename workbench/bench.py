"""``workbench bench``: how fast a model is served on this machine, from a trace's own metrics."""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.engine.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from workbench.distributed.job import MakeEngine
    from workbench.models.load import LoadedModel


def add_bench_parser(commands: argparse._SubParsersAction) -> None:
    """Add the ``bench`` command."""
    parser = commands.add_parser("bench", help="serve random requests and print latency and throughput")
    parser.add_argument("--model", default="smollm2", help='"smollm2" (bundled), a GGUF file, a folder or a repository')
    parser.add_argument("--num-requests", type=int, default=8, help="requests, all there at the start (default 8)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens of each (default 128)")
    parser.add_argument("--output-len", type=int, default=32, help="output tokens of each (default 32)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256, help="token budget (default 256)")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="running requests at most (default 16)")
    parser.add_argument("--attention-backend", default="auto", help='"auto" or a backend by name')
    parser.add_argument("--seed", type=int, default=0, help="seed of the random prompts (default 0)")
    parser.add_argument("--trace", type=Path, metavar="OUT.jsonl", help="where to save the trace")
    parser.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> int:
    """Serve the requests and print the metrics; the exit status.

    Raises:
        ValueError: A count that is not positive, or a request the model cannot serve.
        OSError: The trace cannot be written.
    """
    for name in ("num_requests", "input_len", "output_len"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(options, name)}")
    from workbench.distributed.job import run_job

    return run_job(options.model, partial(_serve_requests, options))


def _serve_requests(options: argparse.Namespace, model: LoadedModel, make_engine: MakeEngine) -> int:
    block_size = 16
    per_request = -(-(options.input_len + options.output_len) // block_size)
    config = EngineConfig(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        block_size=block_size,
        num_blocks=1 + per_request * min(options.num_requests, options.max_num_seqs),
        enable_prefix_caching=False,
        attention_backend=options.attention_backend,
    )
    generator = random.Random(options.seed)

    def prompt(length: int) -> list[int]:
        return [generator.randrange(model.vocab_size) for _ in range(length)]

    warm = make_engine(config)  # compiles the kernels and touches the weights
    warm.add_request(prompt(8), SamplingParams(max_tokens=2))
    warm.run(progress=False)
    warm.close()
    engine = make_engine(config)
    # While it runs: nothing can be saved any more once another rank of the job is lost.
    recording = engine.trace.record_to(options.trace) if options.trace else None
    cpu = time.process_time()
    for _ in range(options.num_requests):
        engine.add_request(prompt(options.input_len), SamplingParams(max_tokens=options.output_len, ignore_eos=True))
    engine.run()
    cpu = time.process_time() - cpu
    print(engine)
    print(f"{options.num_requests} requests of {options.input_len} + {options.output_len} tokens, {cpu:.2f} s of CPU")
    print(engine.trace.metrics())
    engine.close()
    if recording is not None:
        recording.close("done")
        if recording.num_steps < len(engine.trace):
            raise OSError(f"{options.trace} holds {recording.num_steps} of {len(engine.trace)} steps: it is cut off")
        print(f"{recording.num_steps} steps saved to {options.trace}")
    return 0
