"""The map of the code in docs/architecture.md, as a test: who may import whom, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import workbench

ROOT = Path(workbench.__file__).parent

# What a room may import of ours beside itself; nothing points back. Modules of the top floor are in everyone's reach.
MAY_IMPORT = {
    "trace": set(),
    "msl": set(),
    "viz": {"trace"},
    "integrations": {"trace"},
    "attention": {"trace", "msl"},
    "models": {"attention"},
    "engine": {"trace", "attention", "models"},
    "distributed": {"engine", "models"},
    "course": {"trace", "engine", "viz"},
}
TOP_FLOOR = {"blas", "cache_folder"}
# The way down to a picture: an object that shows itself asks for its renderer when it is shown.
WHEN_SHOWN = {("engine", "viz")}

PURE_PYTHON = ("scheduler", "scheduler_state", "block_pool", "kv_cache_manager", "request", "config", "simulate")


def imports(path, *, at_import_time):
    """Names a module imports; only those outside functions when asked."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree)
    if at_import_time:
        nodes = [
            child for node in tree.body for child in ([node] if isinstance(node, ast.Import | ast.ImportFrom) else [])
        ]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_arrow_points_back(room):
    for path in (ROOT / room).rglob("*.py"):
        for name in imports(path, at_import_time=False):
            parts = name.split(".")
            if parts[0] != "workbench" or len(parts) == 1 or parts[1] in {room, *TOP_FLOOR}:
                continue
            allowed = parts[1] in MAY_IMPORT[room]
            shown = (room, parts[1]) in WHEN_SHOWN and name not in set(imports(path, at_import_time=True))
            assert allowed or shown, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("module", PURE_PYTHON)
def test_the_scheduler_needs_neither_mlx_nor_numpy(module):
    names = set(imports(ROOT / "engine" / f"{module}.py", at_import_time=False))
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
