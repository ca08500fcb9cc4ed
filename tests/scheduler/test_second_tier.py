"""The second tier of the prefix cache, against a recount from the records: contents by tokens, times by formula."""

import random

import pytest

from workbench import EngineConfig, Trace, simulate, simulate_fleet
from workbench.scheduler.scheduler import Scheduler
from workbench.scheduler.second_tier import SecondTier

TIER = {"kv_bytes_per_token": 1e5, "bandwidth": 1e9, "latency": 0.002}
BLOCK_SECONDS = 16 * 1e5 / 1e9


def workload(seed: int, capacity: int | None, **config: object) -> dict:
    """Nine conversations that come back, on a pool too small for them."""
    rng = random.Random(seed)
    requests = []
    for n in range(60):
        user, turn = rng.randrange(9), rng.randrange(3)
        parts = [{"len": 64, "seed": f"s{user}"}, {"len": rng.choice([32, 64, 100]), "seed": f"t{user} {turn}"}]
        request = {"id": f"r{n}", "arrival_time": n * 0.02 + rng.random() * 0.1, "max_tokens": rng.randint(1, 30)}
        requests.append(request | {"prompt": {"parts": [*parts, {"len": rng.randint(1, 40)}]}, "accepts": [1, 0, 2]})
    settings = {"num_blocks": 40, "max_num_batched_tokens": 128, "max_num_seqs": 4, **config}
    if capacity is not None:
        settings["second_tier"] = TIER | {"num_blocks": capacity}
    return {"requests": requests, "cost_model": {"fixed": 0.01, "per_row": 1e-4}, "config": settings}


