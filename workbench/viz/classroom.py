"""The visitors of a served dashboard: a teacher whose cursor others follow, and questions to predict an answer to.

Each visitor has a cursor; only a follower's moves with the teacher's, until the follower leaves again. The link of the
teacher carries a key that the server makes at its start. Answers have no names, and nothing of them is stored.

Followers read: what a page does to the engine, or to what others see, is the teacher's, and so is the switch that lets
the class ask the model. Visitors without a link may control the engine of a server that only this machine can reach, as
long as no teacher is there.
"""

from __future__ import annotations

import hmac
import re
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from statistics import quantiles
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from workbench.base.field_checks import choice
from workbench.base.field_checks import number as number_field
from workbench.base.on_demand import extra_for
from workbench.base.text import shown
from workbench.trace.readings.metrics import number
from workbench.viz import router_duel
from workbench.viz.duel import SIDES, Score, question

if TYPE_CHECKING:
    from workbench.viz.changed_run import Changed

ROLES = ("visitor", "follower", "teacher")

_ASKING = ("class", "resend", "explain", "look", "tune", "end_tuning", "fork")
READING = frozenset((*_ASKING, "link", "save_html", "forget_capture", "show_weights"))
"""Commands of a view whose results only its page sees. Every other one, a new one too, needs the right to control."""

FORESEEING = frozenset(("fork", "tune"))
"""Commands that answer what a class is asked to predict: followers have them while no question is open."""

VIEWS = ("story", "scheduler", "kernel", "all")

MAX_TEXT = 240
"""Maximum number of characters of a question."""

MAX_CHOICES = 8

MAX_CHOICE = 60
"""Maximum number of characters of a choice."""

MAX_LINK = 400
"""Maximum number of characters of a link whose QR code is shown."""

MAX_BARS = 10
"""Maximum number of bars of a spread of numbers."""

MAX_ANSWER = 1e15
"""Largest number, with either sign, that answers a question."""

FAR = 1.5
"""Distance beyond the middle half of the answers, in widths of that half, from which an answer shares an outermost bar:
one that is far away must not put all others into one bar."""


MAX_VISITOR = 64
"""Maximum number of characters of the id of a visitor."""


class Person:
    """The visitor behind a page, whose answers outlive a reload of it.

    Attributes:
        answer: The answer to the question that is open: a number, a choice, or None.
        bet: The answer to the question, or the bet on the duel, that has ended last; None for none.
    """

    def __init__(self) -> None:
        self.answer: float | str | None = None
        self.bet: float | str | None = None


