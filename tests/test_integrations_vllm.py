"""Recording another engine's scheduler: the messages, the writer's process, and what must never reach the server."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import vllm_double
from hypothesis import given
from hypothesis import strategies as st
from recorded_traces import assert_pool_fits, assert_same, tokens_of, without_tokens
from vllm_double import AsyncVllmSchedulerDouble, RequestDouble, VllmSchedulerDouble, vllm_config

from workbench.engine.simulate import simulate
from workbench.engine.workload import read_workload
from workbench.integrations import vllm as integration
from workbench.integrations.recorder import __main__ as writer
from workbench.integrations.recorder import messages, recorder, writer_process
from workbench.integrations.recorder.assembler import Assembler
from workbench.integrations.recorder.messages import (
    Admission,
    Arrival,
    End,
    Packet,
    Preemption,
    Schedule,
    Update,
    unpack,
)
from workbench.integrations.recorder.settings import RecordingSettings
from workbench.trace import StepRecord, Trace, TraceMeta

DATA = Path(__file__).parent / "data"
WORKLOADS = sorted((DATA / "vllm" / "workloads").glob("*.json"))
LONG = DATA / "vllm" / "workloads" / "d_preempt.json"

RecordingClass, AsyncRecordingClass = integration.recording_classes(VllmSchedulerDouble, AsyncVllmSchedulerDouble)


def RecordingDouble(config) -> VllmSchedulerDouble:
    return RecordingClass(vllm_config(config))


@pytest.fixture
def traces(tmp_path, monkeypatch) -> Path:
    """The folder of the recordings, with settings for it."""
    for name in [name for name in os.environ if name.startswith("WORKBENCH_TRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(tmp_path / "traces"))
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "1")
    return tmp_path / "traces"


class InProcessWriter:
    """Stands for the writer's process: keeps the bytes."""

    def __init__(self) -> None:
        self.received = bytearray()

    def send(self, data: bytes) -> None:
        self.received += data

    def close(self, *, wait: bool = True) -> None:
        pass


@pytest.fixture
def in_process(traces, monkeypatch):
    monkeypatch.setattr(recorder, "WriterProcess", InProcessWriter)


def assemble(received: bytearray) -> Trace:
    """What the writer's process makes of its messages, without files."""
    trace = assembler = None
    for message in unpack(received):
        if assembler is None:
            trace = Trace(TraceMeta(source=message.source, config=message.config))
            assembler = Assembler(message.config, max_waiting=message.settings.max_waiting, start=message.start)
            continue
        for line in assembler.take(message):
            trace.append(line) if isinstance(line, StepRecord) else trace.add_request(line)
    return trace


def run_double(workload: Path, **changes) -> VllmSchedulerDouble:
    config, arrivals = read_workload(workload)
    scheduler = RecordingDouble(config.replace(**changes))
    vllm_double.drive(scheduler, arrivals)
    return scheduler


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- recordings of vLLM itself, as files ---------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_recorded_vllm_equals_the_simulation_in_every_field(workload):
    trace = Trace.load(DATA / "vllm-recorded" / "sync" / f"{workload.stem}.jsonl.gz")
    assert trace.meta.source == "vllm 0.33.0"
    assert not trace.problems
    assert_same(trace, simulate(workload))
    assert_pool_fits(trace)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_recorded_asynchronous_vllm_fits_together(workload):
    trace = Trace.load(DATA / "vllm-recorded" / "async" / f"{workload.stem}.jsonl.gz")
    assert trace.config["async_scheduling"]
    assert not trace.problems
    assert_pool_fits(trace)
    if "abort" not in workload.stem:  # an abort finds another number of tokens in flight
        assert tokens_of(trace) == tokens_of(simulate(workload))


@pytest.mark.parametrize(
    "change", [{"num_blocks": 12}, {"max_num_batched_tokens": 63}, {"policy": "priority"}, {"max_num_seqs": 2}]
)
def test_the_comparison_is_able_to_fail(change):
    trace = Trace.load(DATA / "vllm-recorded" / "sync" / "d3_preempt_priority.jsonl.gz")
    workload = DATA / "vllm" / "workloads" / "d3_preempt_priority.json"
    if change == {"policy": "priority"}:
        change = {"policy": "fcfs"}  # it is by priority
    with pytest.raises(AssertionError):
        assert_same(trace, simulate(workload, config=change, max_steps=200))


