"""Two runs beside each other have one clock: a moment has one place in both, in *Compare* and in the timeline.

The places are found again from the times of the records, by hand.
"""

import json
import re
from itertools import combinations, pairwise

import pytest
from painted import Marks

from workbench import simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.viz.palette import LIGHT

COSTS = CostModel(fixed=0.05, per_sequence=0.005, per_prefill_token=0.006)
LEFT, RIGHT = 84, 16
IDLE_SECONDS = 0.5
REACH = 14


def run(budget, late=(25.0, 40.0)):
    """A long prompt and short ones, and requests that come when the engine has been idle for seconds."""
    requests = [{"id": "long", "prompt": {"len": 1300}, "max_tokens": 30, "arrival_time": 0.0}]
    requests += [
        {"id": f"q{i}", "prompt": {"len": 40}, "max_tokens": 20, "arrival_time": 0.5 * i + 0.25} for i in range(4)
    ]
    requests += [
        {"id": f"late{i}", "prompt": {"len": 60}, "max_tokens": 9, "arrival_time": time} for i, time in enumerate(late)
    ]
    config = {"max_num_batched_tokens": budget, "max_num_seqs": 16, "num_blocks": 512}
    return simulate({"config": config, "requests": requests}, cost_model=COSTS)


def clock_of(*traces):
    """The function from seconds to seconds without the pauses that all runs share, its end, and those pauses."""
    spans = sorted((record.time, record.end) for trace in traces for record in trace)
    first, (end, length) = spans[0][0], (spans[0][1], spans[0][1] - spans[0][0])
    pauses = []
    for begin, until in spans:
        if begin - end > IDLE_SECONDS:
            pauses.append((end, begin, min(length, begin - end)))
        if until >= end:
            end, length = until, until - begin

    def at(moment):
        cut = sum(min(moment, to) - begin - min(moment - begin, shown) for begin, to, shown in pauses if moment > begin)
        return moment - first - cut

    return at, at(end), pauses


def opened(page, a, b, width=1200):
    page.open(a, b, width=width)
    page("(view.showComparison(true), view.panel('compare').align.value = 'time', "
         "view.panel('compare').realign(), page.frame())")  # fmt: skip
    return page


@pytest.mark.parametrize("budgets", [(192, 32), (32, 192), (192, 192)])
def test_compare_puts_a_moment_of_both_runs_at_one_place(deno_page, budgets):
    a, b = map(run, budgets)
    at, end, pauses = clock_of(a, b)
    own = [clock_of(trace)[2] for trace in (a, b)]
    assert len(pauses) == 2
    assert (own[0] == own[1]) == (budgets[0] == budgets[1]), "each is idle for another time"
    page = opened(deno_page, a, b)
    marks = Marks(page.painted("compare")["marks"])
    space = page("view.panel('compare').width") - LEFT - RIGHT

    def x(moment):
        return LEFT + at(moment) / end * space

    for trace, colour, above in ((a, LIGHT.prefill, True), (b, LIGHT.decode, False)):
        bars = [rect for rect in marks.rects(colour=colour) if (rect[2] + rect[4] <= 66.01) == above and rect[2] < 120]
        bars = [rect for rect in bars if above or abs(rect[2] - 74) < 1e-6]
        assert [bar[1] for bar in bars] == pytest.approx([x(record.time) for record in trace], abs=1e-3)
        wide = [max(0.6, x(record.end) - x(record.time) - 0.5) for record in trace]
        assert [bar[3] for bar in bars] == pytest.approx(wide, abs=1e-3)
    first = [next(r.time for r in trace if any(c.request_id == "late0" for c in r.chunks)) for trace in (a, b)]
    assert x(first[0]) == pytest.approx(x(first[1])) and first[0] == pytest.approx(25.0), "it arrives at one time"
    labels = [text for text in marks.texts(y=126) if text[0] >= LEFT]
    for place, _, words in labels:
        seconds = float(words.removesuffix(" s"))
        assert place == pytest.approx(x(seconds), abs=10)
    assert any(words.startswith("25") for *_, words in labels), "a stretch begins"
    hint = page("view.panel('compare').hintElement.textContent")
    said = re.search(r"one time for both, without ([\d.]+) s in which both were idle", hint)
    assert float(said[1]) == pytest.approx(sum(to - begin for begin, to, _ in pauses), rel=0.01)


@pytest.mark.parametrize("budgets", [(192, 32), (32, 192)])
def test_the_outline_in_the_timeline_is_at_its_times(deno_page, budgets):
    a, b = map(run, budgets)
    at, end, pauses = clock_of(a, b)
    page = opened(deno_page, a, b)
    marks = Marks(page.painted("timeline")["marks"])
    x0, x1 = page("view.panel('timeline').axis().x0"), page("view.panel('timeline').axis().x1")

    def x(moment):
        return x0 + at(moment) / end * (x1 - x0)

    (outline,) = [path for colour, path in marks.stroked() if colour == LIGHT.cursor]
    corners = [tuple(point) for point in outline]
    base = corners[0][1]
    tops = [(left[0], right[0]) for left, right in pairwise(corners) if left[1] == right[1] != base]
    for record in b:
        expected = (x(record.time), x(record.end))
        assert any(top == pytest.approx(expected, abs=1e-3) for top in tops), record.step
    for left, right in pairwise(tops):
        assert right[0] - left[1] < 2 or (left[1], base) in corners, "nothing is outlined while B alone pauses"
    for step in (0, len(a) // 2, len(a) - 1):
        place = page(f"[view.panel('timeline').axis().x({step}), view.panel('timeline').axis().end({step})]")
        assert place == pytest.approx([x(a[step].time), x(a[step].end)], abs=1e-3)
        middle = page(f"view.panel('timeline').axis().stepAt({sum(place) / 2})")
        assert middle == step
    idle = sum(to - begin for begin, to, _ in pauses)
    said = [words for *_, words in marks.texts() if words.endswith("idle left out")]
    assert float(said[0].split(" s")[0]) == pytest.approx(idle, rel=0.01)
    assert "idle in both runs" in page("view.panel('timeline').hintElement.textContent")
    page("(view.showComparison(false), page.frame())")
    (own,) = [
        words for *_, words in Marks(page.painted("timeline")["marks"]).texts() if words.endswith("idle left out")
    ]
    alone = sum(to - begin for begin, to, _ in clock_of(a)[2])
    assert float(own.split(" s")[0]) == pytest.approx(alone, rel=0.01), "a run by itself has its own clock"


@pytest.mark.parametrize("is_stalled", [True, False])
@pytest.mark.parametrize("width", [1100, 1440])
def test_no_words_beside_the_timeline_lie_over_others(deno_page, width, is_stalled):
    page = opened(deno_page, run(192), run(32), width)
    stalls = [[2, "a stall", 1.0]] if is_stalled else []
    page(f"view.status.incident = {json.dumps({'stalls': stalls})}")
    marks = Marks(page.painted("timeline")["marks"])
    right = page("view.panel('timeline').axis().x1")
    beside = sorted((y, x, words) for x, y, words in marks.texts() if x > right + REACH)
    names = [words for *_, words in beside]
    assert "resume" in names and ("stall" in names) == is_stalled and any("idle left out" in each for each in names)
    for (y, x, words), (below, after, others) in combinations(beside, 2):
        assert below - y >= 11 or x + 6 * len(words) < after, (words, others)
