"""The panels of one step's batch, drawn by the code that browsers run: every mark is a fact of the step's record."""

import math
import random

import pytest
from facts_of_records import Facts
from msgspec.structs import astuple, replace
from painted import LIGHT, Colours, Marks, close, counted, digits, grouped, span
from runs_to_draw import RUNS, launch, run, steps_of

from workbench.trace import Trace
from workbench.trace.lines import Supplement
from workbench.trace.records import KernelLaunch, WorkItem

LEFT, SPACE = 84, 1100
WORDS = {
    "decode": "decode",
    "new_final": "whole prompt",
    "intermediate": "part of a prompt",
    "cached_final": "last chunk",
}


def limit(chunk):
    return "not limited" if chunk.limited_by == "complete" else f"limited by {chunk.limited_by.replace('_', ' ')}"


def kv(chunk):
    start = chunk.start - chunk.ahead
    return f"KV {grouped(start)} → {grouped(start + chunk.num_tokens)}"


def drafts(chunk):
    return f"{chunk.num_accepted} of {len(chunk.drafts)} {'draft' if len(chunk.drafts) == 1 else 'drafts'} accepted"


def rows_of(record):
    """Each chunk with its query rows and its KV: (chunk, q0, q1, KV before, KV after)."""
    at, found = 0, []
    for chunk in record.chunks:
        start = chunk.start - chunk.ahead
        found.append((chunk, at, at + chunk.num_tokens, start, start + chunk.num_tokens))
        at += chunk.num_tokens
    return found


def draft_cells(marks, chunk, x, y, width, height, colour):
    """The cells of known rows and accepted drafts are filled, those of rejected drafts crossed out."""
    cell = width / chunk.num_tokens
    kept = chunk.num_tokens - len(chunk.drafts) + chunk.num_accepted
    gap = 1 if cell > 3 else 0
    filled = [[x + i * cell, y, max(0.5, cell - gap), height] for i in range(kept)]
    for expected in filled:
        assert any(rect[0] == colour and close(rect[1:], expected) for rect in marks.rects()), expected
    inside = [r for r in marks.rects(y, height, colour) if x - 0.01 <= r[1] < x + width]
    assert len(inside) == kept
    rejected = chunk.num_tokens - kept
    if cell > 3:
        crossed = [
            part for _, path in marks.stroked() for part in path
            if part[0] == "rect" and x <= part[1] <= x + width and abs(part[2] - y - 0.5) < 1e-6
        ]  # fmt: skip
        assert [part[1] for part in crossed] == pytest.approx(
            [x + (kept + i) * cell + 0.5 for i in range(rejected)], abs=1e-6
        )
    elif rejected:
        assert any(close(frame[1:3], [x + kept * cell + 0.5, y + 0.5]) for frame in marks.frames(colour))


@pytest.mark.parametrize("name", [*RUNS, "crowd 0"])
def test_packed_batch(drawn, name):
    page, facts, colours = drawn(name)
    for step in steps_of(facts):
        record, rows = facts.records[step], rows_of(facts.records[step])
        marks = Marks(page.painted("packed", step)["marks"])
        if not rows:
            assert marks.words() == ["Nothing was scheduled in this step."]
            continue
        total, budget = rows[-1][2], record.token_budget
        check_true_ribbon(marks, rows, total, budget, colours)
        segments = check_readable_ribbon(marks, rows, colours)
        height = check_rows(page, marks, rows, record, facts, colours)
        check_hits(page, rows, total, budget, segments, height, record, facts)
        check_packed_table(page, rows, record)
        words = page("view.panel('packed').describe()")
        assert words == f"step {record.step}, {counted(len(rows), 'sequence')}, {total} of {budget} query rows"


def check_true_ribbon(marks, rows, total, budget, colours):
    scale, ribbon = SPACE / max(budget, total), marks.rects(14, 20)
    plain = [rect for rect in ribbon if not rect[0].startswith("pattern")]
    assert len(plain) == len(rows)
    for rect, (chunk, q0, q1, *_) in zip(plain, rows):
        assert rect[0] == colours.of(chunk) and rect[1] == pytest.approx(LEFT + q0 * scale)
        width = (q1 - q0) * scale
        assert rect[3] == pytest.approx(width - (1 if width > 6 else 0), abs=0.51)
    unused = [rect for rect in ribbon if rect[0].startswith("pattern")]
    assert len(unused) == (budget > total)
    assert not unused or close(unused[0][1:4:2], [LEFT + total * scale, SPACE - total * scale])
    said = [words for x, y, words in marks.texts(y=24) if abs(x - LEFT - total * scale - 6) < 1e-6]
    fits = (budget - total) * scale > 6 * len(f"{grouped(budget - total)} of {grouped(budget)} unused") + 12
    assert said == ([f"{grouped(budget - total)} of {grouped(budget)} unused"] if budget > total and fits else [])
    ticks = marks.texts(y=43)
    assert len(ticks) > 1 or max(budget, total) < 2
    for x, _, words in ticks:
        assert x == pytest.approx(LEFT + int(words.replace(",", "")) * scale)


def readable(sizes):
    """The widths of the readable ribbon: 22 pixels each, and the rest by size."""
    floor = min(22, SPACE / len(sizes))
    x, found = LEFT, []
    for size in sizes:
        width = floor + (SPACE - floor * len(sizes)) * size / sum(sizes)
        found.append((x, width, width < SPACE * size / sum(sizes) - 1e-9))
        x += width
    return found


