"""A recording joined with a profile of torch's profiler: one time axis, what is said about it, and what is refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import vllm_double
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_helpers import one_trace
from vllm_recordings import DATA, InProcessWriter, RecordingDouble, assemble

from workbench import Trace
from workbench.apps.cli import main
from workbench.simulation.workload import read_workload
from workbench.trace.errors import TraceError
from workbench.trace.formats.export import Clock
from workbench.trace.formats.profile import join_profile
from workbench.trace.recorders import recorder
from workbench.trace.recorders.profile_marks import ProfileMarks

PROFILES = DATA / "profiles"
RUNS = ["one_process", "worker"]


@pytest.fixture
def profile_of(tmp_path):
    """A function: the file of a profile with these events."""

    def write(events, **more) -> Path:
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({"traceEvents": events, **more}))
        return path

    return write


def recorded(name="one_process") -> Trace:
    return Trace.load(PROFILES / f"{name}.jsonl.gz")


def moments(trace):
    """Of each step: when it was scheduled and when its output came, in microseconds."""
    clock = Clock(trace)
    for record in trace:
        phases = {phase.name: phase for phase in record.phases}
        yield record, clock.since(phases["schedule"].end), clock.since(phases["update"].begin)


def marks(trace, to_profile, steps=None):
    """The marks of steps, with another clock."""
    return [
        {"ph": "X", "cat": "user_annotation", "name": f"workbench step {record.step}: {moment}", "pid": 1, "tid": 1}
        | {"ts": to_profile(time), "dur": 1.0, "args": {}}
        for record, *times in moments(trace)
        for moment, time in zip(("scheduled", "output"), times)
        if steps is None or record.step in steps
    ]


def events_of(path):
    return json.loads(path.read_bytes())["traceEvents"]


@pytest.mark.parametrize("name", RUNS)
def test_a_real_profile(name, tmp_path):
    trace = recorded(name)
    joined = join_profile(trace, PROFILES / f"{name}.json.gz", tmp_path / "out.json")
    assert joined.by_marks is (name == "one_process")
    during = {
        record.step for record in trace for chunk in record.chunks if chunk.request_id in [*trace.requests][-6:-3]
    }
    assert set(joined.marked) == during and set(joined.unmarked) == {record.step for record in trace} - during
    events = events_of(tmp_path / "out.json")
    spans = {record.step: span for record, *span in moments(trace)}
    work = [event["ts"] for event in events if event["name"] == "aten::reshape"]
    assert work
    slack = 50 if joined.by_marks else 1000
    for time in work:  # the model's layers run between the scheduling of a step and its output
        assert any(spans[step][0] - slack <= time <= spans[step][1] + slack for step in during)
    processes = {event["pid"] for event in events if event["ph"] == "X"}
    assert len(processes) >= 3


@settings(max_examples=25, deadline=None)
@given(st.floats(-1e13, 1e13), st.floats(-400e-6, 400e-6), st.sets(st.integers(0, 24), min_size=1), st.integers(1, 40))
def test_any_clock(tmp_path_factory, offset, drift, steps, seconds):
    folder = tmp_path_factory.mktemp("clock")
    trace = stretched(seconds)
    events = marks(trace, lambda time: offset + time / (1 + drift), steps)
    (folder / "profile.json").write_text(json.dumps({"traceEvents": events}))
    joined = join_profile(trace, folder / "profile.json", folder / "out.json")
    assert set(joined.marked) == steps and not joined.unknown
    if joined.drift is not None:
        assert joined.drift == pytest.approx(drift, abs=30e-6)
    places = {f"workbench step {record.step}: scheduled": scheduled for record, scheduled, _ in moments(trace)}
    length = seconds * 1e6
    for event in events_of(folder / "out.json"):
        if event["name"] in places:
            assert event["ts"] == pytest.approx(places[event["name"]], abs=2 + length * (abs(drift) + 1e-9))


def stretched(seconds) -> Trace:
    """A recording of 25 steps that take a while."""
    trace = one_trace()
    made = Trace(trace.meta)
    for info in trace.requests.values():
        made.add_request(info)
    length = seconds / 25
    for number, record in enumerate(trace):
        timings = {"schedule": 0.1 * length, "forward": 0.8 * length, "update": 0.1 * length}
        made.append(replaced(record, time=number * length, end=(number + 1) * length, timings=timings, phase_starts={}))
    return made


def replaced(record, **fields):
    from msgspec.structs import replace

    return replace(record, **fields)


def test_steps_say_their_requests_and_what_the_gpu_did_for_them(profile_of, tmp_path):
    trace = recorded()
    events = marks(trace, lambda time: time + 5e6)
    times = [(record, scheduled + 5e6) for record, scheduled, _ in moments(trace)]
    expected = {}
    for number, (record, time) in enumerate(times):
        for place in range(number % 3):
            launch = {"correlation": 10 * number + place}
            events.append(
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": time + 2, "dur": 1, "args": launch}
            )
            kernel = {"ph": "X", "cat": "kernel", "name": f"kernel{place}", "ts": time + 9e5, "dur": 5 + place}
            events.append(kernel | {"pid": 0, "tid": 7, "args": launch})  # later, on the GPU's own track
        expected[f"step {record.step}"] = (number % 3, {0: 0, 1: 5, 2: 11}[number % 3])
    join_profile(trace, profile_of(events), tmp_path / "out.json")
    steps = {event["name"]: event["args"] for event in events_of(tmp_path / "out.json") if event["name"] in expected}
    assert {name: (args.get("gpu_events", 0), args.get("gpu_us", 0)) for name, args in steps.items()} == expected
    for record in trace:
        assert steps[f"step {record.step}"]["requests"] == [chunk.request_id for chunk in record.chunks]


def test_what_is_refused(profile_of, tmp_path):
    trace, out = recorded(), tmp_path / "out.json"
    shuffled = marks(trace, lambda time: time)
    for number, event in enumerate(shuffled):
        event["ts"] += number * number * 977.0
    late = marks(trace, lambda time: time)
    created = trace.meta.created
    far = [event | {"name": event["name"].replace("step ", "step 9")} for event in late]
    cases = {
        "has no marks of steps": profile_of([{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]),
        "of another run": (shuffled, {}),
        "7,200 s after the recording": (late, {"baseTimeNanoseconds": int((created + 7200) * 1e9)}),
        "marks steps 9": (far, {}),
        "an event that cannot be read": ([{"ph": "X", "name": "workbench step 1: output", "ts": "soon"}], {}),
    }
    for message, case in cases.items():
        path = case if isinstance(case, Path) else profile_of(case[0], **case[1])
        with pytest.raises(TraceError, match=message) as problem:
            join_profile(trace, path, out)
        assert str(path) in str(problem.value)
        assert not out.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"traceEvents": 3}', b'{"traceEvents": [' + b"[" * 100_000, b"\x1f\x8b\x08broken"],
)
def test_files_that_are_not_profiles(content, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    run = str(PROFILES / "one_process.jsonl.gz")
    assert main(["trace", "perfetto", run, str(tmp_path / "out.json"), "--join", str(bad)]) == 2
    assert "bad.json" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_profile_that_is_cut_off(tmp_path):
    whole = (PROFILES / "one_process.json.gz").read_bytes()
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cut\.json\.gz"):
        join_profile(recorded(), cut, tmp_path / "out.json")


def test_iterations_that_fit_nowhere_or_twice(profile_of, tmp_path):
    trace = recorded("worker")
    content = json.loads(gzip.decompress((PROFILES / "worker.json.gz").read_bytes()))
    (tmp_path / "out").mkdir()
    decodes = [event for event in content["traceEvents"] if event["name"] == "execute_context_0(0)_generation_3(3)"]
    with pytest.raises(TraceError, match="fit at"):
        join_profile(trace, profile_of(decodes[:1]), tmp_path / "out.json")
    base = {"baseTimeNanoseconds": content["baseTimeNanoseconds"]}  # the time of day tells which
    assert len(join_profile(trace, profile_of(decodes[:1], **base), tmp_path / "out.json").marked) == 1
    other = [decodes[0] | {"name": "execute_context_9(999)_generation_0(0)"}]
    with pytest.raises(TraceError, match="fit no steps"):
        join_profile(trace, profile_of(other), tmp_path / "out.json")


def test_a_simulation_has_no_clock(tmp_path):
    from workbench import simulate

    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 5}, "max_tokens": 2}]})
    with pytest.raises(TraceError, match="has no times"):
        join_profile(trace, PROFILES / "one_process.json.gz", tmp_path / "out.json")


def test_the_command(tmp_path, capsys):
    run, profile = (str(PROFILES / f"one_process.{ending}") for ending in ("jsonl.gz", "json.gz"))
    assert main(["trace", "perfetto", run, str(tmp_path / "out.json.gz"), "--join", profile]) == 0
    printed = capsys.readouterr().out
    assert "joined " in printed and "no profiler ran in steps" in printed
    assert json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))["traceEvents"]


# -- what the recorder marks ---------------------------------------------------------------------------------------


@pytest.fixture
def profiler(monkeypatch):
    """Stands for the module of torch's profiler; ``marked`` has the names of its ranges."""
    module = ModuleType("torch.autograd.profiler")
    module._is_profiler_enabled, module.marked = False, []

    @contextlib.contextmanager
    def record_function(name):
        module.marked.append(name)
        yield

    module.record_function = record_function
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    monkeypatch.setattr(recorder, "WriterProcess", InProcessWriter)
    return module


