"""A recording opens as an incident: its plots, brush, causes and stalls are those that Python computes."""

import re
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from workbench import simulate
from workbench.analysis.incident import incident
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.trace.window import window
from workbench.viz.export_html import PagePlace, html_page

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_preemption.jsonl.gz"

SERVED = Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz"
NUMBERS = "view.panel('incident').shown.whole"


class Stalling:
    """A cost of steps in which a few steps stand still."""

    def __init__(self, at):
        self.at, self.step = at, 0

    def step_seconds(self, chunks):
        self.step += 1
        seconds = CostModel(fixed=0.02, per_prefill_token=4e-4).step_seconds(chunks)
        return seconds + (4.0 if self.step in self.at else 0.0)


def recording(source="vllm 0.33.0"):
    """150 requests, two in a hundred of them long and a burst, few KV blocks, two stalls."""
    random, requests, now = Random(3), [], 0.0
    for number in range(150):
        now += random.expovariate(3.0) if not 80 <= number < 92 else 0.0
        length = 900 if number % 15 == 7 else random.randrange(20, 120)
        tokens = random.randrange(4, 30)
        requests.append({"id": f"r{number}", "prompt": {"len": length}, "max_tokens": tokens, "arrival_time": now})
    config = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "num_blocks": 130}
    trace = simulate({"config": config, "requests": requests}, cost_model=Stalling((300, 700)))
    known = {**trace.meta.config, "token_ids_recorded": False}
    trace.meta = msgspec.structs.replace(trace.meta, source=source, config=known)
    return trace


def drag(page, left, right):
    """Drag over the whole run, from one share of its width to another."""
    box = page.root.locator("[data-panel=incident] canvas").last.bounding_box()
    x0, x1 = page.view("[view.panel('incident').scale(false).x0, view.panel('incident').scale(false).x1]")
    at = [box["x"] + x0 + share * (x1 - x0) for share in (left, right)]
    page.page.mouse.move(at[0], box["y"] + 15)
    page.page.mouse.down()
    page.page.mouse.move(at[1], box["y"] + 18, steps=4)
    page.page.mouse.up()
    page.frame()


@pytest.fixture
def trace():
    return recording()


def slow_rows(page):
    return page.root.locator(".wb-slow tbody tr").all_inner_texts()


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("width", (390, 1100, 1440))
def test_a_saved_recording_opens_as_an_incident(open_page, tmp_path, trace, width):
    trace.to_html(tmp_path / "page.html")
    page = open_page(f"file://{tmp_path}/page.html#", width=width, height=1400)
    page.wait("view.shown === 'incident'")
    page.frame()
    found = trace.incident()
    assert found.slow and found.apart and len(found.stalls) == 2
    first, rows = found.slow[0], slow_rows(page)
    assert len(rows) == 8 and rows[0].split("\t")[0] == first.request_id and first.cause in rows[0]
    assert page.root.locator(".wb-apart li").all_inner_texts() == [str(one) for one in found.apart]
    assert page.view("view.stalls.map((stall) => stall.step)") == [stall.step for stall in found.stalls]
    assert page.root.locator("[data-panel=texts]").count() == 0, "the recording has no texts"
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    # The numbers are those of the trace's metrics.
    metrics = trace.metrics()
    shown = page.view("view.panel('incident').shown.whole")
    ttft = [request.ttft.seconds for request in metrics.requests.values()]
    assert np.allclose(sorted(shown["first"]), sorted(ttft), rtol=1e-5)
    assert len(shown["next"]) == metrics.summary.itl.count and shown["arrivals"] == len(trace.requests)
    assert shown["preemptions"] == metrics.summary.num_preemptions
    assert shown["hit"] / shown["queried"] == metrics.summary.hit_rate
    assert abs(shown["kv"] - metrics.summary.peak_kv_use) < 1e-9
    assert f"{np.percentile(ttft, 99):.3g} s (P99)" in page.root.locator("[data-panel=incident] .wb-facts").inner_text()