# -- the double, through all of it ---------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_the_double_equals_the_simulation_in_every_field(workload, in_process):
    scheduler = run_double(workload)
    assert_same(assemble(scheduler.recorder.writer.received), simulate(workload))


def test_what_workers_change_later_is_not_what_was_scheduled(in_process, monkeypatch):
    """Steps that schedule what the one before did say so in place of it: also when a worker wrote into that."""
    run_model = vllm_double.run_model

    given = []

    def write_into_the_output(scheduler, output):
        for tokens in given:
            tokens[:] = [0] * len(tokens)
        made = run_model(scheduler, output)
        given[:] = made.sampled_token_ids
        for request_id in output.num_scheduled_tokens:
            output.num_scheduled_tokens[request_id] += 1
        for new in output.scheduled_new_reqs:
            new.block_ids[0].append(10**6)
        output.scheduled_cached_reqs.req_ids.reverse()
        return made

    monkeypatch.setattr(vllm_double, "run_model", write_into_the_output)
    received = run_double(LONG).recorder.writer.received
    steps = [message for message in unpack(received.copy()) if isinstance(message, Schedule)]
    assert 0 < sum(step.request_ids is None for step in steps) < len(steps)
    assert_same(assemble(received), simulate(LONG))


def test_a_step_is_like_the_last_when_it_schedules_one_token_of_the_same_requests(in_process):
    """Not when another takes a seat, the order changes, or one has more tokens; nor by what a worker wrote."""
    double = RecordingDouble(read_workload(LONG)[0])
    steps = [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"c": 1, "b": 1}, {"c": 2, "b": 1}, {"c": 1, "b": 1}]
    steps += [steps[-1]]
    for tokens, following in zip(steps, [*steps[1:], {}]):
        ids = list(tokens)
        cached = vllm_double.CachedRequestData(ids, set(), [None] * len(ids), [9] * len(ids))
        output = vllm_double.SchedulerOutput([], cached, tokens, sum(tokens.values()))
        double._unrecorded_schedule = lambda output=output: output
        double.schedule()
        ids[:] = following
    received = double.recorder.writer.received
    double.recorder.close()
    sent = [message for message in unpack(received) if isinstance(message, Schedule)]
    assert [message.request_ids for message in sent] == [
        list(tokens) if index not in (1, 5, 6) else None for index, tokens in enumerate(steps)
    ]
    assert [message.num_scheduled_tokens or [1, 1] for message in sent] == [list(tokens.values()) for tokens in steps]


def test_an_engine_that_waits_and_asks_again_is_recorded_once(in_process, monkeypatch):
    """Also after news that the record of an ordinary step told already."""
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "0")
    monkeypatch.setattr(recorder, "SEND_SECONDS", 3600.0)
    double = RecordingDouble(read_workload(LONG)[0])
    running, nothing = {"a": 1, "b": 1}, {}
    double._unrecorded_update = lambda *args: None

    def step(tokens: dict[str, int]) -> None:
        cached = vllm_double.CachedRequestData([*tokens], set(), [None] * len(tokens), [9] * len(tokens))
        output = vllm_double.SchedulerOutput([], cached, tokens, len(tokens))
        double._unrecorded_schedule = lambda: output
        double.update_from_output(double.schedule(), None)

    def news() -> None:
        double.recorder.request_added(vllm_double.RequestDouble(arrival.to_request()))

    arrival = read_workload(LONG)[1][0]
    news()
    for tokens in (running, running):
        step(tokens)
    news()
    for tokens in (running, nothing, nothing, nothing):
        step(tokens)
    news()
    for tokens in (nothing, nothing, nothing, running):
        step(tokens)
    assert not double.recorder._empty_steps
    received = double.recorder.writer.received
    double.recorder.close()
    sent = list(unpack(received))
    ids = ["a", "b"]
    steps = [message.request_ids for message in sent if isinstance(message, Schedule)]
    assert steps == [ids, None, ids, [], ids]
    assert sum(isinstance(message, Update) for message in sent) == len(steps)


