"""The labels of an axis of time: one unit and one precision on each, the same in pages and in static pictures."""

import json
import random
import subprocess
from itertools import pairwise

import pytest
from axis_times import seconds_of
from pages_in_deno import DENO
from painted import Marks
from runs_to_draw import run

from workbench import simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.viz.bundle import JS_DIRECTORY
from workbench.viz.layout.axis import Axis, in_minutes, time_distance, time_labels

CASES = {
    0.002: "0.0 ms, 0.5 ms, 1.0 ms, 1.5 ms, 2.0 ms",
    2.0: "0.0 s, 0.5 s, 1.0 s, 1.5 s, 2.0 s",
    90.0: "0 s, 20 s, 40 s, 60 s, 80 s",
    119.0: "0 s, 50 s, 100 s",
    150.0: "0:00 min, 0:30 min, 1:00 min, 1:30 min, 2:00 min, 2:30 min",
    1200.0: "0:00 min, 5:00 min, 10:00 min, 15:00 min, 20:00 min",
    10_800.0: "0:00 h, 1:00 h, 2:00 h, 3:00 h",
    4000.0: "0:00 h, 0:15 h, 0:30 h, 0:45 h, 1:00 h",
    400_000.0: "0:00 h, 24:00 h, 48:00 h, 72:00 h, 96:00 h",
}
CASES = {end: words.replace("0.0 ", "0 ", 1) for end, words in CASES.items()}


@pytest.fixture(scope="module")
def in_page():
    """A function that makes the labels of axes (from, to, count) with the code of the pages."""
    if not DENO.exists():
        pytest.skip("deno is not installed, so the views' code cannot be run without a browser")

    def in_page_(axes):
        code = (
            f"import {{ timeTicks }} from '{(JS_DIRECTORY / 'time_axis.js').as_uri()}';"
            "const labelled = (at) => [at.values, at.values.map(at.label)];"
            f"console.log(JSON.stringify({json.dumps(axes)}.map((axis) => labelled(timeTicks(...axis)))));"
        )
        command = [str(DENO), "eval", "--no-check", code]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return json.loads(found.stdout)

    return in_page_


def test_the_table_of_cases_holds_for_static_pictures_and_pages(in_page):
    for end, words in CASES.items():
        assert ", ".join(Axis.of_time(end).labels) == words
    for (end, words), (values, labels) in zip(CASES.items(), in_page([[0, end, 5] for end in CASES]), strict=True):
        assert ", ".join(labels) == words and values == pytest.approx(Axis.of_time(end).ticks), end


def test_both_write_random_axes_alike_in_one_unit_and_precision(in_page):
    rng = random.Random(3)
    axes = [[0.0, 10 ** rng.uniform(-6, 6), rng.randint(3, 9)] for _ in range(150)]
    axes += [[begin := rng.uniform(0, 9000), begin + 10 ** rng.uniform(-3, 4), 8] for _ in range(150)]
    for (begin, end, count), (values, labels) in zip(axes, in_page(axes), strict=True):
        assert 0 < len(values) <= count + 1, (begin, end)
        distance = time_distance(end - begin, count, in_minutes(end, end))
        assert labels == time_labels(values, end, distance)
        assert len({words.split()[1] for words in labels}) == 1, "one unit"
        forms = {tuple(len(part) for part in words.split()[0].replace(":", ".").split(".")[1:]) for words in labels[1:]}
        assert len(forms - {()}) <= 1 and len(set(labels)) == len(labels), "one precision, and neighbours differ"
        for value, words in zip(values, labels):
            assert seconds_of(words) == pytest.approx(value, abs=0.01 * distance)
        assert all(b - a == pytest.approx(distance) for a, b in pairwise(values))


