"""Requests that wait for their grammars, against recordings of vLLM 0.33.0: every field of every step."""

from collections import Counter

import pytest
from feature_workloads import KINDS
from vllm_features import count_waits, differences, read_runs

from workbench.scheduler.queues import ServiceOrder

RUNS = read_runs("vllm-grammars")
GRAMMAR_KINDS = [kind for kind in KINDS if kind.endswith("grammar")]


@pytest.mark.parametrize("kind", GRAMMAR_KINDS)
def test_every_field_equals_vllm(kind):
    seen = Counter()
    runs = [run for run in RUNS if run["kind"] == kind]
    assert len(runs) >= 15
    for run in runs:
        found, trace = differences(run)
        assert not found, f"{found} of {run['workload']}"
        for record in trace:
            count_waits(record, "grammar", seen)
            seen["refused"] += "error" in record.finish_reasons.values()
        assert [broken for broken in trace.check() if not broken.exception] == []
    assert all(seen[what] for what in ("waits", "overtaken", "refused", "preempted", "hits"))
    assert bool(seen["drafts"]) is ("spec" in kind)


def test_the_comparison_finds_a_queue_that_nobody_may_overtake(monkeypatch):
    whole = ServiceOrder.waiting_order

    def only_the_head(self, batch, budget, num_seats):
        waiting = whole(self, batch, budget, num_seats)
        return waiting if waiting and waiting[0].grammar is None else waiting[:1]

    monkeypatch.setattr(ServiceOrder, "waiting_order", only_the_head)
    assert sum(bool(differences(run)[0]) for run in RUNS) > len(RUNS) // 4
