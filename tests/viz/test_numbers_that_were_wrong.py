"""Numbers on the screen that once said something else than the record."""

import re
from itertools import pairwise

import pytest
from painted import Marks
from runs_to_draw import COSTS

from workbench import simulate, simulate_fleet
from workbench.analysis.causes import tabulate
from workbench.analysis.explain import slowest
from workbench.analysis.hit_rates import hit_rates
from workbench.trace.readings.fleet import Fleet


def asked_twice(pause):
    """Two questions with a pause between them, and the seconds of its steps."""
    requests = [
        {"id": "first", "prompt": {"len": 30}, "max_tokens": 8},
        {"id": "second", "prompt": {"len": 30}, "max_tokens": 8, "arrival_time": pause},
    ]
    trace = simulate({"requests": requests, "cost_model": COSTS})
    return trace, sum(record.end - record.time for record in trace)


@pytest.mark.parametrize("pause", [0.01, 100.0, 4000.0])
def test_the_card_at_the_end_leaves_the_pauses_out(deno_page, pause):
    trace, worked = asked_twice(pause)
    deno_page.open(trace, status={"live": True, "state": "idle"})
    words = deno_page("view.endCard.words()")
    seconds, unit, speed = re.search(
        r"steps and ([\d.]+) (s|ms)(?: without .* idle)?; .*; ([\d.]+) output tokens per second", words
    ).groups()
    assert float(seconds) * (1 if unit == "s" else 1e-3) == pytest.approx(worked, rel=0.01)
    assert float(speed) == pytest.approx(16 / worked, rel=0.01)


def test_the_phases_belong_to_the_run_on_display(deno_page):
    """The playground shows one run after another, and a step of the same number has other phases."""
    from msgspec.structs import replace

    from workbench.trace import Trace

    def timed(seconds):
        trace = simulate({"requests": [{"id": "a", "prompt": {"len": 30}, "max_tokens": 3}], "cost_model": COSTS})
        other = Trace(trace.meta)
        other.add_request(next(iter(trace.requests.values())))
        for record in trace:
            other.append(replace(record, time=record.step * 1.0, timings={"forward": seconds}, end=0.0))
        return other

    from base64 import b64encode

    from workbench.viz.layout.columns import columns_of
    from workbench.viz.layout.packet import encode_packet, trace_facts

    for run, seconds in enumerate((0.0534, 0.0175)):
        facts = trace_facts(trace := timed(seconds)) | {"run": run}
        packet = b64encode(encode_packet(columns_of(trace), extra={"facts": facts})).decode()
        if not run:
            deno_page("page.open(argument)", {"packet": packet})
        else:
            deno_page("page.values.packet = page.bytes(argument), page.listeners['change:packet'](), 0", packet)
        deno_page("page.frame()")
        strip = deno_page("view.controls.phases.element.textContent")
        assert strip == f"forward {seconds * 1e3:g} ms"


@pytest.mark.parametrize("scale", [1e-4, 0.01, 1.0, 60.0])
def test_the_labels_of_an_axis_of_time_differ(deno_page, scale):
    """Of a run that takes milliseconds, of one of an hour, and of a small part of it."""
    requests = [
        {"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 30, "arrival_time": i * 9 * scale} for i in range(4)
    ]
    trace = simulate({"requests": requests, "cost_model": {"fixed": scale}})
    deno_page.open(trace)
    for part in (None, [len(trace) - 8, 6], [2, 12]):
        if part:
            deno_page("view.cursor.moveTo(argument[0], argument[1])", part)
        for panel, y in (("incident", 49), ("timeline", 144)):
            labels = [words for x, _, words in Marks(deno_page.painted(panel)["marks"]).texts(y=y) if x >= 84]
            assert len(labels) > 2 and len(set(labels)) == len(labels), labels
        rows = [row[0] for row in deno_page.table("incident")["rows"]]
        assert len(set(rows)) == len(rows)


def test_a_row_with_one_latency_has_one_label(deno_page):
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 1}], "cost_model": COSTS})
    deno_page.open(trace)
    marks = Marks(deno_page.painted("incident")["marks"])
    labels = [words for x, y, words in marks.texts(x=76) if 58 + 44 < y < 58 + 88]
    assert len(labels) == 1


