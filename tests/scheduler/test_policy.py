"""Policies as objects: what they may decide, what they cannot break, and the three that come along."""

import random
from dataclasses import replace

import pytest
from scheduler_helpers import CheckedKVCache, add, make_scheduler, random_workload, run, sample, sizes, step

from workbench import EngineConfig, Router, simulate
from workbench.analysis.fork import fork
from workbench.scheduler.checked import CheckedScheduler
from workbench.scheduler.eviction import Eviction
from workbench.scheduler.policies import Deadline, DecodeFirst, ShortestRemainingFirst
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.costs.cost_model import CostModel
from workbench.simulation.simulate import simulate_requests
from workbench.simulation.workload import made_up_token


def with_policy(policy: SchedulingPolicy, **fields) -> Scheduler:
    config = make_scheduler(**fields).config
    return CheckedScheduler(config, clock=lambda: 0.0, policy=policy)


class Shuffled(SchedulingPolicy):
    """Answers at random, and now and then leaves somebody out."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def pick(self, view, requests):
        rng = random.Random(f"{self.seed} {view.step}")
        order = [request for request in requests if rng.random() < 0.9]
        rng.shuffle(order)
        return order

    def running_order(self, view):
        return self.pick(view, view.running)

    def waiting_order(self, view):
        return self.pick(view, view.waiting)

    def max_chunk(self, request, view):
        return random.Random(f"{self.seed} {view.step} {request.request_id}").choice([None, 1, 3, 10])

    def victim(self, view):
        return random.Random(f"{self.seed} {view.step}").choice(view.victims)


def test_the_base_class_decides_as_vllm_does():
    """Every field of every record, on workloads with preemptions and prefix-cache hits."""
    rng = random.Random(3)
    for _ in range(40):
        config, arrivals = random_workload(rng)
        config = config.replace(policy="fcfs")
        traces = [
            simulate_requests(
                config, arrivals, lambda r: made_up_token(f"{r.request_id}:{r.num_tokens}"), policy=policy
            )
            for policy in (None, SchedulingPolicy())
        ]
        for plain, same in zip(*traces, strict=True):
            assert plain.chunks == same.chunks and plain.block_tables == same.block_tables
            assert plain.preempted == same.preempted and plain.waiting == same.waiting


@pytest.mark.parametrize("limits", [{}, {"max_num_partial_prefills": 2, "max_long_partial_prefills": 1}])
@pytest.mark.parametrize("seed", range(8))
def test_no_policy_breaks_a_rule(seed, limits):
    """Random answers under pressure: budget, seats, blocks and KV contents hold, and every request ends."""
    rng = random.Random(seed)
    fields = {"max_num_batched_tokens": 16, "num_blocks": 24, "enable_prefix_caching": seed % 2 == 0}
    scheduler = with_policy(Shuffled(seed), max_num_seqs=6, **fields, **limits)
    kv_cache = CheckedKVCache(scheduler.config.block_size)
    num_preempted = 0
    for index in range(20):
        add(scheduler, f"r{index}", rng.randint(1, 40), rng.randint(1, 20))
    for _ in range(3000):
        if not scheduler.has_unfinished_requests():
            break
        expected = scheduler.peek_next_batch()
        batch = scheduler.schedule()
        assert expected == (batch.has_prefill, batch.num_tokens)
        kv_cache.forward(batch)
        record = scheduler.update(batch, sample(batch)).to_record()
        assert record.num_tokens <= 16 and len(record.running) <= 6
        assert set(record.not_scheduled) == set(record.waiting)
        assert "unknown" not in {reason.root for reason in record.not_scheduled.values()}
        num_preempted += len(record.preempted)
    assert not scheduler.has_unfinished_requests()
    assert num_preempted > 0 or limits, "the pool was never short"


@pytest.mark.parametrize("feature", [{"async_scheduling": True}, {"num_speculative_tokens": 3}], ids=str)
def test_no_policy_breaks_a_rule_of_steps_ahead(feature):
    """Random answers change when a token comes, and never which: drafts and outputs in flight stay each request's."""

    def token(request):
        return made_up_token(f"{request.request_id}:{request.num_tokens}")

    num_done = num_preempted = num_verified = 0
    for seed in range(12):
        config, arrivals = random_workload(random.Random(seed))
        config = config.replace(policy="fcfs", max_model_len=None, **feature)
        arrivals = [replace(arrival, accepts=(3, 0, 2), abort_step=None) for arrival in arrivals]
        trace = simulate_requests(config, arrivals, token, policy=Shuffled(seed), max_steps=5000)
        num_done += trace.end == "done"
        for request_id, tokens in outputs(trace).items():
            info = trace.requests[request_id]
            assert len(tokens) == info.max_tokens or trace.end == "stuck"
            first = info.num_prompt_tokens
            assert tokens == [made_up_token(f"{request_id}:{first + index}") for index in range(len(tokens))]
        for index, record in enumerate(trace):
            assert record.num_tokens <= config.token_budget and len(record.running) <= config.max_num_seqs
            assert trace.pool_state(index).consistent
            num_preempted += len(record.preempted)
            num_verified += sum(bool(chunk.drafts) for chunk in record.chunks)
    assert num_done > 6 and num_preempted
    assert bool(num_verified) is ("num_speculative_tokens" in feature)


