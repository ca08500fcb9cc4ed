"""The KV pool, drawn by the code that browsers run: every cell is a fact of the record."""

from base64 import b64encode

import pytest
from facts_of_records import holders_in_words
from painted import LIGHT, Marks, close, counted, grouped, span
from runs_to_draw import RUNS, run, steps_of
from test_marks_of_batches import group_words
from viz_traces import ReplayingController

from workbench import simulate
from workbench.viz.feed import Feed

NAMES = {"free": "free", "cached": "cached, evictable", "owned": "in use"}


def channels(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)] + [255]


def place_of(moment, groups, block):
    """The first table that holds a block, in order of arrival and group: request, group, logical block."""
    for name in moment.tables:
        for group in range(len(groups)):
            if block in moment.tables[name][group]:
                return name, group, moment.tables[name][group].index(block)
    return None


def next_evicted(moment):
    """The cached block that is first in the queue of free blocks; None without one."""
    return next((block for block in moment.queue if block in moment.cached), None)


class Picture:
    """The places of the picture by its definition."""

    def __init__(self, facts, width):
        self.columns = 32
        while self.columns**2 < facts.num_blocks and self.columns < 512:
            self.columns *= 2
        self.rows = -(-facts.num_blocks // self.columns)
        self.cell = max(1, min(16, (width - 2) / self.columns))
        self.blocks_of_rows = [min(self.columns, facts.num_blocks - row * self.columns) for row in range(self.rows)]
        lines = -(-len(facts.groups) // max(1, width // 240))
        self.legend_ends = 28 if width > 400 else 46  # "changed in this step" is on a second line
        self.top = self.legend_ends + 18 + (18 * lines if len(facts.groups) > 1 else 0)

    def xy(self, block):
        return block % self.columns * self.cell, self.top + block // self.columns * self.cell


CASES = [(name, width) for name in RUNS for width in (1200, 390)] + [
    ("plain 1", 200), ("hybrid_window 30", 200), ("hybrid_window 30", 162), ("hybrid_window 30", 120),
    ("hybrid_mamba 27", 120), ("pool 11", 1200), ("pool 11", 390), ("pool 32", 1200), ("pool 33", 1200),
    ("pool 40", 390), ("pool 64", 1200),
]  # fmt: skip


@pytest.mark.parametrize(("name", "width"), CASES)
def test_pool(drawn, name, width):
    page, facts, colours = drawn(name, width=width)
    picture = Picture(facts, width)
    for step in steps_of(facts):
        moment = facts[step]
        marks = Marks(page.painted("pool", step)["marks"])
        check_counts(page, marks, facts, moment, width)
        changed = [(x, y) for x, y, words in marks.texts() if words == "changed in this step"]
        assert [y for _, y in changed] == [picture.legend_ends - 2.5]
        (named,) = [(x, y) for x, y, words in marks.texts() if words == "evicted next"]
        assert named == (changed[0][0] + 6 * len("changed in this step") + 30, changed[0][1])
        assert [picture.legend_ends - 7.25] == [y for _, x, y, *_ in marks.frames(LIGHT.outline) if y < picture.top - 1]
        check_image(marks, facts, moment, picture, colours)
        check_cells(marks, facts, moment, picture)
        hint, mark = page("view.panel('pool').hintElement.textContent"), "a number counts the requests that share"
        assert (mark in hint) == (picture.cell >= 9), "what a cell of this size can have is named"
        assert ("a dot marks a block that requests share" in hint) == (3 <= picture.cell < 9)
        check_groups(marks, facts, moment, picture, width)
        check_hits(page, facts, moment, picture)
        following = next_evicted(moment)
        expected = [
            [
                block,
                "cached, evicted next" if block == following else NAMES[moment.pool_state(block)],
                holders_in_words(moment.holders[block], facts.order) if block in moment.holders else "–",
                len(moment.holders.get(block, [])),
                moment.changed.get(block, "–"),
            ]
            for block in range(1, facts.num_blocks)
            if moment.pool_state(block) != "free"
        ]
        table = page.table("pool")
        assert table["rows"] == expected
        assert table["caption"] == f"Blocks that are not free at step {facts.records[step].step}"


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(5000, 900), (5000, 5000), (2048, 900), (2047, 900)])
def test_the_hint_names_the_blocks_that_are_left_out(deno_page, num_blocks, num_tokens):
    config = {"num_blocks": num_blocks, "max_num_batched_tokens": num_tokens, "max_model_len": num_tokens + 1}
    trace = simulate({"config": config, "requests": [{"id": "a", "prompt": {"len": num_tokens}, "max_tokens": 1}]})
    deno_page.open(trace)
    *_, pixels = Marks(deno_page.painted("pool", 0)["marks"]).image()
    drawn_ = sum(alpha > 0 for alpha in pixels[3::4])
    assert max(trace[0].block_tables["a"]) < drawn_ <= num_blocks
    hint = deno_page("view.panel('pool').hintElement.textContent")
    words = f"no step has used blocks {drawn_:,} to {num_blocks - 1:,}, which are left out"
    assert (words in hint) == ("left out" in hint) == (drawn_ < num_blocks)


