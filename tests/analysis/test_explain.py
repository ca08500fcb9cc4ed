"""Explanations add up, and name a cause that was planted into the run."""

import collections
import os
import random
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from tiers import examples

from workbench import Trace, simulate
from workbench.analysis.causes import (
    BLOCKS,
    BUDGET,
    CUT,
    DECODES,
    IDLE,
    IN_PROGRESS,
    PARTIAL,
    PREEMPTED,
    PROMPTS,
    RECOMPUTED,
    SEATS,
    tabulate,
)
from workbench.analysis.explain import Explainer, explainer_of, slowest
from workbench.apps.cli import main
from workbench.base.text import duration
from workbench.scheduler.policies import DecodeFirst
from workbench.scheduler.policy import SchedulingPolicy
from workbench.simulation.costs import cost_model, slow_steps
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import TraceError

ROOT = Path(__file__).parents[2]
SLOT = "waiting for a slot for its adapter (max_loras)"
COST = CostModel(fixed=0.004, per_sequence=5e-5, per_prefill_token=1e-4, per_kv_token=1e-7, per_attention_cell=1e-9)
NUM_CASES = int(os.environ.get("WORKBENCH_EXPLAIN_CASES", examples(36)))
"""Random cases in a normal run of the tests: three of each kind. Set the variable for more; 360 have passed."""


def request(name, prompt, output, at, **others):
    return {"id": name, "prompt": {"len": prompt}, "max_tokens": output, "arrival_time": at, **others}


def others(rng, count):
    """Small requests that do not matter."""
    return [request(f"o{i}", rng.randint(5, 30), rng.randint(2, 10), rng.uniform(0, 0.3)) for i in range(count)]


def prompt_ahead(rng):
    """A long prompt takes the whole budget while the victim waits."""
    budget = rng.choice([64, 128, 256])
    at = rng.uniform(0.05, 0.3)
    culprit = request("culprit", budget * rng.randint(12, 30), 2, at)
    config = {"max_num_batched_tokens": budget, "max_num_seqs": 64, "num_blocks": 4000}
    return config, [culprit, request("victim", rng.randint(5, 40), 3, at + 0.001)], {BUDGET, IN_PROGRESS}, {"culprit"}


def no_seat(rng):
    """Requests with long outputs hold all seats."""
    seats = rng.randint(2, 5)
    holders = [request(f"holder{i}", rng.randint(5, 20), rng.randint(150, 300), 0.0) for i in range(seats)]
    config = {"max_num_batched_tokens": 512, "max_num_seqs": seats, "num_blocks": 4000}
    names = {holder["id"] for holder in holders}
    return config, [*holders, request("victim", rng.randint(5, 60), 3, rng.uniform(0.02, 0.1))], {SEATS}, names


def no_blocks(rng):
    """A request holds nearly all KV blocks until it ends."""
    blocks = rng.randint(60, 90)
    holder = request("culprit", (blocks - 20) * 16, 200, 0.0)
    victim = request("victim", 45 * 16, 2, rng.uniform(0.02, 0.2))
    config = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "num_blocks": blocks}
    return config, [holder, victim], {BLOCKS}, {"culprit"}


def preempted(rng):
    """The victim, admitted last, loses its blocks to requests that grow, and is recomputed."""
    size = rng.randint(18, 24)
    growing = [request(f"grow{i}", size * 16 - 4, 120 + rng.randint(0, 30), 0.0) for i in range(2)]
    victim = request("victim", size * 16 - 4, 60, 0.01)
    config = {"max_num_batched_tokens": 2048, "max_num_seqs": 8, "num_blocks": size * 3 + 4}
    return config, [*growing, victim], {PREEMPTED, RECOMPUTED, BLOCKS}, {"grow0", "grow1"}


def shared_steps(rng):
    """Long prompts are computed in the steps in which the victim decodes."""
    victim = request("victim", rng.randint(5, 20), 30, 0.0)
    prompts = [request(f"culprit{i}", rng.randint(1500, 3000), 1, 0.03 + 0.1 * i) for i in range(4)]
    config = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "num_blocks": 4000}
    return config, [victim, *prompts], {PROMPTS}, {prompt["id"] for prompt in prompts}


