"""Run the products' code for processors that this machine is not: ``python scripts/emulate_products.py [TARGET ...]``.

LLVM compiles the tiles of every number of rows for the processor, a guest program calls them with random weights and
inputs, an emulator runs it, and the results are compared with float64 products of the weights that PyPI gguf
dequantises:

- neon: Arm, under ``qemu-aarch64-static``; needs ``gcc-aarch64-linux-gnu``.
- avx512: AVX-512 without VNNI, and vnni: with VNNI, under ``bochs``; needs ``gcc``. The guest is the machine's whole
  firmware: it starts at the processor's reset vector, without an operating system (`emulated/start_x86.S`).

A control reads scales as numbers of another type and has to fail. Another runs the code of avx512 and vnni on a
processor without the instructions, and it must not come to an end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from workbench.kernels.cpu.formats import Activations, Format

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "emulated"
SHAPES = ((7, 256), (70, 512))
"""Outputs and columns of the matrices: less than a tile, and tiles of which one is partly empty."""
TOLERANCE = 4e-6
"""Largest error, relative to the sum of the magnitudes of a product's terms."""
_AVX512 = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq"


class Target(NamedTuple):
    """A processor.

    Attributes:
        triple: LLVM's name of its architecture.
        features: Its instruction sets, from which the width of vectors follows.
        prefix: Prefix of the names of its compiler's programs.
        emulator: The program that emulates it.
        model: The emulator's name of the processor.
        other_model: A processor that lacks instructions; empty for none.
    """

    triple: str
    features: str
    prefix: str
    emulator: str
    model: str
    other_model: str


TARGETS = {
    # numba then takes four lanes; the features only let this machine link the code, which it does not run.
    "neon": Target("aarch64-unknown-linux-gnu", "+avx,+f16c,+fma", "aarch64-linux-gnu-", "qemu-aarch64-static", "", ""),
    "avx512": Target("x86_64-unknown-linux-gnu", _AVX512, "", "bochs", "corei7_skylake_x", "corei7_haswell_4770"),
    "vnni": Target(
        "x86_64-unknown-linux-gnu", f"{_AVX512},+avx512vnni", "", "bochs", "corei7_icelake_u", "corei7_skylake_x"
    ),
}

# Nothing of a library is linked: what numba adds for Python's sake stays unresolved, and is not called.
_COMPILE = ["-O1", "-ffreestanding", "-fno-pic", "-fno-stack-protector", "-nostdlib", "-static", "-no-pie"]
_COMPILE += ["-Wl,--build-id=none,-z,muldefs,--no-relax,--unresolved-symbols=ignore-all", "-Wa,-I."]

_BOCHS = """\
megs: 32
romimage: file={program}
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model={model}, ips=100000000, reset_on_triple_fault=0
port_e9_hack: enabled=1
plugin_ctrl: speaker=false, parallel=false, serial=false
clock: sync=none
log: /dev/null
panic: action=fatal
display_library: term
"""


class Case(NamedTuple):
    """A matrix and the type of its inputs.

    Attributes:
        type_name: The ggml type of the weights.
        activations: The factors of the weights.
        num_outputs: Rows of the matrix.
        num_columns: Columns of the matrix.
        is_control: Whether the kernel reads float16 scales as bfloat16.
    """

    type_name: str
    activations: Activations
    num_outputs: int
    num_columns: int
    is_control: bool = False

    @property
    def kernel(self) -> str:
        """Name of the kernel in the guest."""
        return f"{self.type_name}_{self.activations}" + ("_control" if self.is_control else "")

    @property
    def form(self) -> Format:
        """The format that the kernel is compiled for."""
        from workbench.kernels.cpu.formats import GGML_FORMATS

        form = GGML_FORMATS[self.type_name]
        return form._replace(scales="bfloat16") if self.is_control else form


def cases() -> list[Case]:
    """Every type with every kind of activations, and controls."""
    from workbench.kernels.cpu.attention.processor import instruction_set
    from workbench.kernels.cpu.formats import GGML_FORMATS

    kinds: list[Activations] = ["float32", "int8"] if instruction_set() else ["float32"]
    found = [
        Case(name, kind, *shape)
        for kind in kinds
        for name, form in GGML_FORMATS.items()
        if form.takes(kind)
        for shape in SHAPES
    ]
    return found + [Case("Q4_0", kind, *SHAPES[1], is_control=True) for kind in kinds]


# -- in a process whose numba compiles for the target: the kernels ---------------------------------------------------


