"""Reasons are facts: names of requests and words of sentences change no answer."""

from __future__ import annotations

import functools
import json
import random
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tiers import examples

from workbench import EngineConfig, Trace, simulate
from workbench.scheduler import partial_prefills
from workbench.scheduler.policy import SchedulingPolicy
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Chunk, StepRecord
from workbench.trace.line_codec import encode_line
from workbench.trace.readings.compare import compare
from workbench.trace.readings.narrate import narrate
from workbench.trace.reasons import Kind, Reason, Rule
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.packet import decode_packet, encode_packet

COST = CostModel(fixed=0.004, per_sequence=5e-5, per_prefill_token=1e-4, per_kv_token=1e-7)
DATA = Path(__file__).parents[1] / "data"


class Choosy(SchedulingPolicy):
    """Looks at one waiting request, and preempts the one with the most tokens."""

    def waiting_order(self, view):
        return view.waiting[:1]

    def victim(self, view):
        return max(view.victims, key=lambda request: request.num_tokens)


SMALL = {"num_blocks": 16, "block_size": 4}

CONFIGS = [
    {"max_num_batched_tokens": 24},
    {"max_num_batched_tokens": 24, "max_num_scheduled_tokens": 17},
    {"max_num_seqs": 3},
    {"max_num_seqs": 6, "max_num_active_seqs": 2, "policy": "priority"},
    SMALL,
    SMALL | {"scheduler_reserve_full_isl": False, "policy": "priority"},
    {"num_blocks": 20, "block_size": 4, "watermark": 0.3},
    {"max_num_batched_tokens": 32, "enable_chunked_prefill": False},
    {"max_num_batched_tokens": 13, "max_num_partial_prefills": 2},
    {"max_num_batched_tokens": 24, "max_num_partial_prefills": 3, "max_long_partial_prefills": 1}
    | {"long_prefill_token_threshold": 8},
    SMALL | {"async_scheduling": True, "scheduler_reserve_full_isl": False},
    {"num_blocks": 18, "block_size": 4, "num_speculative_tokens": 2, "max_num_seqs": 4},
    {"max_num_batched_tokens": 8, "num_speculative_tokens": 3, "speculative": {"method": "draft_model"}}
    | {"block_size": 4, "async_scheduling": True},
    {"max_num_batched_tokens": 48, "max_num_partial_prefills": 3, "max_long_partial_prefills": 1}
    | {"long_prefill_token_threshold": 4},
    {"max_num_batched_tokens": 16, "max_num_partial_prefills": 4, "max_long_partial_prefills": 1}
    | {"long_prefill_token_threshold": 8},
    {"max_num_batched_tokens": 16, "block_size": 16, "num_blocks": 40, "kv_cache_groups": [{"kind": "mamba"}]},
    {"max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 400}
    | {"kv_cache_groups": [{"kind": "mamba"}, {"kind": "full_attention"}]},
    {"num_blocks": 24, "block_size": 4, "kv_cache_groups": [{"kind": "sliding_window", "sliding_window": 8}]}
    | {"async_scheduling": True, "max_num_seqs": 5},
    {"max_num_seqs": 4, "policy": Choosy()},
    SMALL | {"scheduler_reserve_full_isl": False, "policy": Choosy()},
]
"""One of them, at least, reaches each reason of a simulation. A policy that is an object is one of `simulate`."""

HOSTILE = [
    "token budget used up (5 of 5)",
    "token budget 7",
    "max_num_seqs reached (1)",
    "max_num_seqs-bench",
    "max_num_active_seqs",
    "no free KV blocks: needs 4 more for 16 tokens, 2 free",
    "block",
    "nobody is admitted in a step that preempts blocks",
    "preempted in this step: a needs 1 more KV block, 0 free; last admitted",
    "a needs 1 more KV block, 0 free; lowest priority (3)",
    "waiting behind r0: max_num_partial_prefills (2) in progress",
    "waiting behind ",
    "long prompt: max_long_partial_prefills (1) in progress, r0",
    "max_num_partial_prefills (1) in progress",
    "a long prompt in front has been overtaken as often as it may be",
    "its output of the step in flight has not come in yet",
    "no state can be reached with the rest of the token budget",
    "20 tokens in one step, 14 of the token budget left",
    "not admitted by the engine, with 5990 KV blocks free",
    "long_prefill_token_threshold",
    "partial_prefills, state_boundary, policy",
    ": ",
    ", ",
    "\x00\x1b[31m\r\n\u202e\u2028",
    "<b>&amp;</b>'\"",
    "x" * 10_000,
    "max_num_seqs " * 700,
]


FIELDS = sorted(
    {*Reason.__struct_fields__, *StepRecord.__struct_fields__, *Chunk.__struct_fields__, *EngineConfig().to_dict()}
    | {word for word in (*get_args(Kind), *get_args(Rule)) if word}
)

WORDS = st.one_of(
    st.sampled_from(HOSTILE),
    st.sampled_from(FIELDS),
    st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp"]), min_size=1, max_size=6),
    st.text(min_size=1, max_size=20),
)
NAMES = st.one_of(
    st.lists(WORDS, min_size=3, max_size=12).map(" ".join),
    WORDS,
    WORDS.map(lambda words: (words * 10_000)[:10_000]),
)
NUM_REQUESTS = 9


def requests(seed):
    """Arrivals that a small configuration cannot serve at once, with the names r0, r1, ..."""
    rng = random.Random(seed)
    return [
        {
            "id": f"r{index}",
            "prompt": {"len": rng.choice([1, rng.randint(4, 32)]), "seed": rng.choice(["shared", index])},
            "max_tokens": rng.randint(1, 14),
            "arrival_time": rng.randint(0, 12) / 1000,
            "priority": rng.randint(0, 2),
            "accepts": [rng.randint(0, 3) for _ in range(3)],
        }
        for index in range(NUM_REQUESTS)
    ]


def run(config, arrivals, names=None):
    policy = config.get("policy")
    if isinstance(policy, SchedulingPolicy):
        config = config | {"policy": "fcfs"}
    else:
        policy = None
    named = [each | {"id": (names or {}).get(each["id"], each["id"])} for each in arrivals]
    return simulate({"config": config, "requests": named}, cost_model=COST, policy=policy, max_steps=120)


def hostile_names(seed):
    """Other names for r0, r1, ... in the same order: the last resort of the "priority" policy is the name."""
    names = sorted(random.Random(seed).sample(HOSTILE, NUM_REQUESTS))
    return {f"r{index}": name for index, name in enumerate(names)}


TOKENS = ("chunk.sampled", "sampled_before.id")


def plain_packet(trace):
    """The packet without words, descriptions of requests, and tokens, which a simulation makes of the names."""
    header, arrays = decode_packet(encode_packet(columns_of(trace)))
    reasons = [{key: value for key, value in reason.items() if key != "sentence"} for reason in header["reasons"]]
    columns = {name: array.tobytes() for name, array in arrays.items() if name not in TOKENS}
    return reasons, header["columns"], columns


def answers(trace, changed, back):
    """Every answer about a trace, with requests under the names that ``back`` gives them."""

    def name(request_id):
        return back.get(request_id, request_id)

    def of(parts):
        return [
            (part.cause, part.kind, part.limit, part.amount, tuple(map(name, part.culprits)), part.steps)
            for part in parts
        ]

    answer = {}
    for request_id in trace.requests:
        explained = trace.explain(request_id, COST)
        answer["explain", name(request_id)] = [of(explained.parts), of(explained.ttft.parts if explained.ttft else ())]
        answer["gaps", name(request_id)] = [of(gap.parts) for gap in explained.gaps]
        misses = trace.why_missed(request_id)
        answer["misses", name(request_id)] = [
            (miss.group, miss.block, miss.reason, miss.tokens, miss.step, name(miss.culprit)) for miss in misses
        ]
        metrics = trace.metrics().requests[request_id]
        answer["metrics", name(request_id)] = [metrics.ttft, metrics.e2e, metrics.token_steps]
    difference = compare(trace, changed)
    answer["diff"] = [
        (name(row.request_id), row.divergence and (row.divergence.step, name(row.divergence.request_id)), row.ttft_b)
        for row in difference.requests
    ]
    answer["steps"] = [narrate(record) for record in trace]
    answer["packet"] = plain_packet(trace)
    return answer


@pytest.fixture(scope="module")
def one_name():
    """Sentences in which every request has the same name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["workbench.trace.readings.narrate"], "_name", lambda request_id: "N")
        yield


@pytest.fixture(scope="module")
def few_scanned():
    """Steps that look at three waiting requests, so that nine are more than a step looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_prefills, "MAX_SCANNED", 3)
        yield


