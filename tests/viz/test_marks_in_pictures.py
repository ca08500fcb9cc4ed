"""Pictures and tables that Python draws, for notebooks and pages: every mark is a fact of the record."""

import dataclasses
import itertools
import math
import re
import xml.etree.ElementTree as ET
from html import unescape
from html.parser import HTMLParser

import pytest
from facts_of_records import Facts
from msgspec.structs import replace
from painted import close, counted
from runs_to_draw import COSTS, RUNS, run, steps_of
from test_marks_of_batches import WORDS, limit
from test_marks_of_steps import tokens
from viz_traces import pictures

from workbench import simulate
from workbench.trace import Trace
from workbench.trace.readings.narrate import shown
from workbench.trace.records import StepRecord
from workbench.viz import svg
from workbench.viz.layout.incident import incident_facts
from workbench.viz.layout.pool import pool_columns
from workbench.viz.palette import EVENT_MARKS
from workbench.viz.reprs import step_html, trace_html

LEFT, SPACE = 96, 652


class Drawing:
    """The parts of an SVG."""

    def __init__(self, source):
        self.root = ET.fromstring(re.sub(' xmlns="[^"]*"', "", source))
        numbers = ("x", "y", "width", "height")
        self.rects = [
            ([float(part.get(name)) for name in numbers], part.get("class"), self.title(part))
            for part in self.root.iter("rect")
            if part.get("x")
        ]
        self.texts = [
            (float(part.get("x")), float(part.get("y")), part.get("class"), part.text)
            for part in self.root.iter("text")
        ]
        self.polygons = [
            ([tuple(map(float, pair.split(","))) for pair in part.get("points").split()], part.get("class"),
             self.title(part))
            for part in self.root.iter("polygon")
        ]  # fmt: skip
        self.paths = [(part.get("d"), part.get("class"), part.get("fill"), self.title(part)) for part in
                      self.root.iter("path")]  # fmt: skip

    @staticmethod
    def title(part):
        return next((child.text for child in part.iter("title")), "")

    def at(self, y):
        return [rect for rect in self.rects if abs(rect[0][1] - y) < 0.06]


def focus_of(record):
    """The first six scheduled requests, but for one: it has no hue."""
    names = [chunk.request_id for chunk in record.chunks]
    return {name: slot for slot, name in enumerate(names[1:7])}


def fill(chunk, focus):
    phase = "decode" if chunk.arm == "decode" else "prefill"
    return f"{phase} hue{focus[chunk.request_id]}" if chunk.request_id in focus else phase


def shorten(words, most):
    return words if len(words) <= most else words[: most - 1] + "…"


def placed(record):
    at, found = 0, []
    for chunk in record.chunks:
        start = chunk.start - chunk.ahead
        found.append((chunk, at, at + chunk.num_tokens, start, start + chunk.num_tokens))
        at += chunk.num_tokens
    return found


def row_label(chunk, q0, q1):
    rows = "1 row" if q1 - q0 == 1 else f"{q1 - q0} rows"
    return f"q[{q0}, {q1})  {rows}  kv {chunk.start - chunk.ahead} → {chunk.start - chunk.ahead + chunk.num_tokens}"


@pytest.mark.parametrize("name", RUNS)
def test_packed_batch(name):
    facts = run(name)[1]
    for step in steps_of(facts):
        record, rows = facts.records[step], placed(facts.records[step])
        focus, source = focus_of(record), svg.packed_batch(record, focus_of(record))
        if not rows:
            assert source == ""
            continue
        drawing, total = Drawing(source), rows[-1][2]
        budget = max(record.token_budget, total)
        label = f"Packed batch of step {record.step}: {len(rows)} sequences, {total} rows"
        assert drawing.root.get("aria-label") == label
        slack, *bars = drawing.at(6)
        assert close(slack[0], [LEFT, 6, SPACE, 14], 0.06) and slack[1] == "slack"
        unused = [words for *_, words in drawing.texts if words.endswith("unused")]
        assert unused == ([f"{budget - total} of {budget} unused"] if budget > total else [])
        for (place, classes, title), (chunk, q0, q1, *_) in zip(bars, rows, strict=True):
            left, wide = LEFT + q0 / budget * SPACE, (q1 - q0) / budget * SPACE
            assert close(place, [left, 6, max(wide, 0.5), 14], 0.06)
            assert classes == fill(chunk, focus)
            words = f"{chunk.request_id}: {WORDS[chunk.arm]}, {row_label(chunk, q0, q1)}, {limit(chunk)}"
            assert title == words
        heads = [(LEFT - 8, 16, "to scale"), (LEFT - 8, 52, "readable"), (LEFT - 8, 69, "cu_seqlens_q")]
        assert [(x, y, words) for x, y, _, words in drawing.texts if (x, y, words) in heads] == heads
        assert [0, *(q1 for _, _, q1, *_ in rows)] == list(record.cu_seqlens_q)
        check_readable(drawing, rows, focus)
        check_against_kv(drawing, rows, focus, facts.window_of(record))


