"""Replay a workload against an engine in this process. Standard library only: llama.cpp's Python runs it too."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from serving.workloads import Workload


@dataclass
class Events:
    """The result of a step: requests whose prompt it began, and the (request, token) pairs it produced."""

    scheduled: list[int] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)


class ServingEngine(Protocol):
    """The interface of an engine for the loop. Sampling is greedy and does not end before ``max_tokens``."""

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        ...

    def step(self) -> Events:
        """Do one unit of work."""
        ...


@dataclass
class Timeline:
    """One request's times in seconds since the first arrival.

    Attributes:
        arrival: Time of its arrival in the workload.
        scheduled: Time when work on its prompt began; for a server, when the client sent it.
        token_times: Time at which each token was available.
        tokens: The tokens; empty if only text was returned.
        text: The text, if it was returned.
    """

    arrival: float
    scheduled: float = 0.0
    token_times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""


def replay(workload: Workload, engine: ServingEngine) -> list[Timeline]:
    """Submit each request once it has arrived and fewer than ``concurrency`` are open; step until all have ended."""
    requests, concurrency = workload.requests, workload.shape.concurrency
    timelines = [Timeline(request.arrival) for request in requests]
    added = open_requests = ended = 0
    start = time.perf_counter()
    while ended < len(requests):
        now = time.perf_counter() - start
        while added < len(requests) and requests[added].arrival <= now and open_requests < concurrency:
            engine.add(added, requests[added].prompt, requests[added].output_tokens)
            added, open_requests = added + 1, open_requests + 1
        if not open_requests:
            time.sleep(max(0.0, requests[added].arrival - now))
            continue
        begun = time.perf_counter() - start
        events = engine.step()
        now = time.perf_counter() - start
        for index in events.scheduled:
            timelines[index].scheduled = begun
        for index, token in events.tokens:
            timelines[index].tokens.append(token)
            timelines[index].token_times.append(now)
            if len(timelines[index].tokens) == requests[index].output_tokens:
                ended, open_requests = ended + 1, open_requests - 1
    return timelines
