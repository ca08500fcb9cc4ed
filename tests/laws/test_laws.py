"""The list of laws: its names, its docs, and what it says of random, recorded, sliced and faulty runs."""

import random
import re
from pathlib import Path

import pytest
from feature_workloads import KINDS, random_workload
from law_runs import checked_run, checked_workload
from msgspec import structs
from scheduler_helpers import add, make_scheduler, run, step
from scheduler_helpers import random_workload as plain_workload

from workbench import Trace, simulate
from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.arrivals import Arrival
from workbench.trace.laws import EXCEPTIONS, LAWS, RULES, Broken, Checker, LawError, Limits

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "tests" / "data" / "vllm-recorded").rglob("*.jsonl.gz"))
BUNDLED = [*(ROOT / "notebooks" / "data").glob("*.jsonl.gz"), ROOT / "docs" / "data" / "run.jsonl.gz"]
NAMES = "blocks content progress counters limits order exactly_once utilisation crash"


def test_the_list_is_whole():
    names = [law.name for law in LAWS]
    assert sorted(names) == sorted(NAMES.split())
    assert {rule.law for rule in RULES} == set(names) - {"crash"}
    assert [rule.law for rule in RULES] == sorted((rule.law for rule in RULES), key=names.index)
    assert {exception.law for exception in EXCEPTIONS} <= set(names)


def test_the_docs_list_each_law_and_each_exception():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", (ROOT / "docs" / "laws.md").read_text(), re.MULTILINE)
    assert rows == [tuple(law) for law in LAWS]
    limits = (ROOT / "docs" / "limits.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", limits, re.MULTILINE)
    assert listed == [tuple(exception) for exception in EXCEPTIONS]