def test_the_table_of_causes_counts_only_what_can_be_avoided():
    """A page names the biggest part, also one's own computation; this column does not, and says so."""
    trace, _ = asked_twice(4.0)
    said = repr(tabulate(slowest(trace, None, "ttft"), "ttft"))
    assert "biggest avoidable" in said.splitlines()[1]
    own = next(line for line in said.splitlines() if line.endswith("own computation"))
    assert own.split()[-3] == "–" and own.split()[0] == "100%"


def test_the_page_of_a_fleet_has_the_hits_of_its_text(tmp_path):
    from workbench.viz.fleet_page import fleet_html

    requests = [
        {"id": f"r{n}", "prompt": {"parts": [{"len": 64, "seed": "A"}, {"len": 9, "seed": f"u{n}"}]}, "arrival_time": n}
        for n in range(6)
    ]
    for caches in (True, False):
        folder = tmp_path / str(caches)
        config = {"max_num_seqs": 2, "enable_prefix_caching": caches}
        workload = {"requests": requests, "cost_model": {"fixed": 0.01}, "config": config}
        run = simulate_fleet(workload, replicas=2)
        run.save(folder)
        with Fleet(folder) as fleet:
            page = fleet_html(fleet)
            assert (str(hit_rates(run.traces)) in page) == caches and ("hit rate of prompt tokens: " in page) == caches
            next(iter(fleet.traces.values())).has_ended = False
            assert "hit rate of prompt tokens: " not in fleet_html(
                fleet
            )  # they would be counted again with every step of one run


@pytest.mark.parametrize("seed", range(4))
def test_the_hit_rate_is_one_number(deno_page, seed):
    """Of prompts that share beginnings, in a pool so small that requests come back and find their own blocks."""
    import random

    from workbench.trace.readings.metrics_collector import metrics
    from workbench.viz import duel

    rng = random.Random(seed)
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"parts": [{"len": 32, "seed": f"s{n % 3}"}, {"len": rng.randint(4, 40), "seed": f"u{n}"}]},
            "max_tokens": rng.randint(10, 40),
            "arrival_time": n / 90,
        }
        for n in range(14)
    ]
    config = {"num_blocks": 28, "block_size": 8, "max_num_seqs": 6, "enable_prefix_caching": True}
    trace = simulate({"requests": requests, "cost_model": COSTS, "config": config})
    hits, asked, again = 0, 0, 0
    for record in trace:
        for chunk in record.chunks:
            if chunk.request_id in record.admitted:
                hits += chunk.num_cached_tokens
                asked += trace.requests[chunk.request_id].num_prompt_tokens
            else:
                again += chunk.num_cached_tokens
    assert hits and again, "requests must find blocks in both ways"
    summary = metrics(trace).summary
    assert summary.hit_rate == pytest.approx(hits / asked) == pytest.approx(hit_rates([trace]).total.rate)
    assert summary.num_cached_tokens == hits + again and "(after preemptions too)" in repr(metrics(trace))
    _, told = duel.outcome([trace], [trace], "hit rate of prompt tokens")
    assert f"A {hits / asked:.1%}" in told
    deno_page.open(trace, status={"live": False, "incident": {"slow": [], "apart": [], "stalls": []}})
    deno_page.painted("incident")
    said = re.search(r"hit rate (\S+)% of prompt tokens", deno_page("view.panel('incident').words()"))[1]
    assert float(said) == float(f"{100 * hits / asked:.2g}")
    assert "hit rate" in deno_page.table("incident")["headings"]