def outputs(trace):
    tokens = {request_id: [] for request_id in trace.requests}
    for record in trace:
        for chunk in record.chunks:
            tokens[chunk.request_id] += chunk.accepted
    return tokens


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("waiting_order", lambda self, view: [*view.waiting, *view.waiting], "each once"),
        ("running_order", lambda self, view: [*view.waiting, *view.running], "requests of view.running"),
        ("waiting_order", lambda self, view: 1 / 0, "ZeroDivisionError"),
        ("waiting_order", lambda self, view: None, "TypeError"),
        ("max_chunk", lambda self, request, view: 0, "None or an integer >= 1, got 0"),
        ("victim", lambda self, view: None, "one of view.victims, got None"),
    ],
)
def test_a_wrong_answer_is_told_once_and_vllms_rule_is_used(caplog, hook, answer, message):
    policy = type("Wrong", (SchedulingPolicy,), {hook: answer})()
    fields = {"max_num_batched_tokens": 16, "num_blocks": 10, "scheduler_reserve_full_isl": False}
    wrong, plain = with_policy(policy, **fields), make_scheduler(**fields)
    for scheduler in (wrong, plain):
        for index in range(3):
            add(scheduler, f"r{index}", 12, 12)
    assert [record.chunks for record in run(wrong)] == [record.chunks for record in run(plain)]
    assert [record.message for record in caplog.records if message in record.message] != []
    assert len(caplog.records) == 1 and hook in caplog.text


@pytest.mark.parametrize(
    ("base", "meant", "written"),
    [
        (SchedulingPolicy, "waiting_order", "waiting_odrer"),
        (SchedulingPolicy, "max_chunk", "max_chunks"),
        (SchedulingPolicy, "victim", "victims"),
        (Eviction, "foresee", "forsee"),
        (Eviction, "release", "released"),
        (Router, "choose", "chose"),
    ],
)
def test_a_misspelt_method_of_a_policy_is_refused(base, meant, written):
    message = rf"Mine\.{written} is not a method of {base.__name__} \(did you mean {meant}\?\)"
    with pytest.raises(ValueError, match=message):
        type("Mine", (base,), {written: lambda self, view: None})


def test_helpers_of_a_policy_may_have_other_names():
    def answer(self, view):
        return view.waiting

    names = ("_waiting_order", "waiting_order", "place", "rank_of", "num_waiting", "order")
    made = type("Mine", (SchedulingPolicy,), {**dict.fromkeys(names, answer), "waiting_orders": ("a", "field")})
    type("MoreOfMine", (made,), {"place": answer})
    assert made().waiting_orders == ("a", "field")


def test_what_is_no_policy_is_refused():
    with pytest.raises(
        ValueError, match=r"policy must be a workbench\.scheduler\.policy\.SchedulingPolicy object, got 'x'"
    ):
        simulate({"requests": []}, policy="x")


def test_a_policys_limit_and_victim_are_in_the_record():
    class Small(SchedulingPolicy):
        def max_chunk(self, request, view):
            return 5

        def victim(self, view):
            return view.victims[0]

    scheduler = with_policy(Small(), num_blocks=8, scheduler_reserve_full_isl=False)
    add(scheduler, "a", 20, 8)
    add(scheduler, "b", 20, 8)
    records = run(scheduler)
    assert records[0].chunk("a").num_tokens == 5 and records[0].chunk("a").limited_by == "policy"
    reasons = {rid: reason for record in records for rid, reason in record.preempt_reasons.items()}
    assert reasons["b"].rule == "policy" and reasons["b"].text == "Small()"


