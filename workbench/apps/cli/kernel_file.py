"""`workbench kernel check FILE` and `workbench kernel record FILE`: a Metal kernel on this CPU, with every check."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.apps.cli.options import Commands, add_command, add_list, add_number, add_out_option, say_written
from workbench.apps.cli.say import say, say_text

if TYPE_CHECKING:
    from workbench.kernels.msl import KernelRun
    from workbench.kernels.msl.kernel import MetalKernel
    from workbench.kernels.msl.recorded_numbers import Number

COUNTED_THREADGROUPS = 16
"""Maximum number of threadgroups that `check_file` counts; all of them are checked."""

LAUNCH = "--inputs x=float32[64] --outputs y=float32[64] --grid 64 --threadgroup 32"


def add_record_parser(actions: Commands) -> None:
    """Add ``record`` to the actions of ``kernel``."""
    record = add_command(
        actions,
        "record",
        _record,
        "run a Metal kernel on this CPU and record what some threadgroups do",
        extra="msl",
        examples=f"  workbench kernel record double.metal {LAUNCH} --out double.html",
    )
    record.add_argument("file", type=Path, metavar="FILE", help="body of a kernel as MLX takes it, or a whole function")
    add_launch_options(record)
    help = "the threadgroups to record: a number, the first ones, or a list of indices such as [0,5]"
    record.add_argument("--threadgroups", default="1", metavar="N", help=f"{help} (default 1)")
    add_list(record, "--watch", "NAME", "a variable whose value is recorded after every assignment")
    help = "a page (.html), or a recording that workbench.msl.KernelRun.load reads (.kernelrun)"
    add_out_option(record, "OUT", help, required=True)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a launch."""
    group = parser.add_argument_group("launch of FILE")
    help = "NAME=DTYPE[SHAPE] for random numbers, NAME=NUMBER, NAME=FILE.npy, NAME=FILE.safetensors:KEY"
    group.add_argument("--inputs", nargs="+", default=[], metavar="NAME=VALUE", help=help)
    group.add_argument("--outputs", nargs="+", default=[], metavar="NAME=DTYPE[SHAPE]", help="the outputs")
    group.add_argument("--grid", metavar="X,Y,Z", help="number of threads")
    group.add_argument("--threadgroup", metavar="X,Y,Z", help="threads per threadgroup")
    group.add_argument(
        "--template", nargs="+", default=[], metavar="NAME=VALUE", help="dtypes, integers, true or false"
    )
    group.add_argument("--header", type=Path, metavar="FILE", help="text before the kernel")
    group.add_argument("--function", default="", metavar="NAME", help="the function to run, if FILE has several")
    help = "initial value of the outputs (default: uninitialised)"
    group.add_argument("--init-value", type=float, metavar="NUMBER", help=help)
    add_number(group, "--seed", 0, "seed of random inputs")


def check_file(options: argparse.Namespace) -> int:
    """Run a kernel in both orders of threads, and print what its launch adds up to.

    Returns:
        0 if there was no fault, 1 otherwise.
    """
    import mlx.core as mx

    kernel, launch = read_launch(options)
    results = []
    for order in (0, 1):
        run = _recorded(kernel, **launch, threadgroups=_all_of(launch), order=order)
        if run is None or run.error is not None:
            return 1
        results.append(run)
    first, second = (run.outputs or [] for run in results)
    same = all(mx.array_equal(a, b, equal_nan=True).item() for a, b in zip(first, second))
    say(f"kernel {kernel.name}: no fault in {results[0].num_threadgroups} threadgroups, in both orders of threads")
    if not same:
        say("the outputs of the two orders differ: a result depends on the order of threads, as atomics can cause")
    if len(results[0].threadgroups) < results[0].num_threadgroups:
        say(f"the numbers are those of the first {len(results[0].threadgroups)} threadgroups")
    say_text(numbers_text(results[0].numbers))
    return 0


