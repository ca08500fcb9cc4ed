"""Pictures and tables of whole runs by the code that browsers run: compare, the incident, the playground's numbers."""

import json
import math
import random
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from facts_of_records import Facts
from feature_workloads import random_workload
from msgspec.structs import replace
from painted import LIGHT, Colours, Marks, close, counted, digits, grouped, seconds
from runs_to_draw import COSTS, dressed, run
from test_marks_of_steps import event_shape, height_of, near, same_path, tokens
from viz_traces import requests_in_time, workload

from workbench import simulate
from workbench.analysis.fork import fork
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.viz.changed_run import Changed, changed_run
from workbench.viz.palette import EVENT_MARKS

LEFT, SPACE = 84, 1100
SERVED = Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz"


def other_tokens(trace, seed):
    """The same run, in which some requests have other tokens from some token on."""
    changed, counts = Trace(trace.meta), {}
    for info in trace.requests.values():
        changed.add_request(info)
    for record in trace:
        chunks = []
        for chunk in record.chunks:
            counts[chunk.request_id] = counts.get(chunk.request_id, 0) + len(chunk.accepted)
            number = int(chunk.request_id[1:]) if chunk.request_id[1:].isdigit() else 0
            differs = chunk.sampled is not None and (number + seed) % 3 == 0 and counts[chunk.request_id] > 2
            chunks.append(replace(chunk, sampled=chunk.sampled + 1) if differs else chunk)
        changed.append(replace(record, chunks=tuple(chunks)))
    changed.end = trace.end
    return changed


@cache
def pair(name):
    """Two runs of one workload under different configurations."""
    kind, _, seed = name.partition(" ")
    if kind == "late":  # the tallest step is the last one of the second run
        requests = [{"id": "a", "prompt": {"len": 5}, "max_tokens": 6}]
        requests += [{"id": "b", "prompt": {"len": 90}, "max_tokens": 1, "arrival_step": 8}]
        given = {"requests": requests, "cost_model": COSTS}  # two budgets are compared in seconds alone
        runs = [simulate(given, config={"max_num_batched_tokens": budget}) for budget in (32, 128)]
        return *runs, *map(Facts, runs)
    if kind == "spec":
        given = {**random_workload("spec", random.Random(f"drawn {name}")), "cost_model": COSTS}
        first, second = (simulate(given, config=config, max_steps=80) for config in ({}, {"max_num_seqs": 2}))
        second = other_tokens(second, int(seed))
        return first, second, Facts(first), Facts(second)
    given = workload(int(seed), num_requests=10, num_blocks=70)
    costs = {"cost_model": COSTS} if kind == "timed" else {}
    for number, request in enumerate(given["requests"][::3] if kind == "aborts" else ()):
        request["abort_step"] = request["arrival_step"] + 4 * number
    half = given["config"]["max_num_batched_tokens"] // 2
    change = {"max_num_batched_tokens": half, "max_num_seqs": 2} if costs else {"num_blocks": 50}
    first, second = (simulate({**given, **costs}, config=config, max_steps=400) for config in ({}, change))
    second = other_tokens(second, int(seed))
    if kind == "timed":
        first, second = dressed(first, 1), dressed(second, 2)
    return first, second, Facts(first), Facts(second)


PAIRS = ("plain 1", "plain 3", "plain 4", "timed 3")


def clock(facts):
    """Begin and end of each step without pauses."""
    times, end = [], 0.0
    for step, record in enumerate(facts.records):
        gap = max(0.0, record.time - facts.records[step - 1].end) if step else 0.0
        if gap > 0.5:
            gap = times[-1][1] - times[-1][0]
        times.append((end + gap, end + gap + record.end - record.time))
        end = times[-1][1]
    return times


def first_difference(a, b):
    for i, (one, two) in enumerate(zip(a, b)):
        if one.id != two.id:
            return i
    return -1 if len(a) == len(b) else min(len(a), len(b))


def shown_order(page):
    return [row[0] for row in page("view.other.comparison.rows")]


def both(facts):
    return list(enumerate(facts))


@pytest.mark.parametrize("by", ["time", "step"])
@pytest.mark.parametrize("has_times", [True, False])
def test_the_legend_names_the_other_run_if_it_is_outlined(deno_page, by, has_times):
    """A run that is changed in its middle has no times, so an axis of times has no place for its outline."""
    page, trace = deno_page, requests_in_time(64)
    page.open(trace, requests_in_time(128) if has_times else fork(trace, 2, max_num_seqs=2), width=1200)
    page("(view.cursor.axis = argument, view.showComparison(true), view.changed('range'), page.frame())", by)
    assert page("view.cursor.byTime") == (by == "time")
    marks = Marks(page.painted("timeline")["marks"])
    named = [words for *_, words in marks.texts() if words == "run B"]
    assert len(named) == (has_times or by == "step")


@pytest.mark.parametrize("width", [320, 340, 360, 1200])
def test_labels_of_an_axis_leave_each_other_room(deno_page, width):
    page = deno_page
    page.open(requests_in_time(64), requests_in_time(128), width=width)
    page("(view.panel('compare').align.value = 'time', view.panel('compare').realign(), page.frame())")
    labels = sorted(text for text in Marks(page.painted("compare")["marks"]).texts(y=126) if text[0] >= LEFT)
    assert len(labels) > 3
    for (at, _, words), (following, *_) in pairwise(labels):
        assert at + 6 * len(words) <= following


@pytest.mark.parametrize("count", [24, 25])
def test_compare_says_which_requests_it_draws(deno_page, count):
    requests = [{"id": f"r{n}", "prompt": {"len": 20}, "max_tokens": 3, "arrival_step": n} for n in range(count)]
    deno_page.open(*(simulate({"config": {"max_num_batched_tokens": n}, "requests": requests}) for n in (64, 32)))
    assert len(deno_page("(page.frame(), view.panel('compare').rows)")) == 24
    hint = deno_page("view.panel('compare').hintElement.textContent")
    assert ("the 24 of 25 requests with the largest changes" in hint) == (count == 25)


def test_two_parts_with_other_requests_are_named(deno_page):
    requests = [{"id": f"r{n}", "prompt": {"len": 20}, "max_tokens": 9, "arrival_step": 3 * n} for n in range(9)]
    first, second = (
        simulate({"config": {"max_num_batched_tokens": budget}, "requests": requests}) for budget in (64, 8)
    )
    a, b = first[10:20], second[15:30]
    assert set(a.requests) != set(b.requests)
    for page_a, page_b, held in (
        (a, b, ("steps 10 to 19 of this run", "steps 15 to 29 of the other run")),
        (first, second, ("this run", "the other run")),
    ):
        deno_page.open(page_a, page_b)
        hint, said = deno_page(
            "[view.panel('compare').hintElement, view.panel('compare').summary].map((e) => e.textContent)"
        )
        assert all(words in hint for words in held) and "what if" not in hint
        assert ("10 steps" not in said) and ("compare the whole runs" in said) == (page_a is a)


