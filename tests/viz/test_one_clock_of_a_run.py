"""A run with pauses, and with requests that wait for its first step: every view states the same durations and rates."""

import json
import random
import re
from itertools import pairwise

import pytest
from msgspec.structs import replace
from painted import Marks
from runs_to_draw import run

from workbench import simulate
from workbench.analysis.fleet.demand import Demand
from workbench.analysis.fleet.sizing import size
from workbench.analysis.predict import Predictor
from workbench.analysis.sweep import rows_text, sweep
from workbench.analysis.values import values_of
from workbench.apps.cli import main
from workbench.apps.playground import session
from workbench.simulation.at_scale import simulate_at_scale
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.workload import read_simulation
from workbench.trace import Trace
from workbench.trace.readings.compare import compare
from workbench.trace.readings.metrics_collector import metrics
from workbench.viz import duel
from workbench.viz.layout.pareto import tuning_marks
from workbench.viz.pareto import pareto_svg

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
AMOUNT = r"([\d.,]+) (s|ms|µs)"


def paused(seed, scale=1.0):
    """A run whose user is away now and then, with and without work; and its steps by hand.

    Returns:
        The trace, the seconds at work, those of idle time, those before the first step, and the number of requests
        that wait for it.
    """
    rng = random.Random(seed)
    waiting = rng.randint(2, 5)
    requests = [
        {"id": f"r{n}", "prompt": {"len": rng.randint(5, 60)}, "max_tokens": rng.randint(2, 12)} for n in range(9)
    ]
    config = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    run = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.05 * scale))
    before = scale * rng.uniform(0.3, 3.0)
    breaks = dict.fromkeys(rng.sample(range(4, len(run)), 3), 0.0)
    breaks = {step: scale * rng.uniform(4.0, 20.0) for step in breaks}
    trace = Trace(run.meta)
    order = rng.sample(range(waiting), waiting)  # the engine sees requests of several clients in another order
    for n, info in enumerate(run.requests.values()):
        arrival = before * order[n] / 9 if n < waiting else before + 0.01 * scale
        trace.add_request(replace(info, arrival_time=arrival))
    late = before
    for record in run:
        late += breaks.get(record.step, 0.0)
        trace.append(replace(record, time=record.time + late, end=record.end + late))
    idle = sum(seconds for seconds in breaks.values() if seconds > 0.5)
    work = run[-1].end + sum(seconds for seconds in breaks.values() if seconds <= 0.5)
    return trace, work, idle, before, waiting


def number(words, pattern):
    """The seconds that a text states at a place."""
    found = re.search(pattern.replace("AMOUNT", AMOUNT), words)
    assert found, (pattern, words)
    return float(found[1].replace(",", "")) * UNITS[found[2]]


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("seed", range(4))
def test_every_view_has_the_same_clock(deno_page, seed, scale):
    """The card at the end, Compare, a duel, the numbers of the playground and of the command line, and both axes."""
    trace, work, idle, before, waiting = paused(seed, scale)
    clock, output = metrics(trace).summary.clock, metrics(trace).summary.num_output_tokens
    assert (clock.at_work, clock.idle, clock.before) == pytest.approx((work, idle, before))
    rate, near = output / work, {"rel": 0.006, "abs": 0.0006}

    deno_page.open(trace, status={"live": True, "state": "idle"}, width=1200)
    known = deno_page("view.store.clock")
    assert [known[name] for name in ("atWork", "idle", "before")] == pytest.approx([work, idle, before])
    card = deno_page("view.endCard.words()")
    assert number(card, r"steps and AMOUNT") == pytest.approx(work, **near)
    assert float(re.search(r"([\d.,]+) output tokens per second", card)[1].replace(",", "")) == pytest.approx(
        rate, rel=0.006
    )
    assert ("idle" in card) == bool(idle)
    (measure,) = [each for each in compare(trace, trace).measures if each.name.startswith("output tokens per s")]
    assert (measure.a, measure.b) == pytest.approx((rate, rate))
    assert measure.name.endswith("without idle time") == bool(idle)

    winner, told = duel.outcome([trace], [trace], "throughput of output tokens")
    assert winner == "neither" and float(re.search(r"A ([\d.]+)/s", told)[1]) == pytest.approx(rate, rel=1e-3)
    assert ("without idle time" in told) == bool(idle)
    _, told = duel.outcome([trace], [trace], "time until all are finished")
    assert number(told, r"A AMOUNT") == pytest.approx(work, **near)

    said = repr(metrics(trace))
    assert number(said, r"steps, AMOUNT") == pytest.approx(work + idle, **near)
    assert number(said, r"; AMOUNT from the first arrival on") == pytest.approx(work + idle + before, **near)
    if idle:
        assert number(said, r"with AMOUNT idle") == pytest.approx(idle, **near)
    told = re.search(r"throughput: ([\d.,]+) output .* tokens per second(.*)", said)
    assert float(told[1].replace(",", "")) == pytest.approx(rate, rel=1e-3)
    assert (told[2] == " without idle time") == bool(idle)

    words = deno_page("view.panel('incident').words()")
    assert number(words, r"in AMOUNT from the first arrival on") == pytest.approx(work + idle + before, rel=0.02)
    assert number(words, r", AMOUNT from step 0 on") == pytest.approx(work + idle, rel=0.02)
    assert f"up to {waiting} waiting" in words or waiting < max(len(record.waiting) for record in trace)
    hint = "view.panel('{}').hintElement.textContent"
    for panel in ("incident", "timeline"):
        marks = Marks(deno_page.painted(panel)["marks"])
        said = deno_page(hint.format(panel))
        assert (" idle" in said) == bool(idle)
        if idle:
            assert number(said, r"time, with(?:out)? AMOUNT idle") == pytest.approx(idle, **near)
            legend = [w for _, _, w in marks.texts() if w.endswith("idle left out")]
            assert all(number(each, "AMOUNT") == pytest.approx(idle, **near) for each in legend)
            assert len(legend) == (panel == "timeline")

    summary = json.loads(json.dumps(session._summary(trace)))
    assert summary["num_output_tokens"] / summary["at_work"] == pytest.approx(rate)