def check_readable(drawing, rows, focus):
    sizes = [q1 - q0 for _, q0, q1, *_ in rows]
    floor, x, edges = min(22, SPACE / len(sizes)), LEFT, [0]
    places = {0: LEFT}
    for (place, classes, title), (chunk, q0, q1, *_), size in zip(drawing.at(42), rows, sizes, strict=True):
        wide = floor + (SPACE - floor * len(sizes)) * size / sum(sizes)
        assert close(place, [x, 42, max(0.5, wide - 1), 16], 0.06) and classes == fill(chunk, focus)
        assert row_label(chunk, q0, q1) in title
        x += wide
        edges.append(q1)
        places[q1] = x
    check_edges(drawing, edges, places)


def check_edges(drawing, edges, places):
    """cu_seqlens_q at its places: first and last edge always, and each other one that has room for its digits."""
    found = [(left, int(words)) for left, y, classes, words in drawing.texts if y == 69 and classes == "number"]
    shown = [edge for _, edge in found]
    assert shown == sorted(shown) and shown[0] == 0 and shown[-1] == edges[-1] and set(shown) <= set(edges)
    assert all(abs(left - places[edge]) < 0.06 for left, edge in found)
    # The last one ends at its place, all others begin there.
    spans = {edge: (left, left + 6 * len(str(edge))) for left, edge in found[:-1]}
    spans[shown[-1]] = (found[-1][0] - 6 * len(str(shown[-1])), found[-1][0])
    assert all(spans[b][0] - spans[a][1] >= 8 - 0.06 for a, b in itertools.pairwise(shown))
    for edge in set(edges) - set(shown):
        left, right = places[edge], places[edge] + 6 * len(str(edge))
        assert any(left < end + 8.1 and right > begin - 8.1 for begin, end in spans.values()), "there was room"


def check_against_kv(drawing, rows, focus, window):
    scale = (SPACE - 220) / max(16, *(end for *_, end in rows))
    kv = [rect for rect in drawing.rects if rect[1] == "kv"]
    assert len(kv) == sum(start > 0 for *_, start, _ in rows[:32])
    for i, (chunk, q0, q1, start, end) in enumerate(rows[:32]):
        y, after = 84 + 18 * i, LEFT + end * scale
        names = [words for x, at, _, words in drawing.texts if (x, at) == (LEFT - 8, y + 11)]
        assert names == [shorten(chunk.request_id, 12)]
        if start:
            (bar,) = [rect for rect in kv if abs(rect[0][1] - y - 3) < 0.06]
            seen = max(0, start - window + 1) if window else 0
            assert close(bar[0], [LEFT + seen * scale, y + 3, max(0.5, (start - seen) * scale), 10], 0.06)
        label = [words for x, at, _, words in drawing.texts if at == y + 11 and abs(x - after - 12) < 0.06]
        assert label == [row_label(chunk, q0, q1)]
        hue = f"prefill hue{focus[chunk.request_id]}" if chunk.request_id in focus else "prefill"
        if chunk.arm == "decode":
            (path,) = [path for path in drawing.paths if re.match(rf"M[\d.]+ {y + 2}l", path[0])]
            assert abs(float(path[0][1:].split()[0]) - after) < 0.06 and path[1] == f"{hue} outlined"
        else:
            (shape,) = [shape for shape in drawing.polygons if y <= shape[0][0][1] < y + 17]
            before = LEFT + start * scale
            corners = [(before, y + 3), (before + scale, y + 3), (after, y + 13), (before, y + 13)]
            assert all(close(a, b, 0.06) for a, b in zip(shape[0], corners, strict=True)) and shape[1] == hue


