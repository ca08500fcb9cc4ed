"""Why admissions missed, against brute force over the whole history of a live scheduler's pool."""

import os
import random
from collections import Counter
from functools import partial

import msgspec
import pytest
from feature_workloads import KINDS, random_workload
from miss_oracle import MissOracle
from tiers import examples

from workbench import Trace, simulate
from workbench.analysis.computed_tokens import ComputedTokens
from workbench.analysis.miss import REASONS, lost_by_reason
from workbench.analysis.misses import history_of, misses_table
from workbench.analysis.prefix_history import PrefixHistory
from workbench.apps.cli import main
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.scheduler import Scheduler
from workbench.scheduler.sliding_window import SlidingWindow
from workbench.simulation.arrivals import arrival_order
from workbench.simulation.workload import read_workload
from workbench.trace import TraceMeta

NUM_ADMISSIONS = int(os.environ.get("WORKBENCH_MISS_ADMISSIONS", "10000"))
FIELDS = ("group", "found", "looked_up", "hit", "block", "reason", "step")


def pressed_workload(rng):
    """One group under pressure: preemptions, chunks taken back, salts, prompts of few seeds with long common parts."""
    block_size = rng.choice([1, 2, 4, 8])
    longest = rng.choice([12, 30, 60])
    per_request = -(-(longest + 12) // block_size) + 1
    config = {
        "max_num_batched_tokens": rng.choice([6, 16, 40, 64]),
        "max_num_seqs": rng.choice([2, 4, 6]),
        "block_size": block_size,
        "num_blocks": 1 + int(per_request * rng.choice([1.0, 1.3, 2.0, 4.0])),
        "policy": rng.choice(["fcfs", "priority", "priority"]),
        "scheduler_reserve_full_isl": rng.random() < 0.5,
    }
    requests = []
    for index in range(rng.randint(4, 24)):
        length = rng.randint(1, longest)
        shared = rng.choice([0, length // 3, length - 1, length])
        parts = [{"len": shared, "seed": rng.choice("AAB")}, {"len": length - shared, "seed": f"u{rng.randint(0, 9)}"}]
        requests.append(
            {
                "id": f"r{index}",
                "prompt": {"parts": [part for part in parts if part["len"]]},
                "max_tokens": rng.randint(1, 10),
                "arrival_step": rng.randint(0, 30),
                "priority": rng.randint(0, 3),
                "cache_salt": rng.choice(["", "", "", "x"]),
            }
        )
    return {"config": config, "requests": requests}


def taken_back_workload(rng):
    """Prompts in small chunks in a pool that is too small: chunks are taken back in the step that made them."""
    longest = 40
    requests = [
        {
            "id": f"r{index}",
            "prompt": {"len": longest if index == 0 else rng.randint(8, 24), "seed": rng.choice("ABC")},
            "max_tokens": rng.randint(1, 3),
            "arrival_step": rng.randint(0, 5) if index else 0,
            "priority": rng.randint(0, 3) if index else 4,
        }
        for index in range(rng.randint(3, 6))
    ]
    block_size = rng.choice([1, 2, 4])
    config = {
        "max_num_batched_tokens": rng.choice([16, 24]),
        "long_prefill_token_threshold": rng.choice([4, 8]),
        "block_size": block_size,
        "num_blocks": 1 + (longest + 4) // block_size + rng.randint(0, 4),
        "policy": "priority",
        "scheduler_reserve_full_isl": False,
    }
    return {"config": config, "requests": requests}


def salted(workload, rng):
    workload["config"]["enable_prefix_caching"] = True
    for request in workload["requests"]:
        if rng.random() < 0.2:
            request["cache_salt"] = "x"
    return workload


def differences(oracle, trace):
    """Fields of misses that differ from the oracle's, each with both values."""
    found = []
    for request_id, answers in oracle.answers.items():
        misses = trace.why_missed(request_id)
        if len(misses) != len(answers):
            found.append((request_id, "number", len(misses), len(answers)))
        for miss, answer in zip(misses, answers):
            lost = Counter()
            for part in miss.parts:
                lost[part.reason] += part.tokens
            mine = {name: getattr(miss, name) for name in FIELDS}
            mine["lost"] = dict(lost)
            expected = {name: answer[name] for name in mine}
            if mine != expected:
                found.append((request_id, miss.admitted, mine, expected))
            elif miss.culprit not in answer["culprits"]:
                found.append((request_id, miss.admitted, miss, answer["culprits"]))
    return found


def workloads(seed):
    """Workloads of every kind, those left out that no schedule can serve."""
    rng = random.Random(seed)
    while True:
        for make in (pressed_workload, taken_back_workload, *(partial(random_workload, kind) for kind in KINDS)):
            workload = make(rng)
            if isinstance(make, partial):
                workload = salted(workload, rng)
            try:
                simulate(workload, max_steps=1)
            except ValueError:
                continue
            yield workload


def run(workload):
    oracle = MissOracle()
    with oracle.watching():
        trace = simulate(workload, max_steps=400)
    return oracle, trace


def test_every_miss_equals_brute_force():
    num_admissions, seen = 0, Counter()
    for index, workload in enumerate(workloads(1)):
        oracle, trace = run(workload)
        assert differences(oracle, trace) == [], (index, workload)
        for answers in oracle.answers.values():
            num_admissions += len(answers)
            seen.update(answer["reason"] for answer in answers)
        if num_admissions >= examples(NUM_ADMISSIONS):
            break
    rare = {"unknown", "last block dropped for the drafter"}
    assert set(seen) >= set(REASONS) - rare, seen


def request(name, step, *parts, **more):
    prompt = {"parts": [{"len": length, "seed": seed} for length, seed in parts]}
    return {"id": name, "prompt": prompt, "max_tokens": 2, "arrival_step": step, **more}


def the_miss(requests, name, **config):
    trace = simulate({"config": {"block_size": 4, "num_blocks": 100} | config, "requests": requests})
    [miss] = trace.why_missed(name)
    return miss


def test_another_token():
    miss = the_miss([request("a", 0, (20, "s")), request("b", 9, (10, "s"), (10, "t"))], "b")
    assert (miss.block, miss.reason, miss.tokens, miss.culprit, miss.position) == (2, "never computed", 8, "a", 10)
    assert miss.token_ids[0] != miss.token_ids[1] and "token 10" in repr(miss)
    assert miss.why.startswith("its block 2 (tokens 8 to 11) was never computed: token 10 is "), miss.why


def test_nothing_in_common():
    miss = the_miss([request("a", 0, (20, "s")), request("b", 9, (20, "t"))], "b")
    assert (miss.reason, miss.culprit, miss.found, miss.tokens) == ("never computed", None, 0, 16)


def test_evicted_by_a_named_request():
    requests = [request("a", 0, (32, "s")), request("b", 9, (32, "t")), request("c", 19, (32, "s"))]
    miss = the_miss(requests, "c", num_blocks=11)
    assert (miss.reason, miss.culprit, miss.found) == ("computed and evicted", "b", 4)
    assert miss.steps_ago == 19 - miss.step == 9 or miss.steps_ago == 10
    assert "b" in miss.why and f"step {miss.step}" in miss.why


def test_a_block_that_was_not_full():
    miss = the_miss([request("a", 0, (8, "s")), request("b", 9, (8, "s"), (9, "t"))], "b")
    assert (miss.reason, miss.block, miss.culprit) == ("never computed", 2, "a")  # a has an output token there
    requests = [request("a", 0, (10, "s"), max_tokens=1), request("b", 9, (16, "s"))]
    miss = the_miss(requests, "b")
    assert (miss.reason, miss.block, miss.culprit, miss.tokens) == ("not full", 2, "a", 4)


@pytest.mark.parametrize(("length", "reason", "tokens"), [(16, "last token must be computed", 4), (17, "not full", 1)])
def test_a_whole_hit_still_computes_something(length, reason, tokens):
    requests = [request("a", 0, (length, "s")), request("b", 9, (length, "s"))]
    miss = the_miss(requests, "b")
    assert (miss.reason, miss.tokens, miss.found) == (reason, tokens, length - tokens)
    place = "its block 3 (tokens 12 to 15)" if length == 16 else "its block 4 (token 16)"
    assert miss.why.startswith(place), "the tokens that the request has, as many as the block holds"


@pytest.mark.parametrize("num_hits", [16, 20])
def test_an_engine_that_computes_nothing_behind_a_whole_hit(num_hits, tmp_path):
    """As a faulty scheduler does, whose run the hunt shows: nothing in it has to be right."""
    requests = [request("a", 0, (16, "s"), max_tokens=1), request("b", 9, (16, "s"), max_tokens=1)]
    trace = simulate({"config": {"block_size": 4, "num_blocks": 100}, "requests": requests})
    step = trace[9]
    whole = msgspec.structs.replace(step.chunks[0], start=16, num_tokens=0, num_cached_tokens=num_hits, sampled=None)
    recorded = Trace(trace.meta)
    for info in trace.requests.values():
        recorded.add_request(info)
    for each in (*trace[:9], msgspec.structs.replace(step, chunks=(whole,), finished=())):
        if not each.has_block_tables:
            each.attach_block_tables(4, [step.block_table(0)])
        recorded.append(each)
    [miss] = recorded.why_missed("b")
    assert (miss.looked_up, miss.found, miss.tokens, miss.reason) == (16, 16, 0, "unknown")
    assert "all its tokens were found" in repr(miss)
    table = misses_table(recorded, changes=False)
    assert (table.num_admissions, table.looked_up, table.found) == (2, 32, 16)
    recorded.to_html(tmp_path / "run.html")


def test_a_run_that_does_not_hold_together_is_refused(monkeypatch, tmp_path):
    requests = [request("a", 0, (16, "s")), request("b", 9, (16, "s"))]
    trace = simulate({"config": {"block_size": 4, "num_blocks": 100}, "requests": requests})
    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", lambda self, request: self._no_hit)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"step 0 does not follow from those before it.*trace.check\(\) tells"):
            trace.why_missed("b")
    trace.to_html(tmp_path / "run.html")


def test_another_salt():
    requests = [request("a", 0, (17, "s"), cache_salt="x"), request("b", 9, (17, "s"))]
    miss = the_miss(requests, "b")
    assert (miss.reason, miss.tokens, miss.culprit) == ("cache salt differs", 16, "a")
    requests.append(request("c", 19, (17, "s"), cache_salt="x"))
    assert the_miss(requests, "c").found == 16


def test_a_window_that_was_not_kept():
    groups = [{"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 8}]
    requests = [request("a", 0, (16, "s"), (16, "a")), request("b", 9, (16, "s"), (16, "b"))]
    config = {"block_size": 4, "num_blocks": 100, "kv_cache_groups": groups}
    full, window = simulate({"config": config, "requests": requests}).why_missed("b")
    assert (full.found, full.reason, full.hit) == (16, "never computed", 0)
    assert (window.found, window.reason, window.tokens, window.block) == (0, "outside what the window kept", 16, 2)


def test_reprs():
    trace = simulate({"requests": [request("a", 0, (40, "s")), request("b<", 3, (40, "s"))]})
    assert repr(trace.why_missed("b<")).startswith("b<, admitted in step 3, group 0 (full attention): 32 of 40 tokens")
    assert "<td>b&lt;</td>" in trace.why_missed("b<")._repr_html_()
    with pytest.raises(ValueError, match="'nobody'"):
        trace.why_missed("nobody")


def test_no_cache_no_misses():
    trace = simulate({"config": {"enable_prefix_caching": False}, "requests": [request("a", 0, (40, "s"))]})
    assert trace.why_missed("a") == [] and "no misses" in repr(trace.why_missed("a"))
    assert "nothing was looked up" in str(misses_table(trace))


def test_the_middle_of_a_run_knows_less():
    requests = [request("a", 0, (32, "s")), request("b", 20, (32, "s")), request("c", 30, (32, "s"))]
    trace = simulate({"config": {"block_size": 4, "num_blocks": 100}, "requests": requests})
    part = trace[15:]
    assert [(miss.found, miss.reason) for miss in part.why_missed("b")] == [(28, "last token must be computed")]
    [miss] = simulate({"config": {"block_size": 4}, "requests": requests[:2]})[15:].why_missed("b")
    assert miss.found == 28


def without_tokens(trace):
    """The trace as a recording without token ids has it."""
    bare = Trace(trace.meta)
    for info in trace.requests.values():
        bare.add_request(msgspec.structs.replace(info, prompt_token_ids=()))
    for record in trace:
        chunks = [
            msgspec.structs.replace(chunk, sampled=None if chunk.sampled is None else 0) for chunk in record.chunks
        ]
        bare.append(msgspec.structs.replace(record, chunks=tuple(chunks)))
    return bare


def test_without_token_ids_the_rest_is_unknown_by_name():
    rng = random.Random(7)
    seen = Counter()
    for _ in range(60):
        trace = simulate(pressed_workload(rng), max_steps=400)
        bare = without_tokens(trace)
        for request_id in trace.requests:
            for miss, truth in zip(bare.why_missed(request_id), trace.why_missed(request_id), strict=True):
                assert (miss.found, miss.looked_up, miss.block) == (
                    truth.found,
                    truth.looked_up,
                    miss.found // bare.block_size,
                )
                seen[miss.reason] += 1
                if miss.reason in ("last token must be computed", "computed and evicted"):
                    assert miss.reason == truth.reason
    assert seen["unknown"] and seen["computed and evicted"] and seen["last token must be computed"]
    assert "neither token ids nor hashes" in str(misses_table(bare))


def test_a_live_trace_is_read_as_it_grows():
    workload = pressed_workload(random.Random(11))
    whole = simulate(workload, max_steps=400)
    grown = Trace(whole.meta)
    for info in whole.requests.values():
        grown.add_request(info)
    for record in whole:
        grown.append(record)
        history_of(grown)
    for request_id in whole.requests:
        assert grown.why_missed(request_id) == whole.why_missed(request_id)


def test_failed_steps_withdraw_what_they_published():
    rng = random.Random(5)
    num_withdrawn = 0
    for _ in range(40):
        workload = pressed_workload(rng)
        oracle = MissOracle()
        with oracle.watching():
            trace = run_with_failures(workload, rng)
        for request_id, answers in oracle.answers.items():
            for miss, answer in zip(trace.why_missed(request_id), answers, strict=True):
                assert (miss.reason, miss.block, miss.found) == (answer["reason"], answer["block"], answer["found"])
                num_withdrawn += miss.reason == "published and withdrawn"
    assert num_withdrawn > 3


def run_with_failures(workload, rng):
    """The workload with a forward pass that sometimes raises."""
    config, arrivals = read_workload(workload)
    scheduler = Scheduler(config, clock=lambda: 0.0)
    trace = Trace(TraceMeta(source="test", config=config.to_dict()))
    pending = sorted(arrivals, key=arrival_order)
    while len(trace) < 200 and (pending or scheduler.has_unfinished_requests()):
        while pending and pending[0].arrival_step <= scheduler.step:
            new = pending.pop(0).to_request()
            scheduler.add_request(new)
            trace.add_request(new.info())
        batch = scheduler.schedule()
        if batch.chunks and rng.random() < 0.15:
            scheduler.fail(batch)
        else:
            scheduler.update(batch, [rng.randint(3, 99) if chunk.samples else None for chunk in batch.chunks])
        trace.append(batch.to_record())
    return trace


def test_the_table_adds_up_and_more_blocks_save_what_eviction_cost():
    requests = [request(f"r{index}", 12 * index, (64, "abc"[index % 3])) for index in range(12)]
    trace = simulate({"config": {"block_size": 4, "num_blocks": 40}, "requests": requests})
    result = misses_table(trace)
    assert result.num_admissions == 12 and result.looked_up == 12 * 64
    assert sum(result.lost.values()) == result.looked_up - result.found
    assert next(iter(result.lost)) == "computed and evicted"
    best = result.changes[0]
    assert best.change.startswith("num_blocks=") and best.saved == result.lost["computed and evicted"]
    assert sum(lost_by_reason(miss for rid in trace.requests for miss in trace.why_missed(rid)).values()) == sum(
        result.lost.values()
    )


def test_the_order_that_serves_cached_prefixes_first_saves_tokens():
    """Two families of prompts take turns in a queue, and the pool holds one family's prefix."""
    requests = [request(f"r{index}", 0, (32, "ab"[index % 2]), (4, f"u{index}")) for index in range(12)]
    config = {"block_size": 4, "num_blocks": 14, "max_num_seqs": 1}
    result = misses_table(simulate({"config": config, "requests": requests}))
    [order] = [change for change in result.changes if "longest hit first" in change.change]
    assert order.saved > 0


def test_command(tmp_path, capsys):
    requests = [request(f"r{index}", 12 * index, (64, "abc"[index % 3])) for index in range(6)]
    path = tmp_path / "run.jsonl"
    simulate({"config": {"block_size": 4, "num_blocks": 40}, "requests": requests}).save(path)
    assert main(["trace", "misses", str(path)]) == 0
    out = capsys.readouterr().out
    assert "6 admissions looked up 384 tokens" in out and "computed and evicted" in out and "num_blocks=80" in out
    assert main(["trace", "misses", str(path), "r3"]) == 0
    assert "evicted in step" in capsys.readouterr().out
    assert main(["trace", "misses", str(path), "nobody"]) == 2


@pytest.mark.parametrize("fault", ["_take", "_preempt", "salt", "lookahead", "window"])
def test_a_planted_fault_is_seen(monkeypatch, fault):
    if fault == "_take":
        monkeypatch.setattr(PrefixHistory, "_take", lambda *_: None)
    elif fault == "_preempt":
        monkeypatch.setattr(PrefixHistory, "_preempt", lambda self, record, request: [])
    elif fault == "salt":
        monkeypatch.setattr(
            PrefixHistory, "_tree", lambda self, _: self._computed.setdefault(("", ""), ComputedTokens())
        )
    elif fault == "lookahead":
        monkeypatch.setattr(PrefixHistory, "_append", lambda self, request, chunk: None)
    elif fault == "window":
        monkeypatch.setattr(SlidingWindow, "first_block_of_hit", lambda self, end, found: found)
    num_admissions = 0
    for workload in workloads(2):
        oracle, trace = run(workload)
        num_admissions += sum(map(len, oracle.answers.values()))
        if differences(oracle, trace):
            return
        assert num_admissions < NUM_ADMISSIONS, f"the fault {fault} is not seen"
