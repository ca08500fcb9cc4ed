"""`workbench kernel check`: the attention backends of this machine against float64, as a table.

It is the one command by which somebody with an Apple GPU learns whether the Metal kernels are right there.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.attention.backend import AttentionBackend
    from workbench.attention.probe import Probe

QUICK_HEAD_DIMS = (64, 128)
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32)
TRIED_BACKENDS = ("metal", "cuda", "msl", "cpu", "gather")


@dataclass(frozen=True)
class Outcome:
    """One cell of the table.

    Attributes:
        error: Largest error relative to the largest element, NaN when the backend could not run.
        milliseconds: Time of the second run, compilation left out.
        problem: Why it could not run; empty when it did.
    """

    error: float
    milliseconds: float = 0.0
    problem: str = ""


def add_kernel_parser(commands: Any) -> None:
    """Add ``workbench kernel`` to a command line.

    Args:
        commands: What ``ArgumentParser.add_subparsers`` returned.
    """
    kernel = commands.add_parser("kernel", help="the attention kernels on this machine")
    actions = kernel.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="run every backend this machine has against float64")
    check.add_argument("--backend", action="append", choices=TRIED_BACKENDS, help="only this one; may be repeated")
    check.add_argument(
        "--full", action="store_true", help="every head_dim, block size and dtype; on by default on a GPU"
    )
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    return print_check(options.backend, full=options.full)


def probes(full: bool = False) -> Iterator[Probe]:
    """The batches that are tried."""
    from workbench.attention.dtypes import DTYPES
    from workbench.attention.probe import Probe

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
    for head_dim in HEAD_DIMS if full else QUICK_HEAD_DIMS:
        for dtype in DTYPES:
            for block_size in BLOCK_SIZES if full else (16,):
                name = f"head_dim {head_dim}, {dtype}, blocks of {block_size}"
                yield Probe(name, mixed, 4, 2, head_dim, block_size, dtype)


def print_check(names: list[str] | None = None, *, full: bool = False) -> int:
    """Print the table.

    Args:
        names: Backends to try; None for all that this machine has.
        full: Try every variant on every backend; otherwise only on those that run on a GPU.

    Returns:
        Exit status: 0 when every result is right, 1 otherwise.
    """
    import mlx.core as mx

    from workbench.attention.selection import SELF_TESTED

    device = mx.device_info().get("device_name", "CPU")
    print(f"{platform.system()} {platform.machine()}, {device}, mlx {mx.__version__}")
    columns = _columns(names or TRIED_BACKENDS)
    if not columns:
        print("nothing to check")
        return 1
    on_gpu = [column for column in columns if column.split()[0] in SELF_TESTED]
    print("error relative to the largest element / allowed, and the time of a launch\n")
    print(f"{'':36}" + "".join(f"{column:>26}" for column in columns))
    num_wrong = 0
    for probe in probes(full or bool(on_gpu)):
        tried = columns if full or _is_quick(probe) else on_gpu
        cells = {column: try_backend(columns[column], probe, v1=column.endswith(" v1")) for column in tried}
        row = "".join(f"{_cell(cells[column], probe) if column in cells else '':>26}" for column in columns)
        print(f"{probe.name:36}{row}", flush=True)
        for column, outcome in cells.items():
            num_wrong += is_wrong(outcome, probe)
            if outcome.problem:
                print(f"    {column}: {outcome.problem}")
    print(f"\n{f'{num_wrong} results are wrong' if num_wrong else 'every result is right'}")
    return int(num_wrong > 0)


def _columns(names: Sequence[str]) -> dict[str, AttentionBackend]:
    """The backends that can run, and the simpler kernel of those that have it; says why the others cannot."""
    from workbench.attention.backend import get_backend, why_not_here
    from workbench.attention.metal.backend import MetalSourceBackend

    columns = {}
    for name in names:
        if reason := why_not_here(name) or (name == "msl" and _no_compiler()):
            print(f"{name:8} not tried: {reason}")
            continue
        columns[name] = get_backend(name)
        if isinstance(columns[name], MetalSourceBackend):
            columns[f"{name} v1"] = columns[name]
    return columns


def try_backend(backend: AttentionBackend, probe: Probe, *, v1: bool = False) -> Outcome:
    """Run a probe on a backend, with the kernel ``paged_varlen_v1`` if asked."""
    import mlx.core as mx

    from workbench.attention.probe import float64_attention, probe_batch, relative_error

    batch = probe_batch(probe)

    def run() -> mx.array:
        if not v1:
            return batch.run(backend)
        out = backend.kernels.attend_v1(batch.q, batch.k_cache, batch.v_cache, batch.metadata, **batch.options)
        mx.eval(out)
        return out

    try:
        result = run()
        started = time.perf_counter()
        run()
        milliseconds = 1e3 * (time.perf_counter() - started)
    except Exception as problem:  # whatever a GPU's compiler or driver says belongs into the table
        return Outcome(float("nan"), problem=" ".join(f"{type(problem).__name__}: {problem}".split())[:500])
    return Outcome(relative_error(result, float64_attention(batch)), milliseconds)


def is_wrong(outcome: Outcome, probe: Probe) -> bool:
    """Whether an error is larger than rounding explains, or there is no result at all."""
    return not outcome.error <= _limit(probe)


def _limit(probe: Probe) -> float:
    from workbench.attention.probe import ERROR_LIMIT

    return ERROR_LIMIT[probe.dtype]


def _cell(outcome: Outcome, probe: Probe) -> str:
    if outcome.problem:
        return "FAILED"
    mark = "  WRONG" if is_wrong(outcome, probe) else ""
    return f"{outcome.error:.0e}/{_limit(probe):.0e} {outcome.milliseconds:.1f} ms{mark}"


def _is_quick(probe: Probe) -> bool:
    """Whether a probe is tried on a CPU too."""
    return probe.head_dim in QUICK_HEAD_DIMS and probe.block_size == 16


def _no_compiler() -> str:
    from workbench.msl import MslCompilerMissing
    from workbench.msl.compiler import find_compiler

    try:
        find_compiler()
    except MslCompilerMissing as problem:
        return str(problem)
    return ""


if __name__ == "__main__":
    sys.exit(print_check())
