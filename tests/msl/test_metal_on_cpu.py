"""The pytest fixture ``metal_on_cpu``, which other projects use."""

import sys
import tomllib
from pathlib import Path

import mlx.core as mx
import pytest
from msl_runs import skip_without_compiler

import workbench
from workbench import msl
from workbench.apps import metal_on_cpu as plugin

pytest_plugins = ("workbench.apps.metal_on_cpu",)
skip_without_compiler()

AVAILABLE = mx.metal.is_available()
MADE_ON_IMPORT = """
import mlx.core as mx

source = "uint i = thread_position_in_grid.x; y[i] = x[i + SHIFT] + OFFSET;"
double = None
if mx.metal.is_available() and mx.default_device() == mx.gpu:
    double = mx.fast.metal_kernel(name="double", input_names=["x"], output_names=["y"], source=source)


@mx.compile
def run(x, shift=0):
    template = [("SHIFT", shift), ("OFFSET", 1)]
    launch = {"inputs": [x], "output_shapes": [x.shape], "output_dtypes": [x.dtype], "template": template}
    return double(**launch, grid=(x.size, 1, 1), threadgroup=(32, 1, 1))[0]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A module of somebody else that makes its kernel on import."""
    (tmp_path / "their_kernels.py").write_text(MADE_ON_IMPORT)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "their_kernels"
    sys.modules.pop("their_kernels", None)


def test_kernels_made_on_import_run_here(project, metal_on_cpu):
    before = __import__(project)
    module = metal_on_cpu.imported(project)
    assert module is not before
    x = mx.arange(64).astype(mx.float32)
    metal_on_cpu.threadgroups = 2
    assert mx.array_equal(module.run(x), x + 1)
    (run,) = metal_on_cpu.runs
    assert run.number("bytes read", "x") == 256 and len(run.threadgroups) == 2


def test_a_fault_is_an_error_and_kept(project, metal_on_cpu):
    module, x = metal_on_cpu.imported(project), mx.zeros(64)
    with pytest.raises(msl.MslError, match=r"out-of-bounds read of 4 bytes at x\[64\]"):
        module.run(x, shift=1)
    assert metal_on_cpu.runs[-1].fault.kind == "out of bounds"
    metal_on_cpu.checks = False
    assert module.run(x, shift=1).shape == (64,) and len(metal_on_cpu.runs) == 1


def test_everything_is_as_before_after_a_test(project):
    """The fixture, driven by hand: MLX, and the module that was there."""
    before = __import__(project)
    with pytest.MonkeyPatch.context() as patch:
        made = plugin.metal_on_cpu.__wrapped__(patch) if hasattr(plugin.metal_on_cpu, "__wrapped__") else None
        made = made or plugin.metal_on_cpu._get_wrapped_function()(patch)
        kernels = next(made)
        assert mx.metal.is_available() and kernels.imported(project) is not before
        with pytest.raises(StopIteration):
            next(made)
    assert mx.metal.is_available() == AVAILABLE and sys.modules[project] is before


def test_pytest_finds_it_when_workbench_is_installed():
    text = (Path(workbench.__file__).parents[1] / "pyproject.toml").read_text()
    entries = tomllib.loads(text)["project"]["entry-points"]["pytest11"]
    assert entries == {plugin.__name__: plugin.__name__}
