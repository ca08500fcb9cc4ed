"""A class: roles, the key of the teacher's link, the place of the teacher, and the spread of predictions."""

import random
from functools import partial

import pytest
from viz_traces import ReplayingController, random_trace

from workbench.viz.classroom import MAX_BARS, READING, Classroom
from workbench.viz.feed import Feed


class Page:
    """Stands for the feed of an open page."""


@pytest.fixture
def room():
    return Classroom()


def enter(room, role="visitor", key="", **more):
    page = Page()
    page.news = 0

    def on_news():
        page.news += 1

    room.enter(page, on_news)
    room.take(page, "join", role=role, key=key, **more)
    return page


def test_the_key_of_the_server_makes_a_teacher_and_nothing_else_does(room):
    teacher, visitor = enter(room, "teacher", room.key), enter(room)
    assert room.facts(teacher)["role"] == "teacher" and room.facts(visitor) == {"role": "visitor", "taught": True}
    for key in ("", room.key[:-1], room.key + "x", Classroom().key):
        with pytest.raises(ValueError, match="not the teacher's link"):
            room.take(visitor, "join", role="teacher", key=key)
    for what, values in (("lead", {"view": "story"}), ("ask", {"text": "?"}), ("end", {})):
        with pytest.raises(ValueError, match="only the teacher"):
            room.take(visitor, what, **values)
    assert room.facts(visitor)["role"] == "visitor"


def test_only_followers_get_the_place_of_the_teacher_and_may_leave(room):
    teacher = enter(room, "teacher", room.key)
    follower, visitor = enter(room, "follower"), enter(room)
    before = follower.news
    place = {"view": "kernel", "step": 7, "follow": False, "request": "long"}
    room.take(teacher, "lead", **place)
    assert follower.news == before + 1
    assert room.facts(follower)["lead"] == place and "lead" not in room.facts(visitor)
    assert (room.facts(teacher)["visitors"], room.facts(teacher)["followers"]) == (2, 1)
    assert not room.facts(follower)["ended"]
    room.take(follower, "join", role="visitor")
    assert "lead" not in room.facts(follower) and room.facts(teacher)["followers"] == 0
    room.leave(teacher)
    assert room.facts(visitor) == {"role": "visitor", "taught": False}
    late = enter(room, "follower")
    assert room.facts(late)["ended"], "also for a phone that comes, or is loaded again, after the end"
    enter(room, "teacher", room.key)
    assert not room.facts(late)["ended"]


def test_a_page_that_is_loaded_again_is_the_same_person(room):
    """The old page is closed many seconds later, when its session is discarded."""
    teacher, other = enter(room, "teacher", room.key, visitor_id="t"), enter(room, "follower", visitor_id="b")
    before = enter(room, "follower", visitor_id="a")
    room.take(teacher, "ask", text="How many?")
    number = room.facts(before)["question"]["number"]
    room.take(before, "answer", number=number, value=3)
    after, again = enter(room, "follower", visitor_id="a"), enter(room, "teacher", room.key, visitor_id="t")
    for page in (teacher, again):
        facts = room.facts(page)
        assert (facts["visitors"], facts["followers"], facts["spread"]) == (2, 2, [("3", 1)])
    assert room.facts(after)["answered"] and not room.facts(other)["answered"]
    room.take(after, "answer", number=number, value=4)
    for page in (before, teacher):
        room.leave(page)
    facts = room.facts(again)
    assert (facts["visitors"], facts["followers"], facts["spread"]) == (2, 2, [("4", 1)])
    assert facts["question"], "the teacher is still here"
    room.take(again, "end")
    assert room.facts(after)["score"]["mine"] == 4
    room.leave(after)
    assert room.facts(again)["visitors"] == 1
    room.leave(again)
    assert not room.facts(other)["taught"]
    with pytest.raises(ValueError, match="visitor_id must have at most 64"):
        room.take(other, "join", role="follower", visitor_id="x" * 65)


def test_a_person_who_leaves_a_role_keeps_it_in_no_page_from_before_a_reload(room):
    before, follower = enter(room, "teacher", room.key, visitor_id="t"), enter(room, "follower")
    after = enter(room, "teacher", room.key, visitor_id="t")
    beside = enter(room, "follower", visitor_id="t")
    assert room.teaches(before) and room.teaches(after), "a tab beside it that follows ends no class"
    room.take(after, "join", role="visitor", visitor_id="t")
    assert not room.teaches(before) and room.belongs(beside)
    assert room.facts(after) == room.facts(before) == {"role": "visitor", "taught": False}
    assert not room.facts(follower)["taught"]
    room.take(after, "join", role="teacher", key=room.key, visitor_id="t")
    assert room.facts(follower)["taught"]


