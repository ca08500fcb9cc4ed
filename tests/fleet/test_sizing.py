"""Sizes, comparisons, other loads, and fleets at scale: against plain fleet simulations."""

import json
import pickle
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
from msgspec.structs import replace

from workbench import EngineConfig, Trace, simulate, simulate_fleet
from workbench.analysis.fleet.at_scale import simulate_fleet_at_scale
from workbench.analysis.fleet.demand import Demand
from workbench.analysis.fleet.load import scale_load
from workbench.analysis.fleet.load_curve import load_curve
from workbench.analysis.fleet.sizing import compare, size
from workbench.analysis.values import values_of
from workbench.apps.cli import main
from workbench.base.progress import _NoBar
from workbench.base.text import duration
from workbench.simulation.arrivals import read_generated, timed_arrival
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.summary import arrival_rate

GENERATED = {
    "num_requests": 150,
    "seed": 1,
    "prompt": {"lognormal": {"median": 200, "sigma": 0.6}},
    "output": {"uniform": [10, 40]},
    "arrivals": {"process": "poisson", "rate": 40},
}
WORKLOAD = {
    "config": {"max_num_batched_tokens": 512, "num_blocks": 800, "block_size": 16, "max_num_seqs": 32},
    "cost_model": {"fixed": 0.005, "per_row": 0.0002, "per_sequence": 0.0005},
    "generate": GENERATED,
}
ARRIVALS = partial(read_generated, GENERATED)
CONFIG, MODEL = EngineConfig.from_dict(WORKLOAD["config"]), CostModel.from_dict(WORKLOAD["cost_model"])


def test_the_size_is_the_smallest_that_meets_the_target():
    demand = Demand.read(WORKLOAD)
    table = size(demand, "ttft_p99=500ms,tpot_p99=60ms")
    assert table.best is not None and table.best.replicas > 1
    ttft = {
        count: simulate_fleet(WORKLOAD, replicas=count).metrics().summary.ttft.p99
        for count in (table.best.replicas - 1, table.best.replicas)
    }
    assert ttft[table.best.replicas] == pytest.approx(table.best.values["ttft_p99"]) and table.best.meets
    below = next(row for row in table.rows if row.replicas == table.best.replicas - 1)
    assert not below.meets and below.goodput < table.best.goodput
    assert f"{table.best.replicas} replicas with round_robin meet" in repr(table) and "cost_model" in repr(table)


def test_what_no_fleet_can_reach_says_what_comes_closest():
    table = size(Demand.read(WORKLOAD), "ttft_p99=1us")
    assert table.best is None and len(table.rows) < 10  # it gives up when more replicas change nothing
    assert "no layout meets" in repr(table)


def test_throughput_is_a_minimum():
    table = size(Demand.read(WORKLOAD), "ttft_p99=900s,output_throughput=1")
    assert table.best is not None and table.best.values["output_throughput"] >= 1
    assert "meets ttft_p99 <= 900 s, output_throughput >= 1 tokens/s" in repr(table)