@pytest.mark.parametrize("pause", [0.2, 7.0])
def test_every_rate_of_an_answer_leaves_idle_time_out(pause, tmp_path, capsys):
    """What a person reads off *Which setting?*, `tune`, `whatif`, a sweep, a summary at scale and a fleet of one."""
    rng = random.Random(pause)
    requests = [
        {"id": f"r{n}", "prompt": {"len": rng.randint(5, 60)}, "max_tokens": rng.randint(2, 12)}
        | {"arrival_time": 1.0 + 0.2 * n + pause * (n // 8)}
        for n in range(24)
    ]
    cost = {"fixed": 0.05, "per_prefill_token": 1e-3}
    workload = {"config": {"max_num_seqs": 2, "enable_prefix_caching": False}, "requests": requests, "cost_model": cost}
    trace, model = simulate(workload), CostModel.from_dict(cost)
    idle = sum(gap for a, b in pairwise(trace) if (gap := b.time - a.end) > 0.5)
    assert (idle > 10) == (pause == 7.0)
    output = sum(request["max_tokens"] for request in requests)
    rate = pytest.approx(output / (trace[-1].end - trace[0].time - idle))

    (measure,) = [each for each in compare(trace, trace).measures if each.name.startswith("output tokens per s")]
    predictor = Predictor(trace, model, num_draws=2)
    found = [measure.a, values_of(trace)["output_throughput"], predictor.recorded["output_throughput"]]
    found.append(predictor.unchanged["output_throughput"].value)
    tuning = trace.tune("ttft_p99=1s", grid={"max_num_seqs": [2, 3]}, cost_model=model, num_draws=2)
    row = next(row for row in tuning.rows if row["max_num_seqs"] == 2)
    found += [row["output_throughput"], tuning.current.values["output_throughput"]]
    (panel,) = tuning_marks(tuning).panels
    found += [
        point.x for point in panel.points if point.ring == ("now" if tuning.best.changes else tuning.words_of_best)
    ]
    summary = simulate_at_scale(*read_simulation(workload))
    found.append(summary.output_throughput)
    (swept,) = sweep(workload, {"max_num_seqs": [2]}, jobs=1)
    found.append(swept["output_throughput"])
    (fleet,) = size(Demand.read(workload), "ttft_p99=60min", jobs=1, price=2.0).rows[:1]
    found.append(fleet.values["output_throughput"])
    assert found == [rate] * 10
    # Money is paid for idle time as well.
    assert fleet.cost(2.0) == pytest.approx(2.0 / 3600 * (trace[-1].end - trace[0].time) / output * 1e6)

    trace.save(tmp_path / "run.jsonl")
    assert main(["trace", "whatif", str(tmp_path / "run.jsonl"), "--force"]) == 0
    words = {
        "picture": panel.titles[0],
        "table": pareto_svg(tuning.rows, ["max_num_seqs"]),
        "answer": repr(tuning),
        "what if": capsys.readouterr().out,
        "at scale": repr(summary),
        "sweep": rows_text([swept], ["max_num_seqs"]),
        "fleet": repr(size(Demand.read(workload), "ttft_p99=1s", jobs=1)),
        "run": repr(Demand.read(workload).run(1, "round_robin")),
    }
    assert {name for name, said in words.items() if " idle" in said} == (set(words) if idle else set())


@pytest.mark.parametrize("seed", range(3))
def test_a_part_of_a_run_has_the_idle_time_of_that_part_in_both_titles(deno_page, seed):
    trace, *_ = paused(seed)
    deno_page.open(trace, status={"live": False, "incident": {"slow": [], "apart": [], "stalls": []}}, width=1200)
    rng = random.Random(seed)
    for _ in range(4):
        first = rng.randrange(len(trace) - 8)
        deno_page("view.cursor.moveTo(argument[0], argument[1])", [first, 8])
        part = trace.steps[first : first + 8]
        gaps = [after.time - record.end for record, after in pairwise(part)]
        idle = sum(gap for gap in gaps if gap > 0.5)
        for panel in ("incident", "timeline"):
            deno_page.painted(panel)
            said = deno_page(f"view.panel('{panel}').hintElement.textContent")
            assert (" idle" in said) == bool(idle), (said, idle)
            if idle:
                assert number(said, r"with(?:out)? AMOUNT idle") == pytest.approx(idle, rel=0.006)


@pytest.mark.parametrize("count", [1, 3])
def test_requests_that_wait_for_step_0_are_waiting_requests(deno_page, count):
    """Each of them is admitted in step 0, so that no record of a step has a request that waits."""
    requests = [{"id": f"r{n}", "prompt": {"len": 5}, "max_tokens": 3} for n in range(count)]
    run = simulate({"requests": requests}, cost_model=CostModel(fixed=0.5))
    assert not any(record.waiting for record in run)
    trace = Trace(run.meta)
    for n, info in enumerate(run.requests.values()):
        trace.add_request(replace(info, arrival_time=0.1 * ((n + 1) % count)))
    for record in run:
        trace.append(replace(record, time=record.time + 1.0, end=record.end + 1.0))
    deno_page.open(trace, status={"live": False, "incident": {"slow": [], "apart": [], "stalls": []}}, width=1200)
    deno_page.painted("incident")
    table = deno_page.table("incident")
    column = table["headings"].index("waiting requests")
    waits = [int(row[column].replace("–", "0")) for row in table["rows"]]
    wide = trace[-1].end / len(waits)
    for i, waiting in enumerate(waits):
        known = sum(info.arrival_time < min(1.0, (i + 1) * wide - 1e-9) for info in trace.requests.values())
        assert waiting == (known if i * wide <= 1.0 else 0), (i, waits)
    assert f"up to {count} waiting" in deno_page("view.panel('incident').words()")
    said = f"{count} requests wait for step 0" if count > 1 else "1 request waits for step 0"
    assert said in deno_page("view.panel('incident').noStepYet()")


def test_a_prediction_is_judged_without_the_pauses_that_it_has_not():
    """The pauses of a person are not in a simulation: the error of its duration is that of the steps."""
    from workbench.analysis.fork import fork
    from workbench.viz.changed_run import changed_run

    requests = [
        {"id": f"r{n}", "prompt": {"len": 30 + 17 * n % 90}, "max_tokens": 8 + n % 5, "arrival_time": 0.3 * n}
        for n in range(30)
    ]
    costs = CostModel(fixed=0.02, per_prefill_token=0.0005, per_sequence=0.002)
    run = simulate({"config": {"max_num_seqs": 4}, "requests": requests}, cost_model=costs)
    trace, busy = Trace(run.meta), len(run) // 2
    cut = run[busy].time
    for info in run.requests.values():
        trace.add_request(replace(info, arrival_time=info.arrival_time + (9.0 if info.arrival_time > cut else 0.0)))
    for record in run:
        late = 9.0 if record.step >= busy else 0.0
        trace.append(replace(record, time=record.time + late, end=record.end + late))
    trace.meta = replace(trace.meta, source="engine")
    facts = changed_run(trace, lambda **changes: fork(trace, **changes), 0, {"max_num_seqs": 3}).facts
    errors = {name: int(error) for error, name in re.findall(r"([+-]\d+)% for ([\w ]+)", facts["predicted"])}
    assert abs(errors.get("time at work", 0)) < 10, facts


def test_a_narrow_timeline_has_its_notes_in_short_and_whole_in_their_title(deno_page):
    trace = run("idle 1")[0]
    hint = "view.panel('timeline').hintElement"
    said = {}
    for width in (1200, 600):
        deno_page.open(trace, width=width)
        deno_page.painted("timeline")
        said[width] = deno_page(f"{hint}.textContent"), deno_page(f"{hint}.attributes.title")
    (wide, title), (narrow, same) = said.values()
    assert title == same and wide.endswith(f"; {title}") and len(narrow) < len(wide)
    assert re.fullmatch(r"tokens per step against the token budget; without [\d.]+ s idle(; step 0 at .*)?", narrow)


def test_after_a_drag_no_mark_of_the_old_place_stays(deno_page):
    deno_page.open(run("timed 3")[0])
    deno_page.painted("incident")
    deno_page("view.show('incident')")
    deno_page("page.frame()")
    deno_page("view.cursor.setHover({ step: 20 })")
    deno_page("Object.assign(view.panel('incident'), { drag: { from: 300, to: 700 }, onWhole: true }).dropped()")
    first, last = deno_page("view.cursor.range")
    assert last - first < len(run("timed 3")[0]) and deno_page("view.cursor.hover") == {}