def lower_priority(rng):
    """Requests of a higher priority keep arriving and take the seats first."""
    first = [
        request(f"first{i}", rng.randint(100, 200), 20, 0.002 * i, priority=-1) for i in range(rng.randint(15, 25))
    ]
    victim = request("victim", rng.randint(5, 60), 3, 0.011, priority=5)
    config = {"max_num_batched_tokens": 256, "max_num_seqs": 2, "num_blocks": 4000, "policy": "priority"}
    return config, [*first, victim], {SEATS, BUDGET, PREEMPTED}, {each["id"] for each in first}


def cut_prompt(rng):
    """The victim's long prompt is computed in small pieces because another request decodes."""
    decoding = request("o-long", 5, 400, 0.0)
    victim = request("victim", rng.randint(1000, 2000), 2, rng.uniform(0.01, 0.1))
    cap = rng.choice([16, 32])
    config = {"max_num_batched_tokens": 4096, "long_prefill_token_threshold": cap, "num_blocks": 4000}
    return config, [decoding, victim], {f"{CUT} long_prefill_token_threshold"}, None


def many_decodes(rng):
    """Hundreds of replies grow in the same steps as the victim's."""
    decoding = [request(f"culprit{i}", rng.randint(3, 9), 90, 0.0) for i in range(rng.randint(250, 300))]
    config = {"max_num_batched_tokens": 4096, "max_num_seqs": 400, "num_blocks": 9000}
    victim = request("victim", rng.randint(3, 9), 40, rng.uniform(0.1, 0.2))
    return config, [*decoding, victim], {DECODES}, {each["id"] for each in decoding}


def no_slot_for_a_long_prompt(rng):
    """One long prompt may be in progress, and it is not the victim's."""
    budget = rng.choice([128, 256])
    at = rng.uniform(0.05, 0.3)
    culprit = request("culprit", budget * rng.randint(15, 30), 2, at)
    victim = request("victim", budget + rng.randint(10, 60), 3, at + 0.001)
    limits = {"max_num_partial_prefills": rng.randint(2, 4), "max_long_partial_prefills": 1}
    config = {"max_num_batched_tokens": budget, "max_num_seqs": 64, "num_blocks": 4000, **limits}
    return config, [culprit, victim], {PARTIAL}, {"culprit"}


def cut_to_a_share(rng):
    """Several prompts in progress share a small budget, so the victim's is computed in small pieces."""
    slots = rng.randint(3, 5)
    length = rng.randint(600, 900)
    prompts = [request(f"prompt{i}", length, 1, 0.0) for i in range(slots - 1)]
    victim = request("victim", length, 2, 0.0)
    limits = {"max_num_partial_prefills": slots, "long_prefill_token_threshold": 2000}
    config = {"max_num_batched_tokens": 32, "max_num_seqs": 64, "num_blocks": 4000, **limits}
    return config, [*prompts, victim], {f"{CUT} partial_prefill_slot"}, None


def cut_by_policy(rng):
    """A policy limits prompts while another request decodes."""
    decoding = request("o-long", 5, 400, 0.0)
    victim = request("victim", rng.randint(1000, 2000), 2, rng.uniform(0.01, 0.1))
    policy = DecodeFirst(max_prefill_tokens=rng.choice([8, 16, 32]))
    config = {"max_num_batched_tokens": 4096, "num_blocks": 4000, "policy": policy}
    return config, [decoding, victim], {f"{CUT} policy"}, None


def no_slot_for_an_adapter(rng):
    """Requests with long outputs hold all slots of adapters, and the victim's adapter is another one."""
    slots = rng.randint(1, 3)
    holders = [request(f"holder{i}", 9, rng.randint(150, 300), 0.0, adapter=f"lora{i}") for i in range(slots)]
    victim = request("victim", rng.randint(5, 60), 3, rng.uniform(0.02, 0.1), adapter="another")
    config = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "num_blocks": 4000, "max_loras": slots}
    return config, [*holders, victim], {SLOT}, {holder["id"] for holder in holders}


def run(config, requests):
    """A planted run; a policy that is an object is not part of a workload's configuration."""
    config = config | {"block_size": 16, "enable_prefix_caching": False}
    policy = config.pop("policy") if isinstance(config.get("policy"), SchedulingPolicy) else None
    return simulate({"config": config, "requests": requests}, cost_model=COST, policy=policy)