@pytest.mark.parametrize("name", RUNS)
def test_attention_mask(name):
    """The names of the bands; their shapes are compared cell by cell elsewhere."""
    facts = run(name)[1]
    for step in steps_of(facts):
        record, rows, focus = facts.records[step], placed(facts.records[step]), focus_of(facts.records[step])
        source = svg.mask(record, focus)
        if not rows:
            assert source == ""
            continue
        drawing, columns, expected = Drawing(source), sum(end for *_, end in rows), []
        at = 0
        for chunk, q0, q1, _, end in rows:
            title = f"{chunk.request_id}: rows {q0} to {q1 - 1}, columns {at} to {at + end - 1}"
            expected.append((fill(chunk, focus), title))
            at += end
        assert [(classes, title) for _, classes, title in drawing.polygons] == expected
        down = min(12, 240 / rows[-1][2])
        names = [
            (LEFT - 8, pytest.approx((q0 + q1) / 2 * down + 4, abs=0.06), shorten(chunk.request_id, 12))
            for chunk, q0, q1, *_ in rows
            if (q1 - q0) * down >= 9
        ]
        assert [(x, y, words) for x, y, _, words in drawing.texts] == names
        size = f"{rows[-1][2]} rows, {columns} KV positions, block-diagonal, causal"
        assert drawing.root.get("aria-label") == f"Attention mask of step {record.step}: {size}"


@pytest.mark.parametrize("name", RUNS)
def test_block_tables(name):
    facts = run(name)[1]
    for step in steps_of(facts):
        record, focus = facts.records[step], focus_of(facts.records[step])
        source = svg.block_tables(record, focus)
        rows = [(chunk, group) for chunk in record.chunks for group in range(len(facts.groups))][:32]
        if not rows:
            assert source == ""
            continue
        drawing = Drawing(source)
        assert drawing.root.get("aria-label") == f"Block tables of step {record.step}"
        for i, (chunk, group) in enumerate(rows):
            check_table(drawing, 18 * i, record, chunk, group, focus, facts)


def check_table(drawing, y, record, chunk, group, focus, facts):
    table = record.block_tables_by_group[chunk.request_id][group]
    added = [chunk.new_block_ids, *(change.new_block_ids for change in chunk.other_groups)]
    num_new = len(added[group]) if group < len(added) else 0
    fits = int((760 - LEFT - 60) / 27)
    names = [(words, classes) for x, at, classes, words in drawing.texts if (x, at) == (LEFT - 8, y + 12)]
    assert names == [(f"group {group}", "muted") if group else (shorten(chunk.request_id, 12), "number")]
    cut = len(table) > fits
    shown_ = [(n, n) for n in range(len(table))]
    if cut:
        shown_ = [(n, n) for n in range(fits - 9)] + [(fits - 8 + n, len(table) - 8 + n) for n in range(8)]
        assert any(
            abs(x - LEFT - (fits - 9) * 27 - 12.5) < 0.06 and w == "…" for x, at, _, w in drawing.texts if at == y + 11
        )
    here = drawing.at(y + 1)
    size, num_kv = facts.groups[group].block_size, chunk.start - chunk.ahead + chunk.num_tokens
    is_shown = group == facts.shown_group and facts.groups[group].is_attention
    expected = []
    for place, logical in shown_:
        block, x = table[logical], LEFT + place * 27
        if not block:
            expected.append(([x, y + 1, 25, 14], "hole", f"logical block {logical}, not held"))
            continue
        filled = min(size, max(0, num_kv - logical * size)) / size if is_shown else 1.0
        hue = f"prefill hue{focus[chunk.request_id]}" if chunk.request_id in focus else "owned"
        new = " new" if logical >= len(table) - num_new else ""
        expected.append(([x, y + 1, 25, 14], "kv", ""))
        title = f"logical block {logical}, physical block {block}"
        expected.append(([x, y + 1, max(0.5, 25 * filled), 14], hue + new, title))
        ink = [(w, c) for left, at, c, w in drawing.texts if at == y + 11.5 and abs(left - x - 12.5) < 0.06]
        on = f"label on{focus[chunk.request_id]}" if chunk.request_id in focus else "label on"
        assert ink == [(str(block), "label" if filled < 0.6 else on)]
    assert [(classes, title) for _, classes, title in here] == [(classes, title) for _, classes, title in expected]
    assert all(close(a[0], b[0], 0.06) for a, b in zip(here, expected))
    end = LEFT + min(len(table), fits) * 27 + 6
    words = [w for x, at, _, w in drawing.texts if at == y + 12 and abs(x - end) < 0.06]
    used = min(size, max(0, num_kv - (len(table) - 1) * size))
    assert words == ([f"{used}/{size}"] if is_shown and table else [])


