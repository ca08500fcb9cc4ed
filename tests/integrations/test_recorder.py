"""Faults of a recording: none of them reaches the server."""

import contextlib
import gzip
import os
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import vllm_double
from vllm_double import RequestDouble, VllmSchedulerDouble
from vllm_recordings import (
    LONG,
    RecordingDouble,
    run_double,
    warnings_of,
)

from workbench.simulation.simulate import simulate
from workbench.simulation.workload import read_workload
from workbench.trace import Trace
from workbench.trace.recorders import recorder, writer_process
from workbench.trace.recorders import vllm as integration
from workbench.trace.recorders.messages import (
    Schedule,
)
from workbench.trace.recorders.settings import RecordingSettings


def test_a_full_disk_ends_the_recording_with_one_warning(traces, monkeypatch, caplog):
    monkeypatch.setenv("WORKBENCH_TRACE_GZIP", "0")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # Python 3.11 would keep what is written of a module
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # inherited by the writer's process
    try:
        config, arrivals = read_workload(LONG)
        scheduler = RecordingDouble(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer = scheduler.recorder.writer
    vllm_double.drive(scheduler, arrivals)  # nothing is sent after the last step, so the fault may not be noticed yet
    wait_until_gone(writer.pid)
    again = [RequestDouble(arrival.to_request()) for arrival in arrivals]
    for request in again[:2]:
        scheduler.add_request(request)
        for _ in range(20):
            output = scheduler.schedule()
            scheduler.update_from_output(output, vllm_double.run_model(scheduler, output))
    assert not scheduler.requests  # all of them were served
    assert scheduler.recorder.writer is None
    scheduler.shutdown()
    (warning,) = warnings_of(caplog)
    assert "File too large" in warning and "without a recording" in warning
    (path,) = traces.iterdir()
    trace = Trace.load(path)  # the part that was written
    assert trace.end == "cut" and 0 < len(trace) < len(simulate(LONG))


def test_a_killed_writer_gives_one_warning(traces, caplog):
    config, arrivals = read_workload(LONG)
    scheduler = RecordingDouble(config)
    writer = scheduler.recorder.writer
    os.kill(writer.pid, signal.SIGKILL)
    wait_until_gone(writer.pid)
    assert vllm_double.drive(scheduler, arrivals) == len(simulate(LONG))
    scheduler.shutdown()
    (warning,) = warnings_of(caplog)
    assert "its process has ended" in warning


def test_a_writer_that_does_not_keep_up_never_blocks(traces, monkeypatch, caplog):
    monkeypatch.setattr(writer_process, "MAX_BACKLOG_BYTES", 1000)
    monkeypatch.setattr(recorder, "SEND_SECONDS", -1.0)
    monkeypatch.setattr(writer_process, "PIPE_BYTES", 4096)
    config, arrivals = read_workload(LONG)
    scheduler = RecordingDouble(config)
    pid = scheduler.recorder.writer.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(4):  # 4 KB of messages each time
            assert vllm_double.drive(scheduler, arrivals, max_steps=34) == 34
        assert scheduler.recorder.writer is None
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)
    (warning,) = warnings_of(caplog)
    assert "behind" in warning


def test_a_fault_of_the_recorder_does_not_reach_the_server(traces, monkeypatch, caplog, in_process):
    calls = []

    def broken(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("a fault in the recorder")
        return Schedule(*args)

    monkeypatch.setattr(recorder, "Schedule", broken)
    config, arrivals = read_workload(LONG)
    scheduler = RecordingDouble(config)
    assert vllm_double.drive(scheduler, arrivals) == len(simulate(LONG))
    (warning,) = warnings_of(caplog)
    assert "a fault in the recorder" in warning
    assert scheduler.recorder.messages == []  # no messages are collected after that


def test_an_error_of_the_server_is_not_caught(in_process, monkeypatch):
    monkeypatch.setattr(VllmSchedulerDouble, "schedule", lambda self: 1 / 0)
    scheduler = RecordingDouble(read_workload(LONG)[0])
    with pytest.raises(ZeroDivisionError):
        scheduler.schedule()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKBENCH_TRACE_MAX_MB", "0"),
        ("WORKBENCH_TRACE_MAX_MB", "ten"),
        ("WORKBENCH_TRACE_MAX_FILES", "-1"),
        ("WORKBENCH_TRACE_TOKENS", "yes"),
        ("WORKBENCH_TRACE_GZIP", "2"),
        ("WORKBENCH_TRACE_MAX_WAITING", "9999999999999"),
    ],
)
def test_a_wrong_setting_is_named_and_there_is_no_recording(name, value, traces, monkeypatch, caplog):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        RecordingSettings.from_environment()
    config, arrivals = read_workload(LONG)
    scheduler = RecordingDouble(config)
    assert scheduler.recorder.writer is None
    assert vllm_double.drive(scheduler, arrivals) == len(simulate(LONG))
    scheduler.shutdown()
    (warning,) = warnings_of(caplog)
    assert name in warning and value in warning
    assert not traces.exists()


