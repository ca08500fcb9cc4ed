"""The panels on the axis of steps, drawn by the code that browsers run: every mark is a fact of the record."""

import math
import re
from itertools import pairwise

import pytest
from facts_of_records import Facts
from msgspec.structs import replace
from painted import LIGHT, Marks, close, counted, digits, grouped, seconds, span
from runs_to_draw import RUNS, run, steps_of
from test_marks_of_batches import copied, draft_cells, drafts, kv, limit

from workbench import simulate
from workbench.trace import Trace, TraceMeta
from workbench.trace.readings.narrate import narrate, shown
from workbench.viz.palette import EVENT_MARKS

STALL = "it stood still"
CHARACTER = 6  # pixels of every character of the fake canvas
EVENT_Y = {"finish": 13, "admit": 9, "resume": 9, "preempt": 5, "abort": 5}


class Axis:
    """The axis by its definition: steps equally wide, or as long as they took without the pauses between them."""

    def __init__(self, facts, width, first=0, last=None):
        self.facts, self.n = facts, len(facts)
        self.x0, self.x1 = (68 if width < 430 else 84), width - (20 if width < 620 else 176)
        self.first, self.last = first, last or max(self.n, 12)
        self.width, self.timed = width, facts.timed
        if self.timed:
            self.times, end = [], 0.0
            for step, record in enumerate(facts.records):
                gap = record.time - facts.records[step - 1].end if step else 0.0
                if gap > 0.5:
                    before = self.times[-1]
                    gap = before[1] - before[0]
                self.times.append((end + max(0.0, gap), end + max(0.0, gap) + record.end - record.time))
                end = self.times[-1][1]
            self.t0, self.t1 = self.times[first][0], self.times[min(self.n, self.last) - 1][1]
            run = facts.records[min(self.n, self.last) - 1].end - facts.records[first].time
            self.left_out = run - (self.t1 - self.t0)

    def at(self, place):
        return self.x0 + place * (self.x1 - self.x0)

    def of_time(self, time):
        return self.at((time - self.t0) / (self.t1 - self.t0))

    def of_moment(self, time):
        """The place of a time since the start of the trace, within a step or in a short gap before one."""
        records = self.facts.records
        step = max(0, max((step for step, record in enumerate(records) if record.time <= time), default=0))
        begin, end = self.times[step]
        inside = min(time - records[step].time, end - begin) if time <= records[step].end else time - records[step].time
        at = begin + inside
        assert step + 1 == self.n or at <= self.times[step + 1][0] + 1e-9, "no label is in a pause"
        return self.of_time(at)

    def x(self, step):
        if self.timed:
            return self.of_time(self.times[step][0] if step < self.n else self.times[-1][1])
        return self.at((step - self.first) / (self.last - self.first))

    def end(self, step):
        return self.of_time(self.times[step][1]) if self.timed else self.x(step + 1)

    @property
    def step_width(self):
        return (self.x1 - self.x0) / (self.last - self.first)

    @property
    def steps(self):
        return range(self.first, min(self.n, self.last))


def open_axis(page, facts, width, part):
    """Show all steps, or a part of them."""
    if not part:
        return Axis(facts, width)
    first, size = len(facts) // 3, max(6, len(facts) // 3)
    page("view.cursor.moveTo(argument[0], argument[1])", [first, size])
    page("page.frame()")
    first = max(0, min(first, max(12, len(facts)) - size))
    return Axis(facts, width, first, first + size)


def tokens(record):
    decode = sum(chunk.num_tokens for chunk in record.chunks if chunk.arm == "decode")
    return decode, sum(chunk.num_tokens for chunk in record.chunks)


def event_shape(kind, x, y, size):
    """The corners of the mark of an event, or its circle."""
    shapes = {
        "up": [[x, y - size], [x + size, y + size], [x - size, y + size]],
        "down": [[x, y + size], [x + size, y - size], [x - size, y - size]],
        "half": [["arc", x, y, size]],
        "square": [["rect", x - 0.8 * size, y - 0.8 * size, 1.6 * size, 1.6 * size]],
        "cross": [[x - size, y - size], [x + size, y + size], [x + size, y - size], [x - size, y + size]],
    }
    return shapes[EVENT_MARKS[kind][0]]


def same_path(path, expected):
    flat = [value for part in path for value in part if value not in ("arc", "rect")]
    wanted = [value for part in expected for value in part if value not in ("arc", "rect")]
    return close(flat, wanted)


def numbers(facts, step):
    """The lines of numbers about a step."""
    record, moment = facts.records[step], facts[step]
    decode, total = tokens(record)
    lines = [f"{grouped(total - decode)} prefill + {grouped(decode)} decode = {grouped(total)} of "
             f"{grouped(record.token_budget)} tokens"]  # fmt: skip
    if again := sum(chunk.num_recomputed_tokens for chunk in record.chunks):
        lines.append(f"{counted(again, 'token')} recomputed after a preemption")
    if facts.timed:
        phases = ", ".join(f"{name} {seconds(value)}" for name, value in record.timings.items())
        lines.append(f"{seconds(record.end - record.time)}{': ' if phases else ''}{phases}")
    assert moment.record is record
    lines.append(
        f"{grouped(len(record.running))} running, {grouped(len(record.waiting))} waiting, "
        f"{grouped(record.free_blocks)} free blocks"
    )
    return lines


UNITS = {"s", "ms", "µs", "tok/s"}


def near(line, other):
    """Whether two lines are equal but for the last digit of times, which a browser rounds from its own sums."""
    mine, yours = line.split(), other.split()
    if len(mine) != len(yours):
        return False
    for place, (one, two) in enumerate(zip(mine, yours)):
        if one == two:
            continue
        follows = yours[place + 1].strip(".,;:()") if place + 1 < len(yours) else ""
        if follows not in UNITS or mine[place + 1] != yours[place + 1]:
            return False
        found, expected = (float(word.replace(",", "")) for word in (one, two))
        if abs(found - expected) > 0.011 * abs(expected):
            return False
    return True