def test_a_long_table_is_cut_in_the_middle():
    requests = [{"id": "a", "prompt": {"len": 700}, "max_tokens": 3}]
    trace = simulate({"config": {"block_size": 16, "num_blocks": 99}, "requests": requests})
    facts = Facts(trace)
    for record in facts.records:
        check_table(Drawing(svg.block_tables(record, {})), 0, record, record.chunks[0], 0, {}, facts)
    exact = simulate({"config": {"num_blocks": 99}, "requests": [{"id": "a", "prompt": {"len": 352}, "max_tokens": 1}]})
    facts = Facts(exact)
    check_table(Drawing(svg.block_tables(exact[0], {})), 0, exact[0], exact[0].chunks[0], 0, {}, facts)
    assert "…" not in svg.block_tables(exact[0], {})
    many = [{"id": f"request-{i}", "prompt": {"len": 2}, "max_tokens": 3} for i in range(50)]
    trace = simulate({"config": {"max_num_seqs": 64, "num_blocks": 200}, "requests": many})
    drawing = Drawing(svg.packed_batch(trace[1], {}))
    assert "and 18 more sequences" in [words for *_, words in drawing.texts]
    assert not any("more" in words for *_, words in Drawing(svg.packed_batch(facts.records[0], {})).texts)
    assert len({at for _, at, classes, _ in drawing.texts if classes == "number" and at > 84}) == 32


@pytest.mark.parametrize(
    ("name", "first", "at"), [(name, 0, 5) for name in RUNS] + [("timed 3", 7, 9), ("plain 1", 20, 50)]
)
def test_timeline(name, first, at):
    facts = run(name)[1]
    records = facts.records[first:]
    numbers = [record.step for record in records]
    stalls = {numbers[2]: "it stood still", numbers[-1] + 5: "not here"}
    drawing = Drawing(svg.timeline(records, at=at, stalls=stalls))
    assert re.match(rf"Tokens of steps {numbers[0]} to {numbers[-1]}(;|$)", drawing.root.get("aria-label"))
    high, budget = max(1, *(tokens(record)[1] for record in records)), max(1, *(r.token_budget for r in records))
    budget = max(budget, high)
    top = budget if 4 * high >= budget else high
    too_high = f"the budget of {budget} is higher than the picture"
    assert (too_high in [words for *_, words in drawing.texts]) == (top < budget)
    assert (LEFT - 8, 18.0, "number muted", str(top)) in drawing.texts
    wide, expected = SPACE / len(records), []
    gap = 1 if wide > 4 else 0
    for i, record in enumerate(records):
        decode, total = tokens(record)
        slack = min(max(0, record.token_budget - total), top - total)
        title = f"step {record.step}: {total - decode} prefill, {decode} decode tokens"
        x, y = LEFT + i * wide, 78
        for count, below, kind in ((slack, total, "slack"), (total - decode, decode, "prefill"), (decode, 0, "decode")):
            if count or kind == "slack":
                bottom, height = y - below * 64 / top, count * 64 / top
                expected.append(([x, bottom - height, max(0.5, wide - gap), height], kind, title))
        if record.step == at:
            expected.append(([x - 1, 4, wide + 1, 78], "cursor", ""))
    assert [(rect[1], rect[2]) for rect in drawing.rects] == [(rect[1], rect[2]) for rect in expected]
    assert all(close(a[0], b[0], 0.11) for a, b in zip(drawing.rects, expected))
    check_marks(drawing, facts, first, numbers, stalls)


