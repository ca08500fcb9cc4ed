"""Meetings of events: which are counted, and that a hunt changes the workloads that had rare ones."""

import random
from pathlib import Path
from types import SimpleNamespace

from workbench.analysis.hunt.drive import Plan, PlannedChunk
from workbench.analysis.hunt.meetings import EVENTS, Corpus, Meetings
from workbench.analysis.hunt.search import Search
from workbench.analysis.hunt.target import find_target
from workbench.analysis.hunt.workloads import CONFIG_BYTES, WORKLOAD_BYTES


def run_of(in_flight=(), free=1):
    scheduler = SimpleNamespace(block_tables=lambda name: [[1]], free_blocks=lambda: free)
    run = SimpleNamespace(in_flight=in_flight, scheduler=scheduler, config={"max_num_batched_tokens": 8})
    run.num_free = lambda: free
    return run


def met(meetings):
    """Pairs by their names: (same request, steps apart, event, earlier event)."""
    return {
        (key[0] == 1, key[1], EVENTS[key[2]], EVENTS[other])
        for of_context in meetings._seen.values()
        for key, mask in of_context.items()
        if key[0] < 2
        for other in range(len(EVENTS))
        if mask >> other & 1
    }


def plan(step, names, **changes):
    made = Plan([PlannedChunk(name, 0, 1, samples=True) for name in names], [], step=step)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_preemption_meets_what_happened_up_to_two_steps_before():
    meetings = Meetings()
    meetings.begin({})
    meetings.scheduled(run_of(), plan(0, "ab", admitted=["a", "b"]))
    meetings.scheduled(run_of(), plan(1, "b", preempted=["a"]))
    meetings.scheduled(run_of(), plan(2, "b"))
    meetings.scheduled(run_of(), plan(3, "", aborted=("b",)))
    meetings.finish()
    pairs = met(meetings)
    assert (True, 1, "is preempted", "is admitted") in pairs
    assert (False, 2, "is aborted", "is preempted") in pairs and (True, 2, "is aborted", "is preempted") not in pairs
    assert (False, 0, "is preempted", "decodes") in pairs and (True, 0, "is preempted", "decodes") not in pairs
    assert not [pair for pair in pairs if pair[1:] == (3, "is aborted", "is admitted")]


def test_a_request_that_loses_its_output_is_seen():
    meetings = Meetings()
    meetings.begin({"async_scheduling": True})
    meetings.scheduled(run_of(), plan(0, "a", admitted=["a"]))
    meetings.scheduled(run_of(in_flight=[plan(0, "a")], free=0), plan(1, "", preempted=["a"]))
    meetings.finish()
    assert (True, 0, "loses an output in flight", "is preempted") in met(meetings)
    assert (True, 0, "finds the pool empty", "is preempted") in met(meetings)


def test_the_fate_of_drafts_is_seen():
    meetings = Meetings()
    meetings.begin({})
    made = plan(0, "abc")
    for chunk, accepted in zip(made.chunks, (0, 1, 2)):
        chunk.drafts, chunk.num_accepted = (1, 2), accepted
    meetings.scheduled(run_of(), made)
    meetings.updated(made, {"a": "stop", "b": "length"})
    meetings.finish()
    pairs = {pair[2:] for pair in met(meetings) if pair[0] and pair[1] == 0}
    assert {("stops", "has all drafts rejected"), ("reaches its last token", "has some drafts accepted")} <= pairs
    assert ("has drafts", "has all drafts accepted") in pairs


def test_a_pair_that_few_runs_met_is_rare():
    meetings = Meetings()
    for times in range(1, 4):
        meetings.begin({})
        meetings.scheduled(run_of(), plan(0, "a"))
        meetings.finish()
        assert meetings.is_rare is (times == 1) and meetings.times(meetings.rarest) == times
    pairs, triples = meetings.count()
    assert pairs > 0 and triples >= 0 and meetings.count_in_settings() == pairs
    meetings.begin({"num_speculative_tokens": 2})  # the same events with drafts are another meeting
    meetings.scheduled(run_of(), plan(0, "a"))
    meetings.finish()
    assert meetings.is_rare and meetings.count() == (pairs, triples) and meetings.count_in_settings() == 2 * pairs
    meetings.begin({})
    meetings.finish()
    assert meetings.rarest is None and not meetings.is_rare


def test_a_changed_workload_is_near_a_kept_one():
    corpus = Corpus(0)
    kept = [bytes([number]) * WORKLOAD_BYTES for number in (1, 2)]
    for each in kept:
        corpus.keep(each)
    changed = [corpus.changed(lambda pair: 0) for _ in range(200)]
    assert all(len(each) == WORKLOAD_BYTES and each not in kept for each in changed)
    distance = [min(sum(a != b for a, b in zip(each, one)) for one in kept) for each in changed]
    assert min(distance) == 1 and max(distance) <= CONFIG_BYTES + 8


def test_the_workload_with_the_rarest_pair_is_changed():
    corpus = Corpus(0)
    for number, pair in ((1, "often"), (2, "seldom")):
        corpus.keep(bytes([number]) * WORKLOAD_BYTES, pair)
    changed = [corpus.changed({"often": 9, "seldom": 1}.get) for _ in range(100)]
    assert sum(each.count(2) > each.count(1) for each in changed) > 90


def test_a_hunt_keeps_and_changes_workloads_with_rare_meetings(monkeypatch):
    changed = []
    original = Corpus.changed
    monkeypatch.setattr(Corpus, "changed", lambda self, times: changed.append(original(self, times)) or changed[-1])
    search = Search(find_target("workbench"), None, 600, guided=True)
    assert search.run() == [] and search.num_workloads == 600
    assert 100 <= len(changed) <= 350 and search.meetings.count()[0] > 1000
    changed.clear()
    assert Search(find_target("workbench"), None, 300, guided=False).run() == [] and changed == []


def test_a_fault_of_a_changed_workload_is_kept_and_remembered(tmp_path, monkeypatch):
    original = Corpus.changed
    changed = []
    monkeypatch.setattr(Corpus, "changed", lambda self, times: changed.append(original(self, times)) or changed[-1])
    drawn = random.Random(1)
    monkeypatch.setattr(Search, "_batch", lambda self, batch: self._corpus.keep(drawn.randbytes(WORKLOAD_BYTES)))
    monkeypatch.syspath_prepend(Path(__file__).parent)
    search = Search(find_target("planted:generous"), None, 1000, laws=["limits"], database=tmp_path, guided=True)
    (found, *_) = search.run()
    assert found.fault.law == "limits" and len(found.workload["requests"]) <= 3
    assert set(search._kept_cases().fetch(b"workloads")) <= set(changed)
    monkeypatch.setattr(Search, "_changed_batch", lambda self, batch: None)
    again = Search(find_target("planted:generous"), None, 1, laws=["limits"], database=tmp_path)
    assert [each.fault.place for each in again.run()] == [found.fault.place]