def test_a_preemption_for_a_reset_of_the_prefix_cache_is_told_from_others(in_process):
    config, arrivals = read_workload(LONG)
    reset = RecordingDouble(config)
    vllm_double.drive(reset, arrivals, max_steps=4)
    num_running = len(reset.running)
    assert num_running
    reset.reset_prefix_cache(reset_running_requests=True)
    received = reset.recorder.writer.received
    reset.recorder.close()
    reasons = [message.reason for message in unpack(received) if isinstance(message, Preemption)]
    assert reasons[-num_running:] == ["the prefix cache was reset"] * num_running
    assert set(reasons[:-num_running]) == {"the KV blocks ran out"}


def test_without_token_ids_everything_else_is_the_same_and_takes_the_shorter_way(in_process, monkeypatch):
    """Without them most steps need no method of the recorder; what those would do must not be missed."""
    with_tokens = assemble(run_double(LONG).recorder.writer.received)
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "0")
    monkeypatch.setattr(recorder, "SEND_SECONDS", 3600.0)
    calls = []
    for name in ("scheduled", "updated"):
        method = getattr(recorder.SchedulerRecorder, name)
        counted = lambda *args, name=name, method=method: (calls.append(name), method(*args))  # noqa: E731
        monkeypatch.setattr(recorder.SchedulerRecorder, name, counted)
    without = assemble(run_double(LONG).recorder.writer.received)
    assert 0 < calls.count("scheduled") < len(without) and 0 < calls.count("updated") < len(without)
    assert tokens_of(without) != tokens_of(with_tokens)

    assert without_tokens(without) == without_tokens(with_tokens)


def test_queues_that_are_sent_equal_those_that_are_followed(in_process, monkeypatch):
    followed = assemble(run_double(LONG).recorder.writer.received)
    monkeypatch.setattr(recorder, "QUEUE_SENDS", 1)
    monkeypatch.setattr(recorder, "SEND_SECONDS", -1.0)
    received = run_double(LONG).recorder.writer.received
    told = [message.running is not None for message in unpack(received.copy()) if isinstance(message, Schedule)]
    sent = assemble(received)
    assert told == [index > 0 for index in range(len(sent))]
    assert any(len(record.waiting) > 1 for record in sent)
    assert [(record.running, record.waiting) for record in sent] == [
        (record.running, record.waiting) for record in followed
    ]


@pytest.mark.parametrize("gzip", ["0", "1"])
def test_a_recording_goes_through_the_process_into_a_file(gzip, traces, monkeypatch, caplog):
    monkeypatch.setenv("WORKBENCH_TRACE_GZIP", gzip)
    caplog.set_level(logging.INFO)
    scheduler = run_double(LONG)
    scheduler.shutdown()
    assert scheduler.was_shut_down
    (path,) = traces.iterdir()
    assert path.name.startswith("vllm-") and path.name.endswith("-00000.jsonl" + ".gz" * (gzip == "1"))
    trace = Trace.load(path)
    assert_same(trace, simulate(LONG))
    assert not trace.problems
    assert trace.meta.model == {"name": "double", "dtype": "bfloat16", "num_kv_cache_groups": 1}
    assert all(set(record.timings) == {"schedule", "forward", "update"} for record in trace)
    assert sum(trace[0].timings.values()) <= trace[1].time - trace[0].time
    assert any("recording to" in record.getMessage() for record in caplog.records)
    assert not warnings_of(caplog)


