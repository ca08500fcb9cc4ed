"""The Pareto plot and its axes: the marks follow from the rows, and the picture from the marks."""

import math
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest

from workbench import CostModel, simulate
from workbench.analysis.check import Check
from workbench.analysis.intervals import Interval, Prediction
from workbench.analysis.rerun import Outcome
from workbench.analysis.tuning import Candidate, Tuning, read_slo
from workbench.viz.drawing import GRID
from workbench.viz.layout.axis import Axis
from workbench.viz.layout.pareto import pareto_marks, tuning_marks
from workbench.viz.lines import lines_svg
from workbench.viz.pareto import FRONT, POINT, RING, pareto_svg, tuning_facts

NAMES = ("itl_p99", "output_throughput", "ttft_mean")
SPREADS = ((0.5, 1.0), (0.001, 3.0), (2.0, 2.0), (4e5, 9e5), (1.0, 8.0), (1.0, 8.1), (0.0, 700.0))


def rows_of(seed):
    rng = random.Random(seed)
    spreads = dict(zip(NAMES, rng.sample(SPREADS, 3)))
    rows = [{"seats": i, "budget": rng.choice([64, 128]), "pareto": rng.random() < 0.4} for i in range(12)]
    for row in rows:
        row |= {name: rng.uniform(*spread) for name, spread in spreads.items()}
    rows[3]["itl_p99"] = None
    del rows[5]["ttft_mean"]
    rows[6]["pareto"], rows[7]["pareto"] = True, False
    return rows, [("best", rows[6]), ("", rows[7]), ("gone", rows[3])]


def values_of(row, unit):
    factor = 1000 if unit == "ms" else 1
    return row["itl_p99"] * factor, row["output_throughput"], row["ttft_mean"] * factor


@pytest.mark.parametrize("unit", ["s", "ms"])
@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_marks_of_a_sweep(seed, numbered, unit):
    rows, ringed = rows_of(seed)
    settings = ["seats", "budget"] if numbered else []
    marks = pareto_marks(rows, settings, ringed, NAMES[:2], NAMES[2], unit)
    shown = [row for i, row in enumerate(rows) if i not in (3, 5)]
    front = [row for row in shown if row["pareto"]]
    number = {row["seats"]: str(n) if numbered else "" for n, row in enumerate(front, start=1)}
    others = [row for row in shown if not row["pareto"]]
    rings = {6: "best", 7: ""}
    assert (marks.num_points, marks.num_front) == (10, len(front))
    told = [(number[row["seats"]], f"seats={row['seats']}, budget={row['budget']}") for row in front]
    assert marks.front == (told if numbered else [])
    titles = (f"P99 inter-token latency ({unit})", "output tokens per second")
    for place, panel in enumerate(marks.panels):
        assert panel.titles == (titles[place], f"mean time to first token ({unit})")
        expected = []
        for row in others + front:
            x, y = values_of(row, unit)[place], values_of(row, unit)[2]
            expected.append((pytest.approx(x), pytest.approx(y), number.get(row["seats"]), rings.get(row["seats"])))
        assert panel.points == expected, "those on the front are drawn last"
        for which, axis in enumerate(panel.axes):
            assert axis == Axis.around([point[which] for point in panel.points])
    with pytest.raises(ValueError, match="nothing to plot: no row of the sweep has all of ttft_mean, itl_p99"):
        pareto_marks([rows[3], rows[5]], settings, [], NAMES[:2], NAMES[2], unit)


@pytest.mark.parametrize("spread", SPREADS)
def test_an_axis_around_values(spread):
    rng = random.Random(7)
    values = [*spread, *(rng.uniform(*spread) for _ in range(5))]
    axis, (low, high) = Axis.around(values), spread
    assert (axis.begin, axis.end) == (axis.ticks[0], axis.ticks[-1]) and axis.begin <= low and high <= axis.end
    assert axis.is_log == (low > 0 and high / low > 8)
    gaps = [b / a if axis.is_log else b - a for a, b in pairwise(axis.ticks)]
    if axis.is_log:
        digits = {f"{tick / 10 ** math.floor(math.log10(tick) + 1e-9):.9g}" for tick in axis.ticks}
        assert digits <= {"1", "2", "5"}
        assert set(map(round, gaps)) <= {2, 3} and low / 2.6 < axis.begin and axis.end < high * 2.6
    else:
        step = gaps[0]
        assert gaps == [pytest.approx(step)] * len(gaps) and 3 <= len(axis.ticks) <= 7
        assert float(f"{step:.6g}".replace(".", "").strip("0").split("e")[0]) in (1, 2, 5)
    middle = math.sqrt(axis.begin * axis.end) if axis.is_log else (axis.begin + axis.end) / 2
    placed = [axis.place(value, 300, 100) for value in (axis.begin, middle, axis.end)]
    assert placed == [pytest.approx(place) for place in (300, 200, 100)]


