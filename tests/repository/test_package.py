"""The package works without the repository: the contents of the wheel and the sdist, and a run from the wheel."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import workbench
from workbench.apps.playground.runtime import is_fetched

ROOT = Path(__file__).parents[2]
NOTEBOOKS = "workbench/apps/course/notebooks"
MACHINE_CODE = "workbench/kernels/cpu/machine_code/x86-64-v3-cpython-311-numba-0.68.1/0123/product.code"
SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.3 has no filters
BUILD = "import sys; from setuptools import build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"
RUN = """
import pathlib, sys, workbench
from workbench.apps.cli import main
assert pathlib.Path(workbench.__file__).is_relative_to(sys.argv[1]), workbench.__file__
workload = {"requests": [{"id": "a", "prompt": {"len": 40}, "max_tokens": 3}]}
workbench.simulate(workload).to_html("trace.html")
raise SystemExit(main(["notebooks", "course"]))
"""


WORKLOAD = {
    "config": {"max_num_batched_tokens": 64},
    "cost_model": {"fixed": 0.01},
    "requests": [{"id": "a", "prompt": {"len": 150}, "max_tokens": 30}, {"id": "b", "prompt": {"len": 40}}],
}


def setuptools_is_too_old():
    try:
        return int(version("setuptools").split(".")[0]) < 77
    except PackageNotFoundError:
        return True


pytestmark = pytest.mark.skipif(setuptools_is_too_old(), reason="building the package needs setuptools 77 or newer")


def build(what, source, target):
    """Let the build backend make a wheel or an sdist; its path."""
    target.mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD, what, target], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = target.iterdir()
    return path


@pytest.fixture(scope="module")
def tracked():
    """Files of the checkout that git tracks, or would track after `git add .`."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return sorted(name for name in listed.stdout.split("\0") if (ROOT / name).exists() and name)


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory):
    """The wheel, the sdist and the wheel made from that sdist, built from a copy, so that nothing is left behind."""
    folder = tmp_path_factory.mktemp("package")
    for name in tracked:
        if name.startswith(("workbench/", "notebooks/", "tests/test_")) or "/" not in name:
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name)
    code = folder / "checkout" / MACHINE_CODE
    code.parent.mkdir(parents=True)
    code.write_bytes(b"what scripts/build_machine_code.py made")
    sdist = build("build_sdist", folder / "checkout", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", **SAFELY)
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel = build("build_wheel", folder / "checkout", folder / "wheel")
    return wheel, unpacked, build("build_wheel", unpacked, folder / "wheel-of-sdist")


@pytest.fixture(scope="module")
def package_files(tracked):
    """Files of the package; setup.py puts the notebooks into it."""
    package = {name for name in tracked if name.startswith("workbench/")}
    course = {name for name in tracked if name.startswith("notebooks/") and not name.endswith("conftest.py")}
    return package | {MACHINE_CODE} | {NOTEBOOKS + name.removeprefix("notebooks") for name in course}


def names_in(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_no_file_has_the_name_of_a_mistake(tracked):
    """A path taken from the wrong value, such as argparse's "==SUPPRESS==", ends up as a file and is committed."""
    assert [name for name in tracked if not re.fullmatch(r"[A-Za-z0-9_./-]+", name)] == []


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built, package_files):
    assert names_in(built[0]) == package_files
    suffixes = {Path(name).suffix for name in package_files}
    assert suffixes >= {".py", ".typed", ".js", ".css", ".metal", ".h", ".cuh", ".cpp", ".ipynb", ".gz"}


def test_the_sdist_makes_the_same_wheel_and_holds_no_half_of_the_tests(built, package_files):
    _, unpacked, wheel = built
    assert names_in(wheel) == package_files
    assert {path.name for path in unpacked.iterdir()} >= {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}
    assert not (unpacked / "tests").exists()


def test_the_metadata_names_version_license_and_oldest_python(built):
    wheel = zipfile.ZipFile(built[0])
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == workbench.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and f"{info}/licenses/LICENSE" in wheel.namelist()
    classifiers = " ".join(metadata.get_all("Classifier"))
    assert metadata["Requires-Python"] == ">=" + re.search(r"Python :: (3\.\d+)", classifiers).group(1)


def test_it_runs_from_an_empty_folder_without_the_repository(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "installed"],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "WORKBENCH_BLAS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "empty" / "trace.html").stat().st_size > 50_000
    copied = {path.name for path in (tmp_path / "empty" / "course").glob("*.ipynb")}
    assert copied == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} and len(copied) >= 13


