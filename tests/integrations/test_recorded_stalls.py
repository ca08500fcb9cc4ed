"""Stalls planted into a real process that records: each is named as one, with its cause if the machine counts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.costs.stalls import causes_of
from workbench.trace import Trace

SUPPORT = Path(__file__).parents[1] / "support"

SCRIPT = """
import gc, os, signal, subprocess, sys, time
import vllm_double
from vllm_recordings import RecordingDouble
from workbench.simulation.workload import read_workload

kind, num_steps = sys.argv[1], 0
garbage = [[] for _ in range(1_000_000 if kind == "gc" else 0)]

def forward():
    global num_steps
    num_steps += 1
    time.sleep(0.003)
    if num_steps == 120:
        if kind == "sleep":
            time.sleep(0.6)
        elif kind == "gc":
            until = time.monotonic() + 0.6
            while time.monotonic() < until:
                gc.collect()
        elif kind == "stop":
            subprocess.Popen(["sh", "-c", f"sleep 0.6; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

config, arrivals = read_workload({
    "config": {"block_size": 16, "num_blocks": 400, "max_num_batched_tokens": 256},
    "requests": [{"id": f"r{n}", "prompt": {"len": 40}, "max_tokens": 150, "arrival_step": n} for n in range(6)],
})
gc.disable()
scheduler = RecordingDouble(config)
update = scheduler.update_from_output
def slow(*args):
    forward()
    return update(*args)
scheduler.update_from_output = slow
vllm_double.drive(scheduler, arrivals)
scheduler.shutdown()
"""


@pytest.mark.parametrize("kind", ["sleep", "gc", "stop", "none"])
def test_a_planted_stall_is_named_and_nobody_is_blamed(kind, tmp_path):
    search = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    environ = {**os.environ, "WORKBENCH_TRACE_DIR": str(tmp_path), "PYTHONPATH": search}
    subprocess.run([sys.executable, "-c", SCRIPT, kind], env=environ, check=True, timeout=120)
    (path,) = tmp_path.iterdir()
    trace = Trace.load(path)
    assert not trace.problems
    found = [stall for stall in trace.stalls() if stall.excess > 0.3]  # a busy machine may stall for a moment too
    if kind == "none":
        assert not found
        return
    (stall,) = found
    assert stall.num_tokens == 6 and str(stall).startswith(f"step {stall.step} took ")
    assert ("garbage was collected for" in stall.causes) is (kind == "gc")
    explanation = trace.explain("r0")
    assert max(explanation.parts, key=lambda part: part.amount).kind in ("stall", "own", "decodes")
    assert any(part.kind == "stall" and not part.culprits for part in explanation.parts)


def test_causes_are_told_from_facts_of_any_file():
    assert causes_of({}) == causes_of({"collecting": "long", "steal": None, "cpu_wait": 0.001}) == ""
    assert causes_of({"steal": 1.5, "cpu_wait": 0.5}).count(",") == 1
