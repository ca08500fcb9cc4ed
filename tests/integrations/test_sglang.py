"""The recorder for SGLang over a double of its Scheduler, for what its real one does not show without a GPU."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from vllm_recordings import assemble

from workbench.trace.recorders import sglang as plugin
from workbench.trace.recorders.messages import Setup
from workbench.trace.recorders.settings import RecordingSettings

SIZE = 4


class RequestDouble:
    """The part of SGLang's Req that a recorder reads."""

    def __init__(self, name, num_prompt_tokens, row):
        self.rid, self.origin_input_ids, self.output_ids = name, list(range(num_prompt_tokens)), []
        self.sampling_params = SimpleNamespace(max_new_tokens=9)
        self.priority = self.extra_key = self.finished_reason = None
        self.prefix_len = self.extend_len = 0
        self.kv = SimpleNamespace(req_pool_idx=row, kv_allocated_len=0, kv_committed_len=0)

    def finished(self):
        return self.finished_reason is not None

    def end(self, kind):
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": kind})


class SchedulerDouble:
    """Queues, pools and hooked methods, each of which does what a test tells it to."""

    def __init__(self):
        self.waiting_queue, self.num_free = [], 100
        self.req_to_token_pool = SimpleNamespace(req_to_token=np.arange(SIZE, 8 * 64 + SIZE).reshape(8, 64))
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: self.num_free)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 20)
        config = {"block_size": SIZE, "num_blocks": 129, "async_scheduling": True, "token_ids_recorded": True}
        setup = Setup(RecordingSettings(token_ids=True, hashes=False), "sglang", "sglang 0", config, {}, {}, 0.0, 0.0)
        self._workbench_recorder = plugin.SGLangRecorder(self, lambda: setup)

    def queue(self, request, *, is_retracted=False):
        def original(scheduler, req, is_retracted=False):
            scheduler.waiting_queue.append(req)

        plugin.HOOKS["_add_request_to_queue"](original, self, request, is_retracted)

    def schedule(self, requests, decodes=(), retracted=()):
        """A batch of (request, start, number of tokens), and of requests that decode."""

        def original(scheduler):
            for each in retracted:
                self.queue(each, is_retracted=True)
            for each, start, count in requests:
                if each in self.waiting_queue:
                    self.waiting_queue.remove(each)
                each.prefix_len, each.extend_len = start, count
                each.kv.kv_allocated_len = each.kv.kv_committed_len = start + count
            for each in decodes:
                each.kv.kv_allocated_len += 1
                each.kv.kv_committed_len += 1
            reqs = [*[each for each, _, _ in requests], *decodes]
            mode = SimpleNamespace(is_extend=lambda: bool(requests))
            batch = SimpleNamespace(reqs=reqs, forward_mode=mode, decoding_reqs=list(decodes) if requests else None)
            return SimpleNamespace(batch_to_run=batch if reqs else None)

        return plugin.HOOKS["get_next_batch_to_run"](original, self).batch_to_run

    def update(self, batch, ends=()):
        def original(scheduler, batch):
            for each in batch.reqs:
                if not each.finished() and each.kv.kv_committed_len >= len(each.origin_input_ids):
                    each.output_ids.append(7)
            for each, kind in ends:
                each.end(kind)

        plugin.HOOKS["process_batch_result"](original, self, batch)

    def records(self):
        writer = self._workbench_recorder.writer
        self._workbench_recorder.close()
        return assemble(writer.received)


@pytest.fixture
def scheduler(in_process):
    return SchedulerDouble()


def test_overlapped_steps_are_scheduled_before_the_output_of_the_one_before(scheduler):
    a, b = RequestDouble("a", 6, 0), RequestDouble("b", 5, 1)
    scheduler.queue(a)
    first = scheduler.schedule([(a, 0, 6)])
    second = scheduler.schedule([], [a])
    scheduler.update(first)
    scheduler.queue(b)
    third = scheduler.schedule([(b, 4, 1)], [a])  # mixed: a prompt whose first page was found, and a reply
    scheduler.update(second, [(a, "stop")])
    scheduler.update(third, [(b, "length")])
    records = scheduler.records()
    chunks = [
        [(c.request_id, c.start, c.num_tokens, c.num_cached_tokens, c.sampled) for c in r.chunks] for r in records
    ]
    assert chunks[:2] == [[("a", 0, 6, 0, 7)], [("a", 6, 1, 0, 7)]]
    assert chunks[2] == [("b", 4, 1, 4, 7), ("a", 7, 1, 0, None)]
    assert records[2].chunks[1].discarded and not records[2].chunks[0].discarded
    assert records[2].finish_reasons == {"a": "stop", "b": "length"}
    assert [c.new_block_ids for r in records for c in r.chunks] == [(1, 2), (), (17, 18), ()]
    assert records[0].free_blocks == 120 // SIZE


