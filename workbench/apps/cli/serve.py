"""``workbench serve``: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

from workbench.apps.cli.options import (
    Commands,
    add_allow_host_option,
    add_command,
    add_list,
    add_loading_options,
    add_model_option,
    add_number,
    allow_hosts,
)
from workbench.apps.cli.say import say_error, say_text
from workbench.apps.cli.settings import add_settings_option
from workbench.apps.serve.keys import read_api_keys
from workbench.apps.serve.settings import ServeSettings
from workbench.base.outside_files import json_value

if TYPE_CHECKING:
    from workbench.config import EngineConfig
    from workbench.engine.distributed.job import MakeEngine
    from workbench.models.load import LoadedModel

API_KEY_VARIABLE = "WORKBENCH_API_KEY"

GPU_TOKENS, CPU_TOKENS = 512, 128

KEEP_STEPS = 10_000
"""Steps that a server's trace keeps: minutes of traffic, at about 11 kB per step with 16 sequences."""


KEEP_MIB = 256
"""Size of a server's trace: twice as much as those steps take with short prompts."""


_EXAMPLES = """\
  workbench serve                                                         the bundled model, for this machine
  workbench serve --model model.gguf --host 0.0.0.0 --api-key-file keys   a model of yours, for other machines
"""

Group: TypeAlias = "argparse._ArgumentGroup"


def add_parser(commands: Commands) -> None:
    """Add ``serve`` to the commands."""
    help = "an OpenAI-compatible server, with the dashboard beside it"
    parser = add_command(commands, "serve", run, help, examples=_EXAMPLES, extra="serve")
    parser.usage = "%(prog)s [OPTION ...]"  # a list of all of them would hide an error below it
    for title, add in {
        "model": _add_model_options,
        "address": _add_address_options,
        "who may connect": _add_access_options,
        "limits of connections": _add_limits,
        "engine": _add_engine_options,
        "adapters and drafts": _add_adapter_options,
        "trace of the dashboard": _add_trace_options,
    }.items():
        add(parser.add_argument_group(title))


def _add_model_options(group: Group) -> None:
    add_model_option(group)
    add_loading_options(group)
    weights, activations = ("packed", "float32"), ("float32", "int8")
    group.add_argument("--weights", choices=weights, default="packed", help="weights on a CPU")
    help = "inputs of packed weights; int8 rounds them"
    group.add_argument("--activations", choices=activations, default="float32", help=help)


def _add_address_options(group: Group) -> None:
    defaults = ServeSettings()
    group.add_argument("--host", default=defaults.host, help="address to listen on (default: this machine only)")
    group.add_argument("--port", type=int, default=defaults.port, help="port to listen on; 0 takes a free one")
    add_allow_host_option(group)
    add_list(group, "--trusted-proxy", "ADDRESS", "address of a reverse proxy, whose word on clients is taken")
    group.add_argument("--tls-cert", metavar="FILE", help="certificate and chain (PEM): serve https")
    group.add_argument("--tls-key", metavar="FILE", help="private key, if the certificate's file does not hold it")
    group.add_argument("--check", action="store_true", help="print what would be open to whom, and end")


def _add_access_options(group: Group) -> None:
    group.add_argument("--api-key", help=f"key that clients must send; better set as {API_KEY_VARIABLE}")
    group.add_argument(
        "--api-key-file", metavar="FILE", help="keys with names, one a line: NAME KEY [REQUESTS_PER_MINUTE]"
    )
    group.add_argument("--insecure", action="store_true", help="let other machines connect without an API key")
    group.add_argument(
        "--allowed-origins",
        type=_origins,
        default=(),
        metavar="JSON",
        help="origins of sites whose pages may call the API, such as '[\"https://app.example.org\"]' (default: none)",
    )
    group.add_argument(
        "--access-log", metavar="FILE", help="append a line per request, in combined log format; - is standard output"
    )


def _add_limits(group: Group) -> None:
    defaults = ServeSettings()
    for name, help in {
        "--max-queue": "maximum number of waiting requests; one more gets status 429",
        "--max-connections": "maximum number of open connections; one more gets status 503",
        "--max-connections-per-client": "the same for the connections of one address",
    }.items():
        add_number(group, name, getattr(defaults, name[2:].replace("-", "_")), help)
    group.add_argument(
        "--max-requests-per-minute",
        type=float,
        metavar="N",
        help="maximum number of POST requests of each key per minute; one more gets status 429 (default: any number)",
    )
    add_number(group, "--drain-seconds", defaults.drain_seconds, "time that open requests have to finish after SIGTERM")


def _add_engine_options(group: Group) -> None:
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help=f"token budget of a step (default: {GPU_TOKENS} on a GPU, {CPU_TOKENS} on a CPU, where a step of "
        f"{GPU_TOKENS} takes over a second: running requests wait less for others' prompts, at a few per cent more "
        "CPU time)",
    )
    add_number(group, "--max-num-seqs", 16, "maximum number of running requests")
    add_number(group, "--num-blocks", 512, "KV blocks in the pool")
    group.add_argument("--max-model-len", type=int, help="longest sequence in tokens (default: the model's)")
    help = "KV cache: auto, float32, float16, bfloat16 or int8_per_token_head; a narrow one saves memory, and rounds"
    group.add_argument("--kv-cache-dtype", metavar="DTYPE", default="auto", help=help)
    add_settings_option(group, "another field of EngineConfig, such as async_scheduling=true")