def check_marks(drawing, facts, first, numbers, stalls):
    def x(step):
        return LEFT + (step - numbers[0] + 0.5) / len(numbers) * SPACE

    expected = []
    for kind in ("finish", "admit", "resume", "preempt", "abort"):
        for step in range(first, len(facts)):
            if any(event == kind for _, event, *_ in facts.events(step)):
                number = facts.records[step].step
                expected.append(
                    (x(number), 8 if kind == "finish" else 2, EVENT_MARKS[kind][1], f"{kind} in step {number}")
                )
    found = []
    for path, classes, colour, title in drawing.paths:
        left, y = re.match(r"M([\d.]+) (\d+)", path).groups()
        if classes != "stall" and int(y) < 90:
            found.append((float(left), int(y), colour, title))
    assert [mark[1:] for mark in found] == [mark[1:] for mark in expected]
    assert close([mark[0] for mark in found], [mark[0] for mark in expected], 0.06)
    words = {"admit": "admitted", "resume": "resumed", "preempt": "preempted", "finish": "finished", "abort": "aborted"}
    seen = [kind for kind in words if any(title.startswith(kind) for *_, title in expected)]
    legend = {float(left): said for left, y, _, said in drawing.texts if y == 110}
    assert list(legend.values()) == ["requests:", *(words[kind] for kind in seen)] * bool(seen)
    for kind, left in zip(seen, sorted(legend)[1:]):
        places = [(path, colour) for path, _, colour, title in drawing.paths if " 102" in path and not title]
        assert any(
            path.startswith(f"M{left - 8:.1f} 102") and colour == EVENT_MARKS[kind][1] for path, colour in places
        )
    lines = [(path, title) for path, classes, _, title in drawing.paths if classes == "stall"]
    assert [title for _, title in lines] == ["stall: it stood still"]
    assert abs(float(lines[0][0][1:].split()[0]) + 1 - x(min(stalls))) < 0.06
    ticks = [(left, int(words)) for left, y, _, words in drawing.texts if y == 92 and words.isdigit()]
    assert all(abs(left - x(number - 0.5)) < 0.06 for left, number in ticks) and ticks


@pytest.mark.parametrize("count", [162, 163])
def test_bars_of_more_than_four_pixels_have_gaps(count):
    requests = [{"id": "a", "prompt": {"len": 9}, "max_tokens": 165}, {"id": "b", "prompt": {"len": 9}}]
    records = list(simulate({"requests": requests}))[:count]
    assert len(records) == count
    wide = {place[2] for place, kind, _ in Drawing(svg.timeline(records)).rects if kind == "decode"}
    assert wide == {round(SPACE / count - (count == 162), 1)}
    assert svg.timeline([]) == ""


def test_a_long_timeline_shows_means_of_equal_parts():
    requests = [
        {"id": f"r{i}", "prompt": {"len": 9 + i % 30}, "max_tokens": 20, "arrival_step": 9 * i} for i in range(90)
    ]
    records = list(simulate({"requests": requests, "config": {"max_num_batched_tokens": 64}}))
    assert len(records) > 640
    size = math.ceil(len(records) / 320)
    drawing = Drawing(svg.timeline(records, at=400))
    parts = [records[i : i + size] for i in range(0, len(records), size)]
    titles = []
    for part in parts:
        decode = sum(tokens(record)[0] for record in part) / len(part)
        total = sum(tokens(record)[1] for record in part) / len(part)
        titles.append(f"step {part[0].step}: {total - decode:g} prefill, {decode:g} decode tokens")
    assert [title for _, kind, title in drawing.rects if kind == "slack"] == titles
    (cursor,) = [place for place, kind, _ in drawing.rects if kind == "cursor"]
    assert abs(cursor[0] + 1 - LEFT - 400 // size * SPACE / len(parts)) < 0.11


@pytest.mark.parametrize("name", RUNS)
def test_pool(name):
    trace, facts = run(name)
    for step in steps_of(facts, 6):
        moment, state = facts[step], trace.pool_state(step)
        focus = {who: slot for slot, who in enumerate(list(moment.tables)[1:7])}
        drawing = Drawing(svg.pool(state, focus))
        columns = 32
        while columns**2 < facts.num_blocks and columns < 512:
            columns *= 2
        cell, found = min(14, 756 / columns), {}
        for (x, y, wide, _), classes, title in drawing.rects:
            begin, row = round((x - 2) / cell), round((y - 2) / cell)
            blocks = range(row * columns + begin, row * columns + begin + round((wide + 1) / cell))
            words = f"blocks {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"
            assert title == words
            for block in blocks:
                assert block not in found
                found[block] = classes
        expected = {0: "reserved"}
        for block in range(1, facts.num_blocks):
            expected[block] = moment.pool_state(block)
            owner = moment.holders.get(block, [""])[0]
            if owner in focus:
                expected[block] = f"prefill hue{focus[owner]}"
        assert found == expected
        held, kept = len(moment.holders), len(moment.cached)
        label = f"KV pool: {held} in use, {kept} cached, of {facts.num_blocks - 1} blocks"
        assert drawing.root.get("aria-label") == label


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "shown", "columns"),
    [
        (5000, 900, 256, 32),
        (5000, 40_000, 4096, 64),
        (5000, 70_000, 5000, 128),
        (2048, 900, 256, 32),
        (2047, 900, 2047, 64),
    ],
)
def test_a_large_pool_ends_behind_its_used_blocks(num_blocks, num_tokens, shown, columns):
    config = {"num_blocks": num_blocks, "max_num_batched_tokens": num_tokens, "max_model_len": num_tokens + 1}
    trace = simulate({"config": config, "requests": [{"id": "a", "prompt": {"len": num_tokens}, "max_tokens": 1}]})
    drawing = Drawing(svg.pool(trace.pool_state(0), {"a": 0}))
    assert len({round(place[1], 1) for place, *_ in drawing.rects}) == math.ceil(shown / columns)
    ids = [[int(word) for word in title.split() if word.isdigit()] for _, _, title in drawing.rects]
    assert [n for pair in ids for n in range(pair[0], pair[-1] + 1)] == list(range(shown))
    hued = [pair for (_, classes, _), pair in zip(drawing.rects, ids) if classes == "prefill hue0"]
    assert sum(pair[-1] - pair[0] + 1 for pair in hued) == math.ceil(num_tokens / 16)
    left_out = f"blocks {shown:,} to {num_blocks - 1:,} are free, and left out"
    assert (left_out in [words for *_, words in drawing.texts]) == (shown < num_blocks)


