"""A duel: the class bets on a run or another configuration of it, then the other is simulated and the score told."""

import base64
import json
import math
import random
import re
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import get_args

import numpy as np
import pytest
from msgspec.structs import replace
from viz_traces import ReplayingController

import workbench
from workbench import CostModel, simulate, simulate_fleet
from workbench.analysis.fork import fork
from workbench.analysis.predict import comparing
from workbench.base.keyword_fields import PolicyName
from workbench.trace import Trace
from workbench.trace.readings.metrics_collector import metrics
from workbench.viz import duel
from workbench.viz.bundle import bundle
from workbench.viz.changed_run import Changed, changed_run
from workbench.viz.classroom import Classroom
from workbench.viz.duel import (
    FLEET_ONLY,
    MEASURES,
    POLICIES,
    SETTINGS,
    SIDES,
    changes_of_fleets,
    measure_words,
    outcome,
    question,
)
from workbench.viz.feed import Feed
from workbench.viz.fleet_rows import fleet_svgs
from workbench.viz.layout.comparison import encode_other
from workbench.viz.router_duel import _sides, offered, settled

COSTS = {"fixed": 0.01, "per_prefill_token": 0.0004, "per_kv_token": 0.00001}


def run(seed, timed, budget=64):
    rng = random.Random(seed)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randint(5, 90), "seed": i}, "max_tokens": rng.randint(2, 12)}
        | {"arrival_time" if timed else "arrival_step": rng.random() if timed else rng.randint(0, 9)}
        for i in range(9)
    ]
    costs = {"cost_model": COSTS} if timed else {}
    config = {"max_num_batched_tokens": budget, "num_blocks": 200}
    if not timed:  # steps of two budgets are not compared: a small pool takes more of them as well
        config |= {"max_num_batched_tokens": 64, "num_blocks": budget if budget < 64 else 200}
    return simulate({"config": config, "requests": requests, **costs})


class Engine(ReplayingController):
    """A controller that can simulate its run again."""

    def fork(self, *, at_step, **changes):
        return fork(self.trace, at_step=at_step, **changes)


def measured(side, measure):
    """The measure of a side, from the records of its traces."""
    side = [trace for trace in side if len(trace)]
    timed = side[0][-1].end > 0
    infos = {who: info for trace in side for who, info in trace.requests.items()}
    at, cached, got = {}, {}, {}
    for number, trace in enumerate(side):
        for place, record in enumerate(trace):
            for chunk in record.chunks:
                got[chunk.request_id] = number
                cached.setdefault(chunk.request_id, chunk.num_cached_tokens)
                if chunk.sampled is not None:
                    at.setdefault(chunk.request_id, []).append(record.end if timed else place)
    if measure == "hit rate of prompt tokens":
        return sum(cached.values()) / sum(infos[who].num_prompt_tokens for who in cached)
    if measure == FLEET_ONLY:
        return max(list(got.values()).count(number) for number in got.values()) / len(got)
    if measure == "time until all are finished":
        ends, begins = [trace[-1].end for trace in side], [trace[0].time for trace in side]
        return max(ends) - min(begins) if timed else max(map(len, side))
    if measure == "longest pause between two tokens":
        return max(b - a for steps in at.values() for a, b in pairwise(steps))
    if measure == "throughput of output tokens":
        return sum(map(len, at.values())) / measured(side, "time until all are finished")
    begin = {who: info.arrival_time if timed else info.arrival_step - 1 for who, info in infos.items()}
    waits = [steps[0] - begin[who] for who, steps in at.items()]
    if measure == "P99 of the time to first token":
        return float(np.percentile(waits, 99))
    return fmean(waits) if measure == "mean time to first token" else median(waits)


def shown(value, measure, timed):
    """A value as a class reads it."""
    if measure in (FLEET_ONLY, "hit rate of prompt tokens"):
        return f"{100 * value:.1f}%"
    if measure == "throughput of output tokens":
        return f"{value:.4g}/{'s' if timed else 'step'}"
    if not timed:
        text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        return f"{text} step{'s' * (text != '1')}"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


HIGHER = ("hit rate of prompt tokens", "throughput of output tokens")


def check(a, b, measure):
    """The winner and both values of a duel are those of the records."""
    winner, sentence = outcome(a, b, measure)
    one, other = measured(a, measure), measured(b, measure)
    near = abs(one - other) <= 0.01 * max(one, other)
    first = one > other if measure in HIGHER else one < other
    assert winner == ("neither" if near else "A" if first else "B"), (one, other)
    assert ("Neither wins." if near else f"{winner} wins.") in sentence
    told = re.search(": A (.*), B (.*?)\\. ", sentence).groups()
    assert told == tuple(shown(value, measure, a[0][-1].end > 0) for value in (one, other))
    assert sentence.lower().startswith(measure.lower())
    return winner


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_winner_is_the_one_with_the_shorter_measure(seed, timed, measure):
    a = run(seed, timed)
    for budget in (16, 64, 200):
        check([a], [run(seed, timed, budget)], measure)


