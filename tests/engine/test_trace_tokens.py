"""The tokens of a trace are those of the outputs, over random workloads: stop strings, aborts, drafts, async steps."""

import random
from collections import Counter, defaultdict

from tiers import examples

from workbench import Engine, SamplingParams

NUM_WORKLOADS = examples(24)


def random_stop(rng):
    """A stop string that can lie in a word, or across two words."""
    return rng.choice([f"w{rng.randrange(12)}", f"{rng.randrange(10)} w{rng.randrange(10)}", f"{rng.randrange(10)} w"])


def run(model, seed, *, is_async, num_drafts):
    """A random workload: its engine, closed, and its request ids."""
    rng = random.Random(seed)
    config = {
        "num_blocks": rng.choice([12, 20, 40]),
        "block_size": rng.choice([4, 8]),
        "max_num_batched_tokens": rng.choice([16, 64]),
        "max_model_len": 40,
        "async_scheduling": is_async,
    }
    if num_drafts:
        lookup = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        config |= {"num_speculative_tokens": num_drafts, "speculative": lookup}
    with Engine(model, **config) as engine:
        ids, num_left = [], 5
        while True:
            if num_left and rng.random() < 0.6:
                num_left -= 1
                prompt = [rng.randrange(3, 20) for _ in range(rng.randrange(1, 20))]
                stop = tuple(random_stop(rng) for _ in range(rng.randrange(3)))
                sampling = SamplingParams(
                    max_tokens=rng.randrange(1, 20), temperature=rng.choice([0, 1.0]), seed=seed, stop=stop
                )
                ids.append(engine.add_request(prompt, sampling))
            if ids and rng.random() < 0.06:
                engine.abort(rng.choice(ids))
            if engine.step() is None and not num_left:
                return engine, ids


def test_the_tokens_of_the_chunks_are_the_output(tiny_llama):
    seen, differs = Counter(), Counter()
    for seed in range(NUM_WORKLOADS):
        engine, ids = run(tiny_llama, seed, is_async=seed % 2 == 1, num_drafts=(0, 1, 3)[seed % 3])
        tokens, last, texts = defaultdict(tuple), defaultdict(tuple), defaultdict(str)
        for chunk in (chunk for record in engine.trace for chunk in record.chunks):
            tokens[chunk.request_id] += chunk.accepted
            last[chunk.request_id] += () if chunk.sampled is None else (chunk.sampled,)
            texts[chunk.request_id] += chunk.text
        for request_id in ids:
            output = engine.output(request_id)
            seen[output.finish_reason] += 1
            assert output.token_ids == tokens[request_id], (seed, request_id, output.finish_reason)
            differs["drafts"] += output.token_ids != last[request_id]
            extra = texts[request_id].removeprefix(output.text)
            assert output.text + extra == texts[request_id]
            if extra:
                differs["stop string"] += 1
                assert any(stop.startswith(extra) for stop in engine.trace.requests[request_id].sampling["stop"])
    assert min(seen[reason] for reason in ("length", "stop", "abort")) > 2, "every way to end is among them"
    assert differs["drafts"] > 2 and differs["stop string"] > 0, "control: other readings of a trace differ"