def write_kernels(target: Target, folder: Path) -> None:
    """Write an object file with the kernels of all cases, and the names by which it has them."""
    import numba
    from llvmlite import binding
    from numba.core import types

    from workbench.kernels.cpu.kernels_code import _block
    from workbench.kernels.cpu.tiles import PackedType

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(target.triple).create_target_machine(
        features=target.features if "x86" in target.triple else "", opt=3, reloc="static", codemodel="small"
    )
    for case in {case.kernel: case for case in cases()}.values():

        def all_rows(weights, units, x, x_row, sums, sums_row, y, y_row, rows):
            row = 0
            while row < rows:
                row += _block(
                    weights, units, x + 4 * x_row * row, x_row, sums + 4 * sums_row * row, sums_row,
                    y + 4 * y_row * row, y_row, rows - row,
                )  # fmt: skip

        signature = types.void(PackedType(case.form, case.activations), *[types.intp] * 8)
        compiled = numba.cfunc(signature, error_model="numpy")(all_rows)
        code = compiled.inspect_llvm().replace(compiled.native_name, case.kernel)
        code = re.sub(r'target datalayout = ".*"', "", code)
        if "x86" not in target.triple:
            code = code.replace("llvm.x86.ssse3.pshuf.b.128", "llvm.aarch64.neon.tbl1.v16i8")
        module = binding.parse_assembly(re.sub(r'target triple = ".*"', f'target triple = "{target.triple}"', code))
        module.data_layout = str(machine.target_data)
        (folder / f"{case.kernel}.o").write_bytes(machine.emit_object(module))


# -- in a process whose numba has the target's width of vectors, but compiles for this machine ------------------------


class Call(NamedTuple):
    """One call of a kernel.

    Attributes:
        case: Its case.
        line: Its line in the guest's table, see `emulated/guest.c`.
        x: The numbers that its inputs stand for, float64 [num_rows, num_columns].
        weights: The weights of the tile, float64 [TILE, num_columns].
    """

    case: Case
    line: str
    x: np.ndarray
    weights: np.ndarray


def take_width_of(target: Target) -> None:
    """Let vectors be as wide as the target's in this process, whose code is compiled for this machine."""
    import numba
    from numba.core.registry import cpu_target

    cpu_target.target_context.codegen()  # reads the features of the processor to compile for
    numba.config.CPU_FEATURES = target.features


