"""The hit rate of the prefix cache, counted as vLLM's prefix_cache_hits by prefix_cache_queries.

A request counts once, when it is admitted for the first time, with its whole prompt. A request that waits, was refused,
or was admitted before the trace begins does not count, and neither does what a preempted request finds when it comes
back, which is mostly its earlier work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from workbench.trace.readings.metrics import RequestMetrics


class _Step(Protocol):
    """A StepRecord or a scheduler's batch, as far as hits depend on it."""

    @property
    def admitted(self) -> tuple[str, ...]: ...
    @property
    def chunks(self) -> Sequence[Any]: ...


class PrefixHits:
    """Counts the prompt tokens of admitted requests, and those that were found.

    Attributes:
        queries: Prompt tokens that were looked up.
        hits: Those that were in the prefix cache.
    """

    def __init__(self) -> None:
        self.queries = self.hits = 0

    def add(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a request that is admitted for the first time."""
        self.queries += num_prompt_tokens
        self.hits += min(num_cached_tokens, num_prompt_tokens)

    def add_step(self, step: _Step, num_prompt_tokens: Callable[[str], int | None]) -> None:
        """Count the requests that a step admits; those of unknown length are left out."""
        if step.admitted:
            for chunk in step.chunks:
                if chunk.request_id in step.admitted and (length := num_prompt_tokens(chunk.request_id)) is not None:
                    self.add(length, chunk.num_cached_tokens)

    @property
    def rate(self) -> float | None:
        """The share that was found; None before any request is admitted."""
        return self.hits / self.queries if self.queries else None


def hit_rate(requests: Iterable[RequestMetrics]) -> float | None:
    """The hit rate of some requests; None if none was admitted."""
    counter = PrefixHits()
    for request in requests:
        if request.first_scheduled_step is not None:
            counter.add(request.num_prompt_tokens, request.num_cached_tokens)
    return counter.rate
