"""A fleet is its replicas: one behind any router is `simulate`, several with round robin are as many simulations."""

import random
from types import SimpleNamespace

import pytest

from workbench import EngineConfig, simulate, simulate_fleet
from workbench.analysis.fleet import replica
from workbench.analysis.fleet.hashing import furc_hashes, session_hash, session_hashes
from workbench.analysis.fleet.prefix_tree import PrefixTree
from workbench.analysis.fleet.routers import ROUTERS, CacheAware, ConsistentHash, Decision, Router, Sticky
from workbench.simulation.arrivals import timed_arrival
from workbench.simulation.costs.cost_model import CostModel

from .workloads import random_workload

CLOCKS = pytest.mark.parametrize("timed", [False, True], ids=["steps", "clock"])


def servable(timed, count):
    """Random workloads with their simulations by one engine."""
    found = 0
    for seed in range(10 * count):
        workload = random_workload(seed, timed)
        try:
            trace = simulate(workload)
        except ValueError:  # no schedule can serve a request
            continue
        yield seed, workload, trace
        found += 1
        if found == count:
            return
    raise AssertionError("too few workloads can be served")


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("requests", [[], [{"id": "a", "prompt": {"len": 9}, "max_tokens": 2}]])
def test_a_notebook_shows_every_run(requests, timed):
    run = simulate_fleet({"requests": requests, **({"cost_model": {"fixed": 0.1}} if timed else {})}, replicas=2)
    assert ("<svg" in run._repr_html_()) == (timed and bool(requests))


@pytest.mark.repeats(step=2)
@CLOCKS
def test_one_replica_behind_any_router_is_a_simulation(timed):
    for seed, workload, trace in servable(timed, 12):
        for router in ROUTERS:
            run = simulate_fleet(workload, replicas=1, router=router)
            assert list(run.traces[0]) == list(trace), (seed, router)
            assert run.traces[0].end == trace.end and run.traces[0].requests == trace.requests


