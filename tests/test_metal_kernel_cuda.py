"""The Metal source on CUDA: every kernel compiles after the pass over its text; run where there is a GPU."""

import re
import shutil
import subprocess

import mlx.core as mx
import pytest
from kernel_cases import assert_close, build, random_case

from workbench.attention.metal.backend import CudaBackend
from workbench.attention.metal.cuda import cuda_prelude, to_cuda
from workbench.attention.metal.launch import kernel_text
from workbench.attention.metal.tile_shape import TileShape

KERNELS = ("paged_varlen_v1", "paged_varlen", "paged_varlen_split", "merge_splits")
CUDA_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
FLOAT_BUFFERS = ("sinks", "scoring", "partial_out", "partial_sums")
INT_BUFFERS = ("cu_seqlens_q", "seqused_k", "block_table", "work_items", "window", "merge_rows")


VARIANTS = (("float32", 32), ("float16", 16), ("bfloat16", 32))


def cuda_function(name: str, dtype: str, head_dim: int) -> str:
    """A kernel as ``mx.fast.cuda_kernel`` lays it out: shapes by value, template arguments inside."""
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
    shape = TileShape.choose(head_dim, 4 if dtype == "float32" else 2)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "NUM_SIMDGROUPS": shape.num_simdgroups,
        "TILE_KV": shape.tile_kv,
        "WIDTH": shape.width,
    }
    return "\n".join([
        "#define HAS_SPLITS" if name == "paged_varlen_split" else "#undef HAS_SPLITS",
        f"__global__ void {name}_{dtype}({', '.join(parameters)}) {{",
        f"  using T = {CUDA_TYPES[dtype]};",
        *(f"  constexpr int {constant} = {value};" for constant, value in constants.items()),
        source,
        "}",
    ])  # fmt: skip


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
def test_every_kernel_compiles_and_stays_in_registers(tmp_path):
    """No stack frame: no array of matrices is indexed by a variable, which would cost dearly on any GPU."""
    headers = {kernel_text(name).get("header", "").replace("#define HAS_SPLITS\n", "") for name in KERNELS}
    unit = [
        "#include <cstdint>",
        "#include <cuda/std/array>",
        "using Shape = cuda::std::array<int32_t, 10>;",
        cuda_prelude(),
        *map(to_cuda, headers),
        *(cuda_function(name, dtype, head_dim) for name in KERNELS for dtype, head_dim in VARIANTS),
    ]
    path = tmp_path / "kernels.cu"
    path.write_text("\n".join(unit))
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas=-v", "-o", f"{path}bin", str(path)]
    compilation = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert compilation.returncode == 0, compilation.stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", compilation.stderr)
    assert frames == [("0", "0")] * len(KERNELS) * len(VARIANTS), compilation.stderr


def test_the_pass_over_the_text():
    assert to_cuda("threadgroup Wide<T, 4> rows[N * 2];") == "__shared__ Wide<T, 4> rows[N * 2];"
    assert to_cuda("threadgroup float* p = (threadgroup float*)rows;") == "float* p = (float*)rows;"
    assert to_cuda("int i = thread_index_in_threadgroup;") == "int i = thread_index_in_threadgroup;"
    assert to_cuda("#include <metal_stdlib>\nfloat x;") == "float x;"


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU and mlx[cuda13]")
@pytest.mark.parametrize("seed", range(0, 408, 4))
def test_random_on_an_nvidia_gpu(seed):
    case = random_case(seed)
    batch = build(case)
    kernels = CudaBackend().kernels
    expected = batch.reference()
    assert_close(kernels.attend_v1(*batch.inputs, **batch.options), expected, case.dtype, slack=3)
    assert_close(kernels.attend(*batch.inputs, **batch.options, kv_split=case.kv_split), expected, case.dtype, slack=3)