PLANTED = [
    prompt_ahead,
    no_seat,
    no_blocks,
    preempted,
    shared_steps,
    lower_priority,
    cut_prompt,
    many_decodes,
    no_slot_for_a_long_prompt,
    cut_to_a_share,
    cut_by_policy,
    no_slot_for_an_adapter,
]


def check_adds_up(explanation, trace):
    request = trace.metrics().requests[explanation.request_id]
    spans = [(explanation.total, explanation.parts), *((span.total, span.parts) for span in explanation.gaps)]
    if explanation.ttft is not None:
        spans.append((explanation.ttft.total, explanation.ttft.parts))
        expected = request.ttft.seconds if explanation.unit == "s" else request.ttft.steps
        assert explanation.ttft.total == pytest.approx(expected, abs=1e-9)
    if request.e2e is not None:
        expected = request.e2e.seconds if explanation.unit == "s" else request.e2e.steps
        assert explanation.total == pytest.approx(expected, abs=1e-9)
    times = request.token_times if explanation.unit == "s" else request.token_steps
    for gap in explanation.gaps:
        number = int(gap.name.removeprefix("gap before token "))  # the first token is token 1
        assert gap.total == pytest.approx(times[number - 1] - times[number - 2], abs=1e-9)
    for total, parts in spans:
        assert sum(part.amount for part in parts) == pytest.approx(total, abs=1e-9)
        assert all(part.amount >= -1e-9 and part.steps for part in parts)


@pytest.mark.parametrize("case", range(NUM_CASES))
def test_a_planted_cause_is_named(case):
    rng = random.Random(case)
    plant = PLANTED[case % len(PLANTED)]
    config, requests, causes, culprits = plant(rng)
    trace = run(config, [*requests, *others(rng, 3)])
    explanation = trace.explain("victim", COST if rng.random() < 0.5 else None)
    check_adds_up(explanation, trace)
    biggest = explanation.biggest_avoidable
    assert biggest.cause in causes, (plant.__name__, explanation)
    assert culprits is None or biggest.culprits[0] in culprits, (plant.__name__, explanation)


@pytest.mark.parametrize("plant", [*PLANTED[:5], cut_prompt, no_slot_for_a_long_prompt, *PLANTED[-2:]])
def test_the_cause_is_confirmed_by_a_run_without_it(plant):
    rng = random.Random(1)
    config, requests, _, _ = plant(rng)
    trace = run(config, requests)
    explanation = trace.explain("victim", COST)
    said = explanation.confirmation
    assert said.is_recorded == (plant is cut_by_policy)
    assert said.after < said.before - 0.3 * explanation.biggest_avoidable.amount / max(
        1, len(explanation.biggest_avoidable.culprits)
    )
    assert said.change in str(explanation) and "instead of" in str(explanation)


def test_without_a_clock_amounts_are_steps():
    requests = [
        {"id": "long", "prompt": {"len": 900}, "max_tokens": 2},
        {"id": "short", "prompt": {"len": 9}, "max_tokens": 3},
    ]
    trace = simulate({"config": {"max_num_batched_tokens": 100}, "requests": requests})
    for request_id in trace.requests:
        explanation = trace.explain(request_id)
        assert explanation.unit == "steps"
        check_adds_up(explanation, trace)
    explanation = trace.explain("short")
    assert explanation.biggest_avoidable.cause == BUDGET and explanation.biggest_avoidable.steps == tuple(range(9))
    assert explanation.confirmation.change.endswith("without long")
    assert (explanation.confirmation.before, explanation.confirmation.after) == (10, 1)


