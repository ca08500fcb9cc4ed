"""RecordingScheduler in vLLM itself: real Scheduler, KVCacheManager and BlockPool, no model (``make test-vllm``)."""

import importlib.util
import logging
import os

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from pathlib import Path

from real_vllm import drive, make_scheduler
from recorded_traces import assert_pool_fits, assert_same, tokens_of, without_tokens
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from workbench.simulation.simulate import simulate
from workbench.simulation.workload import read_workload
from workbench.trace import Trace
from workbench.trace.recorders import vllm as integration

WORKLOADS = sorted((Path(__file__).parents[1] / "data" / "vllm" / "workloads").glob("*.json"))


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(tmp_path / "traces"))
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "1")


def record(workload: Path, name: str, tmp_path: Path, depth: int) -> Trace:
    config, arrivals = read_workload(workload)
    scheduler = make_scheduler(getattr(integration, name), config, asynchronous=depth == 2)
    assert scheduler.recorder.writer is not None
    drive(scheduler, config, arrivals, depth=depth)
    scheduler.shutdown()
    (path,) = Path(os.environ["WORKBENCH_TRACE_DIR"]).iterdir()
    return Trace.load(path)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_a_recording_equals_the_simulation_in_every_field(workload, tmp_path):
    trace = record(workload, "RecordingScheduler", tmp_path, depth=1)
    assert_same(trace, simulate(workload, as_vllm=True))
    assert_pool_fits(trace)
    assert not trace.problems
    assert trace.meta.source == "vllm 0.33.0"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["RecordingScheduler", "AsyncRecordingScheduler"])
def test_an_asynchronous_recording_fits_together(name, workload, tmp_path):
    trace = record(workload, name, tmp_path, depth=2)
    assert trace.config["async_scheduling"]
    assert_pool_fits(trace)
    if "abort" not in workload.stem:  # an abort comes at another number of computed tokens
        assert tokens_of(trace) == tokens_of(simulate(workload, as_vllm=True))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
@pytest.mark.parametrize("depth", [1, 2])
def test_without_token_ids_everything_else_is_the_same(depth, workload, tmp_path, monkeypatch):
    """Without them most steps take a shorter path through the recorder."""
    with_tokens = record(workload, "RecordingScheduler", tmp_path, depth)
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(tmp_path / "other traces"))
    monkeypatch.setenv("WORKBENCH_TRACE_TOKENS", "0")
    without = record(workload, "RecordingScheduler", tmp_path, depth)
    assert all(set(tokens) == {0} for tokens in tokens_of(without).values())
    assert without_tokens(without) == without_tokens(with_tokens)


@pytest.mark.parametrize("value", ["x", "-1", "0"])
def test_a_wrong_setting_stops_the_recording_and_not_vllm(value, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WORKBENCH_TRACE_MAX_MB", value)
    config, arrivals = read_workload(WORKLOADS[0])
    # vLLM's logger does not propagate.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    scheduler = make_scheduler(integration.RecordingScheduler, config)
    assert scheduler.recorder.writer is None
    assert drive(scheduler, config, arrivals) == len(simulate(WORKLOADS[0]))
    scheduler.shutdown()
    assert sum("WORKBENCH_TRACE_MAX_MB" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_scheduler_is_the_one_that_vllm_is_set_for(asynchronous, tmp_path):
    config, _ = read_workload(WORKLOADS[0])
    scheduler = make_scheduler(integration.RecordingScheduler, config, asynchronous=asynchronous)
    assert isinstance(scheduler, AsyncScheduler) is asynchronous
    scheduler.shutdown()
