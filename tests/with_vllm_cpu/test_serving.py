"""A real vLLM serves a tiny model on the CPU, recorded, on the emulated accelerator (``make test-vllm-cpu``)."""

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest

if not os.environ.get("VLLM_CPU_PYTHON"):
    pytest.skip("vllm-cpu is not installed here: make test-vllm-cpu", allow_module_level=True)

from workbench import Trace
from workbench.analysis.fork import fork
from workbench.analysis.predict import Predictor, values_of
from workbench.trace.readings.compare import compare

CLIENT = Path(__file__).parents[2] / "benchmarks" / "prediction" / "client.py"
NUM_REQUESTS = 20
SETTINGS = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "enable_prefix_caching": False}


@pytest.fixture(scope="module", params=["smooth", "smooth, asynchronous"], ids=["sync", "async"])
def served(request, tmp_path_factory, python, serving, finished):
    """The file of a recording, and the client's measurements."""
    root = tmp_path_factory.mktemp("served")
    with serving(root, request.param, SETTINGS) as (port, folder):
        assert len(list(folder.glob("*.jsonl.gz"))) == 1  # before the first request
        command = [python, CLIENT, root / "client.json", NUM_REQUESTS, 1.0, 1, 1.0, "random", f"vllm={port}"]
        subprocess.run(list(map(str, command)), check=True, timeout=300)
    return finished(folder), json.loads((root / "client.json").read_text())["vllm"]


def test_the_file_is_whole_although_vllm_kills_its_process_tree(served, request):
    path, rows = served
    with gzip.open(path) as file:
        assert json.loads(file.read().strip().split(b"\n")[-1])["kind"] == "end"
    trace = Trace.load(path)
    assert not trace.problems and trace.meta.source.startswith("vllm ") and trace.meta.source != "vllm unknown"
    assert len(trace.requests) == NUM_REQUESTS + 1 == len(rows) + 1  # and the warm-up
    assert trace.config["async_scheduling"] is ("[async]" in request.node.name)


def test_a_fork_without_changes_repeats_the_steps_of_vllm(served):
    trace = Trace.load(served[0])
    again = fork(trace)
    assert compare(trace, again).first_divergence is None and len(again) >= len(trace)


def test_the_recording_has_the_latencies_that_the_client_measured(served):
    path, rows = served
    values = values_of(Trace.load(path))
    for name in ("ttft", "e2e"):
        mean = sum(row[name] for row in rows) / len(rows)
        assert values[f"{name}_mean"] == pytest.approx(mean, rel=0.25)


def test_the_unchanged_setting_is_predicted(served):
    predictor = Predictor(Trace.load(served[0]))
    assert abs(predictor.errors["duration"]) < 0.05
    assert abs(predictor.errors["e2e_mean"]) < 0.15