def test_a_change_that_makes_nothing_shorter_is_not_offered_as_a_help():
    rng, seen = random.Random(5), []
    cost = CostModel(fixed=0.001, per_prefill_token=1e-4, per_sequence=1e-4)
    config = {"block_size": 4, "num_blocks": 20, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    for _ in range(8):
        requests = [
            {
                "id": f"r{n}",
                "prompt": {"len": rng.randint(4, 40)},
                "max_tokens": rng.randint(1, 12),
                "arrival_time": rng.uniform(0, 0.02),
            }
            for n in range(8)
        ]
        trace = simulate({"config": config, "requests": requests}, cost_model=cost)
        for request_id in trace.requests:
            explanation = trace.explain(request_id, cost)
            if (said := explanation.confirmation) is None or not said.holds:
                continue
            latency, kind, change = re.match(r"(.*) (with|without) (\S+)$", said.change).groups()
            name = {"time to first token": "ttft", "end to end": "e2e"}[latency]
            field, _, value = change.partition("=")
            changes = {field: int(value)} if kind == "with" else {"without": [change]}
            runs = trace, trace.fork(cost_model=cost, **changes)
            before, after = (getattr(run.metrics().requests[request_id], name).seconds for run in runs)
            words = f"{said.change} is not shorter: " if after >= before else f"{said.change}: "
            assert f"{words}{duration(after)} instead of {duration(before)}" in repr(explanation)
            seen.append(after >= before)
    assert min(seen.count(True), seen.count(False)) > 5


def recordings():
    return sorted((ROOT / "tests/data/vllm-recorded").rglob("*.jsonl.gz"))


@pytest.mark.parametrize("path", recordings(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_request_of_a_recording_adds_up(path):
    trace = Trace.load(path)
    explainer = Explainer(trace)
    for request_id in trace.requests:
        check_adds_up(explainer.explain(request_id), trace)


def test_who_used_the_budget_of_the_steps_that_a_request_waited_in(tmp_path, capsys):
    """Each with its tokens in these steps, the largest first, in the same words in Python and on the command line."""
    requests = [{"id": f"r{n}", "prompt": {"len": 20 + 9 * n}, "max_tokens": 6} for n in range(6)]
    trace = simulate(
        {"config": {"max_num_batched_tokens": 32}, "requests": [*requests, {"id": "v", "prompt": {"len": 5}}]}
    )
    found = trace.explain("v")
    part = next(part for part in found.parts if part.kind == "token_budget")
    used = collections.Counter()
    for step in part.steps:
        assert "v" not in trace[step].running and trace[step].token_budget == trace[step].num_tokens
        used.update({chunk.request_id: chunk.num_tokens for chunk in trace[step].chunks})
    assert dict(zip(part.culprits, part.tokens, strict=True)) == used and len(part.steps) > 2
    assert list(part.tokens) == sorted(part.tokens, reverse=True) and len(used) > 4
    named = [f"{name} ({used[name]} tokens)" for name in part.culprits[:3]]
    left = sum(used[name] for name in part.culprits[3:])
    words = f"waiting for the token budget: {', '.join(named)} and {len(used) - 3} more ({left} tokens) (steps "
    assert words in repr(found)
    trace.save(tmp_path / "run.jsonl")
    assert main(["trace", "explain", str(tmp_path / "run.jsonl"), "v"]) == 0
    assert words in capsys.readouterr().out
    assert all(part.tokens == () for part in found.parts if part.kind != "token_budget")


def test_the_slowest_of_a_fleet_and_the_command(tmp_path, capsys):
    rng = random.Random(0)
    config, requests, _, _ = prompt_ahead(rng)
    trace = simulate({"config": config, "requests": [*requests, *others(rng, 6)]}, cost_model=COST)
    first, second = slowest(trace, 2)
    assert first.ttft.total >= second.ttft.total
    assert repr(slowest(trace, 2)) == f"{first!r}\n\n{second!r}", "one below the other, as text"
    path = tmp_path / "run.jsonl"
    trace.save(path)
    assert main(["trace", "explain", str(path), "victim"]) == 0
    said = capsys.readouterr().out
    assert "waiting for the token budget: culprit" in said and "without culprit" in said
    assert main(["trace", "explain", str(path), "--slowest", "3"]) == 0
    said = capsys.readouterr().out
    assert len(said.strip().split("\n")) >= 4 and "victim" in said
    assert f"  {first.ttft.amount(first.unit)}  " in said, "the time as the explanation itself tells it"
    assert main(["trace", "explain", str(path), "nobody"]) == 2
    assert "the trace has no request 'nobody'" in capsys.readouterr().err
    assert main(["trace", "explain", str(path), "victim", "--slowest", "3"]) == 2
    assert main(["trace", "explain", str(path), "--slowest", "0"]) == 2


@pytest.mark.parametrize("seed", range(4))
def test_the_biggest_part_is_the_same_everywhere(seed, tmp_path, capsys):
    """The page of an incident and the command line have the biggest part of all, tables the biggest avoidable one."""
    from workbench.analysis.incident import incident
    from workbench.viz.layout.explanation import explanation_facts

    rng = random.Random(seed)
    requests = [request(f"r{n}", rng.randint(20, 900), rng.randint(1, 20), rng.uniform(0, 0.4)) for n in range(14)]
    config = {"max_num_seqs": 3, "max_num_batched_tokens": 256}
    trace = simulate({"config": config, "requests": requests}, cost_model=COST)
    trace.save(tmp_path / "run.jsonl")
    assert main(["trace", "explain", str(tmp_path / "run.jsonl"), "--slowest", "14", "--by", "ttft"]) == 0
    printed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("r")}
    found, differ, avoidable = {one.request_id: one for one in incident(trace).slow}, 0, collections.Counter()
    for explanation in slowest(trace, None, "ttft"):
        ttft, name = explanation.ttft, explanation.request_id
        most = max(ttft.parts, key=lambda part: part.amount)
        others = [part for part in ttft.parts if part.kind not in ("own", *IDLE) and part.amount > 0]
        assert ttft.biggest.cause == found[name].cause == most.cause and most.cause in printed[name]
        assert found[name].share == pytest.approx(most.amount / ttft.total)
        if not others:
            assert ttft.biggest_avoidable is None
            continue
        most_of_others = max(others, key=lambda part: part.amount)
        assert ttft.biggest_avoidable.cause == most_of_others.cause
        avoidable[most_of_others.cause] += 1
        differ += most_of_others.cause != most.cause
        drawn = next(span for span in explanation_facts(explanation)["spans"] if span["name"] == ttft.name)
        assert next(part for part in drawn["parts"] if not part["is_own"])["cause"] == most_of_others.cause
    rows = tabulate(slowest(trace, None, "ttft"), "ttft").rows
    assert {row.cause: row.num_biggest for row in rows if row.num_biggest} == avoidable and differ


@pytest.mark.parametrize("by", ["ttft", "e2e"])
def test_the_table_of_causes_adds_up_over_all_requests(by, tmp_path, capsys):
    rng = random.Random(5)
    config, requests, _, _ = prompt_ahead(rng)
    traces = [simulate({"config": config, "requests": [*requests, *others(rng, 9)]}, cost_model=COST) for _ in range(2)]
    explanations = [each for trace in traces for each in slowest(trace, None, by)]
    table = tabulate(explanations, by)
    latencies = [getattr(each, by).seconds for trace in traces for each in trace.metrics().requests.values()]
    assert table.num_requests == len(latencies) == 22
    assert table.total == pytest.approx(sum(latencies)) == sum(row.amount for row in table.rows)
    assert sum(row.num_biggest for row in table.rows) <= 22
    for row in table.rows:
        with_it = [each for each in explanations for part in each.span(by).parts if part.cause == row.cause]
        assert 0 < row.num_requests <= len(with_it)
        worst = [each.span(by).biggest_avoidable for each in with_it]
        assert row.num_biggest == sum(part is not None and part.cause == row.cause for part in worst)
    assert next(row for row in table.rows if row.cause == BUDGET).culprit == "culprit"
    for rank, trace in enumerate(traces):
        trace.save(tmp_path / f"vllm-20260101-120000-node1-rank{rank}-7-0-00000.jsonl")
    assert main(["trace", "explain", str(tmp_path), "--by", by]) == 0
    said = capsys.readouterr().out
    assert "of 22 requests" in said and "waiting for the token budget, most often culprit" in said
    assert main(["trace", "explain", str(tmp_path), "--by", by, "--slowest", "2"]) == 0
    said = capsys.readouterr().out.strip().split("\n")
    assert main(["trace", "whatif", str(tmp_path), "--set", "max_num_seqs=2"]) == 2
    assert "two ranks have a request with the same id" in capsys.readouterr().err
    worst = [max(getattr(each, by).seconds for each in trace.metrics().requests.values()) for trace in traces]
    assert len(said) == 3 and said[1].startswith("rank") and f"{1000 * max(worst):.0f} ms" in said[1]


def test_invalid_arguments():
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}}]})
    with pytest.raises(TraceError, match="no request 'b'"):
        trace.explain("b")
    with pytest.raises(ValueError, match='by must be "ttft" or "e2e"'):
        slowest(trace, 1, by="speed")


