"""The hit rate of a log without contents: that of the recording that the costs come from, or one that is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from workbench.base.field_checks import number
from workbench.simulation.arrivals import Arrival
from workbench.trace import Trace
from workbench.trace.readings.metrics import percent
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.prefix_hits import hit_rate

PARTS = 4
"""Number of parts of a recording whose hit rates show how much it varies."""

SHARED_TOKEN = 2**29
"""Stands for what prompts share."""


@dataclass(frozen=True)
class AssumedHits:
    """A hit rate that is assumed, because nothing in a log says which prompts are alike.

    Attributes:
        rate: Share of the prompt tokens that are found in the prefix cache.
        low: The smallest hit rate of a part of the recording; ``rate`` if it was given.
        high: The largest.
        source: Its origin.
    """

    rate: float
    low: float
    high: float
    source: str

    @classmethod
    def of(cls, trace: Trace, given: float | None = None) -> AssumedHits:
        """The hit rate of a recording, or a given one.

        Args:
            trace: The recording.
            given: A share in [0, 1]; None for that of the recording.

        Raises:
            ValueError: The share is outside its range.
        """
        if given is not None:
            rate = number("--hit-rate", given, 0.0, 1.0)
            return cls(rate, rate, rate, "as given")
        requests = list(metrics(trace).requests.values())
        size = -(-len(requests) // PARTS) or 1
        parts = [requests[first : first + size] for first in range(0, len(requests), size)]
        rates = [hit_rate(part) or 0.0 for part in [requests, *parts]]
        return cls(rates[0], min(rates), max(rates), f"that of {trace.meta.source}")

    def apply(self, arrivals: Iterable[Arrival], block_size: int) -> list[Arrival]:
        """Some requests, whose prompts begin alike as far as the hit rate says, in whole blocks."""
        return [self._shared(arrival, block_size) for arrival in arrivals]

    def _shared(self, arrival: Arrival, block_size: int) -> Arrival:
        prompt = arrival.prompt_token_ids
        shared = round(self.rate * len(prompt) / block_size) * block_size
        return replace(arrival, prompt_token_ids=[*([SHARED_TOKEN] * shared), *prompt[shared:]]) if shared else arrival

    def __str__(self) -> str:
        spread = f", {percent(self.low)} to {percent(self.high)} in its parts" if self.low < self.high else ""
        return (
            f"the log does not say which prompts begin alike: a hit rate of {percent(self.rate)} is assumed, "
            f"{self.source}{spread}; --hit-rate takes another"
        )
