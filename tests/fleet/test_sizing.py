"""Sizes, comparisons, other loads, and fleets at scale: against plain fleet simulations."""

import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from workbench import EngineConfig, simulate, simulate_fleet
from workbench.cli import main
from workbench.costs.cost_model import CostModel
from workbench.fleet.at_scale import simulate_fleet_at_scale
from workbench.fleet.load import scale_load
from workbench.fleet.sizing import Demand, compare, size
from workbench.simulation.arrivals import read_generated, timed_arrival

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


def test_a_recording_is_served_again_by_several_replicas(tmp_path):
    trace = simulate(WORKLOAD | {"generate": GENERATED | {"num_requests": 60}})
    trace.save(tmp_path / "run.jsonl")
    table = compare(Demand.read(tmp_path / "run.jsonl"), [1, 2], ["round_robin"])
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
    assert main(["fleet", "size", str(path), "--slo", "ttft_p99=500ms", "--load", "0.5x"]) == 0
    assert "round_robin meet ttft_p99 <= 0.5" in capsys.readouterr().out
    assert main(["fleet", "size", str(path), "--slo", "ttft_p99=1us", "--max-replicas", "2"]) == 1
    assert "no layout meets" in capsys.readouterr().out
    assert main(["fleet", "compare", str(path), "--replicas", "1,2", "--routers", "vllm,sticky"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:5]] == ["vllm", "sticky", "vllm", "sticky"]
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
