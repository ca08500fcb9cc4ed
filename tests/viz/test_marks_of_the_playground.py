"""The playground's own parts: the numbers of a run, its sliders and switches, and the arrivals that are drawn."""

import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from pages_in_deno import DENO, Page
from painted import Marks, grouped
from runs_to_draw import COSTS, run
from test_marks_of_runs import pair, percentile
from test_marks_of_steps import near, tokens

from workbench import EngineConfig, simulate, simulate_fleet
from workbench.apps.playground import session
from workbench.apps.playground.presets import PRESETS
from workbench.trace import Trace
from workbench.viz.bundle import JS_DIRECTORY

if not DENO.exists():
    pytest.skip("deno is not installed, so the page's code cannot be run without a browser", allow_module_level=True)

FOLDER = Path(session.__file__).with_name("page")


STUBS = """
const explained = (words, term) => ((globalThis.page.terms ??= {})[words] = term, words);
const meaningOf = (words) => words;
globalThis.getComputedStyle = () => ({ fontFamily: "sans", getPropertyValue: (name) => name });
"""


def sources(*names):
    """Modules of the page joined into one, and what they export given to `page`."""
    text = "\n".join((FOLDER / name).read_text() for name in names)
    shared = (JS_DIRECTORY / "dom.js").read_text().replace("export ", "")
    text = re.sub(r"^import .*$", "", text, flags=re.MULTILINE)
    exported = re.findall(r"^export (?:function|class|const) (\w+)", text, flags=re.MULTILINE)
    shared = f"const {{ counted, formatSeconds }} = (() => {{\n{shared}\nreturn {{ counted, formatSeconds }};\n}})();"
    text = text.replace("export ", "")
    return f"{STUBS}\n{shared}\n{text}\nObject.assign(globalThis.page, {{ {', '.join(exported)} }});"


@pytest.fixture(scope="module")
def page():
    page = Page(sources("elements.js", "numbers.js", "settings.js", "arrivals.js"))
    yield page
    page.close()


# -- numbers -----------------------------------------------------------------------------------------------------------


def numbers_of(facts):
    """The numbers of a run, as the playground writes them."""

    def time(value):
        if value is None or value != value:
            return "–"
        if not facts.timed:
            return f"{round(value, 1):,g} step{'' if round(value, 1) == 1 else 's'}"
        return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"

    latencies = [facts.latencies(step) for step in range(len(facts))]
    first = [v for found in latencies for is_first, v in found.values() if is_first]
    gaps = []
    for who in facts.order:
        out = facts[-1].tokens[who]
        gaps += [0 if a.step == b.step else facts.latencies(b.step)[who][1] for a, b in pairwise(out)]
    records, num = facts.records, sum(map(len, facts[-1].tokens.values()))
    took = records[-1].end - records[0].time if facts.timed else len(records)
    uses = [tokens(r)[1] / r.token_budget for r in records if tokens(r)[1]]
    return [
        time(sum(first) / len(first)), time(percentile(first, 99)), f"{num / took:.1f}" if facts.timed else "–",
        time(sum(gaps) / len(gaps)), time(percentile(gaps, 99)), time(max(gaps)), time(took), grouped(len(records)),
        f"{100 * sum(uses) / len(uses):.0f}%",
        grouped(sum(c.num_cached_tokens for r in records for c in r.chunks)),
        grouped(sum(len(r.preempted) for r in records)),
        grouped(sum(c.num_recomputed_tokens for r in records for c in r.chunks)),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["timed 3", "plain 1", "timed 2"])