class Recount:
    """The pool's and the tier's contents, as tokens, and the link's time."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        self.tokens = {name: list(info.prompt_token_ids) for name, info in trace.requests.items()}
        self.capacity = capacity
        self.pool: dict[int, tuple[int, ...]] = {}
        self.tier: list[tuple[int, ...]] = []  # the least recently used first
        self.free_at = 0.0
        self.loading: dict[str, tuple[int, int, float]] = {}  # first and last place, end
        self.num_loads = 0

    def blocks(self, name: str, num_tokens: int) -> list[tuple[int, ...]]:
        return [tuple(self.tokens[name][:end]) for end in range(16, num_tokens + 1, 16)]

    def use(self, name: str, num_tokens: int) -> None:
        for content in reversed(self.blocks(name, num_tokens)):
            if content in self.tier:
                self.tier.remove(content)
                self.tier.append(content)

    def step(self, record) -> None:
        loaded = {load.request_id for load in record.loads}
        for name, reason in record.passed_over.items():
            if name in self.loading and name not in loaded and record.time >= self.loading[name][2]:
                del self.loading[name]  # it found no place, or others have computed the same
            if reason.kind == "transfer" and name not in self.loading:
                assert reason.needed == reason.num_tokens
                self._begin(name, record, reason.needed // 16)
            if reason.kind == "transfer":
                assert record.time < self.loading[name][2]
        pool = self.pool.copy()
        for load in record.loads:
            _, last, end = self.loading.pop(load.request_id)
            assert record.time >= end and len(load.hit_ids) + len(load.block_ids) <= max(last, len(load.hit_ids))
            contents = self.blocks(load.request_id, 16 * last)
            for block, content in zip(load.hit_ids, contents):
                assert pool[block] == content if block in pool else block in record.cached_block_ids
            pool.update(zip(load.block_ids, contents[len(load.hit_ids) :]))
            self.num_loads += 1
        self.loading = {name: its for name, its in self.loading.items() if name in record.waiting}
        stored = []
        for block in record.pool.evicted:
            del self.pool[block]
        for load in record.loads:
            for place, block in enumerate(load.block_ids, len(load.hit_ids)):
                if block in record.cached_block_ids:
                    self.pool[block] = tuple(self.tokens[load.request_id][: 16 * (place + 1)])
        tables = {chunk.request_id: record.block_table(index) for index, chunk in enumerate(record.chunks)}
        for chunk in record.chunks:
            self.tokens[chunk.request_id] += chunk.accepted
        for block in record.cached_block_ids:
            for name, table in tables.items():
                if block in table:
                    self.pool[block] = tuple(self.tokens[name][: 16 * (table.index(block) + 1)])
            stored.append(self.pool[block])
        for block in record.pool_end.evicted:
            del self.pool[block]
        for content in stored:
            if content in self.tier:
                self.tier.remove(content)
            self.tier.append(content)
            del self.tier[: -self.capacity]
        for name in record.finished:
            self.use(name, len(self.tokens[name]))

    def _begin(self, name: str, record, num_blocks: int) -> None:
        """The part of a prefix that is behind the pool, in the tier, begins to move when the link is free.

        Requests that were scheduled earlier in the step may have taken blocks from the pool or put some into it.
        """
        contents = self.blocks(name, len(self.tokens[name]) - 1)
        before = set(self.pool.values())
        surely = before - {self.pool[block] for block in record.pool.evicted if block in self.pool}
        perhaps = before | {content for other in self.tokens for content in self.new_in(record, other)}
        for first in range(len(contents) - num_blocks + 1):
            last = first + num_blocks
            if contents[first] not in surely and all(content in self.tier for content in contents[first:last]):
                ends = last == len(contents) or contents[last] not in self.tier
                if ends and all(content in perhaps for content in contents[:first]):
                    break
        else:
            raise AssertionError(f"{name} loads {num_blocks} blocks that are not in the tier behind its prefix")
        self.use(name, len(self.tokens[name]) - 1)
        self.free_at = max(record.time, self.free_at) + TIER["latency"] + num_blocks * BLOCK_SECONDS
        self.loading[name] = (first, last, self.free_at)

    def new_in(self, record, name: str) -> list[tuple[int, ...]]:
        """Contents that a step computes for a request."""
        return [c for chunk in record.chunks if chunk.request_id == name for c in self.blocks(name, chunk.end)]


@pytest.mark.parametrize("extra", [{}, {"eviction": "s3fifo"}, {"policy": "priority", "watermark": 0.1}], ids=str)
@pytest.mark.parametrize("capacity", [50, 200, 10_000])
def test_every_load_is_what_a_recount_from_the_records_finds(capacity, extra):
    num_loads = 0
    for seed in range(3):
        trace = simulate(workload(seed, capacity, max_num_seqs=(1, 2, 4)[seed], **extra))
        recount = Recount(trace, capacity)
        for record in trace:
            recount.step(record)
        num_loads += recount.num_loads
        assert trace.end == "done" and not trace.check()
    assert num_loads > 20


def test_the_recount_notices_another_order_of_eviction(monkeypatch):
    monkeypatch.setattr(SecondTier, "use", lambda tier, digests: None)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(6):
            trace = simulate(workload(seed, 50))
            recount = Recount(trace, 50)
            for record in trace:
                recount.step(record)


@pytest.mark.parametrize(
    "extra", [{"async_scheduling": True}, {"num_speculative_tokens": 2}, {"enable_chunked_prefill": False}], ids=str
)
def test_steps_that_run_ahead_keep_the_laws(extra, tmp_path):
    for seed in range(4):
        trace = simulate(workload(seed, 10_000, max_num_batched_tokens=256, **extra))
        assert trace.end == "done" and not trace.check()
        assert any(record.loads for record in trace)
    trace.save(tmp_path / "run.jsonl")
    again = Trace.load(tmp_path / "run.jsonl")
    assert [record.loads for record in again] == [record.loads for record in trace] and not again.check()


def test_a_pool_that_keeps_everything_loads_nothing():
    plain, tiered = (simulate(workload(1, capacity, num_blocks=4000)) for capacity in (None, 10_000))
    assert [(record.chunks, record.time) for record in tiered] == [(record.chunks, record.time) for record in plain]
    assert not any(record.loads for record in tiered)


def test_a_request_waits_for_its_load_and_says_so():
    prompts = [{"len": 160, "seed": seed} for seed in ("a", "b", "a")]
    requests = [
        {"id": f"r{n}", "prompt": prompt, "arrival_time": float(n), "max_tokens": 1} for n, prompt in enumerate(prompts)
    ]
    config = {"num_blocks": 12, "max_num_batched_tokens": 256, "second_tier": TIER | {"num_blocks": 100}}
    trace = simulate({"requests": requests, "cost_model": {"fixed": 0.01, "per_row": 1e-3}, "config": config})
    (loading,) = [record for record in trace if record.loads]
    hit, second = loading.loads, trace.metrics().requests["r2"]
    num_loaded = len(hit[0].block_ids)  # what the second prompt had evicted, without the block of the last token
    assert num_loaded == 9 - len(hit[0].hit_ids) and num_loaded > 7
    assert second.ttft.seconds == pytest.approx(TIER["latency"] + num_loaded * BLOCK_SECONDS + loading.duration)
    assert loading.duration < trace[0].duration / 4  # one block of ten is computed
    waits = [record.not_scheduled["r2"] for record in trace if "r2" in record.not_scheduled]
    assert [str(reason) for reason in waits] == [
        f"{16 * num_loaded} tokens of its KV are on their way from the second tier"
    ]
    assert "waiting for the transfer of its KV" in str(trace.explain("r2"))


def test_fleets_have_a_tier_for_each_replica():
    content = workload(3, 10_000)
    plain = simulate_fleet(workload(3, None), replicas=2)
    run = simulate_fleet(content, replicas=2)
    alone = simulate_fleet(content, replicas=1)
    assert [[record.loads for record in trace] for trace in alone.traces] == [
        [record.loads for record in simulate(content) if record.chunks or record.loads]
    ] or any(record.loads for record in alone.traces[0])
    assert all(any(record.loads for record in trace) and not trace.check() for trace in run.traces)
    assert run.metrics().summary.num_cached_tokens > plain.metrics().summary.num_cached_tokens
    sessions = {"count": 12, "arrivals": {"process": "poisson", "rate": 5}, "turns": 4, "input": 60, "output": 10}
    closed = {name: content[name] for name in ("cost_model", "config")} | {"sessions": sessions | {"think": 0.5}}
    looped = simulate_fleet(closed, replicas=2, router="prefix")
    assert looped.metrics().summary.num_finished == 48 and not any(trace.check() for trace in looped.traces)
    assert any(record.loads for trace in looped.traces for record in trace)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"second_tier": 3}, "second_tier must be an object"),
        ({"second_tier": {"num_blocks": 9}}, "second_tier lacks kv_bytes_per_token, bandwidth"),
        ({"second_tier": TIER | {"num_blocks": 0}}, r'second_tier\["num_blocks"\] must be'),
        ({"second_tier": TIER | {"num_blocks": 9, "bandwidth": 0}}, r'second_tier\["bandwidth"\] must be'),
        ({"second_tier": TIER | {"num_blocks": 9, "size": 1}}, "unknown field 'size'"),
        ({"second_tier": TIER | {"num_blocks": 9}, "enable_prefix_caching": False}, "a part of the prefix cache"),
        ({"second_tier": TIER | {"num_blocks": 9}, "max_num_partial_prefills": 2}, "does not work with"),
        ({"second_tier": TIER | {"num_blocks": 9}, "kv_cache_groups": [{"kind": "mamba"}]}, "does not work with"),
    ],
)
def test_what_cannot_be_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**config)


def test_it_needs_a_clock():
    with pytest.raises(ValueError, match="second_tier needs a clock"):
        simulate({"requests": [], "config": {"second_tier": TIER | {"num_blocks": 9}}})


def test_a_rehearsal_leaves_the_tier_as_it_is():
    scheduler = Scheduler(EngineConfig(second_tier=TIER | {"num_blocks": 9}), clock=lambda: 0.0)
    scheduler.second_tier.store(b"a")
    scheduler._rehearsal().order._tier.store(b"b")
    assert scheduler.second_tier.num_kept([b"a", b"b"]) == 1