class Visitor:
    """One open page. A page that was reloaded may stay open for a while beside the new one: both have one person.

    Attributes:
        role: One of ROLES.
        person: The one who is counted, and who answers.
        seen: The number of the duel whose pictures the page has: they are long, and are sent once.
        code: Rows of the QR code of the followers' link, "1" for a dark module; empty while it is not shown.
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.role = "visitor"
        self.person = Person()
        self.seen = 0
        self.code: list[str] = []
        self.on_news = on_news


class Classroom:
    """The visitors of one served dashboard. Used by one thread, that of the server's event loop.

    Args:
        is_open: Visitors without a link may control the engine while no teacher is there.

    Attributes:
        key: The key of the teacher's link.
        origins: Beginnings of the addresses by which the class may reach the server, the likeliest first; empty if only
            this machine reaches it, or nothing is known.
        comparison: The other side of the duel that was settled last, and what it differs in; None for none.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self.key = secrets.token_urlsafe(9)
        self.origins: list[str] = []
        self._is_open = is_open
        self._may_ask = False
        self._was_taught = False
        self._visitors: WeakKeyDictionary[Any, Visitor] = WeakKeyDictionary()
        self._people: WeakValueDictionary[str, Person] = WeakValueDictionary()
        self._lead: dict[str, Any] = {}
        self._question: dict[str, Any] | None = None
        self._score: dict[str, Any] | None = None
        self._pictures: tuple[tuple[str, str], ...] = ()
        self._number = 0
        self.comparison: Changed | None = None
        self._followers: list[Person] = []
        self._teachers: list[Person] = []

    def enter(self, page: Any, on_news: Callable[[], None]) -> None:
        """A page opens, if it has not yet; ``on_news`` is called whenever its `facts` may have changed."""
        if page not in self._visitors:
            self._visitors[page] = Visitor(on_news)
            self._tell()

    def leave(self, page: Any) -> None:
        """A page closes."""
        self._visitors.pop(page, None)
        self._tell()

    def refusal(self, page: Any, command: str) -> str:
        """The reason why a page may not give a command of a view; "" if it may."""
        visitor = self._visitors.get(page)
        role = visitor.role if visitor is not None else "visitor"
        if command in FORESEEING and role == "follower" and self._question is not None:
            return "the class predicts: what would happen is shown after the bets"
        if command in READING or self._controls(role) or (command == "add_request" and self._asks(role)):
            return ""
        if command == "add_request":
            return "the teacher has not opened questions to the class"
        return "only the teacher controls the engine: a page of the class reads"

    def take(self, page: Any, what: str, **values: Any) -> None:
        """Carry out a command of a page: join, lead, code, questions, ask, answer, bet, seen, end, mark or close.

        Raises:
            ValueError: The page may not do this, or a value is out of range.
        """
        commands: dict[str, Callable[..., None]] = {
            "join": self._join,
            "lead": self._lead_on,
            "code": self._show_code,
            "questions": self._let_ask,
            "ask": self._ask,
            "answer": self._answer,
            "bet": self._bet,
            "seen": self._see,
            "end": self._end,
            "mark": self._mark,
            "close": self._close,
        }
        commands[choice("what", what, tuple(commands))](self._visitors[page], **values)
        self._tell()

    def belongs(self, page: Any) -> bool:
        """Whether a page is the teacher's, or follows."""
        visitor = self._visitors.get(page)
        return visitor is not None and visitor.role != "visitor"

    def teaches(self, page: Any) -> bool:
        """Whether a page is the teacher's."""
        visitor = self._visitors.get(page)
        return visitor is not None and visitor.role == "teacher"

    def facts(self, page: Any) -> dict[str, Any]:
        """The part of a page's status that is about the class."""
        visitor = self._visitors.get(page)
        if visitor is None:
            return {}
        facts: dict[str, Any] = {"role": visitor.role, "taught": bool(self._teachers)}
        if visitor.role != "visitor":
            facts["score"] = self._score and self._score | {"mine": visitor.person.bet}
            if self._score and visitor.seen != self._score["number"]:
                facts["pictures"] = self._pictures
        if visitor.role == "follower":
            facts["ended"] = self._was_taught and not self._teachers
            facts |= {"lead": self._lead, "question": self._question, "answered": visitor.person.answer is not None}
        if visitor.role == "teacher":
            others = {each.person for each in self._visitors.values()}.difference(self._teachers)
            facts |= {"visitors": len(others), "followers": len(self._followers)}
            facts |= {"question": self._question, "spread": self._spread(self._followers), "code": visitor.code}
            facts["origin"] = self.origins[0] if self.origins else ""
            facts |= {"class_asks": self._may_ask, "routers": router_duel.offered()}
        return facts

    # -- commands --------------------------------------------------------------------------------------------------

    def _join(self, visitor: Visitor, role: str, key: str = "", visitor_id: str = "") -> None:
        """Take a role, as the person whose id the browser's tab keeps over a reload; "" for one nobody has met."""
        choice("role", role, ROLES)
        if not isinstance(visitor_id, str) or len(visitor_id) > MAX_VISITOR:
            raise ValueError(f"visitor_id must have at most {MAX_VISITOR} characters, got {shown(visitor_id)}")
        if role == "teacher" and not hmac.compare_digest(str(key).encode(), self.key.encode()):
            raise ValueError("this is not the teacher's link of this server: take the one that it printed at its start")
        left, visitor.role = visitor.role, role
        if visitor_id:
            visitor.person = self._people.setdefault(visitor_id, visitor.person)
        for each in self._visitors.values():  # a page before a reload keeps no role that its person leaves
            if each.person is visitor.person and each.role == left != role:
                each.role = "visitor"

    def _lead_on(
        self, visitor: Visitor, view: str = "story", step: int | None = None, follow: bool = False, request: Any = None
    ) -> None:
        self._teacher(visitor)
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise ValueError(f"step must be a number from 0, got {step!r}")
        if request is not None and not isinstance(request, str):
            raise ValueError(f"request must be the id of a request, got {request!r}")
        self._lead = {"view": choice("view", view, VIEWS), "step": step, "follow": bool(follow), "request": request}

    def _show_code(self, visitor: Visitor, link: str) -> None:
        """Show the QR code of the followers' link, which the teacher's page knows; "" takes it away."""
        self._teacher(visitor)
        if not isinstance(link, str) or len(link) > MAX_LINK:
            raise ValueError(f"link must have at most {MAX_LINK} characters, got {shown(link)}")
        with extra_for("a QR code"):
            import segno
        visitor.code = ["".join(map(str, row)) for row in segno.make_qr(link, error="m").matrix] if link else []

    def _let_ask(self, visitor: Visitor, allowed: bool) -> None:
        """Let the followers ask the model, or no longer."""
        self._teacher(visitor)
        self._may_ask = bool(allowed)

    def _ask(self, visitor: Visitor, text: str, choices: str = "") -> None:
        """Ask for a prediction: one of the choices, which commas separate, or a number if there are none.

        A comma between two digits is one of a number, such as 1,281, if others have a space behind them.
        """
        self._teacher(visitor)
        comma = r",\s+|,(?!\d)|(?<!\d)," if re.search(r",\s+\d", str(choices)) else ","
        options = list(
            dict.fromkeys(option.strip()[:MAX_CHOICE] for option in re.split(comma, str(choices)) if option.strip())
        )
        if not 1 <= len(str(text).strip()) <= MAX_TEXT:
            raise ValueError(f"the question must have from 1 to {MAX_TEXT} characters")
        if len(options) == 1 or len(options) > MAX_CHOICES:
            raise ValueError(
                f"choices must be from 2 to {MAX_CHOICES} different ones with commas between them, or none for a number"
            )
        self._put({"text": str(text).strip(), "choices": options})

    def _bet(
        self,
        visitor: Visitor,
        changes: dict[str, Any],
        measure: str,
        routers: dict[str, Any] | None = None,
        unit: str = "s",
        now: dict[str, Any] | None = None,
        uncertain: float = 0.0,
    ) -> None:
        """Let the class bet on a duel, which `settle` ends: this run or its requests with changes, or two routers.

        The question says the unit in which it will be settled, the settings ``now`` that changes replace, and what is a
        tie if differences of its predictions up to ``uncertain`` say nothing.
        """
        self._teacher(visitor)
        routers = router_duel.read_routers(routers) if routers is not None else None
        duel = {
            "changes": changes,
            "measure": measure,
            "routers": routers,
            "unit": choice("unit", unit, ("s", "steps")),
            "uncertain": uncertain,
        }
        text = question(changes, measure, routers, unit, now, uncertain)
        asked = {"text": text, "choices": list(SIDES), "duel": duel}
        self._put(asked | ({"sides": router_duel.sides(routers)} if routers is not None else {}))

    def _put(self, asked: dict[str, Any]) -> None:
        """Put a question to the class."""
        self._number += 1
        self._question, self._score, self.comparison = {"number": self._number, **asked}, None, None
        for each in self._visitors.values():
            each.person.answer = each.person.bet = None

    @property
    def duel(self) -> dict[str, Any] | None:
        """The changes or routers, and the measure, of the duel on which the class bets; None for none."""
        return self._question and self._question.get("duel")

    def settle(self, score: Score, comparison: Changed | None = None) -> None:
        """End the bets on a duel, and tell everybody who has won and how many were right.

        Args:
            score: The end of the duel.
            comparison: The other side and what it differs in, which all pages of the class show beside the run.
        """
        if self.duel is None:
            return
        ended = self._end_question()
        number = {"duel": ended["number"]}  # by which a page knows it from what somebody has asked for since
        self.comparison = comparison and comparison._replace(facts=comparison.facts | number)
        bets = [person.bet for person in self._followers if person.bet is not None]
        told = {name: value for name, value in score._asdict().items() if name != "pictures"}
        counts = {"compares": comparison is not None, "right": bets.count(score.winner), "bets": len(bets)}
        self._score, self._pictures = ended | told | counts, score.pictures
        self._tell()

    def _see(self, visitor: Visitor, number: int) -> None:
        """The page has the pictures of a duel."""
        visitor.seen = number

    def _answer(self, visitor: Visitor, number: int, value: float | str) -> None:
        question = self._question
        if visitor.role != "follower" or question is None or number != question["number"]:
            raise ValueError("this question is not open any more")
        if question["choices"]:
            visitor.person.answer = choice("answer", value, question["choices"])
        else:
            visitor.person.answer = number_field("the answer", value, -MAX_ANSWER, MAX_ANSWER)

    def _end(self, visitor: Visitor) -> None:
        """End a question: its answers stay beside the picture until the next one, or until the teacher closes them."""
        self._teacher(visitor)
        if self._question is None:
            return
        asked, is_duel = {"asked": self._question["text"], "choices": self._question["choices"]}, self.duel is not None
        ended = self._end_question()
        self._score, self._pictures = None if is_duel else ended | asked, ()

    def _mark(self, visitor: Visitor, value: float | str) -> None:
        """Say which answer to the question that has ended is right: one of its choices, or a number."""
        self._teacher(visitor)
        if self._score is None or "asked" not in self._score:
            raise ValueError("there is no question whose answer could be told: ask one, and show the picture")
        choices = self._score["choices"]
        right = (
            choice("answer", value, choices) if choices else number_field("the answer", value, -MAX_ANSWER, MAX_ANSWER)
        )
        given = [person.bet for person in self._followers if person.bet is not None]
        numbers = [] if choices else list(map(float, given))
        near = min(numbers, key=lambda each: abs(each - float(right)), default=None)
        self._score |= {"right": right, "num_right": given.count(right), "num_given": len(given), "nearest": near}

    def _close(self, visitor: Visitor) -> None:
        """Take away the answers, or the score and the comparison, of what has ended last."""
        self._teacher(visitor)
        self._score = self.comparison = None

    def _end_question(self) -> dict[str, Any]:
        """Keep the answers, and end the question; returns its number and the spread of the answers."""
        ended = {"number": self._number, "spread": self._spread(self._followers)}
        for person in self._followers:
            person.bet = person.answer
        self._question = None
        return ended

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _teacher(self, visitor: Visitor) -> None:
        if visitor.role != "teacher":
            raise ValueError("only the teacher can do this: open the teacher's link that the server printed")

    def _controls(self, role: str) -> bool:
        return role == "teacher" or (role == "visitor" and self._is_open and not self._teachers)

    def _asks(self, role: str) -> bool:
        return self._controls(role) or (role == "follower" and self._may_ask)

    def _spread(self, followers: list[Person]) -> list[tuple[str, int]]:
        """The answers of the followers as (words, count): each choice, or ranges of numbers from small to large."""
        if self._question is None:
            return []
        given = [person.answer for person in followers if person.answer is not None]
        if self._question["choices"]:
            counts = Counter(given)
            return [(option, counts[option]) for option in self._question["choices"]]
        numbers = sorted(value for value in given if not isinstance(value, str))
        if len(set(numbers)) <= MAX_BARS:
            return [(_answer_words(value), count) for value, count in sorted(Counter(numbers).items())]
        return _histogram(numbers)

    def _count(self) -> None:
        """Count people, not pages: in each role, in the order in which they came; without a teacher, a class ends."""
        visitors, was_taught = list(self._visitors.values()), bool(self._teachers)
        self._was_taught |= was_taught
        self._followers, self._teachers = (
            list(dict.fromkeys(visitor.person for visitor in visitors if visitor.role == role))
            for role in ("follower", "teacher")
        )
        if was_taught and not self._teachers:
            self._question, self._score, self._lead, self._may_ask = None, None, {}, False
            self.comparison = None

    def _tell(self) -> None:
        self._count()
        for visitor in list(self._visitors.values()):
            visitor.on_news()


def _answer_words(value: float) -> str:
    """An answer as people write it, with all of its digits up to the sixth and without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:,.6g}"


def _histogram(numbers: list[float]) -> list[tuple[str, int]]:
    """Bars of equal width over sorted numbers, the outermost of which also count what is far away."""
    lower, _, upper = quantiles(numbers, n=4)
    reach = FAR * (upper - lower)
    low, high = max(numbers[0], lower - reach), min(numbers[-1], upper + reach)
    if low == high:  # most answers are the same number
        below, above = sum(number < low for number in numbers), sum(number > low for number in numbers)
        most = _answer_words(low)
        return [(f"below {most}", below), (most, len(numbers) - below - above), (f"above {most}", above)]
    edges = [low + i * (high - low) / MAX_BARS for i in range(MAX_BARS + 1)]
    bins = Counter(min(MAX_BARS - 1, max(0, bisect_right(edges, number) - 1)) for number in numbers)
    words = [f"{number(left)} to {number(right)}" for left, right in pairwise(edges)]
    if numbers[0] < low:
        words[0] = f"below {number(edges[1])}"
    if numbers[-1] > high:
        words[-1] = f"above {number(edges[-2])}"
    return [(word, bins[i]) for i, word in enumerate(words)]