@pytest.mark.parametrize("end", [6.5, 8.0, 0.0036, 1234.5, 0.1 + 0.2, 7e-6])
def test_an_axis_until_a_value_ends_there(end):
    axis = Axis.until(end)
    assert (axis.begin, axis.end, axis.ticks[0], axis.is_log) == (0, end, 0, False)
    step = axis.ticks[1]
    assert axis.ticks == pytest.approx([n * step for n in range(len(axis.ticks))])
    assert 3 <= len(axis.ticks) <= 6 and axis.ticks[-1] <= end * (1 + 1e-6) and end < axis.ticks[-1] + step * (1 - 1e-6)
    assert axis.place(end, 110, 884) == 884 and axis.place(end / 2, 110, 884) == pytest.approx(497)


def number(element, name):
    return float(element.get(name))


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_picture_of_a_sweep(seed, numbered):
    rows, ringed = rows_of(seed)
    settings = ["seats", "budget"] if numbered else []
    marks = pareto_marks(rows, settings, ringed, NAMES[:2], NAMES[2], "ms")
    root = ET.fromstring(pareto_svg(rows, settings, ringed, NAMES[:2], NAMES[2], "ms"))
    assert root.get("aria-label") == f"Pareto plot of 10 configurations, {marks.num_front} on the front"
    height = 330 + (24 + 17 * len(marks.front) if numbered else 0)
    assert root.get("viewBox") == f"0 0 880 {height}"
    texts = [
        (number(t, "x"), number(t, "y"), t.get("text-anchor"), t.text) for t in root.iter() if t.tag.endswith("text")
    ]
    lines = [path.get("d") for path in root.iter() if path.get("stroke") == GRID]
    circles = [
        (number(c, "cx"), number(c, "cy"), number(c, "r"), c.get("fill"), c.get("stroke"))
        for c in root.iter()
        if c.tag.endswith("circle")
    ]
    grid, painted = [], []
    for left, panel in zip((0, 440), marks.panels):
        across, upwards = panel.axes
        for tick in across.ticks:
            x = across.place(tick, left + 58, left + 414)
            grid.append(f"M{x:.1f} 16V272")
            assert (round(x, 1), 290, "middle", f"{tick:,g}") in texts
        for tick in upwards.ticks:
            y = upwards.place(tick, 272, 16)
            grid.append(f"M{left + 58} {y:.1f}H{left + 414}")
            assert (left + 52, float(f"{y + 4:.1f}"), "end", f"{tick:,g}") in texts
        assert (left + 249, 314, "middle", panel.titles[0]) in texts
        turned = [g for g in root.iter() if g.get("transform") == f"rotate(-90 {left + 12} 136.0)"]
        assert [(t.get("x"), t.get("y"), t.text) for g in turned for t in g] == [
            (f"{left + 12:.1f}", "136.0", panel.titles[1])
        ]
        for x, y, name, word in panel.points:
            at = across.place(x, left + 58, left + 414), upwards.place(y, 272, 16)
            painted.append((*at, 3.5, "none", POINT) if name is None else (*at, 5, FRONT, "#1f2328"))
            painted += [(*at, 9, "none", RING)] if word is not None else []
            for label in (name, word):
                near = [t for t in texts if t[3] == label and t[2] == "start" and left + 58 <= t[0] < left + 440]
                assert not label or any(abs(t[0] - at[0]) < 60 and abs(t[1] - at[1]) < 45 for t in near), label
    assert lines == grid
    assert circles == [(pytest.approx(x, abs=0.06), pytest.approx(y, abs=0.06), *rest) for x, y, *rest in painted]
    below = [each for each in texts if each[1] >= 340]
    assert below == [(58, 348 + 17 * i, "start", f"{name}  {told}") for i, (name, told) in enumerate(marks.front)]