@pytest.mark.parametrize("align", ["step", "arrival", "time"])
@pytest.mark.parametrize("name", [*PAIRS, "late 0", "aborts 1"])
def test_compare(deno_page, name, align):
    page, (first, second, *facts) = deno_page, pair(name)
    page.open(first, second)
    page("(view.panel('compare').align.value = argument, view.panel('compare').realign(), page.frame())", align)
    page("view.panel('compare').rowsOf.value = 'chunks'")
    timed = align == "time" and facts[0].timed
    if facts[0].timed and align != "arrival":  # one axis for all panels
        assert page("view.cursor.byTime") == timed
    marks = Marks(page.painted("compare")["marks"])
    order, colours = shown_order(page), Colours(facts[0].records)
    assert sorted(order) == sorted(facts[0].order)
    clocks = [clock(each) for each in facts]
    end = max((times[-1][1] if timed else len(times)) for times in clocks)

    def x(run_, step, origin=0):
        times = clocks[run_]
        at = (times[step][0] if step < len(times) else times[-1][1]) if timed else step
        return LEFT + (at - origin) / end * SPACE

    most = max(1, *(tokens(record)[1] for each in facts for record in each.records))
    for run_, each in both(facts):
        bars = [r for r in marks.rects(colour=(LIGHT.prefill, LIGHT.decode)[run_])]
        bars = [r for r in bars if (r[2] + r[4] <= 66.01 if not run_ else abs(r[2] - 74) < 1e-6)]
        expected = []
        for step, record in enumerate(each.records):
            high = tokens(record)[1] / most * 44
            wide = max(0.6, x(run_, step + 1) - x(run_, step) - 0.5)
            expected.append([x(run_, step), 74 if run_ else 66 - high, wide, high])
        assert len(bars) == len(expected) and all(close(b[1:], e, 1e-4) for b, e in zip(bars, expected))
        label = f"{'AB'[run_]}: {counted(len(each), 'step')}"
        assert (76, pytest.approx(70 + (1 if run_ else -1) * 26.4), label) in marks.texts(x=76)
    strip = [r[1:] for r in marks.rects(height=3, colour=LIGHT.cursor)]
    expected = []
    for step, (a, b) in enumerate(zip(facts[0].records, facts[1].records)):
        if (more := tokens(b)[1] - tokens(a)[1]) and not timed:
            expected.append([x(0, step), 70 if more > 0 else 67, max(0.8, x(0, step + 1) - x(0, step)), 3])
    assert len(strip) == len(expected) and all(close(s, e) for s, e in zip(strip, expected))
    assert any("the strip marks" in words for *_, words in marks.texts(y=9)) == (not timed), "it tells what is drawn"
    for at, _, words in [text for text in marks.texts(y=126) if text[0] >= LEFT]:
        value = float(words.split()[0].replace(",", ""))
        value *= {"ms": 1e-3, "s": 1}.get(words.split()[-1], 1) if timed else 1
        assert at == pytest.approx(LEFT + value / end * SPACE, abs=8 if timed else 1e-6)
        assert at > LEFT or words.split()[0] in ("0", "0:00")
    names = [words for _, y, words in marks.texts(x=76) if y > 140]
    assert names == order
    lines = [rect[1:] for rect in marks.rects(height=1, colour=LIGHT.hairline)]
    assert lines == [[LEFT, 140 + row * 24 + 22, SPACE, 1] for row in range(len(order))]
    for row, who in enumerate(order):
        check_compared_row(marks, facts, who, 140 + row * 24 + 10, x, align, colours)
    check_compare_words(page, facts, order, end, timed)
    for step in (0, len(facts[0]) // 2, len(facts[0]) - 1):
        lines = Marks(page.painted("compare", step)["over"]).rects(colour=LIGHT.cursor)
        place = [x(0, step) - 0.75, 18, 1.5, page("view.panel('compare').height") - 22]
        assert [line[1:] for line in lines] == ([pytest.approx(place)] if align != "arrival" else [])


def test_runs_without_times_and_with_two_budgets_have_no_latencies_in_the_table(deno_page):
    requests = [{"id": f"r{n}", "prompt": {"len": 40}, "max_tokens": 5} for n in range(3)]
    first, equal, other = (
        simulate({"config": {"max_num_batched_tokens": budget}, "requests": requests}) for budget in (64, 64, 16)
    )
    panel = "view.panel('compare')"
    for second, number, count in ((other, 4, 1), (equal, 10, 5)):  # without numbers, the headings stand alone
        deno_page.open(first, second)
        deno_page.painted("compare")
        rows = f"[...{panel}.gainTable.children[0].children, ...{panel}.meanRow.children, ...{panel}.gainRows.children]"
        assert deno_page(f"{rows}.map((row) => row.children.length)") == [number] * count
        assert {len(row) for row in deno_page.table("compare")["rows"]} == {4 if second is other else 8}


def test_a_prediction_is_drawn_beside_the_prediction_of_the_run_as_it_was(deno_page):
    """The recorded times are noisy, and noise would look like an effect of the setting."""

    class Noisy(CostModel):
        number = 0

        def step_seconds(self, chunks):
            self.number += 1
            return super().step_seconds(chunks) * random.Random(self.number).uniform(0.8, 1.3)

    rows = [
        {"id": f"r{i}", "prompt": {"len": 20 + 9 * i}, "max_tokens": 9 + i, "arrival_time": 0.05 * i} for i in range(12)
    ]
    costs = Noisy(fixed=0.02, per_prefill_token=1e-4, per_sequence=1e-3)
    trace = simulate({"config": {"max_num_batched_tokens": 64}, "requests": rows}, cost_model=costs)
    changed = changed_run(trace, None, 0, {"max_num_seqs": 3})
    page = deno_page

    def shown(*sides, **more):
        page.open(*sides, **more)
        page("view.theme.focusOnly([])")  # the hues are those of the run on the page, recorded or predicted
        page("(view.panel('compare').align.value = 'time', view.panel('compare').realign(), page.frame())")
        painted = page.painted("compare", 5)
        return painted, page("view.panel('compare').hintElement.textContent"), page.table("compare")["rows"]

    painted, hint, rows = shown(trace, changed=changed)
    assert hint.startswith("Top: this run as it was, predicted (A). Bottom: what if, predicted (B); ")
    assert "first different token" not in hint, "a simulation repeats the tokens of its run"
    assert page("view.store.numSteps") == len(trace)  # the other panels show what was recorded
    alone = shown(changed.unchanged, changed.trace)
    assert painted == alone[0] and rows == alone[2]
    assert painted["marks"] != shown(trace, changed.trace)[0]["marks"]
    page.open(trace, changed=changed)
    page("view.beginAnother()")
    assert page("view.unchanged") is None


def test_a_place_in_a_predicted_run_is_that_of_the_same_chunk_in_the_recorded_one(deno_page):
    """The prediction of the run as it was takes other steps than the recording, a few more."""
    trace, page = Trace.load(SERVED), deno_page
    changed = changed_run(trace, None, 0, {"max_num_seqs": 6})
    a = changed.unchanged
    assert len(a) != len(trace)
    page.open(trace, changed=changed)
    parted = page("view.other.comparison.first_divergence")
    who, step = parted["request"], parted["step"]
    before = sum(chunk.request_id == who for record in a[: step + 1] for chunk in record.chunks)
    steps = [record.step for record in trace if any(chunk.request_id == who for chunk in record.chunks)]
    page("view.panel('compare').goToDivergence()")
    assert page("view.cursor.step") == steps[before - 1] != step, "the control: the number in A is another place"
    page("(view.panel('compare').align.value = 'step', view.panel('compare').realign(), page.frame())")
    end, moved = max(len(a), len(changed.trace)), 0
    for step in range(0, len(trace), 7):
        who = trace[step].chunks[0].request_id
        number = sum(chunk.request_id == who for record in trace[: step + 1] for chunk in record.chunks)
        steps = [record.step for record in a if any(chunk.request_id == who for chunk in record.chunks)]
        (line,) = Marks(page.painted("compare", step)["over"]).rects(colour=LIGHT.cursor)
        there = steps[min(number, len(steps)) - 1]
        assert line[1] == pytest.approx(LEFT + there / end * SPACE - 0.75), step
        moved += there != step
    assert moved


@pytest.mark.parametrize("reason", ["the times vary too much", "the times vary too much. Most of it is noise"])
def test_a_comparison_without_times_says_why_in_one_sentence(deno_page, reason):
    trace = run("timed 3")[0]
    deno_page.open(trace, changed=Changed(fork(trace, 0, max_num_seqs=2), {"no_times": reason}, None))
    said = deno_page("view.panel('compare').summary.textContent")
    assert re.findall(r"Times are in steps[^.]*\.", said) == ["Times are in steps: the times vary too much."]
    assert "noise" not in said


def check_compared_row(marks, facts, who, middle, x, align, colours):
    outputs = [each[-1].tokens[who] for each in facts]
    difference = first_difference(*outputs)
    info = facts[0].trace.requests[who]
    origin = info.arrival_step if align == "arrival" else 0
    for run_, each in both(facts):
        expected, hatched = [], []
        for step in range(len(each)):
            if chunk := each[step].chunk(who):
                high = 4 if chunk.arm == "decode" else 8
                y = middle + 0.5 if run_ else middle - 0.5 - high
                place = [x(run_, step, origin), y, max(0.8, x(run_, step + 1, origin) - x(run_, step, origin)), high]
                expected.append([colours.of(chunk), *place])
                hatched += [place] if chunk.num_recomputed_tokens else []
        half = [
            rect for rect in marks.rects()
            if (middle <= rect[2] < middle + 9 if run_ else middle - 9 < rect[2] and rect[2] + rect[4] <= middle)
        ]  # fmt: skip
        cells = [rect for rect in half if rect[0] in (colours.prefill(who), colours.decode(who)) and rect[4] in (4, 8)]
        assert [cell[0] for cell in cells] == [cell[0] for cell in expected]
        assert all(close(cell[1:], wanted[1:], 1e-4) for cell, wanted in zip(cells, expected))
        waits = [rect[1:] for rect in half if rect[0] == LIGHT.muted and rect[4] == 1]
        expected = [
            [x(run_, first, origin), middle + (4 if run_ else -5), x(run_, last, origin) - x(run_, first, origin), 1]
            for first, last in waits_by_records(each, who)
        ]
        assert [wait[1] for wait in waits] == [wanted[1] for wanted in expected]
        assert all(close(wait, wanted, 1e-4) for wait, wanted in zip(waits, expected))
        check_row_events(marks, each, who, middle + (4.5 if run_ else -4.5), lambda step, r=run_: x(r, step, origin))
        again = [rect[1:] for rect in half if rect[0].startswith("pattern")]
        assert len(again) == len(hatched) and all(close(a, b, 1e-4) for a, b in zip(again, hatched))
        lines = [
            rect for rect in marks.rects(colour=LIGHT.bad) if abs(rect[2] - (middle if run_ else middle - 9)) < 0.01
        ]
        if 0 <= difference < len(outputs[run_]):
            step = outputs[run_][difference].step - each.records[0].step
            assert [rect[1] for rect in lines] == [pytest.approx(x(run_, step, origin) - 1)]
            assert crosses(marks, x(run_, step, origin), middle + (4.5 if run_ else -4.5))
        else:
            assert not lines


def check_row_events(marks, facts, who, y, x):
    """The marks of a row are those of the preemptions and the abort that the steps tell."""
    for kind, found in (("preempt", marks.filled()), ("abort", marks.stroked())):
        told = [step for step, record in enumerate(facts.records) for name in happened(record, kind) if name == who]
        shapes = [
            path for colour, path in found if colour == EVENT_MARKS[kind][1] and height_of(path) == pytest.approx(y)
        ]
        expected = [event_shape(kind, x(step) + 3, y, 3) for step in told]
        assert len(shapes) == len(expected), (who, kind)
        assert all(any(same_path(path, shape) for path in shapes) for shape in expected), (who, kind)


def happened(record, kind):
    return record.preempted if kind == "preempt" else record.aborted


def waits_by_records(facts, who):
    """The stretches [first, last) of steps in which a request waits, by the records of the steps alone."""
    begun = None
    for step, record in enumerate(facts.records):
        waits = who in record.waiting or who in record.preempted
        if begun is None and waits:
            begun = step
        if begun is not None and not waits:
            yield begun, step
            begun = None
    if begun is not None:
        yield begun, len(facts.records)


def crosses(marks, x, y):
    """Whether a cross stands at a place."""
    shape = [[x - 3, y - 3], [x + 3, y + 3], [x - 3, y + 3], [x + 3, y - 3]]
    flat = [value for corner in shape for value in corner]
    paths = [[value for corner in path for value in corner] for colour, path in marks.stroked() if colour == LIGHT.bad]
    return sum(close(path, flat, 1e-4) for path in paths) == 1


def gaps_of(facts, who):
    """The times to first token of a request, at most one, and those between its tokens."""
    found = [facts.latencies(step)[who] for step in range(len(facts)) if who in facts.latencies(step)]
    return [v for f, v in found if f], [v for f, v in found if not f]


def compared(facts, who):
    """TTFT, mean ITL and recomputed tokens of a request."""
    firsts, nexts = gaps_of(facts, who)
    again = sum(c.num_recomputed_tokens for r in facts.records for c in r.chunks if c.request_id == who)
    return firsts[0] if firsts else None, sum(nexts) / len(nexts) if nexts else None, again


def check_compare_words(page, facts, order, end, timed):
    differs = any(first_difference(*(each[-1].tokens[who] for each in facts)) >= 0 for who in order)
    hint = page("view.panel('compare').hintElement.textContent")
    assert ("marks the first different token" in hint) == differs
    for kind, words in (("preempt", "triangles: preemptions"), ("abort", "crosses: aborts")):
        has = any(happened(record, kind) for each in facts for record in each.records)
        assert (words in hint) == has, kind

    def write(value):
        return "–" if value is None else seconds(value) if facts[0].timed else digits(value)

    means = page("view.panel('compare').meanRow.children.map((row) => row.children.map((cell) => cell.textContent))")
    if len(order) > 1:
        (name, *said), waste = means[0], [[compared(each, who)[2] for who in order] for each in facts]
        firsts = [[compared(each, who)[0] for each in facts] for who in order]
        both = [pair for pair in firsts if None not in pair]
        gaps = [[gap for who in order for gap in gaps_of(each, who)[1]] for each in facts]  # of all requests alike
        for place, columns in ((0, list(zip(*both))), (1, gaps if all(gaps) else [])):
            means = [sum(column) / len(column) for column in columns] or [None, None]
            assert all(near(cell, write(value)) for cell, value in zip(said[3 * place :], means))
        said_of_gaps = page("view.panel('compare').meanRow.children[0].getAttribute('title')") or ""
        assert (name == "mean (ITL: of all gaps)") == all(gaps) == ("all gaps between two tokens" in said_of_gaps), name
        assert all(near(said[6 + i], digits(sum(waste[i]) / len(order))) for i in (0, 1))
    else:
        assert means == []
    cells = page("view.panel('compare').gainRows.children.map((row) => row.children.map((cell) => cell.textContent))")
    rows = page.table("compare")["rows"]
    told = {cells_of[0]: cells_of for cells_of in cells}
    for who, row in zip(order, rows, strict=True):
        (ta, ia, wa), (tb, ib, wb) = (compared(each, who) for each in facts)
        if who not in told:  # aborted before its first token in both
            assert (ta, ia, wa, tb, ib, wb) == (None, None, 0, None, None, 0)
            continue
        gains = told[who]
        difference = first_difference(*(each[-1].tokens[who] for each in facts))
        assert row[0] == gains[0] == who and row[5:] == [wa, wb, "none" if difference < 0 else difference + 1]
        assert all(near(cell, write(value)) for cell, value in zip(row[1:5], (ta, tb, ia, ib)))
        for place, (a, b) in enumerate(((ta, tb), (ia, ib))):
            change = b - a if None not in (a, b) else None
            said = gains[1 + 3 * place : 4 + 3 * place]
            assert near(said[0], write(a)) and near(said[1], write(b))
            sign = "–" if change is None else "0" if change == 0 else ("+" if change > 0 else "−") + write(abs(change))
            assert said[2][:1] == sign[:1] and (abs(change or 0) < 1e-4 or near(said[2][1:], sign[1:]))
        assert gains[7:] == [grouped(wa), grouped(wb), f"{'+' if wb > wa else '−'}{grouped(abs(wb - wa))}" if wb != wa
                             else "0"]  # fmt: skip
    for row, (who, *_) in enumerate(cells):
        page("(view.cursor.select(null), view.panel('compare').gainRows.children[argument].click(), 1)", row)
        assert page("view.cursor.selected") == facts[0].order.index(who), "a click selects the request of the row"
    page("(view.cursor.select(null), 1)")
    for row, who in enumerate(order):
        lines = page.hit("compare", 40, 140 + row * 24 + 10)
        ends = []
        for each, letter in zip(facts, "AB"):
            steps = [step for step in range(len(each)) if each[step].chunk(who)]
            n = len(each[-1].tokens[who])
            preempted = sum(who in record.preempted for record in each.records)
            told = [f"last scheduled in step {steps[-1] if steps else '–'}"]
            told += [counted(preempted, "preemption")] if preempted else []
            told += ["aborted"] if any(who in record.aborted for record in each.records) else []
            ends.append(", ".join([f"{letter}: {counted(n, 'token')}", *told]))
        difference = first_difference(*(each[-1].tokens[who] for each in facts))
        same = "the same tokens" if difference < 0 else f"the first difference is token {difference + 1}"
        assert lines == [who, *ends, same]
        hover = page("view.panel('compare').hit(40, argument).hover", 140 + row * 24 + 10)
        assert hover["request"] == facts[0].order.index(who)
    if not timed:
        for step in (0, len(facts[0]) // 2, len(facts[0]) - 1):
            across = LEFT + (step + 0.5) / end * SPACE
            assert page.hit("compare", across, 60) == page.hit("compare", across, 118) == [f"step {step}"]
            assert page.hit("compare", across, 119) == []
        short = len(facts[0]) < end
        assert not short or page.hit("compare", LEFT + (len(facts[0]) + 0.5) / end * SPACE, 60) == []
    assert page.hit("compare", LEFT - 10, 60) == []


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_two_parts_of_a_run_have_their_numbers_in_the_whole_output(deno_page, seed):
    rng, page = random.Random(seed), deno_page
    requests = [{"id": f"r{n}", "prompt": {"len": rng.randint(5, 60)}, "max_tokens": 40} for n in range(4)]
    run = simulate({"config": {"max_num_batched_tokens": 64}, "requests": requests})
    a, b = sorted(rng.sample(range(4, 30), 2))
    page.open(run[a:], run[b:])
    page("view.panel('compare').rowsOf.value = 'tokens'")
    page.painted("compare")
    whole, order = Facts(run)[-1].tokens, shown_order(page)
    counts = [{who: sum(token.step < start for token in whole[who]) for who in order} for start in (a, b)]
    first = min(number for each in counts for number in each.values())
    most = max(8, *(len(whole[who]) - first for who in order))
    assert first > 0
    for row, who in enumerate(order):
        middle = 140 + row * 24 + 10
        for i in (counts[0][who], counts[1][who] - 1, counts[1][who], len(whole[who]) - 1):
            if i < first:
                continue
            lines = page.hit("compare", LEFT + (i - first + 0.5) / most * SPACE, middle - 3)
            in_both = i >= max(each[who] for each in counts)
            assert lines[0] == f"{who}, token {i + 1}: {'the same token' if in_both else 'in one run alone'}"
            step = f"in step {whole[who][i].step}, "
            assert step in lines[1]
            assert (step in lines[2]) if in_both else lines[2] == "B: before this part of the run"


@pytest.mark.parametrize("name", [*PAIRS, "spec 16"])
def test_tokens_of_two_runs_side_by_side(deno_page, name):
    page, (first, second, *facts) = deno_page, pair(name)
    page.open(first, second)
    page("view.panel('compare').rowsOf.value = 'tokens'")
    marks, order = Marks(page.painted("compare")["marks"]), shown_order(page)
    colours = Colours(facts[0].records)
    most = max(8, *(len(each[-1].tokens[who]) for each in facts for who in order))

    def latency(each, who, i):
        out = each[-1].tokens[who]
        if i and out[i - 1].step == out[i].step:
            return 0
        return each.latencies(out[i].step - each.records[0].step)[who][1]

    longest = max(latency(each, who, i) for each in facts for who in order for i in range(1, len(each[-1].tokens[who])))
    for x, _, words in [text for text in marks.texts(y=140 + len(order) * 24 + 8) if text[0] >= LEFT]:
        assert x == pytest.approx(LEFT + int(words) / most * SPACE)
    for row, who in enumerate(order):
        middle = 140 + row * 24 + 10
        difference = first_difference(*(each[-1].tokens[who] for each in facts))
        for run_, each in both(facts):
            expected = []
            for i in range(len(each[-1].tokens[who])):
                high = max(1.5, min(1, latency(each, who, i) / longest) * 9)
                fill = (colours.prefill, colours.decode)[run_](who)
                fill = LIGHT.kv if 0 <= difference <= i else fill
                wide = max(0.8, SPACE / most - 0.8)
                expected.append(
                    [fill, LEFT + i / most * SPACE, middle + 0.5 if run_ else middle - 0.5 - high, wide, high]
                )
            bars = [
                rect for rect in marks.rects() if abs(rect[3] - wide) < 1e-6
                and (abs(rect[2] - middle - 0.5) < 1e-6 if run_ else abs(rect[2] + rect[4] - middle + 0.5) < 1e-6)
            ] if expected else []  # fmt: skip
            assert [bar[0] for bar in bars] == [bar[0] for bar in expected]
            assert all(close(bar[1:], wanted[1:], 1e-4) for bar, wanted in zip(bars, expected))
            for i in sorted({0, difference, len(expected) - 1} & set(range(len(expected)))):
                lines = page.hit("compare", LEFT + (i + 0.5) / most * SPACE, middle - 3)
                said = "the same token"
                if 0 <= difference <= i:
                    later = f"after the first difference, at token {difference + 1}"
                    said = "the first difference" if i == difference else later
                assert lines[0] == f"{who}, token {i + 1}: {said}"
                token = each[-1].tokens[who][i]
                took = latency(each, who, i)
                wait = seconds(took) if facts[0].timed else counted(int(took), "step")
                other = facts[1 - run_][-1].tokens[who]
                twin = other[i] if i < len(other) else None
                text = token.text or (twin.text if twin and twin.id == token.id else "")
                text = json.dumps(text) if text else "no text"
                line = f"{'AB'[run_]}: {text} (id {token.id}) in step {token.step}, after {wait}"
                assert near(lines[1 + run_], line)
                if i >= len(other):
                    assert lines[2 - run_] == f"{'BA'[run_]}: has ended"
        marked = [rect for rect in marks.rects(colour=LIGHT.bad) if abs(rect[2] - middle + 9) < 1e-6]
        assert [rect[1] for rect in marked] == (
            [pytest.approx(LEFT + difference / most * SPACE - 1)] if difference >= 0 else []
        )
        assert all(rect[3:] == [1.5, 18] for rect in marked), "a line through both runs"


def test_an_output_that_an_abort_cuts_short_does_not_differ(deno_page):
    """Badge, hint, crosses, words and table have one rule: two whole outputs alone differ in length."""
    page, runs = deno_page, []
    for aborted, length in ((12, 9), (7, 5)):
        requests = [{"id": "cut", "prompt": {"len": 30}, "max_tokens": 20, "abort_step": aborted}]
        requests += [{"id": "ends", "prompt": {"len": 9}, "max_tokens": length}]
        runs.append(simulate({"config": {"max_num_batched_tokens": 16}, "requests": requests}))
    counts = [sum(len(c.accepted) for r in run for c in r.chunks if c.request_id == "cut") for run in runs]
    assert counts[0] > counts[1] > 0
    whole = simulate(
        {"config": {"max_num_batched_tokens": 16}, "requests": [requests[0] | {"abort_step": 99}, requests[1]]}
    )
    for second, expected in ((runs[1], {"cut": "none", "ends": 6}), (whole, {"cut": "none", "ends": 6})):
        page.open(runs[0], second)
        for rows in ("chunks", "tokens"):
            page("view.panel('compare').rowsOf.value = argument", rows)
            lines = Marks(page.painted("compare")["marks"]).rects(colour=LIGHT.bad)
            row_of = [140 + 24 * shown_order(page).index("ends") + 10 - y for y in (9, 0, 9)]
            assert {rect[2] for rect in lines} <= set(row_of) and lines, "the cross of the request that ended earlier"
        assert {row[0]: row[-1] for row in page.table("compare")["rows"]} == expected
        middle = 140 + 24 * shown_order(page).index("cut") + 10
        assert page.hit("compare", 40, middle)[-1] == "the same tokens as far as both have them"
        last = max(counts[0], sum(len(c.accepted) for r in second for c in r.chunks if c.request_id == "cut")) - 1
        most = page("view.panel('compare').tokens.most")
        lines = page.hit("compare", LEFT + (last + 0.5) / most * SPACE, middle - 3)
        assert lines[0] == f"cut, token {last + 1}: in one run alone"
    alone = [
        simulate({"requests": [{"id": "cut", "prompt": {"len": 30}, "max_tokens": 20, "abort_step": step}]})
        for step in (9, 5)
    ]
    page.open(*alone)
    assert page("view.panel('compare').badge.textContent") == "same tokens as far as both have them"
    assert "×" not in page("view.panel('compare').hintElement.textContent")
    assert not Marks(page.painted("compare")["marks"]).rects(colour=LIGHT.bad)


@pytest.mark.parametrize("rows", ["chunks", "tokens"])
def test_no_token_differs_where_no_tokens_were_recorded(deno_page, rows):
    """A recorder without token ids leaves placeholders, and those of the two runs are not the same."""
    first, second, *_ = pair("plain 1")
    nameless = Trace(replace(first.meta, config={**first.meta.config, "token_ids_recorded": False}))
    for info in first.requests.values():
        nameless.add_request(info)
    for record in first:
        nameless.append(record)
    marked = {}
    for known, one in ((True, first), (False, nameless)):
        deno_page.open(one, second)
        deno_page("view.panel('compare').rowsOf.value = argument", rows)
        marks = Marks(deno_page.painted("compare")["marks"])
        order, table = shown_order(deno_page), deno_page.table("compare")
        lines = [
            deno_page.hit("compare", 40 if rows == "chunks" else LEFT + 1, 150 + i * 24) for i in range(len(order))
        ]
        hint = deno_page("view.panel('compare').hintElement.textContent")
        marked[known] = len(marks.rects(colour=LIGHT.bad)) + len([c for c, _ in marks.stroked() if c == LIGHT.bad])
        assert ("first different token" in hint) == known
        if not known:
            assert table["caption"] == "no tokens to compare"
            assert [row[-1] for row in table["rows"]] == ["not known"] * len(order)
            words = "no tokens to compare" if rows == "chunks" else "not recorded in both runs"
            assert all(words in " ".join(said) and "differen" not in " ".join(said) for said in lines)
            assert LIGHT.kv not in {rect[0] for rect in marks.rects() if rect[2] > 140}
    assert marked[True] and not marked[False]


@pytest.mark.parametrize("name", [*PAIRS, "late 0", "aborts 1"])
def test_a_timeline_shows_the_other_run_as_outlines(deno_page, name):
    page, (first, second, *facts) = deno_page, pair(name)
    page.open(first, second)
    marks = Marks(page.painted("timeline")["marks"])
    (path,) = [path for colour, path in marks.stroked() if colour == LIGHT.cursor and len(path) > 2]
    timed, clocks = facts[0].timed, [clock(each) for each in facts]
    top = max([1, *(tokens(r)[1] for each in facts for r in each.records), *(r.token_budget for r in facts[0].records)])
    t0, t1 = clocks[0][0][0], max(each[-1][1] for each in clocks)  # the axis holds both
    corners = {(round(x, 2), y) for x, y in path}
    n = max(*map(len, facts), 12)
    for step, record in enumerate(facts[1].records):
        begin, end = clocks[1][step]
        x, right = ((t - t0) / (t1 - t0) for t in (begin, end)) if timed else (step / n, (step + 1) / n)
        x, right = (84 + place * 940 for place in (x, right))
        y = math.floor(112 - tokens(record)[1] / top * 94 + 0.5) + 0.5
        assert {(round(x, 2), y), (round(right, 2), y)} <= corners and x <= right <= 1024.001


# -- an incident -------------------------------------------------------------------------------------------------------


def percentile(values, percent):
    values = sorted(values)
    if not values:
        return math.nan
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    return values[low] + (values[min(low + 1, len(values) - 1)] - values[low]) * (place - low)


def of_requests(width):
    return "requests per second" if width >= 1 else f"requests in {seconds(width)}"


class Stretch:
    """The events and values of a stretch of time."""

    def __init__(self):
        self.arrivals = self.hits = self.queried = self.preemptions = self.aborts = 0
        self.first, self.next, self.kv, self.waiting = [], [], math.nan, math.nan

    def rows(self, width):
        """The values of each row of the picture."""
        return {
            of_requests(width): [self.arrivals / width if width >= 1 else self.arrivals],
            "time to first token": [percentile(self.first, 99), percentile(self.first, 50)],
            "inter-token latency": [percentile(self.next, 99), percentile(self.next, 50)],
            "KV blocks in use": [self.kv],
            "hit rate": [self.hits / self.queried if self.queried else math.nan],
            "waiting requests": [self.waiting],
            "preemptions": [self.preemptions],
            "aborted requests": [self.aborts],
        }


def stretches(facts, begin, end, count):
    """The run from one time to another in equal stretches, and as a whole."""
    width, bins, whole = (end - begin) / count, [Stretch() for _ in range(count)], Stretch()

    def at(time):
        return min(count - 1, math.floor((time - begin) / width))

    for info in facts.trace.requests.values():
        if begin <= info.arrival_time <= end:
            bins[at(info.arrival_time)].arrivals += 1
            whole.arrivals += 1
    step_0 = min(end, facts.records[0].time)
    arrived = sorted(info.arrival_time for info in facts.trace.requests.values() if info.arrival_time < step_0)
    for number, time in enumerate(arrived if begin < step_0 else (), 1):  # they wait for step 0
        for each in (whole, *bins[at(max(begin, time)) : at(step_0) + 1]):
            each.waiting = number
    for step, record in enumerate(facts.records):
        if record.end <= begin or record.time >= end:
            continue
        kv, waiting = 1 - record.free_blocks / (facts.num_blocks - 1), len(record.waiting)
        touched = bins[at(max(begin, record.time)) : at(min(end, record.end)) + 1]
        for each in (whole, *touched):
            each.kv = kv if each.kv != each.kv else max(each.kv, kv)
            each.waiting = waiting if each.waiting != each.waiting else max(each.waiting, waiting)
        if record.end > end:
            continue
        for each in (whole, bins[at(record.end)]):
            for is_first, value in facts.latencies(step).values():
                (each.first if is_first else each.next).append(value)
            admitted = [chunk for chunk in record.chunks if chunk.request_id in record.admitted]
            each.hits += sum(chunk.num_cached_tokens for chunk in admitted)
            each.queried += sum(facts.trace.requests[chunk.request_id].num_prompt_tokens for chunk in admitted)
            each.preemptions += len(record.preempted)
            each.aborts += len(record.aborted)
    return bins, whole, width


def share(value):
    return f"{float(f'{100 * value:.2g}'):g}%"


WRITE = {
    "requests per second": lambda v: f"{float(f'{v:.2g}'):g}",
    "requests in": digits,
    "time to first token": seconds,
    "inter-token latency": seconds,
    "KV blocks in use": share,
    "hit rate": share,
    "waiting requests": digits,
    "preemptions": digits,
    "aborted requests": digits,
}


def write(title, value):
    return WRITE["requests in" if title.startswith("requests in ") else title](value)


@pytest.mark.parametrize(
    ("name", "width", "part"), [("timed 3", 1200, 0), ("timed 2", 390, 0), ("timed 3", 900, 1), ("aborts 3", 1200, 0)]
)
def test_incident(drawn, name, width, part):
    facts = run(name)[1]
    stalled = len(facts) // 2
    slow = [[who, "waiting for a seat", 0.61, facts.order[:2]] for who in facts.order[:5]]
    incident = {"slow": slow, "apart": ["a long prompt"], "stalls": [[stalled, "it stood still"]]}
    page, facts, _ = drawn(name, width=width, status={"live": False, "incident": incident})
    first, last = 0, len(facts)
    if part:
        first, size = len(facts) // 3, max(6, len(facts) // 3)
        page("view.cursor.moveTo(argument[0], argument[1])", [first, size])
        last = first + size
    begin = facts.records[first].time if first else min(
        facts.records[0].time, facts.trace.requests[facts.order[0]].arrival_time
    )  # fmt: skip
    end = facts.records[last - 1].end
    x0, x1 = (68 if width < 430 else 84), width - (20 if width < 620 else 176)
    count = 120
    bins, whole, wide = stretches(facts, begin, end, count)
    titles = [title for title, values in whole.rows(wide).items() if any(value > 0 for value in values)]
    marks = Marks(page.painted("incident")["marks"])
    across = (x1 - x0) / count
    for row, title in enumerate(titles):
        top, base = 58 + row * 44 + 6, 58 + row * 44 + 36
        values = [each.rows(wide)[title] for each in bins]
        known = [value for of in values for value in of if value > 0]
        log = title.endswith(("token", "latency"))
        high, low = max(known), min(known) if log else 0
        scale = math.log if log else lambda value: value
        expected = []
        for i, of in enumerate(values):
            for rank, value in enumerate(of):
                if value > 0:
                    room = scale(high) - scale(low) if log else high
                    y = base - ((scale(value) - (scale(low) if log else 0)) / (room or 1)) * 30
                    colour = LIGHT.text if rank else LIGHT.owned
                    place = [y - 1, across, 2] if log else [y, max(1, across - 1), base - y]
                    expected.append([colour, x0 + i * across, *place])
        found = [r for r in marks.rects() if r[0] in (LIGHT.text, LIGHT.owned) and top - 1.1 <= r[2] <= base + 1
                 and r[1] < x1 and (r[4] == 2 or not log)]  # fmt: skip
        found = [r for r in found if r[3] in (across, max(1, across - 1)) or abs(r[3] - across) < 1.01]
        assert [r[0] for r in found] == [r[0] for r in expected], title
        assert all(close(r[1:], e[1:], 2e-3) for r, e in zip(found, expected)), title
        at = (x0 + 4, top + 3) if width < 620 else (x1 + 16, top + 7)
        assert any(near(words, title) for _, _, words in marks.texts(*at)), (title, "is named")
        said = [words for _, y, words in marks.texts(x=x0 - 8) if y == top + 3]
        assert near(said[0], write(title, high)), (title, said)
        at = next(i for i, of in enumerate(values) if of[0] > 0)
        line = page.hit("incident", x0 + (at + 0.5) * across, top + 5)[-1]
        words = [write(title, value) if value == value else "none" for value in values[at]]
        assert near(line, f"{title}: {f'P99 {words[0]}, P50 {words[1]}' if log else words[0]}")
    for x in (x0, x1):
        assert page.hit("incident", x, 58 + (len(titles) - 1) * 44 + 10)[-1].startswith(f"{titles[-1]}: "), "both edges"
    (y,) = {y for x, y, words in marks.texts(x=x0 - 8) if words == "time"}
    labels = [(x, words) for x, at, words in marks.texts() if at == y and x >= x0 and words != "with idle time"]
    lines = [rect for rect in marks.rects(y=y + 6, colour=LIGHT.hairline) if rect[3] == 1]
    assert len(lines) == len(labels) > 1
    for (x, words), line in zip(labels, lines):
        assert x == pytest.approx(min(line[1], width - 6 * len(words) - 1)) and x0 <= line[1] <= x1 + 0.01
        assert line[2] + line[4] == page("view.panel('incident').height")
    check_whole(marks, page, facts, stalled, (begin, end), (x0, x1))
    for step in (first, (first + last) // 2, last - 1):
        (cursor,) = Marks(page.painted("incident", step)["over"]).rects(colour=LIGHT.cursor)
        at = x0 + (facts.records[step].time - begin) / (end - begin) * (x1 - x0)
        assert close(cursor[1:], [at, 58, 1.5, page("view.panel('incident').height") - 58])
    check_incident_table(page, titles, bins, wide)
    check_incident_words(page, facts, whole, (begin, end), stalled, slow)


def check_whole(marks, page, facts, stalled, part, places):
    (begin, end), (x0, x1) = part, places
    low = min(facts.records[0].time, facts.trace.requests[facts.order[0]].arrival_time)
    high = facts.records[-1].end
    count = 120
    arrivals = [0] * count
    for info in facts.trace.requests.values():
        arrivals[min(count - 1, math.floor((info.arrival_time - low) / (high - low) * count))] += 1
    across = (x1 - x0) / count
    bars = [r for r in marks.rects(colour=LIGHT.decode) if abs(r[2] + r[4] - 34) < 1e-6 and r[4] > 0]
    expected = [[x0 + i * across, n / max(arrivals) * 30] for i, n in enumerate(arrivals) if n]
    assert [[r[1], r[4]] for r in bars] == [pytest.approx(each) for each in expected]
    frame = marks.frames(LIGHT.cursor)[-1]
    left, right = (x0 + (time - low) / (high - low) * (x1 - x0) for time in (begin, end))
    assert close([frame[1], frame[3]], [left, max(2, right - left)], 1e-3)
    stalls = marks.rects(colour=EVENT_MARKS["stall"][1])
    time = facts.records[stalled].time
    expected = [x0 + (time - low) / (high - low) * (x1 - x0) - 1]
    if begin <= time <= end:
        expected.append(x0 + (time - begin) / (end - begin) * (x1 - x0) - 1)
    assert sorted(round(r[1], 4) for r in stalls if r[3] == 2 and r[1] < x1) == sorted(round(e, 4) for e in expected)
    lines = page.hit("incident", x0 + (time - low) / (high - low) * (x1 - x0), 10)
    assert "stall: it stood still" in lines
    took_time = [step for step, record in enumerate(facts.records) if record.end > record.time]
    for step in (took_time[0], took_time[len(took_time) // 2], took_time[-1]):
        middle = (facts.records[step].time + facts.records[step].end) / 2
        found = page("view.panel('incident').hit(argument, 10).step", x0 + (middle - low) / (high - low) * (x1 - x0))
        assert found == step


def check_incident_table(page, titles, bins, wide):
    table = page.table("incident")
    assert [heading.split(":")[0] for heading in table["headings"]] == ["from", *titles]
    for row, each in zip(table["rows"], bins, strict=True):
        for cell, title in zip(row[1:], titles):
            words = ", ".join(write(title, v) if v == v else "–" for v in each.rows(wide)[title])
            assert all(near(a, b) for a, b in zip(cell.split(", "), words.split(", "))), (title, cell, words)


def check_incident_words(page, facts, whole, part, stalled, slow):
    begin, end = part
    said = page("view.panel('incident').words()").split("; ")
    expected = [""]
    for name, values in (("first token", whole.first), ("next token", whole.next)):
        if values:
            expected.append(f"{name} {seconds(percentile(values, 50))} (P50), {seconds(percentile(values, 99))} (P99)")
    cached = share(whole.hits / (whole.queried or 1))
    expected += [f"KV blocks up to {share(whole.kv)}", f"hit rate {cached} of prompt tokens",
                 counted(whole.preemptions, "preemption"),
                 *([f"{grouped(whole.aborts)} aborted"] if whole.aborts else []),
                 f"up to {grouped(whole.waiting)} waiting",
                 counted(int(begin <= facts.records[stalled].time <= end), "stall")]  # fmt: skip
    inside = [r for r in facts.records if r.end > begin and r.time < end]
    here = {who for r in inside for who in (*r.running, *r.waiting, *r.arrived, *r.finished, *r.aborted)}
    here |= {info.request_id for info in facts.trace.requests.values() if begin <= info.arrival_time <= end}
    assert said[0].startswith(f"{counted(len(here), 'request')} in ")
    assert said[0].endswith(f", {whole.arrivals or 'none'} arrived here") == (whole.arrivals < len(here))
    assert len(said) == len(expected) and all(near(a, b) for a, b in zip(said[1:], expected[1:]))
    firsts = []
    for step, record in enumerate(facts.records):
        for who, (is_first, value) in facts.latencies(step).items():
            if is_first and begin < record.end <= end:
                firsts.append((who, value))
    firsts.sort(key=lambda each: (-each[1], facts.order.index(each[0])))
    rows = page(
        "view.panel('incident').slow.querySelectorAll('tbody')[0].children.map((row) => "
        "row.children.map((cell) => cell.textContent))"
    )
    assert len(rows) == min(8, len(firsts))
    named = {who: f"61% {cause}: {', '.join(others)}" for who, cause, _, others in slow}
    for row, (who, value) in zip(rows, firsts):
        assert row[0] == who and near(row[1], seconds(value)) and row[2] == named.get(who, "–")


@pytest.mark.parametrize("span", [0.004, 6, 119, 121, 900])
def test_requests_are_a_rate_in_stretches_of_a_second_or_more(deno_page, span):
    """Shorter stretches have a number of requests; no number depends on the width of the window."""
    times = [span * i / 40 for i in range(40)]
    requests = [{"id": f"r{i}", "prompt": {"len": 5}, "max_tokens": 1, "arrival_time": t} for i, t in enumerate(times)]
    trace = simulate({"config": {"num_blocks": 60}, "requests": requests, "cost_model": {"fixed": span / 4000}})
    tables = []
    for width in (390, 700, 1440, 2200):
        deno_page.open(trace, width=width, status={"live": False, "incident": {"slow": [], "apart": [], "stalls": []}})
        deno_page.painted("incident")
        tables.append(deno_page.table("incident"))
    assert all(table == tables[0] for table in tables)
    long = trace[-1].end / 120
    assert (heading := tables[0]["headings"][1]) == of_requests(long) and ("second" in heading) == (long >= 1)
    assert all(row[0].endswith(" min") == (long >= 1) for row in tables[0]["rows"]), "minutes in a run of two or more"
    outside = "view.panel('incident').hit(argument, 20)"
    assert deno_page(outside, 5) is None and deno_page(outside, 2190) is None and deno_page(outside, 900)
    shown = [float(row[1]) for row in tables[0]["rows"]]
    assert sum(shown) * (long if long >= 1 else 1) == pytest.approx(40, rel=0.05)  # two digits are shown


def test_requests_that_still_wait_for_their_first_token(deno_page):
    """Those that left without one are slow requests, and wait no more."""
    requests = [{"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 90, "arrival_time": i / 100} for i in range(5)]
    requests[3]["abort_step"] = 12
    config = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_blocks": 60}
    trace = simulate({"config": config, "requests": requests, "cost_model": COSTS}, max_steps=40)
    assert "r3" in {who for record in trace for who in record.aborted}
    deno_page.open(trace, status={"live": False, "incident": {"slow": [], "apart": [], "stalls": []}})
    deno_page.painted("incident")
    longest = trace[-1].end - min(trace.requests[who].arrival_time for who in ("r2", "r4"))
    (waits,) = [words for words in deno_page("view.panel('incident').words()").split("; ") if "without" in words]
    assert waits.startswith("2 without a first token for up to ") and near(waits.split("up to ")[1], seconds(longest))
    (first,) = [
        words for words in deno_page("view.panel('incident').words()").split("; ") if "first token" in words[:11]
    ]
    ttft = trace.metrics().summary.ttft
    assert ttft.num_open == 2 and "p99" in ttft.bounds
    shown = re.fullmatch(r"first token (≥ )?(.+) \(P50\), (≥ )?(.+) \(P99\)", first)
    assert [bool(shown[1]), bool(shown[3])] == ["p50" in ttft.bounds, "p99" in ttft.bounds], "one rule everywhere"
    assert near(shown[2], seconds(ttft.p50)) and near(shown[4], seconds(ttft.p99))
    (left,) = [record.time for record in trace if "r3" in record.aborted]
    until = "view.panel('incident').withoutToken(0, 1e9).find(({ request }) => request.id === 'r3').at"
    assert deno_page(until) == pytest.approx(left, abs=1e-6)


def test_two_runs_stand_on_the_axis_of_all_panels(deno_page):
    """Times or steps, in the comparison as in the timeline; by arrival is another question."""
    page, (first, second, *_) = deno_page, pair("timed 3")
    page.open(first, second)
    aligned = lambda: (page.painted("compare"), page("view.panel('compare').align.value"))[1]  # noqa: E731
    assert aligned() == "time" and page("view.cursor.byTime")
    page("(view.controls.toggleAxis(), page.frame())")
    assert aligned() == "step" and not page("view.cursor.byTime")
    page("(view.panel('compare').align.value = 'time', view.panel('compare').realign(), page.frame())")
    assert aligned() == "time" and page("view.cursor.byTime")
    page("(view.panel('compare').align.value = 'arrival', view.panel('compare').realign(), page.frame())")
    page("(view.controls.toggleAxis(), page.frame())")
    assert aligned() == "arrival" and not page("view.cursor.byTime")


def test_a_film_is_not_covered_by_a_card(deno_page):
    page = deno_page
    page.open(pair("timed 3")[0])
    page("(view.inspector.pin({ kind: 'request', request: 1 }), page.frame())")
    page("(view.film.show(), view.film.playing = false, page.frame())")  # a playing film has always a next frame
    assert page("[view.inspector.element.hidden, view.film.open]") == [True, True]
    page("(view.inspector.pin({ kind: 'request', request: 1 }), view.cursor.seek(3), page.frames.shift()(page.now))")
    assert page("view.film.playing"), "the film of the other step begins"
    page("(view.film.playing = false, page.frame())")
    assert page("[view.inspector.element.hidden, view.film.open]") == [False, True], "a card that is asked for stays"