def test_a_retraction_says_why_only_where_sglang_does(scheduler):
    a, b = RequestDouble("a", 6, 0), RequestDouble("b", 6, 1)
    for each in (a, b):
        scheduler.queue(each)
    scheduler.update(scheduler.schedule([(a, 0, 6), (b, 0, 6)]))
    scheduler.update(scheduler.schedule([], [a], retracted=[b]))
    scheduler.queue(a)  # as a pause of the server does
    scheduler.update(scheduler.schedule([(b, 0, 7)]))
    _, second, third = scheduler.records()
    assert second.preempt_reasons["b"].kind == "kv_blocks" and second.waiting == ("b",) and second.running == ("a",)
    assert third.preempt_reasons["a"].kind == "unknown" and third.resumed == ("b",) and third.waiting == ("a",)
    assert third.chunks[0].num_recomputed_tokens == 6


def test_a_retraction_is_not_why_others_wait(scheduler):
    """SGLang has tried to admit them before; that a preemption ends admission is a rule of vLLM's."""
    a, b, c = (RequestDouble(name, 6, row) for row, name in enumerate("abc"))
    for each in (a, b, c):
        scheduler.queue(each)
    scheduler.update(scheduler.schedule([(a, 0, 6), (b, 0, 6)]))
    scheduler.update(scheduler.schedule([], [a], retracted=[b]))
    second = scheduler.records()[1]
    assert second.preempted == ("b",) and second.not_scheduled["b"].kind == "preempted"
    assert second.not_scheduled["c"].kind == "unknown"


def test_an_abort_with_nothing_to_compute_is_a_step_after_those_in_flight(scheduler):
    a, b = RequestDouble("a", 6, 0), RequestDouble("b", 6, 1)
    scheduler.queue(a)
    batch = scheduler.schedule([(a, 0, 6)])
    scheduler.queue(b)
    scheduler.waiting_queue.remove(b)
    plugin.HOOKS["send_abort_output"](lambda *_: None, scheduler, None, b)
    assert scheduler.schedule([]) is None
    assert scheduler.schedule([]) is None  # nothing new: no step
    scheduler.update(batch, [(a, "length")])
    records = scheduler.records()
    assert [(len(r.chunks), r.aborted) for r in records] == [(1, ()), (0, ("b",))]
    assert records[1].arrived == ("b",)


def test_results_in_another_order_end_the_recording_and_not_the_server(scheduler, caplog):
    a, b = RequestDouble("a", 6, 0), RequestDouble("b", 6, 1)
    for each in (a, b):
        scheduler.queue(each)
    first, second = scheduler.schedule([(a, 0, 6)]), scheduler.schedule([(b, 0, 6)])
    scheduler.update(second)
    scheduler.update(first)
    assert [len(each.output_ids) for each in (a, b)] == [1, 1] and scheduler._workbench_recorder.writer is None
    assert sum("the result of another batch" in record.getMessage() for record in caplog.records) == 1


def test_a_request_that_the_queue_refuses_does_not_arrive(scheduler):
    plugin.HOOKS["_add_request_to_queue"](lambda *_, **__: None, scheduler, RequestDouble("a", 6, 0))
    b = RequestDouble("b", 6, 1)
    scheduler.queue(b)
    scheduler.update(scheduler.schedule([(b, 0, 6)]))
    (record,) = scheduler.records()
    assert record.arrived == ("b",)


def test_the_plug_in_hooks_the_scheduler_only_where_a_folder_is_set(monkeypatch):
    hooked = []
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookType = SimpleNamespace(AROUND="around")
    module.HookRegistry = SimpleNamespace(register=lambda target, hook, kind: hooked.append((target, kind)))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("WORKBENCH_TRACE_DIR", raising=False)
    plugin.register()
    assert not hooked
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", "traces")
    plugin.register()
    assert sorted(hooked) == sorted((f"{plugin.SCHEDULER}.{name}", "around") for name in plugin.HOOKS)
