"""SGLang's own scheduler, recorded by the plug-in: the file has what the scheduler's objects said at every step."""

import importlib.util
import logging

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here: make test-sglang", allow_module_level=True)

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry

from workbench.analysis.hunt.drive import live_request
from workbench.analysis.hunt.sglang import SGLangScheduler
from workbench.trace import Trace
from workbench.trace.recorders import sglang as plugin

PAGE = 4
CONFIG = {"num_blocks": 60, "block_size": PAGE, "max_num_batched_tokens": 32, "max_num_seqs": 4}


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """The folder of the recordings; the Scheduler is hooked as in a server, until the test ends."""
    monkeypatch.setenv("WORKBENCH_TRACE_DIR", str(tmp_path))
    monkeypatch.setattr(plugin.log, "level", logging.INFO)  # the adapter silences SGLang's logger
    for name in plugin.HOOKS:
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))  # puts the method back afterwards
    HookRegistry.reset()
    plugin.register()
    HookRegistry.apply_hooks()
    yield tmp_path
    HookRegistry.reset()


class Seen:
    """Drives the scheduler, and writes down what its own objects say at each step that computes something."""

    def __init__(self, **config):
        self.target = SGLangScheduler({**CONFIG, **config})
        self.scheduler = self.target.scheduler
        self.steps, self.ends, self.retracted = [], {}, []
        self.num = 0

    def add(self, name, num_tokens, max_tokens, shared=0):
        prompt = {"parts": [{"len": shared, "seed": "shared"}, {"len": num_tokens - shared, "seed": name}]}
        self.target.add(live_request(self.num, {"id": name, "prompt": prompt, "max_tokens": max_tokens}))
        self.num += 1

    def abort(self, name):
        self.target.abort(name)

    def step(self):
        scheduler = self.scheduler
        before = self.steps[-1][-1] if self.steps else set()
        plan = self.target.schedule()
        batch = plan.handle
        waiting = [each.rid for each in scheduler.waiting_queue]
        self.retracted += sorted(before & set(waiting))
        if batch is None:
            return False
        chunks = {}
        for place, each in enumerate(batch.reqs):
            if batch.forward_mode.is_extend():
                chunks[each.rid] = (int(batch.prefix_lens[place]), int(batch.extend_lens[place]))
            else:
                chunks[each.rid] = (int(batch.seq_lens_cpu[place]) - 1, 1)
        rows = scheduler.req_to_token_pool.req_to_token
        pages = {
            each.rid: [slot // PAGE for slot in rows[each.kv.req_pool_idx][: sum(chunks[each.rid])].tolist()[::PAGE]]
            for each in batch.reqs
        }
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        live = {*(each.rid for each in plan.handle.reqs), *(each.rid for each in scheduler.running_batch.reqs)}
        self.steps.append((chunks, pages, waiting, free // PAGE, live))
        requests = list(batch.reqs)
        self.target.update(plan, {each.rid: (7,) for each in requests})
        for each in requests:
            if each.finished():
                self.ends[each.rid] = each.finished_reason.to_json()["type"]
        return True

    def drive(self, steps=400):
        for _ in range(steps):
            if not self.step() and not self.scheduler.waiting_queue:
                break

    def close(self):
        plugin.recorder_of(self.scheduler).close()


def load(folder):
    (path,) = folder.iterdir()
    return Trace.load(path)


def computed(trace):
    return [step for step in trace if step.chunks]


def assert_same(trace, seen):
    steps = computed(trace)
    assert len(steps) == len(seen.steps)
    num_same_tables = 0
    for step, (chunks, pages, waiting, free, live) in zip(steps, seen.steps):
        assert {c.request_id: (c.start, c.num_tokens) for c in step.chunks} == chunks
        assert list(step.waiting) == waiting and step.free_blocks == free and set(step.running) == live
        for chunk in step.chunks:
            table = list(step.block_tables[chunk.request_id])
            assert len(table) == len(pages[chunk.request_id])
            if chunk.num_cached_tokens or chunk.start == 0:  # the whole table is new
                assert table == pages[chunk.request_id]
            num_same_tables += table == pages[chunk.request_id]
    assert num_same_tables > len(steps) // 2
    assert {name: reason for step in steps for name, reason in step.finish_reasons.items()} == seen.ends


def test_a_recording_has_the_chunks_and_hits_that_the_scheduler_had(traces):
    seen = Seen()
    seen.add("a", 70, 6)  # three chunks
    for _ in range(4):
        seen.step()
    seen.add("b", 50, 5)
    seen.add("c", 41, 5, shared=40)
    seen.drive()
    seen.add("d", 47, 3, shared=40)
    seen.drive()
    seen.close()
    trace = load(traces)
    assert trace.end == "" and not trace.problems and trace.meta.source.startswith("sglang 0.5.")
    assert_same(trace, seen)
    first = {c.request_id: c for step in reversed(list(trace)) for c in step.chunks}
    assert [c.num_tokens for step in trace for c in step.chunks if c.request_id == "a"][:3] == [32, 32, 6]
    assert first["d"].num_cached_tokens == 40 and first["a"].num_cached_tokens == 0
    assert sum(c.sampled is not None for step in trace for c in step.chunks) == 6 + 5 + 5 + 3
    assert all(step.duration > 0 for step in computed(trace)) and trace.meta.created > 1.7e9
    assert not any(info.prompt_token_ids for info in trace.requests.values())


def test_retracted_requests_are_preempted_with_the_reason(traces):
    seen = Seen(num_blocks=22)
    seen.scheduler.new_token_ratio_tracker.current = 0.0  # it expects short replies, and admits all four
    for index in range(4):
        seen.add(f"r{index}", 12, 40)
    seen.drive()
    seen.close()
    trace = load(traces)
    assert_same(trace, seen)
    assert seen.retracted and [name for step in trace for name in sorted(step.preempted)] == seen.retracted
    reasons = {reason.kind for step in trace for reason in step.preempt_reasons.values()}
    assert reasons == {"kv_blocks"}
    assert set(seen.retracted) <= {name for step in trace for name in step.resumed}


@pytest.mark.parametrize("when", ["waiting", "in a chunked prompt", "running"])
def test_an_abort_is_recorded_wherever_the_request_is(when, traces):
    seen = Seen(max_num_seqs=1)
    seen.add("a", 70, 20)
    seen.step()
    if when == "running":
        for _ in range(4):
            seen.step()
    if when == "waiting":
        seen.add("b", 10, 3)
        seen.step()
    seen.abort("b" if when == "waiting" else "a")
    seen.drive()
    seen.close()
    trace = load(traces)
    gone = {name for step in trace for name in step.aborted}
    ended = {name: reason for step in trace for name, reason in step.finish_reasons.items()}
    if when == "running":  # SGLang computes one more step of it
        assert ended == {"a": "abort"} and not gone
    else:
        assert gone == ({"b"} if when == "waiting" else {"a"})
    assert {c.request_id for c in computed(trace)[-1].chunks} == {"a"}


def test_a_scheduler_that_is_not_hooked_leaves_no_file_and_a_wrong_record_shows(traces, monkeypatch):
    seen = Seen()
    recorder = plugin.recorder_of(seen.scheduler)
    blocks = recorder._new_blocks
    monkeypatch.setattr(recorder, "_new_blocks", lambda requests: [table[::-1] for table in blocks(requests)])
    seen.add("a", 50, 3)
    seen.drive()
    seen.close()
    with pytest.raises(AssertionError):
        assert_same(load(traces), seen)
    monkeypatch.delenv("WORKBENCH_TRACE_DIR")
    HookRegistry.reset()
    plugin.register()
    assert not HookRegistry._hooks


def test_a_fault_of_the_recorder_does_not_reach_the_server(traces, monkeypatch, caplog):
    seen = Seen()
    monkeypatch.setattr(plugin, "Update", lambda *_: 1 / 0)
    seen.add("a", 50, 3)
    seen.drive()
    assert seen.ends == {"a": "length"}
    assert sum("division by zero" in record.getMessage() for record in caplog.records) == 1
    assert plugin.recorder_of(seen.scheduler).writer is None


def test_what_is_not_recorded_is_named(traces, caplog):
    seen = Seen()
    seen.scheduler.is_hybrid_swa = True
    assert plugin.recorder_of(seen.scheduler).writer is None
    assert any("sliding windows of SGLang cannot be recorded" in record.getMessage() for record in caplog.records)
