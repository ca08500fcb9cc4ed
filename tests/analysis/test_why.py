"""Verdicts about states that are known from servers that stood still, and the rebuilt state that they come from."""

import http.server
import os
import random
import re
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tiers import examples

from workbench import CostModel, Trace, simulate
from workbench.analysis.run_on import LastState, run_on
from workbench.analysis.why_metrics import why_metrics
from workbench.apps.cli import main
from workbench.trace import RequestInfo, StepRecord, TraceMeta
from workbench.trace.formats.scrapes import read_scrapes
from workbench.trace.lines import Keyframe
from workbench.trace.reasons import Reason

RECORDED = Path(__file__).parents[1] / "data" / "vllm-recorded"


def stuck(config, *requests, max_steps=300):
    """A simulation with vLLM's behaviour."""
    return simulate({"config": config, "requests": list(requests)}, as_vllm=True, max_steps=max_steps)


def recorded(config, requests, *, running=(), source="vllm 0.33.0", lost=(), steps=2, free=None, **record):
    """A recording of an engine that stands still, as far as a record can hold its state.

    ``running`` gives (request, KV progress, block table); ``lost`` blocks are neither free nor in a block table.
    """
    trace = Trace(TraceMeta(source=source, config=config))
    for name, length in requests.items():
        trace.add_request(RequestInfo(name, num_prompt_tokens=length, max_tokens=8))
    held = {block for _, _, table in running for block in table} | set(lost)
    queue = tuple(block for block in range(1, config["num_blocks"]) if block not in held)
    trace.start_from(
        Keyframe(
            0,
            block_tables={name: tuple(table) for name, _, table in running},
            num_kv_computed={name: computed for name, computed, _ in running},
            free_block_ids=queue,
        )
    )
    names = tuple(name for name, _, _ in running)
    waiting = tuple(name for name in requests if name not in names)
    for step in range(steps):
        trace.append(
            StepRecord(
                step,
                time=0.1 * step,
                running=names,
                waiting=waiting,
                free_blocks=len(queue),
                free_blocks_end=len(queue),
                **record,
            )
        )
    return trace


CONFIG = {"block_size": 4, "num_blocks": 12, "max_num_batched_tokens": 64, "max_num_seqs": 4}
DRAFTING = CONFIG | {"num_speculative_tokens": 2, "speculative": {"method": "ngram"}}
SHARED = list(range(100, 133))


def head_larger_than_the_pool():
    return stuck(
        CONFIG | {"num_blocks": 10},
        {"id": "big", "prompt": {"len": 80}, "max_tokens": 4},
        {"id": "behind", "prompt": {"len": 4}},
    )


def window_counted_in_full():
    groups = [{"kind": "sliding_window", "sliding_window": 8}]
    config = CONFIG | {"num_blocks": 20, "kv_cache_groups": groups, "max_num_batched_tokens": 16}
    return recorded(config, {"long": 100}, source="vllm 0.19.1")


