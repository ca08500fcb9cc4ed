"""Ctrl-C ends a hunt in several processes, and keeps what they found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MODULE = """
import os, pathlib
from planted import generous

made = 0

def counted(config):
    global made
    made += 1
    if made == 600:
        pathlib.Path(os.environ["SEEN"]).touch()
    return generous(config)

counted.features = generous.features
"""


def test_an_interrupted_hunt_keeps_its_findings(tmp_path):
    (tmp_path / "counting.py").write_text(MODULE)
    seen = tmp_path / "seen"
    paths = [str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SEEN": str(seen)}
    command = [sys.executable, "-m", "workbench", "hunt", "--scheduler", "counting:counted", "--for", "10m", "-j", "2"]
    run = subprocess.Popen(
        [*command, "--out", str(tmp_path / "found")],
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not seen.exists():  # a process has met the fault
        assert run.poll() is None
        time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does, to every process
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert json.loads(output.splitlines()[-1])["findings"] == ["limits-the-token-budget-is-exceeded"]
