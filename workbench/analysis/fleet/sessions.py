"""Closed loops: sessions whose next request depends on the end of the one before, as those of people and agents do.

    {"sessions": {"count": 20, "seed": 0, "arrivals": {"process": "poisson", "rate": 0.2}, "shared": 800,
                  "turns": {"uniform": [4, 12]}, "input": {"lognormal": {"median": 300, "sigma": 1}}, "output": 150,
                  "think": 5.0, "branch": 0.1,
                  "subagents": {"chance": 0.2, "count": 3, "turns": 2, "input": 500, "output": 100, "report": 200}}}

``shared`` tokens begin every session. A turn's prompt is all that was said before and ``input`` new tokens; after its
end the user thinks for ``think`` seconds on average (exponentially distributed; 0 for an agent that answers at once).
With the chance ``branch`` a turn is asked again: the latest question and answer are dropped. With ``chance`` a turn is
followed by subagents, which begin with what the session has said so far, run side by side, and each leave ``report``
tokens to the session when the last of them has ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from workbench.base.field_checks import integer, json_object, number
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import OWN_TOKENS, Arrival, Lengths, read_lengths, read_process, timed_arrival
from workbench.simulation.limits import MAX_PROMPT_TOKENS

_FIELDS = ("count", "seed", "arrivals", "shared", "turns", "input", "output", "think", "branch", "subagents")
_SUBAGENT_FIELDS = ("chance", "count", "turns", "input", "output", "report")


@dataclass(frozen=True)
class _Kind:
    """The habits of a session or of a subagent."""

    turns: Lengths
    input: Lengths
    output: Lengths


@dataclass
class _Session:
    """A session between two of its requests, or while one of them runs."""

    name: str
    kind: _Kind
    rng: random.Random
    said: list[int]
    turns_left: int
    parent: _Session | None = None
    before: list[int] = field(default_factory=list)  # what was said before the latest question
    num_requests: int = 0
    num_subagents: int = 0
    num_running: int = 0  # subagents that have not ended


class Sessions:
    """The requests of sessions, each made when it is known when it comes.

    Args:
        spec: See above; ``count``, ``turns``, ``input`` and ``output`` are needed.
        load: Multiplies ``count`` and the rate of arrivals.

    Raises:
        ValueError: The description is malformed; the message names the place.
    """

    def __init__(self, spec: Mapping[str, Any], load: float = 1.0) -> None:
        json_object("sessions", spec, _FIELDS)
        self._spec = spec
        self._count = max(1, round(load * integer("sessions.count", spec.get("count"), 1)))
        self._load = load
        self._seed = integer("sessions.seed", spec.get("seed", 0), 0)
        self._process = spec.get("arrivals") or {"process": "at_once"}
        read_process("sessions.arrivals", self._process, random.Random(0))
        self._num_shared = integer("sessions.shared", spec.get("shared", 0), 0, MAX_PROMPT_TOKENS)
        self._think = number("sessions.think", spec.get("think", 0.0), 0.0)
        self._branch = number("sessions.branch", spec.get("branch", 0.0), 0.0, 1.0)
        self._kind = _kind("sessions", spec)
        self._chance, self._num_reported = 0.0, 0
        if (below := spec.get("subagents")) is not None:
            json_object("sessions.subagents", below, _SUBAGENT_FIELDS)
            self._chance = number("sessions.subagents.chance", below.get("chance"), 0.0, 1.0)
            self._num_subagents = integer("sessions.subagents.count", below.get("count"), 1, 1000)
            self._num_reported = integer("sessions.subagents.report", below.get("report", 0), 0, MAX_PROMPT_TOKENS)
            self._subagent = _kind("sessions.subagents", below)
        self._num_made_up = 0
        self._running: dict[str, _Session] = {}

    def __repr__(self) -> str:
        return f"Sessions({self._spec}, load={self._load:g})"

    def __reduce__(self) -> tuple[type[Sessions], tuple[Mapping[str, Any], float]]:
        return Sessions, (self._spec, self._load)

    def with_seed(self, seed: int) -> Sessions:
        """The sessions of another seed, for a repeat; those of the description for 0."""
        return Sessions({**self._spec, "seed": self._seed + seed}, self._load)

    def with_load(self, load: float) -> Sessions:
        """The sessions of the description at another load."""
        return Sessions(self._spec, load)

    def first(self) -> Iterator[Arrival]:
        """The first request of each session, which begins a run."""
        self._num_made_up = 0
        self._running.clear()
        times = read_process("sessions.arrivals", self._process, random.Random(f"arrivals {self._seed}"))
        for index, time in enumerate(time / self._load for time in islice(times, self._count)):
            rng = random.Random(f"session {self._seed} {index}")
            session = _Session(f"s{index}", self._kind, rng, [0] * self._num_shared, self._kind.turns(rng))
            yield self._ask(session, time)

    def ended(self, request: Request, time: float) -> list[Arrival]:
        """The requests that follow from the end of one.

        Args:
            request: The request that has ended, with its output.
            time: The moment of its end.
        """
        session = self._running.pop(request.request_id.partition(" again ")[0])
        session.said = request.token_ids.copy()
        if self._chance and session.parent is None and session.turns_left and session.rng.random() < self._chance:
            return [self._ask(self._start_subagent(session), time) for _ in range(self._num_subagents)]
        return self._next(session, time)

    def _next(self, session: _Session, time: float) -> list[Arrival]:
        rng = session.rng
        if session.turns_left:
            if session.num_requests and rng.random() < self._branch:
                session.said = session.before
            thinks = self._think and session.parent is None
            return [self._ask(session, time + (rng.expovariate(1 / self._think) if thinks else 0.0))]
        if (parent := session.parent) is None:
            return []
        parent.said = parent.said + self._made_up(self._num_reported)
        parent.num_running -= 1
        return [] if parent.num_running else self._next(parent, time)

    def _start_subagent(self, parent: _Session) -> _Session:
        parent.num_running += 1
        parent.num_subagents += 1
        rng, kind = random.Random(parent.rng.random()), self._subagent
        return _Session(f"{parent.name}.{parent.num_subagents}", kind, rng, parent.said, kind.turns(rng), parent)

    def _ask(self, session: _Session, time: float) -> Arrival:
        """The next request of a session."""
        session.before = session.said
        prompt = session.said + self._made_up(session.kind.input(session.rng))
        session.turns_left -= 1
        session.num_requests += 1
        name = f"{session.name}/{session.num_requests}"
        self._running[name] = session
        return timed_arrival(name, prompt, session.kind.output(session.rng), time, session=session.name)

    def _made_up(self, count: int) -> list[int]:
        """Tokens that nothing else has."""
        self._num_made_up += 1
        return [OWN_TOKENS + self._num_made_up] * count


def _kind(place: str, spec: Mapping[str, Any]) -> _Kind:
    turns, input_, output = (read_lengths(f"{place}.{name}", spec.get(name)) for name in ("turns", "input", "output"))
    return _Kind(turns, input_, output)