def test_a_recording_is_served_again_by_several_replicas(tmp_path):
    trace = simulate(WORKLOAD | {"generate": GENERATED | {"num_requests": 60}})
    trace.save(tmp_path / "run.jsonl")
    table = compare(Demand.read(tmp_path / "run.jsonl"), [1, 2], ["round_robin"], jobs=1)
    recorded = trace.metrics().summary
    assert table.rows[0].values["ttft_mean"] == pytest.approx(recorded.ttft.mean, rel=0.02)
    assert table.rows[1].values["ttft_mean"] < 0.9 * table.rows[0].values["ttft_mean"]
    assert "a fit to simulation" in repr(table)


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0, 2.5])
def test_loads(load):
    given = [timed_arrival(f"r{index}", [7] * 10 + [index], 4, index / 10) for index in range(400)]
    more = scale_load(given, load)
    assert len(more) == pytest.approx(400 * load, rel=0.1) and len({arrival.request_id for arrival in more}) == len(
        more
    )
    users = {tuple(arrival.prompt_token_ids[:10]) for arrival in more}
    assert len(users) == -(-load // 1)  # the prompts of repeated requests share among themselves only
    faster = scale_load(given, load, "compressed")
    assert [arrival.arrives_at for arrival in faster] == [arrival.arrives_at / load for arrival in given]


@pytest.mark.parametrize("router", ["round_robin", "consistent_hash", "least_loaded", "cache_aware"])
def test_a_summary_is_that_of_the_traces(router):
    run = simulate_fleet(WORKLOAD, replicas=3, router=router)
    summary = simulate_fleet_at_scale(ARRIVALS, CONFIG, MODEL, replicas=3, router=router)
    for trace, replica in zip(run.traces, summary.replicas):
        found = trace.metrics().summary
        assert (found.num_steps, found.num_requests, found.num_output_tokens) == (
            replica.num_steps,
            replica.num_requests,
            replica.num_output_tokens,
        )
        assert replica.ttft.total == pytest.approx(found.ttft.mean * found.ttft.count)
    assert summary.total("num_finished") == 150
    assert summary.latency("ttft").distribution().p99 == pytest.approx(run.metrics().summary.ttft.p99, rel=0.06)


def test_workers_do_not_change_a_fleet():
    alone = simulate_fleet_at_scale(ARRIVALS, CONFIG, MODEL, replicas=5, router="consistent_hash")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for parts in (2, 3):
            spread = simulate_fleet_at_scale(
                ARRIVALS, CONFIG, MODEL, replicas=5, router="consistent_hash", executor=pool, parts=parts
            )
            assert spread.to_row() == alone.to_row()
            assert [one.to_row() for one in spread.replicas] == [one.to_row() for one in alone.replicas]
        with pytest.raises(ValueError, match="looks at replicas"):
            simulate_fleet_at_scale(ARRIVALS, CONFIG, MODEL, replicas=5, router="prefix", executor=pool)


def test_the_command_line(tmp_path, capsys):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD))
    assert main(["fleet", "size", str(path), "--slo", "ttft_p99=500ms", "--load", "0.5x", "--jobs", "1"]) == 0
    assert re.search(r"round_robin meets? ttft_p99 <= 500 ms\n", capsys.readouterr().out)
    out = tmp_path / "fleet"
    assert main(["fleet", "run", str(path), "--router", "prefix", "--out", str(out), "--plot", str(out) + ".svg"]) == 0
    assert "\nprefix, 2 replicas: 150 of 150 requests" in capsys.readouterr().out and len(list(out.iterdir())) == 2
    assert main(["fleet", "size", str(path), "--slo", "ttft_p99=1us", "--max-replicas", "2"]) == 1
    assert "no layout meets" in capsys.readouterr().out
    plot, rows = tmp_path / "front.svg", tmp_path / "rows.jsonl"
    files = ["--plot", str(plot), "--rows", str(rows), "--jobs", "1"]
    assert main(["fleet", "compare", str(path), "--replicas", "1,2", "--routers", "vllm,sticky", *files]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.strip(" *").split()[0] for line in out[2:6]] == ["vllm", "sticky", "vllm", "sticky"]
    assert plot.read_text().startswith("<svg") and len(rows.read_text().splitlines()) == 4
    for words, message in (
        (["size", str(path), "--slo", "ttft_p99=1s", "--load", "twice"], "--load must be a multiple"),
        (["compare", str(path), "--replicas", "some"], "--replicas must be numbers"),
        (["size", str(path), "--slo", "speed=1s"], "the names are"),
    ):
        assert main(["fleet", *words]) == 2
        assert message in capsys.readouterr().err
    path.write_text(json.dumps({"requests": [{"id": "a", "prompt": {"len": 4}}]}))
    assert main(["fleet", "compare", str(path)]) == 2
    assert "nothing says how long a step takes" in capsys.readouterr().err


def test_routers_that_read_caches_are_left_out_where_there_are_none(tmp_path, capsys, monkeypatch):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD))
    command = ["fleet", "compare", str(path), "--jobs", "1", "--set", "enable_prefix_caching=false"]
    assert main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in ("prefix", "score"):
        assert f"left out: router {name} reads prefix caches" in said and f" {name} 2 " not in said
    assert "goodput" not in said, "it has no meaning without a target"
    monkeypatch.setattr(Demand, "run", lambda *given: pytest.fail("nothing may be simulated before"))
    for words in (["compare", "--routers", "random,score"], ["run", "--router", "score"]):
        assert main(["fleet", words[0], *command[2:3], *words[1:], *command[-2:]]) == 2
        reason = " ".join(capsys.readouterr().err.split())
        assert "router score reads prefix caches" in reason and "--set enable_prefix_caching=true" in reason
    with pytest.raises(ValueError, match="router score reads"):
        compare(Demand.read(WORKLOAD, config={"enable_prefix_caching": False}), [1], ["random", "score"], jobs=1)
    assert main(["fleet", "compare", str(path), "--routers", "cache"]) == 2
    reason = " ".join(capsys.readouterr().err.split())
    assert "did you mean cache_aware?" in reason and "a Router" not in reason