def test_the_numbers_of_the_playground(page, name):
    first, second, *facts = pair(name)
    summaries = [json.loads(json.dumps(session._summary(trace))) for trace in (first, second)]
    read = "element.querySelectorAll('tr').map((row) => row.children.map((cell) => cell.textContent))"
    show = f"((element) => (page.showNumbers(element, argument), {read}))(document.createElement('div'))"
    for both_ in (False, True):
        for pinned in (False, True):
            given = {"summary": summaries[0], "other": summaries[1] if both_ else None, "end": "done", "pinned": pinned}
            head, *rows = page(show, given)
            assert head[:4] == ["", "first token, mean", "P99", "output tokens/s"] and head[7:9] == [
                "duration",
                "steps",
            ]
            assert [row[0] for row in rows] == (["A", "B"] if both_ else ["A" if pinned else "now"])
            for row, each in zip(rows, facts):
                expected = numbers_of(each)
                assert len(row) == 13
                for title, cell, wanted in zip(head[1:], row[1:], expected):
                    assert near(cell, wanted) or rounds(cell, wanted), (title, cell, wanted)
    stuck = {"summary": summaries[0], "other": None, "pinned": False}
    said = "((element) => (page.showNumbers(element, argument), element.textContent))(document.createElement('div'))"
    timed, counted = summaries[0] | {"unit": "s"}, summaries[1] | {"unit": ""}
    both_have = {"summary": timed, "other": timed, "end": "done", "pinned": False}
    assert "no times" not in page(said, both_have)
    assert "B has no times" in page(said, both_have | {"other": counted})
    assert "A and B have no times" in page(said, both_have | {"summary": counted, "other": counted})
    assert "can never be scheduled" in page(said, stuck | {"end": "stuck"})
    assert f"stopped after {len(first):,} steps" in page(said, stuck | {"end": "max_steps"})
    one = {"summary": summaries[0] | {"num_steps": 1}, "end": "max_steps"}
    assert "stopped after 1 step." in page(said, stuck | one)
    assert f"stopped after {len(second):,} steps" in page(said, both_have | {"other": summaries[1], "end": "max_steps"})
    part, done = page(said, stuck | {"end": "part"}), page(said, stuck | {"end": "done"})
    notes = said.replace("element.textContent", "element.querySelectorAll('p').length")
    assert [page(notes, stuck | {"end": end}) for end in ("part", "done")] == [1, 0]
    assert "a part of a longer run" in part
    assert not any(words in text for words in ("can never", "stopped") for text in (part, done))
    assert "a part" not in done


def test_the_numbers_of_fleets_have_their_hit_rate_and_the_busiest_replica(page):
    traces = simulate_fleet(PRESETS["fleet"].workload, replicas=3, router="prefix").traces
    chunks = [chunk for trace in traces for step in trace for chunk in step.chunks]
    cached = {chunk.request_id: chunk.num_cached_tokens for chunk in reversed(chunks)}
    counts = [len(trace.requests) for trace in traces]
    prompts = [info.num_prompt_tokens for trace in traces for info in trace.requests.values()]
    fleet = json.loads(json.dumps(session._summary(*traces)))
    read = "element.querySelectorAll('tr').map((row) => row.children.map((cell) => cell.textContent))"
    show = f"((element) => (page.showNumbers(element, argument), {read}))(document.createElement('div'))"
    for other in (None, fleet):
        head, *rows = page(show, {"summary": fleet, "other": other, "end": "done", "pinned": True})
        assert head[4:6] == ["hit rate", "busiest replica"]
        shares = sum(cached.values()) / sum(prompts), max(counts) / sum(counts)
        assert all(row[4:6] == [f"{100 * share:.0f}%" for share in shares] for row in rows)
        assert rows[0][head.index("steps")] == grouped(sum(map(len, traces)))
    terms = page("page.terms")
    assert terms["hit rate"] == "hit rate" and terms["preemptions"] == "preemption", "their titles explain them"
    assert not {"duration", "busiest replica"} & terms.keys()


def rounds(cell, wanted):
    """Whether two numbers differ by their last digit only."""
    one, two = (re.sub(r"[^\d.]", "", words) for words in (cell, wanted))
    return len(one) == len(two) and "." in one and abs(float(one) - float(two)) <= 0.11


