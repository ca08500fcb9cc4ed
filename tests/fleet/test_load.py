"""Other loads: copies are other users, who come at other times, with their own prompts, and wait for their answers."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from closed_loops import COST, conversations, run
from private_traces import without_tokens
from tiers import examples

from workbench.analysis.fleet.demand import Demand
from workbench.analysis.fleet.load import CopiedTokens, scale_load
from workbench.analysis.fleet.load_curve import load_curve
from workbench.analysis.fleet.sizing import compare, size
from workbench.apps.cli import main
from workbench.simulation.arrivals import timed_arrival
from workbench.simulation.costs.cost_model import CostModel

SYSTEM = list(range(100, 164))


def users(rng, count=60, rate=3.0):
    """Questions of different users behind one system prompt."""
    arrivals, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        prompt = SYSTEM + [1000 + number] * rng.randint(10, 60)
        arrivals.append(timed_arrival(f"r{number}", prompt, rng.randint(2, 20), now))
    return arrivals


@pytest.mark.parametrize("seed", range(examples(8)))
@pytest.mark.parametrize("load", [1.5, 2.0, 3.0])
def test_copies_come_at_other_times_with_their_own_prompts(seed, load):
    given = users(random.Random(f"copies {seed}"))
    scaled = scale_load(given, load, seed=seed)
    times = [arrival.arrives_at for arrival in scaled]
    assert len(scaled) == pytest.approx(load * len(given), rel=0.15) and times == sorted(times)
    assert len(set(times)) == len(times), "nobody acts in step with somebody else"
    assert given[0].arrives_at <= times[0] and times[-1] <= given[-1].arrives_at
    own = {}
    for arrival in scaled:
        assert list(arrival.prompt_token_ids[:64]) == SYSTEM
        own.setdefault(arrival.prompt_token_ids[-1], []).append(arrival.request_id)
    assert all(len(names) == 1 for names in own.values()), "a question is of one user"
    first_half = sum(time < given[-1].arrives_at / 2 for time in times) / len(times)
    recorded = sum(each.arrives_at < given[-1].arrives_at / 2 for each in given) / len(given)
    assert first_half == pytest.approx(recorded, abs=0.2)


def test_a_larger_load_has_the_users_of_a_smaller_one():
    given = users(random.Random("nested"))
    before = set()
    for load in (1.0, 1.3, 1.9, 2.0, 2.1, 3.5):
        now = {(each.request_id, each.arrives_at) for each in scale_load(given, load)}
        assert before <= now
        before = now


def test_a_burst_comes_again_as_a_burst():
    given = [timed_arrival(f"r{i}", [i] * 40, 5, 2.0 * i) for i in range(30)]
    given += [timed_arrival(f"b{i}", [99 + i] * 40, 5, 20.5) for i in range(8)]
    copies = [arrival for arrival in scale_load(given, 2.0) if arrival.copy_of.startswith("b")]
    assert len(copies) == 8 and len({arrival.arrives_at for arrival in copies}) == 1
    assert copies[0].arrives_at != 20.5


@pytest.mark.parametrize("seed", range(examples(6)))
def test_closed_loops_are_kept_by_copies(seed, tmp_path):
    arrivals = conversations(random.Random(f"fleet {seed}"), count=8)
    trace = without_tokens(run(arrivals))
    trace.save(tmp_path / "run.jsonl")
    demand = Demand.read(tmp_path / "run.jsonl", cost_from=run(arrivals), load=2.0)
    fleet = demand.run(2, "round_robin")
    requests = {name.partition("/")[2]: each for name, each in fleet.metrics().requests.items()}
    assert len(requests) == 2 * len(arrivals)
    after = {each.request_id: each.after for each in demand.arrivals if each.after}
    assert len(after) == 2 * sum(bool(each.after) for each in arrivals)
    ends = {name: fleet.choices[name].time + each.e2e.seconds for name, each in requests.items()}
    assert all(fleet.choices[name].time >= ends[other] - 1e-9 for name, other in after.items())
    hits = {name: each.num_cached_tokens for name, each in requests.items()}
    turns = [name for name in after if name.endswith("/2")]
    assert sum(hits[name] for name in turns) == pytest.approx(sum(hits[n.removesuffix("/2")] for n in turns), rel=0.5)


def test_the_answers_of_copies_are_like_no_other():
    given = users(random.Random("tokens"), count=3)
    scaled = scale_load(given, 2.0)
    sample = CopiedTokens(lambda request: 7 + request.num_tokens, scaled)
    tokens = {each.request_id: sample(each.to_request()) for each in scaled}
    assert tokens["r0"] == 7 + len(given[0].prompt_token_ids) and tokens["r0/2"] - tokens["r0"] == 2**40


@pytest.fixture(scope="module")
def demand(tmp_path_factory):
    """A recording of noisy steps."""
    rng = random.Random("noisy")

    class Noisy:
        def step_seconds(self, chunks):
            return COST.step_seconds(chunks) * rng.uniform(0.8, 1.25)

    path = tmp_path_factory.mktemp("noisy") / "run.jsonl"
    run(users(random.Random("noise"), count=90, rate=10.0), cost=Noisy()).save(path)
    return path


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("loads", [(1.0, 1.9, 3.0), (2.0, 2.1, 4.0)], ids=str)
def test_size_and_compare_give_one_answer_over_all_loads(demand, loads):
    slo, needed = "ttft_p99=150ms", []
    for load in loads:
        read = Demand.read(demand, load=load)
        answer = size(read, slo).best
        table = compare(read, [answer.replicas, max(1, answer.replicas - 1)], ["round_robin"], slo, jobs=1)
        assert table.rows[0] == answer and table.best == answer
        assert answer.runs > 1 and answer.low["ttft_p99"] < answer.values["ttft_p99"] < answer.high["ttft_p99"]
        needed.append(answer.replicas)
    assert needed == sorted(needed), needed


def test_routers_differ_at_twice_the_load(demand):
    routers = ["round_robin", "least_loaded", "random", "sticky", "prefix"]
    rows = compare(Demand.read(demand, load=2.0), [2], routers, jobs=1).rows
    assert len({row.values["ttft_p99"] for row in rows}) == len(routers)


def test_a_curve_never_falls_and_says_why_not(demand, capsys):
    curve = load_curve(Demand.read(demand), [2.0, 1.0, 3.0], "ttft_p99=150ms")
    assert [point.load for point in curve.points] == [1.0, 2.0, 3.0]
    assert all(one.replicas <= other.replicas for one, other in pairwise(curve.points))
    assert "by chance" not in repr(curve)
    lucky = curve.points[2].row
    fallen = type(curve)(
        (*curve.points[:2], type(curve.points[0])(3.0, lucky.replicas + 2, lucky)), curve.slo, curve.source
    )
    assert f"at 3x {lucky.replicas} replicas met the target too, by chance" in repr(fallen)
    options = ["--slo", "ttft_p99=150ms", "--load", "1x,2x"]
    assert main(["fleet", "size", str(demand), *options]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:4]] == ["load", "1x", "2x"]
    assert main(["fleet", "compare", str(demand), "--load", "1x,2x"]) == 2
    assert "--load must be a multiple > 0 such as 2x or 0.5x, got '1x,2x'" in capsys.readouterr().err


def test_each_load_without_an_answer_has_its_closest_layout(demand):
    curve = load_curve(Demand.read(demand), [1.0, 2.0], "ttft_p99=1ms", max_replicas=2)
    said = repr(curve).splitlines()
    for place, load in ((1, 1), (2, 2)):
        table = size(Demand.read(demand).times(load), "ttft_p99=1ms", max_replicas=2)
        row = min(table.rows, key=lambda row: row.score)
        line = next(line for line in said if line.startswith(f"at {load}x"))
        assert line.endswith(f"closest: {row.replicas} replicas, whose worst value is {row.score:.3g} times its limit")
        assert said[place].split()[1] != "-"
        alone = curve.points[place - 1].alone
        words = (
            "a replica for each request is no better" if row.score <= alone.score else "even with a replica for each "
        )
        assert line.startswith(f"at {load}x none of 1, 2 replicas meets the target, and no number can: {words}")
    first = curve.points[0]
    better = replace(first, closest=replace(first.closest, score=first.alone.score * 0.9))
    [line] = [line for line in repr(replace(curve, points=(better,))).splitlines() if line.startswith("at 1x")]
    assert "and no number can: a replica for each request is no better; closest: " in line and "missed (" not in line
    alone = max(each.values["ttft_p99"] for each in (point.alone for point in curve.points))
    busy = load_curve(Demand.read(demand), [3.0], {"ttft_p99": 1.3 * alone}, max_replicas=1)
    [line] = [line for line in repr(busy).splitlines() if line.startswith("at 3x")]
    assert line.startswith("at 3x 1 replica misses the target; closest: 1 replica"), "the control: more would"


def test_without_noise_and_at_the_same_load_a_run_is_exact():
    workload = {
        "cost_model": {"fixed": 0.01},
        "requests": [{"id": f"r{i}", "prompt": {"len": 9}, "arrival_time": i / 9} for i in range(20)],
    }
    assert Demand.read(workload).num_draws == 1 and isinstance(Demand.read(workload).cost_model, CostModel)
    assert Demand.read(workload, load=2.0).num_draws > 1