CASES = [
    (name, width, part)
    for name in [*RUNS, "idle 0", "aborts 3"]
    for width, part in ((1200, False), (1200, True), (390, False))
] + [("timed 3", 240, False)]


@pytest.mark.parametrize(("name", "width", "part"), CASES)
def test_timeline(drawn, name, width, part):
    stalled = len(run(name)[1]) // 2
    incident = {"slow": [], "apart": [], "stalls": [[stalled, STALL]]}
    page, facts, colours = drawn(name, width=width, status={"live": False, "incident": incident})
    axis = open_axis(page, facts, width, part)
    marks = Marks(page.painted("timeline")["marks"])
    records = [facts.records[step] for step in axis.steps]
    top = max(max(1, tokens(record)[1], record.token_budget) for record in records)
    most_decodes = max(1, *(tokens(record)[0] for record in records))

    def y(count):
        return 112 - count / top * 94

    for _, at, words in [text for text in marks.texts(x=axis.x0 - 8) if text[2][:1].isdigit()]:
        assert at == pytest.approx(y(int(words.replace(",", "")))), words
        (line,) = [rect for rect in marks.rects(height=1, colour=LIGHT.hairline) if abs(rect[2] - at) <= 0.5]
        assert close(line[1:4:2], [axis.x0, axis.x1 - axis.x0])
    assert (axis.x0 - 8, 144, "time" if axis.timed else "step") in marks.texts()
    known = {LIGHT.decode, LIGHT.prefill, *map(colours.prefill, facts.order), *map(colours.decode, facts.order)}
    bars = [rect for rect in marks.rects() if rect[0] in known and rect[2] >= 18 and rect[2] + rect[4] < 112.1]
    bars = [bar for bar in bars if bar[1] < axis.x1 + 9 and bar[4] > 0]
    expected = []
    for step in axis.steps:
        record, (decode, total) = facts.records[step], tokens(facts.records[step])
        x, width_ = axis.x(step), max(1, axis.end(step) - axis.x(step) - (axis.step_width > 4 or axis.timed))
        parts = [(LIGHT.decode, 0, decode), (LIGHT.prefill, decode, total)]
        low, high = 0, decode
        for chunk in record.chunks:
            is_decode, begin = chunk.arm == "decode", low if chunk.arm == "decode" else high
            low, high = low + chunk.num_tokens * is_decode, high + chunk.num_tokens * (not is_decode)
            if chunk.request_id in colours.hues:
                parts.append((colours.of(chunk), begin, begin + chunk.num_tokens))
        expected += [[colour, x, y(last), width_, y(first) - y(last)] for colour, first, last in parts if last > first]
        check_step_marks(marks, facts, step, x + width_ / 2, width_, decode / most_decodes)
    squares = {rect[3] for rect in marks.rects(colour=LIGHT.prefill)}
    assert [bar[0] for bar in bars] == [bar[0] for bar in expected], squares
    assert all(close(bar[1:], wanted[1:], 1e-4) for bar, wanted in zip(bars, expected))
    check_budget(marks, axis, facts, records, y)
    stall = marks.rects(0, 112, EVENT_MARKS["stall"][1])
    assert [rect[1] for rect in stall] == ([pytest.approx(axis.x(stalled) - 1)] if stalled in axis.steps else [])
    check_step_labels(marks, axis, facts)
    check_timeline_words(page, facts, axis, stalled)


def test_events_of_a_last_step_without_duration_are_marked(deno_page):
    """Its marks stand a little behind the end of the axis."""
    whole = run("timed 3")[0]
    last = whole[-1].step
    trace = copied(whole, lambda record: replace(record, end=record.time if record.step == last else record.end))
    facts = Facts(trace)
    deno_page.open(trace)
    axis = Axis(facts, 1200)
    share = tokens(facts.records[last])[0] / max(tokens(record)[0] for record in facts.records)
    assert facts.events(last)
    check_step_marks(Marks(deno_page.painted("timeline")["marks"]), facts, last, axis.x1 + 0.5, 1, share)


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize(("name", "has_aborts"), [("aborts 3", True), ("timed 3", False)])
@pytest.mark.parametrize(("panel", "word"), [("timeline", "abort"), ("gantt", "aborted")])
def test_the_legend_names_aborts_where_there_are_any(drawn, name, has_aborts, panel, word, width):
    page, facts, _ = drawn(name, width=width)
    assert any(record.aborted for record in facts.records) == has_aborts
    words = {text for _, _, text in Marks(page.painted(panel)["marks"]).texts()}
    lines = page(f"view.panel('{panel}').legend.signature") or ""
    assert (word in words or f'"{word}"' in lines) == has_aborts


def check_step_marks(marks, facts, step, middle, width, share):
    radius, at = max(0.8, min(width / 2, 3)), 112 + 22 - 2 - share * 14
    if radius < 2:
        dots = [rect for rect in marks.rects(at - radius, 2 * radius) if abs(rect[1] + radius - middle) < 1e-4]
    else:
        dots = [path for _, path in marks.filled() if same_path(path, [["arc", middle, at, radius]])]
    assert len(dots) == (share > 0), step
    kinds = {kind for _, kind, *_ in facts.events(step)}
    for kind, height in EVENT_Y.items():
        shape = event_shape(kind, middle, height, 3)
        found = [colour for colour, path in [*marks.filled(), *marks.stroked()] if same_path(path, shape)]
        wanted = [EVENT_MARKS[kind][1]] if kind in kinds else []
        twins = [EVENT_MARKS[other][1] for other in kinds if other in EVENT_Y and EVENT_Y[other] == height]
        assert [colour for colour in found if colour == EVENT_MARKS[kind][1] or colour not in twins] == wanted, kind