def test_what_was_said_is_recorded_only_when_asked_for(traces, monkeypatch):
    monkeypatch.setenv("WORKBENCH_TRACE_GZIP", "0")
    scheduler = run_double(LONG)
    scheduler.shutdown()
    (asked,) = traces.iterdir()
    secrets = {token for tokens in tokens_of(simulate(LONG)).values() for token in tokens if token > 999}
    secrets.update(token for info in simulate(LONG).requests.values() for token in info.prompt_token_ids if token > 999)
    assert all(str(token) in asked.read_text() for token in secrets)  # the search is able to find them

    monkeypatch.delenv("WORKBENCH_TRACE_TOKENS")
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(traces / "unasked"))
    scheduler = run_double(LONG)
    scheduler.shutdown()
    (path,) = (traces / "unasked").iterdir()
    trace = Trace.load(path)
    assert all(info.prompt_token_ids == () for info in trace.requests.values())
    assert not any(str(info.prompt_token_ids) in path.read_text() for info in simulate(LONG).requests.values())
    assert {token for tokens in tokens_of(trace).values() for token in tokens} == {0}
    lengths = {request_id: len(tokens) for request_id, tokens in tokens_of(simulate(LONG)).items()}
    assert {request_id: len(tokens) for request_id, tokens in tokens_of(trace).items()} == lengths
    assert not any(
        token in secrets
        for line in path.read_text().splitlines()[1:]
        for chunk in json.loads(line).get("chunks", [])
        for token in (chunk[5],)
    )


# -- files that follow one another ---------------------------------------------------------------------------


def files_of(workload: Path, folder: Path, max_files: int) -> list[Path]:
    """Write the simulation's records as the writer's process does, in files of 2000 bytes."""
    from workbench.integrations.recorder.trace_files import TraceFiles

    trace = simulate(workload)
    files = TraceFiles(str(folder), "t", trace.meta, gzip=False, max_file_bytes=2000, max_files=max_files)
    requests = list(trace.requests.values())
    for record in trace:
        while requests and requests[0].request_id in record.arrived:
            files.write(requests.pop(0))
        files.write(record)
    files.close()
    return sorted(folder.iterdir())


@pytest.mark.parametrize("name", ["d_preempt", "e_shared_prefix", "e2_full_hit_after_finish", "d3_preempt_priority"])
def test_every_file_stands_alone_and_together_they_are_the_run(name, tmp_path):
    workload = DATA / "vllm" / "workloads" / f"{name}.json"
    whole = simulate(workload)
    parts = [Trace.load(path) for path in files_of(workload, tmp_path, max_files=0)]
    assert len(parts) > 2
    steps = [record for part in parts for record in part]
    assert [record.step for record in steps] == [record.step for record in whole]
    for index, part in enumerate(parts):
        assert not part.problems
        assert (part.keyframe is None) == (index == 0)
        for position, record in enumerate(part):
            expected = whole.pool_state(record.step)
            found = part.pool_state(position)
            assert record.block_tables == whole[record.step].block_tables
            assert found.free_queue.tolist() == expected.free_queue.tolist()
            assert found.block_tables == expected.block_tables
            assert (found.cached == expected.cached).all()


def test_the_oldest_files_go(tmp_path):
    names = [path.name for path in files_of(LONG, tmp_path / "all", max_files=0)]
    kept = [path.name for path in files_of(LONG, tmp_path / "few", max_files=2)]
    assert len(names) > 2
    assert kept == names[-2:]


def test_an_id_that_is_used_again_is_written_once_a_file(tmp_path):
    from workbench.integrations.recorder.trace_files import TraceFiles

    files = TraceFiles(str(tmp_path), "t", TraceMeta(config={"block_size": 4, "num_blocks": 9}), gzip=False)
    assembler = Assembler({"block_size": 4})
    for step in (0, 1):
        for message in (
            Arrival("again", 3, 1, 0, 0.0, 0.0),
            Schedule(step, step, step, 7, ["again"], [], [], [3], [Admission("again", 0, 3, [step + 1])]),
            End("again", "length", True),
            Update(step, step + 0.5, step + 0.5, 8),
        ):
            for line in assembler.take(message):
                files.write(line)
    files.close()
    (path,) = tmp_path.iterdir()
    trace = Trace.load(path)
    assert [record.finished for record in trace] == [("again",), ("again",)]


# -- nothing reaches the server ------------------------------------------------------------------------------