@pytest.mark.parametrize("by", ["role", "closing the page"])
def test_the_last_teacher_who_leaves_ends_the_question_and_the_score(room, by):
    first, second = enter(room, "teacher", room.key, visitor_id="a"), enter(room, "teacher", room.key, visitor_id="b")
    follower = enter(room, "follower")
    room.take(first, "questions", allowed=True)
    room.take(first, "ask", text="Which?", choices="x, y")

    def leave(page, visitor_id):
        room.leave(page) if by != "role" else room.take(page, "join", role="visitor", visitor_id=visitor_id)

    leave(first, "a")
    assert room.facts(follower)["question"] is not None, "one teacher is left"
    room.take(second, "end")
    assert room.facts(follower)["score"] is not None
    room.take(second, "ask", text="Which?", choices="x, y")
    room.comparison = object()
    leave(second, "b")
    facts = room.facts(follower)
    assert (facts["taught"], facts["question"], facts["score"], facts["lead"]) == (False, None, None, {})
    assert room.comparison is None and room.refusal(follower, "add_request") and not room.refusal(follower, "fork")


def test_equal_choices_are_one(room):
    teacher = enter(room, "teacher", room.key)
    room.take(teacher, "ask", text="Which?", choices="a, a, b")
    assert room.facts(teacher)["question"]["choices"] == ["a", "b"]
    with pytest.raises(ValueError, match="different"):
        room.take(teacher, "ask", text="Which?", choices="a, a")


def test_the_teacher_alone_shows_the_code_of_the_followers_link(room):
    teacher, follower = enter(room, "teacher", room.key), enter(room, "follower")
    assert room.facts(teacher)["code"] == []
    link = "http://192.0.2.7:8000/dashboard#follow"
    room.take(teacher, "code", link=link)
    code = room.facts(teacher)["code"]
    assert {len(row) for row in code} == {len(code)} and set("".join(code)) == {"0", "1"}
    assert code[0].startswith("1111111") and code[3].startswith("1011101"), "the corner by which cameras find it"
    assert "code" not in room.facts(follower)
    room.take(teacher, "code", link="http://192.0.2.8:8000/dashboard#follow")
    assert room.facts(teacher)["code"] != code
    room.take(teacher, "code", link="")
    assert room.facts(teacher)["code"] == []
    with pytest.raises(ValueError, match="at most 400 characters"):
        room.take(teacher, "code", link="x" * 401)
    with pytest.raises(ValueError, match="only the teacher"):
        room.take(follower, "code", link=link)


@pytest.mark.parametrize("values", [{"step": -1}, {"step": True}, {"step": "1"}, {"request": 3}, {"view": "else"}])
def test_a_place_out_of_range_is_refused(room, values):
    teacher = enter(room, "teacher", room.key)
    with pytest.raises(ValueError, match=next(iter(values))):
        room.take(teacher, "lead", **values)


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("1,281, 512, 64", ["1,281", "512", "64"]),
        ("64,128,256", ["64", "128", "256"]),
        ("a,b, c", ["a", "b", "c"]),
        ("long,paris, 1,281 tokens", ["long", "paris", "1,281 tokens"]),
        ("x , y", ["x", "y"]),
    ],
)
def test_a_comma_of_a_number_separates_nothing_where_others_have_a_space(room, text, choices):
    teacher = enter(room, "teacher", room.key)
    room.take(teacher, "ask", text="Which?", choices=text)
    assert room.facts(teacher)["question"]["choices"] == choices


