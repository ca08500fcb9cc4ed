"""The ``workbench serve`` command."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from workbench.serve.settings import ServeSettings

if TYPE_CHECKING:
    from workbench.distributed.job import MakeEngine
    from workbench.models.load import LoadedModel

API_KEY_VARIABLE = "WORKBENCH_API_KEY"

KEEP_STEPS = 10_000
"""Steps the trace of a server keeps: some 11 kB each with 16 sequences, and minutes of traffic to look back at."""


def add_serve_parser(subparsers: Any) -> None:
    """Add ``serve`` to the commands."""
    parser = subparsers.add_parser("serve", help="an OpenAI-compatible server, with the dashboard beside it")
    defaults = ServeSettings()
    parser.add_argument("--model", default="smollm2", help='"smollm2" (bundled), a GGUF file, a folder or a repository')
    parser.add_argument("--host", default=defaults.host, help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=defaults.port, help="port to listen on; 0 takes a free one")
    parser.add_argument("--api-key", help=f"what clients must present; better given as {API_KEY_VARIABLE}")
    parser.add_argument("--insecure", action="store_true", help="let others connect without an API key")
    parser.add_argument("--allowed-host", action="append", default=[], metavar="NAME", help="a name of this server")
    parser.add_argument("--max-queue", type=int, default=defaults.max_queue, help="requests that may wait; then 429")
    parser.add_argument("--drain-seconds", type=float, default=defaults.drain_seconds, help="time to end after SIGTERM")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens of a step at most")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="requests that run at once")
    parser.add_argument("--num-blocks", type=int, default=512, help="KV blocks of the pool")
    parser.add_argument("--max-model-len", type=int, help="longest sequence in tokens (default: the model's)")
    parser.add_argument("--keep-steps", type=int, default=KEEP_STEPS, help="newest steps that the trace keeps at most")
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    settings = ServeSettings(
        host=options.host,
        port=options.port,
        api_key=options.api_key or os.environ.get(API_KEY_VARIABLE),
        insecure=options.insecure,
        allowed_hosts=tuple(options.allowed_host),
        max_queue=options.max_queue,
        drain_seconds=options.drain_seconds,
    )
    from workbench.distributed.job import run_job
    from workbench.engine.config import EngineConfig
    from workbench.serve.server import serve

    config = EngineConfig(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        num_blocks=options.num_blocks,
        max_model_len=options.max_model_len,
    )

    def lead(_model: LoadedModel, make_engine: MakeEngine) -> int:
        with make_engine(config, keep_steps=options.keep_steps) as engine:
            serve(engine, settings)
        return 0

    return run_job(options.model, lead)