def test_one_replica_sees_requests_of_one_moment_together():
    """Also if it waited for them, and again after a pause."""
    requests = [{"id": f"r{i}", "prompt": {"len": 20}, "arrival_time": [1.7, 9.0][i // 4]} for i in range(8)]
    workload = {"requests": requests, "cost_model": {"fixed": 0.1}}
    for router in ROUTERS:
        assert list(simulate_fleet(workload, replicas=1, router=router).traces[0]) == list(simulate(workload)), router


@pytest.mark.repeats(step=2)
@CLOCKS
@pytest.mark.parametrize("replicas", [2, 3])
def test_round_robin_is_a_simulation_of_each_part(timed, replicas):
    for seed, workload, _ in servable(timed, 12):
        run = simulate_fleet(workload, replicas=replicas)
        for index, trace in enumerate(run.traces):
            part = simulate(workload | {"requests": workload["requests"][index::replicas]})
            assert len(part) == len(trace), (seed, index)
            for ours, theirs in zip(trace, part):
                assert (ours.chunks, ours.time, ours.end, ours.cached_block_ids) == (
                    theirs.chunks,
                    theirs.time,
                    theirs.end,
                    theirs.cached_block_ids,
                ), (seed, index, ours.step)


def test_another_split_is_seen():
    """Negative control of the test above: two requests change places."""
    _, workload, _ = next(iter(servable(True, 1)))
    run = simulate_fleet(workload, replicas=2)
    requests = workload["requests"]
    part = simulate(workload | {"requests": [requests[1], *requests[2::2]]})
    assert [step.chunks for step in part] != [step.chunks for step in run.traces[0]]


def test_loads_are_those_of_the_moment_of_arrival():
    """Recounted from the traces: what had been sent before, and got its last token later."""
    for seed, workload, _ in servable(True, 10):
        for request in workload["requests"]:
            request.pop("abort_step", None)
        run = simulate_fleet(workload, replicas=3, router="least_loaded", seed=seed)
        ends = [
            {chunk.request_id: step.end for step in trace for chunk in step.chunks if chunk.accepted}
            for trace in run.traces
        ]
        sent = []
        for choice in run.choices.values():
            loads = [
                sum(replica == index and ends[index][name] > choice.time for name, replica in sent)
                for index in range(3)
            ]
            assert choice.scores == tuple(loads) and choice.replica == loads.index(min(loads))
            sent.append((choice.request_id, choice.replica))


def test_prefixes_are_those_of_the_replicas_steps_that_have_ended():
    """The score of the prefix router, from the hits that a request would have had in its replica's own pool."""
    for _, workload, _ in servable(True, 10):
        run = simulate_fleet(workload, replicas=2, router="prefix")
        hits = {
            chunk.request_id: chunk.num_cached_tokens
            for trace in run.traces
            for step in trace
            for chunk in step.chunks
            if chunk.num_cached_tokens and chunk.start == chunk.num_cached_tokens
        }
        assert hits  # requests share prefixes, and go where they are
        for choice in run.choices.values():
            assert choice.replica == choice.scores.index(min(choice.scores))


def test_replicas_may_differ():
    requests = [{"id": f"r{i}", "prompt": {"len": 40}, "max_tokens": 2} for i in range(4)]
    configs = [EngineConfig(max_num_batched_tokens=16), {"max_num_batched_tokens": 64}]
    run = simulate_fleet({"requests": requests}, replicas=configs)
    assert [trace.meta.config["max_num_batched_tokens"] for trace in run.traces] == [16, 64]
    models = [CostModel(fixed=0.01), CostModel(fixed=0.03)]
    run = simulate_fleet({"requests": requests}, replicas=2, cost_model=models)
    assert [trace[0].duration for trace in run.traces] == pytest.approx([0.01, 0.03])


def test_a_run_is_the_same_again_and_another_seed_differs():
    _, workload, _ = next(iter(servable(True, 1)))
    for router in ("random", "power_of_two"):
        first, again, other = (simulate_fleet(workload, replicas=3, router=router, seed=seed) for seed in (1, 1, 2))
        assert first.assignments == again.assignments != other.assignments


@CLOCKS
def test_aborted_requests_are_counted_apart_from_those_that_got_an_answer(timed):
    seen = 0
    for _, workload, _ in servable(timed, 6):
        run = simulate_fleet(workload, replicas=2)
        aborted = sum(len(step.aborted) for trace in run.traces for step in trace)
        ended = aborted + sum(len(step.finished) for trace in run.traces for step in trace)
        requests = "request" if len(run.choices) == 1 else "requests"
        said = f": {ended} of {len(run.choices)} {requests} ended{f' ({aborted} aborted)' if aborted else ''} in "
        assert said in str(run).splitlines()[0]
        seen += aborted > 0
    assert seen


def test_metrics_are_those_of_all_replicas():
    _, workload, _ = next(iter(servable(True, 1)))
    run = simulate_fleet(workload, replicas=3, router="sticky")
    whole = run.metrics().summary
    parts = [trace.metrics().summary for trace in run.traces]
    assert whole.num_requests == sum(part.num_requests for part in parts) == len(workload["requests"])
    assert whole.num_output_tokens == sum(part.num_output_tokens for part in parts)
    assert sum(run.shares) == pytest.approx(1)
    assert "sticky, 3 replicas" in repr(run) and len(repr(run).splitlines()) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 0}, "replicas must be"),
        ({"replicas": []}, "the number of replicas must be"),
        ({"router": "fastest"}, "router must be one of round_robin, "),
        ({"names": ["a"]}, "names must be 2 different strings"),
        ({"names": ["a", "a"]}, "names must be 2 different strings"),
        ({"cost_model": [CostModel(fixed=0.01)]}, "one for each of the 2 replicas, got 1"),
        ({"router": "prefix", "config": {"enable_prefix_caching": False}}, "reads prefix caches"),
        ({"config": {"num_blocks": 2, "block_size": 4}}, "r0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        simulate_fleet({"requests": [{"id": "r0", "prompt": {"len": 20}, "max_tokens": 2}]}, **changes)


def test_belady_knows_what_is_sent_to_each_replica():
    _, workload, _ = next(iter(servable(True, 1)))
    run = simulate_fleet(workload, replicas=2, config={"eviction": "belady"})
    for index, trace in enumerate(run.traces):
        part = simulate(workload | {"requests": workload["requests"][index::2]}, config={"eviction": "belady"})
        assert [step.chunks for step in trace] == [step.chunks for step in part]
    with pytest.raises(ValueError, match="where 'prefix' sends them is not known"):
        simulate_fleet(workload, replicas=2, router="prefix", config={"eviction": "belady"})


def test_a_request_that_comes_after_the_last_step_is_not_waited_for():
    requests = [
        {"id": f"r{n}", "prompt": {"len": 5}, "max_tokens": 9, "arrival_step": n * 1_000_000_000} for n in (0, 1)
    ]
    expected = simulate({"requests": requests}, max_steps=5)
    run = simulate_fleet({"requests": requests}, replicas=1, router="least_loaded", max_steps=5)
    assert list(run.traces[0]) == list(expected) and run.traces[0].end == expected.end == "max_steps"


def test_a_router_of_ones_own():
    class ByLength(Router):
        scores = "length"

        def choose(self, request, replicas):
            return self.lowest(
                [abs(len(request.prompt_token_ids) - 10 * replica.index) for replica in replicas], "nearest"
            )

    requests = [{"id": f"r{n}", "prompt": {"len": n}} for n in (1, 9, 21, 14)]
    run = simulate_fleet({"requests": requests}, replicas=3, router=ByLength())
    assert list(run.assignments.values()) == [0, 1, 2, 1]
    assert str(run.choices["r14"]) == "r14 went to replica 1: nearest; length: 14, 4, 6"


def test_a_prompt_is_hashed_once_for_all_replicas(monkeypatch):
    hashed = []
    extend = replica.extend_block_hashes
    monkeypatch.setattr(replica, "extend_block_hashes", lambda *given: (hashed.append(given), extend(*given)))
    requests = [{"id": f"r{n}", "prompt": {"len": 100}, "arrival_step": n} for n in range(6)]
    simulate_fleet({"requests": requests}, replicas=4, router="prefix")
    assert len(hashed) == 6
    sizes = [{"block_size": size} for size in (16, 16, 32, 32)]
    simulate_fleet({"requests": requests}, replicas=sizes, router="prefix")
    assert len(hashed) == 18


def test_cache_aware_loses_to_round_robin_when_all_prompts_begin_alike():
    """As in sglang issue 21199: a long system prompt is a match anywhere, and so one replica gets nearly everything.

    The difference of loads at which the router turns away from the match is never reached.
    """
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"parts": [{"len": 600, "seed": "system"}, {"len": 400}]},
            "max_tokens": 60,
            "arrival_time": n / 8,
        }
        for n in range(120)
    ]
    workload = {"requests": requests, "cost_model": {"fixed": 0.02, "per_row": 2e-4}}

    def run(router):
        found = simulate_fleet(workload, replicas=4, router=router, config={"max_num_seqs": 16, "num_blocks": 4000})
        return found, found.metrics().summary.ttft.mean

    (even, best), (uneven, worst), (mended, better) = map(
        run, ("round_robin", "cache_aware", CacheAware(balance_abs_threshold=2, balance_rel_threshold=1.1))
    )
    assert worst > 2 * best and better < 1.2 * best
    rules = [choice.rule for choice in uneven.choices.values()]
    assert rules.count("prefix") > 100 and max(uneven.shares) > 0.8 and max(even.shares) == 0.25
    loads = sum("out of balance" in choice.rule for choice in mended.choices.values())
    assert loads > 5 and max(mended.shares) < 0.5