@pytest.mark.parametrize(
    ("time", "unit", "words"),
    [
        (1.0, "s", "1 s"), (0.9994, "s", "999 ms"), (0.25, "s", "250 ms"), (12.3456, "s", "12.3 s"), (None, "s", "–"),
        (0, "s", "0 s"), (1, "steps", "1 step"), (2.25, "steps", "2.3 steps"), (None, "steps", "–"),
    ],
)  # fmt: skip
def test_a_time_in_its_unit(page, time, unit, words):
    """None stands for a run without a first token."""
    summary = json.loads(json.dumps(session._summary(pair("timed 3")[0])))
    summary |= {"unit": unit, "ttft": {**dict.fromkeys(summary["ttft"], time), "bounds": []}}
    read = "element.querySelectorAll('tbody')[0].querySelectorAll('td').map((cell) => cell.textContent)"
    show = f"((element) => (page.showNumbers(element, argument), {read}))(document.createElement('div'))"
    assert page(show, {"summary": summary, "other": None, "end": "done", "pinned": False})[:2] == [words, words]


LONG = [{"id": "a", "prompt": {"len": 20}, "max_tokens": 4}, {"id": "b", "prompt": {"len": 900}}]
SMALL = {"max_num_batched_tokens": 64}
OPEN = {
    "too big": lambda: Trace.load("tests/data/vllm-recorded/sync/d7_too_big.jsonl.gz"),
    "too big, async": lambda: Trace.load("tests/data/vllm-recorded/async/d7_too_big.jsonl.gz"),
    "part": lambda: run("timed 3")[0][0:4],
    "steps": lambda: simulate({"requests": LONG}, config=SMALL, max_steps=5),
    "stopped": lambda: simulate({"requests": LONG, "cost_model": COSTS}, config=SMALL, max_steps=5),
    "ended": lambda: run("timed 3")[0],
}


@pytest.mark.parametrize("name", OPEN)
def test_a_number_that_can_only_grow_is_marked(page, name):
    """A request without a first token has waited so far; a statistic that a longer wait raises is a lower bound."""
    trace = OPEN[name]()
    waits, so_far = [], []
    for who, info in trace.requests.items():
        given = [r for r in trace if any(c.request_id == who and c.sampled is not None for c in r.chunks)]
        ended = [r for r in trace if who in r.aborted or (who in r.finished and not given)]
        end = (given or ended or [trace[-1]])[0]
        since = end.end - info.arrival_time if trace.end else end.step + 1 - info.arrival_step
        (waits if given else so_far).append(since)
    longer = [*waits, *(wait + 1000 for wait in so_far)]
    given = {"summary": json.loads(json.dumps(session._summary(trace))), "other": None, "end": "done", "pinned": False}
    read = "[element.querySelectorAll('td').map((cell) => cell.textContent), element.textContent]"
    show = f"((element) => (page.showNumbers(element, argument), {read}))(document.createElement('div'))"
    cells, text = page(show, given)
    values = cells[-12:]
    grows = [sum(longer) != sum(waits + so_far), percentile(longer, 99) != percentile(waits + so_far, 99)]
    assert [cell.startswith("≥ ") for cell in values[:2]] == grows, values
    assert not any("≥" in cell for cell in values[2:])
    assert ("counts with the time so far" in text) == any(grows) == (name != "ended")


def test_a_run_with_idle_time_says_what_counts_it(page):
    summary = json.loads(json.dumps(session._summary(pair("timed 3")[0])))
    read = "element.querySelectorAll('tr').map((row) => row.children.map((cell) => cell.textContent))"
    show = f"((element) => (page.showNumbers(element, argument), {read}))(document.createElement('div'))"
    given = {"summary": summary, "other": None, "end": "done", "pinned": False}
    for idle in (0, 2.5):
        summary["clock"]["idle"] = idle
        head, _ = page(show, given)
        assert ("output tokens/s without idle time" in head) == ("duration with idle time" in head) == (idle > 0)
    summary["at_work"] = 0
    assert page(show, given)[1][3] == "–", "a rate over no time"


# -- settings ----------------------------------------------------------------------------------------------------------

