"""A real vLLM under torch's profiler: its recording and its profile share one time axis (``make test-vllm-cpu``)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

if not os.environ.get("VLLM_CPU_PYTHON"):
    pytest.skip("vllm-cpu is not installed here: make test-vllm-cpu", allow_module_level=True)

from workbench import Trace
from workbench.trace.formats.profile import join_profile

ROOT = Path(__file__).parents[2]
PREDICTION = ROOT / "benchmarks" / "prediction"
SETTINGS = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


def post(port, path, body=None):
    data = json.dumps(body or {}).encode()
    with urlopen(
        Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}), timeout=120
    ) as it:
        return it.read()


def complete(port, first):
    prompt = [[3 + (first + index * 7) % 900 for index in range(100)] for _ in range(3)]
    post(port, "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 6, "ignore_eos": True})


def served(kind, root, serving, finished):
    """The recording and the profiles of a server whose worker is another process."""
    config = {"profiler": "torch", "torch_profiler_dir": str(root / "profiles"), "torch_profiler_with_stack": False}
    with serving(root, kind, SETTINGS, "--profiler-config", json.dumps(config)) as (port, folder):
        complete(port, 0)
        post(port, "/start_profile")
        complete(port, 1)
        post(port, "/stop_profile")
        complete(port, 2)
    return finished(folder)


def in_one_process(root, python, finished):
    subprocess.run([sys.executable, str(PREDICTION / "tiny_model.py"), str(root / "tiny")], check=True)
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "WORKBENCH_TRACE_DIR": str(root / "traces"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).with_name("profiled_engine.py")
    command = [str(python), str(script), str(root / "tiny"), str(root / "profiles")]
    subprocess.run(command, check=True, env={**os.environ, **settings}, timeout=300)
    return finished(root / "traces")


@pytest.fixture(scope="module", params=["smooth", "smooth, asynchronous", "one process"])
def profiled(request, tmp_path_factory, python, serving, finished):
    """The recording and the profile of a vLLM; the profiler ran during the second of three batches of requests."""
    root = tmp_path_factory.mktemp("profiled")
    if request.param == "one process":
        path = in_one_process(root, python, finished)
    else:
        path = served(request.param, root, serving, finished)
    (profile,) = [path for path in (root / "profiles").glob("*.json*") if "async_llm" not in path.name]
    return Trace.load(path), profile, root, request.param == "one process"


def test_the_steps_of_the_profiled_requests_are_found(profiled):
    trace, profile, root, has_marks = profiled
    joined = join_profile(trace, profile, root / "joined.json")
    names = [*trace.requests][-6:-3]  # a server has had a request to warm up
    during = {record.step for record in trace for chunk in record.chunks if chunk.request_id in names}
    assert joined.by_marks is has_marks
    assert set(joined.marked) == during and not joined.unknown
    events = json.loads((root / "joined.json").read_bytes())["traceEvents"]
    steps = {event["name"]: event for event in events if event["name"].startswith("step ")}
    empty = "execute_context_0(0)_generation_0(0)"  # an iteration after the last one, without a step
    work = [event for event in events if event["name"].startswith("execute_") and event["name"] != empty]
    assert len(work) == len(during)
    for event, number in zip(sorted(work, key=lambda event: event["ts"]), sorted(during)):
        step = steps[f"step {number}"]
        assert event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1000
    first = steps[f"step {min(during)}"]
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    assert len(operations) > len(during) and all(event["ts"] >= first["ts"] for event in operations)
