"""`workbench kernel check`: a table that compares the attention backends of this machine with float64.

On a machine with an Apple GPU, this one command shows whether the Metal kernels are right there.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.apps.cli import kernel_bench, kernel_file
from workbench.apps.cli.options import Commands, add_command
from workbench.apps.cli.say import say
from workbench.base.tables import terminal_width

if TYPE_CHECKING:
    from workbench.kernels.attention.backend import AttentionBackend
    from workbench.kernels.attention.probe import Probe

QUICK_HEAD_DIMS = (64, 128)
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256, 512)
MAX_VALUE_DIM = 512
BLOCK_SIZES = (8, 16, 32)
TRIED_BACKENDS = ("metal", "cuda", "msl", "cpu", "gather")

TIMED_LAUNCHES = 10
NAME_WIDTH, WIDTH = 36, 32
"""Columns of a probe's name, and of what a backend did with it."""

MIN_SHOWN_SECONDS = 0.1
"""First runs that took less are not shown: nothing was compiled."""


@dataclass(frozen=True)
class Outcome:
    """One cell of the table.

    Attributes:
        error: Largest error relative to the largest element, NaN when the backend could not run.
        milliseconds: Time of a launch, without compiling and without the way to the GPU and back.
        first_seconds: Time of the first run, which compiles the variant if no launch before has needed it.
        problem: Why the backend could not run; empty when it could.
    """

    error: float
    milliseconds: float = 0.0
    first_seconds: float = 0.0
    problem: str = ""


def add_parser(commands: Commands) -> None:
    """Add ``kernel`` to the commands."""
    kernel = commands.add_parser("kernel", help="the attention kernels on this machine")
    actions = kernel.add_subparsers(dest="action", required=True, metavar="ACTION")
    help = "compare every backend of this machine with float64; with FILE, run a Metal kernel with every check"
    examples = f"  workbench kernel check\n  workbench kernel check double.metal {kernel_file.LAUNCH}"
    check = add_command(actions, "check", _check, help, extra="engine", examples=examples)
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a Metal kernel to run instead")
    check.add_argument("--backend", action="append", choices=TRIED_BACKENDS, help="only this backend; may be repeated")
    check.add_argument(
        "--full", action="store_true", help="every head_dim, block size and dtype; on by default on a GPU"
    )
    kernel_file.add_launch_options(check)
    kernel_file.add_record_parser(actions)
    kernel_bench.add_parser(actions)


def _check(options: argparse.Namespace) -> int:
    if options.file is not None:
        return kernel_file.check_file(options)
    if options.inputs or options.outputs:
        raise ValueError("--inputs and --outputs belong to the launch of a FILE, which is missing")
    return print_check(options.backend, full=options.full)


def probes(full: bool = False) -> Iterator[Probe]:
    """The batches to try."""
    from workbench.kernels.attention.dtypes import DTYPES
    from workbench.kernels.attention.probe import Probe

    mixed = ((1, 90), (33, 100), (1, 1), (0, 20), (5, 5))
    yield Probe("decodes", ((1, 300), (1, 7), (1, 64)))
    yield Probe("prompt", ((70, 70),))
    yield Probe("decodes and chunks", mixed)
    yield Probe("one KV head per head", mixed, num_kv_heads=8)
    yield Probe("one KV head for all", mixed, num_kv_heads=1)
    yield Probe("sliding window", mixed, left=20)
    yield Probe("soft cap", mixed, softcap=5.0)
    yield Probe("attention sinks", mixed, sinks=True)
    yield Probe("long context, split", ((1, 2000), (20, 40)))
    yield Probe("logits of -20 in a window", ((40, 300), (1, 200)), left=100, mean_logit=-20.0, dtype="float32")
    yield Probe("chunks of 16", mixed, chunk_size=16)
    yield Probe("values of another size", mixed, 4, 4, 192, value_dim=128)
    yield Probe("latents of 512 + 64", mixed, 16, 1, 576, value_dim=512, latent=True)
    yield Probe("head_dim 512", mixed, 8, 2, 512)
    for head_dim in HEAD_DIMS if full else QUICK_HEAD_DIMS:
        for dtype in (*DTYPES, "int8"):
            for block_size in BLOCK_SIZES if full else (16,):
                name = f"head_dim {head_dim}, {dtype}, blocks of {block_size}"
                yield Probe(name, mixed, 4, 2, head_dim, block_size, dtype)


def _print_row(name: str, cells: Mapping[str, str], columns: Collection[str], width: int | None) -> None:
    """Print a probe's results at once; below its name, each behind its column, where a terminal is too narrow."""
    if width is None or NAME_WIDTH + WIDTH * len(columns) <= width:
        print(f"{name:{NAME_WIDTH}}" + "".join(f"{cells.get(column, ''):>{WIDTH}}" for column in columns), flush=True)
    elif name:
        lines = [name, *(f"  {column:{max(map(len, columns))}}  {cell}" for column, cell in cells.items())]
        print("\n".join(lines), flush=True)


