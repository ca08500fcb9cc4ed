"""SGLang's own scheduler behind the hunt's protocol: what it does is drawn right, keeps the laws, and a fault shows."""

import importlib.util
import random
import traceback
from contextlib import suppress

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here: make test-sglang", allow_module_level=True)

from workbench.analysis.hunt.records import record_run
from workbench.analysis.hunt.schedule import schedule_of
from workbench.analysis.hunt.sglang import SGLangScheduler
from workbench.analysis.hunt.target import Refused, Target, find_target
from workbench.analysis.hunt.workloads import WORKLOAD_BYTES, make_workload
from workbench.trace import Trace

NAME = "workbench.analysis.hunt.sglang:SGLangScheduler"
CONFIG = {"num_blocks": 26, "block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 4}


def workload(num_requests=6, shared=32, **config):
    """Requests behind one system prompt that arrive two steps apart."""
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"parts": [{"len": shared, "seed": "system"}, {"len": 20 + 7 * i, "seed": f"user {i}"}]},
            "max_tokens": 30,
            "arrival_step": 2 * i,
        }
        for i in range(num_requests)
    ]
    return {"config": {**CONFIG, **config}, "requests": requests}


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_a_run_keeps_the_laws_and_its_recording_has_what_happened(block_size, caching, tmp_path):
    given = workload(num_blocks=400 // block_size, block_size=block_size, enable_prefix_caching=caching)
    target = find_target(NAME)
    assert target.run(given) is None
    record_run(target, given).save(tmp_path / "run.jsonl")
    trace = Trace.load(tmp_path / "run.jsonl")
    assert trace.end == "done" and not trace.problems
    for i, name in enumerate(given["requests"]):
        chunks = [c for step in trace for c in step.chunks if c.request_id == name["id"]]
        prompt = [c for c in chunks if c.start < 52 + 7 * i]
        hit = prompt[0].num_cached_tokens
        assert hit == prompt[0].start and (hit >= 32 - block_size if caching and i else hit == 0)
        assert [c.start for c in prompt[1:]] == [c.start + c.num_tokens for c in prompt[:-1]]
        assert sum(c.sampled is not None for c in chunks) == 30
    prefills = [any(c.num_tokens > 1 for c in step.chunks) for step in trace]
    mixed = [{c.num_tokens == 1 for c in step.chunks if c.start > 90} for step in trace]
    assert sum(prefills) >= 6 and all(len(kinds) < 2 for kinds in mixed)  # prompts alone, then replies


def test_replies_that_the_pool_cannot_hold_are_retracted_and_computed_again():
    given = workload(num_blocks=17, max_num_seqs=6)
    trace = record_run(find_target(NAME), given)
    assert trace.end == "done"
    assert any(step.preempted for step in trace) or any(step.waiting for step in trace)


def test_a_page_that_is_given_out_twice_is_found():
    class GivesOutTwice(SGLangScheduler):
        def __init__(self, config):
            super().__init__(config)
            allocator = self.scheduler.token_to_kv_pool_allocator
            allocate = allocator.alloc_extend

            def twice(*args, **more):
                pages = allocate(*args, **more)
                if pages is not None and len(allocator.free_pages):
                    allocator.free_pages[-1] = pages[0] // allocator.page_size
                return pages

            allocator.alloc_extend = twice

    fault = Target("planted", "", GivesOutTwice, ("caching",), allows=()).run(workload())
    assert fault is not None and fault.law == "blocks"


def _leaky(place):
    """SGLang's scheduler, which loses the pages that it frees in one place."""

    class Leaks(SGLangScheduler):
        def __init__(self, config):
            super().__init__(config)
            allocator = self.scheduler.token_to_kv_pool_allocator

            def losing(work):
                def run(*args, **more):
                    kept, allocator.free_segment = allocator.free_segment, lambda *args, **more: None
                    try:
                        return work(*args, **more)
                    finally:
                        allocator.free_segment = kept

                return run

            if place in ("_insert_cache", "evict"):
                cache = self.scheduler.tree_cache
                setattr(cache, place, losing(getattr(cache, place)))
                self.patched = None
                return
            module = {"release_req": self._parts.batch, "process_pending_chunked_abort": self._parts.scheduler}[place]
            self.patched = (module, module.release_kv_cache)
            release = losing(module.release_kv_cache)

            def only_there(request, *args, **more):
                callers = {frame.name for frame in traceback.extract_stack(limit=4)}
                return (release if place in callers else self.patched[1])(request, *args, **more)

            module.release_kv_cache = only_there

        def close(self):
            if self.patched:
                self.patched[0].release_kv_cache = self.patched[1]

    return Leaks


@pytest.mark.parametrize("place", ["release_req", "process_pending_chunked_abort", "_insert_cache", "evict"])
def test_random_workloads_meet_a_leak_wherever_pages_are_freed(place):
    """Of a retracted request, of one aborted in mid-prompt, of a prompt that another one has cached, of the cache."""
    right, rng = find_target(NAME), random.Random(1)
    fault, leaky = None, Target("planted", "", _leaky(place), right.features, allows=SGLangScheduler.allows)
    for _ in range(150):
        given = make_workload(rng.randbytes(WORKLOAD_BYTES), right.features)
        with suppress(Refused):
            fault = leaky.run(given)
        if fault is not None:
            assert fault.law in ("blocks", "crash") and right.run(given) is None, fault  # or the pool is short at once
            return
    pytest.fail("no workload met it")


def test_an_aborted_request_may_be_retracted_before_it_leaves():
    config = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 16, "max_model_len": 128, "num_blocks": 5}
    known, more = {"len": 16, "seed": "A"}, {"len": 16, "seed": "B"}
    requests = [
        {"id": "r0", "prompt": known, "max_tokens": 5},
        {"id": "r1", "prompt": {"len": 1}, "max_tokens": 5, "arrival_step": 2, "stop_at": 3},
        {"id": "r2", "prompt": known, "max_tokens": 5, "arrival_step": 5, "stop_at": 4},
        {"id": "r3", "prompt": known, "max_tokens": 20, "arrival_step": 2},
        {"id": "r4", "prompt": more, "max_tokens": 2, "abort_step": 3},
        {"id": "r5", "prompt": more, "max_tokens": 1, "abort_step": 2},
    ]
    given = {"config": {**config, "enable_prefix_caching": True}, "requests": requests}
    assert find_target(NAME).run(given) is None
    assert schedule_of(find_target(NAME), given)[1] == "done"


def test_few_random_workloads_are_refused_and_requests_are_retracted():
    target, rng, ends, retracted = find_target(NAME), random.Random(2), [], 0
    for _ in range(60):
        steps, end = schedule_of(target, make_workload(rng.randbytes(WORKLOAD_BYTES), target.features))
        ends.append(end)
        retracted += any(step["preempted"] for step in steps)
    assert ends.count("done") > 40 and retracted


def test_more_than_the_pool_holds_is_refused_as_sglang_does():
    scheduler = SGLangScheduler(CONFIG)
    from workbench.analysis.hunt.drive import live_request

    with pytest.raises(ValueError, match="more tokens than SGLang takes"):
        scheduler.add(live_request(0, {"id": "a", "prompt": {"len": 500}, "max_tokens": 4}))
    with pytest.raises(ValueError, match="whole pages"):
        SGLangScheduler({**CONFIG, "max_num_batched_tokens": 60})