@functools.cache
def plain_answers(index, seed):
    config, arrivals = CONFIGS[index], requests(seed)
    return answers(run(config, arrivals), run(config | {"max_num_seqs": 2}, arrivals), {})


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda index: "-".join(CONFIGS[index]))
@settings(
    max_examples=examples(200) // 25, deadline=None, phases=[Phase.reuse, Phase.generate]
)  # shrinking takes minutes
@given(st.integers(0, 3), st.lists(NAMES, min_size=NUM_REQUESTS, max_size=NUM_REQUESTS, unique=True).map(sorted))
def test_names_of_requests_change_no_answer(index, one_name, few_scanned, seed, names):
    """Names in the same order: the last resort of the "priority" policy is the name."""
    config, arrivals = CONFIGS[index], requests(seed)
    renamed = {each["id"]: name for each, name in zip(arrivals, names, strict=True)}
    back = {name: request_id for request_id, name in renamed.items()}
    hostile, changed = run(config, arrivals, renamed), run(config | {"max_num_seqs": 2}, arrivals, renamed)
    assert answers(hostile, changed, back) == plain_answers(index, seed)


def test_every_kind_and_rule_of_the_scheduler_is_reached(few_scanned):
    reasons = [
        reason
        for config in CONFIGS
        for seed in range(4)
        for record in run(config, requests(seed))
        for reason in (*record.not_scheduled.values(), *record.preempt_reasons.values())
    ]
    assert {(reason.root, reason.rule) for reason in reasons} == {
        ("token_budget", ""),
        ("token_budget", "whole_prompt"),
        ("token_budget", "padding_drafts"),
        ("seats", ""),
        ("kv_blocks", ""),
        ("kv_blocks", "preemption"),
        *((kind, rule) for kind in ("kv_blocks", "preempted") for rule in ("last_admitted", "priority", "policy")),
        ("partial_prefills", ""),
        ("partial_prefills", "long_prompt"),
        ("partial_prefills", "overtaken"),
        ("partial_prefills", "not_considered"),
        ("state_boundary", ""),
        ("state_boundary", "same_step"),
        ("policy", ""),
    }
    limits = {reason.limit for reason in reasons}
    assert {"max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs", "max_num_active_seqs"} <= limits
    assert {"num_blocks", "watermark", "max_num_partial_prefills", "max_long_partial_prefills"} <= limits
    for reason in reasons:
        assert reason.needed is None or reason.available is None or reason.needed > reason.available, reason
        assert (reason.kind == "behind") == bool(reason.behind) == bool(reason.front)
        assert str(reason).isprintable()