def _add_adapter_options(group: Group) -> None:
    group.add_argument(
        "--lora-modules",
        type=_adapter,
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="adapters (LoRA), folders of mlx-lm or PEFT; the model of a request names one",
    )
    add_number(group, "--max-loras", 1, "maximum number of different adapters among the running requests")
    add_number(group, "--max-lora-rank", 16, "maximum rank of an adapter")
    group.add_argument("--draft-model", metavar="MODEL", help="a smaller model with the same vocabulary, for drafts")
    group.add_argument(
        "--speculative-config",
        type=_speculative_config,
        default={},
        metavar="JSON",
        help='speculative decoding, such as \'{"method": "ngram", "num_speculative_tokens": 4}\'; "model" may name a '
        "draft model",
    )


def _add_trace_options(group: Group) -> None:
    add_number(group, "--keep-steps", KEEP_STEPS, "maximum number of steps that the trace keeps, the newest")
    add_number(group, "--keep-mib", KEEP_MIB, "the same for its size in MiB, of which prompts are a large part")


def _adapter(text: str) -> tuple[str, str]:
    """Name and folder of an adapter."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got {text[:100]!r}")
    return name, path


def _origins(text: str) -> tuple[str, ...]:
    """A JSON list of origins, as vLLM's option takes it."""
    try:
        origins = json_value(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError(
            f"expected a JSON list such as '[\"https://app.example.org\"]', got {text[:100]!r}"
        )
    return tuple(origins)


def _speculative_config(text: str) -> dict[str, Any]:
    """A JSON object, as vLLM's option takes it."""
    try:
        given = json_value(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or "num_speculative_tokens" not in given:
        raise argparse.ArgumentTypeError(
            f"expected a JSON object with num_speculative_tokens, such as "
            f"'{{\"num_speculative_tokens\": 4}}', got {text[:100]!r}"
        )
    return given


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ValueError: An option is outside its range, or the server would be open to everyone.
        OSError: The port is in use.
    """
    given = {field.name: getattr(options, field.name) for field in fields(ServeSettings) if field.name in options}
    given["api_key"] = options.api_key or os.environ.get(API_KEY_VARIABLE)
    given["api_keys"] = read_api_keys(options.api_key_file) if options.api_key_file else ()
    allowed_hosts, trusted_proxies = allow_hosts(options), tuple(options.trusted_proxy)
    settings = ServeSettings(**given, allowed_hosts=allowed_hosts, trusted_proxies=trusted_proxies)
    settings.check_files()
    config, draft_model = _engine_config(options)
    if options.check:
        from workbench.apps.serve.exposure import exposure

        say_text(exposure(settings, options.api_key_file))
        return 0
    from workbench.apps.serve.server import serve
    from workbench.engine.distributed.job import run_job
    from workbench.models.packed.int8 import int8_gain, takes_int8

    def lead(model: LoadedModel, make_engine: MakeEngine) -> int:
        kept = {"keep_steps": options.keep_steps, "keep_bytes": options.keep_mib << 20}
        with make_engine(config, draft_model=draft_model, **kept) as engine:
            if engine.describe().get("kv_dtype") == "float32":
                facts = engine.describe()
                size = facts["kv_bytes_per_block"] * engine.config.num_pool_blocks / 2**20
                int8 = size * (1 - (1 + 4 / facts["head_dim"]) / 4)  # a scale of 4 bytes per row
                say_error(
                    f"KV cache: {size:,.0f} MiB; --kv-cache-dtype float16 would save {size / 2:,.0f} MiB of them, "
                    f"int8_per_token_head {int8:,.0f} MiB"
                )
            if options.activations == "float32" and takes_int8(model.model):
                say_error(f"with --activations int8, {int8_gain()}; it rounds")
            for name, path in options.lora_modules:
                engine.add_adapter(name, path)
            serve(engine, settings)
        return 0

    loading = {"chat_template": options.chat_template, "ignore_config_keys": options.ignore_config_key}
    return run_job(options.model, lead, weights=options.weights, activations=options.activations, **loading)


def _engine_config(options: argparse.Namespace) -> tuple[EngineConfig, str | None]:
    """The configuration, and the model that drafts."""
    from workbench.analysis.sweep import read_settings
    from workbench.base.device import runs_on_gpu
    from workbench.config import EngineConfig

    budget = options.max_num_batched_tokens
    speculation = dict(options.speculative_config)
    named = speculation.pop("model", None)
    draft_model = options.draft_model or named
    changes = read_settings(options.set)
    if speculation:
        changes["num_speculative_tokens"] = speculation.pop("num_speculative_tokens")
        if draft_model:
            speculation.setdefault("method", "draft_model")
        changes["speculative"] = speculation or None
    config = EngineConfig(
        max_num_batched_tokens=(GPU_TOKENS if runs_on_gpu() else CPU_TOKENS) if budget is None else budget,
        max_num_seqs=options.max_num_seqs,
        num_blocks=options.num_blocks,
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        max_model_len=options.max_model_len,
        kv_cache_dtype=options.kv_cache_dtype,
    ).replace(**changes)
    if draft_model and not config.num_speculative_tokens:
        raise ValueError(
            f"--draft-model {draft_model} needs the number of drafts: add --speculative-config "
            "'{\"num_speculative_tokens\": 4}'"
        )
    return config, draft_model
