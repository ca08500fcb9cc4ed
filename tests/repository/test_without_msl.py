"""Notebook 03 on a machine that cannot run Metal kernels on its CPU: it says so and continues."""

import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "03_varlen_kernel.ipynb"
PROGRAM = """
import json, sys
for source in json.load(open(sys.argv[1])):
    exec(compile(source, "cell", "exec"), globals())
"""


def test_the_notebook_of_the_kernel(tmp_path):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    without_model = [source for source in sources if "Engine(" not in source]
    assert len(without_model) == len(sources) - 1
    path = tmp_path / "cells.json"
    path.write_text(json.dumps(without_model))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env={**os.environ, "WORKBENCH_CLANG": "/nowhere/clang"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: WORKBENCH_CLANG=/nowhere/clang is not clang 17 or newer") == 4