def test_the_brush_narrows_all_that_is_shown(page_of, trace):
    page = page_of(trace)
    page.view("view.show('incident')")
    page.frame()
    assert page.view("view.cursor.range") == [0, len(trace)]
    drag(page, 0.4, 0.6)
    begin, end = page.view("view.cursor.range")
    for step, share in ((int(begin), 0.4), (int(end) - 1, 0.6)):  # the step at that time
        assert trace[step].time - 0.5 <= share * trace[-1].end <= trace[step].end + 0.5
    rows = [row.split("\t")[0] for row in slow_rows(page)]
    requests = trace.metrics().requests
    inside = [
        (request.ttft.seconds, name)
        for name, request in requests.items()
        if trace[int(begin)].time < request.token_times[0] <= trace[int(end) - 1].end
    ]
    until = trace[int(end) - 1].end
    waiting = [
        (until - trace.requests[name].arrival_time, name)
        for name, request in requests.items()
        if trace.requests[name].arrival_time < until < request.token_times[0]
    ]
    assert rows == [name for _, name in sorted(inside + waiting, key=lambda each: -each[0])[:8]] and waiting
    assert page.view("view.panel('incident').shown.whole.first.length") == len(inside) < len(requests)
    page.root.locator(".wb-slow tbody tr").first.click()
    page.frame()
    assert page.root.locator(".wb-drawer h3").text_content() == rows[0]
    page.view("view.inspector.pin(null)")
    page.root.locator("[data-panel=incident] canvas").last.dblclick(position={"x": 200, "y": 15}, force=True)
    page.frame()
    assert page.view("view.cursor.range") == [0, len(trace)]


def test_a_served_recording_asks_for_its_causes_and_again_when_it_has_grown(open_page, serve, trace):
    growing = Trace(trace.meta)

    def grow(steps):
        for info in trace.requests.values():
            if info.arrival_step < steps and info.request_id not in growing.requests:
                growing.add_request(info)
        for record in list(trace)[len(growing) : steps]:
            growing.append(record)

    grow(310)
    page = open_page(serve(lambda: growing) + "#")
    page.wait("view.shown === 'incident' && view.stalls.length === 1")
    grow(len(trace))
    page.wait(f"view.store.numSteps === {len(trace)} && view.stalls.length === 2")
    page.frame()
    assert trace.incident().slow[0].cause in slow_rows(page)[0]


def test_a_run_of_our_own_does_not_open_as_an_incident(open_page, tmp_path):
    recording("simulation").to_html(tmp_path / "page.html")
    page = open_page(f"file://{tmp_path}/page.html#")
    page.wait("view.store.numSteps > 0")
    page.frame()
    assert page.view("view.shown") == "story" and page.view("view.stalls.length") == 0
    assert not page.root.get_by_role("button", name="Incident").is_visible()


def test_requests_without_a_first_token_are_the_slowest(page_of):
    requests = [{"id": "long", "prompt": {"len": 20}, "max_tokens": 900}]
    requests += [{"id": f"waits{i}", "prompt": {"len": 20}, "arrival_time": 5.0 + i} for i in (0, 1)]
    config = {"max_num_seqs": 1, "num_blocks": 200}
    cost = CostModel(fixed=0.03, per_prefill_token=0.005)
    trace = simulate({"config": config, "requests": requests}, cost_model=cost, max_steps=800)
    trace.meta = msgspec.structs.replace(trace.meta, source="vllm 0.33.0")
    page = page_of(trace)
    page.view("view.show('incident')")
    page.frame()
    page.wait("view.status.incident")
    page.frame()
    rows = [row.split("\t") for row in slow_rows(page)]
    assert [name for name, *_ in rows] == ["waits0", "waits1", "long"]
    assert rows[0][1].startswith("≥ 19") and "waiting for a seat" in rows[0][2] and "long" in rows[0][2]
    assert "2 without a first token for up to 19" in page.root.locator("[data-panel=incident] .wb-facts").inner_text()


