"""Tables of text: every cell stands whole in one line, however narrow the terminal; only texts are folded."""

import random

import pytest

from workbench.base.tables import MAX_PARTS, table_lines, terminal_width


def numbers(rng, num_columns):
    """A table of times in columns with headings."""
    rows = [["", *(f"heading {c}" for c in range(1, num_columns))]]
    return rows + [[f"row {r}", *(f"{rng.random():.{rng.randint(5, 9)}f} s" for _ in rows[0][1:])] for r in range(4)]


@pytest.mark.parametrize("seed", range(5))
def test_columns_or_blocks_hold_every_cell_whole(seed):
    rng = random.Random(seed)
    num_columns = rng.randint(3, 8)
    rows = numbers(rng, num_columns)
    wide, longest = table_lines(rows), max(map(len, table_lines(rows)))
    assert len(wide) == len(rows) and wide == table_lines(rows, width=longest)
    assert all(all(cell in line for cell in row) for line, row in zip(wide, rows, strict=True))
    # The cells of a column end at one place.
    ends = [[line.index(row[c]) + len(row[c]) for line, row in zip(wide, rows, strict=True)] for c in (1, 2)]
    assert all(len(set(column)) == 1 for column in ends)

    narrow = rng.randint(30, longest - 1)
    lines = table_lines(rows, width=narrow)
    assert max(map(len, lines)) <= narrow
    if not lines[0].startswith("row 0"):  # tables, one below the other, each with the titles
        tables = [table.split("\n") for table in "\n".join(lines).split("\n\n")]
        assert len(tables) <= MAX_PARTS
        places = [-1] * len(tables)
        for c in range(1, num_columns):
            (at,) = [k for k, table in enumerate(tables) if rows[1][c] in table[-4].split("  ")]
            ends = {line.index(row[c]) + len(row[c]) for line, row in zip(tables[at][-4:], rows[1:], strict=True)}
            assert len(ends) == 1 and all(c > place for place in places[at:]), "one column, in order"
            places[at] = c
        assert all(line.startswith(row[0]) for table in tables for line, row in zip(table[-4:], rows[1:], strict=True))

    num_columns = 9
    rows = numbers(rng, num_columns)
    blocks = table_lines(rows, width=28)
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
