"""``workbench doctor``: what this machine computes with, and why; the text to put into a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import workbench
from workbench.apps.cli.options import Commands, add_command, add_loading_options
from workbench.apps.cli.say import say
from workbench.base.on_demand import missing_extra
from workbench.base.tables import terminal_width, wrapped

PACKAGES = (
    "mlx",
    "mlx-metal",
    "mlx-cpu",
    "mlx-lm",
    "numpy",
    "numba",
    "msgspec",
    "ziglang",
    "scipy-openblas32",
    "panel",
)
VARIABLES = ("WORKBENCH_", "OMP_", "OPENBLAS_", "MLX_", "MTL_")
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
"""The attention of the bundled model."""


_EXAMPLES = """\
  workbench doctor                     this machine
  workbench doctor smollm2             what was read of a model's files, and what its weights are kept as
"""


def add_parser(commands: Commands) -> None:
    """Add ``doctor`` to the commands."""
    help = "devices and libraries that this machine computes with, and why; for bug reports"
    parser = add_command(commands, "doctor", run, help, examples=_EXAMPLES)
    parser.add_argument("model", nargs="?", help="a model, to say what was made of each key of its files instead")
    add_loading_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print one line per finding.

    Returns:
        The exit status: 1 if the attention kernel of this machine is wrong or something failed to answer, else 0.
    """
    if options.model is not None:
        for line in _about_model(options):
            say(line)
        return 0
    status, width = 0, terminal_width()
    sections = (_versions, _device, _memory, _products, _attention, _msl, _preflight, _forward, _environment)
    for section in sections:
        found: list[str] = []
        try:
            found.extend(section())
        except ModuleNotFoundError as problem:
            found.append(f"not installed: {missing_extra('this part', problem)}")
        except Exception as problem:  # one part that fails must not hide the others
            found.append(f"FAILED: {type(problem).__name__}: {' '.join(str(problem).split())}")
        status |= any(line.startswith("FAILED") for line in found)
        for number, line in enumerate(found):
            shown = wrapped(f"{section.__name__[1:] if number == 0 else '':12} {line}", width, indent=13)
            print(*shown, sep="\n", flush=True)
    return status


def _about_model(options: argparse.Namespace) -> Iterator[str]:
    """The verdict on each key of a model's files, and what decides whether it thinks."""
    from workbench.models.load import load_model

    model = load_model(options.model, chat_template=options.chat_template, ignore_config_keys=options.ignore_config_key)
    yield str(model)
    for file, findings in model.findings.items():
        if read := [finding.key for finding in findings if finding.verdict == "read"]:
            yield f"{file}: read: {', '.join(read)}"
        reasons: dict[str, list[str]] = {}
        for finding in findings:
            if finding.verdict == "harmless":
                reasons.setdefault(finding.because, []).append(finding.key)
        for because, keys in reasons.items():
            yield f"{file}: harmless, because {because}: {', '.join(keys)}"
    facts = model.described_files()
    if thinking := facts["thinking"]:
        yield f"thinking, if a request does not say: {thinking}"
    if lost := facts["template_leaves_out"]:
        yield f"the chat template leaves out: {', '.join(lost)}"


def _versions() -> Iterator[str]:
    yield f"workbench {workbench.__version__}, Python {platform.python_version()}, {sys.executable}"
    yield f"{platform.platform()}, {platform.machine()}"
    yield ", ".join(f"{package} {number}" for package in PACKAGES if (number := _version(package)))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _device() -> Iterator[str]:
    from workbench.base.device import choose_device, requested_device, runs_on_gpu

    choose_device()
    import mlx.core as mx

    yield f"{'GPU' if runs_on_gpu() else 'CPU'} (WORKBENCH_DEVICE={requested_device()}): {workbench.backend_info()}"
    for name, value in sorted(mx.device_info().items()):
        yield f"{name} = {value:,}" if isinstance(value, int) else f"{name} = {value}"
    yield f"Metal is {'' if mx.metal.is_available() else 'not '}available, CUDA is " + (
        "available" if mx.cuda.is_available() else "not available"
    )


def _products() -> Iterator[str]:
    from workbench.kernels.cpu.attention.processor import instruction_set
    from workbench.models.packed.int8 import int8_gain, why_no_int8
    from workbench.models.packed.pack_model import why_not_packed

    yield f"packed weights: {why_not_packed() or 'possible'}"
    reason = why_no_int8()
    yield f'activations="int8": {reason or f"possible, with {instruction_set()}"}'
    if not why_not_packed() and not reason:
        yield f"with it, {int8_gain()}"