def test_the_spread_of_choices_counts_each_followers_last_answer(room):
    rng = random.Random(4)
    teacher, followers = enter(room, "teacher", room.key), [enter(room, "follower") for _ in range(20)]
    room.take(teacher, "ask", text="Who waits?", choices="long, paris ,sky")
    number = room.facts(followers[0])["question"]["number"]
    last = {}
    for _ in range(60):
        follower, answer = rng.choice(followers), rng.choice(["long", "paris", "sky"])
        room.take(follower, "answer", number=number, value=answer)
        last[follower] = answer
    given = list(last.values())
    assert room.facts(teacher)["spread"] == [(name, given.count(name)) for name in ("long", "paris", "sky")]
    assert room.facts(followers[0])["answered"] == (followers[0] in last)
    for value in ("nobody", 3, None):
        with pytest.raises(ValueError, match="answer must be one of"):
            room.take(followers[0], "answer", number=number, value=value)
    room.take(teacher, "end")
    assert room.facts(followers[0])["question"] is None
    with pytest.raises(ValueError, match="not open any more"):
        room.take(followers[0], "answer", number=number, value="sky")


@pytest.mark.parametrize("seed", range(5))
def test_the_spread_of_numbers_has_every_answer_once_in_order(room, seed):
    rng = random.Random(seed)
    teacher, followers = enter(room, "teacher", room.key), [enter(room, "follower") for _ in range(30)]
    room.take(teacher, "ask", text="How many steps?")
    number = room.facts(followers[0])["question"]["number"]
    answers = [rng.choice([rng.randint(0, 5), rng.uniform(-100, 100)]) for _ in followers]
    for follower, answer in zip(followers, answers, strict=True):
        room.take(follower, "answer", number=number, value=answer)
    spread = room.facts(teacher)["spread"]
    assert sum(count for _, count in spread) == 30 and 1 < len(spread) <= MAX_BARS
    edges = [float(words.removeprefix("above ").split(" to ")[0]) for words, _ in spread if "below" not in words]
    assert edges == sorted(edges)
    for value in (float("nan"), float("inf"), True, "7", [], None, 1.7e308, -1.01e15, 10**400):
        with pytest.raises(ValueError, match="the answer must be "):
            room.take(followers[0], "answer", number=number, value=value)


@pytest.mark.parametrize("hostile", [(1e15, -1e15), (1e15,), (-1e15, 1e15, 1e-320), (5.0,) * 6])
@pytest.mark.parametrize("seed", range(3))
def test_answers_far_away_leave_the_bars_of_the_others_apart(room, hostile, seed):
    rng = random.Random(seed)
    teacher = enter(room, "teacher", room.key)
    room.take(teacher, "ask", text="How many steps?")
    honest = [rng.uniform(4, 20) for _ in range(20)]
    for value in [*honest, *hostile]:
        room.take(enter(room, "follower"), "answer", number=1, value=value)
    spread = room.facts(teacher)["spread"]
    assert sum(count for _, count in spread) == len(honest) + len(hostile)
    assert max(count for _, count in spread) < 12 + len(hostile) and sum(count > 0 for _, count in spread) >= 5
    named = {words.split()[0] for words, _ in spread}
    assert ("above" in named) == any(value > 40 for value in hostile)
    assert ("below" in named) == any(value < -20 for value in hostile)


def test_one_answer_given_by_most_has_a_bar_alone(room):
    teacher = enter(room, "teacher", room.key)
    room.take(teacher, "ask", text="How many steps?")
    for value in [7.0] * 40 + [float(value) for value in range(-4, 8)]:
        room.take(enter(room, "follower"), "answer", number=1, value=value)
    assert room.facts(teacher)["spread"] == [("below 7", 11), ("7", 41), ("above 7", 0)]