def fleet(router, timed=True, replicas=3):
    """Conversations of four users whose turns share a beginning, over the replicas of a fleet."""
    requests = [
        {
            "id": f"u{user}.{turn}",
            "session": f"u{user}",
            "prompt": {"parts": [{"len": 48, "seed": f"u{user} {part}"} for part in range(turn + 1)]},
            "max_tokens": 3 + user,
            ("arrival_time" if timed else "arrival_step"): 0.3 * turn + 0.04 * user if timed else 6 * turn + user,
        }
        for user in range(4)
        for turn in range(4)
    ]
    costs = {"cost_model": COSTS} if timed else {}
    workload = {"config": {"num_blocks": 200}, "requests": requests, **costs}
    return simulate_fleet(workload, replicas=replicas, router=router).traces


@pytest.mark.parametrize("timed", [False, True])
def test_a_duel_of_routers_is_decided_by_the_records_of_all_replicas(timed):
    routers = ("round_robin", "least_loaded", "sticky", "cache_aware")
    sides = {router: fleet(router, timed) for router in routers}
    winners = {
        (pair, measure): check(*(sides[router] for router in pair), measure)
        for pair in combinations(routers, 2)
        for measure in MEASURES
    }
    assert set(winners.values()) == set(SIDES)
    assert winners[("round_robin", "sticky"), "hit rate of prompt tokens"] == "B", "more hits win"
    one = fleet("round_robin", timed, 1)
    check(one, sides["sticky"], "mean time to first token")
    line = changes_of_fleets(sides["round_robin"], sides["sticky"])
    for measure in ("mean time to first token", *HIGHER, FLEET_ONLY):
        before, after = (shown(measured(sides[name], measure), measure, timed) for name in ("round_robin", "sticky"))
        assert (f"{measure} {before} -> {after}" in line) == (before != after) == (measure in line)


def test_the_busiest_replica_is_offered_to_fleets_alone():
    assert FLEET_ONLY not in dict(measure_words()) and list(dict(measure_words(2))) == list(MEASURES)
    assert dict(measure_words())["hit rate of prompt tokens"] == "higher hit rate of prompt tokens"


def test_a_line_of_two_fleets_names_only_what_changes():
    a, b = fleet("round_robin"), fleet("sticky")
    line = changes_of_fleets(a, b)
    assert all(before != after for before, after in re.findall(r"([\d.]+ ?\S+) -> ([\d.]+ ?[^;]+)", line))
    assert line.count(" -> ") >= 2
    alone = changes_of_fleets(fleet("round_robin", replicas=1), fleet("sticky", replicas=1))
    assert alone == "no measure changes" and changes_of_fleets(a, a) == alone


def test_the_measures_of_a_duel_have_one_home():
    """A live duel offers those that Python names; no script spells one."""
    assert f"const MEASURES = {json.dumps(measure_words())};" in bundle()
    package = Path(workbench.__file__).parent
    scripts = [*package.glob("viz/js/*.js"), *package.glob("apps/playground/page/*.js")]
    assert scripts and not [(path.name, name) for path in scripts for name in MEASURES if name in path.read_text()]


def test_what_is_no_duel_is_refused():
    with pytest.raises(ValueError, match="a setting that differs"):
        question({}, next(iter(MEASURES)))
    with pytest.raises(ValueError, match="measure must be"):
        question({"max_num_seqs": 2}, "beauty")
    empty = [run(1, False)[:0]]
    with pytest.raises(ValueError, match="measure must be"):
        outcome(empty, empty, "beauty")
    assert changes_of_fleets(empty, empty) == "", "no request, and nothing to measure"
    with pytest.raises(ValueError, match="different requests, such as 'r0'"):
        outcome([run(1, False)], [run(2, False)], "median time to first token")
    with pytest.raises(ValueError, match="no median time to first token yet"):
        outcome(empty, empty, "median time to first token")


@pytest.mark.parametrize("late", [0, 1])
def test_one_side_without_a_first_token_has_nothing_to_compare(late):
    """Neither is the side that has one the winner."""
    requests = [{"id": f"r{i}", "prompt": {"len": 90}, "max_tokens": 3} for i in range(2)]
    trace = simulate({"config": {"max_num_batched_tokens": 64, "num_blocks": 60}, "requests": requests})
    sides = [[trace], [trace]]
    sides[late] = [trace[:1]]
    with pytest.raises(ValueError, match="no mean time to first token yet"):
        outcome(*sides, "mean time to first token")
    told = changes_of_fleets(*sides)
    assert told == "no measure changes", "the hit rate, and the share of the only replica"


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


