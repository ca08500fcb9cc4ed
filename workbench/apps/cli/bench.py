"""``workbench bench``: how fast a model is served on this machine, with the report of ``vllm bench serve``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.apps.cli.options import (
    Commands,
    add_command,
    add_model_option,
    add_number,
    add_out_option,
    say_written,
)
from workbench.apps.cli.say import say, say_text
from workbench.base.field_checks import integer, number
from workbench.base.outside_files import read_text
from workbench.base.text import counted

if TYPE_CHECKING:
    from workbench.apps.bench.datasets import BenchRequest
    from workbench.engine.distributed.job import MakeEngine
    from workbench.models.load import LoadedModel

_EXAMPLES = """\
  workbench bench --num-requests 8 --input-len 32 --output-len 16
  workbench bench --model smollm2 --request-rate 4 --input-len 128 --output-len 32 --num-requests 40
  workbench bench --dataset-name sharegpt --dataset-path sharegpt.json --metric-percentiles 90,99
"""

DATASETS = ("random", "sonnet", "sharegpt")


def _percentiles(text: str) -> list[float]:
    try:
        return [number("a percentile", float(part), 0, 100) for part in text.split(",")]
    except ValueError:
        message = f"must be numbers from 0 to 100 such as 50,90,99, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def add_parser(commands: Commands) -> None:
    """Add ``bench`` to the commands."""
    parser = add_command(
        commands,
        "bench",
        run,
        "serve a benchmark's requests and print latency and throughput",
        examples=_EXAMPLES,
        extra="engine",
    )
    add_model_option(parser)
    parser.add_argument("--dataset-name", choices=DATASETS, default="random", help="the requests (default random)")
    parser.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="sonnet: a text; sharegpt: conversations as JSON"
    )
    add_number(parser, "--num-requests", 8, "number of requests")
    add_number(parser, "--input-len", 128, "prompt tokens of each request; not for sharegpt")
    add_number(parser, "--output-len", 32, "output tokens of each request; not for sharegpt")
    parser.add_argument("--request-rate", type=float, help="requests per second, Poisson (default: all at the start)")
    add_number(parser, "--max-num-batched-tokens", 256, "token budget")
    add_number(parser, "--max-num-seqs", 16, "maximum number of running requests")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of memory for the KV cache (on a GPU: and the model); a small share forces preemptions "
        "(default: as much as the running requests need)",
    )
    parser.add_argument("--attention-backend", default="auto", help='"auto" or a backend by name')
    parser.add_argument(
        "--metric-percentiles", type=_percentiles, default=[99.0], metavar="P,P,...", help="percentiles (default 99)"
    )
    add_number(parser, "--seed", 0, "seed of the requests")
    add_out_option(parser, "OUT.jsonl", "file to save the trace to", before=["--trace"])


def run(options: argparse.Namespace) -> int:
    """Serve the requests and print the metrics.

    Raises:
        ValueError: A count is not positive, a file has another format, or the model cannot serve a request.
        OSError: A file cannot be read or written.
    """
    for name in ("num_requests", "input_len", "output_len"):
        integer(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    if options.request_rate is not None:
        number("--request-rate", options.request_rate, 0, low_open=True)
    if (options.dataset_name == "random") != (options.dataset_path is None):
        needs = "needs" if options.dataset_path is None else "has no file; leave out"
        raise ValueError(f"--dataset-name {options.dataset_name} {needs} --dataset-path FILE")
    if options.dataset_path is not None:
        read_text(options.dataset_path)  # what cannot be read is refused before a model is loaded
    from workbench.engine.distributed.job import run_job

    return run_job(options.model, partial(serve_requests, options))


def serve_requests(options: argparse.Namespace, model: LoadedModel, make_engine: MakeEngine) -> int:
    """Serve the requests with a loaded model and print the metrics."""
    from workbench.apps.bench.measure import config_for, measure
    from workbench.trace.readings.metrics_collector import metrics
    from workbench.trace.readings.serving_report import ServingReport

    requests = _requests(options, model)
    settings: dict[str, Any] = {
        name: getattr(options, name) for name in ("max_num_batched_tokens", "max_num_seqs", "attention_backend")
    }
    if options.gpu_memory_utilization is not None:
        settings |= {"num_blocks": "auto", "gpu_memory_utilization": options.gpu_memory_utilization}
    result = measure(
        make_engine,
        requests,
        config_for(requests, **settings),
        request_rate=options.request_rate,
        seed=options.seed,
        trace_path=options.out,
    )
    num_steps = len(result.trace)
    say_text(result.engine)
    say(f"{_sizes(requests)}, {result.cpu_seconds:.2f} s of CPU")
    say_text(metrics(result.trace))
    say("")
    say_text(ServingReport.of(result.trace, percentiles=options.metric_percentiles, request_rate=options.request_rate))
    if result.num_saved is not None:
        if result.num_saved < num_steps:
            raise OSError(f"{options.out} holds {result.num_saved} of {num_steps} steps: it is cut off")
        say_written(options.out, counted(num_steps, "step"))
    return 0


def _requests(options: argparse.Namespace, model: LoadedModel) -> list[BenchRequest]:
    from workbench.apps.bench.datasets import random_requests, sharegpt_requests, sonnet_requests

    count, lengths = options.num_requests, (options.input_len, options.output_len)
    if options.dataset_name == "random":
        return random_requests(count, *lengths, model.vocab_size, options.seed)
    if model.tokenizer is None:
        raise ValueError(f"--dataset-name {options.dataset_name} needs a tokenizer and the model has none; use random")
    if options.dataset_name == "sonnet":
        return sonnet_requests(options.dataset_path, model.tokenizer.encode, count, *lengths, options.seed)
    return sharegpt_requests(options.dataset_path, model.tokenizer.encode, count, options.seed)


def _sizes(requests: Sequence[BenchRequest]) -> str:
    """The number of requests and their lengths, such as "8 requests of 128 + 32 tokens"."""
    spans = []
    for lengths in ([len(request.prompt) for request in requests], [request.output_len for request in requests]):
        low, high = min(lengths), max(lengths)
        spans.append(f"{low}" if low == high else f"{low} to {high}")
    return f"{counted(len(requests), 'request')} of {' + '.join(spans)} tokens"
