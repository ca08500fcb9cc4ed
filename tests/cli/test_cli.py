"""The command line as a user sees it: its output and its exit status, once of each kind of a real process."""

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from workbench import Engine, Trace, simulate
from workbench.apps.cli import build_parser, main
from workbench.apps.cli.bench import serve_requests
from workbench.apps.cli.demo import _run_served, open_browser
from workbench.apps.demo import CONFIG, Arrivals
from workbench.base.served_names import own_addresses
from workbench.trace import TraceWriter

COMMAND = [sys.executable, "-m", "workbench"]
ENVIRONMENT = {**os.environ, "WORKBENCH_PREFLIGHT": "remembered"}
"""Of the processes: nothing is broken in them that the checks of a model are there for."""


def run(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=ENVIRONMENT, **options
    )


@pytest.fixture
def run_here(capsys):
    """As `run`, in this process: an interpreter and its imports take longer than most commands."""

    def run_it(*arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run_it


def test_a_process_ends_with_the_status_of_its_command(tmp_path):
    shown, wrong = run("--help"), run("simulate", tmp_path / "none.json")
    assert shown.returncode == 0 and shown.stdout.startswith("usage: workbench") and shown.stderr == ""
    assert wrong.returncode == 2 and wrong.stdout == "" and "No such file" in wrong.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["demo", "simulate", "trace", "bench", "kernel", "notebooks"])
def test_every_command_has_help(run_here, command):
    finished = run_here(command, "--help")
    assert finished.returncode == 0 and finished.stdout.startswith(f"usage: workbench {command}")


def test_help_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from workbench.apps.cli import build_parser\n"
        "build_parser()\n"
        "heavy = ('mlx', 'mlx_lm', 'msgspec', 'numba', 'numpy', 'panel', 'tornado', 'tqdm')\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in heavy]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "/no/such/file.json"], "No such file"),
        (["demo", "--port", "99999999"], "--port must be from 1 to 65535, got 99999999"),
        (["demo", "--headless", "--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["bench", "--num-requests", "0"], "--num-requests must be >= 1, got 0"),
        (["fly"], "invalid choice"),
    ],
)
def test_bad_input_is_an_error_on_stderr_with_status_2(run_here, arguments, words):
    finished = run_here(*arguments)
    assert finished.returncode == 2 and words in finished.stderr.splitlines()[-1]
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("group", [(), ("trace",), ("fleet",), ("kernel",), ("course",)])
def test_a_group_without_a_command_lists_its_commands(run_here, group):
    finished = run_here(*group)
    assert finished.returncode == 2 and finished.stderr == run_here(*group, "--help").stdout


@pytest.mark.parametrize(
    "command", [["run", "--router"], ["size", "--slo", "ttft_p99=1s", "--router"], ["compare", "--routers"]]
)
def test_an_unknown_router_is_refused_before_the_log_is_read(run_here, command):
    finished = run_here("fleet", command[0], "/no/such/log.csv", *command[1:], "stiky")
    assert finished.returncode == 2 and "did you mean sticky?" in finished.stderr and not finished.stdout


@pytest.mark.parametrize("content", ["{", '{"requests": [{"id": "a"}]}', '{"requests": [], "config": {"blocks": 3}}'])
def test_a_bad_workload_is_one_line(run_here, tmp_path, content):
    path = tmp_path / "workload.json"
    path.write_text(content)
    finished = run_here("simulate", path)
    assert finished.returncode == 2 and len(finished.stderr.splitlines()) == 1


def test_simulate_writes_a_trace_that_trace_info_reads(run_here, tmp_path):
    workload, saved = tmp_path / "workload.json", tmp_path / "trace.jsonl.gz"
    workload.write_text(json.dumps({"requests": [{"id": "a", "prompt": {"len": 40}, "max_tokens": 3}]}))
    assert run_here("simulate", workload, "--out", saved).returncode == 0
    assert len(Trace.load(saved)) == 3
    shown = run_here("trace", "info", saved)
    assert shown.returncode == 0 and "time to first token" in shown.stdout