OVERLAY = """(() => {
    const panel = view.panel('incident'), bars = [];
    const context = new Proxy({}, {
        get: (_, key) => (...given) => key === 'fillRect' && bars.push(given),
        set: () => true,
    });
    panel.drawOverlay(context);
    const { x } = panel.scale(true), time = view.store.value('time', view.cursor.step);
    const axis = view.panel('timeline').axis(), mark = view.panel('timeline').cursorMark.style.transform;
    return {
        above: bars[0][0] - x(time),
        below: parseFloat(mark.slice('translate('.length)) - axis.x(view.cursor.step),
    };
})()"""


@pytest.mark.parametrize("step", (0, 1, 400))
def test_the_cursor_stands_at_the_beginning_of_its_step_on_both_axes(page_of, trace, step):
    page = page_of(trace)
    page.view("view.show('incident')")
    page.view(f"view.cursor.seek({step})")
    page.frame()
    found = page.view(OVERLAY)
    assert abs(found["above"]) < 0.01 and -2.1 <= found["below"] <= 2.5, (
        found
    )  # a frame begins there, a narrow line is in the middle


def test_each_axis_says_whether_it_has_idle_time(page_of):
    requests = [{"id": f"r{n}", "prompt": {"len": 40}, "max_tokens": 3, "arrival_time": 9.0 * n} for n in range(3)]
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.1))
    trace.meta = msgspec.structs.replace(trace.meta, source="vllm 0.33.0")
    page = page_of(trace)
    page.view("view.show('incident')")
    for panel in ("incident", "timeline"):  # each is drawn once it is in sight
        page.root.locator(f"[data-panel={panel}] .wb-hint").first.filter(has_text=" idle").wait_for()
    hints = {
        name: page.root.locator(f"[data-panel={name}] .wb-hint").first.inner_text() for name in ("incident", "timeline")
    }
    assert "time, with 17.4 s idle" in hints["incident"], hints
    assert "time, without 17.4 s idle" in hints["timeline"], hints


@pytest.mark.parametrize("width", (390, 1280))
def test_resume_is_in_the_legend_and_no_mark_is_cut(open_page, tmp_path, trace, width):
    """Every mark of an event lies inside what the picture shows, also that of a narrow first step."""
    trace.to_html(tmp_path / "page.html")
    page = open_page(f"file://{tmp_path}/page.html", width=width, height=1400)
    painted = page.view("""(() => {
        const panel = view.panel('timeline'), real = document.createElement('canvas').getContext('2d');
        const clip = [], words = [], marks = [];
        let clipped = 0;
        const context = new Proxy(real, {
            get(target, key) {
                const value = target[key];
                if (typeof value !== 'function') return value;
                return (...given) => {
                    if (key === 'clip') clipped++;
                    if (key === 'restore' && clipped) clipped--;
                    if (key === 'fillText') words.push(given[0]);
                    if (key === 'arc' && given[3] === Math.PI / 2) marks.push(clipped);
                    return value.apply(target, given);
                };
            },
            set(target, key, value) { target[key] = value; return true; },
        });
        panel.draw(context, panel.axis(), panel.axis().first);
        const shown = [];
        panel.legend.show = (entries) => shown.push(...entries.map(({ name }) => name));
        panel.draw(context, panel.axis(), panel.axis().first);
        return { words: [...words, ...shown], marks };
    })()""")
    assert "resume" in painted["words"]
    assert not any(painted["marks"]) and (painted["marks"] or width == 390)