def test_a_run_that_is_over_still_says_what_it_held(tmp_path):
    from workbench.viz.fleet_page import fleet_html

    requests = [{"id": f"r{n}", "prompt": {"len": 50}, "max_tokens": 9, "arrival_time": n / 90} for n in range(19)]
    run = simulate_fleet(
        {"requests": requests, "cost_model": {"fixed": 0.01}, "config": {"max_num_seqs": 2}}, replicas=3
    )
    run.save(tmp_path)
    with Fleet(tmp_path) as fleet:
        page, together = fleet_html(fleet), {}
        for name, trace in fleet.traces.items():
            running, waiting = (max(len(getattr(record, what)) for record in trace) for what in ("running", "waiting"))
            cells = re.search(rf">{name}</a></td><td>(.*?)</td><td>(.*?)</td>", page).groups()
            assert cells == (f"0 ({running})", f"0 ({waiting})") and waiting > 0
        moments = sorted(trace.meta.created + record.time for trace in fleet.traces.values() for record in trace)
        for moment in moments:
            for what in ("running", "waiting"):
                total = 0
                for trace in fleet.traces.values():
                    now = [r for r in trace if trace.meta.created + r.time <= moment]
                    over = trace.meta.created + trace[-1].end <= moment
                    total += len(getattr(now[-1], what)) if now and not over else 0
                together[what] = max(together.get(what, 0), total)
        cells = re.search(r">together</td><td>(.*?)</td><td>(.*?)</td>", page).groups()
        assert cells == (f"0 ({together['running']})", f"0 ({together['waiting']})")


@pytest.mark.parametrize("pause", [0.01, 100.0, 4000.0])
def test_panels_name_a_moment_alike_and_say_what_becomes_of_idle_time(deno_page, pause):
    """The timeline leaves out the pause between two questions; the second is still drawn at its time of the run."""
    from test_marks_of_steps import seconds_of

    trace, _ = asked_twice(pause)
    deno_page.open(trace)
    texts = {
        panel: [(x, words) for x, _, words in Marks(deno_page.painted(panel)["marks"]).texts(y=y) if x >= 84]
        for panel, y in (("incident", 49), ("timeline", 144))
    }
    said = [words for panel in texts.values() for _, words in panel if "idle" in words]
    hint = deno_page("view.panel('incident').hintElement.textContent")
    if pause < 1:
        assert not said and "idle" not in hint
        return
    idle = max(after.time - before.end for before, after in pairwise(trace))
    (told,) = re.findall("; time, with (.*) idle$", hint)
    assert seconds_of(told) == pytest.approx(idle, rel=0.006)
    assert said[0] == "with idle time" and said[1].endswith("idle left out") and len(said) == 2
    moments = [seconds_of(words) for _, words in texts["timeline"] if "idle" not in words]
    second = next(record.time for record in trace if "second" in record.arrived)
    assert moments == sorted(moments) and any(moment == pytest.approx(second, rel=1e-3) for moment in moments)
    assert not any(2.0 < moment < second * 0.999 for moment in moments)


@pytest.mark.parametrize("comparing", [False, True])
def test_a_page_is_saved_as_it_is(deno_page, comparing):
    """With the view, step and request of the person, and the comparison only if it is open."""
    trace, _ = asked_twice(0.01)
    deno_page.open(trace, trace, status={"live": True, "state": "idle", "can": ["save_html"]})
    deno_page("view.show('scheduler')")
    deno_page("(view.cursor.seek(3), view.cursor.select(1))")
    deno_page("view.showComparison(argument)", comparing)
    deno_page("view.controls.save.click()")  # the card of the end is closed in a comparison
    command = deno_page("page.sent.at(-1)")
    assert command["name"] == "save_html"
    place = {"view": "scheduler", "step": 3, "request": "second", "card": False}
    assert command["args"] == {"place": place, "comparison": comparing}