# -- tables --------------------------------------------------------------------------------------------------------


class Tables(HTMLParser):
    """The cells of each table, and the texts between them."""

    def __init__(self, html):
        super().__init__()
        self.tables, self.words, self.inside = [], [], ""
        self.feed(re.sub(r"<style>.*?</style>", "", html))

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif data.strip():
            self.words.append(data)


def span(first, stop):
    return f"{first} to {stop - 1}" if stop - first > 1 else str(first)


@pytest.mark.parametrize("name", RUNS)
def test_a_step_in_a_notebook(name):
    facts = run(name)[1]
    for step in steps_of(facts, 6):
        record, found = facts.records[step], Tables(step_html(facts.records[step]))
        decode, total = tokens(record)
        of = f"{total} of {record.token_budget}" if record.token_budget else str(total)
        said = [
            f"{of} tokens: {total - decode} prefill, {decode} decode",
            f"{len(record.running)} running, {len(record.waiting)} waiting",
            f"{counted(record.free_blocks, 'block')} free after scheduling, {record.free_blocks_end} at the end",
        ]
        if record.timings:
            said.append(" · ".join(f"{what} {took * 1e3:.3g} ms" for what, took in record.timings.items()))
        facts_line = found.words[1]
        assert found.words[0] == f"Step {record.step}" and facts_line.startswith(". ".join(said))
        if record.kernel:
            assert facts_line.endswith(f"{counted(len(record.kernel.work_items), 'work item')}.")
        else:
            assert facts_line == ". ".join(said) + "."
        expected, window, several = [], facts.window_of(record), len(facts.groups) > 1
        reads = f"the {window:,} positions up to its own" if window else "positions 0 to its own"
        if record.chunks:
            expected.append([
                [shorten(chunk.request_id, 40), WORDS[chunk.arm], span(q0, q1),
                 f"{chunk.start} → {chunk.start + q1 - q0}",
                 f"{reads}, {span(chunk.start - chunk.ahead, chunk.start - chunk.ahead + q1 - q0)}"]
                for chunk, q0, q1, *_ in placed(record)[:32]
            ])  # fmt: skip
        if events := facts.events(step):
            said = any(why for *_, why in events)
            expected.append([[str(number), kind, who, why][: 3 + said] for number, kind, who, why in events])
        if record.waiting:
            waits = [(who, record.passed_over.get(who, record.waiting_reason)) for who in record.waiting]
            expected.append([[who, shown(why) if why else "the record does not say why"] for who, why in waits][:20])
        tables = [rows[1:] for rows in found.tables]
        assert len(tables) == len(expected)
        for rows, wanted in zip(tables, expected):
            assert [row[:2] for row in rows] == [row[:2] for row in wanted] or len(wanted[0]) == 2
            assert rows == wanted or "does not say" in wanted[0][1]
        kind = f"window {window:,}" if window else "full attention"
        whose = f" of group {facts.shown_group} ({kind}) of {len(facts.groups)} KV cache groups"
        assert (f"Attention mask{whose}" in found.words) == bool(several and record.chunks)
        headings = [word.removesuffix(whose) for word in found.words]
        headings = [word for word in headings if word in ("Packed batch", "Attention mask", "Block tables", "Events")]
        drawn_ = ["Packed batch", "Attention mask", "Block tables"] if record.chunks else []
        assert headings == drawn_ + (["Events"] if events else [])
        assert ("Not scheduled" in found.words) == bool(record.waiting)
        assert len(pictures(step_html(record))) == len(drawn_)


