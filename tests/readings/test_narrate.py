"""One sentence per step, from the record alone."""

import re

import msgspec
import pytest
from viz_traces import HOSTILE_TEXTS, hostile_trace, random_trace

from workbench import simulate
from workbench.trace import Chunk, StepRecord
from workbench.trace.readings.narrate import narrate
from workbench.trace.reasons import Reason


def chunk(request_id, start, count, arm, **more):
    sampled = more.pop("sampled", None if arm == "intermediate" else 7)
    return Chunk(request_id, start, count, arm == "intermediate", arm, sampled, "complete", **more)


def test_prompts_and_replies_share_a_pass_and_a_waiting_request_says_why():
    chunks = (
        chunk("long", 160, 154, "intermediate"),
        chunk("strings", 0, 100, "new_final"),
        chunk("a", 9, 1, "decode"),
        chunk("b", 9, 1, "decode"),
    )
    step = StepRecord(
        3,
        chunks=chunks,
        waiting=("lambda",),
        waiting_reason=Reason("token_budget", "max_num_batched_tokens", 256, available=0),
        token_budget=256,
    )
    assert narrate(step) == (
        "Step 3: 254 prompt tokens and 2 replies share one pass; lambda waits: the token budget is used up."
    )
    assert str(step) == narrate(step) and repr(step).startswith("StepRecord(step 3: ")


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ((), "nothing is computed"),
        ((chunk("a", 0, 5, "new_final"),), "all 5 prompt tokens of a take one pass"),
        ((chunk("a", 0, 1, "new_final"),), "the only prompt token of a takes one pass"),
        ((chunk("a", 0, 5, "intermediate"),), "the first 5 prompt tokens of a take one pass"),
        ((chunk("a", 5, 5, "intermediate"),), "5 more prompt tokens of a take one pass"),
        ((chunk("a", 5, 2000, "cached_final"),), "the last 2,000 prompt tokens of a take one pass"),
        ((chunk("a", 5, 1, "decode"),), "the reply to a grows by one token"),
        (tuple(chunk(f"r{i}", 5, 1, "decode") for i in range(3)), "3 replies grow by one token each"),
        (
            (chunk("a", 5, 1, "decode", sampled=7), chunk("b", 5, 1, "decode", sampled=None)),  # "b" is aborted
            "the reply to a grows by one token",
        ),
        (
            (*[chunk(f"r{i}", 5, 2, "decode", sampled=7, sampled_before=(3,) * (i % 2)) for i in range(4)],),
            "4 replies grow by 6 tokens",
        ),
        (
            (chunk("a", 0, 50, "intermediate", num_recomputed_tokens=40), chunk("b", 8, 1, "decode")),
            "50 tokens and 1 reply share one pass, 40 of them again",
        ),
        (
            (chunk("a", 0, 50, "new_final", num_recomputed_tokens=49),),
            "all 50 tokens of a take one pass, 49 of them again",
        ),
    ],
)
def test_the_work(chunks, words):
    assert narrate(StepRecord(0, chunks=chunks)) == f"Step 0: {words}."


def test_those_that_are_resumed_or_have_hits_are_named_beside_others():
    a, b = chunk("a", 16, 9, "new_final", num_cached_tokens=16), chunk("b", 32, 8, "new_final", num_cached_tokens=32)
    back = chunk("r1", 0, 25, "new_final", num_recomputed_tokens=20)
    reply = chunk("r0", 9, 1, "decode")
    for chunks, resumed, words in (
        ((reply, back), ("r1",), "25 tokens and 1 reply share one pass, 20 of them again; r1 is resumed"),
        (
            (back, a),
            ("r1",),
            "34 tokens of r1 and a share one pass, 20 of them again; r1 is resumed; the prefix cache has 16 tokens "
            "of a",
        ),
        ((a, b), (), "17 prompt tokens of a and b share one pass; the prefix cache has 48 tokens of a and b"),
        ((reply, a), (), "9 prompt tokens and 1 reply share one pass; the prefix cache has 16 tokens of a"),
        ((a,), (), "9 prompt tokens of a (the prefix cache has 16 tokens) take one pass"),
        ((back,), ("r1",), "all 25 tokens of r1 take one pass, 20 of them again; r1 is resumed"),
    ):
        assert narrate(StepRecord(4, chunks=chunks, resumed=resumed)) == f"Step 4: {words}."


def test_every_request_that_ends_or_waits_is_told_or_counted():
    names = tuple(f"r{i}" for i in range(9))
    step = StepRecord(
        12,
        finished=("x", "y"),
        finish_reasons={"x": "length", "y": "stop"},
        preempted=("z",),
        preempt_reasons={"z": Reason("kv_blocks")},
        waiting=("z", *names),
        waiting_reason=Reason("seats", "max_num_seqs", 3),
    )
    assert narrate(step) == (
        "Step 12: nothing is computed; z loses its KV blocks and must start again; x is done (hit max_tokens); "
        "y is done (model ended); r0, r1 and 7 more wait: all 3 seats are taken (max_num_seqs)."
    )


def test_one_seat_is_the_only_one():
    requests = [{"id": name, "prompt": {"len": 9}, "max_tokens": 2} for name in "ab"]
    trace = simulate({"config": {"max_num_seqs": 1}, "requests": requests})
    assert narrate(trace[0]).endswith("; b waits: the only seat is taken (max_num_seqs).")


def test_numbers_are_those_of_the_record():
    for seed in range(6):
        for record in random_trace(seed):
            words = narrate(record)
            assert words.startswith(f"Step {record.step:,}: ") and words.endswith(".") and "\n" not in words
            if record.num_prefill_tokens and record.num_decode_tokens:
                assert re.search(rf"\b{record.num_prefill_tokens} (prompt )?token", words)
            for request_id in record.finished[:1]:
                assert request_id in words


def test_hostile_names_stay_on_one_short_line():
    for record in hostile_trace():
        words = narrate(msgspec.structs.replace(record, waiting=HOSTILE_TEXTS, finished=HOSTILE_TEXTS))
        assert len(words) < 600 and words.isprintable() and "\u202e" not in words