SLIDERS = (
    "max_num_batched_tokens", "max_num_seqs", "num_blocks", "block_size", "long_prefill_token_threshold",
    "max_num_partial_prefills", "max_long_partial_prefills",
)  # fmt: skip
SWITCHES = ("enable_prefix_caching", "async_scheduling")
SETTINGS = """(() => {
  page.moved = 0;
  const [sliders, switches] = ["div", "div"].map((tag) => document.createElement(tag));
  page.settings = new page.Settings(sliders, switches, () => page.moved++);
})()"""
SHOWN = """((isChanged) => [
  page.settings.controls.map((c) => [
    c.name, c.steps, Number(c.range.value), Number(c.range.max), c.shown.textContent,
    c.range.attributes["aria-valuetext"], isChanged(c.range),
  ]),
  page.settings.switches.map(({ name, box }) => [name, box.checked, isChanged(box)]),
])((control) => control.closest("label").classList.contains("changed"))"""


def written(name, value):
    return "off" if value is None or (name == "long_prefill_token_threshold" and not value) else f"{value:,}"


def check_settings(page, base, changes):
    sliders, switches = page(SHOWN)
    assert [name for name, *_ in sliders] == list(SLIDERS) and [name for name, *_ in switches] == list(SWITCHES)
    for name, steps, index, most, words, told, is_changed in sliders:
        value = changes.get(name, base.get(name))
        assert steps[index] == value and most == len(steps) - 1, name
        numbers = [step for step in steps if step is not None]
        assert numbers == sorted(set(numbers)) and steps[len(steps) - len(numbers) :] == numbers
        assert words == told == written(name, value) and is_changed == (name in changes)
    for name, checked, is_changed in switches:
        assert checked == bool(changes.get(name, base.get(name))) and is_changed == (name in changes)


@pytest.mark.parametrize("seed", range(6))
def test_sliders_and_switches_show_the_settings_of_the_run(page, seed):
    """Also for values between the usual ones; the steps of the run have what a person has set."""
    rng = random.Random(seed)
    base = EngineConfig.from_dict(PRESETS["chunked"].workload["config"]).to_dict()
    base |= {"max_num_batched_tokens": rng.choice([100, 256, 700]), "num_blocks": rng.choice([400, 512])}
    page(SETTINGS)
    page("page.settings.begin(argument)", base)
    check_settings(page, base, {})
    changes = {}
    for turn in range(8):
        name = rng.choice([*SLIDERS[:5], "enable_prefix_caching"])
        if name in SLIDERS:
            steps = page("page.settings.controls.find(({ name }) => name === argument).steps", name)
            at = rng.randrange(len(steps))
            value, part, control = (
                steps[at],
                {"value": str(at)},
                "controls.find(({ name }) => name === argument[0]).range",
            )
        else:
            value = not changes.get(name, base.get(name))
            part, control = {"checked": value}, "switches.find(({ name }) => name === argument[0]).box"
        page(f"Object.assign(page.settings.{control}, argument[1]).fire('input')", [name, part])
        changes.pop(name, None)
        if value != base.get(name):
            changes[name] = value
        assert page("page.moved") == turn + 1 and page("page.settings.config") == changes
        check_settings(page, base, changes)
    requests = [{"id": "r0", "prompt": {"len": 9}, "max_tokens": 3}]
    trace = simulate({"requests": requests, "config": base}, config=changes)
    shown = {name: words for name, _, _, _, words, _, _ in page(SHOWN)[0]}
    assert {f"{record.token_budget:,}" for record in trace} == {shown["max_num_batched_tokens"]}
    assert (f"{trace.num_blocks:,}", f"{trace[0].block_size:,}") == (shown["num_blocks"], shown["block_size"])
    assert f"{trace.config['max_num_seqs']:,}" == shown["max_num_seqs"]


def test_settings_of_a_link_are_shown_as_changed(page):
    base = EngineConfig().to_dict() | {"num_blocks": 512}
    changes = {"max_num_seqs": 7, "max_num_partial_prefills": 5, "async_scheduling": True}
    page(SETTINGS)
    page("page.settings.begin(argument[0], argument[1])", [base, changes])
    check_settings(page, base, changes)
    page("page.settings.begin(argument)", base)
    check_settings(page, base, {})