# -- the rules of vllm-router 0.1.17, as it was seen to decide ------------------------------------------------------


def send(router, request, replicas):
    """Let a router decide, and remember what it decided."""
    decision = router.choose(request, replicas)
    router.sent(request, decision.replica)
    return decision


ADDRESSES = [f"http://127.0.0.1:{port}" for port in (28111, 28112, 28113)]
SESSIONS = [f"session-{i * i % 23}" for i in range(40)]


@pytest.mark.parametrize(
    ("router", "seen"),
    [
        (ConsistentHash, "2020100211111111200102020201002111111112"),
        (Sticky, "2011201022100122010211020112010221001220"),
    ],
)
def test_sessions_go_where_the_real_router_sent_them(router, seen):
    made = router()
    made.start(ADDRESSES, 0)
    requests = [timed_arrival(f"r{i}", [1], 1, i / 10) for i in range(40)]
    requests = [
        SimpleNamespace(request_id=r.request_id, session=s, arrives_at=r.arrives_at) for r, s in zip(requests, SESSIONS)
    ]
    assert "".join(str(send(made, request, [None] * 3).replica) for request in requests) == seen


def test_a_hash_has_few_movers_when_a_place_is_added():
    keys = [b"k%04d" % i for i in range(2000)]
    before, after = (furc_hashes(keys, places) for places in (9, 10))
    moved = [(old, new) for old, new in zip(before, after) if old != new]
    assert {new for _, new in moved} == {9} and 120 < len(moved) < 280


def test_keys_that_are_hashed_together_have_their_own_hashes():
    rng = random.Random(4)
    keys = ["".join(rng.choices("abcé:/-012", k=rng.randrange(30))) for _ in range(1500)]
    assert session_hashes(keys) == [session_hash(key) for key in keys]
    assert session_hash("header:x-session-id:s1") == 16498100620886937149  # of an implementation key by key


def test_a_session_is_forgotten_and_counts_no_more():
    router = Sticky(expires_after=100)
    router.start(["a", "b"], 0)

    def ask(session, time):
        return send(router, SimpleNamespace(request_id="x", session=session, arrives_at=time), [None] * 2)[:3]

    first, *_ = ask("s1", 0.0)
    assert ask("s1", 50.0) == (first, tuple(int(i == first) for i in range(2)), "known session")
    assert sum(ask("s2", 160.0)[1]) == 0  # after a sweep
    assert ask("s1", 161.0)[2] == "new session"