def test_an_explainer_is_kept_until_the_trace_grows():
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 5}]})
    growing = Trace(trace.meta)
    growing.add_request(trace.requests["a"])
    for record in list(trace)[:3]:
        growing.append(record)
    kept = explainer_of(growing)
    assert explainer_of(growing) is kept and growing.metrics() is growing.metrics()
    growing.append(trace[3])
    assert explainer_of(growing) is not kept
    assert growing.explain("a").total == 4


def test_the_steps_of_a_trace_are_read_and_compared_once_until_it_grows(monkeypatch):
    read, compared = [], []
    whole_measured, whole_expected = cost_model.measured_steps, slow_steps.expectations
    monkeypatch.setattr(cost_model, "measured_steps", lambda trace: read.append(len(trace)) or whole_measured(trace))
    monkeypatch.setattr(slow_steps, "expectations", lambda steps: compared.append(len(steps)) or whole_expected(steps))
    requests = [{"id": f"r{i}", "prompt": {"len": 30 + i}, "max_tokens": 30} for i in range(4)]
    trace = simulate({"requests": requests}, cost_model=CostModel(fixed=0.01, per_prefill_token=1e-4))
    explainer_of(trace)
    assert trace.stalls() == slow_steps.slow_steps(trace) == ()
    assert len(read) == len(compared) == 1
    assert not {"_stretches", "_states"} & explainer_of(trace).__dict__.keys()  # a summary explains no request
    trace.mark_disturbed([trace[5].step])
    explainer_of(trace)
    assert compared == [len(trace), len(trace) - 1]