def test_a_comparison_continues_from_its_rows(tmp_path, monkeypatch):
    demand, out = Demand.read(WORKLOAD), tmp_path / "rows.jsonl"
    expected = compare(demand, [1, 2], ["round_robin", "prefix"], "ttft_p99=1s", jobs=1)
    ran = []
    run = Demand.run
    monkeypatch.setattr(Demand, "run", lambda self, *given: ran.append(given) or run(self, *given))
    compare(demand, [1], ["round_robin"], "ttft_p99=1s", out=out, jobs=1)
    with out.open("a") as file:
        file.write('{"demand": "cut o')
    out.write_text(out.read_text() + "\n")
    table = compare(demand, [1, 2], ["round_robin", "prefix"], "ttft_p99=1s", out=out, jobs=1)
    assert table == expected and len(ran) == 4
    compare(demand, [1, 2], ["round_robin", "prefix"], "ttft_p99=1s", out=out)
    assert len(ran) == 4
    compare(Demand.read(WORKLOAD, load=1.5), [1], ["round_robin"], "ttft_p99=1s", out=out, jobs=1)  # another demand
    compare(demand, [1], ["round_robin"], "ttft_p99=2s", out=out, jobs=1)  # another target
    assert len(ran) == 6


def test_layouts_are_spread_over_any_executor(tmp_path):
    """Threads, processes by default, and a recording and sessions, whose demand has to reach the workers."""
    demand, layouts = Demand.read(WORKLOAD), ([1, 2], ["round_robin", "prefix"])
    expected = compare(demand, *layouts, "ttft_p99=1s", jobs=1)
    with ThreadPoolExecutor(2) as pool:
        assert compare(demand, *layouts, "ttft_p99=1s", executor=pool) == expected
    assert compare(demand, *layouts, "ttft_p99=1s", jobs=2) == expected
    simulate(WORKLOAD | {"generate": GENERATED | {"num_requests": 20}}).save(tmp_path / "run.jsonl")
    agents = {"count": 5, "turns": 2, "input": 50, "output": 20}
    closed = {name: value for name, value in WORKLOAD.items() if name != "generate"} | {"sessions": agents}
    for source in (tmp_path / "run.jsonl", closed):
        demand = Demand.read(source)
        again = pickle.loads(pickle.dumps(demand))
        assert compare(again, [2], ["sticky"], jobs=1) == compare(demand, [2], ["sticky"], jobs=1)


def test_ctrl_c_ends_a_comparison_with_what_is_known(monkeypatch):
    demand, run = Demand.read(WORKLOAD), Demand.run
    told = []

    def interrupted(self, replicas, router, *others):
        if router == "prefix":
            raise KeyboardInterrupt
        return run(self, replicas, router, *others)

    monkeypatch.setattr(Demand, "run", interrupted)
    monkeypatch.setattr(_NoBar, "set_postfix_str", lambda self, text: told.append(text))
    table = compare(demand, [1], ["round_robin", "sticky", "prefix"], "ttft_p99=1s", jobs=1)
    assert [row.router for row in table.rows] == ["round_robin", "sticky"]
    assert "interrupted: 2 of 3 layouts were simulated" in repr(table)
    best = min(table.rows, key=lambda row: row.score)
    assert told[-1] == f"best so far: 1 with {best.router}, {best.score:.2f} of the limit" and len(told) == 2
    with pytest.raises(KeyboardInterrupt):
        compare(demand, [1], ["prefix"], jobs=1)


