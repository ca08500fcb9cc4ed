"""A server of real vLLM with a tiny model on the emulated accelerator, recorded; it is ended by a SIGTERM."""

import contextlib
import gzip
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREDICTION = ROOT / "benchmarks" / "prediction"


def benchmark():
    """The script benchmarks/bench_prediction.py, which starts servers."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("bench_prediction", ROOT / "benchmarks" / "bench_prediction.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def python():
    """Python of the environment that has vLLM."""
    return Path(os.environ["VLLM_CPU_PYTHON"]).absolute()


@pytest.fixture(scope="session")
def serving(python):
    """A context manager: the port of a server that records into a folder, and the folder."""

    @contextlib.contextmanager
    def serve(root, kind, settings, *flags):
        script = benchmark()
        if not (root / "tiny").exists():
            subprocess.run([sys.executable, str(PREDICTION / "tiny_model.py"), str(root / "tiny")], check=True)
        folder = root / kind / "s0"
        port = script.free_port()
        server = script.serve(python, folder, kind, port, settings, 0, *flags)
        try:
            script.wait_until_up([port])
            yield port, folder
            server.send_signal(signal.SIGTERM)
            server.wait(120)
        finally:
            server.kill()
            server.wait(30)

    return serve


@pytest.fixture(scope="session")
def finished():
    """A function: the recording in a folder, once its writer has ended the file."""

    def wait(folder):
        (path,) = folder.glob("*.jsonl.gz")
        for _ in range(100):
            with contextlib.suppress(EOFError), gzip.open(path) as file:
                if b'"kind":"end"' in file.read():
                    break
            time.sleep(0.2)
        return path

    return wait
