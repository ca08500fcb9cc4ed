"""Everything that a person imports comes from a few public places; rooms are internals and may move."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from workbench import viz

ROOT = Path(__file__).parents[2]
PUBLIC = ("workbench", "workbench.engine", "workbench.viz", "workbench.vllm")
API_PAGES = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/api/*.md")}
GENERATED = {"docs/reference.md", "docs/commands.md"} | API_PAGES
"""Pages that name the places of objects, and import nothing."""

IMPORT = re.compile(r"\bfrom (workbench[\w.]*) import|\bimport (workbench\.[\w.]*)")


def texts_that_people_copy():
    """The text of each page, notebook and example, and of each string of the package that has an import."""
    for path in [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("examples/**/*.py"),
        *ROOT.glob("examples/**/*.md"),
    ]:
        yield path, path.read_text()
    for path in ROOT.glob("notebooks/*.ipynb"):
        yield path, "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    for path in (ROOT / "workbench").rglob("*.py"):
        source = path.read_text()
        yield path, "\n".join(line for line in source.splitlines() if re.search(r">>> |\.\.\. ", line))


def internal_imports(text):
    return [found for match in IMPORT.finditer(text) if (found := match[1] or match[2]) not in PUBLIC]


def test_people_import_public_names_alone():
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path, text in texts_that_people_copy()
        if (names := internal_imports(text))
    }
    assert {path: names for path, names in found.items() if path not in GENERATED} == {}


@pytest.mark.parametrize("line", ["from workbench.trace import Trace", "import workbench.scheduler.policy"])
def test_an_internal_import_is_seen(line):
    assert internal_imports(f"```python\n{line}\n```") == [re.split(" ", line)[1]]


def test_every_public_name_is_there():
    assert len(set(workbench.__all__)) == len(workbench.__all__) > 70
    for name in workbench.__all__:
        assert getattr(workbench, name) is not None and name in dir(workbench)
    for name in viz.__all__:
        assert callable(getattr(viz, name))
    with pytest.raises(AttributeError, match="no attribute 'Enginge'"):
        _ = workbench.Enginge


@pytest.mark.parametrize("name", workbench._MODULES)
def test_a_public_module_completes_its_public_names_alone(name):
    module = getattr(workbench, name)
    assert dir(module) == sorted(module.__all__) and all(hasattr(module, each) for each in dir(module))
    assert not {"Any", "annotations", "os", "threading"} & {*dir(module)}


def test_the_panes_are_the_panels_that_are_components():
    found = {each.__name__ for each in vars(workbench.panes).values() if inspect.isclass(each)}
    panes = {each for each in found if issubclass(getattr(workbench.panes, each), workbench.panes.Pane)}
    assert panes == {*workbench.panes.__all__}


def test_a_type_checker_sees_the_same_names():
    """The imports for type checkers, the table and ``__all__`` name the same."""
    block = (ROOT / "workbench/__init__.py").read_text().split("if TYPE_CHECKING:\n")[1].split("\n\n")[0]
    names = re.sub(r"from [\w.]+ import|[(),]", " ", block).split()
    assert sorted(names) == sorted(workbench.__all__)


def test_a_public_name_does_not_import_what_it_does_not_need():
    script = """
import sys
import workbench
from workbench import EngineConfig, SchedulingPolicy, StepRecord, compare, read_access_log, simulate
print(*sorted({"mlx", "numpy", "panel", "bokeh", "tornado", "numba"} & {name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []
