"""The wall clock against the clock of the steps: recorded in the last line of each file, kept, and printed."""

import time

import msgspec
import pytest

from workbench import Trace, simulate
from workbench.apps.cli import main
from workbench.trace.follower import TraceFollower
from workbench.trace.lines import TraceMeta
from workbench.trace.readings.recorded_when import recorded_when
from workbench.trace.recorders.trace_files import TraceFiles
from workbench.trace.storage import lines_of

CREATED = time.mktime((2026, 1, 31, 12, 8, 3, 0, 0, -1))


def recorded(folder, drifts, created=CREATED, **options):
    """A run, written as a recorder does, with a wall clock that has gained these seconds after each step."""
    requests = [{"id": f"r{n}", "prompt": {"len": 20}, "max_tokens": 4, "arrival_time": n / 4} for n in range(6)]
    run = simulate({"requests": requests, "config": {"num_blocks": 64}, "cost_model": {"fixed": 0.25}})
    meta = msgspec.structs.replace(run.meta, created=created, source="vllm 0.32.0")
    reads = iter(drifts)
    last = [0.0]

    def read_drift():
        last[0] = next(reads, last[0])
        return last[0]

    files = TraceFiles(folder, "vllm-x", meta, gzip=False, read_drift=read_drift, **options)
    for line in lines_of(run):
        files.write(line)
    files.close()
    return sorted(folder.glob("*.jsonl"))


def test_the_drift_after_the_last_step_is_in_the_last_line(tmp_path):
    (path,) = recorded(tmp_path, [0.1, -0.012])
    trace = Trace.load(path)
    assert trace.clock_drift == -0.012 and trace[1:].clock_drift == -0.012
    assert trace[:2].clock_drift is msgspec.UNSET  # a part that ends before says nothing
    assert recorded_when(trace).endswith("(local time; the wall clock lost 12 ms meanwhile)")
    assert "gained" not in recorded_when(trace[:2]) and "from 2026-01-31 12:08:03 to " in recorded_when(trace)
    assert recorded_when(trace[:1]) == "at 2026-01-31 12:08:03 (local time)"
    follower = TraceFollower(path)
    follower.stop()
    assert follower.trace.clock_drift == -0.012
    trace.save(tmp_path / "copy.jsonl.gz")
    assert Trace.load(tmp_path / "copy.jsonl.gz").clock_drift == -0.012


def test_each_file_has_the_drift_of_its_own_last_step(tmp_path):
    paths = recorded(tmp_path, [second / 10 for second in range(1, 99)], max_file_bytes=2000)
    drifts = [Trace.load(path).clock_drift for path in paths]
    assert len(paths) > 2 and drifts == sorted(drifts) and len(set(drifts)) == len(drifts)
    steps = [len(Trace.load(path)) for path in paths]
    assert drifts == pytest.approx([sum(steps[: n + 1]) / 10 for n in range(len(steps))])


def test_a_recording_without_drift_is_read_as_before(tmp_path):
    simulate({"requests": [{"id": "a", "prompt": [1], "max_tokens": 1}]}).save(tmp_path / "run.jsonl")
    assert b"clock_drift" not in (tmp_path / "run.jsonl").read_bytes()
    trace = Trace.load(tmp_path / "run.jsonl")
    assert trace.clock_drift is msgspec.UNSET and recorded_when(trace) == ""
    assert recorded_when(Trace(TraceMeta(created=CREATED))) == ""


def test_commands_print_the_time_of_day_of_a_recording(tmp_path, capsys):
    (path,) = recorded(tmp_path, [2.5])
    when = recorded_when(Trace.load(path))
    assert "the wall clock gained 2.5 s meanwhile" in when
    assert main(["trace", "info", str(path)]) == 0
    assert when in capsys.readouterr().out
    assert main(["trace", "narrate", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("12:08:03  Step 0: ") and told[4].startswith("12:08:04  Step 4: ")
    assert main(["trace", "diff", str(path), str(path)]) == 0
    said = capsys.readouterr().out
    assert f"steps, {when}" in said.splitlines()[0] and f"steps, {when}" in said.splitlines()[1]


def test_predictions_print_it_too(capsys):
    served = "notebooks/data/vllm_served.jsonl.gz"
    when = recorded_when(Trace.load(served))
    assert main(["trace", "whatif", served, "--set", "max_num_seqs=7", "--force"]) == 0
    assert f"recorded {when}" in capsys.readouterr().out.splitlines()


def test_a_run_without_a_clock_is_told_without_times(tmp_path, capsys):
    simulate({"requests": [{"id": "a", "prompt": [1], "max_tokens": 1}]}).save(tmp_path / "run.jsonl")
    assert main(["trace", "narrate", str(tmp_path / "run.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("Step 0: ")
