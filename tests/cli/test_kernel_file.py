"""`workbench kernel check FILE` and `workbench kernel record FILE`."""

import mlx.core as mx
import numpy as np
import pytest
from msl_runs import skip_without_compiler

from workbench import msl
from workbench.apps.cli import main
from workbench.kernels.msl.array_specs import array_of
from workbench.kernels.msl.kernel_file import read_kernel

skip_without_compiler()

BODY = "uint i = thread_position_in_grid.x;\ny[i] = 2 * x[i];\n"
WHOLE = """#include <metal_stdlib>
using namespace metal;

// Twice a number. A comment may contain kernel void other(device float* y) {
inline float twice(float x) { return 2 * x; }

kernel void doubled(device const float* x [[buffer(0)]], constant int& n [[buffer(1)]],
                    device float* y [[buffer(2)]], uint i [[thread_position_in_grid]],
                    uint2 group [[threadgroup_position_in_grid]]) {
  if (int(i) < n) {
    y[i] = twice(x[i]) + group.y;
  }
}
"""
LAUNCH = ["--inputs", "x=float32[64]", "--outputs", "y=float32[64]", "--grid", "64", "--threadgroup", "32"]
WHOLE_LAUNCH = [LAUNCH[0], "x=float32[64]", "n=64", *LAUNCH[2:]]


@pytest.fixture
def kernel(tmp_path, capsys):
    """A function that runs a command on a file with a text; its exit status, and what it printed."""

    def run(action, text, *options, name="twice.metal"):
        (tmp_path / name).write_text(text)
        try:
            status = main(["kernel", action, str(tmp_path / name), *options])
        except SystemExit as ended:
            status = ended.code
        return status, "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize("text, launch", [(BODY, LAUNCH), (WHOLE, WHOLE_LAUNCH)], ids=["body", "function"])
def test_a_right_kernel_is_checked(kernel, text, launch):
    status, said = kernel("check", text, *launch)
    assert status == 0
    assert "no fault in 2 threadgroups, in both orders" in said
    assert "x                   bytes read                         256           256" in said
    assert "bytes read: bytes that all threads have loaded" in said


@pytest.mark.parametrize("text, launch", [(BODY, LAUNCH), (WHOLE, WHOLE_LAUNCH)], ids=["body", "function"])
def test_a_fault_is_told_with_the_line_of_the_file(kernel, text, launch):
    wrong = text.replace("x[i]", "x[i + 1]")
    line = 1 + wrong[: wrong.index("x[i + 1]")].count("\n")
    status, said = kernel("check", wrong, *launch)
    assert status == 1
    assert f"at twice.metal:{line}: {wrong.splitlines()[line - 1].strip()}" in said
    assert "x[64] (the buffer holds 64 elements)" in said


def test_results_that_depend_on_the_order_are_told(kernel):
    text = "y[thread_position_in_grid.x] = atomic_fetch_add_explicit((device atomic_int*)n, 1, memory_order_relaxed);\n"
    launch = ["--outputs", "y=int32[64]", "n=int32[1]", "--grid", "64", "--threadgroup", "64", "--init-value", "0"]
    status, said = kernel("check", text, *launch)
    assert status == 0 and "the outputs of the two orders differ" in said


def test_a_recording_is_written_as_a_page_and_as_a_file(kernel, tmp_path):
    page, file = tmp_path / "twice.html", tmp_path / "twice.kernelrun"
    assert kernel("record", BODY, *LAUNCH, "--threadgroups", "[1]", "--out", str(file))[0] == 0
    run = msl.KernelRun.load(file)
    assert run.threadgroups == ((1, 0, 0),) and run.num_threadgroups == 2 and len(run.events) == 96
    assert run.texts["twice.metal"].startswith("uint i")
    status, said = kernel(
        "record", BODY.replace("x[i]", "x[i + 1]"), *LAUNCH, "--threadgroups", "2", "--out", str(page)
    )
    assert status == 1 and "out-of-bounds" in said and page.read_text().startswith("<!doctype html>")
    assert (
        kernel(
            "record",
            "float m = x[0];\ny[thread_position_in_grid.x] = m;\n",
            *LAUNCH,
            "--watch",
            "m",
            "--out",
            str(file),
        )[0]
        == 0
    )
    assert "m" in msl.KernelRun.load(file).names


