"""One hit rate: everything that shows or predicts it gets the same number, that of vLLM's counters."""

import random
from types import SimpleNamespace

import pytest

from workbench import simulate, simulate_fleet
from workbench.analysis.assumed_hits import AssumedHits
from workbench.analysis.fleet.fleet_row import FleetRow
from workbench.analysis.fork import Past
from workbench.analysis.hit_rates import hit_rates
from workbench.analysis.rerun import RecordedRun
from workbench.analysis.values import counts_of
from workbench.apps.serve.prometheus import ServerMetrics
from workbench.config import EngineConfig
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Chunk, RequestInfo, StepRecord, Trace, TraceMeta
from workbench.viz.duel import MEASURES, busiest

RATE = MEASURES["hit rate of prompt tokens"].value
COSTS = {"fixed": 0.01, "per_prefill_token": 0.0004}


def workload(seed, num_blocks, aborts=False):
    """Prompts that begin alike, in a pool that is too small for all; some are aborted before their turn."""
    rng = random.Random(seed)
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"parts": [{"len": 32, "seed": i % 3}, {"len": rng.randint(3, 50), "seed": f"own {i}"}]},
            "max_tokens": rng.randint(10, 60),
            "arrival_time": 0.01 * i,
        }
        | ({"abort_step": 2 + i} if aborts and i % 4 == 0 else {})
        for i in range(24)
    ]
    config = {"block_size": 8, "num_blocks": num_blocks, "max_num_seqs": 8, "enable_prefix_caching": True}
    return {"config": config, "requests": requests, "cost_model": COSTS}


def counted(*traces):
    """The rate of vLLM's counters, from the records alone."""
    queries = hits = 0
    for trace in traces:
        for record in trace:
            for chunk in record.chunks:
                if chunk.request_id in record.admitted:
                    queries += trace.requests[chunk.request_id].num_prompt_tokens
                    hits += chunk.num_cached_tokens
    return hits / queries


def of_server(trace):
    server = ServerMetrics(SimpleNamespace(name="m"))
    known = set()
    for record in trace:
        server.add_step(record, [info for name, info in trace.requests.items() if name not in known])
        known |= trace.requests.keys()
    return server.prefix_hits.rate


@pytest.mark.parametrize(("num_blocks", "preempts"), [(400, False), (40, True)])
@pytest.mark.parametrize("steps", [None, 60])  # the whole run, or requests that wait or run at its end
@pytest.mark.parametrize("seed", range(3))
def test_all_readers_of_a_trace_have_the_hit_rate_of_vllms_counters(seed, steps, num_blocks, preempts):
    trace = simulate(workload(seed, num_blocks, aborts=True))[:steps]
    summary = trace.metrics().summary
    assert (summary.num_preemptions > 0) == preempts and summary.num_finished > 0
    assert steps is None or summary.num_finished < summary.num_requests
    expected = counted(trace)
    assert 0 < expected < 1
    assert summary.hit_rate == RATE([trace], "s") == of_server(trace) == hit_rates([trace]).total.rate == expected
    assert counts_of(trace.metrics())["hit_rate"] == AssumedHits.of(trace).rate == expected
    resumed = sum(c.num_cached_tokens for r in trace for c in r.chunks if c.request_id in r.resumed)
    assert (resumed > 0) == preempts, "hits of preempted requests, which do not count"


@pytest.mark.parametrize("num_blocks", [400, 40])
def test_a_prediction_counts_as_the_recording_does(num_blocks):
    trace = simulate(workload(5, num_blocks))
    run = RecordedRun.of(trace, Past(trace), CostModel(**COSTS))
    outcome = run.outcome(EngineConfig.from_dict(trace.config))
    assert outcome.values["num_preemptions"] == trace.metrics().summary.num_preemptions
    assert outcome.values["hit_rate"] == trace.metrics().summary.hit_rate == counted(trace)


@pytest.mark.parametrize("num_blocks", [400, 40])
def test_a_row_of_a_fleet_has_the_hit_rate_and_the_busiest_replica_of_a_duel(num_blocks):
    run = simulate_fleet(workload(7, num_blocks), replicas=2, router="least_loaded")
    row = FleetRow.of(run, {})
    assert row.hit_rate == RATE(run.traces, "s") == counted(*run.traces)
    assert row.largest_share == busiest(run.traces)
    cells = [line.split()[3] for line in repr(run).splitlines()[2:]]
    assert cells == [f"{100 * counted(*traces):.1f}%" for traces in ([run.traces[0]], [run.traces[1]], run.traces)]
    whole = run.metrics().summary
    for name, statistic in (("mean time to first token", "mean"), ("P99 of the time to first token", "p99")):
        shown = MEASURES[name].value(run.traces, "s")
        assert shown == getattr(whole.ttft, statistic) == row.values[f"ttft_{statistic}"]


def test_requests_that_never_ran_or_were_admitted_before_the_trace_do_not_count():
    trace = Trace(TraceMeta(config={"block_size": 8, "num_blocks": 100}))
    for name, length in (("before", 400), ("admitted", 80), ("waits", 1000), ("refused", 5000)):
        trace.add_request(RequestInfo(name, length))
    assert trace.metrics().summary.hit_rate is None
    earlier = Chunk("before", 0, 100, True, "new_partial", None, "budget", tuple(range(1, 21)))
    trace.append(StepRecord(0, chunks=(earlier,), admitted=("before",), running=("before",)))
    early = Chunk("before", 100, 50, True, "cached_partial", None, "budget", ())
    first = Chunk("admitted", 20, 60, False, "new_final", 5, "complete", tuple(range(21, 31)), num_cached_tokens=20)
    running = {"admitted": ("admitted",), "running": ("before", "admitted")}
    trace.append(StepRecord(1, chunks=(early, first), **running, aborted=("refused",), waiting=("waits",)))
    trace = trace[1:]
    assert trace.metrics().summary.hit_rate == hit_rates([trace]).total.rate == RATE([trace], "steps") == 0.25


def test_a_duel_counts_requests_without_a_first_token_with_the_time_so_far():
    trace = simulate(workload(1, 40))[:30]
    summary = trace.metrics().summary
    assert summary.ttft.num_open
    for name, statistic in (("median", "p50"), ("mean", "mean"), ("P99 of the", "p99")):
        measure = next(measure for measure in MEASURES if measure.startswith(name) and "first token" in measure)
        assert MEASURES[measure].value([trace], "s") == getattr(summary.ttft, statistic)
