"""Two recorders of one file: the second is refused before the file of the first is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from workbench import Engine, Trace, simulate
from workbench.trace import TraceError, TraceMeta
from workbench.trace.file import TraceWriter
from workbench.trace.file_lock import open_locked
from workbench.trace.recorders.trace_files import TraceFiles

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")

WORKLOAD = {"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 4}]}
MESSAGE = "is being recorded by another run: give this one another name"

OTHER = """
import sys
from workbench import simulate
trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 4}]})
try:
    writer = trace.record_to(sys.argv[1])
except ValueError as problem:
    sys.exit(f"refused: {problem}")
print("recording", flush=True)
sys.stdin.read()
writer.close("done")
"""


def other_process(path):
    root = str(Path(workbench.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_of_two_processes_the_second_is_refused_and_both_runs_are_whole(tmp_path, name):
    path = tmp_path / name
    with other_process(path) as first:
        assert first.stdout.readline() == "recording\n"
        before = path.read_bytes()
        with other_process(path) as second:
            _, said = second.communicate()
        assert second.returncode == 1 and MESSAGE in said
        trace = simulate(WORKLOAD)
        for take in (trace.record_to, trace.save):
            with pytest.raises(TraceError, match=MESSAGE):
                take(path)
        assert path.read_bytes() == before
        first.communicate()
    assert Trace.load(path).end == "done" and len(Trace.load(path)) == len(trace)
    trace.record_to(path).close("done")
    trace.save(path)
    assert len(Trace.load(path)) == len(trace)


def test_a_killed_recorder_leaves_no_lock(tmp_path):
    path = tmp_path / "run.jsonl"
    with other_process(path) as first:
        assert first.stdout.readline() == "recording\n"
        first.kill()
    simulate(WORKLOAD).record_to(path).close("done")
    assert Trace.load(path).end == "done"


def test_two_runs_of_one_process_and_one_run_twice(tmp_path, tiny_llama):
    path = tmp_path / "run.jsonl"
    with Engine(tiny_llama, num_blocks=16) as one, Engine(tiny_llama, num_blocks=16) as two:
        one.trace.record_to(path)
        with pytest.raises(TraceError, match=MESSAGE):
            two.trace.record_to(path)
        link = tmp_path / "link.jsonl"
        link.symlink_to(path)
        with pytest.raises(TraceError, match=MESSAGE):
            two.trace.record_to(link)
        one.trace.record_to(path)  # the same run: all that the file has is written again
        one.generate([[1, 2, 3]], max_tokens=2)
        two.generate([[1, 2, 3]], max_tokens=2)
        assert len(Trace.load(path)) == len(one.trace) > 0
        one.trace.record_to(tmp_path / "elsewhere.jsonl").close()
        two.trace.record_to(path).close("done")
    assert Trace.load(path).end == "done"


@pytest.mark.parametrize(
    "record",
    [
        lambda path: TraceWriter(path, TraceMeta(source="simulation")),
        lambda path: TraceFiles(path.parent, "run", TraceMeta(source="simulation"), gzip=False),
        open_locked,
    ],
)
def test_every_writer_locks_its_file(tmp_path, record):
    path = tmp_path / "run-00000.jsonl"
    writer = record(path)
    before = path.read_bytes()
    with pytest.raises(TraceError, match=MESSAGE):
        record(path)
    assert path.read_bytes() == before
    writer.close()
    record(path).close()