@pytest.mark.parametrize("path", [*RECORDED, *BUNDLED], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_recorded_runs_keep_the_laws(path):
    """Every step is also checked in slices and in a run that was cut off."""
    trace = Trace.load(path)
    assert trace.check() == []
    for first in range(0, len(trace), 1 + len(trace) // 4):
        assert trace[first:].check() == trace[first : first + 9].check() == []


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_random_runs_keep_the_laws(kind):
    for index in range(3):
        trace = simulate(random_workload(kind, random.Random(f"slices:{kind}:{index}")), max_steps=300)
        for first in range(0, len(trace), 7):
            assert trace[first:].check() == trace[first : first + 5].check() == []


@pytest.mark.parametrize("fields", [{}, {"async_scheduling": True}, {"max_num_partial_prefills": 2}])
def test_random_runs_under_pressure_keep_the_laws(fields):
    for index in range(15):
        config, arrivals = plain_workload(random.Random(f"laws:{index}"))
        trace, broken = checked_run(config.replace(**fields), arrivals, max_steps=600)
        assert not broken and trace.check() == [] and trace.end == "done"


# -- named exceptions ------------------------------------------------------------------------------------------


def as_recorded(trace: Trace) -> Trace:
    """The same run as a recording of another scheduler."""
    recorded = Trace(structs.replace(trace.meta, source="vllm 0.33.0"))
    for info in trace.requests.values():
        recorded.add_request(info)
    for record in trace:
        recorded.append(record)
    return recorded


def short_requests(**fields):
    return {
        "config": {"max_num_seqs": 1, **fields},
        "requests": [{"id": f"r{i}", "prompt": {"len": 4}, "max_tokens": 1, "priority": 5 - i} for i in range(4)],
    }


def test_finished_rows_that_keep_seats_are_reported_for_others():
    trace = simulate(short_requests(async_scheduling=True))
    assert trace.check() == []
    broken = as_recorded(trace).check()
    assert {each.exception for each in broken} == {"finished_rows_keep_seats"} == {each.exception for each in broken}
    assert {each.law for each in broken} == {"utilisation"}


def test_a_priority_that_waits_at_full_seats_is_reported_for_others():
    workload = short_requests(policy="priority")
    for index, request in enumerate(workload["requests"]):
        request |= {"arrival_step": index, "max_tokens": 5}
    trace = simulate(workload)
    assert trace.check() == []
    assert {(each.law, each.exception) for each in as_recorded(trace).check()} == {
        ("order", "priority_waits_at_full_seats")
    }


def test_a_newcomer_before_a_preempted_request_is_reported_for_others():
    """It has the same priority and an earlier time of arrival."""
    scheduler = make_scheduler(policy="priority", num_blocks=7)
    scheduler.checker._allowed = []
    add(scheduler, "urgent", 8, 12, priority=0)
    add(scheduler, "preempted", 8, 8, priority=5, arrival_time=7.0)
    with pytest.raises(LawError, match="preempted_behind_newcomers") as told:
        while scheduler.has_unfinished_requests():
            if scheduler.step == 3:
                add(scheduler, "new", 2, 9, priority=5, arrival_time=1.0)
                scheduler.max_running = 2
            step(scheduler)
    assert [(each.law, each.request_id) for each in told.value.broken] == [("order", "preempted")]


# -- findings --------------------------------------------------------------------------------------------------


def test_a_broken_law_raises_with_step_and_request(monkeypatch):
    monkeypatch.setattr(Scheduler, "_long_prefill_cap", lambda self: 3)
    monkeypatch.setattr(
        "workbench.scheduler.queues.ServiceOrder.limit_chunk",
        lambda self, plan, batch: plan.limit_to_step(),
    )
    scheduler = make_scheduler(long_prefill_token_threshold=3)
    add(scheduler, "a", 9)
    with pytest.raises(
        LawError, match=r"step 0, request 'a': limits: a chunk is too long: its chunk has 9 tokens"
    ) as told:
        step(scheduler)
    assert told.value.broken == (Broken("limits", 0, "a", told.value.broken[0].message),)


def test_a_corrupted_table_is_seen():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 9)
    step(scheduler)
    request.block_table[0] = 60
    with pytest.raises(LawError, match=r"block tables are \[\[60, 2, 3\]\], its steps make them \[\[1, 2, 3\]\]"):
        step(scheduler)


def test_a_rehearsal_is_not_checked():
    scheduler = make_scheduler()
    add(scheduler, "a", 9)
    assert scheduler.peek_next_batch() == (True, 9)
    run(scheduler)
    assert scheduler.checker.broken == []


def test_a_stuck_trace_is_reported():
    config = {"num_blocks": 6, "block_size": 4, "scheduler_reserve_full_isl": True}
    trace = simulate({"config": config, "requests": [{"id": "a", "prompt": {"len": 4}, "max_tokens": 2}]})
    trace.end = "stuck"
    assert [(each.law, each.request_id) for each in trace.check()] in ([], [("progress", "a")])


def test_each_changed_number_of_a_record_is_seen():
    """A random field of a random record is changed; most such traces break a law, and never the check itself."""
    rng, seen = random.Random(3), 0
    for index in range(60):
        workload = random_workload(rng.choice(KINDS), random.Random(f"changed:{index}"))
        try:
            trace = simulate(workload, max_steps=60, as_vllm=True)
        except RuntimeError:  # an assertion that ends vLLM, too
            continue
        place = rng.randrange(len(trace))
        record = trace[place]
        changes = {
            "free_blocks": record.free_blocks + 1,
            "running": record.running[:-1],
            "waiting": record.waiting[::-1],
            "finish_reasons": {},
            "chunks": record.chunks[1:],
            "preempted": (*record.preempted, *record.running[:1]),
        }
        name = rng.choice([name for name, value in changes.items() if value != getattr(record, name)])
        changed = structs.replace(record, **{name: changes[name]})
        changed.__dict__.update(record.__dict__)
        if name == "chunks":
            for attached in ("_tables", "_table_lengths", "_other_tables"):
                if attached in changed.__dict__:
                    changed.__dict__[attached] = changed.__dict__[attached][1:]
        trace._steps[place] = changed
        seen += bool(trace.check())
    assert seen >= 50


def test_laws_can_be_chosen():
    with pytest.raises(ValueError, match="laws names 'speed'; the laws are crash, blocks"):
        Checker(Limits.of({}), laws=["speed"])
    arrivals = [Arrival("a", [1] * 9, SamplingParams(max_tokens=3))]
    assert checked_run(EngineConfig(num_blocks=9), arrivals)[1] == []
    assert checked_workload(short_requests())[1] == []


# -- other schedulers ------------------------------------------------------------------------------------------


class WithoutChanges:
    """A step, or a chunk of it, that does not name the changes of block tables and of the pool."""

    NAMES = ("new_block_ids", "removed", "other_groups", "pool", "pool_end", "cached_block_ids", "num_cached_end")

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name in self.NAMES:
            raise AttributeError(name)
        value = getattr(self.inner, name)
        return [WithoutChanges(chunk) for chunk in value] if name == "chunks" else value


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_whose_steps_do_not_name_changes_is_checked_by_its_state(kind, monkeypatch):
    """The laws hold, and a freed block that stays in a table is seen."""
    scheduled, updated = Checker.scheduled, Checker.updated

    def make(self, limits, **options):
        original(self, limits, **options, names_changes=False)

    original = Checker.__init__
    monkeypatch.setattr(Checker, "__init__", make)
    monkeypatch.setattr(Checker, "scheduled", lambda self, step, state: scheduled(self, WithoutChanges(step), state))
    monkeypatch.setattr(
        Checker,
        "updated",
        lambda self, done, latest, ended, state, **failed: updated(
            self, WithoutChanges(done), WithoutChanges(latest), ended, state, **failed
        ),
    )
    workloads = [random_workload(kind, random.Random(f"plans:{kind}:{index}")) for index in range(6)]
    assert not any(checked_workload(workload)[1] for workload in workloads)
    monkeypatch.setattr(KVCacheManager, "free", lambda self, request, **options: None)
    assert all(broken[0].law == "blocks" for workload in workloads if (broken := checked_workload(workload)[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_records_alone_are_checked_step_by_step(kind):
    """The first record that was changed is the one whose step breaks a law."""
    trace = simulate(random_workload(kind, random.Random(f"alone:{kind}")), max_steps=60)
    for changed in (None, len(trace) // 2):
        checker, broken = Checker(Limits.of(trace.config)), []
        for record in trace:
            for name in record.arrived:
                checker.add(trace.requests[name])
            if record.step == changed:
                record = structs.replace(record, free_blocks=record.free_blocks + 1)
            broken += checker.step(record)
        assert [each.step for each in broken][:1] == ([] if changed is None else [changed])
        assert broken == checker.broken