def check_readable_ribbon(marks, rows, colours):
    segments = readable([chunk.num_tokens for chunk, *_ in rows])
    ribbon = marks.rects(62, 20)
    plain = [rect for rect in ribbon if not rect[0].startswith("pattern")]
    hatched = [rect for rect in ribbon if rect[0].startswith("pattern")]
    assert [rect[0] for rect in plain] == [colours.of(chunk) for chunk, *_ in rows]
    ticks = {round(x, 3): words for x, y, words in marks.texts(y=92) if x >= LEFT}
    for rect, (chunk, q0, _q1, *_), (x, width, broken) in zip(plain, rows, segments):
        assert close(rect[1:4:2], [x, width - 1])
        again = [h for h in hatched if abs(h[1] - x) < 1e-6]
        assert len(again) == bool(chunk.num_recomputed_tokens)
        assert not again or again[0][3] == pytest.approx((width - 1) * chunk.num_recomputed_tokens / chunk.num_tokens)
        label = [words for at, y, words in marks.texts(x=x + (width - 1) / 2) if 66 <= y <= 73]
        assert label == ([chunk.request_id] if width - 1 > 6 * len(chunk.request_id) + 3 else [])
        middle = x + (width - 1) / 2
        dots = [path for _, path in marks.filled() if path and path[0][0] == "arc" and abs(path[0][1] - middle) < 1e-6]
        assert len(dots) == (chunk.arm == "decode" and not chunk.drafts and width - 1 > 5)
        if chunk.drafts and width - 1 > 5:
            ink = next(rect[0] for rect in marks.rects(74, 6)) if chunk.num_tokens > len(chunk.drafts) else None
            draft_cells(marks, chunk, x + 2, 74, width - 5, 6, ink)
        assert ticks.get(round(x, 3), str(q0)) == str(q0)
        breaks = [path for _, path in marks.stroked() if path and path[0][1] == 62 and x <= path[0][0] <= x + width]
        assert len(breaks) == (2 if broken and width - 1 > 40 else 0)
    assert ticks[LEFT] == "0" and set(ticks.values()) <= {str(q) for _, q0, q1, *_ in rows for q in (q0, q1)}
    assert len(ticks) > 1 or len(rows) == 1 or segments[0][1] < 30
    end = round(LEFT + SPACE - 1, 3)
    assert ticks.get(end, str(rows[-1][2])) == str(rows[-1][2])
    return segments


def check_rows(page, marks, rows, record, facts, colours):
    row = 20 if len(rows) <= 16 else max(7, min(20, 320 / len(rows)))
    bottom = 128 + len(rows) * row
    ticks = marks.texts(y=bottom + 10)
    (x0, _, zero), *_ = [tick for tick in ticks if tick[0] >= LEFT]
    assert (x0, zero) == (LEFT, "0")
    scale = (ticks[-2 if ticks[-1][2] == "KV position" else -1][0] - LEFT) / int(
        ticks[-2 if ticks[-1][2] == "KV position" else -1][2].replace(",", "")
    )
    for x, _, words in [tick for tick in ticks if tick[0] >= LEFT]:
        assert x == pytest.approx(LEFT + int(words.replace(",", "")) * scale)
    assert [words for x, y, words in marks.texts(x=76) if y > 128 and words != "KV position"] == [
        chunk.request_id for chunk, *_ in rows if row >= 11 or chunk.arm != "decode"
    ]
    window, shapes = (
        facts.window_of(record),
        [shape for shape in marks.filled() if shape[1][0][0] != "arc" and shape[1][0][1] > 127],
    )
    assert len(shapes) == len(rows)
    for i, ((colour, path), (chunk, q0, q1, start, end)) in enumerate(zip(shapes, rows)):
        y, top, height = 128 + i * row, 128 + i * row + (3 if row > 12 else 1), row - (6 if row > 12 else 2)
        cached = [rect for rect in marks.rects(top, height) if rect[1] == LEFT]
        assert cached[0] == [LIGHT.kv, LEFT, pytest.approx(top), pytest.approx(start * scale), pytest.approx(height)]
        unread = [rect for rect in cached[1:] if rect[0].startswith("pattern")]
        assert len(unread) == (window > 0 and start - window + 1 > 0)
        assert not unread or unread[0][3] == pytest.approx(max(0, start - window + 1) * scale)
        before, after = LEFT + start * scale, LEFT + end * scale
        if chunk.arm == "decode":
            assert colour == colours.prefill(chunk.request_id)
            assert [x for x, _ in path] == pytest.approx([after, path[1][0], after, 2 * after - path[1][0]])
            assert path[0][1] == pytest.approx(top) and path[2][1] == pytest.approx(top + height)
        else:
            assert colour == colours.prefill(chunk.request_id)
            flat = [value for corner in path for value in corner]
            assert flat == pytest.approx(
                [before, top, before + scale, top, max(after, before + 3), top + height, before, top + height]
            )
        size = facts.groups[facts.shown_group].block_size
        borders = [rect[1] + 0.5 for rect in marks.rects(top, height) if rect[3] == 1 and rect[1] > LEFT]
        expected = [LEFT + at * scale for at in range(size, start, size)] if size * scale >= 6 and row >= 12 else []
        assert borders == pytest.approx(expected)
        labels = [words for x, at, words in marks.texts(y=y + row / 2) if x > after]
        assert len(labels) == (row >= 11 or chunk.arm != "decode")
        if not labels:
            continue
        label = labels[0]
        parts = [f"q{span(q0, q1)}", counted(chunk.num_tokens, "row"), kv(chunk)]
        parts += [f"{chunk.num_accepted}/{len(chunk.drafts)} drafts"] if chunk.drafts else []
        assert label in ["  ".join(parts[first:]) for first in range(3)]
    return row


