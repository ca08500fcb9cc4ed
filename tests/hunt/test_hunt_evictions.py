"""Eviction policies are judged by their rules, and a scheduler that tells little is judged by what it does."""

import random

import pytest

from workbench.analysis.hunt.drive import Plan, PlannedChunk
from workbench.analysis.hunt.evictions import Judged
from workbench.analysis.hunt.own import OwnScheduler
from workbench.analysis.hunt.search import Search
from workbench.analysis.hunt.target import Refused, Target, find_target
from workbench.analysis.hunt.workloads import WORKLOAD_BYTES, make_workload
from workbench.scheduler.block_pool import BlockPool
from workbench.scheduler.eviction import Belady, Eviction, Lfu, S3Fifo, Session, Ttl, TwoZones


def first_fault(target, laws, number, **changes):
    """The first fault in random workloads; None without one."""
    rng = random.Random(f"first fault {number}")
    for _ in range(number):
        workload = make_workload(rng.randbytes(WORKLOAD_BYTES), target.features)
        if "eviction" in changes and not workload["config"]["enable_prefix_caching"]:
            continue
        workload["config"].update(changes)
        try:
            fault = target.run(workload, laws)
        except Refused:
            continue
        if fault is not None:
            return fault
    return None


@pytest.mark.parametrize("word", ["lfu", "ttl", "two_zones", "session", "s3fifo", "belady"])
def test_policies_keep_their_rules(word):
    assert first_fault(find_target("workbench"), None, 60, eviction=word) is None


@pytest.mark.parametrize("name", ["Lfu", "Ttl", "TwoZones", "Session", "S3Fifo", "Belady"])
def test_an_eviction_policy_is_hunted_by_its_name(name):
    target = find_target("workbench", f"workbench.scheduler.eviction:{name}")
    made = target.make({"enable_prefix_caching": True})
    assert f"{name}(" in repr(made.scheduler.config.eviction)
    assert target.make({"enable_prefix_caching": False}).scheduler.config.eviction == "lru"
    search = Search(target, workloads=25, seed=7)
    assert search.run() == [] and search.num_workloads == 25 and search.num_refused < 3


def test_an_error_in_a_policy_is_a_fault():
    """A scheduler whose policy fails uses vLLM's rule; a hunt tells the policy's author."""
    fault = first_fault(find_target("workbench", "planted:Confused"), None, 60)
    assert (fault.law, fault.place) == ("crash", 'planted.py: raise KeyError("no such request")')


def test_a_class_that_is_no_policy_is_named():
    with pytest.raises(ValueError, match=r"makes Counter\(\): it must"):
        find_target("workbench", "collections:Counter")


def uses_count_nothing(self, block, digest):
    pass


def one_hit_counts_three(self, block, digest):
    self._uses[digest] = 3


def the_latest_goes(self):
    return next(reversed(self._time_of))


def nobody_is_latest(self, digests):
    Eviction.admit(self, digests)


def hits_are_releases(self, blocks):
    BLOCK_POOL_TOUCH(self, blocks)
    for block in filter(None, blocks):
        self.eviction and self.eviction.hit(block, b"other")


BLOCK_POOL_TOUCH = BlockPool.touch
NEXT_USE = Belady._priority


@pytest.mark.parametrize(
    "word, kind, name, planted",
    [
        ("lfu", Lfu, "cache", uses_count_nothing),
        ("ttl", Ttl, "victim", the_latest_goes),
        ("session", Session, "admit", nobody_is_latest),
        ("belady", Belady, "_priority", lambda self, digest: -NEXT_USE(self, digest)),
        ("two_zones", TwoZones, "hit", uses_count_nothing),
        ("s3fifo", S3Fifo, "hit", one_hit_counts_three),
        ("lfu", Judged, "admit", lambda self, digests: None),
        ("two_zones", BlockPool, "touch", hits_are_releases),
    ],
)
def test_a_planted_fault_of_a_policy_is_found(word, kind, name, planted, monkeypatch):
    monkeypatch.setattr(kind, name, planted)
    fault = first_fault(find_target("workbench"), ["blocks"], 600, eviction=word)
    assert fault.law == "blocks" and fault.place == "an eviction is wrong"


class Silent:
    """Our scheduler behind six methods: it tells no queues, no counters and no states."""

    def __init__(self, config):
        self._own = OwnScheduler(config)
        self.depth = self._own.depth
        for name in ("add", "abort", "block_tables", "free_blocks", "propose"):
            setattr(self, name, getattr(self._own, name))

    def schedule(self):
        batch = self._own.schedule()
        chunks = [
            PlannedChunk(c.request_id, c.start, c.num_tokens, tuple(c.drafts), samples=c.samples) for c in batch.chunks
        ]
        return Plan(chunks, list(batch.preempted), handle=batch)

    def update(self, plan, tokens):
        return self._own.update(plan.handle, tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_scheduler_that_tells_little_is_not_blamed(depth):
    target = Target("silent", "", Silent, ("caching", "async", "caps"))
    laws = ["crash", "counters", "blocks", "content", "exactly_once", "limits", "progress"]
    assert first_fault(target, laws, 120, async_scheduling=depth == 2) is None
