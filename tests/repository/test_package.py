"""The package works without the repository: the contents of the wheel and the sdist, and a run from the wheel."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import workbench

ROOT = Path(__file__).parents[2]
NOTEBOOKS = "workbench/course/notebooks"
SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.3 has no filters
BUILD = "import sys; from setuptools import build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"
RUN = """
import pathlib, sys, workbench
from workbench.cli import main
assert pathlib.Path(workbench.__file__).is_relative_to(sys.argv[1]), workbench.__file__
workload = {"requests": [{"id": "a", "prompt": {"len": 40}, "max_tokens": 3}]}
workbench.simulate(workload).to_html("trace.html")
raise SystemExit(main(["notebooks", "course"]))
"""


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
    return package | {NOTEBOOKS + name.removeprefix("notebooks") for name in course}


def names_in(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


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
