"""The explanation of a request as the drawer shows it."""

import random
import re
import time

import pytest
from msgspec.structs import replace

from workbench import simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.trace.readings.metrics import amount
from workbench.viz.feed import Feed
from workbench.viz.layout.explanation import explanation_facts

COST = CostModel(fixed=0.004, per_sequence=5e-5, per_prefill_token=1e-4)


@pytest.fixture(scope="module")
def trace():
    """A long prompt is ahead of a short one, and three more are behind it."""
    requests = [{"id": "long", "prompt": {"len": 3000}, "max_tokens": 2, "arrival_time": 0.1}]
    requests += [
        {"id": f"r{i}", "prompt": {"len": 20 + i}, "max_tokens": 40, "arrival_time": 0.101 + i / 1000} for i in range(4)
    ]
    config = {"max_num_batched_tokens": 128, "enable_prefix_caching": False}
    return simulate({"config": config, "requests": requests}, cost_model=COST)


@pytest.mark.parametrize("request_id", ["long", "r0", "r3"])
def test_the_parts_of_every_bar_fill_it(trace, request_id):
    explanation = trace.explain(request_id, COST)
    facts = explanation_facts(explanation)
    assert facts["request"] == request_id and facts["spans"][0]["total"].endswith("s")
    for span in facts["spans"]:
        assert sum(part["share"] for part in span["parts"]) == pytest.approx(1)
        assert all(0 <= part["first"] <= part["last"] < len(trace) for part in span["parts"])
    shares = {part["cause"]: part["share"] for part in facts["spans"][0]["parts"]}
    assert shares == {part.cause: pytest.approx(part.amount / explanation.total) for part in explanation.parts}


def test_the_cause_has_its_culprit_and_the_run_without_it(trace):
    facts = explanation_facts(trace.explain("r0", COST))
    worst = next(part for part in facts["spans"][1]["parts"] if not part["is_own"])
    assert facts["spans"][1]["name"] == "time to first token"
    assert worst["culprits"] == ["long"] and worst["more"] == "" and worst["share"] > 0.5
    assert facts["confirmation"].startswith("Time to first token without long: ")


def test_a_request_that_left_without_a_token_has_one_bar_and_the_run_in_which_it_gets_one():
    requests = [{"id": "long", "prompt": {"len": 300}, "max_tokens": 60}]
    requests += [{"id": "left", "prompt": {"len": 20}, "max_tokens": 5, "arrival_time": 0.02, "abort_step": 40}]
    trace, wide = (
        simulate({"config": {"max_num_seqs": seats}, "requests": requests}, cost_model=COST) for seats in (1, 2)
    )
    explanation, (abort,) = trace.explain("left", COST), [record for record in trace if "left" in record.aborted]
    facts, arrived = explanation_facts(explanation), trace.requests["left"].arrival_time
    (bar,) = facts["spans"]
    assert bar["name"] == "from arrival to the end, without a token"
    assert bar["total"] == amount(abort.time - arrived, "s")
    headings = [line for line in explanation.text().split("\n") if not line.startswith(" ") and "share" not in line]
    first = next(record.end for record in wide if any(c.request_id == "left" and c.accepted for c in record.chunks))
    took = amount(first - arrived, "s")
    said = f"ime to first token or abort with max_num_seqs=2: {took} instead of {bar['total']} "
    assert facts["confirmation"].startswith("T" + said) and headings[1].startswith("t" + said)
    assert headings[0] == f"left: {bar['total']} from arrival to its end, without a token" and len(headings) == 2


def test_a_view_gets_the_answer_or_the_reason_for_none(trace):
    feed = Feed(trace)
    assert feed.status()["explains"] and feed.status()["explained"] is None
    for request_id in ("r1", "nobody"):
        feed.handle({"name": "explain", "args": {"request_id": request_id}})
        deadline = time.monotonic() + 60
        while (feed.status()["explained"] or {}).get("request") != request_id and time.monotonic() < deadline:
            time.sleep(0.01)
        explained = feed.status()["explained"]
        assert explained["request"] == request_id
        if request_id == "nobody":
            assert "no request 'nobody'" in explained["confirmation"] and not explained["spans"]
        else:
            assert [span["name"] for span in explained["spans"]][:2] == [
                "from arrival to the end",
                "time to first token",
            ]
    assert feed.status()["message"] == ""


def asked(feed, request_id):
    """The answer of a view about a request."""
    feed.handle({"name": "explain", "args": {"request_id": request_id}})
    deadline = time.monotonic() + 60
    while (feed.status()["explained"] or {}).get("request") != request_id and time.monotonic() < deadline:
        time.sleep(0.01)
    return feed.status()["explained"]


def test_an_answer_about_a_request_that_has_ended_stays_as_it_was():
    """The fit of the costs of steps changes with every step of a run, and with it the parts."""
    requests = [
        {"id": f"r{i}", "prompt": {"len": 40 + 97 * i % 300}, "max_tokens": 9 + i % 7, "arrival_time": i / 40}
        for i in range(60)
    ]
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 128}
    run = simulate({"config": config, "requests": requests}, cost_model=COST)
    trace, part = Trace(run.meta), 2 * len(run) // 3
    for info in run.requests.values():
        trace.add_request(info)
    rng = random.Random(1)
    late = 0.0
    for record in run:
        longer = record.duration * rng.uniform(0.0, 0.4) + (0.001 if record.step > part else 0.0)
        trace.append(replace(record, time=record.time + late, end=record.end + late + longer, timings={}))
        late += longer
    feed, grows = Feed(held := Trace(trace.meta)), iter(trace)
    for info in trace.requests.values():
        held.add_request(info)
    for _ in range(part):
        held.append(next(grows))
    ended = next(request_id for record in reversed(tuple(held)) for request_id in record.finished)
    first = asked(feed, ended)
    open_one = next(request_id for request_id in trace.requests if request_id in held[-1].running)
    before = asked(feed, open_one)
    assert before["spans"][0]["name"].endswith("end of the trace")
    for record in grows:
        held.append(record)
    assert asked(feed, ended) == first
    again = explanation_facts(held.explain(ended))
    assert again != first, "the fit must have changed, or this test shows nothing"
    assert asked(feed, open_one)["spans"][0]["name"] == "from arrival to the end"
    steps = [re.search(r"as fitted over (\d+) steps", facts["division"])[1] for facts in (first, again)]
    assert int(steps[0]) < int(steps[1])
    assert asked(Feed(held), ended) == again


def test_the_drawer_says_over_how_many_steps_the_costs_are_fitted(deno_page, trace):
    facts = {**explanation_facts(trace.explain("r0", COST)), "division": "As fitted over 72 steps."}
    deno_page.open(trace, status={"live": False, "explanations": {"r0": facts}})
    deno_page(
        "view.inspector.pin(argument), page.frame()",
        {"kind": "request", "request": list(trace.requests).index("r0")},
    )
    assert "As fitted over 72 steps." in deno_page("view.inspector.why.textContent")