def test_the_request_that_has_run_longest_is_no_victim(caplog):
    """Two requests that each need most of the pool: a policy that always takes it from the other never ends."""

    class First(SchedulingPolicy):
        def victim(self, view):
            return view.running[0]

    scheduler = with_policy(First(), num_blocks=8, scheduler_reserve_full_isl=False, max_num_batched_tokens=5)
    add(scheduler, "a", 20, 8)
    add(scheduler, "b", 20, 8)
    run(scheduler)
    assert "must be one of view.victims" in caplog.text


def test_shortest_remaining_first_lets_short_ones_by_and_ages():
    scheduler = with_policy(ShortestRemainingFirst(aging=20), num_blocks=400, max_num_seqs=64)
    add(scheduler, "long", 300)
    assert sizes(step(scheduler)) == {"long": 64}
    for index in range(2):
        add(scheduler, f"s{index}", 30, max_tokens=1, arrival_step=1)
    assert sizes(step(scheduler)) == {"long": 4, "s0": 30, "s1": 30}
    admitted = []
    for number in range(30):
        add(scheduler, f"t{number}", 60, max_tokens=1, arrival_step=scheduler.step)
        record = step(scheduler)
        admitted.append(sizes(record).get("long", 0))
        if "long" not in {r.request_id for r in scheduler.running if r.is_prefill}:
            break
    assert len(admitted) < 20, "a stream of short prompts held the long one off"


def test_decode_first_keeps_the_streams_even():
    scheduler = with_policy(DecodeFirst(max_prefill_tokens=10), num_blocks=400)
    add(scheduler, "long", 40)
    add(scheduler, "d", 3, max_tokens=20)
    assert sizes(step(scheduler)) == {"long": 40, "d": 3}  # nothing decodes yet
    add(scheduler, "later", 40)
    record = step(scheduler)
    assert sizes(record) == {"long": 1, "d": 1, "later": 10}
    assert record.chunk("later").limited_by == "policy"
    second = step(scheduler)
    assert list(sizes(second)) == ["long", "d", "later"]


def test_deadline_meets_more_deadlines_than_first_come_first_served():
    """The control is the same run without the policy."""
    rng = random.Random(1)
    requests, at = [], 0.0
    for index in range(60):
        at += rng.expovariate(8)
        length = rng.choice([20, 20, 20, 900])
        requests.append({"id": f"r{index}", "prompt": {"len": length}, "max_tokens": 4, "arrival_time": at})
    workload = {"config": {"max_num_batched_tokens": 128, "num_blocks": 2000, "max_num_seqs": 64}, "requests": requests}
    model = CostModel(fixed=0.005, per_prefill_token=3e-4)
    policy = Deadline(base=0.3, per_prompt_token=0.002)

    def missed(**kwargs) -> int:
        trace = simulate(workload, cost_model=model, **kwargs)
        assert trace.end == "done"
        return sum(
            request.ttft.seconds > 0.3 + 0.002 * request.num_prompt_tokens
            for request in trace.metrics().requests.values()
        )

    assert missed(policy=policy) <= missed() / 3 and missed() >= 10


def test_fork_under_a_policy_object():
    workload = {"config": {"max_num_batched_tokens": 64}, "requests": [{"id": "a", "prompt": {"len": 200}}]}
    workload["requests"].append({"id": "b", "prompt": {"len": 8}})
    trace = simulate(workload)
    forked = fork(trace, policy=ShortestRemainingFirst())
    assert [c.request_id for c in forked[0].chunks] == ["b", "a"]
    assert forked.meta.config["scheduling_policy"] == "ShortestRemainingFirst(aging=64.0)"
    with pytest.raises(ValueError, match="only be given from step 0"):
        fork(trace, 1, policy=ShortestRemainingFirst())
    assert EngineConfig.from_dict({"policy": "priority"}) == EngineConfig(policy="priority")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShortestRemainingFirst(aging=0), "aging must be > 0"),
        (lambda: DecodeFirst(max_prefill_tokens=0), "max_prefill_tokens must be >= 1"),
        (lambda: Deadline(base=-1), "base must be >= 0"),
    ],
)
def test_policies_refuse_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Meddling(SchedulingPolicy):
    """Tries to change the requests that it is shown."""

    def __init__(self, change):
        self._change = change

    def waiting_order(self, view):
        for request in view.waiting:
            self._change(request)
        return view.waiting

    def max_chunk(self, request, view):
        self._change(request)
        return None