@pytest.mark.parametrize("width", (390, 1280))
def test_the_time_before_the_first_step_says_who_waits(open_page, width, tmp_path):
    """The example that is shipped has three requests before its first step, and no row has a value until then."""
    trace = Trace.load(EXAMPLE)
    trace.to_html(tmp_path / "page.html")
    page = open_page(f"file://{tmp_path}/page.html#incident", width=width, height=1400)
    page.wait("view.shown === 'incident'")
    page.frame()
    panel = "view.panels.find((panel) => panel.element.dataset.panel === 'incident')"
    axis = page.view(f"(({{ x0, x1, from, to }}) => [x0, x1, from, to])({panel}.scale(true))")
    x0, x1, begin, end = axis
    first = trace[0].time
    assert begin == min(info.arrival_time for info in trace.requests.values()) < first
    before, after = (x0 + (first - begin) / (end - begin) * (x1 - x0) + shift for shift in (-3, 3))
    lines = [page.view(f"{panel}.hit(argument, 90).lines", x) for x in (x0 + 3, before, after)]
    words = "no step yet: 3 requests wait for step 0"
    assert [words in each for each in lines] == [True, True, False]
    drawn = page.view(f"""(() => {{
        const panel = {panel}, context = panel.canvas.getContext('2d'), rects = [], words = [];
        context.fillRect = (...given) => typeof context.fillStyle === 'object' && rects.push(given);
        context.fillText = (...given) => words.push(given[0]);
        panel.draw(context);
        delete context.fillRect;
        delete context.fillText;
        return {{ rects, words }};
    }})()""")
    (hatched,) = drawn["rects"]
    assert hatched[0] == x0 and abs(hatched[0] + hatched[2] - (before + 3)) < 0.01
    assert (words in drawn["words"]) == (width == 1280), "if there is room"
    page.view("view.cursor.moveTo(8, 8)")
    page.frame()
    assert page.view(f"{panel}.scale(true).from") == trace[8].time
    assert words not in page.view(f"{panel}.hit(argument, 90).lines", x0 + 3)


def test_a_page_opens_at_its_largest_stall_and_says_so(page_of, trace):
    page = page_of(trace)
    page.wait("view.stalls.length === 2")
    largest = max(incident(trace).stalls, key=lambda stall: stall.excess)
    assert page.view("view.store.label(view.cursor.step)") == largest.step
    assert "Opened at the largest of 2 stalls: " in page.root.get_by_role("alert").inner_text()
    page.view("view.cursor.seek(1)")
    page.view("view.statusChanged()")
    assert page.view("view.cursor.step") == 1, "a person has moved it"


def test_a_page_that_opens_elsewhere_does_not_say_that_it_opened_at_a_stall(open_page, tmp_path, trace):
    who = next(iter(trace.requests))
    step = trace.requests[who].arrival_step
    page = html_page(trace, opens_at=PagePlace(None, step, who, card=True))
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    page = open_page(f"file://{tmp_path}/page.html")
    page.wait("view.stalls.length === 2")
    page.frame()
    assert page.view("view.store.label(view.cursor.step)") == step
    assert page.view("view.inspector.title.textContent") == who
    assert "Opened at" not in page.root.inner_text()


def test_all_times_of_an_axis_are_written_alike(open_page, tmp_path):
    Trace.load("notebooks/data/vllm_served.jsonl.gz").to_html(tmp_path / "served.html")
    page = open_page(f"file://{tmp_path}/served.html#incident", width=1440)
    page.wait("view.store.numSteps > 300")
    page.frame()
    labels = page.view(
        """(() => {
            const panel = view.panel("timeline"), axis = panel.axis(), written = [];
            const context = new Proxy({}, { get: (_, key) => key === "measureText" ? () => ({ width: 30 })
                : (words) => { if (key === "fillText") written.push(words); }, set: () => true });
            panel.drawStepLabels(context, axis, 100);
            return written;
        })()"""
    )
    times = [label for label in labels if re.search(r"\d (s|ms|min)$", label) and "idle" not in label]
    assert len(times) > 3 and {label.split()[-1] for label in times} == {"min"}, labels


