"""The chain of a scheduler: every place is passed on, links stand in the order of one tuple, and state is kept."""

import inspect
from importlib import import_module
from unittest.mock import sentinel

import pytest
from scheduler_helpers import make_scheduler

from workbench.config import EngineConfig
from workbench.scheduler.chain import CHAIN, PLACES, OrderOver, links_of
from workbench.scheduler.policy import PolicyOrder, SchedulingPolicy
from workbench.scheduler.queues import ServiceOrder
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler

ASKED_OF_THE_ORDER_ITSELF = {"rehearsal", "find"}
ANSWERS_ALONE = {("InFlight", "take_output"), ("InFlight", "max_in_flight")}
"""Answers that replace those of the order below."""

KINDS = [getattr(import_module(f"workbench.scheduler.{link.module}"), link.kind) for link in CHAIN]
ANSWERS = [
    (kind, place)
    for kind in KINDS
    for place in PLACES
    if getattr(kind, place) is not getattr(ServiceOrder, place) and callable(getattr(kind, place))
]


def test_every_method_of_an_order_is_a_place_or_its_own():
    methods = {name for name in vars(ServiceOrder) if not name.startswith("_")}
    assert methods - set(PLACES) == ASKED_OF_THE_ORDER_ITSELF


@pytest.mark.parametrize("place", PLACES)
def test_a_link_without_an_answer_passes_every_place_on(place):
    class Below(ServiceOrder):
        pass

    def answer(self, *given):
        return given, sentinel.answer

    is_method = callable(getattr(ServiceOrder, place))
    setattr(Below, place, answer if is_method else sentinel.answer)
    scheduler = make_scheduler()
    below = Below(scheduler.config, scheduler.queues, scheduler.kv_cache)
    link = OrderOver(scheduler, OrderOver(scheduler, below))
    copied = link.rehearsal(scheduler.queues, scheduler.kv_cache)
    for order in (link, copied):
        found = getattr(order, place)
        given = [object() for _ in inspect.signature(getattr(ServiceOrder, place)).parameters][1:] if is_method else []
        assert (found(*given) == (tuple(given), sentinel.answer)) if is_method else found is sentinel.answer
    if is_method:  # the copy asks the copy
        lowest = [order for order in (copied._order._order,) if isinstance(order, Below)]
        assert lowest and getattr(copied, place).__self__ is lowest[0] is not below


@pytest.mark.parametrize(("kind", "place"), ANSWERS)
def test_a_link_that_answers_asks_the_order_below_too(kind, place):
    code = inspect.getsource(getattr(kind, place))
    below = f"self._order.{place}(" in code or f"super().{place}(" in code
    assert below is ((kind.__name__, place) not in ANSWERS_ALONE)


def test_every_link_has_a_reason_for_its_place():
    assert len({link.kind for link in CHAIN}) == len(CHAIN) == len({link.reason for link in CHAIN})
    assert all(len(link.reason) > 20 for link in CHAIN)


def test_a_plain_scheduler_has_no_link_and_others_have_them_in_the_order_of_the_chain():
    assert type(make_scheduler().order) is ServiceOrder
    features = {"async_scheduling": True, "num_speculative_tokens": 2, "enable_chunked_prefill": False}
    scheduler = make_scheduler(**features, kv_cache_groups=[{"kind": "mamba"}], enable_prefix_caching=True)
    scheduler._link({"Frugal"})
    scheduler.add_request(Request("a", [1, 2, 3], adapter="french"))
    found = list(links_of(scheduler.order))
    assert found == [link.kind for link in CHAIN if link.kind in found]
    assert set(found) == {"StateBoundaries", "DraftRows", "WholePrompts", "AdapterSeats", "InFlight", "Frugal"}


def test_a_link_that_joins_lets_the_others_keep_what_they_know():
    scheduler = make_scheduler(max_num_partial_prefills=2)
    limits = links_of(scheduler.order)["PartialPrefills"]
    limits.num_computed = 17
    scheduler._link({"Frugal"})
    assert links_of(scheduler.order)["PartialPrefills"] is limits
    scheduler.reconfigure(scheduler.config.replace(max_num_partial_prefills=3))
    joined = links_of(scheduler.order)
    assert list(joined) == ["PartialPrefills", "Frugal"] and joined["PartialPrefills"].num_computed == 17
    scheduler.reconfigure(scheduler.config.replace(max_num_partial_prefills=None))
    assert list(links_of(scheduler.order)) == ["Frugal"]


def test_a_policy_is_found_below_the_links():
    policy = SchedulingPolicy()
    scheduler = Scheduler(EngineConfig(num_speculative_tokens=2), policy=policy)
    found = scheduler.order.find(PolicyOrder)
    assert found is not None and found.policy is policy and found is not scheduler.order
