"""A class: roles, the key of the teacher's link, the place of the teacher, and the spread of predictions."""

import random

import pytest

from workbench.viz.classroom import MAX_BARS, Classroom


class Page:
    """Stands for the feed of an open page."""


@pytest.fixture
def room():
    return Classroom()


def enter(room, role="visitor", key=""):
    page = Page()
    page.news = 0

    def on_news():
        page.news += 1

    room.enter(page, on_news)
    room.take(page, "join", role=role, key=key)
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
    room.take(follower, "join", role="visitor")
    assert "lead" not in room.facts(follower) and room.facts(teacher)["followers"] == 0
    room.leave(teacher)
    assert room.facts(visitor) == {"role": "visitor", "taught": False}


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
    edges = [float(words.split(" to ")[0]) for words, _ in spread]
    assert edges == sorted(edges)
    for value in (float("nan"), float("inf"), True, "7"):
        with pytest.raises(ValueError, match="must be a number"):
            room.take(followers[0], "answer", number=number, value=value)


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