def test_an_end_without_a_reason_has_none_in_the_table():
    record = StepRecord(7, finished=("a",), preempted=("b",))
    assert Tables(step_html(record)).tables == [
        [["step", "event", "request"], ["7", "preempt", "b"], ["7", "finish", "a"]]
    ]


@pytest.mark.parametrize("name", [*RUNS, "many 0"])
def test_a_trace_in_a_notebook(name):
    trace, facts = run(name)
    html = trace_html(trace)
    found = Tables(html)
    rows = [
        [shorten(who, 40), str(facts.trace.requests[who].num_prompt_tokens), str(len(facts[-1].tokens[who])),
         shorten(facts.trace.requests[who].prompt, 80), shorten("".join(t.text for t in facts[-1].tokens[who]), 600)]
        for who in facts.order[-24:]
    ]  # fmt: skip
    kept = [i for i in range(5) if i < 3 or any(row[i] for row in rows)]
    assert found.tables[-1][1:] == [[row[i] for i in kept] for row in rows]
    names = ["request", "prompt tokens", "tokens", "prompt", "text"]
    assert found.tables[-1][0] == [names[i] for i in kept]
    hidden = f"The last 24 of {len(facts.order)} requests."
    assert (hidden in found.words) == (len(facts.order) > 24)
    assert found.words[0] == trace.meta.source and unescape(found.words[1]) == repr(trace)


@pytest.mark.parametrize("count", [24, 25])
def test_a_table_of_24_requests_has_all(count):
    requests = [{"id": f"r{i}", "prompt": {"len": 9}, "max_tokens": 1} for i in range(count)]
    found = Tables(trace_html(simulate({"requests": requests})))
    assert [row[0] for row in found.tables[-1][1:]] == [f"r{i}" for i in range(count - 24, count)]
    assert any(words.startswith("The last ") for words in found.words) == (count > 24)


