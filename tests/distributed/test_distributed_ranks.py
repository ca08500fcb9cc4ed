"""Several ranks as real processes on 127.0.0.1: their common results, and the end of the job when one is lost."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from distributed_jobs import SUPPORT, Job, free_ports
from distributed_rank import CONFIG, MAX_TOKENS, PROMPTS, SMOLLM2_CONFIG, SMOLLM2_PROMPTS, tokens_and_logits
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine.distributed.link import EXIT_STATUS

ARCHITECTURE = "gpt_oss"  # with experts, sinks and a sliding window
SECONDS_TO_END = 30  # a lost rank is noticed at once; the rest is for a busy machine


def largest_difference(logits, expected):
    """Largest difference of a logit, relative to the spread of the expected logits."""
    logits, expected = np.array(logits), np.array(expected)
    assert logits.shape == expected.shape
    return np.abs(logits - expected).max() / expected.std()


def launch(size, *arguments):
    """Run Python on several ranks with MLX's own launcher."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    command = [launcher, "-n", size, "-p", free_ports(size), "--", sys.executable, *arguments]
    # The launcher loops without pause when its standard input is at its end.
    silent, writer = os.pipe()
    # No kernel is broken in these processes, so the checks of a model are made once.
    environment = {**os.environ, "WORKBENCH_PREFLIGHT": "remembered"}
    try:
        return subprocess.run(
            [*map(str, command)], stdin=silent, capture_output=True, text=True, timeout=400, env=environment
        )
    finally:
        os.close(silent)
        os.close(writer)


# -- one model over all ranks --------------------------------------------------------------------------------


def test_two_ranks_give_the_tokens_and_logits_of_one_until_one_is_killed(tmp_path):
    out = tmp_path / "out.json"
    options = json.dumps({"architecture": ARCHITECTURE, "out": str(out)})
    with Job(tmp_path, "distributed_rank.py", "sharded", options, size=2) as job:
        job.wait_for(0, "running")
        job.processes[1].kill()
        assert job.wait(seconds=SECONDS_TO_END)[0] == EXIT_STATUS
        gone = r"rank 0 of 2 ends the job: rank 1 is gone: .* \((in|after) forward pass \d+\)"
        assert re.search(gone, job.output(0)), job.output(0)
    together, again = json.loads(out.read_text())
    one_table = {"kv_cache_groups": [{"kind": "full_attention"}]}  # ranks share one block table
    with Engine(tiny_loaded_model(ARCHITECTURE), EngineConfig(**CONFIG, **one_table)) as engine:
        alone = tokens_and_logits(engine, {name: PROMPTS[name] for name in "abc"}, max_tokens=6)
        facts = engine.runner.describe()
    assert {name: tuple(tokens) for name, tokens in together["tokens"].items()} == alone["tokens"]
    assert largest_difference(together["logits"], alone["logits"]) < 1e-4
    halved = ("num_heads", "num_kv_heads", "kv_bytes_per_block")
    assert [2 * together["facts"][name] for name in halved] == [facts[name] for name in halved]
    assert together["facts"]["tensor_parallel_size"] == 2 and together["facts"]["attention_mode"] == "kernel"
    assert again["tokens"] == together["tokens"]  # a second engine over the same ranks, with another pool


