"""The ``cost_model`` that callers give, in every function that takes one; and fits to simulated runs."""

import pytest

from workbench import CostModel, simulate, simulate_fleet
from workbench.analysis.predict import comparing

COST = {"fixed": 0.01, "per_prefill_token": 4e-4}
WORKLOAD = {
    "config": {"max_num_batched_tokens": 2048},
    "requests": [{"id": "a", "prompt": {"len": 999}, "max_tokens": 20}],
}
TAKERS = {
    "simulate": lambda trace, cost: simulate(WORKLOAD, cost_model=cost),
    "fleet": lambda trace, cost: simulate_fleet(WORKLOAD, replicas=1, cost_model=cost).traces[0],
    "fork": lambda trace, cost: trace.fork(cost_model=cost),
    "whatif": lambda trace, cost: trace.whatif(max_num_seqs=64, cost_model=cost),
    "tune": lambda trace, cost: trace.tune("ttft_p99=9s", grid={"max_num_seqs": [64]}, cost_model=cost),
    "explain": lambda trace, cost: trace.explain("a", cost_model=cost),
}


@pytest.mark.parametrize("name", TAKERS)
def test_coefficients_by_name_are_a_cost_model(name):
    trace = simulate(WORKLOAD, cost_model=CostModel(**COST))
    found, same = (TAKERS[name](trace, cost) for cost in (COST, CostModel(**COST)))
    for one in (found, same):
        if name in ("simulate", "fleet", "fork", "whatif"):
            assert one.metrics().summary.ttft.p50 == pytest.approx(0.01 + 999 * 4e-4)
    assert repr(found) == repr(same)


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("given", [3, {"fixd": 0.1}, {"fixed": -1.0}])
def test_anything_else_is_refused_before_anything_runs(name, given):
    trace = simulate(WORKLOAD, cost_model=CostModel(**COST))
    with pytest.raises(ValueError, match=r"cost_model|fixed"):
        TAKERS[name](trace, given)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_the_first_step_of_a_simulated_run_is_as_good_as_any(num_prompts):
    """It may be the only one with a prompt; that of an engine compiles and warms up."""
    requests = [{"id": f"r{n}", "prompt": {"len": 999}, "max_tokens": 20} for n in range(num_prompts)]
    trace = simulate({"config": {"max_num_batched_tokens": 4096}, "requests": requests}, cost_model=COST)
    check = comparing(trace).check
    assert check.fit.largest["rows"] >= 999 * num_prompts
    assert check.errors["ttft_mean"] == pytest.approx(0, abs=1e-6) and check.grade == "seconds"