def put(teacher, bet):
    """Let the class bet: the question is put by the thread of the class, when its unit is known."""
    teacher.handle({"name": "class", "args": bet})
    teacher.update(View())


@pytest.mark.parametrize("times", ["none", "regular", "wild"])
def test_a_duel_is_settled_in_the_unit_that_it_was_asked_in(monkeypatch, times):
    """Seconds if they can be predicted from the run, steps if it has none or they vary too much; and all see both."""
    from msgspec.structs import replace

    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    rng = random.Random(7)
    run_ = run(3, times != "none")
    if times == "wild":
        late, wild = 0.0, Trace(run_.meta)
        for info in run_.requests.values():
            wild.add_request(info)
        for record in run_:
            longer = rng.choice([0.0, 0.1, 0.9]) * rng.random()
            wild.append(replace(record, time=record.time + late, end=record.end + late + longer, timings={}))
            late += longer
        run_ = wild
    engine, room = Engine(run_), Classroom()
    while engine.step():
        pass
    teacher, follower, visitor = (Feed(engine, room=room) for _ in range(3))
    for feed, role in ((teacher, "teacher"), (follower, "follower"), (visitor, "visitor")):
        feed.confirm()
        feed.handle({"name": "class", "args": {"what": "join", "role": role, "key": room.key}})
    bet = {"what": "bet", "changes": {"num_blocks": 16}}
    for measure in ("time until all are finished", "mean time to first token", "hit rate of prompt tokens"):
        put(teacher, bet | {"measure": measure})
        text = follower.status()["class"]["question"]["text"]
        in_steps = times != "regular" and measure != "hit rate of prompt tokens"
        assert text.endswith("Steps count, not seconds.") == in_steps, text
        teacher.handle({"name": "settle", "args": {}})
        views = [View() for _ in range(3)]
        for feed, view in zip((teacher, follower, visitor), views, strict=True):
            feed.update(view)
        score = follower.status()["class"]["score"]
        assert bool(re.search(r"A [\d.]+ steps?, B", score["sentence"])) == in_steps, score
        assert score["compares"] and views[1].other == views[0].other is not None and views[2].other is None
    for feed in (teacher, follower):  # what a reload would show
        feed.handle({"name": "resend", "args": {}})
        assert feed.other_packet() is not None
    teacher.handle({"name": "class", "args": {"what": "close"}})
    for feed in (teacher, follower):
        feed.update(View())
        feed.handle({"name": "resend", "args": {}})
        assert feed.other_packet() is None, "closed with the score"
    teacher.handle({"name": "fork", "args": {"at_step": 0, "changes": {"num_blocks": 20}}})
    teacher.update(view := View())
    assert view.other is not None and view.other != views[0].other, "a later question of the teacher's is shown"


def noisy(seed, sigma):
    """A run whose steps take more or less than their contents explain."""
    rng = random.Random(seed)

    class Noisy(CostModel):
        def step_seconds(self, chunks):
            return super().step_seconds(chunks) * math.exp(rng.gauss(0, sigma))

    requests = [
        {
            "id": f"r{n}",
            "prompt": {"len": rng.randint(20, 300)},
            "max_tokens": rng.randint(5, 30),
            "arrival_time": n / 9,
        }
        for n in range(24)
    ]
    config = {"max_num_batched_tokens": 192, "max_num_seqs": 8}
    return simulate({"config": config, "requests": requests}, cost_model=Noisy(**COSTS))


@pytest.fixture
def teaching(monkeypatch):
    """A function that opens the pages of a teacher and a follower for a run that is finished."""
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())

    def teach(run_):
        engine, room = Engine(run_), Classroom()
        while engine.step():
            pass
        feeds = [Feed(engine, room=room) for _ in range(2)]
        for feed, role in zip(feeds, ("teacher", "follower"), strict=True):
            feed.confirm()
            feed.handle({"name": "class", "args": {"what": "join", "role": role, "key": room.key}})
        return feeds

    return teach


@pytest.mark.parametrize("times", ["none", "wild"])
@pytest.mark.parametrize(
    "changes", [{"max_num_batched_tokens": 32}, {"max_num_seqs": 2}, {"long_prefill_token_threshold": 8}]
)
def test_a_duel_of_two_sizes_of_steps_that_can_only_count_steps_is_refused_before_the_bets(teaching, times, changes):
    run_ = run(3, False) if times == "none" else noisy(1, 4.0)
    teacher, follower = teaching(run_)
    bet = {"what": "bet", "changes": changes, "measure": "mean time to first token"}
    put(teacher, bet)
    said = teacher.status()["message"]
    assert "numbers of seats or chunk caps do not last equally long" in said and "choose the hit rate" in said
    assert follower.status()["class"]["question"] is None
    put(teacher, bet | {"measure": "hit rate of prompt tokens"})
    assert follower.status()["class"]["question"] is not None and not teacher.status()["message"]
    with pytest.raises(ValueError, match="do not last equally long"):
        outcome([run_], [fork(run_, 0, **changes)], "mean time to first token")


