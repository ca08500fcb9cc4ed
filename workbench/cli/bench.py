"""``workbench bench``: how fast a model is served on this machine, by the metrics of its trace."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.options import Commands, add_command, add_model_option, add_number
from workbench.ground.field_checks import integer

if TYPE_CHECKING:
    from workbench.distributed.job import MakeEngine
    from workbench.models.load import LoadedModel


def add_parser(commands: Commands) -> None:
    """Add ``bench`` to the commands."""
    parser = add_command(
        commands, "bench", run, "serve random requests and print latency and throughput", extra="engine"
    )
    add_model_option(parser)
    add_number(parser, "--num-requests", 8, "number of requests, which all arrive at the start")
    add_number(parser, "--input-len", 128, "prompt tokens of each request")
    add_number(parser, "--output-len", 32, "output tokens of each request")
    add_number(parser, "--max-num-batched-tokens", 256, "token budget")
    add_number(parser, "--max-num-seqs", 16, "maximum number of running requests")
    parser.add_argument("--attention-backend", default="auto", help='"auto" or a backend by name')
    add_number(parser, "--seed", 0, "seed of the random prompts")
    parser.add_argument("--trace", type=Path, metavar="OUT.jsonl", help="file to save the trace to")


def run(options: argparse.Namespace) -> int:
    """Serve the requests and print the metrics.

    Raises:
        ValueError: A count is not positive, or the model cannot serve a request.
        OSError: The trace cannot be written.
    """
    for name in ("num_requests", "input_len", "output_len"):
        integer(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    from workbench.distributed.job import run_job

    return run_job(options.model, partial(serve_requests, options))


def serve_requests(options: argparse.Namespace, model: LoadedModel, make_engine: MakeEngine) -> int:
    """Serve the requests with a loaded model and print the metrics."""
    from workbench.bench import RandomRequests, measure

    requests = RandomRequests(options.num_requests, options.input_len, options.output_len, options.seed)
    config = requests.config(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        attention_backend=options.attention_backend,
    )
    result = measure(make_engine, model.vocab_size, requests, config, options.trace)
    num_steps = len(result.trace)
    print(result.engine)
    print(
        f"{requests.count} requests of {requests.input_len} + {requests.output_len} tokens, "
        f"{result.cpu_seconds:.2f} s of CPU"
    )
    print(result.trace.metrics())
    if result.num_saved is not None:
        if result.num_saved < num_steps:
            raise OSError(f"{options.trace} holds {result.num_saved} of {num_steps} steps: it is cut off")
        print(f"{num_steps} steps saved to {options.trace}")
    return 0