def check_counts(page, marks, facts, moment, width):
    states = [moment.pool_state(block) for block in range(1, facts.num_blocks)]
    left, words = 0, []
    bars = [rect for rect in marks.rects(4, 8) if not rect[0].startswith("pattern")]
    for bar, (state, colour) in zip(
        bars, (("owned", LIGHT.owned), ("cached", LIGHT.cached), ("free", LIGHT.free)), strict=True
    ):
        wide = states.count(state) / (facts.num_blocks - 1) * (width - 1)
        assert bar[0] == colour and close(bar[1:4:2], [left, wide])
        left += wide
        words.append(f"{grouped(states.count(state))} {NAMES[state]}")
    assert [text for _, _, text in marks.texts(y=25.5)][:3] == words
    samples = [rect[0] for rect in marks.rects(20, 10) if not rect[0].startswith("pattern")]
    assert samples == [LIGHT.owned, LIGHT.cached, LIGHT.free]
    owned, cached, free = (states.count(state) for state in ("owned", "cached", "free"))
    said = page("view.panel('pool').describe()")
    assert said == f"{owned} blocks in use, {cached} cached and evictable, {free} free"


def check_image(marks, facts, moment, picture, colours):
    x, y, wide, high, pixels = marks.image()
    assert close([x, y, wide, high], [0, picture.top, picture.columns * picture.cell, picture.rows * picture.cell])
    check_frame(marks, picture)
    grid = [rect[1:] for rect in marks.rects(colour=LIGHT.hairline) if 1 in rect[3:]]
    rows = picture.blocks_of_rows
    lines = [
        [i * picture.cell - 0.5, picture.top, 1, sum(blocks > i for blocks in rows) * picture.cell]
        for i in range(1, rows[0])
        if any(blocks > i for blocks in rows)
    ]
    # A column that ends with the last block of the last row has its line in the rows above; the frame ends the row.
    lines += [[0, picture.top + i * picture.cell - 0.5, rows[i] * picture.cell, 1] for i in range(1, len(rows))]
    assert grid == ([pytest.approx(line) for line in lines] if picture.cell >= 5 else [])
    for block in range(facts.num_blocks):
        state = moment.pool_state(block)
        colour = {"free": LIGHT.free, "cached": LIGHT.cached}.get(state)
        if block == 0:
            colour = LIGHT.hairline
        elif state == "owned":
            colour = colours.held(moment.holders[block][0])
        assert pixels[4 * block : 4 * block + 4] == channels(colour), (block, state)
    assert not any(pixels[4 * facts.num_blocks :]), "cells without a block have a colour"