# -- the Bokeh figure ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain 1", "timed 3", "spec 16", "async_spec 16"])
def test_bokeh_figure(name):
    from workbench.viz.palette import FOCUS_HUES, LIGHT

    trace, facts = run(name)
    above, below = trace.figure().children
    bars, dots = [renderer for renderer in above.renderers], [renderer for renderer in below.renderers]
    data = {key: [float(v) for v in values] for key, values in bars[0].data_source.data.items()}
    totals = [tokens(record) for record in facts.records]
    assert data["step"] == [record.step for record in facts.records]
    assert data["decode"] == [decode for decode, _ in totals] and data["top"] == [total for _, total in totals]
    assert data["prefill"] == [total - decode for decode, total in totals]
    assert [(bar.glyph.top, bar.glyph.bottom, bar.glyph.x, bar.glyph.fill_color) for bar in bars] == [
        ("decode", 0, "step", LIGHT.decode), ("top", "decode", "step", LIGHT.prefill)
    ]  # fmt: skip
    assert [item.label.value for item in above.legend[0].items] == ["decode", "prefill"]
    latencies = {who: [] for who in facts.order}
    for step in range(len(facts)):
        for who, (is_first, value) in facts.latencies(step).items():
            latencies[who].append((is_first, value))
    answered = [who for who in facts.order if latencies[who]]
    found = dots[0].data_source.data
    assert list(found["request"]) == answered and list(found["place"]) == list(range(len(answered)))
    assert list(found["first"]) == pytest.approx([latencies[who][0][1] for who in answered])
    gaps = []
    for who in answered:
        more = [value for is_first, value in latencies[who] if not is_first]
        together = len(facts[-1].tokens[who]) > 1
        gaps.append(max(more) if more else 0.0 if together else math.nan)
    assert list(found["gap"]) == pytest.approx(gaps, nan_ok=True)
    assert [(dot.glyph.x, dot.glyph.y, dot.glyph.fill_color) for dot in dots] == [
        ("place", "first", FOCUS_HUES[0]), ("place", "gap", FOCUS_HUES[5])
    ]  # fmt: skip
    assert [item.label.value for item in below.legend[0].items] == ["first token after", "longest pause"]
    assert below.yaxis[0].axis_label == ("seconds" if facts.timed else "steps")
    fields = [tip[1] for tip in [*above.hover[0].tooltips, *below.hover[0].tooltips]]
    assert fields == ["@step", "@prefill", "@decode", "@request", "@first", "@gap"]
    steps = [record.step for record in facts.records]
    from workbench.viz.cursor import cursor_of

    bars[0].data_source.selected.indices = [7, 4, 5]
    assert (cursor_of(trace).step, cursor_of(trace).follow) == (steps[4], False)
    from workbench.viz.cursor import Cursor
    from workbench.viz.figures import metrics_figure

    own = Cursor()
    mine = metrics_figure(trace.metrics(), cursor=own).children[0].renderers[0].data_source
    mine.selected.indices = [2]
    assert own.step == steps[2] and cursor_of(trace).step == steps[4]
    # Metrics of several traces together have no cursor to move.
    alone = metrics_figure(dataclasses.replace(trace.metrics(), trace=None)).children[0].renderers[0].data_source
    alone.selected.indices = [2]
    assert cursor_of(trace).step == steps[4]


def test_sizes_at_which_a_picture_changes():
    """A pool of as many blocks as it has cells, the largest one, and a budget that is just not too high to be drawn."""
    expected = {1: 32, 1024: 32, 1025: 64, 4096: 64, 4097: 128, 262_144: 512, 262_145: 512, 2_000_000: 512}
    assert {size: pool_columns(size) for size in expected} == expected
    for length, is_drawn in ((4, True), (3, False)):
        requests = [{"id": "a", "prompt": {"len": length}, "max_tokens": 1}]
        records = list(simulate({"config": {"max_num_batched_tokens": 16, "max_num_seqs": 2}, "requests": requests}))
        words = [words for *_, words in Drawing(svg.timeline(records)).texts]
        assert ("the budget of 16 is higher than the picture" in words) != is_drawn
        assert str(16 if is_drawn else length) in words


def test_a_trace_without_tokens_yet_has_their_column():
    requests = [{"id": "a", "prompt": {"len": 90}, "max_tokens": 1}]
    trace = simulate({"config": {"max_num_batched_tokens": 16}, "requests": requests}, max_steps=2)
    assert Tables(trace_html(trace)).tables[-1] == [["request", "prompt tokens", "tokens"], ["a", "90", "0"]]


def test_a_stall_is_marked_in_its_step():
    planted, late = 30, 4.0
    requests = [{"id": f"r{i}", "prompt": {"len": 30 + i}, "max_tokens": 200, "arrival_step": 2 * i} for i in range(8)]
    smooth = simulate({"requests": requests, "cost_model": COSTS})
    trace = Trace(replace(smooth.meta, source="engine"))
    for info in smooth.requests.values():
        trace.add_request(info)
    for record in smooth:
        moved = record.time + late * (record.step > planted), record.end + late * (record.step >= planted)
        trace.append(replace(record, time=moved[0], end=moved[1], timings={"forward": moved[1] - moved[0]}))
    trace.end = smooth.end
    html = trace_html(trace)
    drawing = Drawing(pictures(html)[0])
    ((path, title),) = [(path, title) for path, classes, _, title in drawing.paths if classes == "stall"]
    assert abs(float(path[1:].split()[0]) + 1 - LEFT - (planted + 0.5) / len(trace) * SPACE) < 0.06
    assert f"step {planted}" in title and title in Tables(html).words
    ((step, words, excess),) = incident_facts(trace)["stalls"]
    assert excess > 0.9 * late
    assert step == planted and title == f"stall: {words}"