def test_fields_are_set_in_place_of_those_of_the_workload(run_here, tmp_path):
    workload, saved = tmp_path / "workload.json", tmp_path / "trace.jsonl"
    requests = [{"id": name, "prompt": [1, 2, 3], "max_tokens": 4} for name in "ab"]
    workload.write_text(json.dumps({"requests": requests, "config": {"max_num_seqs": 4, "block_size": 8}}))
    assert run_here("simulate", workload, "--set", "max_num_seqs=1", "--out", saved).returncode == 0
    found = Trace.load(saved)
    assert (found.meta.config["max_num_seqs"], found.meta.config["block_size"], len(found)) == (1, 8, 8)
    twice = run_here("simulate", workload, "--set", "max_num_seqs=1", "--sweep", "max_num_seqs=1,2")
    assert twice.returncode == 2 and "--set and --sweep both give max_num_seqs" in twice.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["whatif", "--set", "max_num_seqs=abc"], "max_num_seqs must be an integer from 1 to 2147483647, got 'abc'"),
        (["whatif", "--set", "num_block"], "--set 'num_block': unknown field 'num_block' (did you mean num_blocks?)"),
        (["tune", "--slo", "ttft_p99=1s", "--sweep", "foo"], "--sweep 'foo': unknown field 'foo'; --sweep help"),
    ],
)
def test_a_wrong_setting_is_all_that_is_shown(run_here, arguments, message):
    command, *rest = arguments
    finished = run_here("trace", command, "examples/vllm_preemption.jsonl.gz", *rest)
    assert finished.returncode == 2 and finished.stderr.startswith(f"workbench trace {command}: {message}")
    assert len(finished.stderr.splitlines()) == 1  # no progress bar


@pytest.fixture
def bench(tiny_llama, tmp_path):
    """Runs ``workbench bench`` with a tiny model: its trace, and the number of steps in the file after each step."""
    path, in_file = tmp_path / "trace.jsonl", []

    def make_engine(config):
        engine = Engine(tiny_llama, config)
        engine.on_step(lambda record: path.exists() and in_file.append(len(Trace.load(path))))
        return engine

    def run_it():
        options = ["bench", "--num-requests", "2", "--input-len", "9", "--output-len", "4", "--out", str(path)]
        assert serve_requests(build_parser().parse_args(options), tiny_llama, make_engine) == 0
        return Trace.load(path)

    return run_it, in_file


def test_the_trace_of_a_bench_is_written_while_it_runs(bench, capsys):
    run_it, in_file = bench
    trace = run_it()
    assert len(trace) > 3 and trace.end == "done" and trace.requests.keys() == {"r0", "r1"}
    assert in_file == [*range(1, len(trace) + 1)]
    assert f"wrote {len(trace)} steps to" in capsys.readouterr().out


def test_a_bench_whose_trace_is_cut_off_fails(bench, monkeypatch):
    write = TraceWriter.write

    def full_after_two_steps(self, line, **options):
        if self.num_steps == 2:
            raise OSError("no space left")
        write(self, line, **options)

    monkeypatch.setattr(TraceWriter, "write", full_after_two_steps)
    with pytest.raises(OSError, match=r"holds 2 of \d+ steps"):
        bench[0]()


def test_a_port_in_use_is_said_before_anything_else(run_here, smollm2):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = run_here("demo", "--no-browser", "--port", port)
    assert finished.returncode == 2 and finished.stdout == ""
    assert finished.stderr.splitlines()[-1].startswith(f"workbench demo: port {port} of 127.0.0.1 cannot be used: ")


@pytest.mark.parametrize(
    ("port", "words"),
    [("http", "invalid int value: 'http'"), ("70000", "must be from 1 to 65535"), ("-1", "from 1 to")],
)
def test_a_port_that_is_none_is_refused_in_public_words(run_here, port, words):
    finished = run_here("demo", "--no-browser", f"--port={port}")
    last = finished.stderr.splitlines()[-1]
    assert finished.returncode == 2 and finished.stdout == ""
    assert "--port" in last and words in last and "_port" not in last