def check_frame(marks, picture):
    """The frame goes around the cells that have a block: its area is theirs, and its corners are corners of cells."""
    ((_, corners),) = [
        (colour, path)
        for colour, path in marks.stroked()
        if colour == LIGHT.hairline and path[0][1] > picture.legend_ends
    ]
    first, last, cell = picture.blocks_of_rows[0], picture.blocks_of_rows[-1], picture.cell
    right, end, bottom = first * cell, last * cell, len(picture.blocks_of_rows) * cell
    expected = {(0, 0), (right, 0), (end, bottom), (0, bottom)}
    expected |= {(right, bottom - cell), (end, bottom - cell)} if last < first else set()
    found = [(x - 0.5, y - picture.top) for x, y in corners]
    assert len(found) == len(expected)
    for corner in expected:
        assert any(close(each, corner, 1.001) for each in found), (corner, found)


def check_cells(marks, facts, moment, picture):
    cell = picture.cell
    hatched = {
        (round(rect[1], 3), round(rect[2], 3))
        for rect in marks.rects()
        if rect[0].startswith("pattern") and rect[2] > picture.top and rect[3] < 17
    }
    counts = {(round(x, 3), round(y, 3)): words for x, y, words in marks.texts() if y > picture.top}
    dots = {
        (round(rect[1], 3), round(rect[2], 3)) for rect in marks.rects(height=2, colour=LIGHT.outline) if rect[3] == 2
    }
    frames = {
        (round(frame[1], 3), round(frame[2], 3)) for frame in marks.frames(LIGHT.outline) if frame[2] > picture.top - 1
    }
    expected = {"hatched": set(), "counts": {}, "dots": set(), "frames": set()}
    for block in range(1, facts.num_blocks):
        x, y = picture.xy(block)
        if moment.pool_state(block) == "cached" and cell >= 10:
            expected["hatched"].add((round(x + 0.5, 3), round(y + 0.5, 3)))
        if (shared := len(moment.holders.get(block, []))) > 1 and cell >= 9:
            expected["counts"][round(x + cell / 2, 3), round(y + cell / 2 + 0.5, 3)] = str(shared)
        elif shared > 1 and cell >= 3:
            expected["dots"].add((round(x + cell / 2 - 1, 3), round(y + cell / 2 - 1, 3)))
        if block in moment.fresh:
            expected["frames"].add((round(x + 0.5, 3), round(y + 0.5, 3)))
    assert {"hatched": hatched, "counts": counts, "dots": dots, "frames": frames} == expected
    triangles = [path for colour, path in marks.filled() if colour == LIGHT.cursor]
    (sample,) = [path for path in triangles if path[0][1] < picture.top - 1]  # in the legend
    triangles.remove(sample)
    assert sample[1][0] - sample[0][0] == sample[2][1] - sample[0][1] == 10 and sample[0][1] == picture.legend_ends - 8
    following = next_evicted(moment)
    if following is None or cell < 5:
        assert not triangles
    else:
        x, y = picture.xy(following)
        assert close(
            [value for corner in triangles[0] for value in corner], [x, y, x + 0.6 * cell, y, x, y + 0.6 * cell]
        )


