"""Causes of latencies as metrics: a scrape by hand against the explanations, growing runs, and bounded labels."""

import json
import re
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from workbench import Trace, simulate
from workbench.analysis.cause_totals import REASONS, CauseTotals, totals_of
from workbench.analysis.causes import KINDS
from workbench.analysis.explain import Explainer
from workbench.apps import cause_metrics
from workbench.apps.cause_metrics import CauseCollector, serve_causes
from workbench.apps.cli import main

ROOT = Path(__file__).parents[2]
SERVED = ROOT / "notebooks/data/vllm_served.jsonl.gz"
COSTS = {"fixed": 0.01, "per_prefill_token": 0.001, "per_sequence": 0.0}


def run(num_requests=12, **config):
    requests = [
        {"id": f"user-{n}", "prompt": {"len": 40 + 7 * n}, "max_tokens": 4 + n, "arrival_time": n / 50}
        for n in range(num_requests)
    ]
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "num_blocks": 40, "block_size": 4, **config}
    return simulate({"config": limits, "requests": requests, "cost_model": COSTS})


def scraped(port, accept="text/plain"):
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    return text, {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("name", ["simulated", "recorded"])
def test_a_scrape_by_hand_has_the_seconds_of_the_explanations(name):
    trace = run() if name == "simulated" else Trace.load(SERVED)
    with serve_causes(lambda: {"rank 0": trace}, 0) as port:
        text, samples = scraped(port)
        _, as_openmetrics = scraped(port, "application/openmetrics-text;version=1.0.0")
        assert set(samples) <= set(as_openmetrics)
    explainer = Explainer(trace)
    explanations = [explainer.explain(request_id) for request_id in trace.requests]
    for by in ("ttft", "e2e"):
        expected = dict.fromkeys(KINDS, 0.0)
        for each in explanations:
            for part in each.span(by).parts:
                expected[part.kind] += part.amount
        found = {cause: samples[f"workbench_{by}_cause_seconds_total", cause, "rank 0"] for cause in KINDS}
        assert found == pytest.approx(expected) and sum(found.values()) > 0
        assert sum(found.values()) == pytest.approx(sum(each.span(by).total for each in explanations))
        assert samples[f"workbench_{by}_requests_total", "rank 0"] == len(explanations)
    assert samples["workbench_steps_total", "rank 0"] == len(trace)
    assert samples["workbench_preemptions_total", "rank 0"] == sum(len(step.preempted) for step in trace)
    assert samples["workbench_running_requests", "rank 0"] == samples["workbench_kv_blocks_used_ratio", "rank 0"] == 0
    assert not any(request_id in text for request_id in trace.requests)
    if name == "recorded":
        newest = samples["workbench_newest_step_time_seconds", "rank 0"]
        assert newest == pytest.approx(trace.meta.created + trace[-1].end)


def test_counters_of_a_growing_run_only_grow_and_end_like_those_of_the_whole():
    whole = run(num_blocks=50, max_num_seqs=8)
    growing, at_once = CauseTotals(0.0), CauseTotals(0.0)
    at_once.update(whole)
    before = []
    for steps in (1, 2, 5, 6, 11, 20, 21, len(whole)):
        growing.update(whole[:steps])
        now = [*growing.waited.values(), *(each for seconds in growing.seconds.values() for each in seconds.values())]
        assert all(value >= old for value, old in zip(now, before))
        before = now
        waiting = {kind: number for kind, number in growing.waiting.items() if number}
        assert sum(waiting.values()) == len(whole[steps - 1].waiting)
    assert growing.waited == pytest.approx(at_once.waited) and sum(growing.waited.values()) > 0
    for by in ("ttft", "e2e"):
        assert growing.num_requests[by] == at_once.num_requests[by] == len(whole.requests)
        assert sum(growing.seconds[by].values()) == pytest.approx(sum(at_once.seconds[by].values()))
    assert growing.num_steps == len(whole) and growing.num_preemptions == at_once.num_preemptions > 0


def test_waiting_is_seconds_of_requests_by_reason():
    trace = run(max_num_seqs=1)
    totals = CauseTotals(0.0)
    totals.update(trace)
    expected = sum(len(step.waiting) * step.duration for step in trace)
    assert sum(totals.waited.values()) == pytest.approx(expected)
    assert set(totals.waited) == set(REASONS) and totals.waited["seats"] > 0.5 * expected


def test_a_rank_that_runs_again_begins_anew_and_one_that_is_gone_is_left_out():
    first, second = run(), run(4)
    known = totals_of({"a": first, "b": first}, {})
    assert totals_of({"a": first}, known)["a"] is known["a"] and set(totals_of({"a": first}, known)) == {"a"}
    again = totals_of({"a": second}, known)["a"]
    assert again is not known["a"] and again.num_requests["ttft"] == 4 and again.num_steps == len(second)


def test_a_run_without_a_clock_has_no_seconds():
    requests = [{"id": f"r{n}", "prompt": {"len": 9}, "max_tokens": 2} for n in range(3)]
    totals = CauseTotals(0.0)
    totals.update(simulate({"config": {"max_num_seqs": 1}, "requests": requests}))
    assert totals.num_steps > 0 and sum(totals.seconds["ttft"].values()) == 0 == totals.num_requests["ttft"]


def test_metrics_are_kept_fresh_and_end_with_the_context(monkeypatch):
    monkeypatch.setattr(cause_metrics, "UPDATE_SECONDS", 0.01)
    whole = run()
    traces = {"": whole[:3]}
    with serve_causes(lambda: traces, 0) as port:
        assert scraped(port)[1]["workbench_steps_total", ""] == 3
        traces[""] = whole
        for _ in range(1000):
            if scraped(port)[1]["workbench_steps_total", ""] == len(whole):
                break
        else:
            pytest.fail("the new steps were never counted")
        with pytest.raises(OSError, match=rf"port {port} of 127.0.0.1 cannot be used: .*--metrics-port"):
            serve_causes(lambda: traces, port).__enter__()
    with pytest.raises(OSError):
        scraped(port)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--metrics-port", "0"], "--metrics-port must be from 1 to 65535, got 0"),
        (["--metrics-port", "5006"], "--metrics-port must be another one than --port, got 5006 for both"),
        (["--metrics-port", "70000"], "--metrics-port must be from 1 to 65535, got 70000"),
    ],
)
def test_a_port_that_cannot_be(options, said, capsys):
    assert main(["trace", "watch", str(SERVED), *options]) == 2
    assert said in capsys.readouterr().err
    assert main(["trace", "watch", "http://127.0.0.1:9", "--metrics-port", "9464"]) == 2
    assert "--metrics-port serves what a recording says" in capsys.readouterr().err


def test_the_dashboard_for_grafana_asks_for_metrics_and_labels_that_exist():
    recorded = Trace.load(SERVED)
    collector = CauseCollector(lambda: {"": recorded})
    collector.update()
    labels = {sample.name: set(sample.labels) for family in collector.collect() for sample in family.samples}
    dashboard = json.loads((ROOT / "examples/grafana.json").read_text())
    assert len(dashboard["panels"]) >= 8
    asked = set()
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["targets"] and panel["datasource"]["uid"] == "${source}"
        for target in panel["targets"]:
            names = re.findall(r"workbench_\w+", target["expr"])
            assert names and set(names) <= set(labels), target["expr"]
            groups = set(re.findall(r"by \((\w+)\)", target["expr"]))
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert groups <= labels[names[0]] and (shown <= groups if groups else shown <= labels[names[0]])
            assert target["expr"].count("(") == target["expr"].count(")")
            asked |= set(names)
    assert asked == set(labels)
    collector = CauseCollector(dict)
    collector.update()
    assert list(collector.collect())  # before the first recording