@pytest.mark.parametrize("workload", ["b_mixed", "h_abort", "d_preempt"])
def test_marks_have_the_numbers_of_the_recorded_steps(workload, profiler):
    config, arrivals = read_workload(DATA / "vllm" / "workloads" / f"{workload}.json")
    scheduler = RecordingDouble(config)
    schedule, update = scheduler.schedule, scheduler.update_from_output
    seen = []

    def watched_schedule():
        profiler._is_profiler_enabled = len(seen) % 5 != 4  # runs, with pauses
        profiler.marked.clear()
        output = schedule()
        seen.append([[*output.num_scheduled_tokens], [*profiler.marked]])
        return output

    def watched_update(output, result):
        profiler.marked.clear()
        update(output, result)
        seen[-1].append([*profiler.marked])

    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
    vllm_double.drive(scheduler, arrivals)
    trace = assemble(scheduler.recorder.writer.received)
    contents = {record.step: [chunk.request_id for chunk in record.chunks] for record in trace}
    marked = 0
    for number, (requests, scheduled, output) in enumerate(seen):
        if number % 5 == 4:
            assert scheduled == output == []
        for name in scheduled:
            step = int(name.split()[2].rstrip(":"))
            assert contents[step] == requests and name == f"workbench step {step}: scheduled"
            assert output == [f"workbench step {step}: output"]
            marked += 1
    assert marked >= len(contents) * 3 // 5


def test_without_torch_and_without_its_switch_nothing_is_marked(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.autograd.profiler", raising=False)
    assert ProfileMarks({"NSYS_PROFILING_SESSION_ID": "1"}).switch._is_profiler_enabled is False
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", ModuleType("torch.autograd.profiler"))
    assert ProfileMarks({}).switch._is_profiler_enabled is False


def test_nvtx(profiler, monkeypatch):
    names = []
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", SimpleNamespace(mark=names.append))
    assert ProfileMarks({"VLLM_NVTX_SCOPES_FOR_PROFILING": "0"}).switch._is_profiler_enabled is False
    marks = ProfileMarks({"NSYS_PROFILING_SESSION_ID": "7"})
    assert marks.switch._is_profiler_enabled is True
    marks.mark(3, "scheduled")
    assert names[-1] == "workbench step 3: scheduled" and not profiler.marked

    def absent(name):
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", SimpleNamespace(mark=absent))
    assert ProfileMarks({"NSYS_PROFILING_SESSION_ID": "7"}).switch is profiler