def test_no_layout_on_the_front_is_beaten():
    table = compare(Demand.read(WORKLOAD), [1, 2, 3], ["round_robin", "prefix", "sticky"], jobs=1)
    rows = table.pareto()
    measures = ("replicas", "ttft_mean", "itl_mean")

    def beats(one, other):
        pairs = [(one[name], other[name]) for name in measures]
        return all(left <= right for left, right in pairs) and any(left < right for left, right in pairs)

    for row in rows:
        assert row["pareto"] == (not any(beats(other, row) for other in rows))
    assert 1 <= sum(row["pareto"] for row in rows) < len(rows)
    assert table.to_svg().count('r="5"') == 2 * sum(row["pareto"] for row in rows)


def test_an_answer_is_repeated_with_other_seeds_and_fits():
    recorded = simulate(WORKLOAD | {"generate": GENERATED | {"num_requests": 60}})
    demand = Demand.read(WORKLOAD, cost_from=recorded)
    table = size(demand, "ttft_p99=500ms", router="random", repeats=3, jobs=1)
    values = {row.values["ttft_p99"] for row in (table.best, *table.repeats)}
    assert len(demand.models) == 8 and len(values) == 4
    low, high = duration(min(values)), duration(max(values))
    assert f"ttft_p99: {low} to {high} over 4 runs" in repr(table)
    assert ("is the mean of" in repr(table)) == (table.best.runs > 1) and "alone" not in repr(table)
    met = sum(row.meets for row in (table.best, *table.repeats))
    assert f"{met} of 4 runs" in repr(table)


def test_another_seed_draws_other_requests():
    """Generated requests are drawn again; of given ones others come once more, and they stay the same at load 1."""
    requests = [{"id": f"r{n}", "arrival_time": n / 40, "prompt": {"len": 50}, "max_tokens": 5} for n in range(40)]
    given = {"requests": requests, "cost_model": WORKLOAD["cost_model"]}
    for source, load, differs in ((WORKLOAD, 1.0, True), (given, 1.5, True), (given, 1.0, False)):
        demand = Demand.read(source, load=load)
        first, again, other = (demand.run(2, "round_robin", seed).choices for seed in (0, 0, 3))
        assert first == again and (first != other) == differs
        assert len(other) == pytest.approx(len(first), rel=0.3)


@pytest.mark.parametrize("how", ["repeated", "compressed"])
def test_the_rate_of_a_load_is_that_multiple_of_the_rate_of_the_file(how):
    """The first request of the example says no time: it arrives at the start, and counts."""
    demand = Demand.read(Path(__file__).parents[2] / "examples" / "workload.json", how=how)
    assert demand.summary.startswith("workload.json: 5 requests in 0.5 s (10 per second); ")
    curve = load_curve(demand, [1, 2, 4], "ttft_p99=100s")
    assert [point.row.rate for point in curve.points] == pytest.approx([10, 20, 40])


def test_requests_without_a_time_are_not_left_out_of_the_summary():
    requests = [{"id": f"r{n}", "prompt": {"len": 9}, "arrival_time": 2.0 * n + 3} for n in range(3)]
    for more, said in (
        ([], "3 requests in 4 s (0.75 per second)"),
        ([{"id": "start", "prompt": {"len": 9}}], "4 requests in 7 s (0.571 per second)"),
    ):
        demand = Demand.read({"requests": [*requests, *more], "cost_model": {"fixed": 0.01}})
        assert demand.summary.startswith(f"the workload: {said}; ")


def test_the_highest_load_of_an_answer_and_its_cost():
    target = "ttft_p99=500ms,tpot_p99=60ms"
    table = size(Demand.read(WORKLOAD), target, highest=True, price=3.0)
    assert table.best.replicas > 1 and 1 < table.highest.load < 2  # fewer replicas do not do for this load
    assert table.highest.meets and table.highest.rate == pytest.approx(40 * table.highest.load, rel=0.15)
    more = compare(
        Demand.read(WORKLOAD, load=table.highest.load * 1.07), [table.best.replicas], ["round_robin"], target
    )
    assert not more.rows[0].meets
    run = simulate_fleet(WORKLOAD, replicas=table.best.replicas)
    tokens, hours = run.metrics().summary.num_output_tokens, max(trace[-1].end for trace in run.traces) / 3600
    assert table.best.cost(3.0) == pytest.approx(3.0 * table.best.replicas * hours / tokens * 1e6, rel=0.02)
    assert f"at {table.highest.load:.3g} times this load" in repr(table) and "cost of 1M" in repr(table)