def test_the_two_axes_of_a_part_have_one_unit(deno_page, in_page):
    """Of a part of 40 s that ends after two minutes: *What happened* has the unit of the timeline below it."""
    requests = [{"id": f"r{n}", "prompt": {"len": 20}, "max_tokens": 9, "arrival_time": n} for n in range(130)]
    deno_page.open(simulate({"requests": requests}, cost_model=CostModel(fixed=0.1)), width=1280)
    deno_page("view.cursor.axis = 'time'")
    first = deno_page("[...view.store.column('time').subarray(0, view.store.numSteps)].findIndex((time) => time > 90)")
    deno_page("view.cursor.showRange([argument, view.store.numSteps])", first)
    (begin, end), zero = deno_page("view.panel('incident').time(true)"), deno_page("view.store.zero")
    assert end - begin < 60 < 120 < end
    below = deno_page("((at) => at.values.map(at.label))(view.panel('timeline').axis().timeTicks(8))")
    [(_, above)] = in_page([[begin - zero, end - zero, 8]])
    assert {words.split()[1] for words in (*below, *above)} == {"min"}


def test_an_axis_with_a_pause_has_one_precision(deno_page):
    requests = [
        {"id": f"r{n}", "prompt": {"len": 20}, "max_tokens": 9, "arrival_time": at} for n, at in enumerate((0, 8.7612))
    ]
    deno_page.open(simulate({"requests": requests}, cost_model=CostModel(fixed=0.0312)), width=1280)
    deno_page("view.cursor.axis = 'time'")
    values, labels = deno_page(
        "((at) => [at.values, at.values.map(at.label)])(view.panel('timeline').axis().timeTicks(8))"
    )
    after = [words for words in labels if words != "0 s"]
    assert len(after) > 4 and any(value > 8.7 for value in values)
    assert len({len(words.split(".")[1]) for words in after}) == 1 and all(words.endswith(" s") for words in after)
    for value, words in zip(values, labels):
        assert seconds_of(words) == pytest.approx(value, abs=0.006)


@pytest.mark.parametrize("width", [390, 420, 1100])
def test_the_beginning_after_each_pause_is_labelled(deno_page, width):
    """Round times that leave no room for it are left out."""
    trace, _ = run("idle")
    deno_page.open(trace, width=width)
    begins = [record.time for before, record in pairwise(trace) if record.time - before.end > 0.5]
    assert len(begins) == 2
    labels = sorted((x, words) for x, y, words in Marks(deno_page.painted("timeline")["marks"]).texts(y=144))[1:]
    times = [seconds_of(words) for _, words in labels if words != "time" and "idle" not in words]
    shown = [begin for begin in begins if any(time == pytest.approx(begin, abs=0.006) for time in times)]
    # The two begin within 40 pixels on a phone, where the second has no room beside the first.
    assert shown == (begins if width > 430 else begins[:1]), labels
    assert times == sorted(times)


def test_a_pause_before_the_last_visible_step_is_one(deno_page):
    trace, _ = run("idle 0")
    deno_page.open(trace, width=1100)
    after = [record.step for before, record in pairwise(trace) if record.time - before.end > 0.5]
    for step in after:
        deno_page("view.cursor.moveTo(argument[0], argument[1])", [step - 6, 7])
        texts = Marks(deno_page.painted("timeline")["marks"]).texts(y=144)
        times = [seconds_of(words) for _, _, words in texts if words != "time" and "idle" not in words]
        assert any(time == pytest.approx(trace[step].time, abs=0.006) for time in times), (step, times)
    assert len(after) == 2


def test_an_axis_in_minutes_has_no_part_of_a_second_after_a_pause(deno_page):
    """Its labels differ, though a second is coarser than where the step after the pause begins."""
    requests = [{"id": f"r{i}", "prompt": {"len": 30}, "max_tokens": 20, "arrival_time": at} for i, at in
                enumerate((0.0, 0.3, 703.61, 703.9))]  # fmt: skip
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.31, per_row=1e-4))
    deno_page.open(trace, width=1280)
    labels = [words for _, _, words in Marks(deno_page.painted("timeline")["marks"]).texts(y=144) if ":" in words]
    assert len(labels) > 4 and len(set(labels)) == len(labels), labels
    assert {"0:02 min", "11:44 min"} <= set(labels) and not any("." in words for words in labels), labels


def test_metrics_name_the_axis_that_they_have(deno_page):
    trace, _ = run("idle")
    deno_page.open(trace)
    for axis, name in (("time", "time"), ("step", "steps"), ("time", "time")):
        deno_page(f"view.cursor.axis = '{axis}'")
        deno_page("view.changed('range')")
        deno_page("page.frame()")
        assert f"on the shared axis of {name};" in deno_page("view.panel('metrics').hintElement.textContent")