def test_a_full_disk_stops_the_recording_and_says_so_once(traces, monkeypatch, caplog):
    monkeypatch.setenv("WORKBENCH_TRACE_GZIP", "0")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # as the writer's process inherits it
    try:
        config, arrivals = read_workload(LONG)
        scheduler = RecordingDouble(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    process = scheduler.recorder.writer._process
    vllm_double.drive(scheduler, arrivals)  # nothing is sent after the last step, so this may pass unnoticed
    process.wait(30)
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
    trace = Trace.load(path)  # as far as it goes
    assert trace.end == "cut" and 0 < len(trace) < len(simulate(LONG))


def test_a_writer_that_was_killed_is_told_of_once(traces, caplog):
    config, arrivals = read_workload(LONG)
    scheduler = RecordingDouble(config)
    process = scheduler.recorder.writer._process
    process.kill()
    process.wait(30)
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
    process = scheduler.recorder.writer._process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        for _ in range(4):  # 4 KB of messages each time
            assert vllm_double.drive(scheduler, arrivals, max_steps=34) == 34
        assert scheduler.recorder.writer is None
    finally:
        process.kill()
        process.wait(30)
    (warning,) = warnings_of(caplog)
    assert "behind" in warning


def test_a_failure_of_the_recorder_itself_is_not_the_servers(traces, monkeypatch, caplog, in_process):
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
    assert scheduler.recorder.messages == []  # nothing piles up after that


def test_an_error_of_the_server_stays_its_own(in_process, monkeypatch):
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


def wait_for(folder: Path) -> None:
    """Until the writer's process has made its first file."""
    for _ in range(1000):
        if folder.exists() and any(folder.iterdir()):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing in {folder} after 20 s")


def test_an_engine_that_dies_leaves_a_whole_file(traces):
    scheduler = run_double(LONG)
    process = scheduler.recorder.writer._process
    wait_for(traces)
    for sign in (signal.SIGINT, signal.SIGTERM):  # sent to everything that belongs to a service
        os.kill(process.pid, sign)
    process.stdin.close()  # what the end of the process does
    assert process.wait(30) == 0
    process.stdout.close()
    (path,) = traces.iterdir()
    trace = Trace.load(path)
    assert not trace.problems and len(trace) == len(simulate(LONG))


# -- messages ------------------------------------------------------------------------------------------------


def test_an_unwanted_chunk_belongs_to_the_step_in_which_its_request_ends():
    """Asynchronous scheduling: the output of step 0 ends a request that step 1 has scheduled already."""
    assembler = Assembler({"block_size": 4, "num_blocks": 9}, start=5.0)
    records = []
    for message in (
        Arrival("a", 4, 9, 0, 0.0, 0.0),
        Schedule(70, 5.0, 5.1, 7, ["a"], [], [], [4], [Admission("a", 0, 4, [1])]),
        Schedule(80, 5.2, 5.3, 6, None, [4], [[[2]]]),
        End("a", "stop", True),
        Update(70, 5.5, 5.6, 8),
        Schedule(70, 5.7, 5.8, 8, [], [], []),
        Update(80, 5.9, 6.0, 8),
        Update(70, 6.1, 6.2, 8),
    ):
        records += [line for line in assembler.take(message) if isinstance(line, StepRecord)]
    first, second, third = records
    assert first.chunks[0].sampled == 0 and first.finished == () and first.free_blocks_end == 7
    assert second.chunks[0].sampled is None and second.finished == ("a",) and second.free_blocks_end == 8
    assert second.finish_reasons == {"a": "stop"} and second.running == ("a",)
    assert third.running == ()
    assert first.timings == pytest.approx({"schedule": 0.1, "forward": 0.4, "update": 0.1})
    assert [record.time for record in records] == pytest.approx([0.0, 0.2, 0.7])


def test_drafts_that_were_rejected_are_computed_again_and_the_last_token_is_kept():
    assembler = Assembler({"block_size": 16, "num_blocks": 9})
    records = []
    for message in (
        Arrival("a", 4, 9, 0, 0.0, 0.0),
        Schedule(0, 0.0, 0.0, 7, ["a"], [], [], [4], [Admission("a", 0, 4, [1])]),
        Update(0, 0.0, 0.0, 7, ["a"], [[11]]),
        Schedule(1, 0.0, 0.0, 7, ["a"], [4], [None], [4]),  # one token and three drafts, of which one is taken
        Update(1, 0.0, 0.0, 7, ["a"], [[12, 13]]),
        Schedule(2, 0.0, 0.0, 7, ["a"], [6], [None], [4]),
        Update(2, 0.0, 0.0, 7, ["a"], [[]]),
    ):
        records += [line for line in assembler.take(message) if isinstance(line, StepRecord)]
    assert [(c.start, c.end, c.arm, c.sampled) for r in records for c in r.chunks] == [
        (0, 4, "new_final", 11),
        (4, 8, "decode", 13),
        (6, 10, "decode", None),
    ]


def test_the_blocks_of_one_kv_cache_group_are_recorded():
    assembler = Assembler({"block_size": 4}, kv_cache_group=1)
    records = []
    for message in (
        Arrival("a", 4, 9, 0, 0.0, 0.0),
        Schedule(0, 0.0, 0.0, 9, ["a"], [], [], [4], [Admission("a", 0, 4, [7])]),
        Update(0, 0.0, 0.0, 9),
        Schedule(1, 0.0, 0.0, 9, ["a"], [4], [[[5], [8]]]),
        Update(1, 0.0, 0.0, 9),
    ):
        records += [line for line in assembler.take(message) if isinstance(line, StepRecord)]
    assert [chunk.new_block_ids for record in records for chunk in record.chunks] == [(7,), (8,)]


def test_pooling_models_sample_nothing():
    assembler = Assembler({"block_size": 4}, samples=False)
    *_, record = [
        line
        for message in (
            Arrival("a", 4, 1, 0, 0.0, 0.0),
            Schedule(0, 0.0, 0.0, 9, ["a"], [], [], [4], [Admission("a", 0, 4, [1])]),
            Update(0, 0.0, 0.0, 9),
        )
        for line in assembler.take(message)
    ]
    assert record.chunks[0].sampled is None


def test_a_packet_holds_what_its_messages_said_when_they_were_added():
    """Workers of the engine's own process add to the lists of a step that is under way."""
    blocks, tokens, packet = [5, 7], [3], Packet()
    packet.add([Schedule(0, 0.0, 0.0, 7, ["a"], [], [], tokens, [Admission("a", 0, 3, blocks)])])
    blocks.append(9)
    tokens[0] = 1
    (message,) = unpack(bytearray(packet.take()))
    assert message.num_scheduled_tokens == [3] and message.admissions[0].block_ids == [5, 7]


def test_messages_gather_in_the_pipe_unless_it_fills(monkeypatch):
    slept = []
    monkeypatch.setattr(writer.time, "sleep", slept.append)
    packet, (receiver, sender) = Packet(), os.pipe()
    with os.fdopen(receiver, "rb"):
        with os.fdopen(sender, "wb", buffering=0) as pipe:
            messages = writer.read_messages(receiver)
            for length in (3, 3, writer.GATHER_BYTES):  # the last one is too long to wait for more
                packet.add([End("a", "x" * length, False)])
                pipe.write(packet.take())
                next(messages)
        assert list(messages) == []
    assert slept == [writer.GATHER_SECONDS] * 2


def test_a_long_queue_is_recorded_up_to_its_limit(in_process, monkeypatch):
    monkeypatch.setenv("WORKBENCH_TRACE_MAX_WAITING", "2")
    workload = DATA / "vllm" / "workloads" / "c2_starvation_5long_thr51.json"
    scheduler = run_double(workload, max_num_seqs=1)
    longest = simulate(workload, config={"max_num_seqs": 1})
    assert max(len(record.waiting) for record in longest) > 2
    for record, expected in zip(assemble(scheduler.recorder.writer.received), longest):
        assert record.waiting == expected.waiting[:2]


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5)
any_message = st.one_of(
    st.builds(Arrival, st.text(max_size=9), st.just(3), st.just(4), st.just(0), st.floats(0, 9), st.just(0.0), tokens),
    st.builds(End, st.text(max_size=9), st.sampled_from(["stop", "length"]), st.booleans()),
    st.builds(Update, st.integers(0, 9), st.floats(0, 9), st.floats(0, 9), st.integers(0, 9)),
    st.builds(
        Schedule,
        st.integers(0, 9),
        st.floats(0, 9),
        st.floats(0, 9),
        st.integers(0, 9),
        st.none() | st.lists(st.text(max_size=9), max_size=4),
        tokens,
        st.lists(st.none() | st.lists(tokens, max_size=2), max_size=3),
        tokens,
        st.lists(st.builds(Admission, st.text(max_size=9), st.just(0), st.just(3), tokens), max_size=3),
    ),
)


