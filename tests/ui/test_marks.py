"""Every mark of a picture is a fact of the record: what panels paint is read back and compared with the records.

The expected values come from StepRecord alone, by code that knows nothing of the views.
"""

import random

import numpy as np
import pytest
from painted import LIGHT, Colours
from runs_to_draw import run, steps_of

from workbench import simulate

PAINTED = """(([name, step]) => {
    view.cursor.seek(step);
    const panel = view.panel(name), marks = [], real = document.createElement("canvas").getContext("2d");
    const kept = new Set(["fillRect", "fillText"]);
    const context = new Proxy(real, {
        get(target, key) {
            const value = target[key];
            if (typeof value !== "function") return value;
            return (...given) => {
                if (kept.has(key)) marks.push([key, String(target.fillStyle), ...given]);
                return value.apply(target, given);
            };
        },
        set(target, key, value) {
            target[key] = value;
            return true;
        },
    });
    panel.layout();
    panel.draw(context, panel.width, panel.height);
    const { mode, dx, dy, cell, fits, shape } = panel;
    if (panel.chunk) real.fillStyle = panel.theme.prefill(panel.chunk.request.index);
    return { marks, mode, dx, dy, cell, fits, shape, chunk: panel.chunk && panel.chunk.seq, fill: real.fillStyle };
})(argument)"""
"""The rectangles and texts that a panel paints for a step, each with its colour."""

MASK_LEFT, MASK_TOP = 84, 40
TABLE_LEFT, TABLE_TOP, TABLE_ROW = 84, 20, 18


def workload(seed):
    """Chunks, decodes, prefix hits, preemptions, in steps small enough to be drawn cell by cell."""
    rng = random.Random(seed)
    shared = {"len": rng.randrange(4, 20), "seed": "shared"}
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"parts": [shared, {"len": rng.randrange(1, 60)}]},
            "max_tokens": rng.randrange(2, 14),
            "arrival_step": rng.randrange(0, 12),
        }
        for i in range(rng.randrange(4, 8))
    ]
    config = {"block_size": 4, "num_blocks": rng.randrange(30, 50), "max_num_batched_tokens": rng.choice([11, 24, 48])}
    return {"config": config, "requests": requests}


def expected_mask(record):
    """The mask by its definition, token by token."""
    mask, row, column = np.zeros((record.num_tokens, sum(record.seqused_k)), bool), 0, 0
    for chunk in record.chunks:
        for place in range(chunk.num_tokens):
            mask[row + place, column : column + chunk.start + place + 1] = True
        row, column = row + chunk.num_tokens, column + chunk.start + chunk.num_tokens
    return mask


def painted_mask(found, shape):
    """The cells that rectangles of the fill colour cover."""
    cells = np.zeros(shape, bool)
    rectangles = [mark[1:] for mark in found["marks"] if mark[0] == "fillRect"]
    for colour, x, y, width, height in rectangles:
        if found["mode"] == "one" and colour != found["fill"]:
            continue
        columns = (x - MASK_LEFT) / found["dx"], (x - MASK_LEFT + width) / found["dx"]
        rows = (y - MASK_TOP) / found["dy"], (y - MASK_TOP + height) / found["dy"]
        middles = [np.arange(size) + 0.4 for size in shape]  # a cell in a batch is drawn a pixel smaller
        inside = [(at > begin) & (at < end) for at, (begin, end) in zip(middles, (rows, columns))]
        cells |= inside[0][:, None] & inside[1][None, :]
    return cells


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("seed", range(3))
def test_the_mask_of_the_dashboard_is_the_mask(page_of, seed, width):
    trace = simulate(workload(seed))
    page, modes = page_of(trace, width=width, height=1200), set()
    for record in trace:
        if not record.chunks:
            continue
        found, expected = page.view(PAINTED, ["rectangle", record.step]), expected_mask(record)
        modes.add(found["mode"])
        if found["mode"] == "one":
            first = [0, *np.cumsum(record.seqused_k)]
            rows = slice(record.cu_seqlens_q[found["chunk"]], record.cu_seqlens_q[found["chunk"] + 1])
            expected = expected[rows, first[found["chunk"]] : first[found["chunk"] + 1]]
        assert list(expected.shape) == found["shape"]
        assert (painted_mask(found, expected.shape) == expected).all(), f"step {record.step}"
    assert "batch" in modes


