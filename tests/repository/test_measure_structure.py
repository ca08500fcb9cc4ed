"""The script that measures the code, on small packages whose numbers are known."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import measure_structure as script
import pytest

ROOT = Path(__file__).parents[2]


def package(folder, **files):
    for name, text in files.items():
        path = folder / "workbench" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("back", "at_run_time", "with_types"),
    [
        ("from workbench.a import one", 1, 1),
        ("def f():\n    from workbench.a import one", 1, 1),
        (TYPES + "from workbench.a import one", 0, 1),
        (TYPES + "from workbench.room import one", 0, 1),  # re-exported
        ("from workbench.c import one", 0, 0),
    ],
)
def test_circles_at_run_time_and_for_types(tmp_path, back, at_run_time, with_types):
    root = package(tmp_path, a="from workbench.b import two\n\none = 1", b=back + "\n\ntwo = 2", c="one = 1")
    (root / "workbench" / "room").mkdir()
    (root / "workbench" / "room" / "__init__.py").write_text("from workbench.a import one")
    package(root / "site", a="from workbench.b import two")  # what `make docs` leaves beside the package
    found = [len(script.circles(script.import_graph(root, type_only=types))) for types in (False, True)]
    assert found == [at_run_time, with_types]


def test_only_code_names_a_word(tmp_path):
    root = package(
        tmp_path, one='"""Drafts."""\n\nx = 1  # a draft', two="num_drafts = 1", three__four="class Draft:\n    a = 1"
    )
    assert script.rooms_that_name(root, ("draft",)) == {"two.py": 1, "three": 1}


def test_the_table_gets_its_last_column():
    page = (
        f"# Page\n\n{script.HEADING}\n\nText.\n\n| | before | now |\n|---|---|---|\n| a | 1 | 2 |\n\nMore.\n\n| x |\n"
    )
    written = script.write_table(page, {"a": 3, "new": 4000})
    assert written == page.replace("| a | 1 | 2 |\n", "| a | 1 | 3 |\n| new | - | 4,000 |\n")
    assert script.write_table(written, {"a": 3, "new": 4000}) == written


def test_code_that_names_a_feature_is_counted_line_by_line(tmp_path):
    text = 'def f(x):\n    """Drafts."""\n    y = x.adapter + x.num_drafts\n    z = 1  # a draft\n    return y\n'
    root = package(tmp_path, one=text, two="num_drafts = 1\n")
    found = script.feature_lines(root, {"workbench/one.py": {1, 2, 3, 4, 5}, "workbench/two.py": set()})
    assert found == {"workbench/one.py": {3: ["drafts", "adapters"]}}


def test_a_planted_line_of_a_feature_fails_by_name(tmp_path):
    for folder in ("workbench", "scripts", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    path = tmp_path / "workbench" / "scheduler" / "queues.py"
    place = "        self.requests[request.request_id] = request\n"
    text = path.read_text()
    assert text.count(place) == 1
    path.write_text(text.replace(place, place + "        assert request.grammar is None\n" * script.MAX_FEATURE_LINES))
    command = [sys.executable, str(tmp_path / "scripts" / "measure_structure.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WORKBENCH_PREFLIGHT": "remembered"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "lines of code of a plain step name an optional feature" in done.stderr
    assert "workbench/scheduler/queues.py has most of them" in done.stderr