@pytest.mark.parametrize("sigma", [0.15, 0.8])
def test_a_duel_in_seconds_is_one_of_two_predictions_and_says_how_far_that_of_the_run_is_off(teaching, sigma):
    trace = noisy(2, sigma)
    teacher, follower = teaching(trace)
    predictor, measure = comparing(trace), "mean time to first token"
    assert predictor.check.grade == ("seconds" if sigma < 0.5 else "comparison")
    put(teacher, {"what": "bet", "changes": {"max_num_batched_tokens": 32}, "measure": measure})
    assert "Steps count" not in follower.status()["class"]["question"]["text"]
    teacher.handle({"name": "settle", "args": {}})
    teacher.update(View())
    score = follower.status()["class"]["score"]
    changed = predictor.predict(max_num_batched_tokens=32)
    sides = [predicted["ttft_mean"].value for predicted in (predictor.unchanged, changed)]
    told = [shown(value, measure, True) for value in sides]
    assert f"A {told[0]}, B {told[1]}." in score["sentence"]
    recorded = measured([trace], measure)
    assert shown(recorded, measure, True) != told[0], "the control: the recorded value is another one"
    (note,) = score["notes"]
    assert note.startswith("Both sides are predicted") and "ranges" not in note, "its values have none"
    if sigma < 0.5:
        assert note.endswith(f"is off by {sides[0] / recorded - 1:+.0%}.")
    else:
        assert note.endswith(predictor.check.caution) and "not with a clock" in note and " off by " not in note


def test_a_duel_that_was_asked_in_steps_counts_them_also_when_times_can_be_predicted_by_then(monkeypatch):
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    engine, room = Engine(run(3, True)), Classroom()
    while engine.step():
        pass
    teacher = Feed(engine, room=room)
    teacher.confirm()
    teacher.handle({"name": "class", "args": {"what": "join", "role": "teacher", "key": room.key}})
    monkeypatch.setattr("workbench.viz.feed.terms_of_changes", lambda trace, name: ("steps", 0.0))
    put(teacher, {"what": "bet", "changes": {"num_blocks": 16}, "measure": "time until all are finished"})
    teacher.handle({"name": "settle", "args": {}})
    teacher.update(View())
    assert f"A {len(engine.trace)} steps, B " in teacher.status()["class"]["score"]["sentence"]


@pytest.mark.parametrize("ratio", [0.92, 0.8])
@pytest.mark.parametrize("kind", ["asked with it", "since then", "none", "hit rate"])
def test_with_a_caution_less_than_it_names_is_a_tie_and_the_class_knows_before_the_bet(kind, ratio, monkeypatch):
    measure = "hit rate of prompt tokens" if kind == "hit rate" else "mean time to first token"
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    engine, room = Engine(run(3, False)), Classroom()
    while engine.step():
        pass
    teacher = Feed(engine, room=room)
    teacher.confirm()
    teacher.handle({"name": "class", "args": {"what": "join", "role": "teacher", "key": room.key}})
    monkeypatch.setattr(
        "workbench.viz.feed.terms_of_changes",
        lambda trace, name: ("s", 0.1 if kind in ("asked with it", "hit rate") else 0.0),
    )
    caution = "Compare the two." if kind in ("since then", "hit rate") else ""
    monkeypatch.setattr(
        "workbench.viz.feed.changed_run",
        lambda trace, fork, at, changes: Changed(trace, {}, trace, caution, ({"ttft_mean": 1.0}, {"ttft_mean": ratio})),
    )
    put(teacher, {"what": "bet", "changes": {"num_blocks": 16}, "measure": measure})
    is_told = "A difference of less than 10% is a tie here." in teacher.status()["class"]["question"]["text"]
    assert is_told == (kind == "asked with it")
    teacher.handle({"name": "settle", "args": {}})
    teacher.update(View())
    score = teacher.status()["class"]["score"]
    if kind == "hit rate":  # of the same run, and no time: nothing is rough in it
        assert score["winner"] == "neither" and "less than" not in score["sentence"]
        return
    is_tie = ratio > 0.9 and kind != "none"
    assert score["winner"] == ("neither" if is_tie else "B")
    assert score["sentence"].endswith(
        "Neither wins: a difference of less than 10% is a tie here." if is_tie else "B wins."
    )


