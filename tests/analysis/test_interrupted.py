"""Ctrl-C during a prediction or a sweep of a real process prints the answer from what is known."""

import os
import signal
import subprocess
import sys
import time
from random import Random

import pytest

from workbench import simulate
from workbench.simulation.costs.cost_model import CostModel

SETTING = ("--set", "max_num_seqs=4")
SLO = ("--slo", "ttft_p99=1s", "--sweep", "max_num_seqs=2,3,4,6,8,12")


class Noisy:
    """A cost model with noise, so that a fit has something to be off by."""

    def __init__(self):
        self.random = Random(2)

    def step_seconds(self, chunks):
        seconds = CostModel(fixed=0.02, per_prefill_token=2e-4, per_sequence=1e-3).step_seconds(chunks)
        return seconds * self.random.uniform(0.95, 1.05)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    random, requests = Random(5), []
    for number in range(250):
        length, tokens = random.randrange(20, 400), random.randrange(20, 90)
        requests.append(
            {"id": f"r{number}", "prompt": {"len": length}, "max_tokens": tokens, "arrival_time": number / 4}
        )
    path = tmp_path_factory.mktemp("recording") / "run.jsonl.gz"
    simulate({"config": {"max_num_seqs": 16, "num_blocks": 400}, "requests": requests}, cost_model=Noisy()).save(path)
    return path


def interrupted(command, path, options, at):
    """The output of a command that gets SIGINT as soon as its progress bar shows a number of simulations."""
    arguments = [sys.executable, "-m", "workbench", "trace", command, str(path), *options, "--force"]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, restore_signals=True)
    seen, deadline = b"", time.monotonic() + 240
    while f" {at}/".encode() not in seen and time.monotonic() < deadline and child.poll() is None:
        seen += os.read(child.stderr.fileno(), 4096)
    child.send_signal(signal.SIGINT)
    out, rest = child.communicate(timeout=120)
    return child.returncode, out.decode(), (seen + rest).decode()


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize(
    ("command", "options", "at", "answer"),
    [
        ("whatif", SETTING, 3, "ttft_mean"),
        ("tune", SLO, 2, "settings were simulated"),
    ],
)
def test_ctrl_c_leaves_the_answer_so_far(recording, command, options, at, answer):
    code, out, said = interrupted(command, recording, options, at)
    assert code == 0, said
    assert answer in out and "Traceback" not in said
