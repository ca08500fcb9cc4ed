"""A wrong value in a list: refused before anything is run, in a line that names the field, the value and the range."""

import json
import re

import pytest

from workbench.apps.cli import main

EXAMPLE = "examples/vllm_preemption.jsonl.gz"
SPLIT = ["fleet", "split", "WORKLOAD", "--kv-bytes-per-token", "1", "--bandwidth", "1", "--lengths"]
SIZE = ["fleet", "size", "WORKLOAD", "--slo"]
TUNE = ["trace", "tune", EXAMPLE, "--slo"]


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "workload.json"
    requests = [{"id": "a", "prompt": {"len": 40}, "max_tokens": 3}]
    path.write_text(json.dumps({"requests": requests, "cost_model": {"fixed": 0.01}}))
    return str(path)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Every simulation with a clock fails: a value has to be refused before the first."""

    def fail(*_, **__):
        pytest.fail("a run began before the values were checked")

    for name in ("sweep.spread_out", "predict.spread_out", "fleet.sizing.spread_out"):
        monkeypatch.setattr(f"workbench.analysis.{name}", fail)
    for name in ("demand", "crossover"):
        monkeypatch.setattr(f"workbench.analysis.fleet.{name}.run_fleet", fail)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "WORKLOAD", "--sweep", "max_num_seqs=1,x"], "max_num_seqs must be an integer from 1 to .* 'x'"),
        (["simulate", "WORKLOAD", "--sweep", "max_num_seqs=1,0"], "max_num_seqs must be from 1 to .* got 0"),
        (["simulate", "WORKLOAD", "--sweep", "max_num_seqs=1,"], "max_num_seqs must be an integer from 1 to .* got ''"),
        (["simulate", "WORKLOAD", "--sweep", "policy=fcfs,lifo"], "policy must be one of 'fcfs', .* got 'lifo'"),
        (
            ["simulate", "WORKLOAD", "--sweep", "max_num_seqs=1,2", "--sweep", "block_size=16,x"],
            "block_size must be .*, got 'x'",
        ),
        (["simulate", "GENERATED", "--sweep", "rate=2,0"], r"rate must be > 0 and finite, got 0"),
        ([*TUNE, "ttft_p99=1s", "--sweep", "max_num_seqs=8,x"], "max_num_seqs must be an integer from 1 to .* 'x'"),
        ([*TUNE, "ttft_p99=1s", "--sweep", "rate=1,2"], "unknown field 'rate'; --sweep help"),
        ([*TUNE, "ttft_p99=1s,itl_p99=x"], "'itl_p99=x' must be NAME=TIME"),
        (["trace", "whatif", EXAMPLE, "--set", "max_num_seqs=8", "--set", "block_size=x"], "block_size must be"),
        (["hunt", "--workloads", "1", "--only", "progress,x"], "--only.* names 'x'; the laws are crash"),
        (
            ["hunt", "--workloads", "1", "--allow", "finished_rows_keep_seats,x"],
            "--allow names 'x'; the exc",
        ),
        (["fleet", "compare", "WORKLOAD", "--replicas", "2,x"], "--replicas must be numbers >= 1 .* got '2,x'"),
        (["fleet", "compare", "WORKLOAD", "--replicas", "2,0"], "--replicas must be numbers >= 1 .* got '2,0'"),
        (["fleet", "compare", "WORKLOAD", "--routers", "sticky,x"], "router must be one of .* got 'x'"),
        ([*SIZE, "ttft_p99=1s", "--load", "1x,x"], "--load must be a multiple > 0 .* got '1x,x'"),
        ([*SIZE, "ttft_p99=1s", "--load", "1x,0x"], "--load must be a multiple > 0 .* got '1x,0x'"),
        ([*SIZE, "ttft_p99=1s,speed=1s"], "no target is known for 'speed'; the names are"),
        ([*SPLIT, "100,x"], "--lengths must be numbers >= 1 .* got '100,x'"),
        ([*SPLIT, "100,99999"], "num_blocks=.* is too small for the longest of lengths: 99,999 prompt tokens"),
        ([*SPLIT, "100,0"], "--lengths must be numbers >= 1 .* got '100,0'"),
        (["certify", "module:function", "--features", "prefix caching,x"], "features names 'x'; the features are"),
        (["bench", "--metric-percentiles", "50,x"], "argument --metric-percentiles: must be numbers from 0 to 100"),
        (["bench", "--metric-percentiles", "50,101"], "argument --metric-percentiles: must be numbers from 0 to 100"),
    ],
)
def test_a_wrong_second_value_is_refused_before_anything_is_run(arguments, message, workload, tmp_path, capsys):
    generated = tmp_path / "generated.json"
    generated.write_text(
        json.dumps({"generate": {"num_requests": 2, "prompt": 9, "output": 2}, "cost_model": {"fixed": 1}})
    )
    places = {"WORKLOAD": workload, "GENERATED": str(generated)}
    try:
        status = main([places.get(word, word) for word in arguments])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err
    assert status == 2 and said.count("Traceback") == 0
    last = said.splitlines()[-1]
    command = " ".join(arguments[: 2 if arguments[0] in ("trace", "fleet") else 1])
    assert last.startswith(f"workbench {command}: ")
    assert re.search(message, last), last