# -- arrivals ----------------------------------------------------------------------------------------------------------

WIDTH, LEFT, BASE = 1200, 42, 102
RIGHT, TOP = WIDTH - LEFT - 8, BASE - 8
ARRIVALS = """(() => {
  page.changes = [];
  page.drawing = document.createElement("canvas");
  page.said = [];
  page.arrivals = new page.Arrivals(page.drawing, (workload) => page.changes.push(workload), (w) => page.said.push(w));
  page.arrivals.show(argument);
})()"""


def random_arrivals(seed):
    rng = random.Random(seed)
    prompts = [{"len": rng.randint(1, 900)} for _ in range(9)]
    prompts[3] = {"parts": [{"len": 20, "seed": "shared"}, {"len": rng.randint(1, 40)}]}
    requests = [
        {"id": f"r{i}", "prompt": prompt, "max_tokens": 3, "arrival_time": round(rng.uniform(0, 6), 3)}
        for i, prompt in enumerate(prompts)
    ]
    if seed % 2:
        del requests[0]["arrival_time"]
    return {"requests": requests, "cost_model": COSTS, "config": {"num_blocks": 2000}}


def values_of(workload):
    """Arrival and length of the prompt of each request, from the run."""
    trace = simulate(workload)
    infos = [trace.requests[request["id"]] for request in workload["requests"]]
    assert sorted(name for record in trace for name in record.arrived) == sorted(info.request_id for info in infos)
    return [(info.arrival_time, info.num_prompt_tokens) for info in infos]


def scale(values):
    """The time at the right edge, and the length at the upper one."""
    return max(1, *(time for time, _ in values)) * 1.08, max(64, *(length for _, length in values)) * 1.3


def height(length, top):
    return 8 + TOP * (1 - math.log(length) / math.log(top))


def place(value, end, top):
    return LEFT + value[0] / end * RIGHT, height(value[1], top)