def test_prefix_tree_finds_the_longest_common_prefix():
    rng = random.Random(0)
    tree, inserted = PrefixTree(), []
    for _ in range(400):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        expected = max((len(common(prompt, other)) for other in inserted), default=0)
        assert tree.match(prompt) == expected
        tree.insert(prompt)
        inserted.append(prompt)
        assert tree.num_tokens == len({tuple(p[:n]) for p in inserted for n in range(1, len(p) + 1)})


def common(first, second):
    shared = []
    for left, right in zip(first, second):
        if left != right:
            break
        shared.append(left)
    return shared


def test_a_tree_is_cut_back_from_its_oldest_leaves():
    tree = PrefixTree()
    tree.insert([1, 2, 3, 4])
    tree.insert([1, 2, 5, 6])
    tree.insert([1, 2, 3, 4])
    tree.evict(4)
    assert tree.num_tokens == 4 and tree.match([1, 2, 5, 6]) == 2 and tree.match([1, 2, 3, 4]) == 4


def test_a_fleet_says_why_one_replica_got_most_requests():
    """The smallest share of a prompt that was sent before, and the largest difference of loads, from the prompts."""
    rng = random.Random(2)
    requests = [
        {
            "id": f"r{n}",
            "prompt": {"parts": [{"len": 90 + 10 * rng.randrange(5), "seed": "system"}, {"len": rng.randint(9, 60)}]},
            "max_tokens": rng.randint(2, 30),
            "arrival_time": n / 20,
        }
        for n in range(40)
    ]
    workload = {"requests": requests, "cost_model": {"fixed": 0.02}, "config": {"num_blocks": 900}}
    run = simulate_fleet(workload, replicas=3, router="cache_aware")
    (trace,) = [trace for trace in run.traces if trace.requests]
    infos = list(trace.requests.values())
    prompts = [tuple(info.prompt_token_ids) for info in infos]

    def shared(one, other):
        return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))

    shares = [max(shared(own, before) for before in prompts[:n]) / len(own) for n, own in enumerate(prompts) if n]
    ends = {request_id: step.end for step in trace for request_id in step.finished}
    in_flight = [sum(ends[other.request_id] > info.arrival_time for other in infos[:n]) for n, info in enumerate(infos)]
    assert run.concentration == (
        f"cache_aware sent all 40 requests to replica 0. 39 of them shared {min(shares):.0%} or more of their prompt "
        f"with one that was sent there before; cache_threshold is 0.3. The loads, in requests in flight, counted as "
        f"balanced: the largest difference was {max(in_flight)}, and balance_abs_threshold is 64."
    )
    for router in ("round_robin", "sticky", CacheAware(balance_abs_threshold=1, balance_rel_threshold=1.1)):
        assert simulate_fleet(workload, replicas=3, router=router).concentration == ""
    assert simulate_fleet(workload, replicas=1, router="cache_aware").concentration == "", "there is no other"
    assert simulate_fleet({"requests": []}, replicas=3, router="cache_aware").concentration == ""
    alone = {"requests": [{**each, "session": "s"} for each in requests[:9]], "config": {"num_blocks": 900}}
    assert simulate_fleet(alone, replicas=3, router="sticky").concentration.startswith("sticky sent all 9 requests to")


def test_cache_aware_says_which_threshold_let_loads_differ():
    far = [Decision(0, (0.9, 0.1), "prefix", loads) for loads in ((70, 50), (151, 101), (9, 9))]
    told = CacheAware(balance_abs_threshold=30).why_together(far)
    assert "the highest was never above 1.5 times the lowest, which is balance_rel_threshold" in told
    assert "the largest difference was 50, and balance_abs_threshold is 64" in CacheAware().why_together(far)
    assert CacheAware().why_together([far[0], *[Decision(0, (), "loads of 0 to 9 are out of balance")] * 2]) == ""


def test_cache_aware_turns_to_loads_when_they_differ_too_much():
    router = CacheAware(balance_abs_threshold=2, balance_rel_threshold=1.5, cache_threshold=0.5)
    router.start(["a", "b"], 0)

    def ask(prompt, *loads):
        views = [SimpleNamespace(index=index, num_in_flight=load) for index, load in enumerate(loads)]
        decision = send(router, timed_arrival("r", prompt, 1, 0.0), views)
        assert decision.loads == loads
        return decision[:3]

    assert ask([1] * 8, 0, 0) == (0, (0.0, 0.0), "no prefix is long enough")
    assert ask([1] * 8, 2, 0) == (0, (1.0, 0.0), "prefix")
    assert ask([1] * 8, 3, 0) == (1, (1.0, 0.0), "loads of 0 to 3 are out of balance")
    assert ask([1] * 3 + [2] * 5, 1, 0)[2] == "no prefix is long enough"
