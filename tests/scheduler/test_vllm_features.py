"""Asynchronous steps, speculation and KV cache groups against recordings of vLLM 0.33.0: every field of every step."""

import copy
import json

import pytest
from vllm_features import NAMES, read
from vllm_features import as_vllm as in_words_of_vllm

from workbench import Trace, simulate

FULL = {"kind": "full_attention"}


def steps_of(workload, as_vllm=True):
    trace = simulate(workload, as_vllm=as_vllm)
    asynchronous = bool(workload["config"].get("async_scheduling"))
    previous = [None, *trace]
    return trace, [in_words_of_vllm(record, before, asynchronous) for record, before in zip(trace, previous)]


@pytest.mark.parametrize("name", NAMES)
def test_every_field_equals_vllm(name):
    recording = read(name)
    workload = {key: recording["workload"][key] for key in ("config", "requests")}
    trace, steps = steps_of(workload)
    for step, expected in zip(steps, recording["steps"]):
        assert step == expected, f"step {expected['step']}"
        assert [*step["block_ids"]] == [*expected["block_ids"]]  # dict equality ignores order
        assert [*step["appended"]] == [*expected["appended"]]
    assert len(trace) == len(recording["steps"]) and trace.end == recording["end"]["end"]
    if trace.end == "done":  # a run that vLLM finishes is the same without as_vllm
        assert list(steps_of(workload, as_vllm=False)[0]) == list(trace)
    for request_id, num_tokens in recording["end"]["outputs"].items():
        assert sum(len(step["appended"].get(request_id, ())) for step in steps) == num_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_file_holds_every_field(name, tmp_path):
    workload = {key: read(name)["workload"][key] for key in ("config", "requests")}
    trace = simulate(workload)
    trace.save(tmp_path / "run.jsonl")
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert list(loaded) == list(trace) and not loaded.problems
    for mine, theirs in zip(loaded, trace, strict=True):
        assert mine.block_tables_by_group == theirs.block_tables_by_group
        assert mine.positions.tolist() == theirs.positions.tolist()
        assert mine.slot_mapping.tolist() == theirs.slot_mapping.tolist()


def with_config(name, **changes):
    recording = read(name)
    workload = copy.deepcopy({key: recording["workload"][key] for key in ("config", "requests")})
    workload["config"] |= changes
    return recording["steps"], workload


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("async_1_ends", {"async_scheduling": False}),
        ("async_2_preempt_in_flight", {"num_blocks": 15}),
        ("async_spec_1_placeholders", {"num_speculative_tokens": 1}),
        ("async_spec_2_preempt", {"spec_method": "ngram"}),
        ("spec_2_draft_model_slots", {"spec_method": "ngram"}),
        ("spec_3_eagle_prefix_padding", {"disable_lookahead_block_hashes": True}),
        ("spec_3_eagle_prefix_padding", {"spec_method": "draft_model"}),
        ("hybrid_window_prefix_1_resend", {"prefix_cache_retention_interval": "dense"}),
        ("hybrid_window_1_nulls", {"kv_cache_groups": [FULL, {"kind": "sliding_window", "sliding_window": 9}]}),
        ("hybrid_window_1_nulls", {"kv_cache_groups": [{"kind": "sliding_window", "sliding_window": 8}, FULL]}),
        ("hybrid_mamba_2_align_resend", {"kv_cache_groups": [FULL, {"kind": "sliding_window", "sliding_window": 1}]}),
        ("spec_hybrid_2_ngram_mamba", {"num_speculative_tokens": 1}),
        ("window_only_2_prefix", {"kv_cache_groups": [FULL]}),
    ],
)
def test_another_configuration_is_told_apart(name, change):
    """The comparison is able to fail: each of these settings shows in the recording."""
    expected, workload = with_config(name, **change)
    assert steps_of(workload)[1] != expected


def test_rows_begin_behind_the_drafts_that_were_rejected():
    """An asynchronous start counts drafts that are rejected later; the rows that ran do not."""
    trace = simulate({key: read("async_spec_1_placeholders")["workload"][key] for key in ("config", "requests")})
    seen = 0
    tokens = {request_id: info.num_prompt_tokens for request_id, info in trace.requests.items()}
    for record in trace:
        row = 0
        for chunk, used in zip(record.chunks, record.seqused_k):
            assert record.positions[row] == chunk.start - chunk.ahead
            if chunk.arm == "decode" and not chunk.discarded:
                assert chunk.start - chunk.ahead == tokens[chunk.request_id] - 1, "a decode begins at the latest token"
            assert used == chunk.start - chunk.ahead + chunk.num_tokens
            tokens[chunk.request_id] += len(chunk.accepted)
            seen += chunk.ahead
            row += chunk.num_tokens
    assert seen > 0


def test_lines_without_drafts_are_no_longer_than_before(tmp_path):
    """The fields that speculation and asynchronous steps added are left out where they have their default."""
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 40}, "max_tokens": 30}]})
    trace.save(tmp_path / "run.jsonl")
    chunks = [line["chunks"] for line in map(json.loads, (tmp_path / "run.jsonl").open()) if line["kind"] == "step"]
    assert all(len(chunk) <= 11 for step in chunks for chunk in step)