@given(
    st.lists(st.lists(st.lists(any_message, max_size=4), max_size=3), max_size=4),
    st.lists(st.integers(1, 40), max_size=30),
)
def test_messages_arrive_as_they_were_sent_however_the_pipe_cuts_them(packets, cuts):
    stream, packet = bytearray(), Packet()
    for lists in packets:
        for sent in lists:
            packet.add(sent)
        stream += packet.take()
    buffer, received = bytearray(), []
    for length in [*cuts, len(stream)]:
        buffer += stream[:length]
        del stream[:length]
        received += unpack(buffer)
    assert received == [message for lists in packets for sent in lists for message in sent]
    assert not buffer


# -- in vLLM's process ---------------------------------------------------------------------------------------


def test_the_classes_are_made_from_vllms_own_when_they_are_asked_for(monkeypatch):
    sync, asynchronous = ModuleType("vllm.v1.core.sched.scheduler"), ModuleType("vllm.v1.core.sched.async_scheduler")
    sync.Scheduler, asynchronous.AsyncScheduler = VllmSchedulerDouble, AsyncVllmSchedulerDouble
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, sync.__name__, sync)
    monkeypatch.setitem(sys.modules, asynchronous.__name__, asynchronous)
    try:
        assert issubclass(integration.RecordingScheduler, VllmSchedulerDouble)
        assert issubclass(integration.AsyncRecordingScheduler, AsyncVllmSchedulerDouble)
        assert integration.RecordingScheduler is integration.RecordingScheduler
        assert integration.RecordingScheduler.__qualname__ == "RecordingScheduler"
    finally:
        for name in integration._NAMES:
            vars(integration).pop(name, None)
    with pytest.raises(AttributeError, match="NoScheduler"):
        _ = integration.NoScheduler


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_scheduler_is_the_one_that_vllm_is_set_for(async_scheduling, in_process):
    config = vllm_config(read_workload(LONG)[0], async_scheduling=async_scheduling)
    for scheduler in (RecordingClass(config), RecordingClass(vllm_config=config)):
        assert type(scheduler) is (AsyncRecordingClass if async_scheduling else RecordingClass)
        assert isinstance(scheduler, AsyncVllmSchedulerDouble) is async_scheduling
        assert scheduler.recorder.writer is not None
    assert type(AsyncRecordingClass(config)) is AsyncRecordingClass


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_little_is_imported_into_vllms_process():
    code = "import sys, workbench.integrations.vllm; print(sorted(m for m in sys.modules if '.' not in m))"
    loaded = run_python(code)
    for heavy in ("mlx", "numpy", "numba", "panel", "bokeh", "torch", "vllm"):
        assert f"'{heavy}'" not in loaded


def test_the_blas_of_vllms_process_is_left_alone():
    code = (
        "import sys, types; sys.modules['vllm'] = types.ModuleType('vllm'); import workbench.integrations.vllm;"
        "from workbench import blas; print(blas._status)"
    )
    assert "vLLM" in run_python(code)


def test_every_message_is_part_of_the_union():
    kinds = {
        kind for kind in vars(messages).values() if isinstance(kind, type) and kind.__module__ == messages.__name__
    }
    assert kinds - {Admission, Packet} == set(messages.Message.__args__)