@pytest.mark.parametrize("most", [2_500, 25_000, 100_000])
def test_a_large_number_on_an_axis_has_separators_and_is_not_cut(most):
    """A digit is at most 7.6 wide, in DejaVu Sans of 12 px."""
    rows = [{name: most * share for name in NAMES} | {"pareto": True} for share in (0.2, 1.0)]
    lines = lines_svg([0.2 * most, most], {"": [0.2 * most, most]}, ("x", "y"))
    for picture, width in ((pareto_svg(rows, (), (), NAMES[:2], NAMES[2], "s"), 880), (lines, 440)):
        texts = [t for t in ET.fromstring(picture).iter() if t.tag.endswith("text") and (t.text or "")[:1].isdigit()]
        assert sum(t.text == f"{most // 1000},{most % 1000:03}" for t in texts) == width // 220, "on every axis"
        for label in texts:
            half = (7.6 * sum(letter.isdigit() for letter in label.text) + 3.8 * label.text.count(",")) / 2
            at = number(label, "x")
            assert label.get("text-anchor") == "end" or at // 440 == (at + half) // 440, "in its panel"


@pytest.mark.parametrize("seed", range(4))
def test_no_word_of_a_sweep_lies_over_a_point_or_another_word(seed):
    rows, ringed = rows_of(seed)
    root = ET.fromstring(pareto_svg(rows, ["seats"], ringed, NAMES[:2], NAMES[2], "ms"))
    boxes = [
        (number(t, "x"), number(t, "y") - 9, number(t, "x") + 6 * len(t.text), number(t, "y"))
        for t in root.iter()
        if t.tag.endswith("text") and t.get("text-anchor") == "start" and number(t, "y") < 272
    ]
    assert len(boxes) > 6
    for i, (left, top, right, base) in enumerate(boxes):
        for x0, y0, x1, y1 in boxes[:i]:
            assert right <= x0 or left >= x1 or base <= y0 or top >= y1
        for circle in (c for c in root.iter() if c.tag.endswith("circle")):
            x, y = number(circle, "cx"), number(circle, "cy")
            away = max(left - x, x - right, 0), max(top - y, y - base, 0)
            assert away[0] ** 2 + away[1] ** 2 >= 9, "a point is seen beside every word"


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("is_best", [False, True])
def test_the_marks_of_a_tuning(is_best, slow):
    """Each setting of the table, with the values of the table, and no other point of the sweep."""

    def candidate(seats):
        values = {"ttft_p99": (2 if slow else 0.2) / seats, "itl_mean": 0.01 * seats, "tpot_p50": 0.02 * seats}
        values |= {"output_throughput": 10.0 * seats}
        if seats == 3:  # beaten in every value
            values |= {"ttft_p99": 2.5 if slow else 0.25, "output_throughput": 5.0}
        intervals = {name: Interval(value, value / 2, value * 3) for name, value in values.items()}
        outcome = Outcome(dict.fromkeys(values, 77.0), "done")
        return Candidate({"seats": seats}, seats / 9, Prediction({}, outcome, intervals, {}, (), None))

    current, runners_up = candidate(1), [replace(candidate(2), same_as_best=True), candidate(3)]
    if slow:  # one of which no token was sampled
        runners_up += [replace(candidate(9), prediction=Prediction({}, Outcome({}, "stuck"), {}, {}, (), None))]
    best = current if is_best else candidate(4)
    once = [
        {"seats": n, "ttft_p99": 7.0, "tpot_p50": 7.0, "output_throughput": 7.0, "end": "done"} for n in range(1, 9)
    ]
    tuning = Tuning(
        rows=tuple(once), settings=("seats",), slo={"tpot_p50": 1.0, "ttft_p99": 1.0}, best=best, current=current,
        runners_up=tuple(runners_up), verdict="meets", current_verdict="meets", losers=(),
        check=Check(None),
    )  # fmt: skip
    marks = tuning_marks(tuning)
    drawn = [each for each in (best, *(() if is_best else (current,)), *runners_up) if each.prediction.intervals]
    seconds = {name: max(each.values[name] for each in drawn) >= 1 for name in ("tpot_p50", "ttft_p99")}
    assert seconds["ttft_p99"] == slow, "each time has its unit"
    units = {name: "s" if is_long else "ms" for name, is_long in seconds.items()}
    worst = max(("tpot_p50", "ttft_p99"), key=lambda name: best.values[name])
    names = [worst, *({"tpot_p50", "ttft_p99"} - {worst})]
    titles = {"tpot_p50": "P50 time per output token", "ttft_p99": "P99 time to first token"}
    titles = {name: f"{words} ({units[name]})" for name, words in titles.items()}
    assert [panel.titles for panel in marks.panels] == [("output tokens per second", titles[name]) for name in names]
    words = ["keep" if is_best else "best", *(() if is_best else ("now",)), "2.", "3."]
    for panel, name in zip(marks.panels, names):
        assert {(point.ring, point.x, point.y, point.number) for point in panel.points} == {
            (
                word,
                each.values["output_throughput"],
                each.values[name] * (1 if seconds[name] else 1000),
                None if each.changes["seats"] == 3 else "",
            )
            for word, each in zip(words, drawn, strict=True)
        }
    assert marks.front == []