@pytest.mark.repeats(of="test_two_ranks_give_the_tokens_and_logits_of_one_until_one_is_killed")
def test_three_ranks_give_the_tokens_and_logits_of_one_with_smollm2(smollm2, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    num_layers = 2  # three ranks on two cores wait 20 ms and more for each of 2 sums per layer
    options = json.dumps({"out": str(out), "num_layers": num_layers})
    launched = launch(3, SUPPORT / "distributed_rank.py", "bundled", options)
    assert out.exists(), launched.stderr
    together = json.loads(out.read_text())
    monkeypatch.setitem(smollm2.model.model, "layers", smollm2.model.model.layers[:num_layers])
    with Engine(smollm2, EngineConfig(**SMOLLM2_CONFIG)) as engine:
        alone = tokens_and_logits(engine, SMOLLM2_PROMPTS, max_tokens=4)
    assert {name: tuple(tokens) for name, tokens in together["tokens"].items()} == alone["tokens"]
    assert largest_difference(together["logits"], alone["logits"]) < 1e-4


def test_two_ranks_that_cannot_share_smollm2_fail_before_it_is_loaded(smollm2, tmp_path):
    launched = launch(2, "-m", "workbench", "bench")
    reason = "'smollm2' has 9 query heads and 3 KV heads, which 2 ranks cannot share evenly: use 1 or 3"
    assert reason in launched.stderr and "Traceback" not in launched.stderr
    assert launched.stdout.strip() == ""


# -- a lost rank ends the job --------------------------------------------------------------------------------


@pytest.fixture
def sums(tmp_path):
    """Makes a job of three ranks that add up numbers without end."""
    jobs = []

    def start(**options):
        options = json.dumps({"fails": str(tmp_path / "fails"), **options})
        jobs.append(Job(tmp_path, "distributed_rank.py", "sums", options, size=3).__enter__())
        jobs[0].wait_for(0, "running")
        return jobs[0]

    yield start
    for job in jobs:
        job.__exit__()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_job_and_is_named(sums, victim):
    job = sums()
    job.processes[victim].kill()
    survivors = [rank for rank in range(3) if rank != victim]
    statuses = job.wait(*survivors, seconds=SECONDS_TO_END)
    for rank in survivors:
        assert statuses[rank] == EXIT_STATUS
        assert f"rank {rank} of 3 ends the job: rank {victim} is gone" in job.output(rank)


def test_a_rank_that_hangs_ends_the_job(sums):
    job = sums(silence_limit=3.0)
    job.processes[1].send_signal(signal.SIGSTOP)
    assert job.wait(0, 2, seconds=3 + SECONDS_TO_END)[::2] == [EXIT_STATUS] * 2
    for rank in (0, 2):
        assert f"rank {rank} of 3 ends the job: rank 1 is lost: not heard of for" in job.output(rank)


def test_a_rank_that_fails_ends_the_job_with_its_reason(sums, tmp_path):
    job = sums()
    (tmp_path / "fails").touch()
    assert job.wait(seconds=SECONDS_TO_END) == [EXIT_STATUS] * 3
    for rank in range(3):
        assert f"rank {rank} of 3 ends the job: rank 1 failed: MemoryError: planted (adding up)" in job.output(rank)


# -- one engine per rank -------------------------------------------------------------------------------------


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("gemma3_text", {}),  # with sliding windows
        ("qwen3_next", {"num_speculative_tokens": 3}),  # with recurrent layers
    ],
)
def test_two_engines_take_their_steps_together(architecture, config, tmp_path):
    with Engine(tiny_loaded_model(architecture), EngineConfig(**CONFIG)) as engine:
        for name, prompt in PROMPTS.items():
            engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS[name]), request_id=name)
        engine.run(progress=False)
        alone = {name: list(output.token_ids) for name, output in engine.outputs.items()}
    known = [PROMPTS[name] + tokens for name, tokens in alone.items()] if config else []
    options = {"architecture": architecture, "config": config, "known": known, "out": str(tmp_path / "out")}
    with Job(tmp_path, "distributed_rank.py", "lockstep", json.dumps(options), size=2) as job:
        assert job.wait() == [0, 0], job.output(0) + job.output(1)
    ranks = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]
    assert {**ranks[0]["tokens"], **ranks[1]["tokens"]} == alone

    first, second = ranks
    assert [p[:2] for p in first["passes"]] == [p[:2] for p in second["passes"]]
    agreed = [num_tokens for num_tokens, _, _ in first["passes"]]
    rows = [(a[2], b[2]) for a, b in zip(first["passes"], second["passes"])]
    assert rows == [tuple(count or max(num_tokens) for count in num_tokens) for num_tokens in agreed]
    # The model's own sums over the ranks met the right passes.
    assert first["totals"] == second["totals"] == [sum(pair) for pair in rows]
    assert second["num_dummy_steps"] == sum(num_tokens[1] == 0 for num_tokens in agreed) > 2
    assert first["num_dummy_steps"] == 0
    assert second["num_steps"] == len(agreed) - second["num_dummy_steps"]
    assert first["free_blocks"] == second["free_blocks"] == CONFIG["num_blocks"] - 1
    assert (first["num_accepted"] > 0) == bool(config)
    assert [True, False] in [has_prefill for _, has_prefill, _ in first["passes"]]