def test_the_demo_opens_the_browser_that_there_is(monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert not open_browser("http://127.0.0.1:5006") and opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    assert open_browser("http://127.0.0.1:5006") and opened == ["http://127.0.0.1:5006"]


def test_narrate_tells_every_step(run_here, tmp_path):
    workload = {"requests": [{"id": "a", "prompt": {"len": 40}, "max_tokens": 3}]}
    cut = {"config": {"max_model_len": 43}, "requests": [{"id": "a", "prompt": {"len": 40}, "max_tokens": 4}]}
    simulate(cut).save(tmp_path / "cut.jsonl")
    said = run_here("trace", "narrate", tmp_path / "cut.jsonl").stdout.splitlines()
    assert said[-1] == "Step 2: the reply to a grows by one token; a is done (hit max_model_len)."
    simulate(workload).save(tmp_path / "trace.jsonl")
    shown = run_here("trace", "narrate", tmp_path / "trace.jsonl")
    assert shown.stdout.splitlines() == [
        "Step 0: all 40 prompt tokens of a take one pass.",
        "Step 1: the reply to a grows by one token.",
        "Step 2: the reply to a grows by one token; a is done (hit max_tokens).",
    ]


@pytest.fixture
def demo(smollm2):
    """The served demo as a separate process on a free port, ended with Ctrl-C."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [*COMMAND, "demo", "--no-browser", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )
    yield process, port
    if process.poll() is None:
        process.kill()
    process.stdout.close()


def test_the_demo_serves_its_page_prints_the_address_and_ends_cleanly(demo):
    process, port = demo
    lines = []

    def read_until(words):
        while not lines or words not in lines[-1]:
            line = process.stdout.readline()
            assert line, "the demo ended: " + "".join(lines)
            lines.append(line)

    read_until(f"http://127.0.0.1:{port}")
    # At the first try: the address can be opened as soon as it is printed.
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
        assert page.status == 200
    read_until("step")
    os.kill(process.pid, signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0 and "Traceback" not in rest
    assert rest.rstrip().endswith("stopped")


@pytest.mark.repeats(of="test_the_demo_serves_its_page_prints_the_address_and_ends_cleanly")
def test_the_headless_demo_prints_every_text_and_a_summary(smollm2):
    finished = run("demo", "--headless")
    assert finished.returncode == 0
    for name in ("long", "paris", "week", "sky", "seasons", "leaves"):
        assert f"\n{name} (" in finished.stdout
    assert "The capital of France is Paris." in finished.stdout
    steps = re.findall(r"^step.*(?:\n {20}.*)*", finished.stdout, re.M)
    steps = [" ".join(line.split()) for line in steps]
    assert any(re.search(r"\d+ prompt tokens and \d+ repl(y|ies) share one pass", line) for line in steps)
    assert any("waits: the token budget is used up" in line for line in steps)
    assert "time to first token" in finished.stdout


def test_the_headless_demo_is_as_wide_as_the_terminal_and_silent_without_a_reader(smollm2):
    command = f"{shlex.join(map(str, [*COMMAND, 'demo', '--headless']))} | head -n 6"
    environment = ENVIRONMENT | {"COLUMNS": "60"}
    finished = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, env=environment)
    lines = finished.stdout.splitlines()
    assert finished.stderr == "" and len(lines) == 6 and max(map(len, lines)) <= 60


def test_requests_of_the_demo_that_come_after_its_engine_was_closed_are_left_out(smollm2, capsys):
    with Engine(smollm2, CONFIG) as engine:
        arrivals = Arrivals(engine)
        arrivals.begin()
        record = engine.step()
    arrivals._add_due(10**6)
    assert record is not None and not arrivals._pending and "step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "allowed", "is_open", "addresses"),
    [
        ("127.0.0.1", (), True, ["http://127.0.0.1:5006"]),
        ("127.0.0.1", ("tunnel.example.org",), False, ["http://127.0.0.1:5006"]),
        ("0.0.0.0", (), False, ["http://192.0.2.7:5006", "http://192.0.2.9:5006"]),
        ("192.0.2.7", (), False, ["http://192.0.2.7:5006"]),
    ],
)
def test_the_demo_of_a_class_prints_its_links_and_gives_control_to_the_teacher(
    host, allowed, is_open, addresses, monkeypatch, capsys
):
    def serve(engine, *, on_listening, room, address, allow_hosts, **_):
        assert (address, allow_hosts, room._is_open) == (host, allowed, is_open)
        on_listening()
        assert room.origins == [each for each in addresses if "127.0.0.1" not in each], "the class gets what is printed"
        found.append(room.key)

    found = []
    monkeypatch.setattr("workbench.viz.app.serve", serve)
    monkeypatch.setattr("workbench.viz.app.check_port_is_free", lambda port, address: None)
    monkeypatch.setattr("workbench.apps.demo.Arrivals", lambda engine: MagicMock())
    monkeypatch.setattr("workbench.base.served_names.own_addresses", lambda: ["192.0.2.7", "192.0.2.9"])
    assert _run_served(host, 5006, allowed, False, lambda config: MagicMock()) == 0
    printed = capsys.readouterr().out
    assert f"to teach: {addresses[0]}/#teach={found[0]}" in printed
    assert [f"{address}/#follow" in printed for address in addresses] == [True] * len(addresses)
    assert ("warning: everybody who reaches" in printed) is not is_open


def test_own_addresses_are_those_of_other_machines(monkeypatch):
    assert all(not address.startswith("127.") for address in own_addresses())
    here = [SimpleNamespace(family=socket.AF_INET, address="10.42.0.1"), SimpleNamespace(family=-1, address="aa:bb")]
    loop = [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"hotspot": here, "lo": loop})
    assert "10.42.0.1" in own_addresses() and "127.0.0.1" not in own_addresses(), "a hotspot's, which has no name"


@pytest.mark.parametrize("words", ["trace narrate examples/vllm_preemption.jsonl.gz", "simulate x --set help"])
def test_output_that_nobody_reads_ends_the_command_without_a_message(words):
    """As behind ``head``, which has read enough."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, *words.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, env=ENVIRONMENT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


class Watched(io.StringIO):
    """An output that keeps the lines that were said before all files of a command were there."""

    def __init__(self, names):
        super().__init__()
        self.paths, self.early = [Path(name.partition(": ")[0].split()[-1]) for name in names], []

    def write(self, text):
        if text.strip() and not all(path.exists() for path in self.paths):
            self.early.append(text)
        return super().write(text)


def test_what_a_command_writes_is_said_and_is_there_before_its_answer(tmp_path, monkeypatch):
    """The reader of an answer may leave after its first lines, as ``head`` does."""
    monkeypatch.chdir(tmp_path)
    requests = [{"id": f"r{n}", "prompt": {"len": 20}, "max_tokens": 3, "arrival_time": n / 9} for n in range(40)]
    Path("work.json").write_text(json.dumps({"requests": requests, "cost_model": {"fixed": 0.01}}))
    steps = len(simulate("work.json"))
    tune = "trace tune run.jsonl --slo ttft_p99=1s --sweep max_num_seqs=1,256"
    for command, written in (
        ("simulate work.json --out run.jsonl", [f"{steps} steps to run.jsonl"]),
        ("trace whatif run.jsonl --out if.jsonl", [f"{steps} predicted steps to if.jsonl"]),
        (f"{tune} --out t.csv --plot t.svg", ["t.csv", "t.svg"]),
        ("trace html run.jsonl --out t.html", ["t.html"]),
        ("fleet compare work.json --routers random --jobs 1 --rows r.jsonl", ["1 row to r.jsonl"]),
        ("simulate work.json --sweep max_num_seqs=1,2 --jobs 1 --out s.csv --plot s.svg", ["s.csv", "s.svg"]),
        ("fleet run work.json --replicas 2 --out traces --plot f.svg", ["f.svg", "2 traces to traces"]),
        ("fleet compare work.json --routers random --jobs 1 --plot c.svg", ["c.svg"]),
    ):
        output = Watched(written)
        monkeypatch.setattr(sys, "stdout", output)
        assert main(command.split()) == 0
        said = output.getvalue().splitlines()
        assert [line for line in said if line.startswith("wrote ")] == [f"wrote {name}" for name in written]
        assert all(path.exists() for path in output.paths)
        assert all(line.startswith("work.json: ") for line in output.early), "only what is said before a long run"


def test_an_answer_is_said_although_its_file_cannot_be_written(run_here, tmp_path):
    (tmp_path / "work.json").write_text(json.dumps({"requests": [{"id": "a", "prompt": {"len": 20}}]}))
    (tmp_path / "file").write_text("")
    found = run_here("simulate", tmp_path / "work.json", "--out", tmp_path / "file" / "run.jsonl")
    assert found.returncode == 2 and "1 of 1 request" in found.stdout and "wrote" not in found.stdout
    assert str(tmp_path / "file") in found.stderr


def test_one_replica_is_no_plural(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    requests = [{"id": f"r{n}", "prompt": {"len": 20}, "max_tokens": 3, "arrival_time": n / 9} for n in range(4)]
    Path("work.json").write_text(json.dumps({"requests": requests, "cost_model": {"fixed": 0.01}}))
    assert main(["fleet", "size", "work.json", "--slo", "ttft_p99=2s", "--repeats", "1", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "\n1 replica with round_robin meets ttft_p99 <= 2 s\n" in said and "\n1 replica still meets it at " in said
    assert "\n< the smallest fleet that meets the target\n" in said and "ttft_p99: 10 ms to 10 ms over 2 runs\n" in said
    assert main(["fleet", "run", "work.json", "--replicas", "1"]) == 0
    assert "round_robin, 1 replica: 4 of 4 requests ended in " in capsys.readouterr().out


def test_record_keeps_the_steps_it_names_and_a_folder_is_looked_for_first(tmp_path, capsys):
    requests = [{"id": f"r{n}", "prompt": {"len": 30}, "max_tokens": 6, "arrival_step": n} for n in range(4)]
    (tmp_path / "w.json").write_text(json.dumps({"requests": requests}))
    command = ["simulate", str(tmp_path / "w.json"), "--out"]
    assert main([*command, str(tmp_path / "part.jsonl"), "--record", "2:5"]) == 0
    whole = simulate({"requests": requests})
    part = Trace.load(tmp_path / "part.jsonl")
    assert [record.step for record in part] == [2, 3, 4]
    assert [record.chunks for record in part] == [record.chunks for record in whole[2:5]]
    for given, words in (("3:x", "must be FIRST:LAST"), ("900:901", f"has only {len(whole)} steps")):
        capsys.readouterr()
        assert main([*command, str(tmp_path / "none.jsonl"), "--record", given]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "none.jsonl").exists()
    assert main([*command, str(tmp_path / "nowhere" / "run.jsonl")]) == 2
    told = capsys.readouterr()
    assert "there is no folder" in told.err and not told.out, "before the run"
