"""The command line as a person meets it: a real process, its output and its exit status."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from workbench import Engine, Trace
from workbench.bench import _serve_requests
from workbench.cli import build_parser
from workbench.trace import TraceWriter

COMMAND = [sys.executable, "-m", "workbench.cli"]


def run(*arguments, **options):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize("command", [[], ["demo"], ["simulate"], ["trace"], ["bench"], ["kernel"]])
def test_every_command_has_help(command):
    finished = run(*command, "--help")
    assert finished.returncode == 0 and "usage: workbench" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "/no/such/file.json"], "No such file"),
        (["demo", "--port", "99999999"], "99999999 is not a port"),
        (["demo", "--headless", "--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["bench", "--num-requests", "0"], "--num-requests must be >= 1, got 0"),
        (["fly"], "invalid choice"),
    ],
)
def test_bad_input_is_told_on_stderr_with_status_2(arguments, words):
    finished = run(*arguments)
    assert finished.returncode == 2 and words in finished.stderr.splitlines()[-1]
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("content", ["{", '{"requests": [{"id": "a"}]}', '{"requests": [], "config": {"blocks": 3}}'])
def test_a_bad_workload_is_one_line(tmp_path, content):
    path = tmp_path / "workload.json"
    path.write_text(content)
    finished = run("simulate", path)
    assert finished.returncode == 2 and len(finished.stderr.splitlines()) == 1


def test_simulate_writes_a_trace_that_trace_info_reads(tmp_path):
    workload, saved = tmp_path / "workload.json", tmp_path / "trace.jsonl.gz"
    workload.write_text(json.dumps({"requests": [{"id": "a", "prompt": {"len": 40}, "max_tokens": 3}]}))
    assert run("simulate", workload, "--trace", saved).returncode == 0
    assert len(Trace.load(saved)) == 3
    shown = run("trace", "info", saved)
    assert shown.returncode == 0 and "time to first token" in shown.stdout


@pytest.fixture
def bench(tiny_llama, tmp_path):
    """Runs ``workbench bench`` over a tiny model; its trace, and the steps that were in the file after each step."""
    path, in_file = tmp_path / "trace.jsonl", []

    def make_engine(config):
        engine = Engine(tiny_llama, config)
        engine.on_step(lambda record: path.exists() and in_file.append(len(Trace.load(path))))
        return engine

    def run_it():
        options = ["bench", "--num-requests", "2", "--input-len", "9", "--output-len", "4", "--trace", str(path)]
        assert _serve_requests(build_parser().parse_args(options), tiny_llama, make_engine) == 0
        return Trace.load(path)

    return run_it, in_file


def test_the_trace_of_a_bench_is_written_while_it_runs(bench, capsys):
    run_it, in_file = bench
    trace = run_it()
    assert len(trace) > 3 and trace.end == "done" and trace.requests.keys() == {"r0", "r1"}
    assert in_file == [*range(1, len(trace) + 1)]
    assert f"{len(trace)} steps saved" in capsys.readouterr().out


def test_a_bench_does_not_pass_off_half_a_trace_as_saved(bench, monkeypatch):
    write = TraceWriter.write

    def full_after_two_steps(self, line, **options):
        if self.num_steps == 2:
            raise OSError("no space left")
        write(self, line, **options)

    monkeypatch.setattr(TraceWriter, "write", full_after_two_steps)
    with pytest.raises(OSError, match=r"holds 2 of \d+ steps"):
        bench[0]()


@pytest.fixture
def demo(smollm2):
    """The served demo as a process of its own, on a free port; ended with Ctrl-C."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [*COMMAND, "demo", "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    yield process, port
    if process.poll() is None:
        process.kill()
    process.stdout.close()


def test_the_demo_serves_its_page_says_where_and_ends_cleanly(demo):
    process, port = demo
    lines = []
    while not any(line.startswith("step") for line in lines):
        line = process.stdout.readline()
        assert line, "the demo ended: " + "".join(lines)
        lines.append(line)
    assert any(f"http://127.0.0.1:{port}" in line for line in lines)
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as page:
                assert page.status == 200
                break
        except OSError:
            time.sleep(0.2)
    else:
        pytest.fail("the page did not come up")
    os.kill(process.pid, signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0 and "Traceback" not in rest
    assert rest.rstrip().endswith("stopped")


def test_the_headless_demo_prints_every_text_and_a_summary(smollm2):
    finished = run("demo", "--headless")
    assert finished.returncode == 0
    for name in ("long", "strings", "lists", "while", "import", "lambda", "assert", "global"):
        assert f"\n{name} (" in finished.stdout
    steps = [line for line in finished.stdout.splitlines() if line.startswith("step")]
    assert any(
        "decode" in line and "prefill long" in line and not line.split("|")[1].strip().startswith("0") for line in steps
    )
    assert "time to first token" in finished.stdout
