"""The Metal kernels as nvcc sees them: a file to compile, and the statements and branches that it makes of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.kernels.attention.metal.cuda import cuda_prelude, to_cuda
from workbench.kernels.attention.metal.launch import kernel_text, metal_source
from workbench.kernels.attention.metal.tile_shape import TileShape

CUDA_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
FLOAT_BUFFERS = ("sinks", "scoring", "partial_out", "partial_sums")
INT_BUFFERS = ("cu_seqlens_q", "seqused_k", "block_table", "work_items", "window", "merge_rows")

WHOLE_TILES = (
    ("tile_start >= all_first && tile_start + TILE_KV - 1 <= all_last", "true"),
    ("is_inside = tile_start >= kv_start && tile_start + TILE_KV <= kv_end", "is_inside = true"),
    ("masked = tile_start < all_first || tile_start + TILE_KV - 1 > all_last", "masked = false"),
)
"""Changes that leave only the code of tiles that are neither checked nor masked."""


def cuda_function(name: str, dtype: str, head_dim: int, value_dim: int = 0, latent: bool = False) -> str:
    """A kernel in the form that ``mx.fast.cuda_kernel`` gives it: shapes by value, template arguments inside."""
    text = kernel_text(name)
    source = to_cuda(text["source"])
    types = {"q": dtype, **dict.fromkeys(FLOAT_BUFFERS, "float32"), **dict.fromkeys(INT_BUFFERS, "int")}
    parameters = []
    for buffer in text["input_names"]:
        kind = types.get(buffer, dtype)
        parameters.append(f"const {CUDA_TYPES.get(kind, kind)}* {buffer}")
        if f"{buffer}_shape" in source:
            parameters.append(f"const __grid_constant__ Shape {buffer}_shape")
    parameters += [f"{CUDA_TYPES[types.get(buffer, dtype)]}* {buffer}" for buffer in text["output_names"]]
    shape = TileShape.choose(head_dim, 4 if dtype == "float32" else 2, value_dim)
    constants = {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": shape.value_dim,
        "LATENT": int(latent),
        "BLOCK_SIZE": 16,
        "NUM_SIMDGROUPS": shape.num_simdgroups,
        "TILE_KV": shape.tile_kv,
        "WIDTH": shape.width,
    }
    return "\n".join([
        "#define HAS_SPLITS" if name == "paged_varlen_split" else "#undef HAS_SPLITS",
        f"__global__ void {name}_{dtype}_{head_dim}({', '.join(parameters)}) {{",
        f"  using T = {CUDA_TYPES[dtype]};",
        "  using S = T;",
        *(f"  constexpr int {constant} = {value};" for constant, value in constants.items()),
        source,
        "}",
    ])  # fmt: skip


def cuda_unit(functions: Sequence[tuple[Any, ...]]) -> str:
    """A file for nvcc with kernels, each given by name, dtype, head_dim and, if they differ, value_dim and latent."""
    headers = {kernel_text(name).get("header", "").replace("#define HAS_SPLITS\n", "") for name, *_ in functions}
    before, shared, after = "\n".join(sorted(headers)).partition(metal_source("stored"))
    return "\n".join([
        "#include <cstdint>",
        "#include <cuda/std/array>",
        "using Shape = cuda::std::array<int32_t, 10>;",
        cuda_prelude(),
        to_cuda(before + shared + after.replace(metal_source("stored"), "")),
        *(cuda_function(*function) for function in functions),
    ])  # fmt: skip


def with_whole_tiles(unit: str) -> str:
    """A file in which every tile is taken for one that is neither checked nor masked."""
    for old, new in WHOLE_TILES:
        if unit.count(old) != 1:
            raise ValueError(f"{old!r} occurs {unit.count(old)} times in the kernel, expected once")
        unit = unit.replace(old, new)
    return unit


def with_short_products(unit: str) -> str:
    """A file whose products of matrices are one multiplication per element.

    Metal multiplies matrices in one instruction. The product of metal_on_cuda.cuh is a loop of shuffles, which would
    hide the rest, and takes nvcc most of its time.
    """
    product = re.compile(r"(METAL_FUNC void simdgroup_multiply_accumulate\([^{]*\{)(.*?)\n\}", re.DOTALL)
    one_step = "\n  for (int i = 0; i < 2; i++) d.elements[i] = fmaf(a.elements[i], b.elements[i], c.elements[i]);"
    unit, replaced = product.subn(lambda found: found[1] + one_step + "\n}", unit)
    if replaced != 1:
        raise ValueError("metal_on_cuda.cuh has no simdgroup_multiply_accumulate")
    return unit


def count_ptx(unit: str, folder: Path) -> tuple[int, int]:
    """Statements and branches in nvcc's output for a file with one kernel, with short products."""
    path = folder / "kernel.cu"
    path.write_text(with_short_products(unit))
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-ptx", "-o", str(folder / "kernel.ptx"), str(path)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    body = (folder / "kernel.ptx").read_text().split(".entry", 1)[1].split("\n{", 1)[1]
    lines = [line.strip() for line in body.splitlines()]
    statements = [line for line in lines if line.endswith(";") and not line.startswith(".")]
    branches = [line for line in statements if re.match(r"(?:@!?%p\d+ )?bra", line)]
    return len(statements), len(branches)
