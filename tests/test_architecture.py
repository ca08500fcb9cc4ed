"""The map of the code in docs/architecture.md, as a test: who may import whom, and what importing costs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench

ROOT = Path(workbench.__file__).parent

# Rooms that a room may import beside itself; nothing points back. Every room may import modules of the ground floor.
MAY_IMPORT = {
    "trace": set(),
    "msl": set(),
    "viz": {"trace"},
    "integrations": {"trace"},
    "attention": {"trace", "msl"},
    "models": {"attention"},
    "scheduler": {"trace"},
    "simulation": {"scheduler", "trace"},
    "engine": {"trace", "scheduler", "simulation", "attention", "models"},
    "distributed": {"engine", "models"},
    "playground": {"trace", "scheduler", "simulation", "viz"},
    "course": {"trace", "scheduler", "simulation", "models", "engine", "viz"},
}
GROUND_FLOOR = {
    "_moved",
    "blas",
    "cache_folder",
    "cache_salt",
    "config",
    "device",
    "field_checks",
    "on_demand",
    "speculation",
    "threads",
}
# The way down to a picture: an object that shows itself asks for its renderer when it is shown.
WHEN_SHOWN = {("engine", "viz")}

PURE_PYTHON = [ROOT / "config.py", ROOT / "simulation" / "simulate.py", *(ROOT / "scheduler").glob("*.py")]


def imports(source, *, at_import_time):
    """Names a module imports; only those outside functions when asked."""
    tree = ast.parse(source)
    nodes = ast.walk(tree)
    if at_import_time:
        nodes = [
            child for node in tree.body for child in ([node] if isinstance(node, ast.Import | ast.ImportFrom) else [])
        ]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "workbench":
            yield from (f"workbench.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def named_in_strings(source):
    """Modules of the package that a string names, or the beginning of an f-string: they are imported later.

    A docstring that mentions a module in a sentence is no such string.
    """
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [text for text in strings if isinstance(text, str) and re.fullmatch(r"workbench\.[\w.:]*", text)]


def arrows_back(room, source):
    """Modules that a module of a room must not know, and imports or names in a string."""
    at_import_time = set(imports(source, at_import_time=True))
    for name in (*imports(source, at_import_time=False), *named_in_strings(source)):
        parts = re.split("[.:]", name)
        if parts[0] != "workbench" or len(parts) == 1 or parts[1] in {room, *GROUND_FLOOR}:
            continue
        shown = (room, parts[1]) in WHEN_SHOWN and name not in at_import_time
        if not shown and parts[1] not in MAY_IMPORT[room]:
            yield name


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_arrow_points_back(room):
    for path in (ROOT / room).rglob("*.py"):
        assert list(arrows_back(room, path.read_text())) == [], path.relative_to(ROOT)


@pytest.mark.parametrize(
    "line",
    [
        "import workbench.viz.reprs",
        "from workbench.viz import reprs",
        "from workbench import viz",
        "def draw():\n    from workbench.viz.reprs import step_html",
        'importlib.import_module("workbench.viz.reprs")',
        'importlib.import_module(f"workbench.viz.{name}")',
        'importlib.import_module(f"workbench.{room}")',
        'HOME = "workbench.viz.reprs:step_html"',
    ],
)
def test_an_arrow_that_points_back_is_seen(line):
    """The control: each way to reach a room above, in a module of trace/."""
    assert len(list(arrows_back("trace", line))) == 1
    assert list(arrows_back("course", line)) == [] or "{room}" in line


def test_what_is_no_arrow():
    for line in ('"""Drawn by workbench.viz.reprs."""', 'log = getLogger("workbench")', "import workbench"):
        assert list(arrows_back("trace", line)) == []


def test_outside_the_rooms_only_two_tables_name_modules_in_strings():
    """The table of attached functions and that of moved modules; all the others are imports, which are seen."""
    naming = {path.name for path in ROOT.glob("*.py") if named_in_strings(path.read_text())}
    assert naming == {"__init__.py", "_moved.py"}


@pytest.mark.parametrize("path", PURE_PYTHON, ids=lambda path: path.stem)
def test_the_scheduler_needs_neither_mlx_nor_numpy(path):
    names = set(imports(path.read_text(), at_import_time=False))
    assert not {name.split(".")[0] for name in names} & {"mlx", "numpy", "mlx_lm"}


@pytest.mark.parametrize(
    "code",
    [
        "import workbench",
        "import workbench; workbench.simulate({'requests': [{'id': 'a', 'prompt': {'len': 9}, 'max_tokens': 2}]})",
        "import workbench, workbench.viz.reprs; workbench.Trace",
    ],
)
def test_what_needs_no_mlx_does_not_import_it(code):
    check = f"{code}\nimport sys\nassert not any(name.split('.')[0] in ('mlx', 'mlx_lm') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_importing_workbench_is_light():
    heavy = ["numpy", "panel", "bokeh", "numba", "anywidget", "tokenizers", "tqdm"]
    check = f"import workbench, sys\nprint(*[name for name in {heavy} if name in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True, timeout=60)
    assert finished.stdout.split() == []


def test_names_are_there_for_tab_completion():
    assert {"Engine", "EngineConfig", "SamplingParams", "Trace", "simulate", "backend_info"} <= set(dir(workbench))
    with pytest.raises(AttributeError, match="no attribute 'Enginge'"):
        _ = workbench.Enginge
