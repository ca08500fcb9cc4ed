"""The part of the playground that runs in the page: its commands, its messages, and the modules that it needs."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from viz_traces import random_trace

from workbench import simulate, simulate_fleet
from workbench.analysis.explain import explain
from workbench.apps.playground.presets import POLICIES, PRESETS
from workbench.apps.playground.session import OTHER_WORKLOAD, Session, Side, python_cell, read_policy
from workbench.apps.playground.site import package_archive
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.trace.readings.compare import compare
from workbench.viz.duel import FLEET_ONLY, MEASURES, measure_words, outcome
from workbench.viz.fleet_rows import fleet_svgs
from workbench.viz.layout.packet import decode_packet

ROOT = Path(__file__).parents[2]


def ask(session, command, content=None, **values):
    answer = session.handle(json.dumps({"command": command, **values}), content)
    return json.loads(answer.facts), answer


def run(session, preset="chunked", config=None, policy="", **changes):
    workload = json.dumps({**PRESETS[preset].workload, **changes})
    facts, answer = ask(session, "run", workload=workload, config=config or {}, policy=policy)
    return ask(session, "numbers")[0] | facts, answer


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_opens_at_the_first_step_that_shows_what_it_is_about(preset):
    about = {
        "a preemption": lambda step: len(step.preempted) > 0,
        "a request waits": lambda step: len(step.waiting) > 0,
        "a hit in the prefix cache": lambda step: sum(chunk.num_cached_tokens for chunk in step.chunks) > 0,
        "a chunk beside decodes": lambda step: (
            0 < sum(chunk.arm == "decode" for chunk in step.chunks) < len(step.chunks)
            and any(chunk.arm == "intermediate" for chunk in step.chunks)
        ),
    }
    chosen = PRESETS[preset]
    session = Session()
    given = {"workload": json.dumps(chosen.workload), "replicas": chosen.replicas, "shows": chosen.shows}
    facts, _ = ask(session, "run", **given)
    trace = session._newest.traces[facts.get("replica", 0)]
    assert facts["opens_at"] == next(step.step for step in trace if about[chosen.shows](step))
    assert "opens_at" not in ask(session, "pin")[0], "what follows keeps the place"
    refused, _ = ask(session, "run", **given | {"shows": "everything"})
    assert "shows must be" in refused["error"] and "a preemption" in refused["error"]


def test_the_slowest_request_is_offered_first():
    session = Session()
    facts, _ = run(session, "own-policy")
    trace = simulate(PRESETS["own-policy"].workload)
    times = {name: request.e2e.seconds for name, request in trace.metrics().requests.items()}
    assert [times[name] for name in facts["slowest"]] == sorted(times.values(), reverse=True)
    session = Session()
    ask(session, "run", workload=json.dumps(PRESETS["fleet"].workload), replicas=4)
    assert sorted(ask(session, "numbers")[0]["slowest"]) == sorted(
        r["id"] for r in PRESETS["fleet"].workload["requests"]
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_simulated_and_all_its_requests_end(preset):
    facts, answer = run(Session(), preset)
    trace = simulate(PRESETS[preset].workload)
    header, columns = decode_packet(answer.packet)
    assert header["num_steps"] == facts["summary"]["num_steps"] == len(trace) > 10
    assert columns["decode_tokens"].tolist() == [step.num_decode_tokens for step in trace]
    assert facts["end"] == "done" and facts["summary"]["num_finished"] == len(trace.requests)
    assert facts["summary"]["unit"] == "s" and not facts["notes"]


def test_what_the_hints_of_presets_promise():
    def summary(preset, config=None, policy=""):
        return run(Session(), preset, config, policy)[0]["summary"]

    small, large = (summary("chunked", {"max_num_batched_tokens": budget}) for budget in (64, 512))
    assert small["itl"]["max"] < large["itl"]["max"] and small["ttft"]["max"] > large["ttft"]["max"]
    limited = {"max_num_partial_prefills": 4, "max_long_partial_prefills": 1}
    assert summary("partial-prefills", limited)["ttft"]["mean"] < summary("partial-prefills")["ttft"]["mean"]
    assert summary("preemption")["num_preemptions"] > 0 == summary("preemption", {"num_blocks": 192})["num_preemptions"]
    off = summary("prefix-caching", {"enable_prefix_caching": False})
    assert off["num_scheduled_tokens"] > 3 * summary("prefix-caching")["num_scheduled_tokens"]
    shortest = summary("own-policy", policy=POLICIES["ShortestFirst"])
    assert shortest["ttft"]["mean"] < summary("own-policy")["ttft"]["mean"]
    cached = [summary("agents", {"num_blocks": blocks})["num_cached_tokens"] for blocks in (128, 160, 320)]
    assert cached[0] < cached[1] == cached[2] and "128" in PRESETS["agents"].hint
    assert summary("bursts", {"max_num_seqs": 24})["queue"]["mean"] < summary("bursts")["queue"]["mean"]
    session, rates = Session(), {}
    for router in ("round_robin", "sticky", "cache_aware"):
        run_fleet(session, router)
        rates[router] = ask(session, "numbers")[0]["summary"]["hit_rate"]
    assert rates["cache_aware"] < rates["round_robin"] < 0.6 * rates["sticky"]


VALUES = {
    "median time to first token": lambda trace: median(
        request.ttft.seconds for request in trace.metrics().requests.values()
    ),
    "longest pause between two tokens": lambda trace: max(
        gap for request in trace.metrics().requests.values() for gap in request.gaps("s")
    ),
    "time until all are finished": lambda trace: trace[-1].end - trace[0].time,
}


def test_a_duel_is_settled_by_the_measured_runs():
    session = Session()
    run(session)
    assert ask(session, "settle", measure="median time to first token")[0]["error"].startswith("a duel needs two runs")
    measures = ask(session, "pin")[0]["measures"]
    assert measures == [list(each) for each in measure_words()]
    run(session, config={"max_num_batched_tokens": 16})
    workload = PRESETS["chunked"].workload
    runs = [simulate(workload), simulate(workload, config={"max_num_batched_tokens": 16})]
    winners = set()
    for measure in VALUES:
        facts, answer = ask(session, "settle", measure=measure)
        a, b = (VALUES[measure](each) for each in runs)
        assert facts["winner"] == ("neither" if abs(a - b) <= 0.01 * max(a, b) else "A" if a < b else "B"), measure
        assert answer.packet is answer.other is None and facts["told"].lower().startswith(measure)
        winners.add(facts["winner"])
    assert len(winners) > 1
    assert "measure" in ask(session, "settle", measure="luck")[0]["error"]


@pytest.mark.parametrize("changed", ["max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold"])
@pytest.mark.parametrize("unit", ["s", "steps"])
def test_a_duel_names_its_unit_with_the_question(unit, changed):
    session, workload = Session(), dict(PRESETS["chunked"].workload)
    if unit == "steps":
        del workload["cost_model"]
    ask(session, "run", workload=json.dumps(workload), config={}, policy="")
    pinned = ask(session, "pin")[0]
    assert pinned["unit"] == unit and pinned["bounds"] == {
        name: simulate(workload).config[name]
        for name in ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
    }
    ask(session, "run", workload=json.dumps(workload), config={"num_blocks": 4096}, policy="")
    told = ask(session, "settle", measure="mean time to first token")[0]["told"]
    assert ("steps" in told) == (unit == "steps"), told
    ask(session, "run", workload=json.dumps(workload), config={changed: 1 if "seqs" in changed else 16}, policy="")
    answer = ask(session, "settle", measure="mean time to first token")[0]
    assert ("do not last equally long" in answer.get("error", "")) == (unit == "steps"), answer
    settled = {name for name, _ in pinned["measures"] if "error" not in ask(session, "settle", measure=name)[0]}
    assert settled == {name for name, _ in pinned["counts" if unit == "steps" else "measures"]}
    _, alone = ask(session, "put_away")
    assert alone.other is None and ask(session, "numbers")[0]["other"] is None


def run_fleet(session, router, replicas=4, **values):
    workload = json.dumps(PRESETS["fleet"].workload)
    return ask(session, "run", workload=workload, replicas=replicas, router=router, **values)


def test_two_routers_duel_over_the_same_arrivals():
    session = Session()
    run_fleet(session, "round_robin")
    assert dict(ask(session, "pin")[0]["measures"]).keys() == MEASURES.keys()
    facts, answer = run_fleet(session, "sticky")
    a, b = (
        simulate_fleet(PRESETS["fleet"].workload, replicas=4, router=router).traces
        for router in ("round_robin", "sticky")
    )
    assert facts["replicas"] == [len(trace.requests) for trace in b] and answer.other is None
    assert sorted(facts["requests"]) == sorted(request["id"] for request in PRESETS["fleet"].workload["requests"])
    names = [{f"replica {number}": trace for number, trace in enumerate(side)} for side in (a, b)]
    assert facts["fleet"] == fleet_svgs(names), "A, and beside it the newest run"
    settled = {measure: ask(session, "settle", measure=measure)[0] for measure in MEASURES}
    assert {measure: (each["winner"], each["told"]) for measure, each in settled.items()} == {
        measure: outcome(a, b, measure) for measure in MEASURES
    }
    assert settled["hit rate of prompt tokens"]["winner"] == "B" and settled[FLEET_ONLY]["winner"] == "neither"
    numbers = ask(session, "numbers")[0]
    for name, side in (("summary", a), ("other", b)):
        chunks = [(trace, step, chunk) for trace in side for step in trace for chunk in step.chunks]
        shown = numbers[name]
        assert shown["num_steps"] == sum(map(len, side)) and shown["replicas"] == 4
        assert shown["num_output_tokens"] == sum(chunk.sampled is not None for _, _, chunk in chunks)
        assert shown["busiest"] == max(len(trace.requests) for trace in side) / 80
        first = {chunk.request_id: chunk.num_cached_tokens for _, _, chunk in reversed(chunks)}
        prompts = sum(info.num_prompt_tokens for trace in side for info in trace.requests.values())
        assert shown["hit_rate"] == sum(first.values()) / prompts


def test_the_page_says_why_one_replica_got_all_requests():
    """As `FleetRun.concentration` does, of the newest run; a fleet that is used evenly has nothing to say."""
    session = Session()
    assert run_fleet(session, "round_robin")[0]["concentration"] == ""
    facts, _ = run_fleet(session, "cache_aware")
    assert facts["concentration"].startswith("cache_aware sent all 80 requests to replica 0. 79 of them shared ")
    assert facts["replicas"] == [80, 0, 0, 0]
    assert run_fleet(session, "sticky")[0]["concentration"] == ""
    assert "cache_aware" in PRESETS["fleet"].hint


def test_the_replica_with_the_most_requests_is_drawn_and_any_other_can_be():
    session = Session()
    facts, answer = run_fleet(session, "least_loaded")
    traces = simulate_fleet(PRESETS["fleet"].workload, replicas=4, router="least_loaded").traces
    most = max(len(trace.requests) for trace in traces)
    assert len(traces[facts["replica"]].requests) == most
    for replica, trace in enumerate(traces):
        facts, answer = ask(session, "look", replica=replica)
        assert facts["replica"] == replica
        assert decode_packet(answer.packet)[1]["decode_tokens"].tolist() == [step.num_decode_tokens for step in trace]
    assert "replica must be" in ask(session, "look", replica=4)[0]["error"]
    request = next(iter(traces[2].requests))
    model = CostModel.from_dict(PRESETS["fleet"].workload["cost_model"])
    assert ask(session, "explain", request=request)[0]["text"] == repr(explain(traces[2], request, model))
    facts, answer = run(session)
    assert "fleet" not in facts and decode_packet(answer.packet)[0]["num_steps"] == facts["num_steps"]


def test_a_fleet_and_a_single_replica_are_compared():
    session = Session()
    run_fleet(session, "round_robin", replicas=1)
    ask(session, "pin")
    facts, answer = run_fleet(session, "round_robin", replicas=2)
    assert facts["verdict"].startswith("mean time to first token ") and answer.other is None
    facts, answer = run_fleet(session, "round_robin", replicas=1)
    assert answer.packet and answer.other and "fleet" not in facts, "A is on display again"
    facts, _ = run(session, "bursts")
    run_fleet(session, "round_robin")
    ask(session, "pin")
    facts = ask(session, "run", workload=json.dumps(PRESETS["bursts"].workload))[0]
    assert facts["verdict"] == OTHER_WORKLOAD


def test_what_is_not_a_fleet_is_refused():
    session = Session()
    policy = POLICIES["Aging"]
    for values, words in (
        ({"router": "fastest"}, "router must be one of round_robin"),
        ({"router": "sticky", "replicas": 17}, "replicas must be"),
        ({"router": "sticky", "policy": policy}, "a policy in Python runs on one replica"),
        ({"router": "prefix", "config": {"enable_prefix_caching": False}}, "enable_prefix_caching must be true"),
    ):
        assert words in run_fleet(session, **values)[0]["error"]
    assert "error" not in run_fleet(session, "sticky", replicas=1, policy=policy)[0]


@pytest.mark.parametrize("command", ["run", "python"])
@pytest.mark.parametrize(
    "values, words",
    [
        ({"replicas": "2"}, "replicas must be an integer from 1 to 16, got '2'"),
        ({"replicas": 1.5}, "replicas must be an integer from 1 to 16, got 1.5"),
        ({"replicas": 17}, "replicas must be from 1 to 16, got 17"),
        ({"router": "nope"}, "router must be one of round_robin"),
        ({"replicas": 2, "router": 'a"b'}, "router must be one of round_robin"),
        ({"replicas": 2, "policy": "DecodeFirst"}, "a policy in Python runs on one replica"),
        ({"policy": None}, "policy must be a text, got None"),
        ({"workload": None}, "workload must be a text, got None"),
        ({"config": [1]}, "config must be an object, got [1]"),
        ({"config": 5}, "config must be an object, got 5"),
    ],
)
def test_values_of_a_wrong_kind_are_named_by_every_command(command, values, words):
    given = {"workload": json.dumps(PRESETS["chunked"].workload)} | values
    answer = Session().handle(json.dumps({"command": command, **given}))
    assert words in json.loads(answer.facts)["error"] and answer.packet is None


def test_a_fleet_without_requests_is_drawn_as_nothing():
    session = Session()
    answer = session.handle(json.dumps({"command": "run", "workload": '{"requests": []}', "replicas": 3}))
    facts = json.loads(answer.facts)
    assert facts["replicas"] == [0, 0, 0] and facts["fleet"] == [] and answer.packet is not None


def test_a_recording_is_not_served_by_a_fleet(tmp_path):
    session = Session()
    simulate(PRESETS["chunked"].workload).save(tmp_path / "run.jsonl.gz")
    session.handle(json.dumps({"command": "open", "name": "run"}), (tmp_path / "run.jsonl.gz").read_bytes())
    answer = session.handle(json.dumps({"command": "run", "workload": "{}", "replicas": 3}))
    assert json.loads(answer.facts)["error"].startswith("replicas is 3: a recording is of one replica")


def test_the_cell_of_a_fleet_makes_the_fleet_of_the_page():
    names = {}
    exec(python_cell(PRESETS["fleet"].workload, Side({"max_num_seqs": 4}, "", 3, "prefix")), names)
    facts, _ = run_fleet(Session(), "prefix", replicas=3, config={"max_num_seqs": 4})
    assert [len(trace.requests) for trace in names["run"].traces] == facts["replicas"]


def test_generated_requests_are_served_by_a_fleet():
    generated = {"num_requests": 9, "prompt": 30, "output": 4, "arrivals": {"process": "evenly", "rate": 50}}
    workload = {"generate": generated, "cost_model": {"fixed": 0.01}}
    facts, _ = ask(Session(), "run", workload=json.dumps(workload), replicas=3, router="round_robin")
    assert facts["replicas"] == [3, 3, 3]


def test_a_run_is_pinned_and_compared():
    session = Session()
    _, first = run(session)
    assert first.packet and not first.other
    facts, answer = ask(session, "pin")
    assert answer.packet and not answer.other
    facts, answer = run(session, config={"max_num_batched_tokens": 64})
    assert answer.packet is None, "the pinned run is on display already"
    header, _ = decode_packet(answer.other)
    expected = compare(
        simulate(PRESETS["chunked"].workload),
        simulate(PRESETS["chunked"].workload, config={"max_num_batched_tokens": 64}),
    )
    assert header["comparison"]["verdict"] == facts["verdict"] != ""
    assert [row[0] for row in header["comparison"]["rows"]] == [request.request_id for request in expected.requests]
    facts, answer = ask(session, "unpin")
    facts = ask(session, "numbers")[0] | facts
    assert answer.packet and answer.other is None and facts["summary"]["num_steps"] == header["num_steps"]


def test_requests_are_read_once_for_runs_under_other_settings(monkeypatch):
    session, read = Session(), []
    from workbench.simulation import workload

    monkeypatch.setattr(
        workload,
        "_make_prompt",
        lambda prompt, seed, make=workload._make_prompt: read.append(seed) or make(prompt, seed),
    )
    first, _ = run(session)
    changed, answer = run(session, config={"max_num_batched_tokens": 64})
    assert len(read) == len(PRESETS["chunked"].workload["requests"])
    columns = decode_packet(answer.packet)[1]
    expected = simulate(PRESETS["chunked"].workload, config={"max_num_batched_tokens": 64})
    assert columns["decode_tokens"].tolist() == [step.num_decode_tokens for step in expected]
    run(session, cost_model={"fixed": 1.0})
    assert run(session)[0]["summary"] == first["summary"] != changed["summary"]


def test_generated_requests_are_simulated():
    generated = {"poisson": {"rate": 5.0, "num_requests": 6, "prompt": 20, "output": 4, "seed": 1}}
    facts, _ = ask(Session(), "run", workload=json.dumps({"generate": generated, "cost_model": {"fixed": 0.01}}))
    assert "error" not in facts or "generate" in facts["error"]


def test_runs_of_other_requests_are_not_compared():
    session = Session()
    run(session)
    ask(session, "pin")
    for _ in range(2):
        facts, answer = run(session, "bursts")
        assert facts["verdict"] == OTHER_WORKLOAD and facts["apart"] and answer.other is None
        assert decode_packet(answer.packet)[0]["num_steps"] == len(simulate(PRESETS["bursts"].workload))
        numbers = ask(session, "numbers")[0]
        assert numbers["other"] is None and numbers["apart"]
        assert ask(session, "settle", measure="mean time to first token")[0]["error"] == OTHER_WORKLOAD
    facts, answer = run(session, config={"max_num_seqs": 2})
    assert answer.other is not None and facts["other"] and not facts["apart"], "A's workload again"
    facts = run_fleet(session, "sticky")[0]
    assert facts["verdict"] == OTHER_WORKLOAD and len(facts["fleet"]) == 1
    assert not ask(session, "pin")[0].get("apart") and ask(session, "unpin")[0]["verdict"] == ""


def test_each_run_on_display_has_another_number():
    """The view takes a packet with another number for another run, and one with the same for more of it."""
    session = Session()
    numbers = [
        decode_packet(run(session, config={"max_num_seqs": seats})[1].packet)[0]["facts"]["run"] for seats in (1, 2)
    ]
    assert numbers == [1, 2]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_recording_is_opened_forked_explained_and_closed(tmp_path, ending):
    trace = random_trace(3)
    trace.save(tmp_path / f"run{ending}")
    session = Session()
    facts, answer = ask(session, "open", (tmp_path / f"run{ending}").read_bytes(), name="run")
    assert decode_packet(answer.packet)[0]["num_steps"] == len(trace)
    assert facts["config"]["max_num_batched_tokens"] == trace.config["max_num_batched_tokens"]
    unchanged, answer = run(session, config=facts["config"])
    assert answer.other is None and unchanged["summary"]["num_steps"] == len(trace)
    changed, answer = run(session, config={"max_num_batched_tokens": 7})
    assert decode_packet(answer.other)[0]["num_steps"] == changed["other"]["num_steps"] > len(trace)
    request = next(iter(trace.requests))
    assert ask(session, "explain", request=request)[0]["text"].startswith(request)
    ask(session, "close")
    assert run(session)[0]["summary"]["num_steps"] == len(simulate(PRESETS["chunked"].workload))


def test_a_part_of_a_recording_says_that_it_is_one_and_that_it_cannot_be_simulated(tmp_path):
    trace, session = random_trace(3), Session()
    for part, first in ((trace[2:5], 2), (trace[:5], 0)):
        part.save(tmp_path / "part.jsonl")
        facts, _ = ask(session, "open", (tmp_path / "part.jsonl").read_bytes(), name="part")
        assert facts["end"] == "part"
        changed, _ = ask(session, "run", workload="{}", config=facts["config"] | {"max_num_batched_tokens": 7})
        assert ("error" in changed) == bool(facts["refusal"]) == bool(first), "a refusal comes before anything is moved"
        assert not first or changed["error"].startswith(facts["refusal"])


def test_the_numbers_of_two_runs_have_one_unit():
    """A recording in seconds and its fork, whose times cannot be predicted: both are in steps."""
    recording = ROOT / "notebooks/data/vllm_served.jsonl.gz"
    session = Session()
    facts, _ = ask(session, "open", recording.read_bytes(), name=recording.name)
    assert ask(session, "numbers")[0]["summary"]["unit"] == "s"
    facts, _ = run(session, config={**facts["config"], "num_blocks": 64})
    assert facts["summary"]["unit"] == facts["other"]["unit"] == "steps"
    trace = Trace.load(recording)
    first = {}
    for record in trace:
        for chunk in record.chunks:
            if chunk.sampled is not None:
                first.setdefault(chunk.request_id, record.step + 1)
    waits = [step - trace.requests[name].arrival_step for name, step in first.items()]
    assert facts["summary"]["ttft"]["mean"] == pytest.approx(sum(waits) / len(waits))
    assert facts["summary"]["duration"] == len(trace)


def test_latencies_in_steps_of_two_budgets_are_not_set_beside_each_other():
    """The bar of numbers has latencies of two runs exactly if *Compare* has them."""
    recording = ROOT / "notebooks/data/vllm_served.jsonl.gz"
    session = Session()
    before = ask(session, "open", recording.read_bytes(), name=recording.name)[0]["config"]
    for change, unit in (
        ({"max_num_batched_tokens": 512}, ""),
        ({"max_num_seqs": 2}, ""),
        ({"num_blocks": 64}, "steps"),
    ):
        facts, answer = run(session, config={**before, **change})
        assert facts["other"]["unit"] == unit and facts["summary"]["unit"] == (unit or "s"), "A keeps its own times"
        if not unit:
            assert facts["summary"]["ttft"]["mean"] == Trace.load(recording).metrics().summary.ttft.mean
        compared = decode_packet(answer.other)[0]["comparison"]
        assert compared["unit"] == "steps" and (compared["mean"][0] is None) == (not unit)
        assert facts["summary"]["num_steps"] == len(Trace.load(recording))


def test_a_recording_is_explained_with_a_fit_of_its_steps():
    recording = ROOT / "notebooks/data/vllm_served.jsonl.gz"
    session = Session()
    facts, _ = ask(session, "open", recording.read_bytes(), name=recording.name)
    request = facts["requests"][-1]
    assert ask(session, "explain", request=request)[0]["text"] == repr(Trace.load(recording).explain(request))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"not a trace\n", "first line"),
        (b"\x1f\x8b\x08\x00broken", "run.jsonl"),
        (b"{}\n", "first line"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_by_its_name(content, words):
    facts, answer = ask(Session(), "open", content, name="run.jsonl")
    assert words in facts["error"] and "/tmp" not in facts["error"] and answer.packet is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workload": "{"}, "workload, line 1, column 2"),
        ({"workload": "[]"}, "workload must be an object"),
        ({"workload": '{"requests": [{"id": "a"}]}'}, "requests[0].prompt"),
        ({"workload": '{"requests": [], "speed": 1}'}, "'speed'"),
        ({"config": {"max_num_seqs": 0}}, "max_num_seqs"),
        ({"policy": "class P(SchedulingPolicy)\n    pass"}, "your policy, line 1"),
        ({"policy": "x = 1\n1 / 0"}, "your policy, line 2: ZeroDivisionError"),
        ({"policy": "x = 1"}, "defines no subclass of SchedulingPolicy"),
        ({"policy": "Nobody"}, "policy must be one of"),
    ],
)
def test_a_mistake_is_answered_with_its_place(values, words):
    session = Session()
    given = {"workload": json.dumps(PRESETS["chunked"].workload), "config": {}, "policy": "", **values}
    facts, answer = ask(session, "run", **given)
    assert words in facts["error"] and answer.packet is None
    assert "error" not in run(session)[0], "the session takes the next command after a mistake"


def test_a_policy_that_fails_while_it_runs_is_reported_once_and_vllms_rule_is_used():
    source = "class P(SchedulingPolicy):\n    def waiting_order(self, view):\n        return view.nothing"
    facts, _ = run(Session(), "own-policy", policy=source)
    assert facts["summary"]["num_steps"] == len(simulate(PRESETS["own-policy"].workload))
    (note,) = facts["notes"]
    assert note.startswith("your policy, line 3: P().waiting_order: AttributeError: ")
    assert note.count("nothing") == 1 and note.endswith("; vLLM's rule is used instead")


def test_a_misspelt_method_is_named_with_its_line():
    source = "class P(SchedulingPolicy):\n    def waiting_odrer(self, view):\n        return view.waiting"
    with pytest.raises(ValueError, match=r"line 1: P\.waiting_odrer is not .* \(did you mean waiting_order\?\)"):
        read_policy(source)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_the_page_decides_differently(name):
    preset = "preemption" if name == "FewestComputed" else "own-policy"
    policy = read_policy(POLICIES[name])
    assert type(policy).__name__ == name
    workload = PRESETS[preset].workload
    assert compare(simulate(workload), simulate(workload, policy=policy)).first_divergence is not None


@pytest.mark.parametrize("policy", ["", "DecodeFirst", POLICIES["Aging"]], ids=["none", "named", "source"])
def test_the_cell_does_what_the_page_does(policy):
    config = {"max_num_batched_tokens": 96}
    source = python_cell(PRESETS["bursts"].workload, Side(config, policy))
    names = {}
    exec(source.replace("trace.watch()", ""), names)
    facts, answer = run(Session(), "bursts", config, policy)
    assert len(names["trace"]) == facts["summary"]["num_steps"]
    chunks = Counter(chunk.request_id for step in names["trace"] for chunk in step.chunks)
    header, columns = decode_packet(answer.packet)
    ids = [request["id"] for request in header["requests"]]
    assert Counter(ids[index] for index in columns["chunk.request"].tolist()) == chunks


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_cell_has_the_pinned_run_too(replicas):
    """Both runs of the page, under the policies that each had, although both have one name."""
    settings = [{"config": {"max_num_seqs": 3}, "replicas": replicas}, {"replicas": replicas, "router": "least_loaded"}]
    if replicas == 1:
        last = POLICIES["ShortestFirst"].replace("key=view.num_left", "key=lambda each: -view.num_left(each)")
        assert last != POLICIES["ShortestFirst"]
        settings[0]["policy"], settings[1]["policy"] = POLICIES["ShortestFirst"], last
    session, workload = Session(), json.dumps(PRESETS["own-policy"].workload)
    message = {"command": "python", "workload": workload, **settings[1], "pinned": settings[0]}
    source, names, printed = json.loads(session.handle(json.dumps(message)).facts)["text"], {}, []
    exec(source.replace("b.watch(other=a)", "b"), names | {"print": printed.append}, names)
    for name, side in zip("ab", settings):
        session.handle(json.dumps({"command": "run", "workload": workload, **side}))
        there = [digest(trace) for trace in session._newest.traces]
        here = [names[name]] if replicas == 1 else names[name].traces
        assert [digest(trace) for trace in here] == there
    assert [digest(t) for t in ([names["a"]] if replicas == 1 else names["a"].traces)] != there, "the control"
    assert ("compare(a, b)" in source) == (replicas == 1) and len(printed) == 1


def digest(trace):
    """The chunks of all steps."""
    return [[(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in record.chunks] for record in trace]


def test_the_archive_of_the_page_needs_msgspec_alone(tmp_path):
    """It holds every module that a session imports, and none of them needs what a page has not."""
    (tmp_path / "workbench.zip").write_bytes(package_archive())
    program = """
import sys
from pathlib import Path
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "tqdm", "mlx", "anywidget", "panel", "IPython", "multiprocessing"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
import json
from workbench.analysis.explain import explain
from workbench.apps.playground.presets import PRESETS
from workbench.apps.playground.session import Session
session = Session()
for preset in PRESETS.values():
    fleet = {"replicas": preset.replicas, "router": "cache_aware"}
    answer = session.handle(json.dumps({"command": "run", "workload": json.dumps(preset.workload), **fleet}))
    assert answer.packet or answer.other, answer.facts
    session.handle('{"command": "pin"}')
request = json.loads(answer.facts)["requests"][0]
assert "text" in json.loads(session.handle(json.dumps({"command": "explain", "request": request})).facts)
assert sys.modules["workbench"].__file__.startswith(sys.argv[1])
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, tmp_path / "workbench.zip"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={"PATH": "/usr/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert package_archive() == package_archive()
