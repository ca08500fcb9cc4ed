"""A duel: the class bets on a run or another configuration of it, then the other is simulated and the score told."""

import random
from itertools import pairwise
from statistics import median_high

import pytest
from viz_traces import ReplayingController

from workbench import simulate
from workbench.analysis.fork import fork
from workbench.trace.readings.compare import compare
from workbench.viz.classroom import Classroom
from workbench.viz.duel import MEASURES, SIDES, outcome, question
from workbench.viz.feed import Feed

COSTS = {"fixed": 0.01, "per_prefill_token": 0.0004, "per_kv_token": 0.00001}


def run(seed, timed, budget=64):
    rng = random.Random(seed)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randint(5, 90), "seed": i}, "max_tokens": rng.randint(2, 12)}
        | {"arrival_time" if timed else "arrival_step": rng.random() if timed else rng.randint(0, 9)}
        for i in range(9)
    ]
    costs = {"cost_model": COSTS} if timed else {}
    return simulate({"config": {"max_num_batched_tokens": budget, "num_blocks": 200}, "requests": requests, **costs})


class Engine(ReplayingController):
    """A controller that can simulate its run again."""

    def fork(self, *, at_step, **changes):
        return fork(self.trace, at_step=at_step, **changes)


def measured(trace, measure):
    """The measure of a run, from its records."""
    timed = trace[-1].end > 0
    at = {}
    for place, record in enumerate(trace):
        for chunk in record.chunks:
            if chunk.sampled is not None:
                at.setdefault(chunk.request_id, []).append(record.end if timed else place)
    if measure == "time until all are finished":
        return trace[-1].end - trace[0].time if timed else len(trace)
    if measure == "longest pause between two tokens":
        return max(b - a for steps in at.values() for a, b in pairwise(steps))
    begin = {who: info.arrival_time if timed else info.arrival_step - 1 for who, info in trace.requests.items()}
    return median_high(steps[0] - begin[who] for who, steps in at.items())


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_winner_is_the_one_with_the_shorter_measure(seed, timed, measure):
    a = run(seed, timed)
    for budget in (16, 64, 200):
        b = run(seed, timed, budget)
        winner, sentence = outcome(compare(a, b), measure)
        one, other = measured(a, measure), measured(b, measure)
        near = abs(one - other) <= 0.01 * max(one, other)
        assert winner == ("neither" if near else "A" if one < other else "B"), (one, other)
        assert ("Neither wins." if near else f"{winner} wins.") in sentence
        assert sentence.lower().startswith(measure)


def test_what_is_no_duel_is_refused():
    with pytest.raises(ValueError, match="a setting that differs"):
        question({}, next(iter(MEASURES)))
    with pytest.raises(ValueError, match="measure must be"):
        question({"max_num_seqs": 2}, "beauty")
    empty = compare(run(1, False)[:0], run(1, False)[:0])
    with pytest.raises(ValueError, match="no median time to first token yet"):
        outcome(empty, "median time to first token")


@pytest.fixture
def lesson(monkeypatch):
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    engine, room = Engine(run(3, False)), Classroom()
    while engine.step():
        pass
    feeds = [Feed(engine, room=room) for _ in range(5)]
    for feed, role in zip(feeds, ["teacher", *["follower"] * 4], strict=True):
        feed.confirm()
        feed.handle({"name": "class", "args": {"what": "join", "role": role, "key": room.key}})
    return engine, feeds


class View:
    """The values that a feed sets."""

    packet = other = download = status = None


def test_the_class_bets_and_the_score_is_told_to_all(lesson):
    engine, (teacher, *followers) = lesson
    measure, changes = "time until all are finished", {"max_num_batched_tokens": 16}
    teacher.handle({"name": "class", "args": {"what": "bet", "changes": changes, "measure": measure}})
    asked = followers[0].status()["class"]["question"]
    assert asked["choices"] == list(SIDES) and "max_num_batched_tokens 16" in asked["text"]
    for follower, bet in zip(followers, ["A", "A", "B"], strict=False):
        follower.handle({"name": "class", "args": {"what": "answer", "number": asked["number"], "value": bet}})
    assert teacher.status()["class"]["spread"] == [("A", 2), ("B", 1), ("neither", 0)]
    assert teacher.other_packet() is None, "nothing is simulated before the bets"
    followers[0].handle({"name": "settle", "args": {}})
    assert "teacher" in followers[0].status()["message"] and followers[0].status()["class"]["question"]
    teacher.handle({"name": "settle", "args": {}})
    view = View()
    teacher.update(view)
    assert view.other is not None
    b = fork(engine.trace, at_step=0, **changes)
    assert len(b) > len(engine.trace), "a smaller budget takes more steps"
    for follower, bet in zip(followers, ["A", "A", "B", None], strict=True):
        facts = follower.status()["class"]
        assert facts["question"] is None
        score = facts["score"]
        assert (score["winner"], score["right"], score["bets"], score["mine"]) == ("A", 2, 3, bet)
        assert f"A {len(engine.trace)} steps, B {len(b)} steps" in score["sentence"]
    teacher.handle({"name": "class", "args": {"what": "ask", "text": "And now?"}})
    assert followers[0].status()["class"]["score"] is None, "another question takes its place"


def test_a_duel_that_cannot_be_simulated_leaves_the_bets_open(lesson):
    _, (teacher, *followers) = lesson
    bad = {"what": "bet", "changes": {"max_num_batched_tokens": -1}, "measure": next(iter(MEASURES))}
    teacher.handle({"name": "class", "args": bad})
    teacher.handle({"name": "settle", "args": {}})
    teacher.update(View())
    assert "max_num_batched_tokens" in teacher.status()["message"]
    assert followers[0].status()["class"]["question"] is not None
    teacher.handle({"name": "class", "args": {"what": "end"}})
    teacher.handle({"name": "settle", "args": {}})
    assert "no duel to settle" in teacher.status()["message"]