def check_arrivals(page, values, end, top, selected=None):
    page("page.drawing.getContext('2d').marks = []")
    page("page.arrivals.draw()")
    marks = Marks(page("page.drawing.context.marks"))
    dots = [(colour, path[0]) for colour, path in marks.filled()]
    for index, ((colour, (_, x, y, radius)), value) in enumerate(zip(dots, values, strict=True)):
        assert (x, y) == pytest.approx(place(value, end, top)), index
        assert (colour, radius) == (("--text", 6) if index == selected else ("--dot", 4.5))
    lines = [path for colour, path in marks.stroked() if colour == "--muted" and len(path) == 2]
    for length, line in zip([10**n for n in range(1, 5) if 10**n < top], lines, strict=True):
        assert [x for x, _ in line] == [LEFT, WIDTH - 8]
        assert all(abs(y - height(length, top)) <= 1 for _, y in line)
        assert (LEFT - 6, pytest.approx(height(length, top)), grouped(length)) in marks.texts()
    assert (LEFT, 116, "0 s") in marks.texts()
    last = next(words for x, y, words in marks.texts() if (x, y) == (WIDTH - 8, 116))
    assert last.endswith(" s") and float(last[:-2]) == float(f"{end:.2g}")


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_are_those_of_the_run(page, seed):
    workload = random_arrivals(seed)
    assert page("page.canBeDrawn(argument)", workload)
    page(ARRIVALS, workload)
    values = values_of(workload)
    check_arrivals(page, values, *scale(values))


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_that_are_added_moved_and_removed(page, seed):
    """The workload that the page hands on gives a run whose requests are where the dots are."""
    rng, workload = random.Random(seed), random_arrivals(seed)
    page(ARRIVALS, workload)
    end, top = scale(values_of(workload))
    fire = "page.drawing.fire(argument[0], argument[1])"

    def at(x, y, **more):
        return {"clientX": x, "clientY": y, "pointerId": 1, **more}

    page(fire, ["pointerdown", at(LEFT + 0.37 * RIGHT, 8 + 0.11 * TOP)])
    added = page("page.changes.at(-1)")
    assert [request["id"] for request in added["requests"]] == [*(r["id"] for r in workload["requests"]), "new9"]
    values = values_of(added)
    assert values[-1] == (round(0.37 * end, 3), round(math.exp(0.89 * math.log(top))))
    check_arrivals(page, values, end, top, selected=9)
    page(fire, ["pointermove", at(LEFT + 0.8 * RIGHT, 8 + 0.5 * TOP, buttons=1)])
    page(fire, ["pointerup", {}])
    page(fire, ["pointermove", at(LEFT + 0.2 * RIGHT, 8 + 0.2 * TOP, buttons=1)])
    values = values_of(page("page.changes.at(-1)"))
    assert values[-1] == (round(0.8 * end, 3), round(math.exp(0.5 * math.log(top))))
    check_arrivals(page, values, end, top, selected=9)
    x, y = place(values[rng.randrange(9)], end, top)
    nearest = min(range(10), key=lambda i: math.dist(place(values[i], end, top), (x + 2, y + 2)))
    page(fire, ["pointerdown", at(x + 2, y + 2)])
    page(fire, ["pointerup", {}])
    assert page("page.arrivals.selected") == nearest and page("page.changes.length") == 2
    time, length = values[nearest]
    longer = math.floor(length * 1.25 + 0.5)
    for key, value in (
        ("ArrowRight", (time + 0.05, length)), ("ArrowLeft", (time, length)), ("ArrowUp", (time, longer)),
        ("ArrowDown", (time, max(1, math.floor(longer * 0.8 + 0.5)))),
    ):  # fmt: skip
        page(fire, ["keydown", {"key": key}])
        values[nearest] = value
        assert values_of(page("page.changes.at(-1)")) == [pytest.approx(each) for each in values]
        check_arrivals(page, values, end, top, selected=nearest)
    assert page("page.said.at(-1)") == f"r{nearest}, {told(values, nearest)}" if nearest < 9 else True
    by_time = sorted(range(10), key=lambda i: (values[i][0], i))
    now = by_time.index(nearest)
    for key, by in (("PageDown", 1), ("PageUp", -1), ("PageUp", -1)):
        page(fire, ["keydown", {"key": key}])
        now = min(9, max(0, now + by))
        check_arrivals(page, values, end, top, selected=by_time[now])
        assert page("page.said.at(-1)").endswith(told(values, by_time[now]))
    while by_time[now] != nearest:
        page(fire, ["keydown", {"key": "PageDown"}])
        now += 1
    page(fire, ["keydown", {"key": "Enter"}])
    values.append((round(values[nearest][0] + 0.05, 3), values[nearest][1]))
    assert values_of(page("page.changes.at(-1)")) == [pytest.approx(each) for each in values]
    check_arrivals(page, values, end, top, selected=10)
    page(fire, ["keydown", {"key": "Backspace"}])
    del values[10]
    page("(page.arrivals.selected = argument, page.arrivals.draw())", nearest)
    page(fire, ["keydown", {"key": "Delete"}])
    del values[nearest]
    assert values_of(page("page.changes.at(-1)")) == [pytest.approx(each) for each in values]
    check_arrivals(page, values, end, top)


def told(values, chosen):
    """The words about a request after its name."""
    place = sorted(range(len(values)), key=lambda i: (values[i][0], i)).index(chosen) + 1
    time, length = values[chosen]
    return f"{place} of {len(values)}: {length} prompt tokens at {round(time, 3):g} s"


def test_workloads_without_a_place_for_each_request_are_not_drawn(page):
    fine = random_arrivals(0)
    first = fine["requests"][0]
    assert page("page.canBeDrawn(argument)", {**fine, "requests": [{**first, "prompt": [5, 6, 7]}]})
    for request in ({**first, "arrival_step": 2}, {**first, "prompt": "words"}, {**first, "prompt": {"parts": ["?"]}}):
        assert not page("page.canBeDrawn(argument)", {**fine, "requests": [request]})
    for workload in ({**fine, "cost_model": None}, {**fine, "requests": []}, {**fine, "requests": [first] * 401}, {}):
        assert not page("page.canBeDrawn(argument)", workload)
