"""All times that are stated count from the first arrival of the run, and a page of a part says which part it is."""

import re

import msgspec
import pytest
from msgspec.structs import replace
from painted import Marks, close

from workbench import simulate
from workbench.trace import Trace
from workbench.trace.run_zero import clock_starts, run_zero
from workbench.trace.window import window
from workbench.viz.export_html import html_page
from workbench.viz.layout.fleet import fleet_rows

EXACT = {"fixed": 1 / 64, "per_prefill_token": 1 / 1024, "per_kv_token": 1 / 2**16}
"""Costs whose sums are exact, so that the same times later are the same to the last bit."""

INCIDENT = {"live": False, "incident": {"slow": [], "apart": [], "stalls": []}}


def recorded(late, *, wait=0.0, gap=0.0, created=1e9):
    """A run that begins `late` seconds after its recorder; its first step comes `wait` seconds after the first arrival.

    The second request arrives first, because an engine may see them in another order. `gap` is a pause in the middle.
    """
    requests = [{"id": f"r{n}", "prompt": {"len": 20 + n}, "max_tokens": 6, "arrival_time": n / 16} for n in range(12)]
    run = simulate({"config": {"max_num_seqs": 3}, "requests": requests, "cost_model": EXACT})
    trace = Trace(replace(run.meta, source="vllm", created=created))
    pause = run[len(run) // 2].time
    first = {0: late + 1 / 1024, 1: late}
    for n, info in enumerate(run.requests.values()):
        after = wait + late + info.arrival_time + (gap if info.arrival_time >= pause else 0.0)
        trace.add_request(replace(info, arrival_time=first.get(n, after)))
    for record in run:
        shift = late + wait + (gap if record.time >= pause else 0.0)
        trace.append(replace(record, time=record.time + shift, end=record.end + shift))
    return trace


def badge_of(page, trace):
    page.open(trace, width=1100)
    return page("view.controls.badgeText()")


def everything_said(page, trace):
    """All words of the pictures on an axis of time with their places, their tables, and what the pointer finds."""
    page.open(trace, status=INCIDENT, width=1100)
    page("(view.cursor.axis = 'time', view.changed('range'), page.frame())")
    said = []
    for panel in ("incident", "timeline", "gantt"):
        marks = Marks(page.painted(panel, 5)["marks"])
        said.append([(round(x, 3), round(y, 3), words) for x, y, words in marks.texts()])
        said.append(page.table(panel)["rows"] if panel == "incident" else [])
        said.append([page.hit(panel, x, 100) for x in range(90, 900, 70)])
        said.append(page(f"view.panel('{panel}').hintElement.textContent"))
    return [*said, page("view.panel('incident').words()")]


@pytest.mark.parametrize(("wait", "gap"), [(0.0, 0.0), (0.5, 0.0), (2.0, 3.0)])
def test_a_recorder_that_began_earlier_changes_no_time_on_the_page(deno_page, wait, gap):
    early, late = recorded(0.0, wait=wait, gap=gap), recorded(18.0, wait=wait, gap=gap)
    assert run_zero(early) == 0.0 and run_zero(late) == 18.0
    assert everything_said(deno_page, late) == everything_said(deno_page, early)


@pytest.mark.parametrize("late", [0.0, 18.0])
def test_the_axis_of_an_incident_begins_with_0(deno_page, late):
    trace = recorded(late, wait=0.5)
    deno_page.open(trace, status=INCIDENT, width=1100)
    marks = Marks(deno_page.painted("incident")["marks"])
    labels = [
        (x, words) for x, y, words in marks.texts() if re.fullmatch(r"[\d.]+ (s|ms)", words) and y < 60 and x >= 84
    ]
    assert labels[0][1] == "0 s" and labels[0][0] == pytest.approx(84, abs=12)
    span = trace[-1].end - late
    for x, words in labels[1:-1]:
        value, unit = words.split()
        assert x == pytest.approx(84 + float(value) * {"s": 1, "ms": 1e-3}[unit] / span * (1100 - 84 - 176), abs=0.5)


def test_a_timeline_that_begins_after_0_says_why(deno_page):
    hint = "view.panel('timeline').hintElement.textContent"
    for wait in (0.0, 2.0):
        deno_page.open(recorded(7.0, wait=wait), status=INCIDENT)
        deno_page("(view.cursor.axis = 'time', view.changed('range'), page.frame())")
        deno_page.painted("timeline")
        assert ("step 0 began 2 s after the first arrival" in deno_page(hint)) == (wait > 0)


def test_a_run_that_forgets_its_first_steps_keeps_its_zero(deno_page):
    """The axis of a live run must not jump each time."""
    trace = recorded(7.0, wait=0.3)
    deno_page.open(trace, status={"live": True, "state": "idle"})
    assert deno_page("view.store.zero") == 7.0
    deno_page("view.store.reset(view.store.zero)")
    deno_page("(page.values.packet = page.values.packet, view.store.append(page.values.packet))")
    assert deno_page("view.store.keptZero") == 7.0


@pytest.mark.parametrize("late", [0.0, 18.0])
def test_a_window_counts_from_the_first_arrival(late):
    trace = recorded(late, wait=0.3)
    length = trace[-1].end - late
    for begin, end in ((0.0, length / 3), (length / 3, length / 2), (length / 2, length)):
        part = window(trace, begin=begin, end=end)
        assert list(part) == [r for r in trace if r.end > begin + late and r.time < end + late]
    with pytest.raises(ValueError, match=r"the trace has 0\.3 s( \([0-9:]+\))? to"):
        window(trace, begin=1e6, end=2e6)


def test_the_page_of_a_part_says_which_part_it_is(deno_page):
    trace = recorded(18.0, wait=0.3)
    part = window(trace, begin=0.6, end=0.9)
    assert part[0].step > 0 and part[-1].step < trace[-1].step
    deno_page.open(part, status=INCIDENT, width=1100)
    badge = deno_page("view.controls.badge.textContent")
    begin, unit, end, unit_of_end, steps = re.fullmatch(
        r"vllm · ([\d.]+) (s|ms) to ([\d.]+) (s|ms) of a recording of (\d+) steps", badge
    ).groups()
    scale = {"s": 1.0, "ms": 1e-3}
    assert float(begin) * scale[unit] == pytest.approx(part[0].time - 18.0, abs=0.02)
    assert float(end) * scale[unit_of_end] == pytest.approx(part[-1].end - 18.0, abs=0.02)
    assert int(steps) == len(trace)
    words = Marks(deno_page.painted("incident")["marks"]).words()
    assert "this part" in words and "whole run" not in words
    first, last = part[0].step, part[-1].step
    deno_page("view.cursor.seek(1)")
    deno_page("view.controls.update()")
    assert deno_page("view.controls.position.textContent") == f"step {first + 1} of {first}–{last}"
    assert f"steps {first} to {last} of {len(trace)}</title>" in html_page(part)
    rows = deno_page.table("incident")["rows"]
    value, unit = rows[0][0].split()
    assert float(value) * scale[unit] == pytest.approx(part[0].time - 18.0, abs=2e-3)

    deno_page.open(trace, status=INCIDENT, width=1100)
    assert deno_page("view.controls.badge.textContent") == "vllm · recording"
    assert {badge_of(deno_page, each) for each in (trace.fork(), trace.fork(max_num_seqs=2))} == {"vllm · simulated"}
    assert badge_of(deno_page, simulate({"requests": [{"id": "a", "prompt": {"len": 9}}]})) == "simulation"
    deno_page.open(trace, status=INCIDENT, width=1100)
    words = Marks(deno_page.painted("incident")["marks"]).words()
    assert "whole run" in words and "this part" not in words
    assert re.search(r"<title>Workbench: [^,]*</title>", html_page(trace))


def test_replicas_have_one_zero():
    """That of the replica whose first request arrives first, whenever their recorders began."""
    one, other = recorded(5.0, created=1000.0), recorded(1.0, wait=0.2, created=1002.5)
    starts = clock_starts({"a": one, "b": other})
    assert starts == {"a": pytest.approx(-3.5), "b": pytest.approx(-1.0)}
    rows = fleet_rows({"a": one, "b": other})
    assert rows.end == pytest.approx(max(one[-1].end - 3.5, other[-1].end - 1.0))
    moved = fleet_rows({"a": recorded(9.0, created=996.0), "b": recorded(2.0, wait=0.2, created=1001.5)})
    assert moved.end == pytest.approx(rows.end)
    assert close(
        [part.filled for row in moved.rows for part in row.parts],
        [part.filled for row in rows.rows for part in row.parts],
    )


def test_a_trace_that_begins_later_counts_from_its_first_step():
    trace = recorded(18.0, wait=0.3)
    later = Trace(trace.meta)
    for info in trace.requests.values():
        later.add_request(info)
    assert run_zero(later) == 0.0
    assert run_zero(trace[5:]) == 18.0


@pytest.mark.parametrize("late", [0.0, 18.0])
def test_a_saved_part_keeps_the_zero_of_its_run(deno_page, late, tmp_path):
    """One slice was 1.07 s to 1.92 s on its page, and 0 s to 0.85 s in the page of its file."""
    part = recorded(late, wait=0.3)[9:20]
    part.save(tmp_path / "part.jsonl.gz")
    loaded = Trace.load(tmp_path / "part.jsonl.gz")
    again = Trace.load(tmp_path / "part.jsonl.gz")[3:]
    assert run_zero(loaded) == run_zero(again) == late and part[0].time > late
    assert everything_said(deno_page, loaded) == everything_said(deno_page, part)
    early, whole = recorded(0.0), recorded(0.0)[:9]
    assert run_zero(whole) == 0.0 and early[9:].keyframe.zero == 0.0
    counted = simulate({"requests": [{"id": "r", "prompt": {"len": 9}, "max_tokens": 6}]})
    assert counted[3:].keyframe.zero is msgspec.UNSET, "it has no clock"
