"""Two more servers that do not answer, by their recording and by their /metrics.

One has a pool too small for a request; a client of the other never reads its answer, and vLLM computes on for it.
"""

import random
from pathlib import Path

import msgspec
import pytest
from tiers import examples

from workbench import CostModel, Trace, simulate
from workbench.analysis.why_metrics import why_metrics
from workbench.apps.cli import main
from workbench.trace.formats.scrapes import read_scrapes

STEP = CostModel(fixed=0.05)


def write_growing(trace, path):
    """The file of a recording of vLLM that is still being written: without its last line."""
    growing = Trace(msgspec.structs.replace(trace.meta, source="vllm 0.32.0"))
    for info in trace.requests.values():
        growing.add_request(info)
    for record in trace:
        growing.append(record)
    growing.save(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def scrapes_of(trace, path: Path):
    """Two scrapes of the server, before the last step of a run and after it."""
    texts = []
    for at, steps in enumerate((trace[:-1], trace)):
        prompt, output, preemptions = 0, 0, 0
        for record in steps:
            prompt += sum(0 if chunk.is_decode else chunk.num_tokens for chunk in record.chunks)
            output += sum(len(chunk.accepted) for chunk in record.chunks)
            preemptions += len(record.preempted)
        last = steps[-1]
        running = len(set(last.running) - set(last.finished))
        texts.append(f"""# scraped {10 + 5 * at}
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} {len(last.waiting)}
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} {len(last.waiting)}
vllm:prompt_tokens_total{{engine="0"}} {prompt}
vllm:generation_tokens_total{{engine="0"}} {output}
vllm:num_preemptions_total{{engine="0"}} {preemptions}
""")
    path.write_text("".join(texts))
    return read_scrapes(path)


@pytest.mark.parametrize("seed", range(examples(10)))
def test_a_pool_that_is_too_small_is_named_with_the_request_and_the_blocks(seed, tmp_path, capsys):
    rng = random.Random(f"pool {seed}")
    usable, size = rng.randint(4, 20), rng.choice([4, 16])
    config = {"num_blocks": usable + 1, "block_size": size, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    needed = usable + rng.randint(1, 9)
    requests = [{"id": f"small-{n}", "prompt": {"len": rng.randint(1, size)}, "max_tokens": 1} for n in range(4)]
    requests.insert(rng.randint(0, 4), {"id": "big", "prompt": {"len": needed * size}, "max_tokens": 1})
    trace = simulate({"config": config, "requests": requests}, as_vllm=True, cost_model=STEP, max_steps=40)
    write_growing(trace, tmp_path / "run.jsonl")
    assert main(["why", str(tmp_path / "run.jsonl"), "--fail-if-stuck"]) == 1
    said = capsys.readouterr().out
    assert f"big: no free KV blocks: needs {needed} more for {needed * size} tokens, {usable} free" in said
    assert "this never clears" in said and "this clears" not in said
    assert ("or reject big" in said) == (len(trace[-1].waiting) > 1)
    (enough,) = {change.after for change in trace.why().changes if change.field == "num_blocks"}
    assert f"--num-gpu-blocks-override {enough}" in said
    for num_blocks, end in ((enough, "done"), (enough - 1, "stuck")):
        again = {"config": config | {"num_blocks": num_blocks}, "requests": requests}
        assert simulate(again, as_vllm=True, max_steps=40).end == end
    answer = why_metrics(scrapes_of(trace, tmp_path / "metrics.prom"))
    assert answer.verdict == "still" and "needs more KV blocks than the pool has" in repr(answer)


@pytest.mark.parametrize("seed", range(examples(10)))
def test_a_pool_that_is_only_scarce_clears_and_is_named_as_the_reason(seed, tmp_path, capsys):
    rng = random.Random(f"scarce {seed}")
    config = {"num_blocks": 13, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    requests = [{"id": f"r{n}", "prompt": {"len": rng.randint(60, 110)}, "max_tokens": 60} for n in range(8)]
    trace = simulate({"config": config, "requests": requests}, as_vllm=True, cost_model=STEP, max_steps=60)
    write_growing(trace, tmp_path / "run.jsonl")
    assert main(["why", str(tmp_path / "run.jsonl"), "--fail-if-stuck"]) == 0
    said = capsys.readouterr().out
    assert "no free KV blocks: needs" in said and "this clears: every request can end" in said
    assert why_metrics(scrapes_of(trace, tmp_path / "metrics.prom")).verdict == "runs"


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_a_client_that_never_reads_holds_a_seat_until_its_max_tokens(seats, tmp_path, capsys):
    """The engine does not know who reads: it is not stuck, and the holder, its rest and the flag are named."""
    requests = [{"id": f"unread-{n}", "prompt": {"len": 30}, "max_tokens": 3000 + n} for n in range(seats)]
    requests += [{"id": f"w-{n}", "prompt": {"len": 30}, "max_tokens": 9, "arrival_time": 0.1} for n in range(3)]
    config = {"num_blocks": 2000, "max_num_seqs": seats}
    trace = simulate({"config": config, "requests": requests}, as_vllm=True, cost_model=STEP, max_steps=60)
    write_growing(trace, tmp_path / "run.jsonl")
    assert main(["why", str(tmp_path / "run.jsonl"), "--fail-if-stuck"]) == 0
    said = capsys.readouterr().out
    assert f"w-0, w-1, w-2: max_num_seqs reached ({seats})" in said and "this clears" in said
    left = 3000 - len(trace)
    assert f"next seat: that of unread-0, at most {left:,} tokens left, {left * 0.05:.0f} s at its pace" in said
    assert f"--max-num-seqs {seats + 1}" in said
    answer = why_metrics(scrapes_of(trace, tmp_path / "metrics.prom"))
    assert answer.verdict == "runs" and "requests are served" in repr(answer) and not answer.is_stuck
