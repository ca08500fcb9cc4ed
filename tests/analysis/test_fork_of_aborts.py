"""Requests that were aborted are aborted again, as long after their arrival, in every simulation of a recorded run."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest

from workbench import EngineConfig, simulate
from workbench.analysis.fleet.simulate import run_fleet
from workbench.analysis.fork import Past, fork, recorded_config, recorded_requests
from workbench.analysis.rerun import RecordedRun
from workbench.analysis.values import values_of
from workbench.simulation.arrivals import timed_arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.simulate import next_token, simulate_requests

COST = CostModel(fixed=0.01, per_row=1e-3)
STATES = ("waits", "prefills", "decodes", "was preempted")


def states(trace):
    """The steps after which each request was in each state, by request and state."""
    found, admitted = defaultdict(lambda: defaultdict(list)), set()
    for record in trace:
        admitted.update(record.admitted)
        arms = {chunk.request_id: "prefills" if chunk.is_partial_prefill else "decodes" for chunk in record.chunks}
        arms |= {name: "was preempted" if name in admitted else "waits" for name in record.waiting}
        for name, state in arms.items():
            found[name][state].append(record.step)
    return found


def run_with_aborts(seed, *, timed=True, asynchronous=False):
    """A random run of which requests are aborted in every state, and the states that they were in."""
    random = Random(seed)
    config = {"max_num_batched_tokens": random.choice([16, 64]), "num_blocks": random.choice([13, 16, 24])}
    config |= {"block_size": 4, "max_num_seqs": random.choice([2, 4]), "async_scheduling": asynchronous}
    config["num_speculative_tokens"] = random.choice([0, 0, 2])
    requests, time = [], 0.0
    for index in range(14):
        time += random.expovariate(20)
        request = {"id": f"r{index}", "prompt": {"len": random.randint(1, 32)}, "max_tokens": random.randint(1, 14)}
        request["accepts"] = [random.randint(0, 2)]
        requests.append(request | ({"arrival_time": time} if timed else {"arrival_step": round(time / 0.01)}))
    workload, cost = {"config": config, "requests": requests}, COST if timed else None
    found = states(simulate(workload, cost_model=cost))
    for request in random.sample(requests, 5):
        its = found[request["id"]]
        if its:
            rare = [state for state in STATES if state in its][-1]
            request["abort_step"] = random.choice(its[random.choice([rare, random.choice(list(its))])]) + 1
    trace = simulate(workload, cost_model=cost)
    its = states(trace)
    before = {(name, record.step - 1) for record in trace for name in record.aborted}
    return trace, {state for name, step in before for state in STATES if step in its[name][state]}


def schedule(trace):
    return [(record.arrived, record.aborted, record.chunks, record.finished) for record in trace]


def ends(trace):
    """The number of tokens and the end of each request, as the steps tell them."""
    found = {name: [0, ""] for name in trace.requests}
    for record in trace:
        for chunk in record.chunks:
            found[chunk.request_id][0] += len(chunk.accepted)
        for name in record.aborted:
            found[name][1] = "abort"
        for name, reason in record.finish_reasons.items():
            found[name][1] = reason
    return found


def test_a_run_with_exact_costs_is_the_recorded_one():
    """Step for step with records, in values without them, from the middle on, and behind a router."""
    met = set()
    for seed in range(30):
        trace, states_of_aborts = run_with_aborts(seed)
        met |= states_of_aborts
        assert schedule(fork(trace, cost_model=COST)) == schedule(trace), seed
        middle = Random(seed).randrange(1, len(trace))
        assert [record.aborted for record in fork(trace, middle, cost_model=COST)][:middle] == [
            record.aborted for record in trace
        ][:middle]
        values = RecordedRun.of(trace, Past(trace), COST).outcome(recorded_config(trace)).values
        assert values == pytest.approx(values_of(trace), rel=1e-9), seed
        arrivals, sample_token = recorded_requests(trace, open_loop=True)
        fleet = run_fleet(arrivals, [recorded_config(trace)], [COST], sample_token=sample_token)
        assert ends(fleet.traces[0]) == ends(trace), seed
    assert met == set(STATES)


def test_an_asynchronous_run_serves_the_same_requests_as_well():
    """Two looks of its scheduler at its requests may come at one moment: then an abort may be seen a step early."""
    sums = {name: [0.0, 0.0] for name in ("ttft_mean", "itl_mean", "e2e_mean")}
    for seed in range(30):
        trace, _ = run_with_aborts(seed, asynchronous=True)
        both = trace, fork(trace, cost_model=COST)
        served, now = ([name for name, (count, _) in ends(run).items() if count] for run in both)
        assert now == served, seed
        for name in sums:
            sums[name] = [total + values_of(run)[name] for total, run in zip(sums[name], both)]
    for recorded, simulated in sums.values():
        assert simulated == pytest.approx(recorded, rel=0.01)


@pytest.mark.parametrize("changes", [{"max_num_seqs": 1}, {"max_num_seqs": 8, "num_blocks": 200}])
def test_under_another_setting_requests_are_aborted_as_long_after_their_arrival(changes):
    aborted = served = 0
    for seed in range(20):
        trace, _ = run_with_aborts(seed)
        forked = fork(trace, cost_model=COST, **changes)
        patience = {}  # the abort came after the step before was scheduled, and before this one was
        for record, before in zip(trace[1:], trace):
            patience |= dict.fromkeys(record.aborted, (before.time, record.time))
        for record, before in zip(forked[1:], forked):
            for name in record.aborted:
                earliest, latest = (time - trace.requests[name].arrival_time for time in patience[name])
                arrived = forked.requests[name].arrival_time
                assert before.time <= arrived + latest and record.time >= arrived + earliest, (seed, name)
                aborted += 1
            for name in set(record.finished) & patience.keys():
                arrived, recorded = forked.requests[name].arrival_time, trace.requests[name].arrival_time
                assert record.time <= arrived + patience[name][1] - recorded, (seed, name)
                served += 1
        assert {name for record in forked for name in record.aborted} <= patience.keys()
    assert aborted > 10 and served > (10 if "num_blocks" in changes else 0)


def test_without_a_clock_a_follow_up_is_aborted_as_many_steps_after_its_arrival():
    first, second = (replace(timed_arrival(name, [1] * 8, 9, 0.0), arrives_at=None) for name in ("a", "b"))
    second = replace(second, after="a", think_steps=2, arrival_step=11, abort_step=15)
    for num_tokens in (3, 9, 30):
        first = replace(first, sampling=replace(first.sampling, max_tokens=num_tokens))
        trace = simulate_requests(EngineConfig(), [first, second], next_token)
        arrival = next(record.step for record in trace if "b" in record.arrived)
        abort = next(record.step for record in trace if "b" in record.aborted)
        assert (arrival, abort) == (num_tokens + 2, num_tokens + 6)


def test_a_request_that_can_never_run_waits_for_its_abort_on_the_clock():
    """Nothing else happens meanwhile, and the request behind it runs when it has gone."""
    config = EngineConfig(num_blocks=8, block_size=4, max_model_len=200)
    large = replace(timed_arrival("large", [1] * 100, 2, 1.0), abort_step=0, timeout=5.0)
    trace = simulate_requests(config, [large, timed_arrival("small", [2] * 4, 2, 2.0)], next_token, cost_model=COST)
    assert trace.end == "done"
    (abort,) = [record for record in trace if record.aborted]
    assert abort.time == pytest.approx(6.0) and abort.admitted == ("small",)
    late = replace(large, timeout=None, abort_step=None)
    trace = simulate_requests(config, [late], next_token, cost_model=COST, as_vllm=True)
    assert trace.end == "stuck"


def test_routers_that_are_compared_in_steps_abort_at_the_recorded_steps():
    for seed in range(10):
        trace, _ = run_with_aborts(seed, timed=False)
        past = Past(trace, open_loop=True)
        arrivals = [past.stepped_arrival(info) for info in trace.requests.values()]
        cost = CostModel(fixed=1.0)
        fleet = run_fleet(arrivals, [recorded_config(trace)], [cost], sample_token=past.sample_token)
        assert ends(fleet.traces[0]) == ends(trace), seed
