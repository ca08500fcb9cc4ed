"""Another load: the requests of a workload thinned out, joined by those of other users, or arriving faster.

"repeated" is more users: each session comes again from somebody else. It comes at another time, so that no two users
act in step, and requests that came together, such as a burst, still do. Its prompts share with others what sessions of
the file share, such as a system prompt, and nothing else; a request that waited for an answer waits for the copy's.
"compressed" is the same users in a hurry: the prefix cache sees the same requests in less time. The two give different
answers, because a cache and a session are used up by users, not by seconds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.base.field_checks import choice, number
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival, arrival_order

HOW = ("repeated", "compressed")
MAX_LOAD = 1000.0
SHARED_BLOCK = 16
"""Tokens that are compared at a time to find what sessions share."""

TOGETHER = 0.1
"""Sessions that begin within this share of the mean time between two of them come together."""

LEAST_SHIFT = 0.05
"""A session that fills the whole time of a file is still moved, by up to this share of it."""

_OTHER_USERS = 2**40
"""Added to the tokens of a repeated request, so that no prompt of another user is like it."""


def scale_load(arrivals: Iterable[Arrival], load: float, how: str = "repeated", seed: int = 0) -> list[Arrival]:
    """The arrivals at ``load`` times their load.

    Args:
        arrivals: The requests.
        load: 1 for the load as it is. Below 1, sessions are left out at random.
        how: "repeated" or "compressed".
        seed: Decides which sessions are left out, or come once more than others, and when the others come.

    Raises:
        ValueError: ``load`` or ``how`` is malformed.
    """
    number("load", load, 0.0, MAX_LOAD, low_open=True)
    choice("how", how, HOW)
    given = sorted(arrivals, key=arrival_order)
    if load == 1.0:
        return given
    if how == "compressed":
        return [
            replace(
                arrival,
                arrival_time=arrival.arrival_time / load,
                arrives_at=None if arrival.arrives_at is None else arrival.arrives_at / load,
                think=arrival.think / load,
            )
            for arrival in given
        ]
    whole, part = divmod(load, 1.0)
    sessions = _sessions(given)
    shared = _shared_tokens(sessions) if load > 1 else {}
    scaled = []
    for together in _together(sessions):
        for session in together:
            more = random.Random(f"load {seed} {session}").random() < part
            for copy in range(int(whole) + more):
                if copy == 0:
                    scaled += sessions[session]
                    continue
                first = min(together, key=together.index)
                share = random.Random(f"copy {seed} {first} {copy}").random()
                shift = _shift([each for name in together for each in sessions[name]], given, share)
                scaled += [_repeated(each, session, copy, shift, shared[each.request_id]) for each in sessions[session]]
    return sorted(scaled, key=arrival_order)


def _sessions(arrivals: Iterable[Arrival]) -> dict[str, list[Arrival]]:
    """The requests of each session, in the order of their beginnings; a follow-up belongs to that of its request."""
    found: dict[str, list[Arrival]] = defaultdict(list)
    session_of: dict[str, str] = {}
    for arrival in arrivals:
        session = arrival.session or session_of.get(arrival.after) or arrival.request_id
        session_of[arrival.request_id] = session
        found[session].append(arrival)
    return found


def _together(sessions: Mapping[str, Sequence[Arrival]]) -> list[list[str]]:
    """The sessions, in groups that begin together."""
    begins = {name: arrivals[0].arrives_at or 0.0 for name, arrivals in sessions.items()}
    names = sorted(begins, key=lambda name: begins[name])
    if not names:
        return []
    gap = TOGETHER * (begins[names[-1]] - begins[names[0]]) / max(1, len(names) - 1)
    groups: list[list[str]] = []
    for name in names:
        if groups and begins[name] - begins[groups[-1][-1]] <= gap and begins[names[-1]] > begins[names[0]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _shift(moved: Sequence[Arrival], given: Sequence[Arrival], share: float) -> float:
    """Seconds by which some requests are moved, so that they stay within the time of all; they wrap around its end."""
    times = [arrival.arrives_at or 0.0 for arrival in given]
    own = [arrival.arrives_at or 0.0 for arrival in moved]
    begin, whole = min(times), max(times) - min(times)
    room = max(whole - (max(own) - min(own)), LEAST_SHIFT * whole)
    place = min(own) - begin
    return (place + share * room) % room - place if room > 0 else 0.0


def _shared_tokens(sessions: Mapping[str, Sequence[Arrival]]) -> dict[str, int]:
    """For each request the tokens at its beginning that some other session has too, in whole blocks."""
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}
    owner: list[str | None] = [None]  # None once two sessions have it
    paths: dict[str, list[int]] = {}
    for session, arrivals in sessions.items():
        for arrival in arrivals:
            prompt, node = arrival.prompt_token_ids, 0
            path = paths[arrival.request_id] = []
            for end in range(SHARED_BLOCK, len(prompt) + 1, SHARED_BLOCK):
                node = nodes.setdefault((node, tuple(prompt[end - SHARED_BLOCK : end])), len(owner))
                if node == len(owner):
                    owner.append(session)
                elif owner[node] != session:
                    owner[node] = None
                path.append(node)
    return {name: SHARED_BLOCK * sum(owner[node] is None for node in path) for name, path in paths.items()}


def _repeated(arrival: Arrival, session: str, copy: int, shift: float, num_shared: int) -> Arrival:
    """A request of another user, with its own prompt behind what users share."""
    offset, prompt = copy * _OTHER_USERS, arrival.prompt_token_ids
    at = None if arrival.arrives_at is None else arrival.arrives_at + shift
    return replace(
        arrival,
        request_id=_name(arrival.request_id, copy),
        session=_name(session, copy),
        prompt_token_ids=[*prompt[:num_shared], *(token + offset for token in prompt[num_shared:])],
        arrives_at=at,
        arrival_time=arrival.arrival_time if at is None else arrival.arrival_time + shift,
        after=_name(arrival.after, copy) if arrival.after else "",
        copy_of=arrival.request_id,
        copy=copy,
    )


def _name(name: str, copy: int) -> str:
    return f"{name}/{copy + 1}"


class _Place(NamedTuple):
    """A request as far as its next token depends on it."""

    request_id: str
    num_tokens: int
    num_output_tokens: int


class CopiedTokens:
    """The tokens of requests and of their copies: a copy's answer is as long as the original's, and like no other.

    Args:
        sample_token: Gives the next token of an original.
        arrivals: The requests.
    """

    def __init__(self, sample_token: Callable[[Request], int], arrivals: Iterable[Arrival]) -> None:
        self._sample_token: Callable[[Any], int] = sample_token
        self._copies = {each.request_id: (each.copy_of, each.copy * _OTHER_USERS) for each in arrivals if each.copy_of}

    def __call__(self, request: Request) -> int:
        """The next token of a request."""
        if (made := self._copies.get(request.request_id)) is None:
            return self._sample_token(request)
        original, offset = made
        return self._sample_token(_Place(original, request.num_tokens, request.num_output_tokens)) + offset