def test_what_stands_behind_repeats_the_reason_in_front():
    trace = run({"num_blocks": 16, "block_size": 4}, requests(0))
    behind = [(record, reason) for record in trace for reason in record.not_scheduled.values() if reason.behind]
    assert behind
    for record, reason in behind:
        front = record.not_scheduled[reason.behind]
        fields = ("limit", "value", "needed", "available")
        assert [getattr(reason, field) for field in fields] == [getattr(front, field) for field in fields]
        assert reason.root == front.kind and str(reason) == f"waiting behind {reason.behind}: {front}"


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[4], CONFIGS[9]], ids=lambda config: "-".join(config))
def test_no_answer_reads_a_sentence(config, monkeypatch):
    """With random text in place of every sentence all answers are the same, up to the sentences that are shown."""
    arrivals = requests(1)
    trace, changed = run(config, arrivals), run(config | {"max_num_seqs": 2}, arrivals)
    what_if = trace.whatif(COST, max_num_seqs=2)
    before = answers(trace, changed, {})
    rng = random.Random(7)

    def nonsense(*_):
        return rng.choice(HOSTILE)

    monkeypatch.setattr(Reason, "__str__", nonsense)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("workbench.") and hasattr(module, "describe"):
            monkeypatch.setattr(module, "describe", nonsense)
    assert str(Reason("seats", "max_num_seqs", 3)) in HOSTILE
    fresh, fresh_changed = Trace(trace.meta), Trace(changed.meta)  # columns that are not made yet
    for copy, original in ((fresh, trace), (fresh_changed, changed)):
        for info in original.requests.values():
            copy.add_request(info)
        for record in original:
            copy.append(record)
    after = answers(fresh, fresh_changed, {})
    shown = after.pop("steps"), before.pop("steps")
    assert after == before
    assert [step.split(";")[0] for step in shown[0]] == [step.split(";")[0] for step in shown[1]]
    assert list(trace.whatif(COST, max_num_seqs=2)) == list(what_if)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_what_is_written_is_short_and_reads_back(data):
    defaults = Reason.__struct_defaults__
    reason = Reason(
        data.draw(st.sampled_from(["seats", "kv_blocks", "behind", "unknown"])),
        data.draw(st.sampled_from(["", "max_num_seqs"])),
        data.draw(st.one_of(st.none(), st.integers(0, 9), st.text(max_size=3))),
        *(data.draw(st.one_of(st.none(), st.integers(0, 9))) for _ in range(2)),
        data.draw(st.sampled_from(["", "a"])),
        requests=tuple(data.draw(st.lists(st.text(max_size=2), max_size=2))),
        text=data.draw(st.sampled_from(["", "words"])),
    )
    record = StepRecord(0, waiting_reason=reason, passed_over={"a": reason}, preempt_reasons={"b": reason})
    line = encode_line(record)
    assert msgspec.json.decode(line, type=StepRecord) == record
    for written in (json.loads(line)["waiting_reason"], json.loads(line)["passed_over"]["a"]):
        assert not written or written[-1] != json.loads(msgspec.json.encode(defaults[len(written) - 1]))


def test_a_notebook_shows_a_reason_as_its_sentence():
    reason = Reason("seats", limit="max_num_seqs", value=3).for_those_behind("<b>")
    assert reason._repr_html_() == "<p><b>behind</b>: waiting behind &lt;b&gt;: max_num_seqs reached (3)</p>"
