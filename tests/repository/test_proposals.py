"""Each row of docs/proposals.md names a test that fails for the row's fault."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import mutants_of_proposals  # noqa: E402
from mutants_of_proposals import ROWS, SHOWN_OTHERWISE  # noqa: E402


def rows_of_page():
    """The rows of the tables of items, as (item, what shows it)."""
    tables = re.findall(
        r"\| item \| place \| shown by \|\n\|[-|]+\|\n((?:\|.*\n)+)", (ROOT / "docs/proposals.md").read_text()
    )
    cells = [
        [cell.strip() for cell in row.strip("| \n").split(" | ")] for table in tables for row in table.splitlines()
    ]
    return [(row[0], row[-1]) for row in cells]


def test_each_row_has_a_fault_or_is_shown_in_another_way():
    beginnings = [*(row.item for row in ROWS), *SHOWN_OTHERWISE]
    for item, _ in rows_of_page():
        assert sum(item.startswith(beginning) for beginning in beginnings) == 1, item
    assert len(rows_of_page()) == len(beginnings), "a fault for a row that is gone"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.item)
def test_the_page_names_the_test_of_the_fault(row):
    (shown,) = (shown for item, shown in rows_of_page() if item.startswith(row.item))
    assert row.name in shown or ("the same" in shown and row.name in (ROOT / "docs/proposals.md").read_text())
    assert (ROOT / "workbench" / row.file).read_text().count(row.old) == 1
    if "::" in row.test:
        file, _, name = row.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.repeats(of="test_the_page_names_the_test_of_the_fault")
def test_every_fault_is_found_by_its_test(monkeypatch):
    """Minutes: in ``make test-all`` alone."""
    monkeypatch.setattr(sys, "argv", ["mutants_of_proposals.py"])
    assert mutants_of_proposals.main() == 0