def print_check(names: list[str] | None = None, *, full: bool = False) -> int:
    """Print the table.

    Args:
        names: Backends to try; None for every backend of this machine.
        full: Try every variant on every backend instead of only on those that run on a GPU.

    Returns:
        Exit status: 0 when every result is right, 1 otherwise.
    """
    import mlx.core as mx

    from workbench.kernels.attention.selection import SELF_TESTED

    device = mx.device_info().get("device_name", "CPU")
    print(f"{platform.system()} {platform.machine()}, {device}, mlx {mx.__version__}")  # type: ignore[attr-defined]
    columns = _columns(names or TRIED_BACKENDS)
    if not columns:
        print("nothing to check")
        return 1
    on_gpu = [column for column in columns if column.split()[0] in SELF_TESTED]
    say(
        "error relative to the largest element / allowed, the time of a launch, and of the first run if it compiled",
        "",
    )
    width = terminal_width()
    _print_row("", dict(zip(columns, columns)), columns, width)
    num_wrong = 0
    compile_seconds: dict[str, float] = {}
    for probe in probes(full or bool(on_gpu)):
        tried = columns if full or _is_quick(probe) else on_gpu
        cells = {column: try_backend(columns[column], probe, v1=column.endswith(" v1")) for column in tried}
        shown = {column: _cell(cells[column], probe, columns[column].name) for column in cells}
        _print_row(probe.name, shown, columns, width)
        for column, outcome in cells.items():
            num_wrong += is_wrong(outcome, probe, columns[column].name)
            compile_seconds[column] = compile_seconds.get(column, 0.0) + outcome.first_seconds
            if outcome.problem:
                say(f"    {column}: {outcome.problem}")
    first_runs = ", ".join(f"{column} {seconds:.1f} s" for column, seconds in compile_seconds.items())
    say("", f"first runs of all variants, compiling included: {first_runs}")
    print(f"{f'{num_wrong} results are wrong' if num_wrong else 'every result is right'}")
    return int(num_wrong > 0)


def _columns(names: Sequence[str]) -> dict[str, AttentionBackend]:
    """The backends that can run, and the simpler kernel of those that have it; prints why the others cannot."""
    from workbench import msl
    from workbench.kernels.attention.metal.backend import MetalSourceBackend
    from workbench.kernels.attention.selection import get_backend, why_unavailable

    columns: dict[str, AttentionBackend] = {}
    for name in names:
        if reason := why_unavailable(name) or (name == "msl" and msl.why_unavailable()):
            say(f"{name:8} not tried: {reason}")
            continue
        columns[name] = get_backend(name)
        if isinstance(columns[name], MetalSourceBackend):
            columns[f"{name} v1"] = columns[name]
    return columns


def try_backend(backend: AttentionBackend, probe: Probe, *, v1: bool = False) -> Outcome:
    """Run a probe on a backend, with its kernel ``paged_varlen_v1`` if ``v1``."""
    import mlx.core as mx

    from workbench.kernels.attention.metal.backend import MetalSourceBackend
    from workbench.kernels.attention.probe import float64_attention, probe_batch, relative_error
    from workbench.kernels.attention.selection import SELF_TESTED

    batch = probe_batch(probe)

    def launch() -> mx.array:
        if v1 and isinstance(backend, MetalSourceBackend):
            return backend.kernels.attend_v1(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.options)
        return backend.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.options)

    def seconds_of(num_launches: int) -> float:
        started = time.perf_counter()
        mx.eval([launch() for _ in range(num_launches)])
        return time.perf_counter() - started

    try:
        started = time.perf_counter()
        result = launch()
        mx.eval(result)
        first = time.perf_counter() - started
        if backend.name in SELF_TESTED:  # several launches in one evaluation: the way to the GPU and back counts once
            seconds = (seconds_of(1 + TIMED_LAUNCHES) - seconds_of(1)) / TIMED_LAUNCHES
        else:
            seconds = seconds_of(1)
    except Exception as problem:  # every error of a GPU's compiler or driver belongs in the table
        return Outcome(float("nan"), problem=" ".join(f"{type(problem).__name__}: {problem}".split())[:500])
    return Outcome(relative_error(result, float64_attention(batch)), 1e3 * max(seconds, 0.0), first)


def is_wrong(outcome: Outcome, probe: Probe, backend_name: str = "") -> bool:
    """Whether an error is larger than rounding explains, or the result is missing."""
    return not outcome.error <= _limit(probe, backend_name)


def _limit(probe: Probe, backend_name: str) -> float:
    from workbench.base.device import runs_on_gpu
    from workbench.kernels.attention.probe import error_limit

    return error_limit(backend_name, probe.dtype, on_gpu=runs_on_gpu())


def _cell(outcome: Outcome, probe: Probe, backend_name: str) -> str:
    if outcome.problem:
        return "FAILED"
    mark = "  WRONG" if is_wrong(outcome, probe, backend_name) else ""
    seconds = outcome.first_seconds - outcome.milliseconds / 1e3
    first = f" +{seconds:.1f} s" if seconds >= MIN_SHOWN_SECONDS else ""
    return f"{outcome.error:.0e}/{_limit(probe, backend_name):.0e} {outcome.milliseconds:.1f} ms{first}{mark}"


def _is_quick(probe: Probe) -> bool:
    """Whether a probe is tried on backends that run on a CPU, too."""
    is_kind = probe.value_dim or probe.head_dim == MAX_VALUE_DIM
    return bool(is_kind or probe.head_dim in QUICK_HEAD_DIMS) and probe.block_size == 16


if __name__ == "__main__":
    sys.exit(print_check())
