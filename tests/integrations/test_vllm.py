"""RecordingScheduler: recordings of vLLM itself and of the double equal the simulation."""

import json
import logging
import os
import subprocess
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import vllm_double
from recorded_traces import assert_pool_fits, assert_same, tokens_of, without_tokens
from vllm_double import AsyncVllmSchedulerDouble, VllmSchedulerDouble, vllm_config
from vllm_recordings import (
    DATA,
    LONG,
    WORKLOADS,
    AsyncRecordingClass,
    RecordingClass,
    RecordingDouble,
    assemble,
    run_double,
    warnings_of,
)

from workbench.simulation.simulate import simulate
from workbench.simulation.workload import read_workload
from workbench.trace import Trace
from workbench.trace.recorders import messages, recorder
from workbench.trace.recorders import vllm as integration
from workbench.trace.recorders.messages import (
    Admission,
    Packet,
    Preemption,
    Schedule,
    Update,
    unpack,
)

# -- recordings of vLLM itself, as files -------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_recorded_vllm_equals_the_simulation_in_every_field(workload):
    trace = Trace.load(DATA / "vllm-recorded" / "sync" / f"{workload.stem}.jsonl.gz")
    assert trace.meta.source == "vllm 0.33.0"
    assert not trace.problems
    assert_same(trace, simulate(workload, as_vllm=True))
    assert_pool_fits(trace)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_recorded_asynchronous_vllm_fits_together(workload):
    trace = Trace.load(DATA / "vllm-recorded" / "async" / f"{workload.stem}.jsonl.gz")
    assert trace.config["async_scheduling"]
    assert not trace.problems
    assert_pool_fits(trace)
    if "abort" not in workload.stem:  # an abort comes at another number of computed tokens
        assert tokens_of(trace) == tokens_of(simulate(workload, as_vllm=True))


@pytest.mark.parametrize(
    "change", [{"num_blocks": 12}, {"max_num_batched_tokens": 63}, {"policy": "priority"}, {"max_num_seqs": 2}]
)
def test_the_comparison_is_able_to_fail(change):
    trace = Trace.load(DATA / "vllm-recorded" / "sync" / "d3_preempt_priority.jsonl.gz")
    workload = DATA / "vllm" / "workloads" / "d3_preempt_priority.json"
    if change == {"policy": "priority"}:
        change = {"policy": "fcfs"}  # the workload is already by priority
    with pytest.raises(AssertionError):
        assert_same(trace, simulate(workload, config=change, max_steps=200))


# -- recordings of the double --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_the_double_equals_the_simulation_in_every_field(workload, in_process):
    scheduler = run_double(workload)
    assert_same(assemble(scheduler.recorder.writer.received), simulate(workload, as_vllm=True))


def test_what_workers_change_later_is_not_what_was_scheduled(in_process, monkeypatch):
    """A step with the requests of the step before is recorded as such, even if a worker has changed those lists."""
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
    assert 0 < sum(not step.num_scheduled_tokens for step in steps) < len(steps)
    assert_same(assemble(received), simulate(LONG))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_a_step_names_no_request_that_the_writer_knows(workload, in_process):
    """After admissions, ends and preemptions too."""
    steps = [
        message for message in unpack(run_double(workload).recorder.writer.received) if isinstance(message, Schedule)
    ]
    assert [step.request_ids for step in steps] == [None] * len(steps)


def test_a_step_is_like_the_last_when_it_schedules_one_token_of_the_same_requests(in_process):
    """Requests are named if one is replaced or the order changes; changes by a worker do not count."""
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
        list(tokens) if index in (0, 2, 3) else None for index, tokens in enumerate(steps)
    ]
    assert [message.num_scheduled_tokens or [1, 1] for message in sent] == [list(tokens.values()) for tokens in steps]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_that_waits_and_asks_again_is_recorded_once(async_scheduling, in_process, monkeypatch):
    """Also after an arrival that the record of an ordinary step already contains.

    The first empty iteration of an asynchronous engine takes in the output of the step before it, and is recorded.
    """
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "0")
    monkeypatch.setattr(recorder, "SEND_SECONDS", 3600.0)
    double = RecordingClass(vllm_config(read_workload(LONG)[0], async_scheduling=async_scheduling))
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
    assert steps == [ids, None, None, [], *([None] if async_scheduling else []), ids]
    assert sum(isinstance(message, Update) for message in sent) == len(steps)


def test_a_preemption_by_a_reset_of_the_prefix_cache_has_its_reason(in_process):
    config, arrivals = read_workload(LONG)
    reset = RecordingDouble(config)
    vllm_double.drive(reset, arrivals, max_steps=4)
    num_running = len(reset.running)
    assert num_running
    reset.reset_prefix_cache(reset_running_requests=True)
    received = reset.recorder.writer.received
    reset.recorder.close()
    resets = [message.is_reset for message in unpack(received) if isinstance(message, Preemption)]
    assert all(resets[-num_running:]) and resets[:-num_running] and not any(resets[:-num_running])


def test_without_token_ids_everything_else_is_the_same_and_takes_the_shorter_way(in_process, monkeypatch):
    """Without them most steps call no method of the recorder, and nothing of the record may be missing."""
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


