"""Compiled code is kept on disk, loaded without a compiler, and never used for other sources or types."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from workbench.kernels.cpu.attention import object_code, processor, simd
from workbench.kernels.cpu.attention.compiled import EntryPoint, kinds_of
from workbench.kernels.cpu.attention.layout import Scoring


def double(x, out):
    if x.size != out.size:
        raise ValueError("sizes differ")
    part = np.empty(x.size, np.float64)  # memory of numba's runtime
    for index in range(x.size):
        part[index] = 2 * x[index]
    out[:] = part


def returns_something(x):
    return x.size


def doubled(entry: EntryPoint, dtype: type = np.float32) -> float:
    out = np.zeros(1, dtype)
    entry(np.full(1, 3, dtype), out)
    return float(out[0])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return tmp_path / "compiled" / object_code._source_digest(Path(__file__).parent)


def test_code_is_kept_in_a_folder_of_its_sources(folder, monkeypatch):
    assert doubled(EntryPoint(double)) == 6
    assert len(list(folder.iterdir())) == 1
    compiled = []
    monkeypatch.setattr(object_code, "compiled", lambda *how: compiled.append(how) or compile_(*how))
    assert doubled(EntryPoint(double)) == 6 and not compiled
    monkeypatch.setattr(object_code, "_source_digest", lambda sources: "other")
    assert doubled(EntryPoint(double)) == 6 and len(compiled) == 1


compile_ = object_code.compiled


def test_machine_code_that_came_with_the_package_is_not_compiled(folder, tmp_path, monkeypatch):
    assert doubled(EntryPoint(double)) == 6
    shipped = tmp_path / "shipped"
    shutil.move(folder, shipped / folder.name)
    monkeypatch.setattr(object_code, "SHIPPED", shipped)
    monkeypatch.setattr(object_code, "compiled", lambda *how: pytest.fail("compiled"))
    assert doubled(EntryPoint(double)) == 6 and not folder.exists()
    monkeypatch.undo()
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    assert doubled(EntryPoint(double)) == 6 and folder.exists()  # without it


V3 = {
    "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"
}  # fmt: skip
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (V3 | {"sse4a", "xsave"}, "x86-64-v3"),
        (V4 | {"avx512vnni"}, "x86-64-v4"),
        (V4 | {"avx512vnni", "avxvnni", "avx512bf16"}, "x86-64-v4"),
        (V4, None),  # its vectors are longer than those of v3, and v4 is compiled with VNNI
        (V3 | {"avxvnni"}, None),  # our int8 kernels would use it
        (V3 - {"bmi2"}, None),
        ({"neon"}, None),
    ],
)
def test_a_processor_has_the_level_whose_instructions_it_has_and_no_better_ones(features, level):
    assert processor.level_of(features) == level


def test_numba_compiles_for_the_level_when_its_code_came_along(tmp_path):
    """In another process, because the choice is made once."""
    level = processor.level_of(processor.cpu_features())
    if level is None:
        pytest.skip("this processor is of no level")
    package = Path(processor.__file__).parents[4]
    shutil.copytree(
        package / "workbench", tmp_path / "workbench", ignore=shutil.ignore_patterns("machine_code", "*.pyc")
    )
    folder = tmp_path / "workbench" / "kernels" / "cpu" / "machine_code" / processor.code_folder(level).name
    program = (
        "from workbench.kernels.cpu.attention import processor, simd\n"
        "print(processor.SHIPPED, processor.config.CPU_NAME, simd.LANES)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def ran() -> str:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
        return done.stdout.strip()

    assert ran() == f"None None {simd.LANES}"
    folder.mkdir(parents=True)
    assert ran() == f"{folder} {level} {simd.LANES}"
    environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert ran() == "None generic 4"


def test_each_combination_of_types_has_its_code(folder):
    entry = EntryPoint(double)
    assert doubled(entry) == 6 and doubled(entry, np.int32) == 6
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_file_is_written_anew(folder):
    assert doubled(EntryPoint(double)) == 6
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-7], b"", whole[:200] + b"x" + whole[201:]):
        path.write_bytes(damaged)
        assert doubled(EntryPoint(double)) == 6
        assert len(path.read_bytes()) == len(whole)


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("WORKBENCH_CACHE", str(blocked))
    assert doubled(EntryPoint(double)) == 6


COMPILE_ONCE = """
import sys, time
from test_attention_compiled import EntryPoint, double, doubled, object_code

plain = object_code.compiled

def slow(*how):
    print("compiled", flush=True)
    time.sleep(1)  # so that the others ask in the meantime
    return plain(*how)

object_code.compiled = slow
assert doubled(EntryPoint(double)) == 6
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locks of a file's bytes")
def test_several_processes_compile_a_function_once(folder):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, environment = [sys.executable, "-c", COMPILE_ONCE], os.environ | {"PYTHONPATH": path}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = "".join(process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0, 0] and said.split() == ["compiled"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locks of a file's bytes")
def test_a_process_that_is_stopped_is_not_waited_for_without_end(folder, monkeypatch):
    import fcntl

    monkeypatch.setattr(object_code, "_PATIENCE_SECONDS", 0.2)
    held = []

    def refused(*how):
        held.append(how)
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "lockf", refused)
    assert doubled(EntryPoint(double)) == 6 and held


def test_a_function_that_returns_something_is_refused(folder):
    with pytest.raises(TypeError, match="returns_something returns int64; it must return nothing"):
        EntryPoint(returns_something)(np.zeros(1, np.float32))


def test_a_later_process_runs_kept_code_without_the_compiler(folder):
    """numba's runtime is compiled at the first compilation of a process; exceptions reach Python nevertheless."""
    assert doubled(EntryPoint(double)) == 6
    program = (
        "import numpy as np\n"
        "from numba.core.runtime import rtsys\n"
        "from test_attention_compiled import EntryPoint, double, doubled\n"
        "entry = EntryPoint(double)\n"
        "assert doubled(entry) == 6\n"
        "try:\n"
        "    entry(np.zeros(2, np.float32), np.zeros(3, np.float32))\n"
        "except ValueError as problem:\n"
        "    assert str(problem) == 'sizes differ', problem\n"
        "else:\n"
        "    raise AssertionError('no exception')\n"
        "assert not rtsys._init, 'something was compiled'\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": path}, timeout=300)


def test_arguments_of_the_same_types_share_their_code(folder):
    """Python's and numpy's integers, and arrays that lie in both orders or in one."""
    one, several = np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float32)
    assert kinds_of([one]) == kinds_of([several]) != kinds_of([several[:, ::2]])
    frozen = several.copy()
    frozen.flags.writeable = False
    others = (
        frozen,
        several.astype(np.float64),
        several[0],
        np.asfortranarray(several),
        Scoring(*several[:1], 1, 2, 3, 4),
    )
    assert len({kinds_of([other]) for other in (several, *others)}) == 1 + len(others)
    entry = EntryPoint(twice)
    out = np.zeros(1)
    for factor in (2, np.int64(2)):
        entry(factor, out)
    assert out[0] == 4 and len(list(folder.iterdir())) == 1
    entry(2.5, out)
    assert out[0] == 5 and len(list(folder.iterdir())) == 2


def twice(factor, out):
    out[0] = 2 * factor