def window_of_the_drafter_counted_in_full():
    groups = [{"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 8, "eagle": True}]
    drafts = {"num_speculative_tokens": 2, "speculative": {"method": "eagle"}}
    return recorded(CONFIG | drafts | {"num_blocks": 48, "kv_cache_groups": groups}, {"long": 100})


def budget_below_drafts():
    config = CONFIG | {"block_size": 16, "max_num_scheduled_tokens": 3, "num_speculative_tokens": 4}
    return stuck(
        config | {"speculative": {"method": "ngram"}},
        {"id": "first", "prompt": SHARED, "max_tokens": 2},
        {"id": "hit", "prompt": SHARED, "arrival_step": 40},
    )


def no_boundary_within_the_budget():
    groups = [{"kind": "full_attention"}, {"kind": "mamba"}]
    drafts = {"num_speculative_tokens": 1, "speculative": {"method": "draft_model"}}
    config = CONFIG | drafts | {"block_size": 16, "max_num_batched_tokens": 16, "kv_cache_groups": groups}
    return stuck(config, {"id": "a", "prompt": {"len": 16}})


def states_computed_again_forever():
    groups = [{"kind": "full_attention"}, {"kind": "mamba"}]
    config = CONFIG | {"max_num_batched_tokens": 4, "num_blocks": 19, "kv_cache_groups": groups}
    config |= {"scheduler_reserve_full_isl": False, "enable_prefix_caching": False}
    return stuck(config, {"id": "a", "prompt": {"len": 81}, "max_tokens": 2})


def parked_loads():
    reasons = {"parked": Reason("transfer")}
    return recorded(CONFIG, {"parked": 16, "head": 30}, lost=(1, 2, 3, 4, 5), passed_over=reasons)


def deferred_frees():
    config = CONFIG | {"num_blocks": 9}
    return recorded(config, {"a": 16, "b": 16}, lost=range(1, 9), waiting_reason=Reason("kv_blocks", "num_blocks", 9))


def seats_taken_by_skipped_requests():
    config = CONFIG | {"max_num_seqs": 2}
    reasons = {"g1": Reason("grammar"), "g2": Reason("grammar")}
    seats = Reason("seats", "max_num_seqs", 2, 1, 0)
    return recorded(config, {"g1": 8, "g2": 8, "w": 8}, passed_over=reasons, waiting_reason=seats)


def encoder_cache_of_waiting_requests():
    reason = Reason("encoder", "encoder_cache_size", 100, 60, 40)
    running = [("r0", 4, [1, 2]), ("r1", 4, [3, 4])]
    return recorded(CONFIG, {"r0": 8, "r1": 8, "e": 8}, running=running, passed_over={"e": reason})


def output_empty_after_drafts(config=DRAFTING, adapter=""):
    whole = stuck(config, {"id": "a", "prompt": {"len": 6}, "max_tokens": 9, "accepts": [0], "adapter": adapter})
    trace = Trace(whole.meta)
    trace.add_request(whole.requests["a"])
    for record in whole[:4]:
        trace.append(msgspec.structs.replace(record))  # without its block tables, which the trace adds
    chunk = msgspec.structs.replace(whole[4].chunks[0], sampled=None, sampled_before=(), num_accepted=0)
    assert chunk.drafts
    trace.append(msgspec.structs.replace(whole[4], chunks=(chunk,)))
    for step in (5, 6, 7):
        trace.append(StepRecord(step, running=("a",), free_blocks=8, free_blocks_end=8))
    return trace


def slot_of_an_adapter_that_is_never_given_back():
    trace = output_empty_after_drafts(DRAFTING | {"max_loras": 1}, "french")
    trace.add_request(RequestInfo("c", num_prompt_tokens=8, max_tokens=8, adapter="legal"))
    reason = Reason("adapter", "max_loras", 1, 1, 0, requests=("a",))
    trace.append(StepRecord(8, running=("a",), waiting=("c",), passed_over={"c": reason}, free_blocks=8))
    return trace


def resumed_for_one_chunk():
    config = CONFIG | {"num_blocks": 6, "max_num_batched_tokens": 8}
    return stuck(
        config | {"scheduler_reserve_full_isl": False, "enable_prefix_caching": False},
        {"id": "a", "prompt": {"len": 40}, "max_tokens": 2},
    )


def cause_unknown():
    return recorded(CONFIG, {"a": 8, "b": 8})


THREADS = [
    (head_larger_than_the_pool, "never", {("num_blocks", 21)}),
    (window_counted_in_full, "differs", {("num_blocks", 26)}),
    (window_of_the_drafter_counted_in_full, "differs", {("num_blocks", 51)}),
    (budget_below_drafts, "never", {("max_num_scheduled_tokens", 5), ("num_speculative_tokens", 2)}),
    (
        no_boundary_within_the_budget,
        "never",
        {("max_num_batched_tokens", 17), ("num_speculative_tokens", 0), ("block_size", 8)},
    ),
    (states_computed_again_forever, "never", {("num_blocks", 23)}),
    (parked_loads, "outside", {("num_blocks", 14)}),
    (deferred_frees, "outside", {("num_blocks", 13)}),
    (seats_taken_by_skipped_requests, "outside", {("max_num_seqs", 3)}),
    (encoder_cache_of_waiting_requests, "outside", {("encoder_cache_size", 120)}),
    (output_empty_after_drafts, "never", set()),
    (slot_of_an_adapter_that_is_never_given_back, "never", set()),
    (resumed_for_one_chunk, "never", {("num_blocks", 11)}),
    (cause_unknown, "differs", set()),
]
"""State, verdict, and changes that the answer has to name."""


@pytest.mark.parametrize("make, verdict, changes", THREADS, ids=[make.__name__ for make, _, _ in THREADS])
def test_a_known_state_gets_its_verdict_and_the_change_that_frees_it(make, verdict, changes):
    trace = make()
    begin = time.process_time()
    answer = trace.why()
    assert time.process_time() - begin < 5
    assert answer.verdict == verdict, answer
    found = {(change.field, change.after) for change in answer.changes}
    assert changes <= found, answer
    assert bool(changes) == bool(found), answer
    assert repr(answer)


def test_a_request_that_waits_for_the_slot_of_a_stuck_one_is_stuck_too():
    answer = slot_of_an_adapter_that_is_never_given_back().why()
    assert answer.left == ("a", "c")
    assert "c: max_loras reached (1), and its adapter is not one of those of a" in repr(answer)


def test_a_recording_of_vllm_that_stands_still_is_explained_by_the_command(capsys):
    for mode in ("sync", "async"):
        assert main(["why", str(RECORDED / mode / "d7_too_big.jsonl.gz")]) == 0
        said = capsys.readouterr().out
        assert "never clears" in said and "num_blocks 6 -> 11 (+5)" in said and "reject big" in said
        assert main(["why", str(RECORDED / mode / "d_preempt.jsonl.gz")]) == 0
        assert "no request is unfinished" in capsys.readouterr().out


METRICS = """vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0"}} {use}
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} {capacity}
vllm:num_requests_waiting_by_reason{{engine="0",reason="deferred"}} {deferred}
vllm:prompt_tokens_total{{engine="0"}} 500
vllm:generation_tokens_total{{engine="0"}} {tokens}
vllm:num_preemptions_total{{engine="0"}} {preemptions}
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1000"}} 1
"""
STANDING = {"running": 0, "waiting": 3, "use": 0.25, "capacity": 3, "deferred": 0, "tokens": 70, "preemptions": 4}


@pytest.mark.parametrize(
    "later, verdict, said",
    [
        ({}, "still", "its prompt needs more KV blocks than the pool has"),
        ({"tokens": 90}, "runs", "requests are served; others wait, most likely for a seat (--max-num-seqs)"),
        ({"tokens": 90, "use": 0.57}, "runs", "if a prompt needs more than the free 43%, for room in the KV cache"),
        ({"tokens": 90, "use": 0.96}, "runs", "most likely for room in the KV cache (--gpu-memory-utilization"),
        ({"tokens": 90, "deferred": 1}, "runs", "of those that wait, 1 for an event outside"),
        ({"tokens": 90, "running": 1, "waiting": 0}, "runs", "requests are served"),
        ({"preemptions": 9}, "circles", "preempted again and again"),
        ({"deferred": 2, "capacity": 1}, "still", "2 wait for an event outside the scheduler"),
        ({"running": 2}, "still", "a step hangs"),
        ({"waiting": 0, "capacity": 0}, "idle", "no request is unfinished"),
    ],
)
def test_metrics_alone_give_a_weaker_answer_that_says_so(later, verdict, said, capsys, tmp_path):
    texts = [METRICS.format(**STANDING), METRICS.format(**STANDING | later)]
    path = tmp_path / "metrics.prom"
    path.write_text("".join(f"# scraped {at}\n{text}" for at, text in zip((10, 15), texts)))
    answer = why_metrics(read_scrapes(path))
    assert answer.verdict == verdict and said in repr(answer) and "from /metrics alone" in repr(answer)
    others_wait = verdict == "runs" and later.get("waiting") != 0
    assert ("others wait" in repr(answer)) == others_wait
    assert (verdict not in ("idle", "runs") or others_wait) == ("cannot tell from /metrics" in repr(answer))
    assert main(["why", str(path)]) == 0
    assert said in capsys.readouterr().out


def test_a_running_server_is_asked_twice(capsys):
    answers = iter([METRICS.format(**STANDING)] * 2)

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(next(answers).encode())

        def log_message(self, *arguments):
            """Nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(["why", f"http://127.0.0.1:{server.server_port}", "--seconds", "0.1"]) == 0
        finally:
            server.shutdown()
            thread.join()
    assert "0 running, 3 waiting, 25% of 999 KV blocks in use" in capsys.readouterr().out


def test_a_source_that_is_not_there_is_one_line(capsys, tmp_path):
    for source in (str(tmp_path / "none.jsonl"), "http://127.0.0.1:9"):
        assert main(["why", source, "--seconds", "0.1"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_requests_that_end_early_only_are_told_apart():
    config = CONFIG | {"num_blocks": 6, "scheduler_reserve_full_isl": False}
    trace = stuck(config, {"id": "a", "prompt": {"len": 12}, "max_tokens": 30}, max_steps=3)
    answer = trace.why()
    assert (answer.verdict, answer.left) == ("early", ("a",))
    assert ("num_blocks", 12) in {(change.field, change.after) for change in answer.changes}
    assert (
        stuck(config | {"num_blocks": 30}, {"id": "a", "prompt": {"len": 12}, "max_tokens": 30}, max_steps=3)
        .why()
        .verdict
        == "runs"
    )


# -- the rebuilt state -------------------------------------------------------------------------------------------------

GROUPS = [
    None,
    [{"kind": "full_attention"}, {"kind": "sliding_window", "sliding_window": 9}],
    [{"kind": "full_attention"}, {"kind": "mamba"}],
]


def random_run(seed):
    """A run in which everyone has arrived after a few steps."""
    rng = random.Random(seed)
    groups = rng.choice(GROUPS)
    config = {
        "block_size": 4,
        "num_blocks": rng.randint(30, 60),
        "max_num_batched_tokens": rng.choice([8, 16, 32]),
        "max_num_seqs": rng.randint(1, 5),
        "enable_prefix_caching": rng.random() < 0.7,
        "policy": rng.choice(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": rng.random() < 0.5,
    } | ({"kv_cache_groups": groups} if groups else {})
    shared = {"len": 12, "seed": "shared"}
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"parts": [shared, {"len": rng.randint(1, 40)}]}
            if rng.random() < 0.5
            else {"len": rng.randint(1, 60)},
            "max_tokens": rng.randint(1, 12),
            "arrival_step": rng.randint(0, 5),
            "priority": rng.randint(0, 2),
        }
        for i in range(rng.randint(2, 8))
    ]
    if seed % 2:
        config["max_loras"] = rng.randint(1, 2)
        for request in requests:
            request["adapter"] = rng.choice(["", "french", "legal", "terse"])
    return rng, {"config": config, "requests": requests}


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("seed", range(40))
def test_the_rebuilt_scheduler_repeats_the_rest_of_the_run(seed):
    rng, workload = random_run(seed)
    whole = simulate(workload, as_vllm=True, max_steps=300)
    cut = rng.randint(min(7, len(whole) - 1), len(whole) - 1)
    tokens = {}
    for record in whole:
        for chunk in record.chunks:
            tokens.setdefault(chunk.request_id, []).extend(chunk.accepted)
    scheduler = LastState(whole[:cut]).scheduler()
    for record in whole[cut:]:
        batch = scheduler.schedule()
        now = [(c.request_id, c.start, c.num_tokens, c.new_block_ids, c.num_cached_tokens) for c in batch.chunks]
        then = [(c.request_id, c.start, c.num_tokens, c.new_block_ids, c.num_cached_tokens) for c in record.chunks]
        assert now == then, (seed, record.step)
        assert batch.free_blocks == record.free_blocks
        sampled = [tokens[c.request_id][c.request.num_output_tokens] if c.samples else None for c in batch.chunks]
        scheduler.update(batch, sampled)


def test_a_scheduler_that_can_serve_everyone_is_never_said_to_repeat():
    for seed in range(examples(40)):
        _, workload = random_run(seed)
        whole = simulate(workload, as_vllm=True, max_steps=300)
        outcome = run_on(LastState(whole[: len(whole) // 2]).scheduler(), ends_early=False, seconds=9.0)
        assert (outcome.kind == "ends") == (whole.end == "done"), seed


# -- a server that hangs, or is gone ---------------------------------------------------------------------------------


def interrupted(seed, path, *, ended):
    """The file of a recording of vLLM whose server stopped in the middle of a random run that the rules serve."""
    rng = random.Random(f"interrupted {seed}")
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randint(1, 60)}, "max_tokens": rng.randint(20, 60)}
        for i in range(rng.randint(1, 6))
    ]
    config = CONFIG | {"num_blocks": 400, "max_num_seqs": rng.randint(1, 4), "async_scheduling": rng.random() < 0.5}
    seconds = rng.choice([0.002, 0.05, 0.3])
    whole = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=seconds), max_steps=200)
    trace = Trace(msgspec.structs.replace(whole.meta, source="vllm 0.33.0"))
    for info in whole.requests.values():
        trace.add_request(info)
    for record in whole[: rng.randint(8, 18)]:
        trace.append(record)
    trace.save(path)
    if not ended:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    return trace


@pytest.mark.parametrize("seed", range(examples(20)))
def test_a_recording_that_ended_or_fell_silent_is_never_said_to_clear(seed, tmp_path, capsys):
    path = tmp_path / "vllm-20260101-120000-host-rank0-7-0-00000.jsonl"
    for ended, age, verdict in ((True, 0, "ended"), (True, 900, "ended"), (False, 0, "runs"), (False, 60, "silent")):
        trace = interrupted(seed, path, ended=ended)
        os.utime(path, (time.time() - age,) * 2)
        expected = int(verdict != "runs")
        for source in (path, tmp_path):
            assert main(["why", str(source), "--fail-if-stuck"]) == expected
            said = capsys.readouterr().out
            assert ("this clears: every request can end" in said) == (verdict == "runs"), said
            assert ("the recording ended with" in said) == (verdict == "ended"), said
            silences = [float(number) for number in re.findall(r"nothing was written for ([\d.]+) s", said)]
            assert len(silences) == (verdict == "silent") and all(number >= 60 for number in silences), said
            assert "no end" not in said
        assert main(["why", str(path)]) == 0 and capsys.readouterr().out
    assert trace.why().verdict == "runs"  # of a trace in memory nothing else is known
    assert trace.why(silent=60.0).verdict == "silent" and trace.why(silent=0.1).verdict == "runs"


def test_a_finished_recording_has_an_end(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 2}]}).save(path)
    assert main(["why", str(path), "--fail-if-stuck"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["no request is unfinished"]


@pytest.mark.parametrize("seats", [1, 3])
def test_a_held_seat_has_its_holder_its_time_and_the_flag(seats):
    requests = [{"id": f"long{i}", "prompt": {"len": 9}, "max_tokens": 500 + 100 * i} for i in range(seats)]
    requests += [{"id": f"w{i}", "prompt": {"len": 9}, "arrival_time": 1.0} for i in range(2)]
    config = {"max_num_seqs": seats, "num_blocks": 1000}
    trace = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.045), max_steps=100)
    answer = trace.why()
    assert answer.verdict == "runs" and not answer.is_stuck
    assert [holder.request_id for holder in answer.holders] == [f"long{i}" for i in range(seats)]
    assert answer.holders[0].tokens_left == 400
    assert answer.holders[0].seconds == pytest.approx(400 * 0.045)
    assert answer.next_seat == ("max_num_seqs", seats, seats + 1)
    assert "next seat: that of long0, at most 400 tokens left, 18 s at its pace" in repr(answer)
    assert f"--max-num-seqs {seats + 1}" in repr(answer)


@pytest.mark.parametrize("seed", range(6))
def test_the_next_seat_is_that_of_the_request_which_the_run_ends_first(seed):
    """Also while some of the holders have no token yet, and so no pace."""
    rng = random.Random(f"seats {seed}")
    requests = [
        {"id": f"r{n}", "prompt": {"len": 9}, "max_tokens": rng.randint(1, 60), "arrival_time": rng.uniform(0, 0.3)}
        for n in range(20)
    ]
    cost_model = CostModel(fixed=0.01) if seed % 2 else None
    whole = simulate({"config": {"max_num_seqs": 3}, "requests": requests}, cost_model=cost_model)
    mixed = 0
    for cut in range(2, len(whole)):
        if not (answer := whole[:cut].why()).holders:
            continue
        ends = next(record.finished for record in whole[cut:] if record.finished)
        assert answer.holders[0].request_id in ends, cut
        mixed += len({holder.seconds is None for holder in answer.holders}) == 2
        assert f"next seat: that of {answer.holders[0].request_id}, " in repr(answer)
    assert mixed > 3 or not seed % 2


def test_one_seat_more_is_offered_if_the_next_step_then_admits_the_head_of_the_queue():
    config = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 2, "enable_prefix_caching": False}
    rng, seen = random.Random("one seat more"), []
    for _ in range(4):
        requests = [
            {"id": f"r{n}", "prompt": {"len": rng.randint(5, 30)}, "max_tokens": rng.randint(4, 30)} for n in range(12)
        ]
        whole = simulate({"config": config, "requests": requests})
        for cut in range(1, len(whole)):
            record = whole[cut - 1]
            if not record.waiting or record.not_scheduled[record.waiting[0]].kind != "seats" or record.finished:
                continue
            answer, step = whole[:cut].why(), whole.fork(at_step=cut, max_num_seqs=3)[cut]
            is_in = record.waiting[0] in (*step.admitted, *step.resumed)
            assert (answer.next_seat == ("max_num_seqs", 2, 3)) == is_in, cut
            assert ("--max-num-seqs 3" in repr(answer)) == is_in
            if not is_in:
                assert answer.seat_obstacle == step.not_scheduled[record.waiting[0]]
                assert f"one seat more does not let the next one in: {answer.seat_obstacle}" in repr(answer)
            seen.append(is_in)
    assert min(seen.count(True), seen.count(False)) > 10


def test_no_seat_is_waited_for_after_a_step_that_frees_one():
    requests = [{"id": f"r{n}", "prompt": {"len": 9}, "max_tokens": 3 + 5 * n} for n in range(3)]
    whole = simulate({"config": {"max_num_seqs": 2}, "requests": requests})
    (freed,) = [record.step for record in whole if "r0" in record.finished]
    assert whole[:freed].why().holders[0].request_id == "r0" and "r2" in whole[freed + 1].admitted
    answer = whole[: freed + 1].why()
    assert answer.holders == () and answer.next_seat is None and "next seat" not in repr(answer)


def test_a_probe_fails_for_what_a_log_or_metrics_say(tmp_path):
    path = tmp_path / "metrics.prom"
    for later, stuck_now in (({}, 1), ({"tokens": 90}, 0)):
        texts = [METRICS.format(**STANDING), METRICS.format(**STANDING | later)]
        path.write_text("".join(f"# scraped {at}\n{text}" for at, text in zip((10, 15), texts)))
        assert main(["why", str(path), "--fail-if-stuck"]) == stuck_now
    assert main(["why", str(RECORDED / "sync" / "d7_too_big.jsonl.gz"), "--fail-if-stuck"]) == 1


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_the_tokens_left_of_a_part_are_those_of_the_run(is_forgotten, tmp_path):
    requests = [{"id": f"r{n}", "prompt": {"len": 9}, "max_tokens": 60} for n in range(3)]
    config = {"max_num_seqs": 1, "num_blocks": 64}
    whole = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.01), max_steps=90)
    expected = whole.why()
    assert expected.next_seat is not None and expected.holders[0].tokens_left == 30
    for cut in (1, 59, 62, 88):
        part = whole[cut:]
        if is_forgotten:  # the file of a run that has forgotten its first steps begins so
            part.save(tmp_path / "part.jsonl")
            part = Trace.load(tmp_path / "part.jsonl")
        answer = part.why()
        assert [(each.request_id, each.tokens_left) for each in answer.holders] == [("r1", 30)]
        assert answer.num_running == 1 and [waiter.request_id for waiter in answer.waiters] == ["r2"]
        assert f", {part[-1].end:.3f} s after the first arrival:" in repr(answer), "requests arrive at 0"
        if is_forgotten:  # an older file has no zero of the run
            text = re.sub(r',?"zero":[0-9.e-]+', "", (tmp_path / "part.jsonl").read_text())
            (tmp_path / "older.jsonl").write_text(text)
            older = Trace.load(tmp_path / "older.jsonl").why()
            assert f", {part[-1].end - part[0].time:.3f} s after step {cut} began:" in repr(older)


@pytest.mark.parametrize("seed", range(4))
def test_a_part_whose_requests_were_preempted_before_it_gets_the_verdict_of_the_run(seed):
    """A preempted request holds no KV: only the steps before the part tell how many tokens it has."""
    rng = random.Random(seed)
    requests = [
        {"id": f"r{n}", "prompt": {"len": rng.randint(20, 60)}, "max_tokens": rng.randint(30, 60), "arrival_step": n}
        for n in range(5)
    ]
    whole = simulate({"config": {"num_blocks": 14, "block_size": 16}, "requests": requests})
    preempted = [record.step for record in whole if record.preempted]
    assert preempted and whole.end == "done"
    for step in preempted:
        for end in range(step + 1, min(step + 30, len(whole)), 4):
            expected = repr(whole[:end].why()).splitlines()
            for begin in (step + 1, rng.randrange(step + 1, end + 1), rng.randrange(1, end)):
                if begin < end:
                    assert repr(whole[begin:end].why()).splitlines() == expected, (begin, end)


def test_the_file_of_a_part_of_a_servers_recording_does_not_say_that_it_died(tmp_path):
    whole = Trace.load(RECORDED.parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz")
    for part, is_followed in ((whole[169:274], True), (whole[:200], True), (whole[300:], False)):
        part.save(tmp_path / "part.jsonl")
        loaded = Trace.load(tmp_path / "part.jsonl")
        assert loaded.end == ("part" if is_followed else whole.end)
        assert ("a part of a longer run" in repr(loaded)) == is_followed
        assert loaded.why().verdict == part.why().verdict != "ended"
        assert [each.request_id for each in loaded.why().waiters] == [each.request_id for each in part.why().waiters]
