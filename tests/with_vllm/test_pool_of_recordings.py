"""The pool in a recording of vLLM is vLLM's own at every moment: its free queue, cached blocks and tables."""

import importlib.util
import os
import random
from collections import Counter

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from feature_workloads import KINDS, random_workload
from vllm_oracle import run_vllm

from workbench import Trace
from workbench.trace.recorders.vllm import RecordingScheduler

NUM_WORKLOADS = int(os.environ.get("WORKBENCH_RECORDED_WORKLOADS", "12"))
"""Random workloads of each kind."""


class WatchedScheduler(RecordingScheduler):
    """Notes the state of the pool after each call whose step is in the recording."""

    latest = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        WatchedScheduler.latest, self.truths = self, []

    def truth(self):
        pool = self.kv_cache_manager.block_pool
        tables = {
            request.request_id: tuple(map(tuple, self.kv_cache_manager.get_block_ids(request.request_id)))
            for request in self.running
        }
        return (
            [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            {block.block_id for block in pool.blocks if block.block_hash is not None},
            tables,
        )

    def schedule(self, *args, **kwargs):
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens or id(output) in self.recorder._empty_steps:
            self.truths.append({"scheduled": self.truth(), "end": self.truth()})
        return output

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.truths:
            self.truths[-1]["end"] = self.truth()
        return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_at_every_moment(kind, tmp_path, monkeypatch):
    seen = Counter()
    for index in range(NUM_WORKLOADS):
        workload = random_workload(kind, random.Random(f"recorded:{kind}:{index}"))
        folder = tmp_path / f"{index}"
        monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(folder))
        _, end = run_vllm(workload, 400, WatchedScheduler)
        (path,) = folder.iterdir()
        trace, truths = Trace.load(path), WatchedScheduler.latest.truths
        assert len(trace) >= len(truths) - 2 and (end != "done" or len(trace) == len(truths))
        for place, record in enumerate(trace):
            for moment in ("scheduled", "end"):
                if moment == "end" and place == len(trace) - 1 and end != "done":
                    continue  # its output, or that of a step after it, is not recorded
                free, cached, tables = truths[place][moment]
                state = trace.pool_state(place, moment)
                where = f"{moment} of step {record.step} of workload {index}"
                assert state.free_queue.tolist() == free, where
                assert {block for block, is_cached in enumerate(state.cached) if is_cached} == cached, where
                found = {
                    request_id: (table, *state.other_tables.get(request_id, ()))
                    for request_id, table in state.block_tables.items()
                }
                assert {rid: table for rid, table in found.items() if rid in tables} == tables, where
                assert state.consistent
            seen["evicted"] += len(record.pool.evicted)
            seen["back"] += len(record.pool.back) + len(record.pool_end.back)
            seen["cached at the end"] += record.num_cached_end
    assert seen["back"] and (kind != "hybrid_window_prefix" or seen["evicted"]), seen