@pytest.mark.parametrize(
    "change",
    [
        lambda request: setattr(request, "max_tokens", 10**9),
        lambda request: setattr(request, "num_kv_computed", 0),
        lambda request: request.token_ids.append(1),
        lambda request: request.block_table.clear(),
        lambda request: delattr(request, "sampling"),
        lambda request: setattr(request.sampling, "max_tokens", 10**9),
    ],
)
def test_a_policy_cannot_change_requests(change, caplog):
    workload = {"requests": [{"id": name, "prompt": {"len": 20}, "max_tokens": 3} for name in "ab"]}
    trace = simulate(workload, policy=Meddling(change))
    assert trace.end == "done" and list(trace) == list(simulate(workload))
    assert "vLLM's rule is used instead" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda view: view.kv_cache.allocate_slots(view.waiting[0], 20),
        lambda view: view.kv_cache.free(view.waiting[0]),
        lambda view: view.kv_cache.block_pool.get_new_blocks(1),
        lambda view: setattr(view.kv_cache, "num_free_blocks", 0),
        lambda view: setattr(view.kv_cache, "block_pool", None),
        lambda view: setattr(view, "kv_cache", None),
    ],
)
def test_a_policy_cannot_change_kv_blocks(change, caplog):
    class MeddlingWithBlocks(SchedulingPolicy):
        def waiting_order(self, view):
            change(view)
            return view.waiting

    workload = {"requests": [{"id": name, "prompt": {"len": 20}, "max_tokens": 3} for name in "ab"]}
    trace = simulate(workload, policy=MeddlingWithBlocks())
    assert trace.end == "done" and list(trace) == list(simulate(workload))
    assert "vLLM's rule is used instead" in caplog.text


def test_a_policy_sees_free_blocks_and_the_prefix_cache():
    seen = {}

    class Watching(SchedulingPolicy):
        def waiting_order(self, view):
            assert view.kv_cache.num_free_blocks == view.num_free_blocks
            for request in view.waiting:
                seen[request.request_id] = view.kv_cache.num_cached_tokens(request), view.num_left(request)
            return view.waiting

    prompt = {"len": 40, "seed": "same"}
    requests = [{"id": name, "prompt": prompt, "max_tokens": 2, "arrival_step": 3 * i} for i, name in enumerate("ab")]
    simulate({"config": {"block_size": 16}, "requests": requests}, policy=Watching())
    assert seen == {"a": (0, 40), "b": (32, 8)}


@pytest.mark.parametrize("problem", [SystemExit, GeneratorExit, ValueError])
def test_a_policy_that_raises_anything_does_not_end_the_run(problem, caplog):
    class Raising(SchedulingPolicy):
        def running_order(self, view):
            raise problem("no")

    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 3}]}, policy=Raising())
    assert trace.end == "done" and problem.__name__ in caplog.text


def test_ctrl_c_in_a_policy_ends_the_run():
    class Interrupted(SchedulingPolicy):
        def running_order(self, view):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 3}]}, policy=Interrupted())


class ShortChunks(SchedulingPolicy):
    """No chunk has more than ``longest`` tokens."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def max_chunk(self, request, view):
        return self.longest


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("longest", [1, 3, 7, 8, 9])
def test_a_limit_on_chunks_holds_with_recurrent_layers(longest, prefix_caching):
    groups = [{"kind": "full_attention"}, {"kind": "mamba"}]
    config = EngineConfig(
        max_num_batched_tokens=32, block_size=8, enable_prefix_caching=prefix_caching, kv_cache_groups=groups
    )
    rng = random.Random(longest)
    requests = [{"id": f"r{i}", "prompt": {"len": rng.randrange(3, 60)}, "max_tokens": 4} for i in range(6)]
    trace = simulate({"requests": requests}, config=config, policy=ShortChunks(longest))
    assert max(chunk.num_tokens for step in trace for chunk in step.chunks) <= longest
    assert trace.metrics().summary.num_finished == 6 and not trace.check()
    ends = {chunk.start + chunk.num_tokens for step in trace for chunk in step.chunks if chunk.request_id == "r0"}
    prompt = trace.requests["r0"].num_prompt_tokens
    assert not prefix_caching or ends.issuperset(range(8, prompt, 8))  # every state is reached, so that it is cached
