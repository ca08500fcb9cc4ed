"""Statements, branches and compile time of the tiled attention kernel, by nvcc.

No compiler for Apple GPUs runs on Linux, so nvcc stands in for it: it unrolls and inlines like any GPU compiler.
A matrix product counts as one multiplication per element, because Metal has an instruction for it.

    python benchmarks/bench_kernel_code.py                       # this checkout
    git worktree add /tmp/before v0.1.0
    python benchmarks/bench_kernel_code.py --before /tmp/before  # and another one, interleaved
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import kernel_ptx
from _common import save, summarise

VARIANTS = (("paged_varlen", "float16", 64), ("paged_varlen", "float16", 128), ("paged_varlen_split", "bfloat16", 128))
METAL = Path("workbench/kernels/attention/metal")


def unit_of(checkout: Path | None, variant: tuple[str, str, int]) -> str:
    """The file for nvcc of a variant, from the kernel texts of a checkout."""
    if checkout is None:
        return kernel_ptx.cuda_unit([variant])
    folder = checkout / METAL
    with (
        mock.patch(
            "workbench.kernels.attention.metal.launch.metal_source", lambda name: (folder / f"{name}.metal").read_text()
        ),
        mock.patch.object(kernel_ptx, "cuda_prelude", (folder / "metal_on_cuda.cuh").read_text),
    ):
        return kernel_ptx.cuda_unit([variant])


def compiled(unit: str) -> tuple[tuple[int, int], float]:
    """Statements and branches of a file, and the CPU seconds of its compilation."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        counts = kernel_ptx.count_ptx(unit, Path(folder))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return counts, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    results: dict = {}
    for variant in VARIANTS:
        here = unit_of(None, variant)
        units = {"whole kernel": here, "whole tiles alone": kernel_ptx.with_whole_tiles(here)}
        if options.before is not None:
            units["whole kernel before"] = unit_of(options.before, variant)
        counts, seconds = {}, {arm: [] for arm in units}
        for _ in range(options.repeats):
            for arm, unit in units.items():
                counts[arm], cpu = compiled(unit)
                seconds[arm].append(cpu)
        name = f"{variant[0]}, {variant[1]}, head_dim {variant[2]}"
        results[name] = {
            arm: {"statements": counts[arm][0], "branches": counts[arm][1], "compile_cpu_s": summarise(seconds[arm])}
            for arm in units
        }
        for arm, row in results[name].items():
            median = row["compile_cpu_s"]["median"]
            print(f"{name}: {arm}: {row['statements']:,} statements, {row['branches']:,} branches, {median:.1f} s")
    save("kernel_code", results)


if __name__ == "__main__":
    main()