def _memory() -> Iterator[str]:
    import mlx.core as mx

    from workbench.base.device import runs_on_gpu
    from workbench.engine.memory import AUTO_SHARE_CPU, AUTO_SHARE_GPU, limit_memory, usable_memory

    limits = limit_memory()
    yield f"usable {usable_memory() / 2**30:.1f} GiB, in use {mx.get_active_memory() / 2**30:.2f} GiB"
    yield ", ".join(f"{name} {size / 2**20:,.2f} MiB" for name, size in limits.items()) or (
        "no limits are set: they are for Apple GPUs and for machines without a GPU"
    )
    if not runs_on_gpu():
        kib = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4 / 1024
        int8 = kib * (HEAD_DIM + 4) / HEAD_DIM / 4
        yield (
            f'kv_cache_dtype="float16": a token of the bundled model takes {kib / 2:.1f} KiB instead of {kib:.1f}; '
            f'"int8_per_token_head": {int8:.1f}'
        )
    yield f'num_blocks="auto" takes {AUTO_SHARE_GPU:.0%} of what is free on a GPU, {AUTO_SHARE_CPU:.0%} on a CPU'


def _attention() -> Iterator[str]:
    from workbench.apps.cli.kernel_bench import remembered_advice
    from workbench.base.device import runs_on_gpu
    from workbench.kernels.attention.probe import Probe, error_limit
    from workbench.kernels.attention.selection import (
        BACKEND_NAMES,
        SELF_TEST_SEQUENCES,
        resolve_backend_name,
        select_backend,
        self_test,
        why_unavailable,
    )

    on_gpu, sequences = runs_on_gpu(), SELF_TEST_SEQUENCES.values()
    name = resolve_backend_name("auto")
    dtypes = ("float16", "bfloat16", "float32") if on_gpu else ("float32", "float16")
    yield (
        f'"auto" is {name}; checked for the bundled model: {NUM_HEADS} query and {NUM_KV_HEADS} KV heads, '
        f"head_dim {HEAD_DIM}, block_size {BLOCK_SIZE}"
    )
    for dtype in dtypes:
        chosen = select_backend(
            "auto",
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        error = chosen.self_test_error
        if error is None and not chosen.fallback_reason:
            shapes = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype)
            error = max(self_test(chosen.backend, Probe("doctor", batch, *shapes)) for batch in sequences)
        limit = error_limit(chosen.backend.name, dtype, on_gpu=on_gpu)
        wrong = bool(chosen.fallback_reason) or error is None or not error <= limit
        measured = f"self-test against float64 {'none' if error is None else f'{error:.1e}'}, allowed {limit:.0e}"
        reason = f"; falls back: {chosen.fallback_reason}" if chosen.fallback_reason else ""
        yield f"{'FAILED ' if wrong else ''}{dtype}: {chosen.backend.name}, {measured}{reason}"
    if on_gpu:
        yield remembered_advice() or "settings of MLX for this GPU are not measured: run `workbench kernel bench`"
    for other in BACKEND_NAMES:
        if other != "auto" and (reason := why_unavailable(other)):
            yield f"{other} is not used: {reason}"


def _msl() -> Iterator[str]:
    from workbench import msl
    from workbench.kernels.msl.compiler import find_compiler

    if reason := msl.why_unavailable():
        yield f"Metal kernels cannot run on this CPU: {reason}"
    else:
        compiler = find_compiler()
        yield f"{' '.join(compiler.kernel_command)}: {compiler.version.splitlines()[0]}"


def _preflight() -> Iterator[str]:
    from workbench.models.remembered import VARIABLE, entries, entries_folder, is_on

    if not is_on():
        yield f"runs at every start ({VARIABLE}=always)"
    else:
        yield f"runs once per model, kernels and processor: {len(entries())} results in {entries_folder()}"
        yield f"{VARIABLE}=always runs it at every start"


def _forward() -> Iterator[str]:
    from workbench.config import EngineConfig
    from workbench.engine.model_runner import ModelRunner
    from workbench.models.bundled import BUNDLED_NAME, bundled_path
    from workbench.models.load import load_model

    if not bundled_path().exists():
        yield f"not tried, because {BUNDLED_NAME} has not been fetched: workbench demo does that"
        return
    runner = ModelRunner(load_model(BUNDLED_NAME), EngineConfig(num_blocks=8))
    try:
        yield f"{BUNDLED_NAME} runs {runner.path.name}"
        yield from (f"not {name}: {reason}" for name, reason in runner.not_taken.items())
    finally:
        runner.close()


def _environment() -> Iterator[str]:
    from workbench.base.cache_folder import cache_folder

    yield f"cache folder {cache_folder()}"
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            secret = any(word in name for word in ("KEY", "TOKEN", "SECRET"))
            yield f"{name}={'(set, not shown)' if secret else os.environ[name]}"