def check_budget(marks, axis, facts, records, y):
    lines = [rect for rect in marks.rects(height=1) if rect[0].startswith("pattern")]
    expected = [round(y(records[-1].token_budget) + 1e-9)] if records[-1].token_budget else []
    seats = facts.trace.meta.config.get("max_num_seqs")
    if seats and seats < records[-1].token_budget:
        expected.append(round(y(seats) + 1e-9))
    assert len(lines) == len(expected)
    for line, at in zip(lines, expected):
        assert abs(line[2] - at) <= 1 and line[1] + line[3] == pytest.approx(axis.x1)


def seconds_of(words):
    """The time that a label names: "250 ms", "3 s", "2:29 min" or "1:00:05 h"."""
    value, unit = words.split()
    if ":" in value:
        parts = [float(part) for part in value.split(":")]
        return sum(part * 60**place for place, part in enumerate(reversed(parts)))
    return float(value.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


def check_step_labels(marks, axis, facts):
    labels = [(x, words) for x, _, words in marks.texts(y=144) if axis.x0 <= x <= axis.x1]
    ticks = [rect for rect in marks.rects(height=4, colour=LIGHT.hairline) if rect[3] == 1]
    assert len(ticks) == len(labels) > 1, "each line of the axis has its label"
    notes = [words for x, _, words in marks.texts(y=144) if x > axis.x1]
    assert bool(notes) == bool(axis.timed and axis.left_out > 0.5 and axis.x1 < axis.width - 100), axis.left_out
    for words in notes:
        assert seconds_of(words.removesuffix(" idle left out")) == pytest.approx(axis.left_out, rel=0.06)
    for (x, words), (after, _) in pairwise(sorted(labels)):
        assert x + CHARACTER * len(words) < after, "one label covers another"
    for x, words in labels:
        last = axis.x1 + 8 - CHARACTER * len(words) - 1  # the last label ends where the axis does
        if axis.timed:
            place = min(last, axis.of_moment(seconds_of(words)))
            assert x == pytest.approx(place, abs=0.01 * (axis.x1 - axis.x0))
        else:
            assert x == pytest.approx(min(last, axis.x(int(words.replace(",", "")) - facts.records[0].step)))


def check_timeline_words(page, facts, axis, stalled):
    for step in [step for step in steps_of(facts, 5) if step in axis.steps]:
        record = facts.records[step]
        lines = page.hit("timeline", (axis.x(step) + axis.end(step)) / 2, 60)
        expected = [narrate(record), *numbers(facts, step)]
        expected += [f"stall: {STALL}"] if step == stalled else []
        for _, kind, name, _ in facts.events(step)[:6]:
            reason = next(
                (shown(record.preempt_reasons.get(name)) if kind == "preempt" else why)
                for _, other, who, why in facts.events(step)
                if (other, who) == (kind, name)
            )
            expected.append(f"{kind} {name}{': ' if reason else ''}{reason[:80]}")
        assert len(lines) == len(expected)
        assert all(near(line, other) or line[:78] == other[:78] for line, other in zip(lines, expected)), (
            lines,
            expected,
        )
        page.seek(step)
        assert page("view.panel('timeline').describe()") == f"{counted(len(facts), 'step')}. {narrate(record)}"
    assert page.hit("timeline", axis.x0 - 10, 60) == page.hit("timeline", axis.x1 + 10, 60) == []
    headings, table, caption = (page.table("timeline")[name] for name in ("headings", "rows", "caption"))
    numbers_ = [facts.records[step].step for step in (axis.steps[0], axis.steps[-1])]
    assert caption == "Steps {} to {}".format(*numbers_)
    assert headings == ["step", "prefill", "decode", "budget", "running", "waiting", "free blocks", "duration"]
    assert [row[0] for row in table] == [facts.records[step].step for step in axis.steps]
    for row, step in zip(table, axis.steps):
        record, (decode, total) = facts.records[step], tokens(facts.records[step])
        assert row[1:7] == [
            total - decode, decode, record.token_budget, len(record.running), len(record.waiting), record.free_blocks
        ]  # fmt: skip
        assert near(row[7], seconds(record.end - record.time) if facts.timed else "–")


@pytest.mark.parametrize("width", [390, 800, 1200])
@pytest.mark.parametrize("idle", [0.4, 8.25, 130.0])
def test_long_times_on_an_axis_cover_no_other(deno_page, width, idle):
    """Steps of a millisecond behind a pause need many digits."""
    requests = [
        {"id": f"r{i}", "prompt": {"len": 9}, "max_tokens": 6, "arrival_time": 0.02177 + i // 2 * idle}
        for i in range(6)
    ]
    deno_page.open(simulate({"requests": requests, "cost_model": {"fixed": 0.0011}}), width=width)
    labels = sorted((x, words) for x, _, words in Marks(deno_page.painted("timeline")["marks"]).texts(y=144))[1:]
    assert len(labels) > 1 and len({words for _, words in labels}) == len(labels), labels
    for (x, words), (after, _) in pairwise(labels):
        assert x + CHARACTER * len(words) < after, labels


@pytest.mark.parametrize("budget", [0, 8])
def test_a_timeline_without_a_budget_or_with_as_many_seats(deno_page, budget):
    """A recording may not know its budget: the scale is that of the tokens."""
    requests = [{"id": f"r{i}", "prompt": {"len": 3}, "max_tokens": 9, "arrival_step": 3 * i} for i in range(4)]
    trace, changed = (
        simulate({"requests": requests}),
        Trace(TraceMeta(config={"max_num_seqs": budget or 4, "num_blocks": 512})),
    )
    for info in trace.requests.values():
        changed.add_request(info)
    for record in trace:
        changed.append(replace(record, token_budget=budget))
    deno_page.open(changed)
    for first, size in ((0, 0), *((first, 6) for first in range(len(changed) - 5))):
        if size:
            deno_page("view.cursor.moveTo(argument[0], argument[1])", [first, size])
        records = list(changed)[first : first + size] if size else list(changed)
        marks = Marks(deno_page.painted("timeline")["marks"])
        top = max(budget, *(tokens(record)[1] for record in records))
        assert min(rect[2] for rect in marks.rects() if rect[0] != LIGHT.hairline and rect[4] > 1) >= 18 - 1e-6
        tallest = max(tokens(record)[1] for record in records)
        highest = [rect for rect in marks.rects() if abs(rect[2] - (112 - tallest / top * 94)) < 1e-6]
        assert highest
        lines = [rect for rect in marks.rects(height=1) if rect[0].startswith("pattern")]
        assert len(lines) == bool(budget)


@pytest.mark.parametrize("part", [None, (90, 2050)])
def test_a_long_timeline_shows_range_and_mean_of_each_column(deno_page, part):
    requests = [
        {"id": f"r{i}", "prompt": {"len": 1 + i % 90}, "max_tokens": 40, "arrival_step": 20 * i} for i in range(110)
    ]
    trace = simulate({"requests": requests, "config": {"max_num_batched_tokens": 128}})
    deno_page.open(trace, width=700)
    begin, n = part or (0, len(trace))
    assert n > 2000 and begin + n <= len(trace)
    if part:
        deno_page("(view.cursor.moveTo(argument[0], argument[1]), page.frame())", part)
    marks, columns = Marks(deno_page.painted("timeline")["marks"]), 440
    totals = [tokens(record) for record in trace][begin : begin + n]
    top = max(max(total for _, total in totals), 128)
    spans, means, decodes = (
        [rect for rect in marks.rects(colour=colour) if rect[3] == 1 and 84 <= rect[1] < 530 and rect[2] >= 17]
        for colour in (LIGHT.kv, LIGHT.prefill, LIGHT.decode)
    )
    assert len(spans) == len(means) == len(decodes) == columns
    for i in range(columns):
        first = math.floor(i * n / columns)
        here = totals[first : max(first + 1, math.floor((i + 1) * n / columns))]
        high, low = (112 - f(total for _, total in here) / top * 94 for f in (max, min))
        assert close(spans[i][1:], [84 + i, high, 1, max(1, low - high)], 1e-4)
        assert close(means[i][1:], [84 + i, 112 - sum(t for _, t in here) / len(here) / top * 94 - 0.75, 1, 1.5], 1e-4)
        mean = sum(d for d, _ in here) / len(here) / top * 94
        assert close(decodes[i][1:], [84 + i, 112 - mean, 1, mean], 1e-4)


# -- the chunks of every request -----------------------------------------------------------------------------------


def waits(facts, request_id, state):
    """Stretches of steps, [first, last), in which a request is in a state at the end of its step."""
    found, begin = [], None
    for step in range(len(facts) + 1):
        here = step < len(facts) and facts[step].states.get(request_id) == state
        if here and begin is None:
            begin = step
        if not here and begin is not None:
            found.append((begin, step))
            begin = None
    return found


def drawn_rows(facts, step):
    """The requests that are shown at a step."""
    over = [facts[step].states.get(name) in ("finished", "aborted") for name in facts.order]
    most = max(0, len(facts.order) - 14)
    first = min(max(0, over.index(False) - 1 if False in over else 0), most) if most else 0
    return facts.order[first : first + 14]


@pytest.mark.parametrize(
    ("name", "width", "part"), [*CASES, ("many 0", 1200, False), ("many 0", 390, True), ("long 3", 390, True)]
)
def test_chunks(drawn, name, width, part):
    page, facts, colours = drawn(name, width=width)
    axis = open_axis(page, facts, width, part)
    for step in [step for step in steps_of(facts, 3) if step in axis.steps]:
        painted = page.painted("gantt", step)
        marks, rows = Marks(painted["marks"]), drawn_rows(facts, step)
        assert [words for _, y, words in marks.texts(x=axis.x0 - 8)] == rows
        scrolled = [rect[2:5:2] for rect in marks.rects() if abs(rect[1] - axis.x1 - 2) < 1e-6]
        share, hidden = 14 / len(facts.order), len(facts.order) > 14
        track = 16 * len(rows)
        first = facts.order.index(rows[0])
        assert len(scrolled) == hidden
        assert not hidden or close(scrolled[0], [18 + first / len(facts.order) * track, share * track])
        lines = [rect[1:4] for rect in marks.rects(height=1, colour=LIGHT.hairline)]
        expected = [[axis.x0, 18 + 16 * row + 15, axis.x1 - axis.x0] for row in range(len(rows))]
        assert len(lines) == len(rows) and all(close(*pair) for pair in zip(lines, expected))
        for row, name_ in enumerate(rows):
            check_chunk_row(marks, facts, axis, name_, 18 + 16 * row, colours)
        if width > 620:
            check_computed_kv(Marks(painted["over"]), facts, axis, rows, step, colours)
        check_chunk_words(page, facts, axis, rows, step)


def check_chunk_row(marks, facts, axis, name, y, colours):
    dense = axis.step_width < 5 and not axis.timed
    cells, runs = [], []
    for step in axis.steps:
        chunk = facts[step].chunk(name)
        if chunk is None:
            continue
        if dense and chunk.arm == "decode":
            if runs and runs[-1][1] == step - 1:
                runs[-1][1] = step
            else:
                runs.append([step, step])
        else:
            cells.append((step, chunk))
    bars = [rect for rect in marks.rects(y + 4, 7) if rect[0] == colours.decode(name)]
    for first, last in runs:
        assert any(close(bar[1:4:2], [axis.x(first), max(1, axis.end(last) - axis.x(first))]) for bar in bars)
    inside = [rect for rect in marks.rects() if y <= rect[2] < y + 14 and axis.x0 - 1 <= rect[1] < axis.x1 + 1]
    fills = [rect for rect in inside if rect[0] in (colours.prefill(name), colours.decode(name)) and rect[4] > 5]
    assert len(fills) == len(cells) + len(runs)
    for step, chunk in cells:
        x = axis.x(step)
        wide = max(1, axis.end(step) - x - (axis.step_width > 4))
        verifies = chunk.arm == "decode" and chunk.drafts and wide > 4
        top, height = (y + 4, 7) if chunk.arm == "decode" and not verifies else (y + 2, 11)
        found = [rect for rect in fills if close(rect[1:], [x, top, wide, height], 1e-4)]
        assert [rect[0] for rect in found] == [colours.of(chunk)], (name, step)
        if verifies:
            draft_cells(marks, chunk, x, y + 3, wide, 9, LIGHT.outline)
        elif chunk.arm == "decode":
            dot = [["arc", x + wide / 2, y + 7.5, min(1.6, wide / 3)]]
            assert sum(same_path(path, dot) for _, path in marks.filled()) == 1
        again = [rect for rect in inside if rect[0].startswith("pattern") and rect[4] == 11 and abs(rect[1] - x) < 1e-4]
        assert len(again) == bool(chunk.num_recomputed_tokens and chunk.arm != "decode")
        assert not again or again[0][3] == pytest.approx(wide * chunk.num_recomputed_tokens / chunk.num_tokens)
        label = [words for at, _, words in marks.texts(y=y + 8) if abs(at - x - wide / 2) < 1e-4]
        fits = wide >= 6 * len(str(chunk.num_tokens)) + 4 and chunk.arm != "decode"
        assert label == ([str(chunk.num_tokens)] if fits else [])
    check_waits(inside, facts, axis, name, y)
    check_row_events(marks, facts, axis, name, y + 7.5)


def check_waits(inside, facts, axis, name, y):
    lines = [rect for rect in inside if rect[2] == y + 7 and rect[4] == 1]
    for state, dashed in (("waiting", False), ("preempted", True)):
        expected = []
        for first, last in waits(facts, name, state):
            first, last = max(first, axis.steps.start), min(last, axis.steps.stop)
            if first < last:
                end = axis.x(last) if last < len(facts) else axis.end(last - 1)
                expected.append([axis.x(first), end - axis.x(first)])
        found = [rect[1:4:2] for rect in lines if rect[0].startswith("pattern") == dashed]
        assert len(found) == len(expected) and all(close(*pair, 1e-4) for pair in zip(found, expected)), (name, state)


def check_row_events(marks, facts, axis, name, y):
    expected = []
    for step in axis.steps:
        for _, kind, who, _ in facts.events(step):
            if who == name and kind == "preempt":
                expected.append(event_shape(kind, axis.x(step) + min(6, axis.step_width / 2), y, 4))
            if who == name and kind == "finish":
                expected.append(event_shape(kind, axis.end(step) + 4, y, 2.5))
            if who == name and kind == "abort":
                expected.append(event_shape(kind, axis.x(step) + 3, y, 3))
    colours = {EVENT_MARKS[kind][1] for kind in ("preempt", "finish", "abort")}
    shapes = [path for colour, path in [*marks.filled(), *marks.stroked()] if colour in colours]
    rows = [path for path in shapes if abs(height_of(path) - y) < 1e-4]
    assert len(rows) == len(expected)
    for shape in expected:
        assert any(same_path(path, shape) for path in rows), (name, shape)


def height_of(path):
    """The middle of a shape."""
    if path[0][0] == "rect":
        return path[0][2] + path[0][4] / 2
    ys = [part[1] for part in path]
    return (min(ys) + max(ys)) / 2


def computed_kv(facts, step, name):
    """The last chunk of a request up to a step, and the tokens that the prefix cache had; None if no KV is kept."""
    chunks = [(at, facts[at].chunk(name)) for at in range(step + 1) if facts[at].chunk(name)]
    if not chunks or facts[step].states[name] in ("preempted", "aborted"):
        return None
    if any(name in record.finished for record in facts.records[:step]):  # its blocks were freed at the end of that step
        return None
    at, last = chunks[-1]
    taken = max(i for i in range(at + 1) if name in (*facts.records[i].admitted, *facts.records[i].resumed))
    hit = facts[taken].chunk(name)
    return last, hit.num_cached_tokens if hit else 0


def check_computed_kv(over, facts, axis, rows, step, colours):
    totals = {}
    for name in facts.order:
        ends = [chunk.start - chunk.ahead + chunk.num_tokens for record in facts.records for chunk in record.chunks
                if chunk.request_id == name]  # fmt: skip
        totals[name] = max(facts.trace.requests[name].num_prompt_tokens, ends[-1] if ends else 0)
    scale, x = 92 / max(totals.values()), axis.x1 + 16
    for row, name in enumerate(rows):
        y = 18 + 16 * row + 3
        frame = [frame for frame in over.frames(LIGHT.decode) if frame[2] == y + 0.5]
        assert close(frame[0][1:4:2], [x + 0.5, totals[name] * scale - 1])
        bars = [rect for rect in over.rects(y, 8)]
        if (kept := computed_kv(facts, step, name)) is None:
            assert not bars
            continue
        last, cached = kept
        start, is_now = last.start - last.ahead, facts[step].chunk(name) is not None
        expected = [
            [colours.prefill(name), x, (start + last.num_tokens) * scale],
            [LIGHT.kv, x, cached * scale],
        ]
        for bar, (colour, left, wide) in zip(bars, expected):
            assert bar[0] == colour and close(bar[1:4:2], [left, wide])
        assert len(bars) == 2
        framed = [frame for frame in over.frames(LIGHT.outline) if frame[2] == y + 0.5]
        assert len(framed) == is_now
        assert not is_now or close(framed[0][1:4:2], [x + start * scale + 0.5, max(2, last.num_tokens * scale) - 1])
        assert (x + 98, y + 4, grouped(start + last.num_tokens)) in over.texts()


def why_waiting(facts, step, name):
    record = facts.records[step]
    return shown(record.passed_over.get(name, record.waiting_reason))


def check_chunk_words(page, facts, axis, rows, at):
    for row, name in enumerate(rows):
        info = facts.trace.requests[name]
        prompt = f"{counted(info.num_prompt_tokens, 'prompt token')}, up to {counted(info.max_tokens, 'output token')}"
        words = [name, prompt]
        if kept := computed_kv(facts, at, name):
            last, cached = kept
            hit = f", of which the prefix cache had {grouped(cached)}" if cached else ""
            words.append(f"computed KV: {counted(last.start - last.ahead + last.num_tokens, 'token')}{hit}")
        assert page.hit("gantt", axis.x0 - 20, 18 + 16 * row + 5) == words
        for step in {at, axis.steps.start, axis.steps.stop - 1} & set(axis.steps):
            lines = page.hit("gantt", (axis.x(step) + axis.end(step)) / 2, 18 + 16 * row + 15)
            chunk, label = facts[step].chunk(name), facts.records[step].step
            assert lines[0] == name
            if chunk:
                kind = "decode" if chunk.arm == "decode" else "prefill"
                expected = [f"step {label}: {kind}, {counted(chunk.num_tokens, 'token')}, {kv(chunk)}", limit(chunk)]
                expected += [drafts(chunk)] if chunk.drafts else []
                if chunk.num_cached_tokens:
                    expected.append(f"prefix cache hit: {counted(chunk.num_cached_tokens, 'token')}")
                if chunk.num_recomputed_tokens:
                    expected.append(f"{counted(chunk.num_recomputed_tokens, 'token')} recomputed after a preemption")
                assert [line for line in lines[1:] if line in expected] == expected
                assert len(lines) <= len(expected) + 2  # why an admission found no more
            else:
                state = facts[step].states.get(name, "")
                assert lines[1] == f"step {label}: {state or 'not arrived yet'}"
                if state in ("waiting", "preempted"):
                    assert lines[2][:85] == why_waiting(facts, step, name)[:85]
                else:
                    assert len(lines) == 2
    table = page.table("gantt", at)["rows"]
    for cells, name in zip(table, facts.order):
        chunk, state = facts[at].chunk(name), facts[at].states.get(name, "")
        prompt = facts.trace.requests[name].num_prompt_tokens
        assert cells[:2] == [name, state]
        kept = computed_kv(facts, at, name)
        computed = [kept[0].start - kept[0].ahead + kept[0].num_tokens, kept[1]] if kept else ["–", 0]
        if chunk:
            start = chunk.start - chunk.ahead
            kind = "decode" if chunk.arm == "decode" else "prefill"
            before = [f"{chunk.num_tokens} {kind}", start, start + chunk.num_tokens]
        else:
            before = ["–", "–", "–"]
        assert cells[2:8] == [*before, *computed, prompt]
        if chunk:
            assert cells[8] == limit(chunk)
        elif state in ("waiting", "preempted"):
            assert cells[8][:85] == why_waiting(facts, at, name)[:85]
        else:
            assert bool(cells[8]) == (state in ("finished", "aborted"))
    assert span(0, 1) == "[0, 1)"


@pytest.mark.parametrize("name", ["timed 3", "plain 1"])
def test_chunks_scheduled_at_the_cursor_come_first_if_asked(drawn, name):
    page, facts, _ = drawn(name)
    page("view.panel('gantt').activeFirst = true")
    for step in steps_of(facts, 4):
        marks = Marks(page.painted("gantt", step)["marks"])
        scheduled = [name for name in facts.order if facts[step].chunk(name)]
        others = [name for name in facts.order if not facts[step].chunk(name)]
        assert [words for _, _, words in marks.texts(x=76)] == [*scheduled, *others][:14]


# -- metrics -------------------------------------------------------------------------------------------------------


def metrics(facts):
    """Name, value of a step, value of the area behind it, minimum of the scale, and how a value is written."""
    pool = facts.num_blocks - 1
    size = facts.groups[facts.shown_group].block_size

    def owned(step):
        return pool - facts.records[step].free_blocks

    def rate(prompts):
        def of(step):
            record, (decode, total) = facts.records[step], tokens(facts.records[step])
            took = record.end - record.time
            given = sum(len(chunk.accepted) for chunk in record.chunks if chunk.arm == "decode")
            return ((total - decode) if prompts else given) / took if took > 0 else math.nan

        return of

    def speed(value):
        return f"{digits(value)} tok/s"

    def latency(first):
        return lambda step: [value for is_first, value in facts.latencies(step).values() if is_first == first]

    def time(value):
        if facts.timed:
            return seconds(value)
        return f"{digits(value)} step{'' if value == 1 else 's'}"

    def share(unit):
        return lambda value: f"{math.floor(value * 100 + 0.5)}% {unit}"

    rates = [("prefill throughput", rate(True), None, 0, speed), ("decode throughput", rate(False), None, 0, speed)]
    return [
        ("time to first token", latency(True), "dots", 0, time),
        ("inter-token latency", latency(False), "dots", 0, time),
        *(rates if facts.timed else []),
        ("token budget used", lambda step: tokens(facts.records[step])[1] / max(1, facts.records[step].token_budget),
         None, 1, share("of the budget")),
        ("KV blocks in use", lambda step: owned(step) / pool,
         lambda step: (owned(step) + len(facts[step].cached)) / pool, 1, share("in use")),
        ("unused slots of used blocks",
         lambda step: facts.unused_slots(step) / (owned(step) * size) if owned(step) else 0, None, 0,
         share("unused")),
        ("waiting requests", lambda step: len(facts.records[step].waiting), None, 0,
         lambda value: f"{grouped(value)} waiting"),
        ("recomputed tokens", lambda step: sum(chunk.num_recomputed_tokens for chunk in facts.records[step].chunks),
         None, 0, lambda value: counted(value, "token")),
    ]  # fmt: skip


def value_at(of, behind, step):
    if behind != "dots":
        return of(step)
    values = of(step)
    return sum(values) / len(values) if values else math.nan


def test_decodes_of_a_recording_without_token_ids_count(deno_page):
    trace, facts = run("timed_spec 16")
    bare = Trace(replace(trace.meta, config={**trace.meta.config, "token_ids_recorded": False}))
    for info in trace.requests.values():
        bare.add_request(replace(info, prompt_token_ids=()))
    for record in trace:
        chunks = tuple(replace(chunk, sampled=None, sampled_before=()) for chunk in record.chunks)
        bare.append(replace(record, chunks=chunks))
    deno_page.open(bare)
    counts = deno_page("argument.map((step) => view.store.numDecoded(step))", list(range(len(trace))))
    whole = [record for record in facts.records if not record.finished]  # an end cuts accepted drafts off
    for record in whole:
        given = sum(len(chunk.accepted) for chunk in record.chunks if chunk.arm == "decode")
        assert counts[record.step] == given
    assert any(chunk.drafts for record in whole for chunk in record.chunks)


@pytest.mark.parametrize(
    ("name", "width", "part"), [*CASES, ("slow_end 3", 1200, False), ("timed_spec 16", 1200, False)]
)
def test_metrics(drawn, name, width, part):
    page, facts, _ = drawn(name, width=width)
    axis = open_axis(page, facts, width, part)
    at = axis.steps[len(axis.steps) // 2]
    painted = page.painted("metrics", at)
    marks, over, rows = Marks(painted["marks"]), Marks(painted["over"]), metrics(facts)
    for row, (title, of, behind, most, write) in enumerate(rows):
        line = 0 if width >= 620 else 14  # for the words, where they have no room at the right
        begin = 4 + (46 + line) * row
        top, base = begin + line + 6, begin + line + 38
        values = [of(step) for step in axis.steps]
        flat = [value for part_ in values for value in part_] if behind == "dots" else values
        flat = flat + ([behind(step) for step in axis.steps] if callable(behind) else [])
        high = max([most, *(value for value in flat if value == value)])
        (place,) = [(x, y) for x, y, words in marks.texts() if words == title]
        assert place == ((axis.x0, begin + 10) if line else (axis.x1 + 16, top + 7))
        assert place[1] < top - 1.25 or place[0] > axis.x1, "no name is over the data"
        label = [words for x, y, words in marks.texts(x=axis.x0 - 8) if y == top + 3]
        assert near(
            label[0],
            write(high).split(" of")[0].split(" in")[0].split(" waiting")[0].removesuffix(" unused") if high else "0",
        )
        assert [LIGHT.hairline, axis.x0, base, axis.x1 - axis.x0, 1] in marks.rects(base, 1)
        area = [rect for rect in marks.rects() if top - 2 <= rect[2] <= base + 1 and rect[1] < axis.x1 + 9]
        if behind == "dots":
            check_dots(area, axis, values, base, high)
        else:
            check_bars([r for r in area if r[0] == LIGHT.owned], axis, of, base, high)
            if callable(behind):
                check_bars([r for r in area if r[0] == LIGHT.cached], axis, behind, base, high)
        value = value_at(of, behind, at)
        said = write(value) if value == value else "none in this step"
        told = next(words for _, y, words in over.texts() if y == begin + (10 if line else 28))
        assert near(told, said.removesuffix(" in this step")) if line else near(told, said), title
        lines = page.hit("metrics", (axis.x(at) + axis.end(at)) / 2, top + 20)
        assert lines[0] == f"step {grouped(facts.records[at].step)}" and near(lines[1], f"{title}: {said}")
    table = page.table("metrics")
    assert table["headings"] == ["step", *(title for title, *_ in rows)]
    assert [row[0] for row in table["rows"]] == [facts.records[step].step for step in axis.steps]
    for cells, step in zip(table["rows"], axis.steps):
        for cell, (_, of, behind, _, write) in zip(cells[1:], rows):
            value = value_at(of, behind, step)
            assert near(cell, write(value) if value == value else "–"), (step, cells)
    words = page("view.panel('metrics').describe()").split("; ")
    for said, (title, of, behind, _, write) in zip(words, rows):
        value = value_at(of, behind, at)
        assert near(said, f"{title} {write(value) if value == value else 'none'}")


def check_dots(area, axis, values, base, high):
    dots = {(rect[1] + 1.25, rect[2] + 1.25) for rect in area if rect[3] == rect[4] == 2.5}
    expected = set()
    for step, found in zip(axis.steps, values):
        for value in found:
            expected.add(((axis.x(step) + axis.end(step)) / 2, base - (value / high if high else 0) * 32))
    assert len(dots) <= len(expected)
    for x, y in expected:
        assert any(abs(x - a) <= 0.5001 and abs(y - b) <= 0.501 for a, b in dots), (x, y)
    for a, b in dots:
        assert any(abs(x - a) <= 0.5001 and abs(y - b) <= 0.501 for x, y in expected), (a, b)


def check_bars(bars, axis, of, base, high):
    stride = max(1, math.floor(len(axis.steps) / (axis.x1 - axis.x0)))
    assert stride == 1
    expected = []
    for step in axis.steps:
        value = of(step)
        if value == value:
            height = (value / high if high else 0) * 32
            wide = axis.end(step) - axis.x(step)
            expected.append([axis.x(step), base - height, max(1, wide - (wide > 5)), max(value > 0, height)])
    assert len(bars) == len(expected)
    assert all(close(bar[1:], wanted, 1e-4) for bar, wanted in zip(bars, expected))


@pytest.mark.parametrize("name", ["timed 3", "plain 1", "spec 16", "hybrid_window 30"])
def test_the_scale_of_a_metric_is_that_of_the_visible_steps(drawn, name):
    """Windows that end with the largest value of a metric, and windows just before it."""
    page, facts, _ = drawn(name)
    for row, (_, of, behind, most, write) in enumerate(metrics(facts)):
        all_values = [of(step) if behind == "dots" else [of(step)] for step in range(len(facts))]
        flat = [max([value for value in values if value == value] or [0]) for values in all_values]
        top = max(range(len(flat)), key=flat.__getitem__)
        for last in {top, top - 1}:
            if last < 5 or last + 1 > max(12, len(facts)):
                continue
            page("view.cursor.moveTo(argument, 6)", last - 5)
            marks = Marks(page.painted("metrics")["marks"])
            values = [of(step) for step in range(last - 5, last + 1)]
            values = [v for part in values for v in part] if behind == "dots" else values
            values += [behind(step) for step in range(last - 5, last + 1)] if callable(behind) else []
            high = max([most, *(value for value in values if value == value)])
            label = [words for x, y, words in marks.texts(x=76) if y == 4 + 46 * row + 9]
            assert near(label[0], re.sub(" (of|in|waiting|unused).*", "", write(high)) if high else "0")


# -- the cursor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "width", "part"), CASES)
def test_the_cursor_stands_at_its_step(drawn, name, width, part):
    page, facts, _ = drawn(name, width=width)
    axis = open_axis(page, facts, width, part)
    for step in axis.steps:
        page.seek(step)
        page("view.cursor.setHover({})")
        for panel, top in (("timeline", 0), ("gantt", 16), ("metrics", 0)):
            page.painted(panel)
            style = page(f"view.panel('{panel}').cursorMark.style.cssText")
            left, wide = float(style.split("(")[1].split("px")[0]), float(style.split("width:")[1].split("px")[0])
            size = max(1.5, axis.end(step) - axis.x(step))
            assert f",{top}px" in style
            expected = [axis.x(step) - 2, size + 3] if size >= 5 else [axis.x(step) + size / 2 - 0.75, 1.5]
            assert close([left, wide], expected, 0.011)
        other = axis.steps[0] if step != axis.steps[0] else axis.steps[-1]
        page("view.cursor.setHover({ step: argument })", other)
        page.painted("timeline")
        assert not page("view.panel('timeline').hoverMark.hidden")
        style = page("view.panel('timeline').hoverMark.style.cssText")
        left = float(style.split("(")[1].split("px")[0])
        middle = axis.x(other) + max(1.5, axis.end(other) - axis.x(other)) / 2
        assert abs(left + 0.75 - middle) < 0.011
    page("view.cursor.setHover({})")


def test_the_visible_steps_are_shared_with_the_host(drawn):
    page, facts, _ = drawn("plain 1")
    last = len(facts) - 1
    told = lambda: page("(page.view.place.share(), page.values.cursor ?? null)")  # noqa: E731
    page("(() => { page.values.cursor = null; })()")
    page("(() => { view.model.set = (name, value) => page.values[name] = value; })()")
    page("view.cursor.seek(3)")
    assert "range" not in told(), "nobody has zoomed"
    page("view.cursor.moveTo(4, 9)")
    assert told()["range"] == [4, 13]
    page("(page.values.cursor = argument, page.listeners['change:cursor']())", {**told(), "range": [6.5, 20.5]})
    assert page("view.cursor.range") == [6.5, 20.5] and page("view.cursor.step") == 3
    marks = Marks(page.painted("timeline")["marks"])
    axis = Axis(facts, 1200, 6.5, 20.5)
    bars = {round(rect[1], 3) for rect in marks.rects() if rect[0] in (LIGHT.prefill, LIGHT.decode)}
    assert round(axis.x(8), 3) in bars
    page("(page.values.cursor = argument, page.listeners['change:cursor']())", {**told(), "range": [-90, last + 90]})
    assert page("view.cursor.chosenRange") is None and page("view.cursor.rangeMode") == "fit", "all of them"
    assert told()["range"] == [-90, last + 90], "the host keeps what it has set"
    page("(page.values.cursor = argument, page.listeners['change:cursor']())", {**told(), "range": [5, 5.2]})
    low, high = page("view.cursor.chosenRange")
    assert high - low == 6, "as many as the view zooms in to"
    page("(page.values.cursor = argument, page.listeners['change:cursor']())", {**told(), "range": None})
    assert page("view.cursor.range[0]") == 0 and page("view.cursor.rangeMode") == "fit"
    place = {"view": "all", "step": 7, "follow": False, "request": None}
    page("view.cursor.moveTo(4, 9)")
    page("view.place.take(argument)", place)
    assert page("view.cursor.range") == [4, 13], "a teacher's place has no range"
