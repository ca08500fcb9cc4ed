"""Every part of workbench computes on the device that an engine holds, or that WORKBENCH_DEVICE names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from workbench.base import device
from workbench.base.device import DEVICE_VARIABLE, choose_device, hold_device, requested_device, runs_on_gpu
from workbench.kernels.attention.selection import resolve_backend_name

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "support" / "fake_gpu"


@pytest.fixture
def devices(monkeypatch):
    """An MLX that has a GPU; the list of devices that were made its default."""
    chosen = [mx.Device(mx.gpu)]
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: chosen[-1])
    monkeypatch.setattr(mx, "set_default_device", chosen.append)
    monkeypatch.setattr(device, "_held", {})
    monkeypatch.setattr(device, "_replaced", [])
    return chosen


@pytest.mark.parametrize(
    ("value", "on_gpu", "backend"),
    [
        ("cpu", False, "cpu"),
        ("CPU ", False, "cpu"),
        ("gpu", True, "metal"),
        ("auto", True, "metal"),
        ("", True, "metal"),
    ],
)
def test_a_machine_with_a_gpu(devices, monkeypatch, value, on_gpu, backend):
    monkeypatch.setenv(DEVICE_VARIABLE, value)
    assert resolve_backend_name("auto") == backend
    assert runs_on_gpu() == on_gpu
    assert devices == ([mx.gpu] if on_gpu else [mx.gpu, mx.cpu])


class Holder:
    """An engine, as far as its device goes."""


def test_a_held_device_is_everybodys(devices, monkeypatch):
    monkeypatch.delenv(DEVICE_VARIABLE)
    holder = Holder()
    let_go = hold_device(holder, "first", "cpu")
    assert not runs_on_gpu()
    with pytest.raises(ValueError, match="device is 'gpu', but engine 'first' computes on the CPU, and MLX has one"):
        choose_device("gpu")
    second = Holder()
    hold_device(second, "second", "auto")
    let_go()
    with pytest.raises(ValueError, match="engine 'second' computes on the CPU"):
        hold_device(Holder(), "third", "gpu")
    assert not runs_on_gpu()
    del second  # garbage collected
    assert runs_on_gpu() and devices[-1] == mx.gpu
    hold_device(holder, "fourth", "gpu")
    with pytest.raises(ValueError, match="device is 'cpu', but engine 'fourth' computes on the GPU"):
        choose_device("cpu")


def test_an_argument_goes_before_the_variable(devices, monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    holder = Holder()
    let_go = hold_device(holder, "first", "gpu")
    assert runs_on_gpu()
    let_go()
    assert not runs_on_gpu()


def test_a_machine_without_one(monkeypatch):
    monkeypatch.setattr(device, "_held", {})  # by engines of other tests
    monkeypatch.setattr(device, "_replaced", [])  # by tests that claim a GPU
    if mx.metal.is_available() or mx.cuda.is_available():
        pytest.skip("MLX has a GPU on this machine")
    monkeypatch.setenv(DEVICE_VARIABLE, "gpu")
    with pytest.raises(ValueError, match="WORKBENCH_DEVICE is 'gpu', but MLX has no GPU on this machine; use 'cpu'"):
        choose_device()
    monkeypatch.setenv(DEVICE_VARIABLE, "auto")
    assert not runs_on_gpu()


def test_a_word_that_is_no_device(monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, "tpu")
    with pytest.raises(ValueError, match="WORKBENCH_DEVICE is 'tpu'; it must be one of auto, cpu, gpu"):
        requested_device()


def run(code, **variables):
    """Run code in a process in which MLX claims to have a GPU; what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != DEVICE_VARIABLE}
    path = os.pathsep.join([str(FAKE), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


ASK = "from workbench.models.load import _runs_on_gpu; print(_runs_on_gpu())"


def test_a_gpu_is_claimed():
    """The control of what follows: the pretended GPU is believed, and a model is loaded in half precision."""
    import gguf_files

    make = f"import sys; sys.path.insert(0, {str(Path(gguf_files.__file__).parent)!r}); "
    assert run(make + ASK) == ["True"]


def test_only_the_variable_turns_it_off():
    assert run("import workbench.apps.course; " + ASK) == ["True"]
    assert run(ASK, **{DEVICE_VARIABLE: "cpu"}) == ["False"]


def test_the_tests_run_on_the_cpu():
    assert os.environ[DEVICE_VARIABLE] in ("cpu", "gpu") and runs_on_gpu() == (os.environ[DEVICE_VARIABLE] == "gpu")


LINUX_ONLY = re.compile(
    r"/proc/|sched_getaffinity|sched_setaffinity|os\.sysconf|\bprctl\b|epoll|inotify|MAP_POPULATE|RTLD_DEEPBIND|clang-19|"
    r"ru_maxrss"
)
"""Words of things that macOS lacks or means differently. A file that asks for ``sys.platform`` knows that."""
CHECKED_FIRST = {
    "workbench/base/blas.py": "returns before, unless the platform is Linux",
    "workbench/kernels/msl/compiler.py": "reads the processor's flags if there is such a file",
    "workbench/engine/memory.py": "asks MLX first",
    "workbench/trace/recorders/host_watch.py": "counts nothing if there is no such folder",
    "benchmarks/bench_fleet.py": "is run on Linux",
    "benchmarks/bench_recordings.py": "is run on Linux",
    "tests/soak/engine.py": "is not a test of the suite",
    "tests/soak/many_streams.py": "is not a test of the suite",
    "tests/serve/test_serve.py": "skips that test elsewhere",
    "tests/engine/test_faults.py": "counts threads in another way elsewhere",
    "tests/msl/test_msl_compiler.py": "reads a message",
    "workbench/base/resource_limits.py": "counts another size if there is no such file",
    "tests/soak/grammars.py": "is not a test of the suite",
    "tests/models/test_tokenizer.py": "skips one test elsewhere, and counts ru_maxrss in bytes on macOS",
    "tests/repository/test_package.py": "hides what Windows lacks",
    "tests/integrations/test_recorder.py": "does not wait if there is no such file",
    "tests/repository/test_benchmark_origins.py": "is skipped if there is no such file",
    "benchmarks/_common.py": "reads /proc/cpuinfo only if it exists",
    "benchmarks/bench_class.py": "notes no memory if there is no such file",
    "benchmarks/bench_llama_cpp.py": "reports no memory if there is no such file",
    "benchmarks/bench_playground.py": "counts no CPU time if there are no such files",
    "benchmarks/bench_served.py": "reports no memory if there is no such file",
    "benchmarks/bench_simulation.py": "counts ru_maxrss in bytes on macOS",
}
"""Files with such a word, and how they cope."""


@pytest.mark.parametrize("folder", ["workbench", "tests", "benchmarks", "scripts", "notebooks"])
def test_nothing_calls_what_only_linux_has(folder):
    files = [path for kind in ("py", "ipynb") for path in (ROOT / folder).rglob(f"*.{kind}") if path != Path(__file__)]
    found = {
        str(path.relative_to(ROOT)): sorted(set(words))
        for path in files
        if (words := LINUX_ONLY.findall(text := path.read_text())) and "sys.platform" not in text
    }
    assert {name: words for name, words in found.items() if name not in CHECKED_FIRST} == {}
