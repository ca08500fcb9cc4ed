"""The BLAS in front of MLX's own: it is loaded at import, so most tests run in a fresh interpreter."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from workbench.base import blas

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the preload is for Linux only")

ROOT = Path(__file__).resolve().parents[2]
INFO = "import workbench; print(workbench.backend_info())"


def run_python(code, cache, check=True, **environment):
    """Run code in a fresh interpreter with a separate cache folder."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("WORKBENCH_", "LD_DEBUG"))}
    settings |= {"WORKBENCH_CACHE": str(cache), "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=settings, capture_output=True, text=True, check=check
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_backend_info_is_one_line_that_names_library_threads_and_device(cache):
    line = run_python(INFO, cache).stdout.strip()
    assert "\n" not in line
    assert line.startswith("mlx ")
    assert "OpenBLAS 0." in line and "1 thread)" in line


def test_mlx_is_bound_to_the_loaded_library(cache):
    code = """
        import workbench
        import mlx.core as mx
        a = mx.random.normal((300, 200)); b = mx.random.normal((200, 100))
        mx.eval(a @ b)
    """

    def bindings(**environment):
        done = run_python(code, cache, LD_DEBUG="bindings", **environment)
        found = [line for line in done.stderr.splitlines() if "libmlx" in line and "`cblas_sgemm'" in line]
        assert found, "the dynamic linker reported no binding of cblas_sgemm"
        return " ".join(found)

    assert str(cache) in bindings()
    assert str(cache) not in bindings(WORKBENCH_BLAS="0")


def test_products_are_right(cache):
    code = """
        import workbench
        import mlx.core as mx, numpy as np
        rng = np.random.default_rng(3)
        for m, k, n in [(1, 64, 64), (7, 130, 33), (257, 192, 576)]:
            a, b = rng.standard_normal((m, k)), rng.standard_normal((n, k))
            out = mx.array(a.astype(np.float32)) @ mx.array(b.astype(np.float32)).T
            assert np.abs(np.array(out) - a @ b.T).max() < 1e-4
        assert "OpenBLAS" in workbench.backend_info()
    """
    run_python(code, cache)


def test_importing_workbench_imports_nothing_heavy(cache):
    code = """
        import sys, workbench
        heavy = {"mlx", "numpy", "numba", "panel", "bokeh", "mlx_lm", "transformers", "msgspec"} & set(sys.modules)
        assert not heavy, heavy
    """
    run_python(code, cache)


def test_it_can_be_turned_off(cache):
    assert run_python(INFO, cache, WORKBENCH_BLAS="0").stdout.strip().endswith("reference BLAS (WORKBENCH_BLAS=0)")


@pytest.mark.parametrize("variable", ["WORKBENCH_THREADS", "WORKBENCH_BLAS_THREADS"])
def test_the_number_of_threads_can_be_set(cache, variable):
    line = run_python(INFO, cache, **{variable: "2"}).stdout
    assert "2 threads)" in line and "| compiled code: 2 threads |" in line


def test_by_default_products_of_the_blas_take_one_thread(cache):
    assert "1 thread)" in run_python(INFO, cache).stdout


@pytest.mark.parametrize("variable", ["WORKBENCH_THREADS", "WORKBENCH_BLAS_THREADS"])
@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_bad_number_of_threads_is_named_and_harmless(cache, variable, value):
    line = run_python(INFO, cache, **{variable: value}).stdout.strip()
    assert line.endswith(f"{variable}={value!r} must be an integer from 1 to 1024)")


def test_a_warning_when_mlx_came_first(cache):
    done = run_python("import mlx.core\nimport warnings\nwarnings.simplefilter('always')\n" + INFO, cache)
    assert "RuntimeWarning: mlx was imported before workbench" in done.stderr
    assert "mlx was imported before workbench" in done.stdout


def test_the_environment_is_clean_while_loading_and_put_back(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.delenv("OPENBLAS_L2_SIZE", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    with blas._environment(3):
        assert "OPENBLAS_CORETYPE" not in os.environ
        assert "OPENBLAS_L2_SIZE" not in os.environ
        assert os.environ["OPENBLAS_NUM_THREADS"] == "3"
    assert os.environ["OPENBLAS_CORETYPE"] == "Haswell"
    assert "OPENBLAS_L2_SIZE" not in os.environ
    assert os.environ["OPENBLAS_NUM_THREADS"] == "7"


def test_the_core_is_chosen_by_the_library_and_not_by_the_environment(cache):
    forced = {"OPENBLAS_CORETYPE": "Nehalem", "OPENBLAS_L2_SIZE": "64", "OPENBLAS_NUM_THREADS": "2"}
    settings = dict.fromkeys(forced, "")
    assert run_python(INFO, cache, **forced).stdout == run_python(INFO, cache, **settings).stdout


def test_without_a_writable_cache_mlx_keeps_its_blas(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = run_python(INFO, tmp_path / "file" / "cache")
    assert "reference BLAS (OpenBLAS could not be loaded: " in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["_find_patchelf", "_find_openblas"])
def test_a_missing_part_is_named(tmp_path, monkeypatch, name):
    def missing():
        raise FileNotFoundError(f"{name} found nothing")

    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(blas, name, missing)
    monkeypatch.setattr(blas, "_status", "not yet")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    blas.preload()
    assert blas._status == f"reference BLAS (OpenBLAS could not be loaded: {name} found nothing)"


def test_a_failing_patchelf_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(blas, "_find_patchelf", lambda: "/bin/false")
    with pytest.raises(OSError, match="patchelf ended with status 1"):
        blas.renamed_copy(blas._find_openblas())
    assert list(tmp_path.iterdir()) == []


def test_processes_that_start_together_share_one_copy(tmp_path):
    settings = {**os.environ, "WORKBENCH_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INFO]
    started = [subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    lines = {process.communicate(timeout=60)[0] for process in started}
    assert len(lines) == 1 and "OpenBLAS" in lines.pop()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_copy_is_made_again(tmp_path):
    run_python(INFO, tmp_path)
    (copy,) = tmp_path.iterdir()
    copy.write_bytes(b"not a library")
    assert "OpenBLAS 0." in run_python(INFO, tmp_path).stdout
    assert copy.stat().st_size > 1_000_000


def test_a_new_version_gets_a_new_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    original = blas._find_openblas()
    first = blas.renamed_copy(original)
    assert blas.renamed_copy(original) == first
    monkeypatch.setattr(blas, "_release", lambda _: "9.9")
    assert blas.renamed_copy(original) != first


def test_nothing_is_done_on_other_platforms(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_status", "not yet")
    monkeypatch.setattr(blas, "_load", lambda _: pytest.fail("loaded a library"))
    blas.preload()
    assert blas._status == "BLAS of the platform"
