"""Prefill and decode apart: one pool of replicas computes prompts, another generates, and KV moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.analysis.fleet.router import Decision, Router
from workbench.analysis.fleet.routers import make_router
from workbench.base.field_checks import integer, json_object, number
from workbench.simulation.arrivals import Arrival


@dataclass(frozen=True)
class HandOver:
    """A request on its way from its prefill to its decode.

    Attributes:
        request_id: The request.
        time: Seconds since the start at which its prompt had been computed.
        source: Index of the replica that did it.
        replica: Index of the replica that decodes.
        num_tokens: Tokens whose KV was moved: those that the replica did not have.
        begins: The moment at which the link was free for it.
        ends: The moment at which its KV was there.
        decision: The router's decision.
    """

    request_id: str
    time: float
    source: int
    replica: int
    num_tokens: int
    begins: float
    ends: float
    decision: Decision


@dataclass(frozen=True)
class Split:
    """The pool that decodes, and the way to it.

    A prompt's KV is moved when its prefill has ended, one prompt after another to each replica. The last token of a
    prompt, and the tokens behind its last full block, are computed by the replica that decodes, which gives the first
    token.

    Attributes:
        replicas: Number of replicas that decode.
        kv_bytes_per_token: Bytes of KV of a token: 2 x layers x KV heads x head size x bytes of a number.
        bandwidth: Bytes a second to one replica.
        latency: Seconds that a move takes beside its bytes.
        router: Chooses the replica that decodes.
        config: Changes of the configuration for replicas that decode.
    """

    replicas: int
    kv_bytes_per_token: float
    bandwidth: float
    latency: float = 0.0
    router: str | Router = "least_loaded"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        integer("split.replicas", self.replicas, 1)
        number("split.kv_bytes_per_token", self.kv_bytes_per_token, 0.0)
        number("split.bandwidth", self.bandwidth, 0.0, low_open=True)
        number("split.latency", self.latency, 0.0)
        object.__setattr__(self, "made_router", make_router(self.router))

    made_router: Router = field(init=False, repr=False)

    @classmethod
    def read(cls, given: Split | Mapping[str, Any]) -> Split:
        """A split, or its fields by name.

        Raises:
            ValueError: A field is unknown, or outside its range.
        """
        if isinstance(given, Split):
            return given
        names = ("replicas", "kv_bytes_per_token", "bandwidth", "latency", "router", "config")
        fields = json_object("split", given, names)
        if missing := [name for name in names[:3] if name not in fields]:
            raise ValueError(f"split lacks {', '.join(missing)}")
        return cls(**fields)

    def seconds(self, num_tokens: int) -> float:
        """Time in which the KV of so many tokens is moved."""
        return self.latency + num_tokens * self.kv_bytes_per_token / self.bandwidth if num_tokens else 0.0

    def prefill_of(self, arrival: Arrival) -> Arrival:
        """The part of a request that computes its prompt: it ends with its first token, which is thrown away."""
        return replace(arrival, sampling=replace(arrival.sampling, max_tokens=1))
