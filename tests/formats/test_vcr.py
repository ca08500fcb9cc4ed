"""Recordings of vllm-vcr: what is read, what it can answer, and what a damaged one says."""

import gzip
import json

import pytest

from workbench import simulate
from workbench.apps.cli import main
from workbench.simulation.access_log import is_access_log, read_access_log
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.request_log import read_request_log
from workbench.trace import TraceError
from workbench.trace.formats.vcr import is_vcr, read_vcr

META = {"meta": {"model": "made-up", "source": "tap", "block_size": 16, "vllm_version": "0.33.0", "gpu": "none"}}
LARGEST = 2**64 - 1
REQUESTS = [
    {
        "prompt_tokens": 40,
        "output_tokens": 3,
        "ttft_ms": 50.0,
        "itl_ms": [10.0, 14.0],
        "itl_ctx": {"num_running": [2, 2], "prefill_tokens": [0, 40]},
        "arrival_ms": 250.5,
        "cached_tokens": 32,
        "block_hashes": [LARGEST, 7],
        "finish_reason": "length",
    },
    {"prompt_tokens": 48, "output_tokens": 1, "ttft_ms": 80.0, "arrival_ms": 0.5, "block_hashes": [LARGEST, 7, 9]},
    {
        "prompt_tokens": 16,
        "output_tokens": 9,
        "ttft_ms": 20.0,
        "arrival_ms": 300.0,
        "block_hashes": [8],
        "itl_summary": {"mean_ms": 5.5, "count": 8},
    },
]
"""In the order of their ends; the last one has a mean instead of its gaps."""


@pytest.fixture
def tap(tmp_path):
    path = tmp_path / "tap.jsonl"
    path.write_text("\n".join(map(json.dumps, [META, *REQUESTS])) + "\n")
    return path


def test_requests_share_prefixes_as_they_did(tap):
    assert is_vcr(tap) and is_access_log(tap)
    first, second, third = read_access_log(tap)
    assert [arrival.arrives_at for arrival in (first, second, third)] == pytest.approx([0.0, 0.25, 0.2995])
    assert [len(arrival.prompt_token_ids) for arrival in (first, second, third)] == [48, 40, 16]
    assert first.prompt_token_ids[:32] == second.prompt_token_ids[:32]
    assert not set(second.prompt_token_ids[32:]) & set(first.prompt_token_ids)
    assert not set(third.prompt_token_ids) & {*first.prompt_token_ids, *second.prompt_token_ids}


def test_measured_latencies_and_the_limits_of_the_file(tap, capsys):
    log = read_request_log(tap)
    assert log.latencies["ttft"].mean == pytest.approx(0.05) and log.latencies["itl"].count == 2
    assert log.latencies["e2e"].count == 2 and log.latencies["e2e"].max == pytest.approx(0.08)
    assert main(["trace", "info", str(tap)]) == 0
    said = capsys.readouterr().out
    assert "3 requests of tap.jsonl, arriving over 0.3 s" in said and "32 of 104 prompt tokens found" in said
    assert "can answer: trace whatif" in said and "cannot answer: why a request was slow" in said


def test_a_decision_from_it(tap, tmp_path, capsys):
    """The costs are those of another recording; the shared prefix is hit in the simulation as it was in vLLM."""
    requests = [{"id": f"r{i}", "prompt": {"len": 30 + i}, "max_tokens": 9, "arrival_time": i / 9} for i in range(40)]
    cost = CostModel(fixed=0.01, per_prefill_token=1e-4, per_sequence=1e-3)
    simulate({"requests": requests, "config": {"num_blocks": 400}}, cost_model=cost).save(tmp_path / "costs.jsonl")
    out = tmp_path / "predicted.jsonl"
    command = ["trace", "whatif", str(tap), "--cost-from", str(tmp_path / "costs.jsonl"), "--set", "max_num_seqs=4"]
    assert main([*command, "--out", str(out)]) == 0
    assert "3 requests of" in capsys.readouterr().out
    assert main(["trace", "info", str(out)]) == 0
    assert main(["trace", "whatif", str(tap), "--set", "max_num_seqs=4"]) == 2
    assert "give --cost-from RECORDING" in capsys.readouterr().err


def test_a_recording_that_is_still_written(tap, tmp_path):
    """No header, gzipped without its end, and the last line cut off."""
    text = "\n".join(map(json.dumps, REQUESTS))[:-20]
    path = tmp_path / "tap.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode())[:-8])
    assert is_vcr(path)
    meta, requests = read_vcr(path)
    assert meta.block_size is None and len(requests) == 2
    prompts = [arrival.prompt_token_ids for arrival in read_access_log(path)]
    assert not set(prompts[0]) & set(prompts[1]), "hashes without a block size say nothing"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_tokens": -1, "output_tokens": 1, "ttft_ms": 1}', r"line 2: not a request of vllm-vcr: .*prompt_tok"),
        ('{"prompt_tokens": 1, "ttft_ms": 1}', "line 2: not a request of vllm-vcr: .*output_tokens"),
        ("{", "line 2: not a request of vllm-vcr"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "tap.jsonl"
    path.write_text(f"{json.dumps(META)}\n{line}\n")
    with pytest.raises(TraceError, match=message):
        read_vcr(path)


def test_a_request_without_its_arrival(tmp_path):
    path = tmp_path / "tap.jsonl"
    path.write_text('{"prompt_tokens": 4, "output_tokens": 1, "ttft_ms": 1.5}\n')
    with pytest.raises(ValueError, match="request 1: arrival_ms is missing"):
        read_access_log(path)


def test_a_trace_is_no_recording_of_vllm_vcr(tmp_path):
    path = tmp_path / "run.jsonl"
    simulate({"requests": [{"id": "a", "prompt": {"len": 5}}]}).save(path)
    assert not is_vcr(path) and not is_access_log(path)
