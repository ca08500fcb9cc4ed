"""`workbench doctor`: every line of it is asked of the machine, and a kernel that is wrong makes it fail."""

import re

import mlx.core as mx
import pytest
from door_folders import fields_of, write_folder

import workbench
from workbench.apps.cli import main
from workbench.kernels.attention import selection
from workbench.kernels.attention.cpu_backend import CpuBackend


def report(capsys):
    status = main(["doctor"])
    return status, capsys.readouterr().out


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Without the parts that load a model and that measure."""
    monkeypatch.setattr("workbench.models.bundled.bundled_path", lambda: tmp_path / "none.gguf")
    monkeypatch.setattr("workbench.models.packed.int8.int8_gain", lambda: "not measured")


def test_a_healthy_machine(capsys, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CLANG", "/nowhere/clang")
    monkeypatch.setenv("WORKBENCH_API_KEY", "hunter2")
    from workbench.kernels.msl.compiler import find_compiler

    find_compiler.cache_clear()
    try:
        status, text = report(capsys)
    finally:
        find_compiler.cache_clear()
    assert status == 0 and "FAILED" not in text, text
    for part in ("versions", "device", "memory", "products", "attention", "msl", "preflight", "forward", "environment"):
        assert re.search(rf"^{part} +\S", text, re.MULTILINE), part
    assert f"workbench {workbench.__version__}, Python" in text
    assert f"mlx {mx.__version__}" in text and "BLAS" in text
    assert re.search(r"float32: \w+, self-test against float64 \d\.\de-\d+, allowed 5e-06", text)
    assert re.search(r"smollm2 (runs (compiled|replayed|layer by layer)|has not been fetched)", text)
    assert "Metal kernels cannot run on this CPU: " in text
    assert "WORKBENCH_API_KEY=(set, not shown)" in text and "hunter2" not in text


def test_a_backend_that_is_wrong(capsys, monkeypatch, quick):
    if selection.resolve_backend_name("auto") != "cpu":
        pytest.skip("the backend of this machine is not the one that is broken here")
    attend = CpuBackend.attend
    monkeypatch.setattr(CpuBackend, "attend", lambda self, *arrays: attend(self, *arrays) * 1.01)
    status, text = report(capsys)
    assert status == 1
    assert re.search(r"FAILED float32: cpu, self-test against float64 \S+, allowed 5e-06", text)


def test_one_part_that_fails_does_not_hide_the_others(capsys, monkeypatch, quick):
    def broken():
        raise RuntimeError("no answer from\nthe driver")

    monkeypatch.setattr(mx, "device_info", broken)
    status, text = report(capsys)
    assert status == 1
    assert "FAILED: RuntimeError: no answer from the driver" in text and "environment" in text


def test_a_model_s_files(capsys, tmp_path):
    folder = write_folder(tmp_path / "m", fields_of("llama") | {"use_cache": True, "frobnicate": 3})
    assert main(["doctor", str(folder)]) != 0
    assert "--ignore-config-key frobnicate" in capsys.readouterr().err
    assert main(["doctor", str(folder), "--ignore-config-key", "frobnicate"]) == 0
    said = capsys.readouterr().out
    assert "config.json: read: " in said and "rope_theta" in said
    assert "config.json: harmless, because ignored as asked: frobnicate" in said
    assert "thinking, if a request does not say: the template decides alone" in said
