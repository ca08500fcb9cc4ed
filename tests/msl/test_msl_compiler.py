"""Finding a compiler, compiling once, and the messages when that fails."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from msl_runs import fault_of, ramp, run, skip_without_compiler

from workbench import msl
from workbench.kernels.msl import compiler, launch
from workbench.kernels.msl.source_lines import LineTable

skip_without_compiler()

RUNTIME_FILES = len(list(compiler.RUNTIME_FOLDER.glob("*.cpp")))
DOUBLE = "from msl_runs import run\nprint(run('y[i] = 2.0f * x[i];')[41])"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return tmp_path / "msl"


@pytest.fixture
def search_again():
    """Repeat the search for a compiler, in this test and after it."""
    compiler.find_compiler.cache_clear()
    yield
    compiler.find_compiler.cache_clear()


def fake_clang(folder, name, version):
    path = folder / name
    path.write_text(f"#!/bin/sh\necho 'Debian clang version {version}'\n")
    path.chmod(0o755)
    return str(path)


# ---- the search ----


def test_without_a_compiler_one_line_says_how_to_get_one(search_again, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("WORKBENCH_CLANG", raising=False)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(msl.MslCompilerMissing) as missing:
        run("y[i] = 5.5f * x[i];")
    message = str(missing.value)
    assert "\n" not in message
    assert "apt-get install clang-19" in message and "pip install 'inference-workbench[msl]'" in message


def test_an_old_compiler_is_skipped(search_again, monkeypatch, tmp_path):
    fake_clang(tmp_path, "clang", "16.0.6")
    fake_clang(tmp_path, "clang-18", "18.1.8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("WORKBENCH_CLANG", raising=False)
    monkeypatch.setattr(compiler, "_version_text", lambda command: Path(command[0]).read_text())
    assert compiler.find_compiler().kernel_command == (str(tmp_path / "clang-18"),)
    (tmp_path / "clang-18").unlink()
    compiler.find_compiler.cache_clear()
    monkeypatch.setattr(compiler, "_zig", lambda: None)
    with pytest.raises(msl.MslCompilerMissing):
        compiler.find_compiler()


def test_the_newest_named_compiler_is_taken(search_again, monkeypatch, tmp_path):
    for version in (17, 19, 21):
        fake_clang(tmp_path, f"clang-{version}", f"{version}.1.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("WORKBENCH_CLANG", raising=False)
    monkeypatch.setattr(compiler, "_version_text", lambda command: Path(command[0]).read_text())
    assert compiler.find_compiler().kernel_command == (str(tmp_path / "clang-21"),)


@pytest.mark.parametrize("named", ["/nowhere/clang", sys.executable])
def test_an_unsuitable_named_compiler_is_reported(named, search_again, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CLANG", named)
    with pytest.raises(msl.MslCompilerMissing, match=re.escape(f"WORKBENCH_CLANG={named} is not clang 17 or newer")):
        compiler.find_compiler()


def test_an_unknown_platform_is_reported(search_again, monkeypatch):
    monkeypatch.setattr(compiler.sys, "platform", "win32")
    with pytest.raises(msl.MslCompilerMissing, match="win32"):
        compiler.find_compiler()


def test_the_clang_of_ziglang_runs_kernels(search_again, monkeypatch):
    pytest.importorskip("ziglang")
    monkeypatch.setenv("WORKBENCH_CLANG", "ziglang")
    np.testing.assert_array_equal(run("y[i] = simd_sum(x[i]);")[:32], np.full(32, 33 * 16))
    np.testing.assert_allclose(run("y[i] = tanh(0.1f * x[i]);"), np.tanh(0.1 * np.arange(1, 65)), rtol=1e-6)  # of libm
    fault = fault_of("y[i] = x[i];\ny[i] = x[i + 1];")
    assert (fault.kind, fault.index, fault.line) == ("out of bounds", 64, 3)


# ---- the cache ----


def count_runs(monkeypatch):
    commands = []
    plain = subprocess.run

    def counted(command, **options):
        commands.append(command)
        return plain(command, **options)

    monkeypatch.setattr(compiler.subprocess, "run", counted)
    return commands


def test_a_kernel_is_compiled_once(empty_cache, monkeypatch):
    run("y[i] = 2.0f * x[i];")
    commands = count_runs(monkeypatch)
    run("y[i] = 2.0f * x[i];")
    run("y[i] = 2.0f * x[i];", inputs=[ramp(100)], threads=100)  # sizes are not part of the text
    assert commands == []
    run("y[i] = 3.0f * x[i];")  # another text: two passes and a link; the runtime is compiled already
    run("y[i] = 2.0f * x[i];", checks=False)
    run("y[i] = 2.0f * x[i];", inputs=[ramp(6)], threads=6)  # fewer than 8 elements: another address space
    assert len(commands) == 9
    assert sorted(path.suffix for path in empty_cache.iterdir()) == [".o"] * RUNTIME_FILES + [".so"] * 4


def test_the_library_of_a_launch_is_not_looked_for_again(monkeypatch):
    looked_for, kept = [], compiler.kept
    monkeypatch.setattr(compiler, "kept", lambda path: looked_for.append(path) or kept(path))
    kernel = msl.metal_kernel(
        name="k", input_names=["x"], output_names=["y"], source="uint i = thread_position_in_grid.x;\ny[i] = 2 * x[i];"
    )

    def launch(x, **options):
        (y,) = kernel(
            inputs=[x], grid=(x.size, 1, 1), threadgroup=(8, 1, 1), output_shapes=[x.shape], output_dtypes=[x.dtype],
            **options,
        )  # fmt: skip
        np.testing.assert_array_equal(np.array(y), 2 * np.array(x))
        return len(looked_for)

    first = launch(mx.arange(16.0))
    assert first > 0 and launch(mx.arange(32.0)) == first
    dtype = launch(mx.arange(16))  # other code
    assert dtype > first
    assert launch(mx.arange(16.0), checks=False) > dtype
    number = len(looked_for)
    assert launch(mx.arange(16)) == launch(mx.arange(16.0)) == number


def test_a_library_whose_file_is_gone_is_compiled_again(empty_cache, monkeypatch):
    """The first launch is interrupted before the library is loaded."""
    kernel = msl.metal_kernel(
        name="k", input_names=["x"], output_names=["y"], source="uint i = thread_position_in_grid.x;\ny[i] = 3 * x[i];"
    )
    x = mx.arange(16.0)
    launch = {"inputs": [x], "output_shapes": [x.shape], "output_dtypes": [x.dtype], "grid": (16, 1, 1)}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("workbench.kernels.msl.kernel.run_library", Mock(side_effect=KeyboardInterrupt))
        kernel(**launch, threadgroup=(8, 1, 1))
    libraries = list(empty_cache.glob("*.so"))
    assert len(libraries) == 1
    libraries[0].unlink()
    (y,) = kernel(**launch, threadgroup=(8, 1, 1))
    np.testing.assert_array_equal(np.array(y), 3 * np.array(x))


def test_a_kernel_that_does_not_compile_leaves_nothing_behind(empty_cache):
    fault_of("y[i] = x[j];")
    assert list(empty_cache.iterdir()) == []


@pytest.mark.repeats(of="test_a_kernel_is_compiled_once")
def test_two_processes_may_compile_at_once(empty_cache):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", DOUBLE], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in processes] == ["84.0", "84.0"]
    assert [process.returncode for process in processes] == [0, 0]
    # Debug information names the folder of a compilation, so two of them make two files; either is used.
    assert 1 <= len(list(empty_cache.glob("*.so"))) <= 2


def test_threads_may_launch_at_once():
    from concurrent.futures import ThreadPoolExecutor

    def one(seed):
        return run("threadgroup float b[64];\nb[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
                   "y[i] = b[63 - i];", inputs=[mx.array(np.arange(64, dtype=np.float32) + seed)])  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        for seed, y in enumerate(pool.map(one, range(12))):
            np.testing.assert_array_equal(y, np.arange(64)[::-1] + seed)


# ---- messages ----


def test_every_error_is_reported_at_its_own_line_without_the_shim():
    error = fault_of("y[i] = x[j];\n\ny[i] = undefined(x[i]);")
    assert isinstance(error, msl.MslCompileError)
    lines = str(error).split("\n")
    assert lines[0] == "kernel k does not compile:"
    assert lines[1:3] == ["k.source:2: use of undeclared identifier 'j'", "    y[i] = x[j];"]
    assert lines[3].startswith("k.source:4: use of undeclared identifier 'undefined'")
    assert (error.file, error.line) == ("k.source", 2)
    assert str(compiler.INCLUDE_FOLDER) not in str(error)


def test_an_unclosed_brace_is_reported():
    error = fault_of("if (i < 3) {\ny[i] = x[i];")
    assert "expected '}'" in str(error)


# ---- structures shared by Python and the runtime ----


@pytest.fixture
def only_library(empty_cache):
    """A kernel's library, alone in its cache."""
    run("y[i] = 3.0f;\nfor (int n = 0; n < 3; n++) {\ny[i] += x[i];\n}\ny[i] = max(y[i], 2.0f);")
    return next(empty_cache.glob("*.so"))


def test_structures_have_the_same_size_on_both_sides(only_library):
    sizes = (ctypes.c_uint64 * 6)()
    ctypes.CDLL(str(only_library)).msl_structure_bytes(sizes)
    ours = [launch.STRUCTURES[name] for name in ("Launch", "Buffer", "Fault", "RowRead", "Variable", "Event")]
    assert list(sizes) == [ctypes.sizeof(structure) for structure in ours]


def test_line_table_agrees_with_addr2line(only_library):
    """The reader of line tables against binutils, at every byte of the kernel's code."""
    table = LineTable(only_library)
    addresses = range(table.addresses[0], table.addresses[-1])
    try:
        told = subprocess.run(["addr2line", "-e", only_library, *map(hex, addresses)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("addr2line is not installed")
    lines = set()
    for address, line in zip(addresses, told.stdout.splitlines()):
        match = re.search(r"k\.source:(\d+)", line)
        place = table.find(address)
        if match:
            assert (place.file, place.line) == ("k.source", int(match[1]))
            lines.add(place.line)
    assert {2, 4, 6} <= lines
