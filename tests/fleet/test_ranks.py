"""Recordings of all data-parallel ranks are predicted together, behind vLLM's choice between them."""

import random
import re
from statistics import fmean

import pytest
from msgspec.structs import replace
from private_traces import without_tokens

from workbench import simulate_fleet
from workbench.analysis.check import shown
from workbench.analysis.fleet.ranks import RanksPredictor
from workbench.analysis.predict import Predictor
from workbench.analysis.values import latency_values
from workbench.apps.cli import main
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.trace.window import windows

COST = CostModel(fixed=0.01, per_sequence=2e-4, per_prefill_token=1e-4)
KEY = b"one key for all ranks"


def workload(seed, count=60):
    rng = random.Random(seed)
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"parts": [{"len": 128, "seed": rng.choice("AB")}, {"len": rng.randint(5, 200)}]},
            "max_tokens": rng.randint(5, 60),
            "arrival_time": n * 0.04,
        }
        for n in range(count)
    ]
    config = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "num_blocks": 120, "block_size": 16}
    return {"config": config, "requests": requests}


def as_recorded(run):
    """The traces of a fleet as default recordings of vLLM's ranks."""
    traces = {}
    for rank, trace in enumerate(run.traces):
        recorded = without_tokens(trace, key=KEY)
        recorded.meta = replace(recorded.meta, created=1000.0)
        traces[f"rank {rank}"] = recorded
    return traces


@pytest.fixture(scope="module")
def recorded():
    return as_recorded(simulate_fleet(workload(1), replicas=2, router="vllm", cost_model=COST))


def test_the_recorded_ranks_are_repeated(recorded):
    predictor = RanksPredictor(recorded, num_draws=1)
    truth = simulate_fleet(workload(1), replicas=2, router="vllm", cost_model=COST)
    assert predictor.simulate_ranks({}).assignments == truth.assignments
    assert predictor.recorded["ttft_mean"] == pytest.approx(latency_values(truth.metrics())["ttft_mean"])
    assert max(map(abs, predictor.check.errors.values())) < 0.05 and predictor.check.holds
    assert predictor.unchanged["hit_rate"].value == pytest.approx(predictor.recorded["hit_rate"], abs=0.01)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_another_number_of_ranks_can_be_asked(recorded, ranks):
    predicted = RanksPredictor(recorded, num_draws=1).predict(data_parallel_size=ranks)
    truth = latency_values(simulate_fleet(workload(1), replicas=ranks, router="vllm", cost_model=COST).metrics())
    for name in ("ttft_mean", "ttft_p99", "e2e_mean", "output_throughput"):
        assert predicted[name].value == pytest.approx(truth[name], rel=0.1), name
    assert predicted["hit_rate"].value == pytest.approx(truth["hit_rate"], abs=0.02)