def check_groups(marks, facts, moment, picture, width):
    lines = [words for _, y, words in marks.texts() if picture.legend_ends < y < picture.top]
    if len(facts.groups) < 2:
        assert not lines
        return
    held = {block: place_of(moment, facts.groups, block) for block in moment.holders}
    for index, group in enumerate(facts.groups):
        count = sum(place[1] == index for place in held.values())
        holes = sum(tables[index].count(0) for tables in moment.tables.values())
        noun = "state slot" if group.kind == "mamba" else "block"
        empty = f", {counted(holes, 'hole')}" if holes else ""
        words = f"{group_words(group)}: {counted(count, noun)}{empty}"
        per_line = max(1, width // 240)
        at = (index % per_line * 240 + 15, picture.legend_ends + 12 + 18 * (index // per_line) + 5.5, words)
        assert at in marks.texts()
    bars = {(round(rect[1], 3), round(rect[2], 3)) for rect in marks.rects() if rect[4] == picture.cell - 2}
    diamonds = {
        (round(path[1][0], 3), round(path[0][1], 3))
        for colour, path in marks.filled()
        if len(path) == 4 and path[0][1] > picture.top
    }
    wanted_bars, wanted_diamonds = set(), set()
    for block, (_, group, _) in held.items() if picture.cell >= 5 else ():
        x, y = picture.xy(block)
        if facts.groups[group].kind == "sliding_window":
            wanted_bars.add((round(x + 1, 3), round(y + 1, 3)))
        if facts.groups[group].kind == "mamba":
            wanted_diamonds.add((round(x + picture.cell / 2, 3), round(y + picture.cell / 2, 3)))
    assert (bars, diamonds) == (wanted_bars, wanted_diamonds)


def check_hits(page, facts, moment, picture):
    blocks = {1, facts.num_blocks - 1, *list(moment.cached)[:2], *list(moment.holders)[:3], *list(moment.holders)[-2:]}
    blocks |= {block for block, names in moment.holders.items() if len(names) > 1}
    following = next_evicted(moment)
    for block in {*blocks, following or 1}:
        x, y = picture.xy(block)
        state, lines = moment.pool_state(block), page.hit("pool", x + 0.3 * picture.cell, y + 0.7 * picture.cell)
        expected = [f"block {block}: {NAMES[state]}"]
        if state == "owned":
            names, (holder, group, logical) = moment.holders[block], place_of(moment, facts.groups, block)
            expected.append(f"{'owners' if len(names) > 1 else 'owner'} {holders_in_words(names, facts.order)}")
            kind = facts.groups[group]
            if len(facts.groups) > 1:
                expected.append(f"group {group}: {group_words(kind)}")
            if kind.kind == "mamba":
                expected.append(f"state slot {logical}")
            else:
                size = kind.block_size
                expected.append(f"logical block {logical}: KV positions {span(logical * size, logical * size + size)}")
            assert holder in names
        if state == "cached":
            said = "the next cached block to be evicted" if block == following else None
            expected.append(said or "can still be hit by the prefix cache")
        if block in moment.changed:
            expected.append(f"last changed in step {moment.changed[block]}")
        assert lines == expected
    for block, names in moment.holders.items():
        x, y = picture.xy(block)
        hover = page("view.panel('pool').hit(argument[0], argument[1]).hover", [x + 0.2, y + 0.2])
        _, group, logical = place_of(moment, facts.groups, block)
        size = facts.groups[group].block_size
        kv = {} if facts.groups[group].kind == "mamba" else {"kv": [logical * size, logical * size + size]}
        assert hover == {"block": block, "request": facts.order.index(names[0])} | kv
    assert page.hit("pool", 1, picture.top + 1) == ["block 0", "reserved, never handed out"]
    assert page.hit("pool", picture.columns * picture.cell + 2, picture.top + 1) == []
    assert page.hit("pool", 5, picture.top - 2) == []
    x, y = picture.xy(facts.num_blocks)
    assert page.hit("pool", x + 1, y + 1) == []


@pytest.mark.parametrize("name", ["plain 1", "hybrid_window_prefix 36", "hybrid_mamba 27"])
def test_the_blocks_of_the_request_at_the_pointer_are_framed(drawn, name):
    page, facts, _ = drawn(name)
    picture = Picture(facts, 1200)
    for step in steps_of(facts, 4):
        moment = facts[step]
        page.painted("pool", step)
        for request in moment.tables:
            page("view.cursor.setHover({ request: argument })", facts.order.index(request))
            frames = Marks(page.painted("pool")["over"]).frames(LIGHT.outline)
            blocks = [block for table in moment.tables[request] for block in table if block]
            expected = [tuple(value - 1 for value in picture.xy(block)) for block in blocks]
            assert sorted(tuple(frame[1:3]) for frame in frames) == sorted(expected)
        page("view.cursor.setHover({ block: 2 })")
        (frame,) = Marks(page.painted("pool")["over"]).frames(LIGHT.cursor)
        assert close(frame[1:3], [value - 1 for value in picture.xy(2)])
        page("view.cursor.setHover({})")
        assert not Marks(page.painted("pool")["over"]).frames(LIGHT.cursor)
        page("view.inspector.pin({ kind: 'block', block: 3 })")
        (frame,) = Marks(page.painted("pool")["over"]).frames(LIGHT.cursor)
        assert close(frame[1:3], [value - 1 for value in picture.xy(3)]), "the block whose card is open"
        page("view.inspector.pin(null)")


def test_stepping_back_and_forth_shows_the_same_pool(drawn):
    """A view keeps a copy of the pool every 256 steps, and applies the changes since."""
    page, facts, _ = drawn("long 3")
    assert len(facts) > 560
    for step in (len(facts) - 1, 3, 255, 256, 257, 30, 520, 511, 512, 100, 99, 101, 300):
        rows = page.table("pool", step)["rows"]
        assert [row[:1] + row[3:] for row in rows] == [
            [block, len(facts[step].holders.get(block, [])), facts[step].changed[block]]
            for block in range(1, facts.num_blocks)
            if facts[step].pool_state(block) != "free"
        ]


def test_the_runs_have_everything_that_a_pool_can_show():
    found = set()
    for name in RUNS:
        facts = run(name)[1]
        for moment in facts.moments:
            found |= {moment.pool_state(block) for block in range(1, facts.num_blocks)}
            found |= {"shared"} if any(len(names) > 1 for names in moment.holders.values()) else set()
            found |= {"hole"} if any(0 in table for tables in moment.tables.values() for table in tables) else set()
    assert found == {"free", "cached", "owned", "shared", "hole"}


@pytest.mark.parametrize("name", ["plain 1", "spec 16", "hybrid_window 30"])
def test_a_run_that_arrives_in_parts_has_the_same_pictures(deno_page, name):
    """Packets of some steps each, as a live run sends them."""
    trace = run(name)[0]
    controller = ReplayingController(trace)
    feed, parts = Feed(controller), [1, 3, 7, 8, len(trace) // 2, len(trace)]
    for part in parts:
        while len(controller.trace) < part:
            controller.step()
        packet = b64encode(feed.next_packet()).decode()
        if part == parts[0]:
            deno_page("page.open(argument)", {"packet": packet})
            feed.confirm()
        else:
            deno_page(
                "(page.values.packet = page.bytes(argument), page.listeners['change:packet'](), page.frame())", packet
            )
    panels = ("pool", "tables", "gantt", "texts", "events")
    steps = [0, 2, 5, len(trace) // 2, len(trace) - 1]
    in_parts = [deno_page.table(panel, step) for step in steps for panel in panels]
    deno_page.open(trace)
    assert in_parts == [deno_page.table(panel, step) for step in steps for panel in panels]


def test_a_packet_after_a_lost_one_is_not_shown(deno_page):
    """The page asks for the steps that it misses, and then shows all."""
    trace = run("plain 1")[0]
    controller = ReplayingController(trace)
    feed = Feed(controller)

    def next_packet(steps):
        for _ in range(steps):
            controller.step()
        return b64encode(feed.next_packet()).decode()

    take = "(page.values.packet = page.bytes(argument), page.listeners['change:packet'](), page.frame())"
    deno_page("page.open(argument)", {"packet": next_packet(3)})
    feed.confirm()
    next_packet(4)
    feed.confirm()
    deno_page(take, next_packet(5))
    assert deno_page("view.store.numSteps") == 3 and deno_page("page.sent.at(-1).name") == "resend"
    feed.handle(deno_page("page.sent.at(-1)"))
    deno_page(take, next_packet(0))
    assert deno_page("view.store.numSteps") == 12
    shown = deno_page.table("pool", 11)
    deno_page.open(trace)
    assert shown == deno_page.table("pool", 11)