@pytest.mark.parametrize(("error", "tie"), [(0.07, 0.07), (-0.07, 0.07), (0.004, 0.01)])
@pytest.mark.parametrize("ratio", [1.016, 1.09])
def test_a_difference_within_the_error_of_the_measure_is_a_tie(error, tie, ratio):
    trace, measure = run(3, False), "mean time to first token"
    values = {"ttft_mean": 0.942}, {"ttft_mean": 0.942 * ratio}
    score = duel.settled(trace, Changed(trace, {}, trace, "", values, {"ttft_mean": error}), measure, "s")
    assert score.winner == ("neither" if ratio - 1 < tie else "A")
    assert ("a difference of less than 7% is a tie here" in score.sentence) == (ratio - 1 < tie)
    asked = question({"max_num_seqs": 2}, measure, uncertain=tie)
    assert ("A difference of less than 7% is a tie here." in asked) == (tie > 0.01)
    assert duel.settled(trace, Changed(trace, {}, trace, "", values), measure, "s", tie).winner == score.winner


def test_a_duel_that_was_asked_in_seconds_says_when_steps_decide(monkeypatch):
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    engine, room = Engine(run(3, False)), Classroom()
    while engine.step():
        pass
    teacher = Feed(engine, room=room)
    teacher.confirm()
    teacher.handle({"name": "class", "args": {"what": "join", "role": "teacher", "key": room.key}})
    monkeypatch.setattr("workbench.viz.feed.terms_of_changes", lambda trace, name: ("s", 0.0))
    monkeypatch.setattr(
        "workbench.viz.feed.changed_run", lambda trace, fork, at, changes: Changed(trace, {"no_times": "wild"})
    )
    put(teacher, {"what": "bet", "changes": {"num_blocks": 16}, "measure": "time until all are finished"})
    teacher.handle({"name": "settle", "args": {}})
    teacher.update(View())
    nothing, note = teacher.status()["class"]["score"]["notes"]
    assert nothing == "Nothing changes, every step is as before." and "this counts steps" in note


def test_the_class_bets_and_the_score_is_told_to_all(lesson):
    engine, (teacher, *followers) = lesson
    measure, changes = "time until all are finished", {"num_blocks": 20}
    put(teacher, {"what": "bet", "changes": changes, "measure": measure})
    asked = followers[0].status()["class"]["question"]
    assert asked["choices"] == list(SIDES) and "KV blocks 20" in asked["text"]
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
    assert len(b) > len(engine.trace), "smaller chunks take more steps"
    for follower, bet in zip(followers, ["A", "A", "B", None], strict=True):
        facts = follower.status()["class"]
        assert facts["question"] is None
        score = facts["score"]
        assert (score["winner"], score["right"], score["bets"], score["mine"]) == ("A", 2, 3, bet)
        assert f"A {len(engine.trace)} steps, B {len(b)} steps" in score["sentence"]
    teacher.handle({"name": "class", "args": {"what": "ask", "text": "And now?"}})
    assert followers[0].status()["class"]["score"] is None, "another question takes its place"