def test_blocks_of_another_size_take_the_memory_of_each_rank(recorded):
    config = next(iter(recorded.values())).config
    run = RanksPredictor(recorded, num_draws=0).simulate_ranks({"block_size": 2 * config["block_size"]})
    assert [trace.num_blocks for trace in run.traces] == [config["num_blocks"] // 2] * 2


def started_late(trace, wait):
    """The trace of a rank that took its first step so late, when its first request had been waiting for it."""
    late = Trace(trace.meta)
    for info in trace.requests.values():
        waited = 0.0 if info.arrival_time <= trace[0].time else wait
        late.add_request(replace(info, arrival_time=info.arrival_time + waited))
    for record in trace:
        late.append(replace(record, time=record.time + wait, end=record.end + wait))
    for supplement in trace.supplements:
        late.add_supplement(supplement)
    return late


@pytest.mark.parametrize("offset", [0.0, 2.5])
@pytest.mark.parametrize("ranks", [2, 3])
def test_requests_wait_for_the_rank_that_started_late_and_for_no_other(recorded, offset, ranks):
    wait = 4.0
    first, second = recorded.values()
    late = started_late(second, wait)
    late.meta = replace(late.meta, created=late.meta.created + offset)
    waiting = {name for name, info in second.requests.items() if info.arrival_time <= second[0].time}
    run = RanksPredictor({"rank 0": first, "rank 1": late}, num_draws=1).simulate_ranks({"data_parallel_size": ranks})
    found = {name.split("/")[-1]: each.ttft.seconds for name, each in run.metrics().requests.items()}
    assert waiting and found.keys() == {**first.requests, **late.requests}.keys()
    for name, seconds in found.items():
        assert (wait <= seconds < wait + 1) if name in waiting else seconds < wait, name
    arrivals = {name: info.arrival_time for trace in run.traces for name, info in trace.requests.items()}
    for trace, later in ((first, 0.0), (late, offset)):
        for name, info in trace.requests.items():
            assert arrivals[name] == pytest.approx(info.arrival_time + later), "on the clock of the first rank"


def test_prefixes_are_shared_between_ranks_by_their_common_key_alone(recorded):
    apart = dict(recorded)
    apart["rank 1"] = as_other_key(recorded["rank 1"])
    together = RanksPredictor(recorded, num_draws=0).predict(data_parallel_size=1)
    alone = RanksPredictor(apart, num_draws=0).predict(data_parallel_size=1)
    assert alone["hit_rate"].value < together["hit_rate"].value - 0.01
    assert any("different keys" in note for note in alone.notes) and not any("keys" in note for note in together.notes)


def as_other_key(trace):
    made = replace(trace.meta.prefix_hashes, key_id="another")
    other = Trace(replace(trace.meta, prefix_hashes=made))
    for info in trace.requests.values():
        other.add_request(info)
    for record in trace:
        other.append(record)
    for supplement in trace.supplements:
        other.add_supplement(supplement)
    return other


def test_ranks_of_other_settings_and_two_runs_are_refused(recorded):
    first, second = recorded.values()
    with pytest.raises(ValueError, match="more than one run"):
        RanksPredictor({"rank 0": first, "rank 1": first})
    other = simulate_fleet(workload(2), replicas=1, router="vllm", config={"max_num_seqs": 4}, cost_model=COST)
    with pytest.raises(ValueError, match="rank 1 was recorded under other settings than rank 0"):
        RanksPredictor({"rank 0": second, "rank 1": without_tokens(other.traces[0])})


def test_commands_take_a_folder_of_ranks(recorded, tmp_path, capsys):
    for rank, trace in enumerate(recorded.values()):
        trace.save(tmp_path / f"vllm-20260101-120000-host-rank{rank}-7-0-00000.jsonl.gz")
    assert main(["trace", "whatif", str(tmp_path), "--set", "data_parallel_size=3", "--force"]) == 0
    said = capsys.readouterr().out
    assert "ttft_mean" in said and "--data-parallel-size 3" in said
    assert main(["trace", "tune", str(tmp_path), "--slo", "ttft_p99=30s", "--sweep", "max_num_seqs=4,8"]) == 0
    assert "met the target when it was recorded" in capsys.readouterr().out
    sweep = ["--sweep", "data_parallel_size=2,4", "--sweep", "max_num_seqs=6,8"]
    assert main(["trace", "tune", str(tmp_path), "--slo", "ttft_p99=1ms", *sweep]) == 0
    said = capsys.readouterr().out
    assert "--data-parallel-size 4" in said and "data_parallel_size=2" not in said, "it is the recorded number"
    rows = {cells[1]: cells[2] for line in said.splitlines() if len(cells := re.split(r"\s{2,}", line)) > 3}
    changes = {"data_parallel_size=4": {"data_parallel_size": 4}, "max_num_seqs=6": {"max_num_seqs": 6}}
    predicted = RanksPredictor(recorded, rough=True).predict_all([*changes.values()])
    for words, prediction in zip(changes, predicted):
        assert rows[words].startswith(f"{shown('ttft_p99', prediction['ttft_p99'].value)} ("), rows
    assert main(["trace", "misses", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rank 0: " in said and "rank 1: " in said
    assert main(["trace", "explain", str(tmp_path), "--slowest", "3"]) == 0
    assert "rank " in capsys.readouterr().out
    assert main(["why", str(tmp_path)]) == 0
    assert "rank 1: " in capsys.readouterr().out


@pytest.mark.parametrize("in_folder", [True, False])
def test_one_recording_is_that_of_a_server_of_one_rank(in_folder, tmp_path, capsys):
    single = as_recorded(simulate_fleet(workload(1), replicas=1, router="vllm", cost_model=COST))["rank 0"]
    single.save(file := tmp_path / "vllm-20260101-120000-host-rank0-7-0-00000.jsonl.gz")
    assert main(["trace", "whatif", str(tmp_path if in_folder else file), "--set", "data_parallel_size=2"]) == 0
    said = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for line in said.splitlines() if len(cells := re.split(r"\s{2,}", line)) > 4}
    truth = latency_values(simulate_fleet(workload(1), replicas=2, router="vllm", cost_model=COST).metrics())
    now = Predictor(single).unchanged
    for name in ("ttft_mean", "e2e_mean"):
        assert rows[name][0] == shown(name, now[name].value)
        seconds = float(rows[name][1].split()[0]) * {"s": 1.0, "ms": 1e-3}[rows[name][1].split()[1]]
        assert seconds == pytest.approx(truth[name], rel=0.1)
    assert "vllm serve MODEL --data-parallel-size 2" in said


def test_a_part_of_all_ranks_is_of_one_clock(recorded, tmp_path, capsys):
    for rank, trace in enumerate(recorded.values()):
        trace.meta = replace(trace.meta, created=1000.0 + 0.5 * rank)
        trace.save(tmp_path / f"vllm-20260101-120000-host-rank{rank}-7-0-00000.jsonl.gz")
    traces = {rank: Trace.load(path) for rank, path in zip(recorded, sorted(tmp_path.iterdir()))}
    parts = windows(traces, begin=1.0, end=1.5)
    assert [round(part[0].time - trace_late, 1) for part, trace_late in zip(parts.values(), (1.0, 0.5))] == [0.0, 0.0]
    name = list(traces["rank 1"].requests)[12]
    around = windows(traces, around=name)
    assert name in around["rank 1"].requests and len(around["rank 0"]) < len(traces["rank 0"])
    assert list(windows(traces, begin=0.0, end=0.3)) == ["rank 0"]
    whole_end = max(traces["rank 0"][-1].end, traces["rank 1"][-1].end + 0.5)
    assert windows(traces, last=0.2)["rank 1"][0].end > whole_end - 0.5 - 0.2
    for words in (
        ["trace", "info"],
        ["trace", "explain"],
        ["trace", "misses"],
        ["trace", "whatif", "--set", "max_num_seqs=4", "--force"],
        ["trace", "tune", "--slo", "ttft_p99=30s", "--sweep", "max_num_seqs=4,8", "--force"],
        ["why"],
    ):
        at = 1 if words[0] == "why" else 2
        assert main([*words[:at], str(tmp_path), *words[at:], "--around", name]) == 0, capsys.readouterr().err
        assert capsys.readouterr().out


def test_latencies_of_a_part_count_in_the_prediction_of_ranks(recorded):
    part = {name for trace in windows(recorded, begin=1.5).values() for name in trace.requests}
    whole, counted = RanksPredictor(recorded, num_draws=1), RanksPredictor(recorded, num_draws=1, counted=part)
    times = [m.ttft.seconds for t in recorded.values() for name, m in t.metrics().requests.items() if name in part]
    assert counted.recorded["ttft_mean"] == pytest.approx(fmean(times))
    assert counted.unchanged["ttft_mean"].value != whole.unchanged["ttft_mean"].value
    assert counted.check.errors["ttft_mean"] == pytest.approx(0, abs=0.05)