def test_an_explainer_explains_the_steps_that_its_metrics_are_of():
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 5}]})
    growing = Trace(trace.meta)
    growing.add_request(trace.requests["a"])
    for record in list(trace)[:3]:
        growing.append(record)
    kept = explainer_of(growing)
    growing.append(trace[3])
    assert kept.explain("a").total == 3


@pytest.mark.parametrize(
    ("first", "copied", "kinds"),
    [
        (0, False, {"a": "before", "b": "between"}),
        (0, True, {"a": "before", "b": "between"}),
        (2, False, {"a": "before", "b": "between"}),  # the whole run is at hand
        (2, True, {"a": "before_part", "b": "before_part"}),  # it does not know of the steps before
    ],
)
def test_time_without_a_step_is_before_the_first_one_or_between_two(first, copied, kinds, tmp_path):
    """The engine begins 9 s after request a, pauses for 5 s before step 2, and b arrives in this pause."""
    requests = [{"id": "a", "prompt": {"len": 20}, "max_tokens": 6}, {"id": "b", "prompt": {"len": 9}, "max_tokens": 3}]
    requests[1]["arrival_step"] = 2
    simulated = simulate({"requests": requests}, cost_model=CostModel(fixed=0.1))
    trace = Trace(simulated.meta)
    for request_id, arrival in (("a", 1.0), ("b", 11.0)):
        trace.add_request(replace(simulated.requests[request_id], arrival_time=arrival))
    for record in simulated:
        late = 10.0 if record.step < 2 else 15.0
        trace.append(replace(record, time=record.time + late, end=record.end + late))
    part = trace[first:]
    if copied:
        part.save(tmp_path / "part.jsonl")
        part = Trace.load(tmp_path / "part.jsonl")
    words = {
        "before": "before the first step",
        "before_part": "before this part of the run",
        "between": "between steps",
    }
    for request_id, kind in kinds.items():
        found = {each.kind: each for each in part.explain(request_id).parts}
        idle = {name: each for name, each in found.items() if name in IDLE}
        told = {name: each.cause for name, each in idle.items()}
        expected = {kind} | ({"between"} if request_id == "a" and not (first and copied) else set())
        assert told == {name: words[name] for name in expected}
        assert not any(each.is_culprit for each in idle.values())
    amounts = {each.kind: each.amount for each in part.explain("a").parts}
    before = {(0, False): 9.0, (0, True): 9.0, (2, False): 9.0, (2, True): 14.2}[first, copied]
    assert amounts[kinds["a"]] == pytest.approx(before)


def test_the_lines_of_an_explanation_add_up_to_its_heading_with_the_smaller_parts():
    recording = Trace.load("notebooks/data/vllm_served.jsonl.gz")
    explanation = recording.explain(slowest(recording, 5)[2].request_id)
    for span in explanation.spans:
        listed = sum(part.amount for part in span.shown)
        assert listed + span.smaller == pytest.approx(sum(part.amount for part in span.parts))
    lines = [line for line in explanation.text().splitlines() if line.endswith("in smaller parts")]
    assert len(lines) == sum(span.smaller > 0 for span in explanation.spans) > 0
    assert not any(" 0% " in line for line in lines)
    assert explanation._repr_html_().count("in smaller parts") == len(lines)


