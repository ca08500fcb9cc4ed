"""The built-in scheduling policies are judged by their own rules, unless the law of order is left out."""

import pytest
from test_hunt_evictions import first_fault

from workbench.analysis.hunt.target import find_target
from workbench.scheduler.eviction import Lfu
from workbench.scheduler.policies import Deadline, DecodeFirst, ShortestRemainingFirst, _ByPlace
from workbench.scheduler.policy import PolicyView, SchedulingPolicy

NUM_LEFT, DUE = PolicyView.num_left, Deadline.due
POLICIES = {kind.__name__: kind for kind in (ShortestRemainingFirst, DecodeFirst, Deadline)}


def hunted(kind):
    return find_target("workbench", f"workbench.scheduler.policies:{kind.__name__}")


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_their_orders(name):
    assert first_fault(hunted(POLICIES[name]), None, 60) is None


@pytest.mark.parametrize(
    "kind, owner, name, planted",
    [
        (ShortestRemainingFirst, PolicyView, "num_left", lambda self, request: -NUM_LEFT(self, request)),
        (ShortestRemainingFirst, _ByPlace, "running_order", lambda self, view: list(view.running)),
        (ShortestRemainingFirst, _ByPlace, "waiting_order", lambda self, view: list(view.waiting)),
        (ShortestRemainingFirst, _ByPlace, "waiting_order", lambda self, view: list(view.waiting[1:])),
        (ShortestRemainingFirst, _ByPlace, "max_chunk", lambda self, request, view: 1),
        (DecodeFirst, DecodeFirst, "running_order", lambda self, view: list(view.running)),
        (DecodeFirst, DecodeFirst, "max_chunk", lambda self, request, view: None),
        (DecodeFirst, SchedulingPolicy, "waiting_order", lambda self, view: view.waiting[::-1]),
        (Deadline, Deadline, "due", lambda self, request: -DUE(self, request)),
        (Deadline, Deadline, "victim", lambda self, view: min(view.victims, key=self.due)),
    ],
)
def test_a_planted_fault_of_a_policy_is_found(kind, owner, name, planted, monkeypatch):
    monkeypatch.setattr(owner, name, planted)
    fault = first_fault(hunted(kind), ["order"], 400)
    assert fault.law == "order" and fault.place == "a policy breaks its own rule" and kind.__name__ in fault.message


def test_a_law_that_is_left_out_judges_no_policy(monkeypatch):
    monkeypatch.setattr(Deadline, "due", lambda self, request: -DUE(self, request))
    assert first_fault(hunted(Deadline), ["progress", "limits"], 60) is None
    monkeypatch.setattr(Lfu, "cache", lambda self, block, digest: None)
    assert first_fault(find_target("workbench"), ["progress", "limits"], 60, eviction="lfu") is None
