"""Eviction policies: an own LRU is vLLM's, Belady is never beaten where it is the optimum, and all keep the laws."""

import os
import random
from collections import OrderedDict

import pytest
from tiers import examples

from workbench import EngineConfig, SamplingParams, simulate
from workbench.config import EVICTIONS
from workbench.scheduler.eviction import EVICTIONS as OBJECTS
from workbench.scheduler.eviction import Belady, Eviction, Lfu, Session, Ttl, TwoZones, make_eviction

CASES = int(os.environ.get("WORKBENCH_EVICTION_CASES", "60"))


class Lru(Eviction):
    def __init__(self):
        self.released = OrderedDict()

    def release(self, block, digest):
        self.released[block] = digest

    def remove(self, block, digest):
        self.released.pop(block, None)

    def victim(self):
        return next(iter(self.released))


class Mru(Lru):
    def victim(self):
        return next(reversed(self.released))


def random_workload(seed, num_seqs=1):
    """Prompts of shared documents, most of which no pool of this size holds at once."""
    rng = random.Random(f"eviction {seed}")
    config = {
        "max_num_seqs": num_seqs,
        "block_size": 4,
        "num_blocks": rng.randint(14, 40),
        "max_num_batched_tokens": 64,
    }
    documents = [f"d{index}" for index in range(rng.randint(2, 8))]
    requests = []
    for index in range(rng.randint(10, 60)):
        parts = [{"len": rng.choice([4, 8, 12, 16]), "seed": rng.choice(documents)}]
        if rng.random() < 0.5:
            parts.append({"len": rng.choice([4, 8]), "seed": f"{rng.choice(documents)} more"})
        if rng.random() < 0.5:
            parts.append({"len": rng.randint(1, 9), "seed": f"own {index}"})
        request = {"id": f"r{index}", "prompt": {"parts": parts}, "max_tokens": rng.randint(1, 3)}
        requests.append(request | {"arrival_step": index if num_seqs > 1 else 0})
    return {"config": config, "requests": requests}


def hits(trace):
    assert trace.end in ("", "done")
    return sum(chunk.num_cached_tokens for step in trace for chunk in step.chunks)


def test_no_policy_beats_belady_with_one_seat():
    total = dict.fromkeys(EVICTIONS, 0)
    for seed in range(examples(CASES)):
        workload = random_workload(seed)
        found = {word: hits(simulate(workload, config={"eviction": word})) for word in EVICTIONS}
        assert max(found.values()) == found["belady"], (seed, found)
        for word, count in found.items():
            total[word] += count
    assert total["belady"] > 1.1 * max(count for word, count in total.items() if word != "belady")  # a ceiling to see


def test_a_wrong_belady_is_beaten(monkeypatch):
    """Negative control: the content that is used again first goes."""
    priority = Belady._priority
    monkeypatch.setattr(Belady, "_priority", lambda self, digest: -priority(self, digest))
    beaten = 0
    for seed in range(examples(20)):
        workload = random_workload(seed)
        beaten += hits(simulate(workload)) > hits(simulate(workload, config={"eviction": "belady"}))
    assert beaten > examples(20) // 2


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_an_lru_of_ones_own_gives_vllms_schedules(num_seqs):
    for seed in range(examples(30)):
        workload = random_workload(seed, num_seqs)
        config = EngineConfig.from_dict(workload["config"])
        assert list(simulate(workload, config=config.replace(eviction=Lru()))) == list(simulate(workload))
    assert list(simulate(workload, config=config.replace(eviction=Mru()))) != list(simulate(workload))


@pytest.mark.parametrize("word", EVICTIONS)
def test_every_policy_keeps_the_laws(word):
    for seed in range(examples(36)):
        changes = ({}, {"async_scheduling": True}, {"num_speculative_tokens": 2})[seed % 3]
        trace = simulate(random_workload(seed, 3), config={"eviction": word} | changes)
        assert trace.end == "done" and trace.check() == [], (seed, changes)


