"""Another load: the requests of a workload thinned out, repeated, or arriving faster.

"repeated" is more users: each request comes again from others, whose prompts share nothing with the first but as much
among themselves. "compressed" is the same users in a hurry: the prefix cache sees the same requests in less time. The
two give different answers, because a cache and a session are used up by users, not by seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from workbench.base.field_checks import choice, number
from workbench.simulation.arrivals import Arrival, arrival_order

HOW = ("repeated", "compressed")
MAX_LOAD = 1000.0
_OTHER_USERS = 2**40
"""Added to the tokens of a repeated request, so that no prompt of another user begins like it."""


def scale_load(arrivals: Iterable[Arrival], load: float, how: str = "repeated", seed: int = 0) -> list[Arrival]:
    """The arrivals at ``load`` times their load.

    Args:
        arrivals: The requests.
        load: 1 for the load as it is. Below 1, sessions are left out at random.
        how: "repeated" or "compressed".
        seed: Decides which sessions are left out, or come once more than others.

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
            )
            for arrival in given
        ]
    whole, part = divmod(load, 1.0)
    scaled = []
    for arrival in given:
        session = arrival.session or arrival.request_id
        more = random.Random(f"load {seed} {session}").random() < part
        for copy in range(int(whole) + more):
            scaled.append(arrival if copy == 0 else _repeated(arrival, session, copy))
    return scaled


def _repeated(arrival: Arrival, session: str, copy: int) -> Arrival:
    offset = copy * _OTHER_USERS
    return replace(
        arrival,
        request_id=f"{arrival.request_id}/{copy + 1}",
        session=f"{session}/{copy + 1}",
        prompt_token_ids=[token + offset for token in arrival.prompt_token_ids],
    )