@pytest.mark.parametrize(
    "options, message",
    [
        ([*LAUNCH, "--grid", "sixty"], "--grid is 'sixty'"),
        ([*LAUNCH, "--grid", "1,2,3,4"], "--grid is '1,2,3,4'"),
        ([*LAUNCH[2:]], "use of undeclared identifier 'x'"),
        (["--inputs", "x=float33[64]", *LAUNCH[2:]], "--inputs x has the dtype 'float33'"),
        (["--inputs", "x=float32[64", *LAUNCH[2:]], "--inputs x is 'float32[64'"),
        (["--inputs", "x", *LAUNCH[2:]], "--inputs has 'x': write NAME=VALUE"),
        (["--inputs", "x=float32[64]", "x=1", *LAUNCH[2:]], "--inputs has x twice"),
        (["--inputs", "x=nothere.npy", *LAUNCH[2:]], "there is no file nothere.npy"),
        (["--inputs", "x=float32[99999999,999]", *LAUNCH[2:]], "at most 268435456 elements"),
        ([*LAUNCH, "--outputs", "y=64"], "--outputs y is '64'"),
        ([*LAUNCH[:4], "--threadgroup", "32"], "--grid is missing"),
        ([*LAUNCH, "--template", "N=four"], "--template N has the dtype 'four'"),
        ([*LAUNCH, "--threadgroup", "2048"], "threadgroup is (2048, 1, 1)"),
        ([*LAUNCH, "--function", "f"], "--function is 'f': twice.metal has no [[kernel]] function"),
        ([*LAUNCH, "--header", "nothere.h"], "--header nothere.h cannot be read"),
        (LAUNCH, "nothing is wrong"),
    ],
)
def test_bad_input_is_refused_by_name(kernel, options, message):
    status, said = kernel("check", BODY, *options)
    if message == "nothing is wrong":
        assert status == 0
        return
    assert status in (1, 2) and message in said, said


@pytest.mark.parametrize(
    "options, message",
    [
        (["--out", "a.txt"], "must end in .html or .kernelrun"),
        (["--out", "a.html", "--threadgroups", "[9]"], "threadgroups has 9: the grid has 2 threadgroups"),
        (["--out", "a.html", "--threadgroups", "two"], "--threadgroups is 'two'"),
        (["--out", "a.html", "--watch", "m"], "watch has 'm'"),
    ],
)
def test_bad_options_of_a_recording_are_refused_by_name(kernel, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, said = kernel("record", BODY, *LAUNCH, *options)
    assert status == 2 and message in said
    assert not (tmp_path / "a.html").exists()


def test_a_file_that_cannot_be_read_is_named(capsys, tmp_path):
    assert main(["kernel", "check", str(tmp_path / "nothere.metal"), *LAUNCH]) == 2
    assert "nothere.metal cannot be read" in "".join(capsys.readouterr())
    assert main(["kernel", "check", *LAUNCH]) == 2
    assert "belong to the launch of a FILE" in "".join(capsys.readouterr())


def test_names_of_a_function_have_to_be_given(kernel):
    status, said = kernel("check", WHOLE, *LAUNCH)
    assert status == 2 and "--inputs has x: doubled has x, n" in said


@pytest.mark.parametrize(
    "text, message",
    [
        ("template <typename T>\n[[kernel]] void f(device T* y [[buffer(0)]]) { y[0] = 1; }", "f is a template"),
        (
            "kernel void f(device float* y) { y[0] = 1; }\nkernel void g(device float* y) { y[0] = 1; }",
            "f.metal has f, g",
        ),
        ("kernel void f(texture2d<float> t [[texture(0)]], device float* y) {}", "t is [[texture(0)]]"),
        ("kernel void f(device float* y, threadgroup float* s [[threadgroup(0)]]) {}", "s is [[threadgroup(0)]]"),
        ("kernel void f(device float* y) { y[0] = 1;", "the { in line 1 is not closed"),
    ],
)
def test_functions_that_mlx_cannot_call_are_refused(text, message):
    with pytest.raises(ValueError) as raised:
        read_kernel(text, "f.metal")
    assert message in str(raised.value)


def test_arrays_in_words(tmp_path):
    mx.save(str(tmp_path / "a.npy"), mx.arange(3))
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"w": mx.arange(4)})
    assert array_of("x", f"{tmp_path}/a.npy", 0).tolist() == [0, 1, 2]
    assert array_of("x", f"{tmp_path}/a.safetensors:w", 0).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"has w; write .*:KEY"):
        array_of("x", f"{tmp_path}/a.safetensors:v", 0)
    assert array_of("n", "7", 0).item() == 7 and array_of("n", "7", 0).dtype == mx.int32
    assert array_of("n", "float16:0.5", 0).dtype == mx.float16 and array_of("b", "true", 0).item() is True
    first, again, other = (array_of("x", "float32[3,4]", seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other) and first.shape == (3, 4)
