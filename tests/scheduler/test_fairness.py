"""Fair orders keep the service of tenants even, and victims have the property that they are chosen by."""

import random

import pytest

from workbench import simulate
from workbench.scheduler.fairness import Victim, VirtualTokenCounter, WeightedFairQueueing
from workbench.trace.readings.fairness import jain_index, service


def flood(seed):
    """Tenant a sends everything at once; b and c send as much, steadily."""
    rng = random.Random(f"flood {seed}")
    requests = []
    for tenant, gap in (("a", 0.0), ("b", 0.08), ("c", 0.08)):
        for index in range(40):
            request = {"id": f"{tenant}{index}", "cache_salt": tenant, "max_tokens": rng.randint(5, 30)}
            requests.append(request | {"prompt": {"len": rng.randint(10, 60)}, "arrival_time": index * gap})
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "num_blocks": 200, "block_size": 16}
    return {"config": config, "requests": requests, "cost_model": {"fixed": 0.01}}


def salt(info):
    return info.request_id[0]


@pytest.mark.repeats(step=5)
@pytest.mark.parametrize("policy", [VirtualTokenCounter, WeightedFairQueueing])
@pytest.mark.parametrize("seed", range(6))
def test_tenants_with_requests_get_the_same(policy, seed):
    fair, unfair = (simulate(flood(seed), policy=one) for one in (policy(), None))
    assert fair.end == unfair.end == "done" and not fair.check()
    even, uneven = (jain_index(service(trace, salt, until=2.0).values()) for trace in (fair, unfair))
    assert even > 0.97 > 0.8 > uneven, (even, uneven)


def test_the_wrong_order_is_unfair():
    """Negative control: the tenant that was served most is next."""

    class Most(VirtualTokenCounter):
        def waiting_order(self, view):
            return super().waiting_order(view)[::-1]

    trace = simulate(flood(0), policy=Most())
    assert jain_index(service(trace, salt, until=2.0).values()) < 0.9


def test_a_tenant_that_was_away_does_not_catch_up():
    requests = [{"id": f"a{n}", "cache_salt": "a", "prompt": {"len": 40}, "max_tokens": 20} for n in range(60)]
    requests += [
        {"id": f"b{n}", "cache_salt": "b", "prompt": {"len": 40}, "max_tokens": 20, "arrival_time": 2.0}
        for n in range(30)
    ]
    trace = simulate(flood(0) | {"requests": requests}, policy=VirtualTokenCounter())
    before, after = (service(trace, salt, until=time) for time in (2.0, 4.0))
    assert after["b"] / (after["a"] - before["a"]) == pytest.approx(1, abs=0.25) and before["a"] > 500


def test_weights_are_shares():
    requests = [
        {"id": f"{tenant}{n}", "cache_salt": tenant, "prompt": {"len": 40}, "max_tokens": 20}
        for n in range(60)
        for tenant in "ab"
    ]
    trace = simulate(flood(0) | {"requests": requests}, policy=WeightedFairQueueing({"a": 3}))
    served = service(trace, salt, until=2.5)
    assert served["a"] / served["b"] == pytest.approx(3, rel=0.25)


class Watched(Victim):
    """A victim policy that checks itself against all candidates."""

    def victim(self, view):
        chosen = super().victim(view)
        value = {
            "least_computed": lambda request: -request.num_kv_computed,
            "most_blocks": lambda request: len(request.block_tables[0]),
            "most_left": lambda request: request.max_tokens - (request.num_tokens - request.num_prompt_tokens),
        }[self.rule]
        assert value(chosen) == max(map(value, view.victims))
        WATCHED.append(len(view.victims))
        return chosen


WATCHED = []


@pytest.mark.parametrize("rule", Victim.RULES)
def test_victims(rule):
    WATCHED.clear()
    workload = flood(1)
    workload["config"] |= {"num_blocks": 16, "max_num_seqs": 8}
    trace = simulate(workload, policy=Watched(rule))
    preempted = sum(len(step.preempted) for step in trace)
    assert trace.end == "done" and not trace.check() and len(WATCHED) >= preempted > 10


def test_the_least_computed_victim_costs_the_least():
    workload = flood(2)
    workload["config"] |= {"num_blocks": 16, "max_num_seqs": 8, "enable_prefix_caching": False}

    def recomputed(rule):
        trace = simulate(workload, policy=Victim(rule))
        return sum(chunk.num_recomputed_tokens for step in trace for chunk in step.chunks)

    assert recomputed("least_computed") < recomputed("most_blocks")


def test_what_makes_no_sense_is_refused():
    for make, message in (
        (lambda: Victim("first"), "rule must be"),
        (lambda: VirtualTokenCounter(output_weight=-1), "output_weight must be"),
        (lambda: WeightedFairQueueing({"a": 0}), "the weight of 'a' must be"),
        (lambda: jain_index([]), "needs values of 0 or more"),
        (lambda: jain_index([1, -1]), "needs values of 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
