"""The tiers of the tests: which cases run, and that the line at the top says how many."""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import mutants_by_tier
import pytest
import tiers
from tiers import CHECK, CHECK_LEAVES_OUT, covering, examples

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from tiers import examples

@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("seed", range(9))
def test_steps(seed): ...

@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize(("b", "c"), [(1, 2), (3, 4)])
def test_values(a, b, c): ...

@pytest.mark.parametrize("a", range(5))
def test_all(a): ...

@pytest.mark.repeats(of="test_all")
def test_large(): ...

def test_number(): assert examples(200) == {number} and examples(12) == {small}
"""

DRAWS = """
from pathlib import Path
from hypothesis import given, settings, strategies

drawn = []

@settings(database=None)
@given(strategies.integers(0, 10**9))
def draw(number):
    drawn.append(number)

def test_draws():
    draw()
    Path("drawn").write_text(str(drawn))
"""


def parts(rows, strength):
    """Every value, or pair of values, of a row with its columns."""
    columns = list(combinations(range(len(rows[0])), min(strength, len(rows[0]))))
    return {(each, tuple(row[column] for column in each)) for row in rows for each in columns}


@pytest.mark.parametrize("strength", [1, 2])
def test_every_value_and_every_pair_is_covered_by_few_rows(strength):
    rng = random.Random(strength)
    for _ in range(20):
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        rows = list({tuple(rng.randrange(size) for size in sizes) for _ in range(rng.randint(1, 60))})
        indices = covering(rows, strength)
        assert indices == sorted(set(indices)) == covering(rows, strength)
        assert parts([rows[index] for index in indices], strength) == parts(rows, strength)
    grid = [(a, b) for a in range(8) for b in range(5)]
    assert len(covering(grid, 1)) == 8 and len(covering(grid, 2)) == 40
    met = Counter(grid[index][1] for index in covering(grid, 1))
    assert max(met.values()) - min(met.values()) == 1  # none of the five takes all the rest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tiers"]')
    (tmp_path / "pyproject.toml").write_text(
        f"[tool.pytest.ini_options]\npythonpath = ['{ROOT / 'tests/support'}']\n"
        "markers = ['repeats: cases']\naddopts = '--strict-markers'\n"
    )
    (tmp_path / "tests/scheduler").mkdir(parents=True)
    return tmp_path


def run(folder, *words):
    """Without the plugins that happen to be installed, of which some take seconds to import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *words]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("processes", ["2", "0"])
def test_a_tier_says_how_many_cases_it_runs(folder, processes):
    """In processes of pytest-xdist too."""
    path = folder / "tests/test_it.py"
    path.write_text(TESTS.replace("{number}", "50").replace("{small}", "10"))
    shown = run(folder, "-n", processes)
    assert "tier test: 12 of 22 cases; make test-all runs all" in shown and "12 passed" in shown
    path.write_text(TESTS.replace("{number}", "200").replace("{small}", "12"))
    shown = run(folder, "-n", processes, "--tier", "all")
    assert "tier all: 22 of 22 cases\n" in shown and "22 passed" in shown


def test_a_named_test_runs_with_all_its_cases(folder):
    (folder / "tests/test_it.py").write_text(TESTS)
    assert "9 passed" in run(folder, "tests/test_it.py::test_steps")
    assert "3 passed" in run(folder, "tests/test_it.py", "-k", "steps")


def test_the_quickest_tier_imports_no_other_file(folder):
    (folder / "tests/test_other.py").write_text("raise SystemExit")
    (folder / "tests/scheduler/test_it.py").write_text("def test_a(): ...")
    assert "1 passed" in run(folder, "--tier", "check")


@pytest.mark.parametrize(("tier", "num_draws"), [("test", 1), ("all", 2)])
def test_only_the_last_tier_draws_new_inputs_each_time(folder, tier, num_draws):
    (folder / "tests/test_it.py").write_text(DRAWS)
    drawn = set()
    for _ in range(2):
        assert "1 passed" in run(folder, "--tier", tier)
        drawn.add((folder / "drawn").read_text())
    assert len(drawn) == num_draws


def test_no_test_chooses_by_itself_whether_its_inputs_are_new_ones():
    """Its settings would overrule those of the tier."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("tiers.py", Path(__file__).name)]
    assert any("from hypothesis import" in path.read_text() for path in files)
    assert [str(path) for path in files if re.search(r"derandomize=|@seed\(", path.read_text())] == []


def test_the_files_of_the_quickest_tier_exist():
    assert all((ROOT / path).exists() for path in (*CHECK, *CHECK_LEAVES_OUT))
    assert all(path.startswith(CHECK) for path in CHECK_LEAVES_OUT)


def test_markers_are_of_the_four_kinds():
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    found = re.findall(r"^@pytest\.mark\.repeats.*$", text, re.MULTILINE)
    assert len(found) >= 5
    for marker in found:
        kind = re.fullmatch(r'@pytest\.mark\.repeats\((?:step=\d+|every="(?:value|pair)"|of="(\w+)")\)', marker)
        assert kind, marker
        assert kind[1] is None or f"\ndef {kind[1]}(" in text, f"{marker} names no test"


def test_examples_are_fewer_except_in_the_last_tier(monkeypatch):
    for tier, expected in {"check": [5, 10, 25], "test": [5, 10, 25], "all": [5, 30, 100]}.items():
        monkeypatch.setattr(tiers, "_tier", tier)
        assert [examples(number) for number in (5, 30, 100)] == expected
        assert [examples(number, 10) for number in (5, 30, 400)] == ([5, 30, 400] if tier == "all" else [5, 10, 40])


def test_every_fault_of_the_table_is_in_the_code_once():
    """Otherwise scripts/mutants_by_tier.py stops, after minutes, at the first that a change has moved."""
    counts = {fault: (ROOT / "workbench" / fault.file).read_text().count(fault.old) for fault in mutants_by_tier.FAULTS}
    assert [fault for fault, count in counts.items() if count != 1] == []


def test_every_fault_of_the_table_names_its_test():
    assert [fault for fault in mutants_by_tier.FAULTS if fault.path and not (ROOT / fault.path).is_file()] == []
    for tier in ("check", "test"):
        rooms = Counter(fault.room for fault in mutants_by_tier.FAULTS if fault.tier == tier)
        told = ", ".join(f"{count} in `{room}/`" for room, count in rooms.items())
        assert f": {told} | the " in (ROOT / "CONTRIBUTING.md").read_text(), f"CONTRIBUTING.md has to say {told!r}"