def test_another_vllm_is_not_recorded(traces, monkeypatch, caplog):
    monkeypatch.setattr(integration, "_HOOKS", ("_of_another_version",))
    assert RecordingDouble(read_workload(LONG)[0]).recorder.writer is None
    (warning,) = warnings_of(caplog)
    assert "_of_another_version" in warning and "vLLM 0.33" in warning


def wait_until_gone(pid: int) -> None:
    """Wait until a process that is not a child of this one has ended."""
    for _ in range(6000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":  # nothing adopts orphans here
                return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still runs after 120 s")


def wait_for(folder: Path) -> None:
    """Wait until the writer's process has made its first file."""
    for _ in range(6000):
        if folder.exists() and any(folder.iterdir()):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing in {folder} after 120 s")


def test_an_engine_that_dies_leaves_a_whole_file(traces):
    scheduler = run_double(LONG)
    writer = scheduler.recorder.writer
    wait_for(traces)
    for sign in (signal.SIGINT, signal.SIGTERM):  # sent to every process of a service
        os.kill(writer.pid, sign)
    writer._stdin.close()  # as the end of the engine's process does
    assert writer.wait(30) == ""
    writer._stdout.close()
    (path,) = traces.iterdir()
    trace = Trace.load(path)
    assert not trace.problems and len(trace) == len(simulate(LONG))


def test_the_writer_compares_the_wall_clock_with_that_of_the_steps(traces, monkeypatch):
    """The engine's wall clock is 1000 s slow when it begins, and right when the writer looks at it."""
    slow = types.SimpleNamespace(time=lambda: time.time() - 1000, strftime=time.strftime, localtime=time.localtime)
    monkeypatch.setattr(integration, "time", slow)
    run_double(LONG).shutdown()
    (path,) = traces.iterdir()
    assert Trace.load(path).clock_drift == pytest.approx(1000, abs=60)


ENGINE = """
import os, sys, time
sys.path[:0] = {path!r}
from test_recorder import LONG, run_double
scheduler = run_double(LONG)
print(scheduler.recorder.writer.pid, flush=True)
time.sleep(60)
"""


def descendants(pid: int) -> set[int]:
    """All processes below a process, as a tool that kills a process tree finds them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_killed_process_tree_leaves_a_whole_file(traces):
    code = ENGINE.format(path=[entry for entry in sys.path if entry])
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        writer = int(engine.stdout.readline())
        wait_for(traces)
        tree = descendants(engine.pid)
        assert writer not in tree
        for pid in (*tree, engine.pid):
            os.kill(pid, signal.SIGKILL)
        engine.wait(30)
    finally:
        engine.kill()
        engine.stdout.close()
    wait_until_gone(writer)
    (path,) = traces.iterdir()
    with gzip.open(path) as file:
        assert b'"end"' in file.read().split(b"\n")[-2]
    trace = Trace.load(path)
    assert not trace.problems and len(trace) > 0.9 * len(simulate(LONG))  # the last 0.1 s may be missing


def test_the_folder_and_the_file_are_there_before_the_first_request(traces):
    scheduler = RecordingDouble(read_workload(LONG)[0])
    wait_for(traces)
    scheduler.shutdown()
    (path,) = traces.iterdir()
    assert len(Trace.load(path)) == 0