def test_steps_in_which_no_request_has_a_latency_are_one_sentence(capsys):
    path = ROOT / "docs/data/run.jsonl.gz"
    for more in ([], ["--slowest", "3"]):
        assert main(["trace", "explain", str(path), "--last", "3s", *more]) == 0
        assert capsys.readouterr().out == "no request got its first token in these steps\n"
    assert "<table" not in tabulate([], "ttft")._repr_html_()
    assert str(tabulate([], "e2e")) == "no request ran or ended in these steps"


def test_who_is_in_front_is_named_beside_those_who_hold_the_blocks():
    """A short request needs one block of ten free ones, and waits behind a long one, as in vLLM's order."""
    requests = [
        {"id": "holder", "prompt": {"len": 100}, "max_tokens": 30},
        {"id": "big", "prompt": {"len": 200}, "max_tokens": 4, "arrival_step": 2},
        {"id": "tiny", "prompt": {"len": 8}, "max_tokens": 4, "arrival_step": 3},
    ]
    trace = simulate({"config": {"max_num_batched_tokens": 256, "num_blocks": 18}, "requests": requests})
    assert trace[10].not_scheduled["tiny"].behind == "big" and trace[10].free_blocks_end > 1
    (wait,) = [part for part in trace.explain("tiny").parts if part.kind == "kv_blocks"]
    assert wait.culprits == ("big", "holder"), wait
    (own,) = [part for part in trace.explain("big").parts if part.kind == "kv_blocks"]
    assert own.culprits == ("holder",), "it waits for the blocks themselves"


@pytest.mark.parametrize("seed", range(8))
def test_a_preempted_request_waits_for_those_who_hold_blocks_in_each_step(seed):
    """And not for those who did when it was preempted: some of them end soon after."""
    rng = random.Random(seed)
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"len": rng.randint(20, 90)},
            "max_tokens": rng.randint(10, 60),
            "arrival_step": 2 * n,
        }
        for n in range(9)
    ]
    config = {"max_num_batched_tokens": 128, "num_blocks": 20, "max_num_seqs": 6}
    trace = simulate({"config": config, "requests": requests})
    found = 0
    for name in trace.requests:
        held, waits = collections.Counter(), False
        for record in trace:
            waits = (waits or name in record.preempted) and not any(c.request_id == name for c in record.chunks)
            if waits:
                tables = {rid: len(table) for rid, table in record.block_tables.items() if rid != name and table}
                whole = sum(tables.values())
                held.update({rid: count / whole for rid, count in tables.items()})
        parts = [part for part in trace.explain(name).parts if part.kind == "preempted"]
        assert bool(parts) == bool(held)
        for part in parts:
            found += 1
            assert {*part.culprits} == {*held}
            assert part.culprits[0] in [who for who, share in held.items() if share > max(held.values()) - 1e-6]
    assert found


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_request_that_nothing_will_serve_is_called_so(kind):
    trace = Trace.load(ROOT / "tests/data/vllm-recorded" / kind / "d7_too_big.jsonl.gz")
    usable, size = trace.num_blocks - 1, trace.block_size
    too_big = next(name for name, info in trace.requests.items() if -(-info.num_prompt_tokens // size) > usable)
    assert list(trace.requests).index(too_big) == 0, "all others wait behind it"
    incident = trace.incident()
    for request_id in trace.requests:
        explanation = trace.explain(request_id)
        assert explanation.is_never_served and "\nnever served: " in repr(explanation)
    assert [line.endswith("; never served") for line in repr(incident).splitlines()[1:3]] == [True, True]
    assert incident.never_served == tuple(trace.requests)
    served = Trace.load(ROOT / "tests/data/vllm-recorded" / kind / "d_preempt.jsonl.gz")
    idle = next(record.step for record in served if record.preempted)
    for part in (served, served[: idle + 1]):  # the part has requests that wait, and are served after it
        assert not part.incident().never_served and "never served" not in repr(part.incident())
        assert not any(part.explain(request_id).is_never_served for request_id in part.requests)