def waiting(wait):
    """A recording whose first requests arrive one after the other while the engine is not started yet."""
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"len": 60 + 37 * n % 200},
            "max_tokens": 5 + n % 9,
            "arrival_time": max(0, n - 8) / 5,
        }
        for n in range(30)
    ]
    run = simulate({"config": {"max_num_seqs": 4}, "requests": requests, "cost_model": WORKLOAD["cost_model"]})
    trace = Trace(run.meta)
    for n, info in enumerate(run.requests.values()):
        trace.add_request(replace(info, arrival_time=wait * n / 9 if n < 9 else info.arrival_time + wait))
    for record in run:
        trace.append(replace(record, time=record.time + wait, end=record.end + wait))
    return trace


@pytest.mark.parametrize(("wait", "load"), [(0.0, "1x,2x"), (30.0, "1x,2x"), (30.0, "1x")])
def test_a_recording_waits_for_its_first_step_and_the_error_of_one_replica_is_told(wait, load, tmp_path, capsys):
    trace, path = waiting(wait), tmp_path / "run.jsonl"
    trace.save(path)
    measured = values_of(trace)
    demand = Demand.read(path)
    values = demand.row(1, "round_robin", {}).values
    for name in ("ttft_mean", "ttft_p99", "e2e_mean"):
        assert values[name] == pytest.approx(measured[name], rel=0.05), name
    rate = arrival_rate([info.arrival_time for info in trace.requests.values()])
    assert demand.rate == pytest.approx(rate) and f"({rate:.3g} per second)" in demand.summary
    main(
        [
            "fleet",
            "size",
            str(path),
            "--slo",
            "ttft_p99=90s,itl_mean=9s",
            "--repeats",
            "1",
            "--load",
            load,
            "--set",
            "max_num_seqs=5",
            "--jobs",
            "1",
        ]
    )
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("check, the recording predicted with one replica")]
    for name in ("ttft_p99", "itl_mean"):
        off = f"off by {values[name] / measured[name] - 1:+z.0%}"
        assert f"{name} {duration(values[name])} (recorded {duration(measured[name])}, {off})" in line


def test_requests_that_arrive_together_have_no_rate_and_short_times_have_a_unit(tmp_path, capsys):
    requests = [{"id": f"r{n}", "prompt": {"len": 50}, "max_tokens": 4, "arrival_time": 3.0} for n in range(5)]
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"requests": requests, "cost_model": {"fixed": 8.557e-5}}))
    for more in ([], ["--load", "1x,2x"]):
        assert main(["fleet", "size", str(path), "--slo", "ttft_p99=1s", "--jobs", "1", *more]) == 0
        said = capsys.readouterr().out
        assert "that arrive together" in said and "together" in said.partition("\n")[2]
        assert " 0 requests/s" not in said and not re.search(r"\de-\d", said) and "85.6 µs" in said
    assert not re.search(r"\de-\d", repr(Demand.read(path).run(1, "round_robin")))


def test_sessions_are_sized_too():
    agents = {"count": 20, "turns": 3, "input": 50, "output": 20, "arrivals": {"process": "poisson", "rate": 10}}
    workload = {name: value for name, value in WORKLOAD.items() if name != "generate"} | {"sessions": agents}
    one, two = (compare(Demand.read(workload, load=load), [1], ["sticky"], jobs=1).rows[0] for load in (1, 2))
    assert two.values["output_throughput"] > 1.2 * one.values["output_throughput"]
    table = size(Demand.read(workload), "ttft_p99=500ms", router="sticky", repeats=1, highest=True)
    assert table.best is not None and "requests/s" not in repr(table) and "together" not in repr(table)


def test_every_load_of_a_recording_has_the_check_of_the_recorded_one(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    simulate({**WORKLOAD, "generate": {**GENERATED, "num_requests": 30}}).save(path)
    demand = Demand.read(path, load=2.0)
    asked, row = [], Demand.row
    monkeypatch.setattr(Demand, "row", lambda self, *of: asked.append(self.load) or row(self, *of))
    checks = [demand.times(1.5).check, demand.check, demand.times(2).times(0.5).check]
    assert checks[0] is checks[1] is checks[2] and asked == [1.0], "one simulation, of the load as it was recorded"
    assert demand.times(1.5).check.errors["ttft_mean"] == pytest.approx(0.0, abs=0.02)
    assert pickle.loads(pickle.dumps(demand.times(1.5))).check.errors == demand.check.errors
