"""``%%metal``: a kernel in a notebook cell, run here with every check, and on a GPU too if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import mlx.core as mx

from workbench.kernels.msl import KernelRun, metal_kernel
from workbench.kernels.msl.array_specs import array_of, named, shaped, template_of, three
from workbench.kernels.msl.diagnostics import carets, quote

FILE = "cell"
"""Name of the cell in reports; its lines count from the line of the magic, as front ends number them."""

WATCH_IS_NOTHING = "#define WATCH(x)\n"


@dataclass(frozen=True)
class MetalCell:
    """The result of a ``%%metal`` cell.

    Attributes:
        run: The recording of the launch on the CPU: its fault, its numbers, and ``run.watch()``.
        outputs: The outputs by name; empty after a fault.
        on_gpu: The outputs on the GPU, by name; empty without one.
    """

    run: KernelRun
    outputs: dict[str, mx.array] = field(default_factory=dict)
    on_gpu: dict[str, mx.array] = field(default_factory=dict)

    @property
    def differences(self) -> dict[str, float]:
        """Largest difference between GPU and CPU for each output; empty without a GPU."""
        pairs = {name: (self.outputs[name], found) for name, found in self.on_gpu.items()}
        return {
            name: float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()) for name, (a, b) in pairs.items()
        }

    def __repr__(self) -> str:
        fault = self.run.fault
        if fault is not None:
            quoted = quote(self.run.texts, fault.file, fault.line)
            return fault.message + (f"\n{carets(fault.message, quoted)}" if quoted else "")
        shown = ", ".join(f"{name} = {_short(array)}" for name, array in self.outputs.items())
        gpu = "".join(f"; {name} on the GPU differs by at most {d:.1e}" for name, d in self.differences.items())
        return f"{shown} (no fault; {self.run!r}{gpu})"

    def _repr_html_(self) -> str:
        numbers = "" if self.run.fault is not None else self.run._repr_html_() or ""
        return f"<pre>{escape(repr(self))}</pre>{numbers}"


def run_cell(
    cell: str,
    variables: Mapping[str, Any],
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    grid: str,
    threadgroup: str,
    template: Sequence[str] = (),
    threadgroups: int = 1,
    watch: Sequence[str] = (),
    name: str = FILE,
    seed: int = 0,
) -> MetalCell:
    """Run a kernel's body.

    Args:
        cell: The body, as ``mx.fast.metal_kernel`` takes it.
        variables: The notebook's variables.
        inputs: ``NAME`` for a variable, or NAME=VALUE as `workbench.kernels.msl.array_specs.array_of` reads it.
        outputs: NAME=DTYPE[SHAPE].
        grid: Threads, such as "64" or "64,2,1".
        threadgroup: Threads per threadgroup.
        template: NAME=VALUE.
        threadgroups: Number of threadgroups to record.
        watch: Variables to watch.
        name: Name of the kernel.
        seed: Seed of random inputs.

    Raises:
        ValueError: An argument is missing or wrong.
        MslCompileError: The body does not compile; lines are those of the cell.
    """
    words = named((word if "=" in word else f"{word}={word}" for word in inputs), "--inputs")
    arrays = {key: array_of(key, word, seed, variables) for key, word in words.items()}
    wanted = {key: shaped(word, f"--outputs {key}") for key, word in named(outputs, "--outputs").items()}
    kernel: dict[str, Any] = {
        "name": name,
        "input_names": list(arrays),
        "output_names": list(wanted),
        "source": f'#line 2 "{FILE}"\n{cell}',
    }
    launch: dict[str, Any] = {
        "inputs": list(arrays.values()),
        "output_shapes": [shape for shape, _ in wanted.values()],
        "output_dtypes": [dtype for _, dtype in wanted.values()],
        "grid": three(grid, "--grid"),
        "threadgroup": three(threadgroup, "--threadgroup"),
        "template": template_of(template),
    }
    run = metal_kernel(**kernel).record(**launch, threadgroups=threadgroups, watch=watch)
    if run.outputs is None:
        return MetalCell(run)
    found = dict(zip(wanted, run.outputs))
    if not mx.metal.is_available():
        return MetalCell(run, found)
    made: Any = mx.fast.metal_kernel(**kernel, header=WATCH_IS_NOTHING)
    return MetalCell(run, found, dict(zip(wanted, made(**launch, stream=mx.gpu))))


def _short(array: mx.array) -> str:
    """The shape of an array, or its elements if they are few."""
    return " ".join(str(array).split()) if array.size <= 8 else f"{array.dtype} {list(array.shape)}"