@pytest.mark.parametrize("slo", ["ttft_mean=1s", "e2e_p99=1s", "output_throughput=5", "itl_p99=9s,ttft_p99=1s"])
def test_the_picture_of_an_answer_has_the_axes_of_its_front_and_says_what_filled_means(slo):
    requests = [{"id": f"r{n}", "prompt": {"len": 20 + 9 * n}, "max_tokens": 4 + n % 5} for n in range(12)]
    requests = [each | {"arrival_time": 0.05 * n} for n, each in enumerate(requests)]
    cost = CostModel(fixed=0.01, per_prefill_token=1e-3)
    trace = simulate(
        {"config": {"max_num_seqs": 4, "max_num_batched_tokens": 64}, "requests": requests}, cost_model=cost
    )
    grid = {"max_num_seqs": [2, 4, 8], "max_num_batched_tokens": [32, 64]}
    tuning = trace.tune(slo, grid=grid, cost_model=cost, num_draws=2)
    names = [name for name in tuning.slo if name != "output_throughput"] or ["ttft_mean"]
    values = {word: one.values for word, one in tuning.named}
    panels = tuning_marks(tuning).panels
    drawn = [{point.ring: point.y for point in panel.points} for panel in panels]
    assert len(panels) == len(names)
    for name in names:
        assert any(
            all(of[word] == pytest.approx(values[word][name] * scale) for word in values)
            for of in drawn
            for scale in (1, 1000)
        )
    goals = [name for name in tuning.slo if name != "output_throughput"]
    for point in panels[0].points:  # filled, unless another setting is as good in all and better in one
        own = values[point.ring]
        losses = [[one[goal] for goal in goals] + [-one["output_throughput"]] for one in (own, *values.values())]
        beaten = any(other != losses[0] and all(x <= y for x, y in zip(other, losses[0])) for other in losses[1:])
        assert (point.number is None) == beaten
    facts = tuning_facts(tuning)
    listed = " and ".join([*([", ".join(goals)] if goals else []), "output_throughput"])
    assert f"at least as good in {listed}." in facts["alt"]
    for (word, one), row in zip(tuning.named, facts["candidates"], strict=True):
        assert row["words"] == word + " (cannot tell from the first)" * one.same_as_best
    assert all(RING not in picture for picture in facts["pictures"]), "all points would have one, which says nothing"
    assert "Filled: no other setting here" in facts["key"] and len(facts["pictures"]) == len(panels)


NEAR = ("ttft_mean=0.5", "ttft_mean=3", "ttft_mean=0.5,output_throughput=9")


@pytest.mark.parametrize("slo", [*NEAR, "ttft_mean=40", "ttft_mean=0.001", "output_throughput=1"])
def test_a_target_near_the_settings_is_a_line(slo):
    def candidate(changes, ttft, rate):
        values = {"ttft_mean": ttft, "output_throughput": rate}
        intervals = {name: Interval(value, value, value) for name, value in values.items()}
        return Candidate(changes, 1.0, Prediction(changes, Outcome(values, "done"), intervals, {}, (), None))

    limits, best, now = read_slo(slo), candidate({"max_num_seqs": 2}, 0.6, 8.0), candidate({}, 1.4, 12.0)
    tuning = Tuning(slo=limits, best=best, current=now, runners_up=(), verdict="cannot tell", current_verdict="misses",
                    losers=(), rows=(), check=Check(None))  # fmt: skip
    facts = tuning_facts(tuning)
    root = ET.fromstring(facts["pictures"][0])
    drawn = [each.get("d") for each in root.iter() if each.get("stroke-dasharray")]
    assert len(drawn) == len(limits) * (slo in NEAR) and bool(drawn) == ("Dashed: the target." in facts["key"])
    circles = sorted((float(c.get("cx")), float(c.get("cy"))) for c in root.iter() if c.tag.endswith("circle"))
    (x0, y0), (x1, y1) = circles
    for line in drawn:
        if "V" in line:
            place = x0 + (limits["output_throughput"] - 8.0) / 4.0 * (x1 - x0)
            assert float(re.match(r"M([\d.]+) ", line)[1]) == pytest.approx(place, abs=0.2)
        else:
            place = y0 + (limits["ttft_mean"] - 0.6) / 0.8 * (y1 - y0)
            assert float(re.match(r"M\S+ ([\d.]+)H", line)[1]) == pytest.approx(place, abs=0.2)
