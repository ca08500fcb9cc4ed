"""The real vLLM on the workloads of tests/support/taken_back_cases.py: the same schedules, hits and blocks."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from taken_back_cases import FILLED_BY_A_STEP_IN_FLIGHT

from workbench.analysis.hunt.schedule import schedule_of
from workbench.analysis.hunt.target import find_target


@pytest.mark.parametrize("config, requests, hits", FILLED_BY_A_STEP_IN_FLIGHT)
def test_the_schedules_are_equal(config, requests, hits):
    common = {"enable_prefix_caching": True, "policy": "priority", "async_scheduling": True}
    workload = {"config": {**common, **config}, "requests": requests}
    ours, theirs = (
        schedule_of(target, workload) for target in (find_target("workbench", as_part=True), find_target("vllm"))
    )
    assert ours == theirs and hits.items() <= {k: v for step in theirs[0] for k, v in step["hits"].items()}.items()