@pytest.mark.parametrize("word", ["lfu", "two_zones", "s3fifo", "session", "ttl"])
def test_an_engine_computes_the_same_tokens_with_every_policy(word, tiny_llama):
    from workbench import Engine

    rng = random.Random(0)
    documents = [[rng.randrange(100) for _ in range(24)] for _ in range(4)]
    prompts = [rng.choice(documents) + [rng.randrange(100) for _ in range(5)] for _ in range(16)]

    def tokens(eviction):
        config = EngineConfig(num_blocks=14, block_size=8, max_num_seqs=2, max_num_batched_tokens=32, eviction=eviction)
        engine = Engine(tiny_llama, config)
        names = [engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True)) for prompt in prompts]
        engine.run(progress=False)
        return [engine.outputs[name].token_ids for name in names], hits(engine.trace)

    (expected, _), (found, cached) = tokens("lru"), tokens(word)
    assert found == expected and cached > 0


class TestRules:
    """Each rule on a few blocks, by hand."""

    def test_lfu_forgets_what_was_popular_long_ago(self):
        policy = Lfu()
        for block in (1, 2):
            policy.cache(block, b"%d" % block)
            policy.release(block, b"%d" % block)
        for _ in range(3):
            policy.remove(1, b"1")
            policy.hit(1, b"1")
            policy.release(1, b"1")
        assert policy.victim() == 2
        policy.remove(2, b"2")
        gone = []
        for block in range(3, 9):  # newcomers: the age of the cache grows
            policy.cache(block, b"%d" % block)
            policy.release(block, b"%d" % block)
            gone.append(policy.victim())
            policy.remove(gone[-1], b"%d" % gone[-1])
        assert gone.index(1) == 2  # when newcomers have its priority: one use, and an age of 3

    def test_ttl_keeps_what_it_promised(self):
        policy = Ttl(ttl=2)
        for block in (1, 2, 3):
            policy.admit([])
            policy.release(block, b"%d" % block)
        assert policy.victim() == 3
        policy.admit([])
        assert policy.victim() == 1

    def test_two_zones_protect_what_was_used_again(self):
        policy = TwoZones()
        for block in (1, 2, 3):
            policy.release(block, b"%d" % block)
        policy.remove(1, b"1")
        policy.hit(1, b"1")
        policy.release(1, b"1")
        assert policy.victim() == 2

    def test_belady_counts_copies_once(self):
        policy = Belady()
        policy.foresee([[b"a"], [b"b"], [b"a"]])
        for block, digest in ((1, b"a"), (2, b"b"), (3, b"b")):
            policy.cache(block, digest)
            policy.release(block, digest)
        assert policy.victim() == 2  # block 3 has the same content
        policy.remove(2, b"b")
        policy.forget(2, b"b")
        assert policy.victim() == 3  # b is used after a


def test_words_and_objects():
    assert {*OBJECTS, "lru"} == set(EVICTIONS)
    given = Ttl(ttl=3)
    made = make_eviction(given)
    assert made is not given and repr(made) == "Ttl(ttl=3)"
    with pytest.raises(ValueError, match="eviction must be one of 'lru', 'lfu'"):
        EngineConfig(eviction="mru")
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 3}}]}, config=EngineConfig(eviction=given))
    assert trace.config["eviction"] == "Ttl(ttl=3)"


class SlowSession(Session):
    """Looks at every conversation for each victim."""

    def victim(self):
        oldest = min(self._released, key=self._latest.__getitem__)
        return next(iter(self._released[oldest]))


def test_a_session_is_found_without_looking_at_all():
    for seed in range(examples(30)):
        workload = random_workload(seed, num_seqs=1 + seed % 3)
        fast, slow = (simulate(workload, config={"eviction": one}) for one in ("session", SlowSession()))
        assert list(fast) == list(slow), seed