def test_a_tooltip_leaves_when_a_drag_begins_and_follows_what_is_drawn(page_of, long_trace):
    """While something is dragged nothing covers it; afterwards the tooltip is about the new picture, or gone."""
    page = page_of(long_trace, height=900)
    tooltip = page.root.locator(".wb-tooltip")
    page.view("view.show('all')")
    page.frame()
    canvas = page.root.locator("[data-panel=timeline] canvas:not(.wb-legend)").first
    box = canvas.bounding_box()
    mouse, y = page.page.mouse, box["y"] + 60
    mouse.move(box["x"] + 300, y)
    page.frame()
    assert tooltip.is_visible()
    mouse.down()
    assert tooltip.is_hidden(), "at the beginning of a drag"
    mouse.move(box["x"] + 500, y, steps=4)
    page.frame()
    assert tooltip.is_hidden() and page.view("view.cursor.step") != len(long_trace) - 1
    mouse.up()
    assert tooltip.is_hidden(), "after a drag"
    mouse.move(box["x"] + 502, y)
    page.frame()
    before = tooltip.text_content()
    assert tooltip.is_visible() and before.startswith("Step")
    page.view("view.cursor.moveTo(0, 20)")
    page.frame()
    assert tooltip.text_content() != before, "another step is under the pointer now"
    page.view("view.show('kernel')")
    page.wait("view.tooltip.element.hidden || view.tooltip.about.checkVisibility()")


@pytest.mark.parametrize("width", [390, 1280])
def test_a_tooltip_stays_in_the_window_beside_the_pointer(page_of, long_trace, width):
    page = page_of(long_trace, width=width, height=700)
    for panel in ("timeline", "gantt", "pool", "metrics"):
        canvas = page.root.locator(f"[data-panel={panel}] canvas:not(.wb-legend)").first
        canvas.scroll_into_view_if_needed()
        page.frame()
        box = canvas.bounding_box()
        low, high = max(box["y"], 1), min(box["y"] + box["height"], 699)
        for i in range(24):
            x, y = box["x"] + box["width"] * (i % 6 + 0.5) / 6, low + (high - low) * (i // 6 + 0.5) / 4
            page.page.mouse.move(x, y)
            page.frame()
            shown = page.root.locator(".wb-tooltip").evaluate(
                "(e) => e.hidden ? null : e.getBoundingClientRect().toJSON()"
            )
            if shown is None:
                continue
            left, top, right, bottom = shown["x"], shown["y"], shown["x"] + shown["width"], shown["y"] + shown["height"]
            assert left >= 0 and top >= 0 and right <= width and bottom <= 700
            assert max(top - y, y - bottom) <= 20 and max(left - x, x - right) <= 20, "beside the pointer"
            assert not (left < x < right and top < y < bottom), "it covers what it is about"


@pytest.mark.parametrize("begin, end", [(30.0, 60.0), (0.0, 40.0), (70.0, 131.0)])
def test_a_page_of_a_part_counts_as_the_whole_page_does_for_its_steps(open_page, tmp_path, begin, end):
    """The requests that arrive in the part, and the gaps that begin in it, are the same on both pages."""
    trace = Trace.load(SERVED)
    part = window(trace, begin=begin, end=end)
    shown = []
    for name, run in (("whole", trace), ("part", part)):
        run.to_html(tmp_path / f"{name}.html")
        page = open_page(f"file://{tmp_path}/{name}.html#")
        page.wait("view.shown === 'incident'")
        first = part[0].step - run[0].step
        page.view(f"view.cursor.showRange([{first}, {first + len(part)}])")
        page.frame()
        words = page.view("view.panel('incident').words()")
        shown.append(([each for each in words.split("; ") if "stall" not in each], page.view(NUMBERS)))
    assert shown[0] == shown[1]
    arrived = [info for info in trace.requests.values() if info.arrival_time <= part[-1].end]
    if part[0].step:
        arrived = [info for info in arrived if info.arrival_time >= part[0].time]
    assert shown[0][0][0].startswith(f"{len(part.requests)} requests in ")
    assert ("arrived here" in shown[0][0][0]) == (len(arrived) < len(part.requests))
    assert shown[0][0][0].endswith(f", {len(arrived)} arrived here") == (len(arrived) < len(part.requests))


def test_the_strip_of_the_whole_run_has_its_own_times_beside_a_part(page_of):
    page = page_of(Trace.load(SERVED))
    page.view("view.show('incident')")
    page.frame()
    assert page.view("view.panel('incident').ends ?? null") is None, "the axis below is the same"
    page.view("view.cursor.showRange([89, 170])")
    page.frame()
    assert page.view("view.panel('incident').ends") == ["0:00 min", "2:11 min"]
