"""``workbench serve``: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields
from typing import TYPE_CHECKING

from workbench.cli.options import Commands, add_command, add_list, add_model_option, add_number, add_settings_option
from workbench.serve.keys import read_api_keys
from workbench.serve.settings import ServeSettings

if TYPE_CHECKING:
    from workbench.config import EngineConfig
    from workbench.distributed.job import MakeEngine
    from workbench.models.load import LoadedModel

API_KEY_VARIABLE = "WORKBENCH_API_KEY"

GPU_TOKENS, CPU_TOKENS = 512, 128

KEEP_STEPS = 10_000
"""Steps that a server's trace keeps: minutes of traffic, at about 11 kB per step with 16 sequences."""


KEEP_MIB = 256
"""Size of a server's trace: twice as much as those steps take with short prompts."""


def add_parser(commands: Commands) -> None:
    """Add ``serve`` to the commands."""
    parser = add_command(
        commands, "serve", run, "an OpenAI-compatible server, with the dashboard beside it", extra="serve"
    )
    defaults = ServeSettings()
    add_model_option(parser)
    parser.add_argument("--host", default=defaults.host, help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=defaults.port, help="port to listen on; 0 takes a free one")
    parser.add_argument("--api-key", help=f"key that clients must send; better set as {API_KEY_VARIABLE}")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="keys with names, one a line: NAME KEY [REQUESTS_PER_MINUTE]"
    )
    parser.add_argument(
        "--max-requests-per-minute",
        type=float,
        metavar="N",
        help="maximum number of POST requests of each key per minute; one more gets status 429 (default: any number)",
    )
    parser.add_argument(
        "--access-log", metavar="FILE", help="append a line per request, in combined log format; - is standard output"
    )
    parser.add_argument("--check", action="store_true", help="print what would be open to whom, and end")
    parser.add_argument("--insecure", action="store_true", help="let other machines connect without an API key")
    add_list(parser, "--allowed-host", "NAME", "a name of this server")
    parser.add_argument(
        "--allowed-origins",
        type=_origins,
        default=(),
        metavar="JSON",
        help="origins of sites whose pages may call the API, such as '[\"https://app.example.org\"]' (default: none)",
    )
    for name, help in {
        "--max-queue": "maximum number of waiting requests; one more gets status 429",
        "--max-connections": "maximum number of open connections; one more gets status 503",
        "--max-connections-per-client": "the same for the connections of one address",
    }.items():
        add_number(parser, name, getattr(defaults, name[2:].replace("-", "_")), help)
    add_list(parser, "--trusted-proxy", "ADDRESS", "address of a reverse proxy, whose word on clients is taken")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate and chain (PEM): serve https")
    parser.add_argument("--tls-key", metavar="FILE", help="private key, if the certificate's file does not hold it")
    add_number(
        parser, "--drain-seconds", defaults.drain_seconds, "time that open requests have to finish after SIGTERM"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help=f"token budget of a step (default: {GPU_TOKENS} on a GPU, {CPU_TOKENS} on a CPU, where a step of "
        f"{GPU_TOKENS} takes over a second: running requests wait less for others' prompts, at a few per cent more "
        "CPU time)",
    )
    add_number(parser, "--max-num-seqs", 16, "maximum number of running requests")
    add_number(parser, "--num-blocks", 512, "KV blocks in the pool")
    parser.add_argument("--max-model-len", type=int, help="longest sequence in tokens (default: the model's)")
    add_settings_option(parser, "another field of EngineConfig, such as async_scheduling=true")
    weights, activations = ("packed", "float32"), ("float32", "int8")
    parser.add_argument("--weights", choices=weights, default="packed", help="weights on a CPU")
    help = "inputs of packed weights; int8 rounds them"
    parser.add_argument("--activations", choices=activations, default="float32", help=help)
    add_number(parser, "--keep-steps", KEEP_STEPS, "maximum number of steps that the trace keeps, the newest")
    add_number(parser, "--keep-mib", KEEP_MIB, "the same for its size in MiB, of which prompts are a large part")


def _origins(text: str) -> tuple[str, ...]:
    """A JSON list of origins, as vLLM's option takes it."""
    try:
        origins = json.loads(text)
    except (ValueError, RecursionError):
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError(
            f"expected a JSON list such as '[\"https://app.example.org\"]', got {text[:100]!r}"
        )
    return tuple(origins)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ValueError: An option is outside its range, or the server would be open to everyone.
        OSError: The port is in use.
    """
    given = {field.name: getattr(options, field.name) for field in fields(ServeSettings) if field.name in options}
    given["api_key"] = options.api_key or os.environ.get(API_KEY_VARIABLE)
    given["api_keys"] = read_api_keys(options.api_key_file) if options.api_key_file else ()
    allowed_hosts, trusted_proxies = tuple(options.allowed_host), tuple(options.trusted_proxy)
    settings = ServeSettings(**given, allowed_hosts=allowed_hosts, trusted_proxies=trusted_proxies)
    settings.check_files()
    config = _engine_config(options)
    if options.check:
        from workbench.serve.exposure import exposure

        print(exposure(settings, options.api_key_file))
        return 0
    from workbench.distributed.job import run_job
    from workbench.serve.server import serve

    def lead(_model: LoadedModel, make_engine: MakeEngine) -> int:
        with make_engine(config, keep_steps=options.keep_steps, keep_bytes=options.keep_mib << 20) as engine:
            serve(engine, settings)
        return 0

    return run_job(options.model, lead, weights=options.weights, activations=options.activations)


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    from workbench.analysis.sweep import read_settings
    from workbench.config import EngineConfig
    from workbench.ground.device import runs_on_gpu

    budget = options.max_num_batched_tokens
    return EngineConfig(
        max_num_batched_tokens=(GPU_TOKENS if runs_on_gpu() else CPU_TOKENS) if budget is None else budget,
        max_num_seqs=options.max_num_seqs,
        num_blocks=options.num_blocks,
        max_model_len=options.max_model_len,
    ).replace(**read_settings(options.set))