def make_calls(some_cases: Sequence[Case]) -> tuple[list[Call], bytes]:
    """The calls of some cases, and their packed weights and prepared inputs."""
    from stored_rows import dequantised, random_rows

    from workbench.kernels.cpu.formats import TILE, UNIT
    from workbench.kernels.cpu.inputs import code_bits, factors, row_size
    from workbench.kernels.cpu.inputs_code import prepare_rows
    from workbench.kernels.cpu.kernels import TILE_ROWS
    from workbench.models.packed import matrix
    from workbench.models.packed.check import as_int8

    matrix.product_kernel = lambda form, activations: 0  # nothing here calls one
    calls, data = [], bytearray()

    def place(part: np.ndarray) -> str:
        data.extend(bytes(-len(data) % 64) + part.tobytes())
        return f"data + {len(data) - part.nbytes}"

    for seed, case in enumerate(some_cases):
        rows = random_rows(case.type_name, case.num_outputs, case.num_columns, seed)
        packed = matrix.from_ggml(case.type_name, [rows])
        missing = packed.num_tiles * TILE - case.num_outputs
        weights = np.pad(dequantised(case.type_name, rows).astype(np.float64), ((0, missing), (0, 0)))
        tiles = [place(tile) for tile in packed.data.reshape(packed.num_tiles, -1)]
        units, codes = packed.num_units, code_bits(packed.form, case.activations)
        for num_rows in TILE_ROWS:
            x = np.random.default_rng(num_rows).standard_normal((num_rows, case.num_columns)).astype(np.float32)
            prepared = np.empty((num_rows, row_size(units, codes)), np.float32)
            sums = np.empty((num_rows, units * UNIT // packed.form.group), np.float32)
            form = packed.form
            prepare_rows(x, case.num_columns, codes, form.middle, factors(form), form.group, prepared, sums)
            inputs = f"{place(prepared)}, {prepared.shape[1]}, {place(sums)}, {sums.shape[1]}"
            exact = as_int8(x) if codes else x.astype(np.float64)
            for index, tile in enumerate(tiles):
                line = f".quad {case.kernel}, {tile}, {units}, {inputs}, {TILE}, {num_rows}"
                calls.append(Call(case, line, exact, weights[index * TILE : (index + 1) * TILE]))
    return calls, bytes(data)


def build_guest(target: Target, folder: Path, calls: list[Call], data: bytes) -> Path:
    """Link the kernels, the data and the guest's program."""
    (folder / "data.bin").write_bytes(data)
    (folder / "calls.inc").write_text("\n".join(call.line for call in calls) + "\n")
    is_arm = "aarch64" in target.triple
    start, options = ("start_arm.S", []) if is_arm else ("start_x86.S", [f"-Wl,-T,{SOURCES}/firmware.ld"])
    program = folder / "guest.elf"
    kernels = sorted({f"{call.case.kernel}.o" for call in calls})
    command = [f"{target.prefix}gcc", *_COMPILE, *options, "-I", ".", "-o", program.name]
    subprocess.run(
        [*command, SOURCES / "guest.c", SOURCES / "calls.S", SOURCES / start, *kernels], check=True, cwd=folder
    )
    if is_arm:
        return program
    firmware = folder / "guest.rom"
    subprocess.run([f"{target.prefix}objcopy", "-O", "binary", program, firmware], check=True)
    return firmware


def emulate(target: Target, program: Path, model: str) -> str:
    """Run the guest on a processor and return its output."""
    if target.emulator != "bochs":
        return subprocess.run([target.emulator, program], capture_output=True, text=True, timeout=600).stdout
    configuration, commands = program.with_name("bochsrc"), program.with_name("commands")
    configuration.write_text(_BOCHS.format(program=program, model=model))
    commands.write_text("c\nq\n")  # of its debugger, if it has one
    command = ["bochs", "-q", "-f", configuration, "-rc", commands]
    environment = os.environ | {"TERM": "vt100"}  # its display ends the process without it
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    ).stdout


def results_of(output: str, calls: list[Call]) -> list[np.ndarray]:
    """The results of the calls that came to an end, float32 [num_rows, TILE]."""
    lines = re.findall(r"^@([0-9a-f]*)$", output, re.MULTILINE)
    return [np.frombuffer(bytes.fromhex(line), "<f4").reshape(len(call.x), -1) for call, line in zip(calls, lines)]


def compare(calls: list[Call], results: list[np.ndarray]) -> bool:
    """Print a line per case; return whether all are as they should be."""
    errors: dict[Case, float] = {}
    for call, result in zip(calls, results):
        terms = np.abs(call.x) @ np.abs(call.weights).T
        error = np.abs(result - call.x @ call.weights.T) / np.maximum(terms, np.finfo(np.float32).tiny)
        errors[call.case] = max(errors.get(call.case, 0.0), float(np.nan_to_num(error, nan=np.inf).max()))
    good = len(results) == len(calls)
    for case, error in errors.items():
        right = (error <= TOLERANCE) != case.is_control
        good &= right
        what = f"{case.kernel} {case.num_outputs} x {case.num_columns}, error {error:.1e}"
        print(f"{'PASS' if right else 'FAIL'} {what}{' (has to be wrong)' if case.is_control else ''}")
    if not good:
        print(f"FAIL {len(results)} of {len(calls)} calls came to an end")
    return good


def run(target: Target, folder: Path) -> bool:
    """Run the kernels of `write_kernels` in an emulator, those of one type after those of another."""
    take_width_of(target)
    all_cases = cases()
    good, first = True, True
    for type_name in dict.fromkeys(case.type_name for case in all_cases):
        calls, data = make_calls([case for case in all_cases if case.type_name == type_name])
        program = build_guest(target, folder, calls, data)
        good &= compare(calls, results_of(emulate(target, program, target.model), calls))
        if first and target.other_model:
            count = len(results_of(emulate(target, program, target.other_model), calls))
            good &= count < len(calls)
            verdict = "PASS" if count < len(calls) else "FAIL"
            print(f"{verdict} on {target.other_model}, {count} of {len(calls)} calls came to an end (it has to stop)")
        first = False
        sys.stdout.flush()
    return good


def main() -> int:
    """Run the targets that the command line names, or all whose programs are installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--part", nargs=2, metavar=("PART", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - TARGETS.keys():
        parser.error(f"unknown targets: {', '.join(sorted(unknown))}; known are {', '.join(TARGETS)}")
    if arguments.part:
        part, folder = arguments.part
        target = TARGETS[arguments.targets[0]]
        if part == "kernels":
            write_kernels(target, Path(folder))
            return 0
        return int(not run(target, Path(folder)))
    good = True
    for name in arguments.targets or TARGETS:
        target = TARGETS[name]
        if missing := [tool for tool in (target.emulator, f"{target.prefix}gcc") if not shutil.which(tool)]:
            print(f"SKIP {name}: {' and '.join(missing)} are not installed")
            continue
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            # The width of vectors is not part of the names of kept code, so it is kept elsewhere.
            environment = os.environ | {"WORKBENCH_CACHE": f"{folder}/cache", "WORKBENCH_THREADS": "1"}
            environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE.parent / "tests" / "support")])
            command = [sys.executable, __file__, name, "--part"]
            compiling = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": target.features}
            subprocess.run([*command, "kernels", folder], env=environment | compiling, check=True)
            good &= subprocess.run([*command, "run", folder], env=environment).returncode == 0
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
