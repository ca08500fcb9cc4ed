"""Tables of text: every cell stands whole in one line, however narrow the terminal."""

import random

import pytest

from workbench.base.tables import table_lines, terminal_width


@pytest.mark.parametrize("seed", range(5))
def test_columns_or_blocks_hold_every_cell_whole(seed):
    rng = random.Random(seed)
    num_columns = rng.randint(3, 8)
    rows = [["", *(f"heading {c}" for c in range(1, num_columns))]]
    rows += [[f"row {r}", *(f"{rng.random():.{rng.randint(1, 9)}f} s" for _ in rows[0][1:])] for r in range(4)]
    wide, longest = table_lines(rows), max(map(len, table_lines(rows)))
    assert len(wide) == len(rows) and wide == table_lines(rows, width=longest)
    assert all(all(cell in line for cell in row) for line, row in zip(wide, rows, strict=True))
    # The cells of a column end at one place.
    ends = [[line.index(row[c]) + len(row[c]) for line, row in zip(wide, rows, strict=True)] for c in (1, 2)]
    assert all(len(set(column)) == 1 for column in ends)

    blocks = table_lines(rows, width=longest - 1)
    assert len(blocks) == 4 * num_columns and max(map(len, blocks)) <= 30
    for r, row in enumerate(rows[1:]):
        title, *cells = blocks[r * num_columns : (r + 1) * num_columns]
        assert title == row[0]
        assert [line.split(maxsplit=2)[:2] for line in cells] == [name.split() for name in rows[0][1:]]
        assert [line.split("  ")[-1] for line in cells] == row[1:]


def test_a_block_leaves_out_empty_cells_and_joins_its_titles():
    rows = [["", "name", "value", "more", ""], ["*", "one", "1" * 30, "", "<"]]
    assert table_lines(rows, width=20, title=(0, 1, 4)) == ["* one <", "  value", f"     {'1' * 30}"]


def test_a_pipe_has_no_width(capsys):
    assert terminal_width() is None
