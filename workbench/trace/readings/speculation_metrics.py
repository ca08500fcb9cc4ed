"""Metrics of steps taken ahead: which drafts were accepted, and which rows were computed for nothing.

In brackets: vLLM's Prometheus metric of the same meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

from workbench.trace.records import Chunk, StepRecord


@dataclass(frozen=True)
class SpeculationMetrics:
    """Metrics of speculative decoding and of asynchronous steps.

    A verification is a chunk that samples with drafts. Padding of an admission is not a draft.

    Attributes:
        num_verifications: Number of verifications [spec_decode_num_drafts].
        num_drafts: Number of drafts in them [spec_decode_num_draft_tokens].
        num_accepted: Number of accepted drafts [spec_decode_num_accepted_tokens].
        drafts_per_position: Number of verifications with a draft at each position, from the first draft on.
        accepted_per_position: Number of those drafts that were accepted [spec_decode_num_accepted_tokens_per_pos].
        num_chunks: Number of chunks that sampled.
        num_tokens: Number of tokens that they gave.
        num_rejected_rows: Rows of drafts that were rejected. Each wrote KV that the next step overwrites.
        num_discarded_rows: Rows of requests that had ended in the meantime (asynchronous steps).
    """

    num_verifications: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    drafts_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    num_chunks: int = 0
    num_tokens: int = 0
    num_rejected_rows: int = 0
    num_discarded_rows: int = 0

    def __add__(self, other: SpeculationMetrics) -> SpeculationMetrics:
        """The counts of both."""
        sums: dict[str, Any] = {}
        for field in fields(self):
            one, two = getattr(self, field.name), getattr(other, field.name)
            is_number = isinstance(one, int)
            sums[field.name] = one + two if is_number else tuple(a + b for a, b in zip_longest(one, two, fillvalue=0))
        return SpeculationMetrics(**sums)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts as a fraction of all drafts; None without drafts."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """The same for each position of a draft, where a draft behind a rejected one counts as rejected."""
        return tuple(right / all_ for right, all_ in zip(self.accepted_per_position, self.drafts_per_position))

    @property
    def mean_acceptance_length(self) -> float | None:
        """Mean number of tokens of a verification: its accepted drafts and one more; None without drafts."""
        return 1 + self.num_accepted / self.num_verifications if self.num_verifications else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of tokens that a request gets in a step that samples for it; None without such a step."""
        return self.num_tokens / self.num_chunks if self.num_chunks else None

    @property
    def num_wasted_rows(self) -> int:
        """Rows that were computed for nothing."""
        return self.num_rejected_rows + self.num_discarded_rows


class SpeculationCounter:
    """Counts the metrics of `SpeculationMetrics` while records come in."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(
            ("verifications", "drafts", "accepted", "chunks", "tokens", "rejected", "discarded"), 0
        )
        self._drafts: list[int] = []
        self._accepted: list[int] = []

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        counts = self._counts
        sampling = [chunk for chunk in record.chunks if chunk.sampled is not None]
        num_sampling = len(sampling)
        for chunk in [chunk for chunk in sampling if chunk.drafts or chunk.sampled_before or chunk.discarded]:
            if chunk.discarded:
                num_sampling -= 1
                continue
            counts["tokens"] += len(chunk.sampled_before)
            if chunk.drafts:
                self._add_drafts(chunk)
        counts["chunks"] += num_sampling
        counts["tokens"] += num_sampling
        counts["discarded"] += sum([chunk.num_tokens for chunk in record.chunks if chunk.discarded])

    def _add_drafts(self, chunk: Chunk) -> None:
        counts, num_drafts = self._counts, len(chunk.drafts)
        counts["rejected"] += num_drafts - chunk.num_accepted
        if chunk.arm != "decode" and set(chunk.drafts) == {-1}:  # padding
            return
        counts["verifications"] += 1
        counts["drafts"] += num_drafts
        counts["accepted"] += chunk.num_accepted
        missing = num_drafts - len(self._drafts)
        self._drafts += [0] * missing
        self._accepted += [0] * missing
        for position in range(num_drafts):
            self._drafts[position] += 1
            self._accepted[position] += position < chunk.num_accepted

    def metrics(self) -> SpeculationMetrics:
        """The metrics so far."""
        counts = self._counts
        return SpeculationMetrics(
            num_verifications=counts["verifications"],
            num_drafts=counts["drafts"],
            num_accepted=counts["accepted"],
            drafts_per_position=tuple(self._drafts),
            accepted_per_position=tuple(self._accepted),
            num_chunks=counts["chunks"],
            num_tokens=counts["tokens"],
            num_rejected_rows=counts["rejected"],
            num_discarded_rows=counts["discarded"],
        )