def _record(options: argparse.Namespace) -> int:
    suffix = options.out.suffix
    if suffix not in (".html", ".kernelrun"):
        raise ValueError(f"--out {options.out} must end in .html or .kernelrun")
    kernel, launch = read_launch(options)
    run = _recorded(kernel, **launch, threadgroups=_threadgroups(options.threadgroups), watch=options.watch)
    if run is None:
        return 1
    if suffix == ".html":
        run.save_html(options.out)
    else:
        run.save(options.out)
    say_text(run)
    say_written(options.out)
    return int(run.error is not None)


def _recorded(kernel: MetalKernel, **launch: Any) -> KernelRun | None:
    """The recording of a launch, or None if the kernel does not compile; its faults are printed."""
    from workbench.kernels.msl import MslCompileError

    try:
        run = kernel.record(**launch)
    except MslCompileError as problem:
        say_text(problem)
        return None
    if run.error is not None:
        say_text(run.error)
    return run


def read_launch(options: argparse.Namespace) -> tuple[MetalKernel, dict[str, Any]]:
    """The kernel in a file, and the arguments of its launch.

    Raises:
        ValueError: An option is missing or wrong; the message names it.
    """
    from workbench.kernels.msl import metal_kernel
    from workbench.kernels.msl.array_specs import array_of, named, shaped, template_of, three
    from workbench.kernels.msl.kernel_file import read_kernel

    file = read_kernel(_text(options.file, "FILE"), options.file.name, options.function)
    for option in ("outputs", "grid", "threadgroup"):
        if not getattr(options, option):
            raise ValueError(f"--{option} is missing: a launch needs it, as in {LAUNCH}")
    inputs, outputs = named(options.inputs, "--inputs"), named(options.outputs, "--outputs")
    for option, given, wanted in (("inputs", inputs, file.inputs), ("outputs", outputs, file.outputs)):
        if file.outputs and set(given) != set(wanted):
            raise ValueError(f"--{option} has {', '.join(given) or 'nothing'}: {file.name} has {', '.join(wanted)}")
    names = file.inputs or tuple(inputs), file.outputs or tuple(outputs)
    header = _text(options.header, "--header") if options.header else ""
    kernel = metal_kernel(file.name, *names, file.source, header + file.header)
    shapes, dtypes = zip(*(shaped(outputs[name], f"--outputs {name}") for name in names[1]))
    return kernel, {
        "inputs": [array_of(name, inputs[name], options.seed) for name in names[0]],
        "output_shapes": shapes,
        "output_dtypes": dtypes,
        "grid": three(options.grid, "--grid"),
        "threadgroup": three(options.threadgroup, "--threadgroup"),
        "template": template_of(options.template),
        "init_value": options.init_value,
    }


def _text(path: Path, option: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not a text"
        raise ValueError(f"{option} {path} cannot be read: {reason}") from None


def _all_of(launch: dict[str, Any]) -> int:
    """Number of threadgroups of a launch, at most `COUNTED_THREADGROUPS`."""
    count = 1
    for threads, per_group in zip(launch["grid"], launch["threadgroup"]):
        count *= max(1, -(-threads // max(1, per_group)))
    return min(count, COUNTED_THREADGROUPS)


def _threadgroups(word: str) -> int | list[int]:
    """The value of ``--threadgroups``."""
    parts = word.strip().removeprefix("[").removesuffix("]").split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"--threadgroups is {word!r}: write a number, or a list of indices such as [0,5]")
    return int(word) if word.strip().isdigit() else [int(part) for part in parts]


def numbers_text(numbers: list[Number]) -> str:
    """Numbers of a recording as lines, with the definition of each kind below."""
    lines = [f"{'':20}{'':24}{'':>14}{'at best':>14}"]
    for one in numbers:
        best = "" if one.best is None else f"{one.best:,.4g}"
        lines.append(f"{one.array:20}{one.name:24}{one.value:>14,.4g}{best:>14}")
    definitions = {one.name: one.definition for one in numbers}
    return "\n".join([*lines, "", *(f"{name}: {text}" for name, text in definitions.items())])