def check_hits(page, rows, total, budget, segments, row, record, facts):
    size, tables = facts.groups[facts.shown_group].block_size, record.block_tables_by_group
    scale = SPACE / max(budget, total)
    most = max(16, *(end for *_, end in rows))
    across = page("view.panel('packed').kvScale(view.panel('packed').kvMost) - 84")
    for i, (chunk, q0, q1, start, end) in enumerate(rows):
        known = [
            f"{chunk.request_id}: "
            + ("decode" if chunk.arm == "decode" else f"prefill chunk of {counted(chunk.num_tokens, 'token')}"),
            f"query rows {span(q0, q1)} of {grouped(total)}",
            kv(chunk),
        ]
        more = [limit(chunk)] if chunk.arm != "decode" else []
        more += [drafts(chunk)] if chunk.drafts else []
        more += ["click to see its attention mask"]
        assert page.hit("packed", LEFT + (q0 + 0.01) * scale, 20) == known + more
        assert page.hit("packed", LEFT + (q1 - 0.01) * scale, 33) == known + more
        x, width, _ = segments[i]
        assert page.hit("packed", x + 0.01, 63) == page.hit("packed", x + width - 0.01, 81) == known + more
        for position in {0, start // 2, end - 1}:
            lines = page.hit("packed", LEFT + (position + 0.5) / most * across, 128 + i * row + 1)
            block = tables[chunk.request_id][facts.shown_group][position // size]
            place = f"position {grouped(position)}: logical block {position // size}, physical block {block}"
            assert lines == [*known, place, *more]
            hover = page(
                "view.panel('packed').hit(argument[0], argument[1]).hover",
                [LEFT + (position + 0.5) / most * across, 128 + i * row + row - 1],
            )
            assert hover["kv"] == [position // size * size, position // size * size + size]
            assert (hover["block"], hover["request"]) == (block, facts.order.index(chunk.request_id))
    assert page.hit("packed", LEFT + 5, 128 + len(rows) * row + 1) == []
    assert page.hit("packed", LEFT + 5, 100) == []


def check_packed_table(page, rows, record):
    table = page.table("packed")
    assert table["caption"] == f"Packed batch of step {record.step}"
    expected = [
        [
            seq, chunk.request_id, WORDS[chunk.arm], q0, q1, chunk.num_tokens, start, end, limit(chunk),
            f"{chunk.num_accepted} of {len(chunk.drafts)}" if chunk.drafts else "–",
            "–" if chunk.sampled is None else chunk.sampled,
        ]
        for seq, (chunk, q0, q1, start, end) in enumerate(rows)
    ]  # fmt: skip
    assert table["rows"] == expected


@pytest.mark.parametrize("name", RUNS)
def test_the_sequence_at_the_pointer_is_framed_in_the_packed_batch(drawn, name):
    page, facts, _ = drawn(name)
    for step in steps_of(facts, 3):
        record, rows = facts.records[step], rows_of(facts.records[step])
        page.painted("packed", step)
        scale = SPACE / max(record.token_budget, rows[-1][2]) if rows else 0
        segments = readable([chunk.num_tokens for chunk, *_ in rows]) if rows else []
        for i, (chunk, q0, q1, *_) in enumerate(rows):
            index = facts.order.index(chunk.request_id)
            page("view.cursor.setHover({ request: argument })", index)
            frames = Marks(page.painted("packed")["over"]).frames()
            row = 20 if len(rows) <= 16 else max(7, min(20, 320 / len(rows)))
            assert len(frames) == 3
            assert close(frames[0][1:], [1.5, 128 + i * row + 0.5, 1197, row - 1])
            assert close(frames[1][1:4:2], [segments[i][0] - 0.5, segments[i][1]])
            assert close(frames[2][1:4:2], [LEFT + q0 * scale - 0.5, max(2, (q1 - q0) * scale)])
            at, end = page("[view.panel('packed').kvScale(1) - 84, 0]")[0], rows[i][4]
            page("view.cursor.setHover({ request: argument[0], kv: argument[1] })", [index, [end // 2, end + 3]])
            (bar,) = Marks(page.painted("packed")["over"]).rects(colour=LIGHT.cursor)
            place = [LEFT + end // 2 * at, 128 + i * row + row - 3, max(2, (end - end // 2) * at), 2.5]
            assert close(bar[1:], place)
            page("view.cursor.setHover({})")


# -- the mask ----------------------------------------------------------------------------------------------------


def seen(facts, record, position):
    """The KV positions that a row at a position may attend to."""
    window = facts.window_of(record)
    return range(max(0, position - window + 1) if window else 0, position + 1)


def items_of(facts, record):
    """The work list: that of the launch, or tiles of 32 rows against all that their rows see."""
    if record.kernel and record.kernel.work_items:
        return [
            (item.seq, item.q_start, item.num_rows, item.kv_start, item.kv_end, item.split, item.num_splits)
            for item in record.kernel.work_items
        ]
    found = []
    for seq, (chunk, q0, _, start, _) in enumerate(rows_of(record)):
        for at in range(0, chunk.num_tokens, 32):
            rows = min(32, chunk.num_tokens - at)
            found.append((seq, q0 + at, rows, seen(facts, record, start + at).start, start + at + rows, 0, 1))
    return found


def shown_mask(record, selected):
    """The sequence that is shown alone, None for the whole batch."""
    rows = rows_of(record)
    chosen = next((seq for seq, (chunk, *_) in enumerate(rows) if chunk.request_id == selected), None)
    if chosen is not None:
        return chosen
    if rows and (rows[-1][2] > 64 or sum(end for *_, end in rows) > 400):
        return max(range(len(rows)), key=lambda seq: (rows[seq][0].num_tokens, rows[seq][4]))
    return None


@pytest.mark.parametrize("selecting", [False, True])
@pytest.mark.parametrize("name", [*RUNS, "big 0", "crowd 0"])
def test_attention_mask(drawn, name, selecting):
    page, facts, colours = drawn(name)
    for step in steps_of(facts, 5):
        record, rows = facts.records[step], rows_of(facts.records[step])
        if not rows:
            marks = Marks(page.painted("rectangle", step)["marks"])
            assert marks.words() == ["Nothing was scheduled in this step."]
            assert page.table("rectangle")["rows"] == []
            continue
        selected = rows[step % len(rows)][0].request_id if selecting else None
        index = None if selected is None else facts.order.index(selected)
        page("view.cursor.selected = argument", index)
        one = shown_mask(record, selected)
        marks = Marks(page.painted("rectangle", step)["marks"])
        shape = (rows[-1][2], sum(end for *_, end in rows)) if one is None else (rows[one][0].num_tokens, rows[one][4])
        frame = marks.frames(LIGHT.muted)[-1]
        across, down = (frame[3] - 1) / shape[1], (frame[4] - 1) / shape[0]
        high = max(18 if shape[0] == 1 else 2, min(14, SPACE / shape[1], 260 / shape[0]))
        high = min(high, 300 / shape[0]) if shape[0] * high > 300 else high
        assert close(frame[1:3], [LEFT - 0.5, 39.5]) and close([across, down], [SPACE / shape[1], high])
        if one is None:
            check_outlines(marks, rows, across, down, colours)
        for x, _, words in [tick for tick in marks.texts(y=40 + shape[0] * down + 12) if tick[0] >= LEFT]:
            assert x == pytest.approx(LEFT + int(words.replace(",", "")) * across)
        expected = expected_cells(facts, record, rows, one)
        assert cells_of(marks, rows, one, colours, shape, across, down) == expected
        check_mask_words(page, marks, facts, record, rows, one, selected, shape, down)
        check_mask_hits(page, record, rows, one, facts, across, down)
        check_mask_table(page, facts, record, rows, one)
        check_mask_title(page, record, rows, one, shape)
        legend = page(
            "(({ element }) => [element.hidden, element.getContext('2d').marks])(view.panel('rectangle').legend)"
        )
        assert legend[0] == (one is None), "cells of all sequences explain themselves"
        if one is not None:
            key = Marks(legend[1])
            assert key.words() == ["attends", "computed and masked", "tile skipped"]
            assert key.rects()[0][0] == colours.prefill(rows[one][0].request_id)
            assert {rect[0] for rect in marks.rects()} <= {rect[0] for rect in key.rects()} | {LIGHT.background}
            chunk, *_, end = rows[one]
            hover = {"request": facts.order.index(chunk.request_id), "kv": [end // 2, end + 2]}
            page("view.cursor.setHover(argument)", hover)
            (frame,) = Marks(page.painted("rectangle")["over"]).frames(LIGHT.cursor)
            wide = max(2, (end - end // 2) * across)
            assert close(frame[1:], [LEFT + end // 2 * across, 39, wide, shape[0] * down + 2])
            page("view.cursor.setHover({})")
    page("view.cursor.selected = null")


def check_outlines(marks, rows, across, down, colours):
    """A frame around each sequence, and cells a pixel smaller than their places."""
    column, frames = 0, [frame[1:] for frame in marks.frames(LIGHT.hairline)]
    for frame, (chunk, q0, _, _, end) in zip(frames, rows, strict=True):
        place = [LEFT + column * across, 40 + q0 * down, end * across, chunk.num_tokens * down]
        assert close(frame, place)
        column += end
    sizes = [max(0.6, size - (1 if size > 4 else 0)) for size in (across, down)]
    fills = {*colours.hues.values(), LIGHT.prefill}
    assert all(close(rect[3:], sizes) for rect in marks.rects() if rect[0] in fills)


def expected_cells(facts, record, rows, one):
    """The allowed pairs (row, column) of the picture."""
    cells, column = set(), 0
    for seq, (chunk, q0, _q1, start, end) in enumerate(rows):
        if one in (None, seq):
            top, left = (q0, column) if one is None else (0, 0)
            for q in range(chunk.num_tokens):
                cells |= {(top + q, left + k) for k in seen(facts, record, start + q)}
        column += end
    return cells


def cells_of(marks, rows, one, colours, shape, across, down):
    """The cells whose middle lies in a rectangle of the sequences' colours."""
    fills = {colours.prefill(rows[one][0].request_id)} if one is not None else None
    cells = set()
    for colour, x, y, width, height in marks.rects():
        if (fills is None and colour in (LIGHT.muted, LIGHT.hairline)) or (fills is not None and colour not in fills):
            continue
        if fills is None:
            row = int((y - 40) / down + 0.1)
            owner = next(chunk for chunk, q0, q1, *_ in rows if q0 <= row < q1)
            assert colour == colours.hues.get(owner.request_id, LIGHT.prefill)
        first_row, last_row = (y - 40) / down, (y + height - 40) / down
        first, last = (x - LEFT) / across, (x + width - LEFT) / across
        for row in range(max(0, int(first_row - 0.4) - 1), min(shape[0], int(last_row) + 1)):
            if first_row < row + 0.4 < last_row:
                for column in range(max(0, int(first - 0.4) - 1), min(shape[1], int(last) + 2)):
                    if first < column + 0.4 < last:
                        cells.add((row, column))
    return cells


def check_mask_words(page, marks, facts, record, rows, one, selected, shape, down):
    if one is None:
        assert marks.words()[0] == f"block-diagonal mask: {shape[0]} × {shape[1]} cells; filled = 0, empty = −∞"
        labels = [(y, words) for x, y, words in marks.texts(x=76) if 40 <= y <= 40 + shape[0] * down]
        assert labels == [
            (pytest.approx(40 + (q0 + chunk.num_tokens / 2) * down), chunk.request_id)
            for chunk, q0, *_ in rows
            if chunk.num_tokens * down >= 9
        ]
        return
    chunk, q0, _q1, start, end = rows[one]
    which = "" if chunk.request_id == selected or len(rows) == 1 else f", the largest of {len(rows)} sequences"
    assert f"{chunk.request_id}: {grouped(chunk.num_tokens)} × {grouped(end)}{which}" in marks.words()
    size = record.kernel.block_kv if record.kernel and record.kernel.work_items else record.block_size
    mine = [item for item in items_of(facts, record) if item[0] == one]
    computed = diagonal = skipped = 0
    for _, first, num, low, high, split, _ in mine:
        positions = [start + first - q0 + i for i in range(num)]
        for k0 in range(0, end, size):
            tile = range(k0, min(k0 + size, end))
            allowed = sum(k in seen(facts, record, position) for position in positions for k in tile)
            if not allowed:
                skipped += split == 0
            elif k0 < high and tile.stop > low:
                computed += 1
                diagonal += allowed < len(positions) * len(tile)
    dense = sum(item[5] == 0 for item in mine) * -(-end // size)
    said = f"{grouped(computed)} of {counted(dense, 'tile')} computed, {grouped(diagonal)} partly masked, "
    said += f"{grouped(skipped)} skipped, "
    said += "from the launch" if record.kernel and record.kernel.work_items else "planned"
    assert said in marks.words()
    labels = [(y, words) for x, y, words in marks.texts(x=76) if 40 <= y <= 40 + shape[0] * down]
    expected = [(40 + 0.5 * down, grouped(start))]
    if chunk.num_tokens > 1 and chunk.num_tokens * down > 24:
        expected.append((40 + (chunk.num_tokens - 0.5) * down, grouped(end - 1)))
    assert [words for _, words in labels] == [words for _, words in expected]
    assert close([y for y, _ in labels], [y for y, _ in expected])


def check_mask_hits(page, record, rows, one, facts, across, down):
    size = facts.groups[facts.shown_group].block_size
    items = items_of(facts, record)
    left = 0
    for seq, (chunk, q0, _q1, start, end) in enumerate(rows):
        for q in {0, chunk.num_tokens - 1} if one in (None, seq) else ():
            for column in {0, start + q, min(end - 1, start + q + 1), end // 2}:
                top, across0 = (q0, left) if one is None else (0, 0)
                at = [LEFT + (across0 + column + 0.5) * across, 40 + (top + q + 0.5) * down]
                lines = page.hit("rectangle", *at)
                allowed = column in seen(facts, record, start + q)
                verdict = (
                    "attends" if allowed
                    else "masked: later than the query" if column > start + q else "masked: outside the window"
                )  # fmt: skip
                block = record.block_tables_by_group[chunk.request_id][facts.shown_group][column // size]
                expected = [
                    f"{chunk.request_id}: position {grouped(start + q)} × KV {grouped(column)}",
                    verdict,
                    f"logical block {column // size}, physical block {block}",
                ]
                if one is not None:
                    found = [
                        i for i, (s, first, num, low, high, *_) in enumerate(items)
                        if s == seq and first <= q0 + q < first + num and low <= column < high
                    ]  # fmt: skip
                    expected += [f"computed by work item {found[0]}"] if found else []
                assert lines == expected
        if one is None and len(rows) > 1:
            other = left + end if seq + 1 < len(rows) else 0
            lines = page.hit("rectangle", LEFT + (other + 0.5) * across, 40 + (q0 + 0.5) * down)
            assert lines == [f"row {q0} of {chunk.request_id}", "another sequence's KV: −∞"]
        left += end
    named = (
        []
        if one is not None
        else [next(chunk.request_id for chunk, q0, q1, *_ in rows if q0 <= int((45 - 40) / down) < q1)]
    )
    assert page.hit("rectangle", LEFT - 5, 45) == named and page.hit("rectangle", LEFT + 5, 30) == []


def check_mask_title(page, record, rows, one, shape):
    words = page("view.panel('rectangle').describe()")
    if one is None:
        assert words == f"block-diagonal mask of {shape[0]} by {shape[1]} cells"
    else:
        name = rows[one][0].request_id
        assert words == f"{name}, {counted(shape[0], 'row')} by {counted(shape[1], 'position')}"


def check_mask_table(page, facts, record, rows, one):
    expected = [
        [chunk.request_id, q0 + q, start + q, seen(facts, record, start + q).start, start + q + 1]
        for seq, (chunk, q0, q1, start, end) in enumerate(rows)
        if one in (None, seq)
        for q in range(min(chunk.num_tokens, 200))
    ]
    assert page.table("rectangle")["rows"] == expected


# -- block tables ------------------------------------------------------------------------------------------------


def group_words(group):
    if group.kind == "sliding_window":
        return f"window {grouped(group.sliding_window)}"
    return "state" if group.kind == "mamba" else "full attention"


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("name", [*RUNS, "crowd 0"])
def test_block_tables(drawn, name, width):
    page, facts, colours = drawn(name, width=width)
    several = len(facts.groups) > 1
    for step in steps_of(facts):
        record = facts.records[step]
        tables = record.block_tables_by_group
        most = max(1, 16 // len(facts.groups))
        in_focus = [chunk for chunk in record.chunks if chunk.request_id in colours.hues]
        others = [chunk for chunk in record.chunks if chunk.request_id not in colours.hues]
        shown = list(record.chunks) if len(record.chunks) <= most else [*in_focus, *others][:most]
        marks = Marks(page.painted("tables", step)["marks"])
        rows = [
            (chunk, group, tables[chunk.request_id][group]) for chunk in shown for group in range(len(facts.groups))
        ]
        whole = [
            [chunk.request_id, group_words(group), len(table), " ".join(map(str, table))]
            for chunk in record.chunks
            for group, table in zip(facts.groups, tables[chunk.request_id])
        ]
        table = page.table("tables")
        assert (table["rows"], table["caption"]) == (whole, f"Block tables at step {record.step}")
        if not rows:
            assert marks.words() == ["Nothing was scheduled in this step."]
            continue
        heads = [(x, words) for x, _, words in marks.texts(y=9) if words != "logical block"]
        cell = page("view.panel('tables').cell")
        assert all(x == pytest.approx(LEFT + (int(words) + 0.5) * cell) for x, words in heads) and heads[0][1] == "0"
        every, shown_most = max(1, math.ceil(34 / cell)), page("view.panel('tables').fits")
        assert [words for _, words in heads] == [str(i) for i in range(0, shown_most, every)]
        longest = max(len(table) for *_, table in rows)
        fits = min(longest, page("view.panel('tables').fits"))
        words = page("view.panel('tables').describe()")
        assert words == f"{counted(len(rows), 'block table')} at step {record.step}"
        hidden = len(record.chunks) - len(shown)
        assert (f"{counted(hidden, 'more sequence')}: see the table" in marks.words()) == (hidden > 0)
        names = [words for x, y, words in marks.texts(x=76) if y > 20]
        assert names == [chunk.request_id for chunk in shown]
        digits = max(len(str(block)) for *_, table in rows for block in [0, *table])
        has_ids = 6.1 * digits + 3 <= cell - (2 if cell > 8 else 1)
        hint = page("view.panel('tables').hintElement.textContent")
        assert hint.startswith("physical block ids" if has_ids else "physical blocks, whose ids a click tells")
        for i, (chunk, group, table) in enumerate(rows):
            ids = [str(block) for block in table[:fits] if block] if has_ids else []
            check_block_row(
                page, marks, 20 + 18 * i, chunk, facts.groups[group], table, cell, fits, colours, several, ids
            )


def check_block_row(page, marks, y, chunk, group, table, cell, fits, colours, several, ids):
    end, is_state = chunk.start - chunk.ahead + chunk.num_tokens, group.kind == "mamba"
    size = 1 if is_state else group.block_size
    full = [rect for rect in marks.rects(colour=LIGHT.kv) if abs(rect[2] - y - 2) < 1e-6]
    used = [
        rect for rect in marks.rects(colour=colours.held(chunk.request_id)) if abs(rect[2] + rect[4] - y - 15) < 1e-6
    ]
    shown = table[:fits]
    held = [(logical, block) for logical, block in enumerate(shown) if block]
    assert [rect[1] for rect in full] == pytest.approx([LEFT + logical * cell for logical, _ in held])
    assert [rect[1] for rect in used] == pytest.approx([LEFT + logical * cell for logical, _ in held])
    for rect, (logical, _) in zip(used, held):
        slots = 1 if is_state else max(0, min(size, end - logical * size))
        assert rect[4] == pytest.approx(13 * slots / size)
    holes = [frame for frame in marks.frames(LIGHT.muted) if abs(frame[2] - y - 2.5) < 1e-6]
    empty = [logical for logical, block in enumerate(shown) if not block]
    assert [frame[1] for frame in holes] == pytest.approx([LEFT + logical * cell + 0.5 for logical in empty])
    told = [(x, words) for x, at, words in marks.texts() if y < at < y + 18 and LEFT < x < LEFT + len(shown) * cell]
    assert [words for _, words in told] == ids
    middle = (cell - (2 if cell > 8 else 1)) / 2
    assert [x for x, _ in told] == pytest.approx([LEFT + logical * cell + middle for logical, _ in held[: len(ids)]])
    end_label = [words for x, at, words in marks.texts(x=LEFT + len(shown) * cell + 4) if at == y + 9]
    words = f"… {len(table)}: " if len(table) > len(shown) else ""
    used = max(0, min(size, end - (len(table) - 1) * size)) if table and table[-1] else 0
    words += f"{used}/{size}" if table and not is_state else ""
    assert end_label == [" ".join(filter(None, [words, group_words(group) if several else ""]))]
    for logical, block in [*held[:2], *held[-1:]]:
        at = [LEFT + (logical + 0.5) * cell, y + 5]
        lines, hover = page.hit("tables", *at), page("view.panel('tables').hit(argument[0], argument[1]).hover", at)
        kv_ = [logical * group.block_size, (logical + 1) * group.block_size]
        index = page("view.store.byId.get(argument).index", chunk.request_id)
        assert hover == {"request": index, "block": block, "kv": kv_}
        slots = max(0, min(size, end - logical * size))
        positions = f"KV positions {span(logical * size, logical * size + size)}, {slots} of {size} slots used"
        assert lines == [
            ", ".join(filter(None, [f"{chunk.request_id}: logical block {logical}", group_words(group) * several])),
            f"physical block {block}",
            "a recurrent state" if is_state else positions,
        ]
    for logical in empty[:1]:
        assert page.hit("tables", LEFT + (logical + 0.5) * cell, y + 5)[1] == (
            "no state is kept here" if is_state else "behind the window: its block was given back"
        )
    lines = page.hit("tables", LEFT - 3, y + 5)
    assert lines == [
        chunk.request_id,
        ", ".join(filter(None, [counted(len(table), "block"), group_words(group) * several])),
    ]


@pytest.mark.parametrize("name", ["plain 1", "hybrid_window 30"])
def test_the_block_at_the_pointer_is_framed_wherever_it_is_held(drawn, name):
    page, facts, _ = drawn(name)
    for step in steps_of(facts, 4):
        record, tables = facts.records[step], facts.records[step].block_tables_by_group
        rows = [(chunk, table) for chunk in record.chunks for table in tables[chunk.request_id]]
        if not rows or len(rows) > 16:
            continue
        page.painted("tables", step)
        cell, block = page("view.panel('tables').cell"), next(block for _, table in rows for block in table if block)
        page("view.cursor.setHover({ block: argument })", block)
        frames = Marks(page.painted("tables")["over"]).frames(LIGHT.cursor)
        expected = [
            (LEFT + logical * cell - 1, 20 + 18 * i + 1)
            for i, (_, table) in enumerate(rows)
            for logical, other in enumerate(table)
            if other == block
        ]
        assert [tuple(frame[1:3]) for frame in frames] == [pytest.approx(place) for place in expected]
        page("view.cursor.setHover({ request: argument })", facts.order.index(rows[-1][0].request_id))
        framed = [frame[2] - 0.5 for frame in Marks(page.painted("tables")["over"]).frames(LIGHT.outline)]
        assert framed == [20 + 18 * i for i, (chunk, _) in enumerate(rows) if chunk is rows[-1][0]]
        page("view.cursor.setHover({})")


# -- the work list -----------------------------------------------------------------------------------------------


def test_a_work_list_tells_the_launch_of_its_own_step(deno_page):
    trace, _ = run("plain 1")

    def launch_of(step):
        items = (WorkItem(0, 0, 1, 0, 1, 0, 1),)
        return KernelLaunch(
            "metal", (32 * (step + 1), 2, 1), (32, 1, 1), 8, 16, 4, 2, 32, "float16", (-1,), items,
            {"expanded_rows": 40 + step, "expanded_sequences": 1 + step % 2} if step % 2 else {},
        )  # fmt: skip

    deno_page.open(launched(trace, launch_of))
    for step in range(0, len(trace), 3):
        if trace[step].chunks:
            caption = deno_page.table("kernel", step)["caption"]
            assert f"grid {32 * (step + 1)} × 2 × 1 threads" in caption
            words = f"latents expanded for {40 + step} query rows of 2 chunks"
            assert (words in caption) == bool(step % 2) == ("latents" in caption)


def test_a_plan_has_the_window_of_its_own_step(deno_page):
    """Launches without work items, of which every second one has a window."""
    trace = launched(run("plain 1")[0], lambda step: KernelLaunch("cpu", windows=(7 if step % 2 else -1,)))
    facts = Facts(trace)
    deno_page.open(trace)
    for step in steps_of(facts):
        items = items_of(facts, facts.records[step])
        assert [row[5:7] for row in deno_page.table("kernel", step)["rows"]] == [
            [low, high] for *_, low, high, _, _ in items
        ]


@pytest.mark.parametrize("name", [*RUNS, "crowd 0"])
def test_work_list(drawn, name):
    page, facts, colours = drawn(name)
    for step in steps_of(facts):
        record, rows, items = facts.records[step], rows_of(facts.records[step]), items_of(facts, facts.records[step])
        marks = Marks(page.painted("kernel", step)["marks"])
        if not items:
            assert marks.words() == ["No attention in this step."]
            continue
        recorded = bool(record.kernel and record.kernel.work_items)
        tile = record.kernel.block_q if recorded else 32
        row = max(2, min(14, 260 / len(items)))
        height = max(1, row - (2 if row > 4 else 0.5))
        bottom = 20 + len(items) * row
        ticks = [(x, words) for x, _, words in marks.texts(y=bottom + 10)]
        scale = (ticks[-1][0] - 156) / int(ticks[-1][1].replace(",", ""))
        assert [x for x, _ in ticks] == pytest.approx([156 + int(w.replace(",", "")) * scale for _, w in ticks])
        previous = None
        for i, (seq, _first, num, low, high, _split, splits) in enumerate(items):
            chunk, y = rows[seq][0], 20 + i * row
            bars = [rect for rect in marks.rects(y, height) if rect[0] == colours.of(chunk)]
            assert len(bars) == 2
            assert close(bars[0][1:4:2], [LEFT, max(1, 56 * num / tile)])
            assert close(bars[1][1:4:2], [156 + low * scale, max(1, (high - low) * scale - 1)])
            hatched = [rect for rect in marks.rects(y, height) if rect[0].startswith("pattern")]
            assert len(hatched) == (splits > 1 and height >= 6)
            idle = [frame for frame in marks.frames(LIGHT.hairline) if abs(frame[2] - y - 0.5) < 1e-6]
            assert len(idle) == (num < tile and height >= 4)
            if row >= 9:
                label = [words for x, at, words in marks.texts(x=76) if abs(at - y - height / 2) < 1e-6]
                assert label == ([chunk.request_id] if seq != previous else [])
            previous = seq
            check_item_hit(page, facts, record, y, i, items[i], chunk, tile)
        check_work_words(page, facts, record, rows, items, tile, recorded)
        for seq, (chunk, *_, end) in enumerate(rows):
            kv = [end // 3, max(end // 2, end // 3 + 1)]
            page("view.cursor.setHover(argument)", {"request": facts.order.index(chunk.request_id), "kv": kv})
            over = Marks(page.painted("kernel")["over"])
            readers = [
                (i, item) for i, item in enumerate(items) if item[0] == seq and item[3] < kv[1] and item[4] > kv[0]
            ]
            assert [frame[2] + 1 for frame in over.frames(LIGHT.cursor)] == [20 + i * row for i, _ in readers]
            for bar, (i, item) in zip(over.rects(colour=LIGHT.cursor), readers, strict=True):
                first, last = max(item[3], kv[0]), min(item[4], kv[1])
                place = [156 + first * scale, 20 + i * row, max(2, (last - first) * scale), max(1, row - 2)]
                assert close(bar[1:], place, 1e-4)
        page("view.cursor.setHover({ item: 0 })")
        (frame,) = Marks(page.painted("kernel")["over"]).frames(LIGHT.cursor)
        assert close(frame[1:], [LEFT - 2, 19, 1200 - LEFT - 8, row])
        page("view.cursor.setHover({})")


def check_item_hit(page, facts, record, y, i, item, chunk, tile):
    _, first, num, low, high, split, splits = item
    size = facts.groups[facts.shown_group].block_size
    ids = record.block_tables_by_group[chunk.request_id][facts.shown_group][low // size : -(-high // size)]
    assert page.hit("kernel", 300, y + 0.5) == [
        f"work item {i}: {chunk.request_id}",
        f"query rows [{first}, {first + num}), {num} of {tile} used",
        f"KV {span(low, high)}" + (f", split {split + 1} of {splits}" if splits > 1 else ""),
        f"{counted(len(ids), 'block')}: {' '.join(map(str, ids[:12]))}{' …' if len(ids) > 12 else ''}",
    ]
    assert page("view.panel('kernel').hit(300, argument).hover", y + 0.5) == {
        "request": facts.order.index(chunk.request_id), "item": i, "kv": [low, high],
    }  # fmt: skip


def bytes_words(value):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{float(f'{value / size:.3g}'):g} {unit}"
    return f"{round(value)} B"


def check_work_words(page, facts, record, rows, items, tile, recorded):
    window = facts.window_of(record)
    whole = [item for item in items if item[5] == 0]
    used, read = sum(item[2] for item in whole), sum(item[4] - item[3] for item in items)
    least = sum(end - (max(0, start - window + 1) if window else 0) for _, _, _, start, end in rows)
    words = page("view.panel('kernel').describe()")
    assert f"{counted(used, 'query row')} used, {grouped(len(whole) * tile - used)} idle" in words
    assert f"KV read {read / least:.2f} × the minimum" in words
    assert words.startswith(counted(len(items), "work item"))
    assert ("split over KV" in words) == any(item[6] > 1 for item in items)
    if recorded:
        per = 2 * record.kernel.num_kv_heads * record.kernel.head_dim * 2  # float16
        assert f", {bytes_words(read * per)} against {bytes_words(least * per)} per layer" in words
        assert "(measured, CPU)" in words
    table = page.table("kernel")
    assert table["rows"] == [
        [i, rows[seq][0].request_id, first, num, tile, low, high, f"{split + 1}/{splits}"]
        for i, (seq, first, num, low, high, split, splits) in enumerate(items)
    ]


@pytest.mark.parametrize("name", ["plain 1", "window_only 6", "hybrid_window 30", "hybrid_mamba 27"])
def test_the_group_that_is_drawn_has_its_name_if_there_are_several(drawn, name):
    page, facts, _ = drawn(name)
    step = next(step for step, record in enumerate(facts.records) if record.chunks)
    kind = group_words(facts.groups[facts.shown_group])
    words = f"Of {len(facts.groups)} KV cache groups this is group {facts.shown_group}: {kind}."
    for panel in ("packed", "rectangle", "kernel"):
        page.painted(panel, step)
        said = page(f"view.panel('{panel}').group?.textContent ?? ''")
        assert said == (words if len(facts.groups) > 1 else "")


def test_a_step_without_work_says_so(drawn):
    page, facts, _ = drawn("timed 2")
    assert not facts.records[0].chunks
    said = "Nothing was scheduled in this step."
    for panel, y, words in (("packed", 40, said), ("rectangle", 14, said), ("tables", 30, said), ("kernel", 10, None)):
        marks = Marks(page.painted(panel, 0)["marks"])
        assert marks.texts() == [(LEFT, y, words or "No attention in this step.")]


def test_the_runs_have_everything_that_a_batch_can_show():
    seen_, words = set(), set()
    for name in RUNS:
        facts = run(name)[1]
        for record in facts.records:
            for chunk in record.chunks:
                seen_ |= {chunk.arm, chunk.limited_by}
                found = {"ahead": chunk.ahead, "again": chunk.num_recomputed_tokens, "hit": chunk.num_cached_tokens}
                found |= {"accepted": chunk.num_accepted, "rejected": len(chunk.drafts) > chunk.num_accepted}
                words |= {word for word, value in found.items() if value}
            words |= {f"split {item.num_splits > 1}" for item in (record.kernel.work_items if record.kernel else ())}
            words |= {f"window {facts.window_of(record) > 0}"}
    assert {"decode", "new_final", "intermediate", "cached_final", "token_budget", "complete"} <= seen_
    assert words == {
        "ahead", "again", "hit", "accepted", "rejected", "split True", "split False", "window True", "window False"
    }  # fmt: skip
    assert digits(0.5) == "0.5"


@pytest.mark.parametrize("name", ["timed 3", "big 0"])
def test_threadgroups_of_a_shadow_launch(deno_page, name):
    """A row for each threadgroup: the blocks that it read, at their places in the sequence, and their bytes."""
    facts, rng = run(name)[1], random.Random(5)
    trace = copied(facts.trace)
    shown = [step for step in steps_of(facts, 5) if facts.records[step].chunks]
    launches = {step: add_shadow(trace, facts, step, rng) for step in shown}
    deno_page.open(trace)
    colours, size = Colours(facts.records), facts.groups[facts.shown_group].block_size
    for step, (items, groups) in launches.items():
        record, rows = facts.records[step], rows_of(facts.records[step])
        marks = Marks(deno_page.painted("kernel", step)["marks"])
        height = max(2, min(14, 260 / min(len(groups), 240)))
        bar = max(1, height - (2 if height > 4 else 0.5))
        ticks = [(x, words) for x, _, words in marks.texts(y=20 + min(len(groups), 240) * height + 10)]
        scale = (ticks[-1][0] - 156) / int(ticks[-1][1].replace(",", ""))
        for i, (position, blocks, read) in enumerate(groups[:240]):
            seq, first, num, low, high, split, splits = items[position[0]]
            chunk, y = rows[seq][0], 20 + i * height
            table = record.block_tables_by_group[chunk.request_id][facts.shown_group]
            bars = [rect for rect in marks.rects(y, bar) if rect[0] == colours.of(chunk)]
            expected = [
                (max(low, logical * size), min(high, logical * size + size))
                for logical, block in enumerate(table)
                if block in blocks and min(high, logical * size + size) > max(low, logical * size)
            ]
            assert close(bars[0][1:4:2], [LEFT, max(1, 56 * num / 8)])
            assert len(bars) == 1 + len(expected)
            for rect, (begin, end) in zip(bars[1:], expected):
                assert close(rect[1:4:2], [156 + begin * scale, max(1, (end - begin) * scale - 1)])
            if height >= 9:
                assert (1196, y + bar / 2, bytes_words(read)) in marks.texts()
            assert deno_page.hit("kernel", 300, y + 0.5) == [
                f"threadgroup ({', '.join(map(str, position))}): work item {position[0]}, {chunk.request_id}",
                f"query rows [{first}, {first + num}), {num} of 8 used",
                f"KV {span(low, high)}" + (f", split {split + 1} of {splits}" if splits > 1 else ""),
                f"{counted(len(blocks), 'block')} read, {bytes_words(read)} of K and V: "
                f"{' '.join(map(str, blocks[:12]))}{' …' if len(blocks) > 12 else ''}",
            ]
        words = deno_page("view.panel('kernel').describe()")
        assert words.startswith(f"{counted(len(groups), 'threadgroup')} for {counted(len(items), 'work item')}")
        assert "Metal kernel on layer 3" in words and "at most 1.2e-5, no faults" in words
        assert f", {bytes_words(sum(read for *_, read in groups))} against" in words
        assert (", the first 240 are drawn" in words) == (len(groups) > 240)
        table = deno_page.table("kernel")["rows"]
        for row, (position, blocks, read) in zip(table, groups, strict=True):
            seq, first, num, low, high, split, splits = items[position[0]]
            assert row == [
                f"({', '.join(map(str, position))})", position[0], rows[seq][0].request_id, first, num, 8, low, high,
                f"{split + 1}/{splits}", " ".join(map(str, blocks)), read,
            ]  # fmt: skip
        check_readers(deno_page, facts, groups)


def check_readers(page, facts, groups):
    """The pool says which threadgroups read a block, and a hovered block marks their rows."""
    block = groups[-1][1][0]
    readers = [position for position, blocks, _ in groups if block in blocks]
    page.painted("pool")
    x, y = block % 32 * 16 + 5, 46 + block // 32 * 16 + 5
    first = " ".join(f"({', '.join(map(str, position))})" for position in readers[:4])
    line = (
        f"read by {counted(len(readers), 'threadgroup')} of the Metal kernel: {first}{' …' if len(readers) > 4 else ''}"
    )
    assert line in page.hit("pool", x, y)
    assert facts.num_blocks > block
    page("view.panel('kernel').choice.value = 'items'")
    words = page("view.panel('kernel').layout(), view.panel('kernel').describe()")
    total = sum(read for *_, read in groups)
    assert f"{counted(len(groups), 'threadgroup')}, {bytes_words(total)} of KV read" in words
    page("view.panel('kernel').choice.value = 'threadgroups'")


def copied(trace, changed=lambda record: record):
    """The same run as another object, with each step as a function returns it."""
    other = Trace(trace.meta)
    for info in trace.requests.values():
        other.add_request(info)
    for record in trace:
        other.append(changed(record))
    return other


def launched(trace, launch_of):
    """The same run, whose steps with chunks have the launches of a function of their numbers."""
    return copied(trace, lambda record: replace(record, kernel=launch_of(record.step) if record.chunks else None))


def add_shadow(trace, facts, step, rng):
    """Add a shadow launch to a step: two threadgroups for each work item, which leave out some of its blocks."""
    record, size = facts.records[step], facts.groups[facts.shown_group].block_size
    items = [astuple(item) for item in launch(record, rng).work_items]
    groups = []
    for head in range(2):
        for index, (seq, _, _, low, high, *_) in enumerate(items):
            table = record.block_tables_by_group[record.chunks[seq].request_id][facts.shown_group]
            blocks = table[low // size : -(-high // size)]
            blocks = [block for block in blocks if rng.random() < 0.8] or blocks[:1]
            groups.append(((index, head, 0), blocks, 1000 * len(blocks) + index))
    total = sum(read for *_, read in groups)
    cache = {"k_cache": {"bytes_read": total - 7}, "v_cache": {"bytes_read": 7}}
    launched = {
        "threadgroups": len(groups),
        "buffers": cache,
        "kv_blocks": [(position, blocks) for position, blocks, _ in groups],
        "kv_bytes": [read for *_, read in groups],
    }
    found = {"layer": 3, "max_difference": 1.2e-5, "block_q": 8, "work_items": items, "launches": [launched]}
    trace.add_supplement(Supplement(record.step, "shadow", found))
    return items, groups
