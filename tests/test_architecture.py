"""The map of the code in docs/architecture.md, as a test: who may import whom, and what importing costs."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import workbench

ROOT = Path(workbench.__file__).parent
REPOSITORY = ROOT.parent
CONTRACT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
LAYERS = [re.findall(r"\w+", layer) for layer in reversed(CONTRACT["layers"])]
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}

PURE_PYTHON = [
    ROOT / "config.py",
    ROOT / "simulation" / "simulate.py",
    *(ROOT / "trace" / "laws").glob("*.py"),
    *(ROOT / "scheduler").glob("*.py"),
]


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


def strings_upwards(room, source):
    """Modules that strings in a module of a room name although they are not below the room."""
    for name in named_in_strings(source):
        parts = re.split("[.:]", name)
        if parts[1] != room and HEIGHT.get(parts[1], len(LAYERS)) >= HEIGHT[room]:
            yield name


def lint_imports(folder):
    # In a separate process: the linter reads the package of the folder that it is started in.
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_imports_run_downwards():
    finished = lint_imports(REPOSITORY)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize(
    "line",
    [
        "import workbench.viz.reprs",
        "def draw():\n    from workbench.viz.reprs import step_html",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from workbench.viz.reprs import step_html",
    ],
)
def test_an_import_upwards_is_seen(line, tmp_path):
    """The control: each way to reach a room above, in a module of trace/."""
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT, tmp_path / "workbench", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "workbench" / "trace" / "fields.py").open("a") as file:
        file.write(f"\n{line}\n")
    finished = lint_imports(tmp_path)
    assert finished.returncode == 1
    assert "workbench.trace.fields -> workbench.viz.reprs" in finished.stdout


def test_the_linter_ignores_the_public_names_alone():
    assert CONTRACT["ignore_imports"] == ["workbench -> workbench.**"]


def test_strings_name_rooms_below():
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room != "__init__":  # the table of attached functions
            assert list(strings_upwards(room, path.read_text())) == [], path.relative_to(ROOT)


@pytest.mark.parametrize(
    "line",
    [
        'importlib.import_module("workbench.viz.reprs")',
        'importlib.import_module(f"workbench.viz.{name}")',
        'importlib.import_module(f"workbench.{room}")',
        'HOME = "workbench.viz.reprs:step_html"',
    ],
)
def test_a_string_upwards_is_seen(line):
    assert len(list(strings_upwards("trace", line))) == 1
    assert list(strings_upwards("apps", line)) == [] or "{room}" in line


def test_what_is_no_arrow():
    for line in ('"""Drawn by workbench.viz.reprs."""', 'log = getLogger("workbench")', "import workbench"):
        assert list(strings_upwards("trace", line)) == []


def test_every_room_is_on_the_map():
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([^|]+)` \|", page.split("## Rooms")[1].split("\n## ")[0], re.MULTILINE)
    named = [re.sub(r"/$|\.py$", "", room) for row in rows for room in row.split("`, `")]
    assert named == [room for layer in LAYERS for room in layer if room != "__main__"]


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
