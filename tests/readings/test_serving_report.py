"""The report of a benchmark against the same numbers computed with numpy, request by request."""

import random
import re

import numpy as np
import pytest

from workbench import EngineConfig, simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace.readings.serving_report import ServingReport


def random_trace(seed):
    rng = random.Random(seed)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randrange(4, 90)}, "max_tokens": rng.randrange(1, 30), "arrival_time": at}
        for i, at in enumerate(np.cumsum([rng.expovariate(3) for _ in range(20)]).tolist())
    ]
    requests[5]["abort_step"] = 9
    config = EngineConfig(max_num_batched_tokens=48, max_num_seqs=6, num_blocks=60, block_size=8)
    return simulate({"requests": requests}, config=config, cost_model=CostModel(fixed=0.02, per_prefill_token=0.003))


def by_hand(trace):
    """Arrival and token times of each request that ended with a token, from the steps alone."""
    arrival = {request_id: info.arrival_time for request_id, info in trace.requests.items()}
    tokens, ended = {}, set()
    for step in trace:
        for chunk in step.chunks:
            if chunk.sampled is not None:
                tokens.setdefault(chunk.request_id, []).append(step.end)
        ended |= {name for name, why in step.finish_reasons.items() if why in ("stop", "length")}
    return [(arrival[name], tokens[name]) for name in ended]


@pytest.mark.parametrize("seed", range(5))
def test_it_equals_numpys(seed):
    trace = random_trace(seed)
    found = by_hand(trace)
    report = ServingReport.of(trace, percentiles=[80, 99.9])
    begin, end = min(a for a, _ in found), max(t[-1] for _, t in found)
    assert (report.num_successful, report.num_failed) == (len(found), 20 - len(found))
    assert report.duration == pytest.approx(end - begin)
    assert report.num_output_tokens == sum(len(times) for _, times in found)
    seconds = np.zeros((2, int(end - begin) + 2), int)
    for arrived, times in found:
        np.add.at(seconds[0], [int(at - begin) for at in times], 1)
        seconds[1, int(arrived - begin) : int(times[-1] - begin) + 1] += 1
    assert (report.peak_output_tokens, report.peak_concurrent) == tuple(seconds.max(1))
    values = {
        "TTFT": [times[0] - at for at, times in found],
        "TPOT": [(times[-1] - times[0]) / (len(times) - 1) for _, times in found if len(times) > 1],
        "ITL": [gap for _, times in found for gap in np.diff(times)],
        "E2EL": [times[-1] - at for at, times in found],
    }
    shown = dict(re.findall(r"^(.+?):? +([\d.]+) *$", str(report), re.M))
    for name, of in values.items():
        expected = [np.mean(of), np.median(of), np.percentile(of, 80), np.percentile(of, 99.9)]
        rows = [float(shown[f"{row} {name} (ms)"]) for row in ("Mean", "Median", "P80", "P99.9")]
        assert rows == pytest.approx(1e3 * np.array(expected), abs=0.0051)


def test_a_percentile_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"a percentile must be in \[0, 100\], got 101"):
        ServingReport.of(random_trace(0), percentiles=[101])


def test_a_trace_without_a_clock_is_refused():
    with pytest.raises(ValueError, match="no clock"):
        ServingReport.of(simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 2}]}))