@pytest.fixture(scope="module")
def base(built, tmp_path_factory):
    """An empty environment with the wheel and what it needs, and a folder to run in; no extras."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        pytest.skip("uv is not installed: pip install uv")
    folder = tmp_path_factory.mktemp("base")
    for command in (["venv", "env"], ["pip", "install", "--link-mode=copy", "--python", "env", str(built[0])]):
        done = subprocess.run([uv, "--quiet", *command], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    shutil.copy(ROOT / "notebooks/data/vllm_served.jsonl.gz", folder / "run.jsonl.gz")
    (folder / "workload.json").write_text(json.dumps(WORKLOAD))
    return folder


def run_in(base, *command):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [base / "env" / "bin" / command[0], *command[1:]],
        cwd=base,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_base_is_small_and_quick_to_import(base):
    size = sum(path.stat().st_size for path in (base / "env").rglob("*") if path.is_file() and not path.is_symlink())
    assert size < 60e6
    measure = "import time; began = time.process_time(); import workbench; print(time.process_time() - began)"
    run_in(base, "python", "-c", measure)  # compiles
    times = sorted(float(run_in(base, "python", "-c", measure)) for _ in range(5))
    assert times[2] < 0.15, times


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("simulate workload.json --out simulated.jsonl", "2 of 2 requests ended"),
        ("simulate workload.json --sweep max_num_seqs=1,2 --out sweep.csv --jobs 1", ""),
        ("simulate workload.json --cost-from run.jsonl.gz", "2 of 2 requests ended"),
        ("trace info run.jsonl.gz", "61 of 61 requests ended"),
        ("trace explain run.jsonl.gz", "waiting for the token budget"),
        ("trace whatif run.jsonl.gz --set max_num_seqs=16", "vllm serve MODEL --max-num-seqs 16"),
        ("trace tune run.jsonl.gz --slo ttft_p95=3s --sweep max_num_seqs=8,16", "take: max_num_seqs=16"),
        ("trace html run.jsonl.gz page.html", "wrote page.html"),
        ("notebooks course", "the course is in course"),
        ("doctor", "pip install 'inference-workbench[engine]'"),
    ],
)
def test_the_base_runs(base, command, shown):
    assert shown in run_in(base, "workbench", *command.split())


def test_the_base_serves_the_playground(base):
    command = [base / "env/bin/workbench", "playground", "--no-browser", "--port", str(port := free_port())]
    with subprocess.Popen(command, cwd=base, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            if not any(f"http://127.0.0.1:{port}/" in line for line in server.stdout):
                assert not is_fetched() and server.wait(60) == 2  # Pyodide cannot be fetched here
                assert "Pyodide" in server.stderr.read()
                return
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as page:
                assert b"<title>" in page.read()
        finally:
            server.terminate()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


WITHOUT_POSIX = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import os, tempfile, subprocess, http.server, webbrowser, multiprocessing  # Python's own modules look for these
for name in ("fork", "register_at_fork", "getuid", "geteuid", "sched_getaffinity", "getloadavg", "uname"):
    delattr(os, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
import importlib, pkgutil, workbench
from workbench.apps.cli import main
ROOMS = ("trace", "trace.readings", "trace.recorders", "scheduler", "simulation", "simulation.costs")
ROOMS += ("analysis", "viz.layout", "apps.playground")
for room in ROOMS:
    package = importlib.import_module(f"workbench.{room}")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.ispkg and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
for command in ("simulate workload.json", "trace info run.jsonl.gz", "trace html run.jsonl.gz page2.html",
                "trace explain run.jsonl.gz", "notebooks course2"):
    assert main(command.split()) == 0, command
"""


def test_the_base_needs_nothing_that_only_posix_has(base):
    run_in(base, "python", "-c", WITHOUT_POSIX)
