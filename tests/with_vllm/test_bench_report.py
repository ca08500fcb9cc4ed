"""The report of a benchmark against the function of vLLM that computes it."""

import importlib.util
import random

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics

from workbench import EngineConfig, simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.readings.serving_report import ServingReport


@pytest.mark.parametrize("seed", range(4))
def test_each_number_is_vllms(seed):
    rng = random.Random(seed)
    requests, at = [], 0.0
    for index in range(30):
        at += rng.expovariate(3)
        prompt, output = {"len": rng.randrange(4, 90)}, rng.randrange(1, 30)
        requests.append({"id": f"r{index}", "prompt": prompt, "max_tokens": output, "arrival_time": at})
    requests[5]["abort_step"] = 9
    config = EngineConfig(max_num_batched_tokens=48, max_num_seqs=6, num_blocks=60, block_size=8)
    trace = simulate({"requests": requests}, config=config, cost_model=CostModel(fixed=0.02, per_prefill_token=0.003))
    report = ServingReport.of(trace, percentiles=[90, 99])
    outputs = []
    for request in trace.metrics().requests.values():
        output = RequestFuncOutput(success=request.finish_reason in ("stop", "length"))
        if output.success:
            output.start_time = request.token_times[0] - request.ttft.seconds
            output.ttft, output.latency = request.ttft.seconds, request.e2e.seconds
            output.itl, output.output_tokens = request.gaps("s"), request.num_output_tokens
            output.prompt_len = request.num_prompt_tokens
        outputs.append(output)
    theirs, _ = calculate_metrics([], outputs, report.duration, None, [90, 99], {})
    assert report.num_failed == theirs.failed == 1
    assert (report.num_successful, report.num_input_tokens) == (theirs.completed, theirs.total_input)
    assert report.num_output_tokens == theirs.total_output
    assert report.peak_output_tokens == theirs.max_output_tokens_per_s
    assert report.peak_concurrent == theirs.max_concurrent_requests
    for rows in report.latencies:
        name = rows.name.lower()
        found = [float(line.rsplit(maxsplit=1)[1]) for line in rows.lines([90, 99])[1:]]
        expected = [getattr(theirs, f"mean_{name}_ms"), getattr(theirs, f"median_{name}_ms")]
        expected += [value for _, value in getattr(theirs, f"percentiles_{name}_ms")]
        assert found == pytest.approx(expected, abs=0.0051)