@pytest.mark.parametrize("timed", [False, True])
def test_a_class_bets_on_two_routers_over_the_arrivals_of_the_run(monkeypatch, timed):
    """Both sides are fleets of the run's requests and configuration, compared with fleets of the same workload."""
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    rng = random.Random(5)
    requests = [
        {"id": f"r{i}", "prompt": {"len": rng.randint(5, 90), "seed": i % 3}, "max_tokens": rng.randint(2, 30)}
        | {"arrival_time" if timed else "arrival_step": i * 0.02 if timed else i}
        for i in range(40)
    ]
    workload = {"config": {"max_num_batched_tokens": 64, "num_blocks": 200}, "requests": requests}
    run_ = simulate({**workload, "cost_model": COSTS} if timed else workload)
    engine, room = Engine(run_), Classroom()
    while engine.step():
        pass
    teacher, follower = (Feed(engine, room=room) for _ in range(2))
    for feed, role in ((teacher, "teacher"), (follower, "follower")):
        feed.confirm()
        feed.handle({"name": "class", "args": {"what": "join", "role": role, "key": room.key}})
    choices = teacher.status()["class"]["routers"]
    assert {"round_robin", "sticky", "cache_aware"} <= set(choices["names"]) and "routers" not in follower.status()[
        "class"
    ]
    assert choices["measures"] == measure_words(2)
    routers = {"a": "round_robin", "b": "consistent_hash", "replicas": 4}
    bet = {"what": "bet", "changes": {}, "measure": FLEET_ONLY, "routers": routers}
    put(teacher, bet)
    asked = follower.status()["class"]["question"]
    assert "go to 4 replicas" in asked["text"]
    assert [(side, name) for side, name, _ in asked["sides"]] == [("A", "round_robin"), ("B", "consistent_hash")]
    assert all(rule == choices["rules"][name] and len(rule) > 10 for _, name, rule in asked["sides"])
    follower.handle({"name": "class", "args": {"what": "answer", "number": asked["number"], "value": "A"}})
    teacher.handle({"name": "settle", "args": {}})
    view = View()
    teacher.update(view)
    assert view.other is None, "the run is neither side"
    costs = {"cost_model": COSTS} if timed else {}
    if not timed:  # a clock on which every step takes a second: all replicas take their steps together
        costs = {"cost_model": {"fixed": 1.0}}
        workload["requests"] = [each | {"arrival_time": float(each["arrival_step"])} for each in requests]
    sides = [
        simulate_fleet({**workload, **costs}, replicas=4, router=name).traces
        for name in ("round_robin", "consistent_hash")
    ]
    score = follower.status()["class"]["score"]
    busiest = [max(len(trace.requests) for trace in side) / 40 for side in sides]
    winner = "neither" if busiest[0] == busiest[1] else "AB"[busiest[1] < busiest[0]]
    assert score["winner"] == winner and (score["right"], score["bets"]) == (winner == "A", 1)
    told = "with times predicted from its own step costs. Of the run as it was, the" if timed else "counted in steps."
    (note,) = [each for each in score["notes"] if each.startswith("Both sides are simulated")]
    assert f"the arrivals of this run over 4 replicas, {told}" in note
    rows = {name: values for name, *values in score["rows"]}
    assert busiest[0] != busiest[1] and rows[FLEET_ONLY] == [f"{share:.1%}" for share in busiest]
    assert f"A {busiest[0]:.1%}, B {busiest[1]:.1%}" in score["sentence"]
    mean = "mean time to first token"
    values = [shown(measured(side, mean), mean, timed) for side in sides]
    assert values[0] != values[1] and rows[mean] == values
    named = [{f"replica {i}": trace for i, trace in enumerate(side)} for side in sides]
    pictures = fleet_svgs(named, "s" if timed else "steps")
    facts = follower.status()["class"]
    assert facts["pictures"] == (("A: round_robin", pictures[0]), ("B: consistent_hash", pictures[1]))
    follower.handle({"name": "class", "args": {"what": "seen", "number": score["number"]}})
    assert "pictures" not in follower.status()["class"] and "pictures" in teacher.status()["class"], "sent once"
    put(teacher, bet | {"measure": "throughput of output tokens"})
    teacher.handle({"name": "settle", "args": {}})
    teacher.update(view)
    assert "pictures" in follower.status()["class"], "those of another duel"


def test_two_routers_that_tie_say_why_and_the_usual_pair_does_not():
    """Eight requests that share nothing are shared out alike by their order and by load."""
    requests = [{"id": f"r{i}", "prompt": {"len": 40}, "max_tokens": 8, "arrival_step": i} for i in range(8)]
    trace = simulate({"config": {"num_blocks": 200}, "requests": requests})
    score = settled(trace, {"a": "round_robin", "b": "sticky", "replicas": 4}, "time until all are finished")
    assert score.winner == "neither"
    alike = [note for note in score.notes if "shared the requests out alike" in note]
    assert alike and "2, 2, 2, 2 to a replica" in alike[0]
    shared = [{**each, "prompt": {"parts": [{"len": 40, "seed": "template"}, {"len": 9}]}} for each in requests]
    trace = simulate({"config": {"num_blocks": 200}, "requests": shared})
    usual = dict(zip("ab", offered()["usual"], strict=True)) | {"replicas": 4}
    score = settled(trace, usual, "share of requests at the busiest replica")
    assert score.winner == "A" and any("sent all 8 requests to replica 0" in note for note in score.notes)
    assert not any("alike" in note for note in score.notes)


@pytest.mark.parametrize(
    ("routers", "words"),
    [
        ({"a": "sticky", "b": "sticky", "replicas": 2}, "both are sticky"),
        ({"a": "sticky", "b": "nobody", "replicas": 2}, "router B"),
        ({"a": "sticky", "b": "random", "replicas": 1}, "replicas"),
        ({"a": "sticky", "b": "random", "replicas": 17}, "replicas"),
        ({"a": "sticky", "b": "random"}, "a, b and replicas"),
        ("sticky", "a, b and replicas"),
    ],
)
def test_routers_that_are_no_duel_are_refused(lesson, routers, words):
    _, (teacher, *followers) = lesson
    bet = {"what": "bet", "changes": {}, "measure": FLEET_ONLY, "routers": routers}
    put(teacher, bet)
    assert words in teacher.status()["message"] and followers[0].status()["class"]["question"] is None
    followers[0].handle({"name": "class", "args": bet | {"routers": {"a": "sticky", "b": "random", "replicas": 2}}})
    assert "teacher" in followers[0].status()["message"]