@pytest.mark.parametrize("choices", ["", "40, 71, 80"])
def test_the_teacher_tells_the_right_answer_and_how_many_gave_it(room, choices):
    teacher, followers = enter(room, "teacher", room.key), [enter(room, "follower") for _ in range(4)]
    answers = ["40", "71", "80", "71"] if choices else [40, 68, 90, 70.5]
    with pytest.raises(ValueError, match="show the picture"):
        room.take(teacher, "mark", value=71)
    room.take(teacher, "ask", text="How many steps?", choices=choices)
    for follower, answer in zip(followers, answers):
        room.take(follower, "answer", number=1, value=answer)
    with pytest.raises(ValueError, match="show the picture"):
        room.take(teacher, "mark", value=71)
    room.take(teacher, "end")
    assert "right" not in room.facts(followers[0])["score"]
    with pytest.raises(ValueError, match="only the teacher"):
        room.take(followers[0], "mark", value=71)
    with pytest.raises(ValueError, match="answer must be"):
        room.take(teacher, "mark", value="50" if choices else "much")
    room.take(teacher, "mark", value="71" if choices else 71)
    score = room.facts(followers[1])["score"]
    assert (score["right"], score["num_right"], score["num_given"]) == (("71", 2, 4) if choices else (71, 0, 4))
    assert score["nearest"] == (None if choices else 70.5) and score["mine"] == answers[1]
    room.take(teacher, "ask", text="And now?", choices=choices)
    assert room.facts(followers[1])["score"] is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_one_visitor_sends_changes_nothing_for_the_others(room, seed):
    """Every command with every kind of value, between honest ones; a control shows that the honest ones count."""
    rng = random.Random(seed)
    teacher, honest, hostile = enter(room, "teacher", room.key), enter(room, "follower"), enter(room, "follower")
    values = [1.7e308, -1.7e308, 10**400, float("nan"), "x" * 10_000, [], {}, None, True, -1, "\ud800", 7]
    for number in range(1, 4):
        room.take(teacher, "ask", text=f"question {number}")
        room.take(honest, "answer", number=number, value=4)
        before = room.facts(honest), room.facts(teacher)
        for _ in range(50):
            what = rng.choice(["answer", "lead", "ask", "end", "mark", "code", "join", "_spread", "__init__"])
            names = ["number", "value", "role", "key", "text", "choices", "view", "step", "follow", "request", "link"]
            names.append("visitor_id")
            given = {name: rng.choice(values) for name in rng.sample(names, rng.randrange(4))}
            if what == "answer":
                given = {"number": number, "value": rng.choice(values)}
            try:
                room.take(hostile, what, **given)
            except (ValueError, TypeError) as problem:
                assert str(problem)
            assert room.facts(honest) == before[0]
            spread = dict(room.facts(teacher)["spread"])
            assert spread.pop("4") == 1 and sum(spread.values()) <= 1
            assert room.facts(teacher) | {"spread": None} == before[1] | {"spread": None}


def test_a_question_out_of_range_is_refused_and_a_new_one_forgets_the_answers(room):
    teacher, follower = enter(room, "teacher", room.key), enter(room, "follower")
    for text, choices in ((" ", ""), ("x" * 241, ""), ("?", "one"), ("?", "a," * 9)):
        with pytest.raises(ValueError, match="must"):
            room.take(teacher, "ask", text=text, choices=choices)
    for text in ("first", "second"):
        room.take(teacher, "ask", text=text)
        assert room.facts(teacher)["spread"] == [] and not room.facts(follower)["answered"]
        room.take(follower, "answer", number=room.facts(follower)["question"]["number"], value=3)
        assert room.facts(teacher)["spread"] == [("3", 1)]


# -- rights ------------------------------------------------------------------------------------------------------------

COMMANDS = sorted(name.removeprefix("_do_") for name in vars(Feed) if name.startswith("_do_"))
ARGUMENTS = {
    "add_request": {"prompt": "hello", "run": True},
    "abort": {"request_id": "r0"},
    "step_into": {"layers": False},
    "capture": {"layer": 0},
    "shadow": {"step": 8},
    "add_breakpoint": {"kind": "preemption"},
    "remove_breakpoint": {"number": 1},
    "fork": {"at_step": 0, "changes": {"max_num_seqs": 2}},
    "explain": {"request_id": "r0"},
    "tune": {"slo": "ttft_p99=1s"},
    "show_weights": {"row": 0},
    "class": {"what": "end"},
}


class Engine(ReplayingController):
    """Notes what is done to it."""

    def __init__(self, recorded):
        super().__init__(recorded)
        self.done = []
        for name in ("start", "pause", "step", "step_into", "abort", "add_request", "capture", "shadow"):
            setattr(self, name, partial(self.note, name, getattr(self, name, lambda *args, **kwargs: None)))

    def note(self, name, do, *args, **kwargs):
        self.done.append(name)
        return do(*args, **kwargs)


@pytest.fixture
def taught(monkeypatch):
    """A class of a teacher, thirty followers, and a visitor: the engine, and each one's feed."""
    monkeypatch.setattr("workbench.viz.feed.in_background", lambda work, name: work())
    engine, room = Engine(random_trace(2)), Classroom()
    for _ in range(9):
        engine.step()
    feeds = [Feed(engine, room=room) for _ in range(32)]
    for feed in feeds:
        feed.confirm()
    for feed, role in zip(feeds, ["teacher", "visitor", *["follower"] * 30]):
        feed.handle({"name": "class", "args": {"what": "join", "role": role, "key": room.key}})
    engine.done.clear()
    return engine, feeds