def test_queues_that_are_sent_equal_those_that_are_derived(in_process, monkeypatch):
    derived = assemble(run_double(LONG).recorder.writer.received)
    monkeypatch.setattr(recorder, "QUEUE_SENDS", 1)
    monkeypatch.setattr(recorder, "SEND_SECONDS", -1.0)
    received = run_double(LONG).recorder.writer.received
    told = [message.running is not None for message in unpack(received.copy()) if isinstance(message, Schedule)]
    sent = assemble(received)
    assert told == [index > 0 for index in range(len(sent))]
    assert any(len(record.waiting) > 1 for record in sent)
    assert [(record.running, record.waiting) for record in sent] == [
        (record.running, record.waiting) for record in derived
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


def test_token_ids_are_recorded_only_on_request(traces, monkeypatch):
    monkeypatch.setenv("WORKBENCH_TRACE_GZIP", "0")
    scheduler = run_double(LONG)
    scheduler.shutdown()
    (requested,) = traces.iterdir()
    secrets = {token for tokens in tokens_of(simulate(LONG)).values() for token in tokens if token > 999}
    secrets.update(token for info in simulate(LONG).requests.values() for token in info.prompt_token_ids if token > 999)
    assert all(str(token) in requested.read_text() for token in secrets)  # so the search can find them

    monkeypatch.delenv("WORKBENCH_TRACE_TOKENS")
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(traces / "without_tokens"))
    scheduler = run_double(LONG)
    scheduler.shutdown()
    (path,) = (traces / "without_tokens").iterdir()
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


# -- in vLLM's process -------------------------------------------------------------------------------------------


def test_the_classes_are_made_from_vllms_own_on_first_use(monkeypatch):
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
        for name in ("RecordingScheduler", "AsyncRecordingScheduler"):  # at the path that vLLM's command line names
            assert getattr(import_module("workbench.vllm"), name) is getattr(integration, name)
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


def test_a_subclass_stays_one_under_asynchronous_scheduling(in_process):
    class Own(RecordingClass):
        def schedule(self, *args, **kwargs):
            self.was_asked = True
            return super().schedule(*args, **kwargs)

    config = vllm_config(read_workload(LONG)[0], async_scheduling=True)
    scheduler = Own(config)
    assert isinstance(scheduler, Own) and isinstance(scheduler, AsyncVllmSchedulerDouble)
    assert type(scheduler).__name__ == "Own" and type(Own(config)) is type(scheduler)
    scheduler.schedule()
    assert scheduler.was_asked


def test_the_version_is_that_of_the_imported_vllm(monkeypatch):
    module = ModuleType("vllm")
    module.__version__ = "0.32.0+cpu"
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert integration._vllm_version() == "0.32.0+cpu"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_little_is_imported_into_vllms_process():
    code = "import sys, workbench.trace.recorders.vllm; print(sorted(m for m in sys.modules if '.' not in m))"
    loaded = run_python(code)
    for heavy in ("mlx", "numpy", "numba", "panel", "bokeh", "torch", "vllm"):
        assert f"'{heavy}'" not in loaded


def test_the_blas_of_vllms_process_is_left_alone():
    code = (
        "import sys, types; sys.modules['vllm'] = types.ModuleType('vllm'); import workbench.trace.recorders.vllm;"
        "from workbench.base import blas; blas.preload(); print(blas._status)"
    )
    assert "vLLM" in run_python(code)


def test_every_message_is_part_of_the_union():
    kinds = {
        kind for kind in vars(messages).values() if isinstance(kind, type) and kind.__module__ == messages.__name__
    }
    assert kinds - {Admission, Packet} == set(messages.Message.__args__)


# The settings of ranks as vLLM 0.32's engine process has them: for a model without experts each rank is a whole engine.
PARALLEL = {
    "one engine": ({"data_parallel_rank_local": None}, False),
    "first rank, dense": ({"data_parallel_rank_local": 0}, True),
    "fourth rank, dense": ({"data_parallel_rank_local": 3, "data_parallel_index": 3}, True),
    "a rank of another machine, dense": ({"data_parallel_rank_local": 0, "data_parallel_index": 8}, True),
    "mixture of experts": ({"data_parallel_size": 4, "data_parallel_rank_local": 1, "data_parallel_index": 1}, True),
    "before data_parallel_index": ({"data_parallel_size": 2}, True),
}


@pytest.mark.parametrize("left, is_rank", PARALLEL.values(), ids=PARALLEL)
def test_ranks_of_dense_models_share_a_key_as_those_of_experts_do(left, is_rank, traces):
    double = RecordingDouble(read_workload(LONG)[0])
    double.recorder.close()
    double.parallel_config = SimpleNamespace(**{"data_parallel_size": 1, "data_parallel_index": 0} | left)
    setup = integration.describe_vllm(double)
    assert setup.run == (str(os.getppid()) if is_rank else "")
    size = double.parallel_config.data_parallel_size
    assert setup.config.get("data_parallel_size") == (None if is_rank and size == 1 else size)