def test_a_trend_of_the_run_begins_anew_on_each_side(monkeypatch):
    """Two sides with one router are the same fleet, and one replica that serves all is the run as it is predicted."""
    from workbench.analysis.predict import Predictor
    from workbench.simulation.costs.drift import Drift

    trace = run(5, True)
    predictor = Predictor(trace, CostModel(fixed=0.01, per_row=1e-3), num_draws=0)
    num_rows = sum(record.num_tokens for record in trace)
    predictor._drift = Drift(change=-1.6, center=0.5, num_rows=num_rows)
    monkeypatch.setattr("workbench.analysis.predict.comparing", lambda *_: predictor)
    a, b, clock, *_ = _sides(trace, {"a": "sticky", "b": "sticky", "replicas": 3}, "s")
    assert clock == ""
    lengths = [[metrics(each).summary.duration for each in side.traces if len(each)] for side in (a, b)]
    assert lengths[0] == lengths[1]
    one, *_ = _sides(trace, {"a": "sticky", "b": "sticky", "replicas": 1}, "s")
    assert metrics(one.traces[0]).summary.ttft.mean == pytest.approx(metrics(predictor.simulate()).summary.ttft.mean)


def test_a_duel_that_cannot_be_simulated_is_refused_or_called_off(lesson, monkeypatch):
    """Before the class bets, as far as it can be known; later the bets stay open until the teacher ends them."""
    engine, (teacher, *followers) = lesson
    bet = {"what": "bet", "changes": {"max_num_seqs": -1}, "measure": next(iter(MEASURES))}
    put(teacher, bet)
    assert "max_num_seqs" in teacher.status()["message"]
    assert followers[0].status()["class"]["question"] is None
    put(teacher, bet | {"changes": {"num_blocks": 40}})
    assert followers[0].status()["class"]["question"] is not None

    def refuse(**_):
        raise ValueError("a request that has come since needs more blocks")

    monkeypatch.setattr(engine, "fork", refuse)
    monkeypatch.setattr("workbench.analysis.predict.comparing", refuse)
    teacher.handle({"name": "settle", "args": {}})
    teacher.update(View())
    assert "needs more blocks" in teacher.status()["message"]
    assert followers[0].status()["class"]["question"] is not None
    teacher.handle({"name": "class", "args": {"what": "end"}})
    teacher.handle({"name": "settle", "args": {}})
    assert "no duel to settle" in teacher.status()["message"]


def test_a_settled_duel_opens_the_comparison_that_is_here_already(deno_page):
    """The same two runs again are the same packet, which changes nothing; a page may have closed them."""
    a, b = run(3, False), run(3, False, budget=16)
    status = {"live": True, "state": "idle"}
    deno_page.open(a, b, status=status)
    deno_page("(globalThis.getComputedStyle ??= () => ({ position: 'static' }), view.showComparison(false))")
    score = {"winner": "A", "sentence": "A wins.", "notes": [], "rows": [], "right": 0, "bets": 0, "mine": None}
    for number, compares, shows in ((1, False, False), (2, True, True), (2, True, False), (3, True, True)):
        told = {"role": "follower", "taught": True, "score": score | {"number": number, "compares": compares}}
        deno_page("(view.other.comparison.fork = argument, null)", {"duel": number if compares else 0})
        deno_page(
            "(page.values.status = argument, page.listeners['change:status'](), page.frame())",
            status | {"class": told | {"lead": {}, "question": None, "answered": False}},
        )
        assert deno_page("view.comparing") == shows, number
        deno_page("view.showComparison(false)")


@pytest.mark.parametrize("order", ["run first", "score first"])
@pytest.mark.parametrize("after", ["close", "next", "newer"])
def test_the_comparison_of_a_duel_closes_with_it(deno_page, after, order):
    """By *Close* and when the next question opens; a comparison that the teacher has asked for since stays."""
    a, budgets = run(3, True), {1: 32, 3: 48}
    facts = {"role": "follower", "taught": True, "score": None, "question": None}
    deno_page.open(a, status={"live": True, "class": facts})
    deno_page("(globalThis.getComputedStyle ??= () => ({ position: 'static' }), 1)")

    def tell(score, question=None):
        told = json.dumps({"live": True, "class": facts | {"score": score, "question": question}})
        deno_page(f"(view.status = {told}, view.classroom.compare(view.status.class.score), 1)")

    def bring(budget, number=None):
        facts_of_fork = {"at_step": 0, "changes": {}} | ({"duel": number} if number else {})
        packet = encode_other(a, run(3, True, budget=budget), facts_of_fork)
        told = base64.b64encode(packet).decode()
        deno_page("(page.values.other = page.bytes(argument), page.listeners['change:other'](), 1)", told)

    for number, budget in budgets.items():
        score = {"number": number, "compares": True, "winner": "A"}
        for told in (False, True) if order == "run first" else (True, False):
            tell(score) if told else bring(budget, number)
        deno_page("(view.classroom.compare(view.status.class.score), 1)")  # as in the next frame
        assert deno_page("view.comparing")
        if after == "newer":
            bring(24)
        tell(None, {"number": number + 1} if after == "next" else None)
        assert deno_page("view.comparing") == (after == "newer"), number


