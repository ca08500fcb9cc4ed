"""Routers: each takes a request and the replicas, and chooses one by the rule of a real router.

Names and rules are those of vllm-router 0.1.17 (src/policies of its source distribution) where it has them; "vllm" is
the choice between data-parallel ranks of vLLM 0.33.0 (v1/engine/core_client.py). One's own router is a `Router`:

    class Shortest(Router):
        scores = "waiting requests"

        def choose(self, request, replicas):
            waiting = [replica.num_waiting for replica in replicas]
            return self.lowest(waiting)
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence

from workbench.analysis.fleet.hashing import session_hashes
from workbench.analysis.fleet.prefix_tree import PrefixTree
from workbench.analysis.fleet.router import Decision, ReplicaView, Router
from workbench.base.field_checks import number, suggestion
from workbench.base.text import counted, shown
from workbench.config import EngineConfig
from workbench.simulation.arrivals import Arrival


class RoundRobin(Router):
    """One after another."""

    name = "round_robin"
    looks_at_replicas = False

    def start(self, names: Sequence[str], seed: int) -> None:
        """See `Router.start`."""
        self._next = 0

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        self._next += 1
        return Decision((self._next - 1) % len(replicas))


class Random(Router):
    """Any, with equal chances."""

    name = "random"
    looks_at_replicas = False

    def start(self, names: Sequence[str], seed: int) -> None:
        """See `Router.start`."""
        self._random = random.Random(f"router {seed}")

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        return Decision(self._random.randrange(len(replicas)))


class PowerOfTwo(Router):
    """Of two replicas, drawn at random, the one with fewer requests in flight; the first if they are equal."""

    name = "power_of_two"
    scores = "requests in flight"

    def start(self, names: Sequence[str], seed: int) -> None:
        """See `Router.start`."""
        self._random = random.Random(f"router {seed}")

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        loads = tuple(replica.num_in_flight for replica in replicas)
        if len(replicas) == 1:
            return Decision(0, loads)
        first, second = self._random.sample(range(len(replicas)), 2)
        return Decision(first if loads[first] <= loads[second] else second, loads, f"{first} or {second} was drawn")


class LeastLoaded(Router):
    """The one with the fewest requests in flight; the first of them."""

    name = "least_loaded"
    scores = "requests in flight"

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        return self.lowest([replica.num_in_flight for replica in replicas])


class ConsistentHash(Router):
    """The replica whose point on a ring of hashes follows that of the request's session.

    Args:
        key: The text that vllm-router hashes for a session: by default that of a header ``X-Session-ID``.
    """

    name = "consistent_hash"
    looks_at_replicas = False
    _POINTS = 160
    """Points of each replica on the ring."""

    def __init__(self, key: str = "header:x-session-id:{session}") -> None:
        if "{session}" not in key:
            raise ValueError(f"key must contain {{session}}, got {shown(key)}")
        self._key = key

    def start(self, names: Sequence[str], seed: int) -> None:
        """See `Router.start`."""
        hashes = session_hashes([f"{name}:{point}" for name in names for point in range(self._POINTS)])
        self._num_replicas = len(names)
        points = {point: place // self._POINTS for place, point in enumerate(hashes)}
        self._points = sorted(points)
        self._owners = [points[point] for point in self._points]

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        (place,), owners, count = self._places([request]), self._owners, len(self._owners)
        if len(replicas) == self._num_replicas:
            return Decision(owners[place % count])
        places = {replica.index: its for its, replica in enumerate(replicas)}
        while owners[place % count] not in places:
            place += 1
        return Decision(places[owners[place % count]])

    def choose_all(self, requests: Sequence[Arrival], num_replicas: int) -> list[int]:
        """See `Router.choose_all`; the requests are hashed together."""
        owners, count = self._owners, len(self._owners)
        return [owners[place % count] for place in self._places(requests)]

    def _places(self, requests: Sequence[Arrival]) -> list[int]:
        """The places of requests in the list of points."""
        hashes = session_hashes([self._key.format(session=_session(request)) for request in requests])
        return [bisect_left(self._points, word) for word in hashes]


class Sticky(Router):
    """A session stays where its first request went, the replica with the fewest sessions: sticky_least_loaded.

    Equal numbers are decided by the hash of session and address, the highest wins.

    Args:
        expires_after: Seconds without a request after which a session is forgotten.
    """

    name = "sticky"
    scores = "sessions"
    looks_at_replicas = False
    _SWEEP_SECONDS = 60.0

    def __init__(self, expires_after: float = 7200.0) -> None:
        self._expires_after = number("expires_after", expires_after, 0.0, low_open=True)

    def start(self, names: Sequence[str], seed: int) -> None:
        """See `Router.start`."""
        self._names = names
        self._sessions: dict[str, tuple[int, float]] = {}  # replica, time of the latest request
        self._counts = [0] * len(names)
        self._swept = 0.0

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        session, now = _session(request), request.arrives_at or 0.0
        if now - self._swept >= self._SWEEP_SECONDS:
            self._swept = now
            for other in [name for name, (_, used) in self._sessions.items() if now - used >= self._expires_after]:
                self._forget(other)
        if session in self._sessions and now - self._sessions[session][1] >= self._expires_after:
            self._forget(session)
        indices = self.indices(replicas)
        counts = tuple(self._counts[index] for index in indices)
        if session in self._sessions and self._sessions[session][0] in indices:
            return Decision(indices.index(self._sessions[session][0]), counts, "known session")
        fewest = min(counts)
        tied = [place for place, count in enumerate(counts) if count == fewest]
        hashes = session_hashes([f"{session}:{self._names[indices[place]]}" for place in tied])
        return Decision(tied[hashes.index(max(hashes))], counts, "new session")

    def sent(self, request: Arrival, index: int) -> None:
        """See `Router.sent`."""
        session = _session(request)
        if session in self._sessions:
            self._forget(session)
        self._counts[index] += 1
        self._sessions[session] = (index, request.arrives_at or 0.0)

    def _forget(self, session: str) -> None:
        self._counts[self._sessions.pop(session)[0]] -= 1


class CacheAware(Router):
    """The replica that was sent the longest common prefix before, unless loads differ too much.

    Every replica has a tree of the prompts that were sent to it, which knows nothing of the replica's real cache.

    Args:
        cache_threshold: Share of the prompt that must have been sent before.
        balance_abs_threshold: Difference of requests in flight above which loads differ too much,
        balance_rel_threshold: if the highest is also above this multiple of the lowest.
        max_tree_tokens: Tokens to which a tree is cut back,
        eviction_interval: at intervals of so many seconds; None for never.
    """

    name = "cache_aware"
    scores = "share of the prompt that was sent there before"
    _PREFIX = "prefix"
    """The rule of a decision for the longest prefix."""

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        max_tree_tokens: int = 2**22,
        eviction_interval: float | None = 120.0,
    ) -> None:
        self._cache_threshold = number("cache_threshold", cache_threshold, 0.0, 1.0)
        self._absolute = number("balance_abs_threshold", balance_abs_threshold, 0.0)
        self._relative = number("balance_rel_threshold", balance_rel_threshold, 0.0)
        self._max_tree_tokens = max_tree_tokens
        self._interval = eviction_interval

    def start(self, names: Sequence[str], seed: int) -> None:
        """See `Router.start`."""
        self._trees = [PrefixTree() for _ in names]
        self._evicted = 0.0

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        now, prompt = request.arrives_at or 0.0, request.prompt_token_ids
        if self._interval is not None and now - self._evicted >= self._interval:
            self._evicted = now
            for tree in self._trees:
                tree.evict(self._max_tree_tokens)
        loads = tuple(replica.num_in_flight for replica in replicas)
        shares = tuple(self._trees[index].match(prompt) / len(prompt) for index in self.indices(replicas))
        fewest, most = min(loads), max(loads)
        candidates = range(len(loads))
        if most - fewest > self._absolute and most > fewest * self._relative:
            rule = f"loads of {fewest} to {most} are out of balance"
        elif max(shares) > self._cache_threshold:
            candidates, rule = [index for index in candidates if shares[index] == max(shares)], self._PREFIX  # type: ignore[assignment]
        else:
            rule = "no prefix is long enough"
        return Decision(min(candidates, key=loads.__getitem__), shares, rule, loads)

    def why_together(self, decisions: Sequence[Decision]) -> str:
        """See `Router.why_together`."""
        by_prefix = [decision for decision in decisions if decision.rule == self._PREFIX]
        if 2 * len(by_prefix) <= len(decisions):
            return ""
        shared = min(max(decision.scores) for decision in by_prefix)
        apart = max(max(decision.loads) - min(decision.loads) for decision in by_prefix)
        balance = f"the largest difference was {apart}, and balance_abs_threshold is {self._absolute:g}"
        if apart > self._absolute:
            balance = f"the highest was never above {self._relative:g} times the lowest, which is balance_rel_threshold"
        return (
            f"{len(by_prefix)} of them shared {shared:.0%} or more of their prompt with one that was sent there "
            f"before; cache_threshold is {self._cache_threshold:g}. The loads, in requests in flight, counted as "
            f"balanced: {balance}."
        )

    def sent(self, request: Arrival, index: int) -> None:
        """See `Router.sent`."""
        self._trees[index].insert(request.prompt_token_ids)


class Prefix(Router):
    """The least work, by the prefix caches as their KV events tell them; vllm-router's kv_aware.

    The cost of a replica is the number of prompt tokens that it has to compute times that of its requests, both with
    this request.
    """

    name = "prefix"
    scores = "prompt tokens to compute, times requests"
    reads_prefixes = True

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        length = len(request.prompt_token_ids)
        return self.lowest(
            [
                (length - replica.num_cached_tokens(request) + replica.num_prefill_tokens)
                * (replica.num_in_flight + 1.0)
                for replica in replicas
            ]
        )


class Score(Router):
    """The highest share of the prompt in the prefix cache, less ``beta`` times the requests in flight.

    Args:
        beta: The worth of one request in flight, as a share of the prompt.
    """

    name = "score"
    scores = "cached share of the prompt, less beta x requests in flight"
    reads_prefixes = True

    def __init__(self, beta: float = 0.05) -> None:
        self._beta = number("beta", beta, 0.0)

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        length = len(request.prompt_token_ids)
        scores = [
            replica.num_cached_tokens(request) / length - self._beta * replica.num_in_flight for replica in replicas
        ]
        return Decision(max(range(len(scores)), key=scores.__getitem__), tuple(scores))


class Vllm(Router):
    """vLLM's own choice between data-parallel ranks: the lowest load, in which a queue counts more on a full KV pool.

    Loads are compared from a start that moves by one with each request. The real router's snapshot of queues is up to
    100 ms old; here it is that of each rank's latest step.
    """

    name = "vllm"
    scores = "max(in flight, waiting + running) + 6 x waiting x max(0, KV use - 0.5)"

    def start(self, names: Sequence[str], seed: int) -> None:
        """See `Router.start`."""
        self._first = 0

    def choose(self, request: Arrival, replicas: Sequence[ReplicaView]) -> Decision:
        """See `Router.choose`."""
        scores = tuple(
            max(replica.num_in_flight, replica.num_waiting + replica.num_running)
            + replica.num_waiting * 6.0 * max(0.0, replica.kv_use - 0.5)
            for replica in replicas
        )
        order = [(self._first + place) % len(scores) for place in range(len(scores))]
        self._first = (self._first + 1) % len(scores)
        return Decision(min(order, key=scores.__getitem__), scores)


def _session(request: Arrival) -> str:
    return request.session or request.request_id


ROUTERS: dict[str, type[Router]] = {
    kind.name: kind
    for kind in (
        *(RoundRobin, Random, PowerOfTwo, LeastLoaded, ConsistentHash, Sticky),
        *(CacheAware, Prefix, Score, Vllm),
    )
}
"""The routers by name."""

RULES = {name: (kind.__doc__ or "").partition("\n")[0].rstrip(".") for name, kind in ROUTERS.items()}
"""The rule of each in a sentence part, by name, for the places where a router is chosen or shown."""


def make_router(router: str | Router) -> Router:
    """A router by its name, or the object that is given.

    Raises:
        ValueError: There is no such router.
    """
    if isinstance(router, Router):
        return router
    if not isinstance(router, str) or router not in ROUTERS:
        hint = suggestion(router, ROUTERS) if isinstance(router, str) else "; or give a Router"
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {shown(router)}{hint}")
    return ROUTERS[router]()


def why_not(router: str | Router, config: EngineConfig) -> str:
    """Why a router cannot serve replicas of a configuration; "" if it can."""
    chosen = make_router(router)
    if not chosen.reads_prefixes:
        return ""
    if not config.enable_prefix_caching:
        return f"router {chosen.name} reads prefix caches, so enable_prefix_caching must be true"
    if len(config.cache_groups) > 1:
        groups = counted(len(config.cache_groups), "KV cache group")
        return f"router {chosen.name} reads prefix caches of one KV cache group, and the replicas have {groups}"
    return ""


def check_serves(router: str | Router, config: EngineConfig) -> None:
    """Refuse a router that cannot serve replicas of a configuration.

    Raises:
        ValueError: It reads prefix caches, and they have none, or several KV cache groups.
    """
    if problem := why_not(router, config):
        raise ValueError(problem)