@pytest.mark.parametrize("width", [390, 1440])
def test_the_mask_of_a_long_chunk(page_of, width):
    """Drawn tile by tile: full tiles, and partly masked ones row by row."""
    requests = [{"id": "long", "prompt": {"len": 300}, "max_tokens": 2}, {"id": "b", "prompt": {"len": 7}}]
    trace = simulate({"config": {"max_num_batched_tokens": 150, "num_blocks": 99}, "requests": requests})
    page = page_of(trace, width=width, height=1200)
    for record in trace[:2]:
        found, expected = page.view(PAINTED, ["rectangle", record.step]), expected_mask(record)
        assert found["mode"] == "one" and found["chunk"] == 0
        expected = expected[: record.chunks[0].num_tokens, : record.seqused_k[0]]
        assert (painted_mask(found, expected.shape) == expected).all()


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("groups", [None, ["full_attention", "sliding_window"]])
@pytest.mark.parametrize("seed", range(3))
def test_the_block_tables_of_the_dashboard_are_those_of_the_record(page_of, seed, groups):
    given = workload(seed)
    if groups:
        given["config"]["kv_cache_groups"] = [{"kind": groups[0]}, {"kind": groups[1], "sliding_window": 6}]
        given["config"]["num_blocks"] *= 2
    trace = simulate(given)
    page, seen = page_of(trace, width=1900, height=1200), set()
    for record in trace:
        if not record.chunks:
            continue
        found = page.view(PAINTED, ["tables", record.step])
        assert found["cell"] >= 22  # wide enough for numbers
        ids = {}
        for _, string, x, y in (mark[1:5] for mark in found["marks"] if mark[0] == "fillText"):
            if y > TABLE_TOP and x > TABLE_LEFT and string.isdigit():
                place = int((y - TABLE_TOP) // TABLE_ROW), int((x - TABLE_LEFT) // found["cell"])
                assert place not in ids
                ids[place] = int(string)
        tables = record.block_tables_by_group
        rows = [tables[chunk.request_id][group] for chunk in record.chunks for group in range(len(groups or [1]))]
        expected = {(row, n): block for row, table in enumerate(rows) for n, block in enumerate(table) if block}
        assert ids == expected
        seen |= {len(set(table)) for table in rows}
    assert len(seen) > 3


COLOURS = """((cells) => {
    const panel = view.panel("pool"), { canvas } = panel, ratio = devicePixelRatio;
    panel.visible = true; // also below the window
    panel.stale.add("data");
    panel.frame();
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    return cells.map(([left, top, size]) => {
        const counts = new Map(), [x, y, side] = [left, top, size].map((v) => Math.round(v * ratio));
        for (let row = y; row < y + side; row++) for (let column = x; column < x + side; column++) {
            const at = 4 * (row * canvas.width + column), key = [...data.slice(at, at + 3)].join();
            counts.set(key, (counts.get(key) || 0) + 1);
        }
        return [...counts].reduce((most, entry) => entry[1] > most[1] ? entry : most)[0];
    });
})(argument)"""
"""The most frequent colour of each square of the pool's canvas."""


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", ["plain 1", "timed 3", "hybrid_window 30"])
def test_the_pixels_of_the_pool_are_the_states_of_its_blocks(page_of, name, width):
    trace, facts = run(name)
    page, colours, seen = page_of(trace, width=width, height=1600), Colours(facts.records), set()
    for step in steps_of(facts, 4):
        page.view("view.cursor.seek(argument)", step)
        page.frame()
        top, cell = page.view("[view.panel('pool').top, view.panel('pool').cell]")
        blocks = range(1, facts.num_blocks)
        cells = [(block % 32 * cell + 2, top + block // 32 * cell + 2, cell - 4) for block in blocks]
        for block, found in zip(blocks, page.view(COLOURS, cells), strict=True):
            state = facts[step].pool_state(block)
            colour = {"free": LIGHT.free, "cached": LIGHT.cached}.get(state)
            colour = colour or colours.held(facts[step].holders[block][0])
            assert found == ",".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5)), (step, block, state)
            seen.add(state)
    assert "owned" in seen and "free" in seen