@pytest.mark.parametrize("pause", [0.0, 9.0])
def test_the_sides_of_a_duel_of_routers_begin_as_the_run_did(pause):
    """Requests wait for the engine's first step: one replica takes it as the run did, and ends as predicted."""
    run_, late = noisy(3, 0.1), 1.7
    trace, middle = Trace(run_.meta), run_[len(run_) // 2].time
    for number, info in enumerate(run_.requests.values()):
        waits = number < 7
        moved = 0.2 * number if waits else late + info.arrival_time + (pause if info.arrival_time > middle else 0.0)
        trace.add_request(replace(info, arrival_time=moved))
    first = simulate(
        {
            "config": {"max_num_batched_tokens": 192, "max_num_seqs": 8},
            "requests": [
                {"id": info.request_id, "prompt": {"len": info.num_prompt_tokens}, "max_tokens": info.max_tokens}
                | {"arrival_time": max(0.0, info.arrival_time - late)}
                for info in trace.requests.values()
            ],
        },
        cost_model=CostModel(**COSTS),
    )
    for record in first:
        trace.append(replace(record, time=record.time + late, end=record.end + late))
    assert len(trace[0].chunks) + len(trace[0].waiting) == 7, "the test needs requests that wait for the first step"

    predictor = comparing(trace)
    expected = {name: each.ttft.seconds for name, each in metrics(predictor.simulate()).requests.items()}
    side, _, clock, told, _ = _sides(trace, {"a": "round_robin", "b": "sticky", "replicas": 1}, "s")
    (alone,) = side.traces
    assert not clock and [chunk.request_id for chunk in alone[0].chunks] == [c.request_id for c in trace[0].chunks]
    found = {name: each.ttft.seconds for name, each in metrics(alone).requests.items()}
    assert found == pytest.approx(expected)

    score = settled(trace, {"a": "round_robin", "b": "sticky", "replicas": 2}, "mean time to first token")
    said = changed_run(trace, None, 0, {"max_num_seqs": 4}).facts["predicted"]
    (error,) = re.findall(r"Of the run as it was, the prediction is off by .*?\.(?: |$)", said)
    assert score.notes[-1].endswith(error.strip()) and told.endswith(error.strip())
    assert all(("time, with 9" in picture or "idle" in picture) == bool(pause) for _, picture in score.pictures)


def test_a_duel_of_routers_in_seconds_stays_one_when_steps_are_noisy():
    """The rule of all views decides, and not the fit alone: both sides are predictions, which are compared."""
    trace = noisy(2, 0.8)
    caution = comparing(trace).check.caution
    assert caution
    routers = {"a": "round_robin", "b": "consistent_hash", "replicas": 3}
    score = settled(trace, routers, "mean time to first token")
    assert not re.search(r"A [\d.]+ steps?, B", score.sentence)
    values = [float(value) for value in re.findall(r"[AB] ([\d.]+) m?s", score.sentence)]
    assert (1 - min(values) / max(values) < 0.1) == (score.winner == "neither") == ("is a tie here" in score.sentence)
    (told,) = [note for note in score.notes if note.startswith("Both sides are simulated")]
    assert "with times predicted from its own step costs" in told and caution[:-1] in told
    told = settled(noisy(1, 4.0), routers, "mean time to first token").notes[-1]
    assert "counted in steps, because no times can be predicted" in told


def test_the_question_has_the_words_of_the_sliders():
    text = (Path(workbench.__file__).parent / "viz" / "js" / "what_if.js").read_text()
    fields = dict(re.findall(r'^  \["(\w+)", "([\w ]+)", \[', text, re.MULTILINE))
    assert fields == SETTINGS and len(fields) == 4


def test_a_policy_is_called_as_its_box_calls_it():
    assert f"const POLICIES = {json.dumps(list(POLICIES.items()))};" in bundle() and {*POLICIES} == {
        *get_args(PolicyName)
    }
    for policy, words in POLICIES.items():
        asked = question({"policy": policy}, next(iter(MEASURES)), now={"policy": policy})
        assert asked.count(f" policy {words}. ") == 2, asked
