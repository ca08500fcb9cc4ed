"""The dashboard's "what if" lets follow-ups wait for the answers that they contain, and says so."""

import random
import re
from types import SimpleNamespace

import pytest
from closed_loops import conversations, run

from workbench import simulate
from workbench.analysis.values import values_of
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import Trace
from workbench.viz.changed_run import changed_run
from workbench.viz.feed import Feed


def test_a_changed_run_is_a_closed_loop():
    arrivals = conversations(random.Random("page"), count=8)
    trace, expected = run(arrivals), values_of(run(arrivals, max_num_seqs=2))
    changed, facts, unchanged, *_ = changed_run(trace, None, 0, {"max_num_seqs": 2})
    assert values_of(changed)["ttft_mean"] == pytest.approx(expected["ttft_mean"], rel=0.05)
    said = facts["predicted"]
    assert said.startswith("Both sides are predicted") and "are follow-ups" in said and "--open-loop" not in said
    assert all(abs(int(error)) < 5 for error in re.findall(r"([+-]\d+)% for", said))
    assert values_of(unchanged)["ttft_mean"] == pytest.approx(values_of(trace)["ttft_mean"], rel=0.05)


def test_a_run_whose_times_vary_is_answered_in_steps_with_one_plain_sentence():
    class Unrelated(CostModel):
        number = 0

        def step_seconds(self, chunks):
            self.number += 1
            return 10 ** random.Random(self.number).uniform(-3, 1)

    rows = [{"id": f"r{i}", "prompt": {"len": 20 + 7 * i}, "max_tokens": 5 + i} for i in range(12)]
    trace = simulate({"config": {"max_num_batched_tokens": 32}, "requests": rows}, cost_model=Unrelated(fixed=1))
    facts = changed_run(trace, lambda at_step, **changes: trace, 0, {"max_num_seqs": 2}).facts
    assert facts == {"no_times": "the times of this run vary too much to predict seconds"}
    feed = Feed(trace)
    feed._in_background = lambda work: work()
    feed.handle({"id": 1, "name": "tune", "args": {"slo": "ttft_p99=1s"}})
    tuned = feed.status()["tuned"]
    said = tuned["verdict"]
    assert said.startswith("The times of this run vary too much to predict seconds: this counts steps and KV blocks")
    for word in ("median", "fit", "trace 0"):
        assert word not in said
    assert feed.status()["tuning"] is None
    now, *others = tuned["candidates"]
    assert (now["words"], now["setting"]) == ("now", "as recorded, simulated") and len(others) >= 3
    alike = tuned["notes"][-1]
    assert alike.startswith("Every step stays as it is with ") and "max_num_seqs=" in alike
    for name, value in re.findall(r"(\w+)=(\d+)", alike):
        same = simulate({"config": trace.config | {name: int(value)}, "requests": rows})
        chunks = [[[(c.request_id, c.start, c.num_tokens) for c in r.chunks] for r in each] for each in (trace, same)]
        assert chunks[0] == chunks[1] and f"{name}={value}" not in str(tuned["candidates"])
    assert any("or chunk caps do not last equally long" in note for note in tuned["notes"])
    for candidate in tuned["candidates"]:
        changes = dict(each.split("=") for each in candidate["setting"].split(", ") if "=" in each)
        assert len(changes) == (candidate is not now)
        run_ = simulate({"config": trace.config | {k: int(v) for k, v in changes.items()}, "requests": rows})
        assert candidate["values"]["steps"] == f"{len(run_):,}"
        blocks = max(run_.num_blocks - 1 - record.free_blocks for record in run_)
        assert candidate["values"]["most KV blocks"] == f"{blocks:,}"
        assert not [name for name in candidate["values"] if "TTFT" in name or "pause" in name]
        assert bool(candidate["flags"]) == (candidate is not now)
    steps = [int(candidate["values"]["steps"].replace(",", "")) for candidate in others]
    assert steps == sorted(steps)
    feed._ends_tuning = False
    left = []

    def cancel(*numbers):
        left.append(feed.status()["tuned"])
        raise KeyboardInterrupt

    feed._tell_tuning = cancel
    feed.handle({"id": 2, "name": "tune", "args": {"slo": "ttft_p99=1s"}})
    assert feed.status()["tuned"]["verdict"] == "Cancelled."
    assert left == [None], "the answer to another target"


def test_a_page_that_loads_marks_the_steps_that_it_disturbs():
    """From the step in progress when a view opens to the one in progress when it is there; a recording has none."""
    trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}, "max_tokens": 9}]})
    growing = Trace(trace.meta)
    growing.add_request(trace.requests["a"])
    engine = SimpleNamespace(trace=growing, state="running", name="e")
    for record in trace[:3]:
        growing.append(record)
    feed = Feed(engine)
    for record in trace[3:5]:
        growing.append(record)
    feed.confirm()
    feed.confirm()
    assert growing.disturbed == {3, 4}
    growing.append(trace[5])
    feed.next_packet()
    growing.append(trace[6])
    feed.next_packet()
    assert growing.disturbed == {3, 4, 5}
    Feed(trace).confirm()
    assert trace.disturbed == set()
