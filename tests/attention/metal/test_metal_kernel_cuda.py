"""The Metal source on CUDA: every kernel compiles after the translation of its text.

test_metal_kernel_gpu.py runs them on a GPU.
"""

import re
import shutil
import subprocess

import pytest
from kernel_ptx import count_ptx, cuda_unit, with_short_products, with_whole_tiles

from workbench.kernels.attention.metal.cuda import to_cuda

DTYPES = ("float32", "float16", "bfloat16")
SMALL = [
    *(("paged_varlen_v1", dtype, 32) for dtype in DTYPES),
    *(("merge_splits", dtype, 32) for dtype in DTYPES),
    # The two differ in their last lines only, and nvcc takes seconds for each of them: every dtype once.
    ("paged_varlen", "float32", 16),
    ("paged_varlen", "float16", 16),
    ("paged_varlen_split", "bfloat16", 16),
]
LARGE = [("paged_varlen_split", "float16", 128)]

needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")


@pytest.mark.repeats(step=2)
@needs_nvcc
@pytest.mark.parametrize("kernels", [SMALL, LARGE], ids=["every kernel", "head_dim 128"])
def test_a_kernel_compiles_and_stays_in_registers(kernels, tmp_path):
    """No stack frame: no array of matrices is indexed by a variable, which would be slow on any GPU."""
    path = tmp_path / "kernels.cu"
    unit = cuda_unit(kernels)
    path.write_text(with_short_products(unit) if kernels is LARGE else unit)
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas=-v", "-o", f"{path}bin", str(path)]
    compilation = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert compilation.returncode == 0, compilation.stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", compilation.stderr)
    assert frames == [("0", "0")] * len(kernels), compilation.stderr


@needs_nvcc
def test_the_hot_loop_has_no_branches_of_its_own(tmp_path):
    """Whole tiles, which are nearly all of a long context, are loads and products and little else."""
    unit = cuda_unit([("paged_varlen", "float16", 64)])
    statements, branches = count_ptx(with_whole_tiles(unit), tmp_path)
    assert statements <= 4000 and branches <= 150, (statements, branches)
    statements, branches = count_ptx(unit, tmp_path)
    assert statements <= 17_718 and branches <= 1_145, (statements, branches)  # when all tiles were tested alike


def test_the_translation_of_the_text():
    assert to_cuda("threadgroup Wide<T, 4> rows[N * 2];") == "__shared__ Wide<T, 4> rows[N * 2];"
    assert to_cuda("threadgroup float* p = (threadgroup float*)rows;") == "float* p = (float*)rows;"
    assert to_cuda("int i = thread_index_in_threadgroup;") == "int i = thread_index_in_threadgroup;"
    assert to_cuda("#include <metal_stdlib>\nfloat x;") == "float x;"
