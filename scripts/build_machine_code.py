"""Compile the kernels of common models into the package, for each level of `workbench.kernels.cpu.attention.processor`.

    python scripts/build_machine_code.py [LEVEL ...]

The code is for the Python and numba that run this; a wheel may hold the code of several. The release workflow runs it
before it builds the wheel. The bundled model runs once, which says what it calls; then each level compiles that in
its own process. Only the compiler has to know the level, not this processor.
"""

from __future__ import annotations

import argparse
import os
import pickle  # read by this script's own processes alone
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workbench.kernels.cpu.attention.processor import LEVELS, code_folder

PRODUCTS = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "F16", "BF16", "F32")
"""Formats of weights whose products are compiled."""

Call = tuple[str, str, str, Any, bool]
"""`Wanted` with the signature itself."""


def calls_of_a_run() -> list[Call]:
    """The calls of the bundled model, with activations of both kinds, and those that other formats need besides."""
    import numpy as np

    from workbench import Engine, SamplingParams
    from workbench.kernels.cpu import kernels, packing
    from workbench.kernels.cpu.attention import object_code
    from workbench.kernels.cpu.formats import GGML_FORMATS

    calls: dict[str, Call] = {}
    place_of = object_code.place_of

    def noting(wanted: object_code.Wanted) -> tuple[str, str]:
        call = wanted._replace(signature=wanted.signature())
        calls[repr(call)] = tuple(call)
        return place_of(wanted)

    object_code.place_of = noting
    for activations in ("float32", "int8"):
        with Engine("smollm2", activations=activations, wait_for_compiled=True) as engine:
            engine.add_request("The capital of France is", SamplingParams(max_tokens=2))
            engine.run(progress=False)
    layout = packing.layout_of(GGML_FORMATS["Q4_K"], 8)
    raw = np.zeros((1, 144), np.uint8)
    raw.flags.writeable = False
    packing.pack_ggml(raw, packing.KINDS["Q4_K"], layout, np.zeros(layout.tile_bytes, np.uint8), 0)
    for name in PRODUCTS:
        for activations in ("float32", "int8"):
            if GGML_FORMATS[name].takes(activations):
                kernels.product_kernel(GGML_FORMATS[name], activations)
    object_code.place_of = place_of
    return list(calls.values())


def compile_all(calls: list[Call], folder: Path) -> None:
    """Compile functions for the level that this process was started for."""
    from workbench.kernels.cpu.attention.object_code import Wanted, compiled, place_of, write

    for number, (module, name, types, signature, for_python) in enumerate(calls, start=1):
        print(f"{folder.name}: {number} of {len(calls)}, {name}", flush=True)
        wanted = Wanted(module, name, types, lambda signature=signature: signature, for_python)
        path = folder.joinpath(*place_of(wanted))
        write(path, compiled(wanted.function(), signature, for_python))
        path.chmod(0o644)
        path.parent.chmod(0o755)
    folder.chmod(0o755)


def main() -> None:
    """Run once, and start a process for each level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"of {', '.join(LEVELS)} (default: all)")
    parser.add_argument("--calls", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.levels) - set(LEVELS):
        parser.error(f"unknown levels: {', '.join(sorted(unknown))}; they are {', '.join(LEVELS)}")
    if options.calls:
        (level,) = options.levels
        compile_all(pickle.loads(options.calls.read_bytes()), code_folder(level))  # noqa: S301
        return
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls"
        calls.write_bytes(pickle.dumps(calls_of_a_run()))
        for level in options.levels or LEVELS:
            environment = os.environ | {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": LEVELS[level]}
            subprocess.run([sys.executable, __file__, level, "--calls", calls], check=True, env=environment)


if __name__ == "__main__":
    main()
