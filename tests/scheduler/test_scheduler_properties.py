"""Random requests, steps, aborts and failures, with the scheduler's invariants checked after each of them."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule
from scheduler_helpers import CheckedKVCache, next_token, sample, tokens
from tiers import examples

from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler import kv_cache_manager
from workbench.scheduler.cache_groups import CacheGroups
from workbench.scheduler.checked import CheckedScheduler
from workbench.scheduler.request import Request
from workbench.trace import StepRecord

BLOCK_SIZE = 4
LONGEST = 48
"""Prompt and output together; any one request fits into the smallest pool, so every one can end."""

configs = st.builds(
    EngineConfig,
    max_num_batched_tokens=st.sampled_from([5, 7, 16, 33, 64]),
    max_num_scheduled_tokens=st.sampled_from([None, None, None, 5]),
    max_num_seqs=st.integers(2, 8),
    max_num_active_seqs=st.sampled_from([None, None, None, 2]),
    block_size=st.just(BLOCK_SIZE),
    num_blocks=st.integers(LONGEST // BLOCK_SIZE + 1, 20),
    enable_prefix_caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    watermark=st.sampled_from([0.0, 0.0, 0.15]),
    scheduler_reserve_full_isl=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 0, 0, 3, 8]),
    long_prefill_token_threshold_adaptive=st.booleans(),
    max_model_len=st.sampled_from([None, LONGEST]),
    max_num_partial_prefills=st.sampled_from([None, None, None, 1, 2, 4]),
    max_long_partial_prefills=st.sampled_from([None, None, 1]),
)


class SchedulerMachine(RuleBasedStateMachine):
    in_groups = False
    """Whether the blocks of the one group are those of the manager for several."""

    request_ids = Bundle("request_ids")

    @initialize(config=configs)
    def begin(self, config):
        self.config = config
        with pytest.MonkeyPatch.context() as patch:
            if self.in_groups:
                patch.setattr(kv_cache_manager, "is_plain", lambda config: False)
            self.scheduler = CheckedScheduler(config, clock=lambda: 0.0)
        assert isinstance(self.scheduler.kv_cache, CacheGroups) is self.in_groups
        self.kv_cache = CheckedKVCache(BLOCK_SIZE)
        self.all: dict[str, Request] = {}
        self.records: list[StepRecord] = []
        self.num_disturbances = 0
        self.computed: dict[str, int] = {}
        self.aborted: list[str] = []
        self.arrived: list[str] = []

    def may_disturb(self):
        """Failures and aborts end requests: with many of them a pool never comes under pressure."""
        self.num_disturbances += 1
        return self.num_disturbances % 4 == 0

    @rule(count=st.integers(3, 9), own=st.integers(2, 20), max_tokens=st.integers(4, 20), priorities=st.randoms())
    def add_many(self, count, own, max_tokens, priorities):
        """Pressure: together these need more KV blocks than the pool has."""
        for number in range(count):
            self.add(shared=4 * (number % 3), own=own, max_tokens=max_tokens, priority=priorities.randint(0, 3))

    @rule(
        target=request_ids,
        shared=st.sampled_from([0, 0, 3, 4, 8, 12]),
        own=st.integers(1, 20),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 3),
    )
    def add(self, shared, own, max_tokens, priority):
        request_id = f"r{len(self.all)}"
        request = Request(
            request_id,
            tokens(shared, "shared") + tokens(own, f"own{own}"),  # equal prompts are wanted: they share blocks
            SamplingParams(max_tokens=max_tokens),
            priority=priority,
            arrival_time=float(len(self.all)),
        )
        self.all[request_id] = request
        self.scheduler.add_request(request)
        self.arrived.append(request_id)
        return request_id

    @rule(request_id=request_ids)
    def abort(self, request_id):
        if not self.may_disturb():
            return
        was_there = self.all[request_id].status != "finished"
        assert self.scheduler.abort_request(request_id) is was_there
        if was_there:
            self.aborted.append(request_id)

    @rule()
    @precondition(lambda self: self.all)
    def step(self):
        self.take_step()

    @rule(num_steps=st.integers(2, 12))
    @precondition(lambda self: self.all)
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.take_step()

    @rule()
    @precondition(lambda self: self.all)
    def failing_step(self):
        if not self.may_disturb():
            return self.take_step()
        batch = self.scheduler.schedule()
        self.check(batch, self.scheduler.fail(batch).to_record())

    @rule(request_id=request_ids)
    def abort_under_way(self, request_id):
        if not self.may_disturb():
            return self.take_step()
        batch = self.scheduler.schedule()
        aborted = self.scheduler.abort_request(request_id)
        self.kv_cache.forward(batch)
        record = self.scheduler.update(batch, sample(batch)).to_record()
        self.check(batch, record)
        assert request_id not in record.finished or not aborted
        if aborted:
            self.aborted.append(request_id)

    def take_step(self):
        expected = self.scheduler.peek_next_batch()
        batch = self.scheduler.schedule()
        assert expected == (batch.has_prefill, batch.num_tokens)
        self.kv_cache.forward(batch)
        self.check(batch, self.scheduler.update(batch, sample(batch)).to_record())

    def check(self, batch, record):
        config = self.config
        assert record.num_tokens <= config.token_budget
        assert len(record.running) <= (config.max_num_active_seqs or config.max_num_seqs)
        assert record.arrived == tuple(self.arrived) and record.aborted == tuple(self.aborted)
        self.arrived, self.aborted = [], []
        for request_id in record.preempted:
            self.computed[request_id] = 0
        for chunk, scheduled in zip(record.chunks, batch.chunks, strict=True):
            let_in = chunk.request_id in record.admitted or chunk.request_id in record.resumed
            # A chunk begins at the end of the last one; an admission begins behind the cached prefix.
            start = chunk.num_cached_tokens if let_in else self.computed[chunk.request_id]
            assert chunk.start == start and chunk.num_tokens >= 1
            self.computed[chunk.request_id] = chunk.end
            num_known = scheduled.request.num_tokens - (chunk.sampled is not None)
            assert scheduled.samples == (chunk.end == num_known)
            assert chunk.is_partial_prefill == (chunk.arm == "intermediate") == (not scheduled.samples)
            assert chunk.sampled is None or scheduled.samples
            assert (chunk.limited_by == "complete") == scheduled.samples
            assert chunk.num_cached_tokens % BLOCK_SIZE == 0
        assert set(record.not_scheduled) == set(record.waiting)
        kinds = {reason.root for reason in record.not_scheduled.values()}
        assert "unknown" not in kinds, "a waiting request was left out without a reason"
        assert set(record.preempt_reasons) == set(record.preempted)
        assert set(record.finish_reasons) == set(record.finished)
        scheduled_ids = {chunk.request_id for chunk in record.chunks}
        assert not scheduled_ids & set(record.waiting) and not scheduled_ids & set(record.preempted)
        self.records.append(record)

    def teardown(self):
        """Nobody starves: with nothing more to come, every request ends; and its tokens do not depend on the rest."""
        if not hasattr(self, "scheduler"):
            return
        num_tokens = sum(request.num_tokens + request.max_tokens for request in self.all.values())
        for _ in range(30 * num_tokens):
            if not self.scheduler.has_unfinished_requests():
                break
            self.take_step()
        assert not self.scheduler.has_unfinished_requests(), "a request starves"
        for request in self.all.values():
            alone = Request(request.request_id, request.prompt_token_ids)
            for token in request.output_token_ids:
                assert token == next_token(alone)
                alone.token_ids.append(token)
            if request.finish_reason == "length":
                at_limit = request.num_tokens >= (self.config.max_model_len or LONGEST + 1)
                assert request.num_output_tokens == request.max_tokens or at_limit
        pool = self.scheduler.kv_cache.block_pool
        assert pool.num_free_blocks == self.config.num_usable_blocks
        emitted: dict[str, list[int]] = {}
        for record in self.records:
            for chunk in record.chunks:
                if chunk.sampled is not None:
                    emitted.setdefault(chunk.request_id, []).append(chunk.sampled)
        for request_id, request in self.all.items():
            assert emitted.get(request_id, []) == request.output_token_ids, "a token was lost or emitted twice"


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(100, 8),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = pytest.mark.filterwarnings("ignore")(SchedulerMachine.TestCase)


class GroupsMachine(SchedulerMachine):
    in_groups = True


GroupsMachine.TestCase.settings = SchedulerMachine.TestCase.settings
TestGroupsMachine = pytest.mark.filterwarnings("ignore")(GroupsMachine.TestCase)
