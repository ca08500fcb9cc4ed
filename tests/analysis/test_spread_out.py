"""`workbench.analysis.spread_out`: simulations on any executor give the answer of one process."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from workbench import EngineConfig, simulate
from workbench.analysis.fleet.at_scale import simulate_fleet_at_scale
from workbench.analysis.fleet.demand import Demand
from workbench.analysis.fleet.sizing import compare
from workbench.analysis.predict import Predictor, values_of
from workbench.analysis.spread_out import spread_out
from workbench.analysis.sweep import sweep
from workbench.simulation.arrivals import read_generated
from workbench.simulation.costs.cost_model import CostModel

WORKLOAD = {
    "generate": {
        "num_requests": 30,
        "seed": 3,
        "prompt": 60,
        "output": 12,
        "arrivals": {"process": "poisson", "rate": 9},
    },
    "config": {"num_blocks": 60, "block_size": 16, "max_num_batched_tokens": 64},
    "cost_model": {"fixed": 0.01, "per_prefill_token": 1e-4},
}
GRID = {"max_num_batched_tokens": [32, 64], "max_num_seqs": [2, 8]}


def add(shared, number):
    if number < 0:
        raise ValueError(f"{number} is negative")
    return shared + number, os.getpid()


@pytest.fixture(scope="module")
def dask_executor():
    """Dask's executor on a cluster of two workers."""
    distributed = pytest.importorskip("distributed", reason="Dask's cluster comes with the extra 'test'")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


def test_every_task_gets_its_result_here_and_in_processes():
    for jobs in (1, 2):
        found = dict(spread_out(add, 10, [(number,) for number in range(5)], jobs=jobs))
        assert {index: value for index, (value, _) in found.items()} == {number: 10 + number for number in range(5)}
        assert (os.getpid() in {process for _, process in found.values()}) == (jobs == 1)


def test_the_error_of_a_task_reaches_the_caller():
    for jobs in (1, 2):
        with pytest.raises(ValueError, match="-1 is negative"):
            list(spread_out(add, 10, [(1,), (-1,)], jobs=jobs))


def test_what_the_calls_share_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(list(spread_out(add, 10, [(1,), (2,)], jobs=2))) == 2
    results = spread_out(add, 10, [(1,), (2,), (3,)], jobs=2)
    next(results)
    assert list(tmp_path.iterdir())
    results.close()  # as Ctrl-C does
    with pytest.raises(ValueError, match="-1 is negative"):
        list(spread_out(add, 10, [(1,), (-1,)], jobs=2))
    assert not list(tmp_path.iterdir())


def test_a_cluster_gives_the_rows_of_one_process(dask_executor):
    assert sweep(WORKLOAD, GRID, executor=dask_executor) == sweep(WORKLOAD, GRID, jobs=1)


def test_a_cluster_compares_fleets_and_continues_from_rows(dask_executor, tmp_path):
    demand, out = Demand.read(WORKLOAD), tmp_path / "rows.jsonl"
    layouts = ([1, 2], ["consistent_hash", "prefix"])
    compare(demand, [2], ["prefix"], "ttft_p99=1s", out=out, jobs=1)
    expected = compare(demand, *layouts, "ttft_p99=1s", jobs=1)
    assert compare(demand, *layouts, "ttft_p99=1s", out=out, executor=dask_executor) == expected
    assert len(out.read_text().splitlines()) == 4  # three were new


def test_a_cluster_simulates_the_replicas_of_a_fleet(dask_executor):
    made = partial(read_generated, WORKLOAD["generate"])
    run = partial(simulate_fleet_at_scale, made, EngineConfig(), CostModel(fixed=0.01), replicas=5)
    for router in ("consistent_hash", "random"):
        alone, spread = run(router=router), run(router=router, executor=dask_executor)
        assert [one.to_row() for one in spread.replicas] == [one.to_row() for one in alone.replicas]


def test_a_prediction_does_not_depend_on_the_executor():
    trace, model = simulate(WORKLOAD), CostModel(fixed=0.01, per_prefill_token=1e-4)
    here = Predictor(trace, model, num_draws=2).predict(max_num_seqs=2)
    with ThreadPoolExecutor(2) as executor:
        there = Predictor(trace, model, num_draws=2, executor=executor).predict(max_num_seqs=2)
    assert here.intervals == there.intervals and here.draws == there.draws


def test_a_run_without_records_has_the_values_of_one_with_them():
    for changes in ({}, {"max_num_seqs": 2}, {"num_blocks": 20}, {"async_scheduling": True}):
        predictor = Predictor(simulate(WORKLOAD), CostModel(fixed=0.01, per_prefill_token=1e-4), num_draws=0)
        prediction = predictor.predict(**changes)
        assert prediction.outcome.values == pytest.approx(values_of(prediction.trace), rel=1e-9)
        e2e = {name: request.e2e.seconds for name, request in prediction.trace.metrics().requests.items()}
        assert prediction.outcome.e2e == pytest.approx(e2e)