def state_of(engine, feeds):
    statuses = [{name: value for name, value in feed.status().items() if name != "handled"} for feed in feeds]
    return len(engine.trace), engine.state, [*map(repr, engine.breakpoints)], statuses


@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_a_follower_sends_changes_nothing_for_others(taught, command):
    engine, (teacher, visitor, hostile, *others) = taught
    for sender in (hostile, visitor):
        witnesses = [teacher, *others, visitor if sender is hostile else hostile]
        before = state_of(engine, witnesses)
        sender.handle({"name": command, "args": ARGUMENTS.get(command, {})})
        assert engine.done == [] and state_of(engine, witnesses) == before
        if command not in READING:
            assert "teacher" in sender.status()["message"]


def test_what_a_command_repeats_needs_the_same_rights_and_is_carried_out_once(taught):
    engine, (teacher, _, hostile, *_) = taught
    steps = {str(number): {"name": "step", "args": {}} for number in range(1, 10)}
    last = {"id": 10, "name": "class", "args": {"what": "seen", "number": 1}, "before": steps}
    hostile.handle({**last, "sender": "h"})
    assert engine.done == []
    for _ in range(2):
        teacher.handle({**last, "sender": "t"})
    assert engine.done == ["step"] * 4, "the last four, once"
    teacher.handle({"id": 12, "sender": "t", "name": "step", "before": {"11": {"name": "pause", "args": {}}}})
    assert engine.done[4:] == ["pause", "step"]
    for before in ([1], {"x": {"name": "step"}}, {"13": "step"}, {"13": None}, 7, {"-1": {"name": "step"}}):
        teacher.handle({"id": 12, "sender": "t", "name": "step", "before": before})
    assert len(engine.done) == 6


@pytest.mark.parametrize("command", ["start", "pause", "step", "add_request", "abort"])
def test_the_teacher_controls_the_engine(taught, command):
    engine, (teacher, *_) = taught
    teacher.handle({"name": command, "args": ARGUMENTS.get(command, {})})
    assert command in engine.done


@pytest.mark.parametrize("command", ["fork", "tune"])
def test_a_follower_cannot_look_up_what_the_class_predicts(taught, command):
    _, (teacher, _, follower, *_) = taught
    ask = {"name": "class", "args": {"what": "ask", "text": "Who waits?"}}
    for feed, during in ((follower, True), (teacher, False)):
        teacher.handle(ask)
        feed.handle({"name": command, "args": {}})
        assert ("the class predicts" in feed._message) == during
        assert follower.status()["refused"]["foresee"] and not teacher.status()["refused"]["foresee"]
        teacher.handle({"name": "class", "args": {"what": "end"}})
        feed.handle({"name": command, "args": {}})
        assert "the class predicts" not in feed._message and not follower.status()["refused"]["foresee"]


def test_the_class_asks_when_the_teacher_lets_it(taught):
    engine, (teacher, visitor, follower, *_) = taught

    def ask(feed):
        feed.handle({"name": "add_request", "args": {"prompt": "hello"}})
        return "add_request" in engine.done

    assert follower.status()["refused"] == {"control": True, "ask": True, "foresee": False} and not ask(follower)
    follower.handle({"name": "class", "args": {"what": "questions", "allowed": True}})
    assert not ask(follower), "a follower cannot open questions"
    teacher.handle({"name": "class", "args": {"what": "questions", "allowed": True}})
    assert follower.status()["refused"] == {"control": True, "ask": False, "foresee": False}
    assert not ask(visitor) and ask(follower)
    engine.done.clear()
    teacher.handle({"name": "class", "args": {"what": "questions", "allowed": False}})
    assert not ask(follower)


@pytest.mark.parametrize("is_open", [True, False])
def test_visitors_control_an_engine_that_this_machine_alone_reaches(is_open):
    engine, room = Engine(random_trace(2)), Classroom(is_open=is_open)
    visitor, follower = Feed(engine, room=room), Feed(engine, room=room)
    for feed in (visitor, follower):
        feed.confirm()
    follower.handle({"name": "class", "args": {"what": "join", "role": "follower"}})
    follower.handle({"name": "step"})
    assert engine.done == []
    visitor.handle({"name": "start"})
    assert ("start" in engine.done) is is_open
