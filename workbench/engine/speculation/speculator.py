"""The drafts of an engine's requests, from the step that proposes them to the step that verifies them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from workbench.engine.packed_batch import PackedBatch
from workbench.engine.sampler import Logits, SampledToken, Sampler
from workbench.engine.speculation.adaptive import AdaptiveDrafts
from workbench.engine.speculation.proposer import NO_DRAFTS, ComputedChunk, Drafts, Proposer
from workbench.engine.speculation.verification import Continued, sample_step
from workbench.scheduler.batch import ScheduledBatch, ScheduledChunk

log = logging.getLogger("workbench")


class Speculator:
    """Asks a proposer for drafts, and keeps them until the next step verifies them.

    Args:
        proposer: Makes the drafts.
        num_drafts: Maximum number of drafts per request and step.
        adaptive: Propose fewer while few are accepted.
    """

    def __init__(self, proposer: Proposer, num_drafts: int, *, adaptive: bool = False) -> None:
        self.proposer = proposer
        self._num_drafts = num_drafts
        self._adaptive = AdaptiveDrafts(num_drafts) if adaptive else None
        self._drafts: dict[str, Drafts] = {}

    @property
    def drafts(self) -> Mapping[str, Drafts]:
        """By request the latest drafts, until the next step has verified them."""
        return self._drafts

    def fill_in(self, batch: ScheduledBatch) -> None:
        """Replace the placeholders of a batch that was scheduled before its drafts were known."""
        for chunk in batch.chunks:
            if chunk.drafts and not chunk.is_padded:
                known = self._drafts.get(chunk.request.request_id, NO_DRAFTS).token_ids
                chunk.drafts = (known + chunk.drafts)[: len(chunk.drafts)]

    def sample(self, sampler: Sampler, logits: Logits, batch: ScheduledBatch) -> list[list[SampledToken]]:
        """Verify the drafts of a step, see `sample_step`; the tokens of each chunk that samples."""
        chunks = [chunk for chunk in batch.chunks if chunk.samples]
        drafts = [self._drafts_of(chunk) for chunk in chunks]
        return sample_step(sampler, logits, [chunk.request for chunk in chunks], drafts)

    def _drafts_of(self, chunk: ScheduledChunk) -> Drafts:
        """The drafts of a chunk, with the distributions that they were drawn from."""
        probabilities = self._drafts.get(chunk.request.request_id, NO_DRAFTS).probabilities
        return Drafts(chunk.drafts, None if chunk.is_padded else probabilities)

    def propose(
        self, batch: ScheduledBatch, packed: PackedBatch, sampled: Sequence[Sequence[SampledToken]]
    ) -> dict[str, Drafts]:
        """Drafts for the next step.

        Args:
            batch: The step, whose output the scheduler does not have yet.
            packed: Its rows.
            sampled: The tokens of each chunk that samples.

        Returns:
            For each request its drafts, if it has any.
        """
        results = iter(sampled)
        chunks = [
            self._computed(index, chunk, packed, next(results) if chunk.samples else ())
            for index, chunk in enumerate(batch.chunks)
        ]
        try:
            proposed = self.proposer.propose(chunks)
        except Exception:  # drafts change no token, so a step without them is as good
            log.exception("the proposer failed in step %d: the next step has no drafts", batch.step)
            proposed = []
        self._drafts = {
            chunk.sequence.request_id: drafts for chunk, drafts in zip(chunks, proposed) if drafts.token_ids
        }
        return self._drafts

    def _computed(
        self, index: int, chunk: ScheduledChunk, packed: PackedBatch, sampled: Sequence[SampledToken]
    ) -> ComputedChunk:
        tokens = [token.token_id for token in sampled if token.token_id is not None]
        sequence = Continued(chunk.request)
        sequence.token_ids += tokens
        num_rejected = len(chunk.drafts) - max(0, len(tokens) - 1)
        return ComputedChunk(
            sequence=sequence,
            block_ids=packed.block_table[index, : packed.table_lengths[index]].tolist(),
            start=int(packed.positions[packed.cu_seqlens_q[index]]),
            end=int(packed.seqused_k[index]) - num_rejected,
            # An asynchronous step has rows of requests that ended in the step before.
            num_drafts=self._num_wanted(chunk, len(tokens)) if tokens and chunk.request.status != "finished" else 0,
        )

    def _num_wanted(self, chunk: ScheduledChunk, num_tokens: int) -> int:
        """Number of drafts of a request for its next step."""
        if self._adaptive is None:
            return self._num_drafts
        request_id = chunk.request.request_id
        if chunk.drafts and not chunk.is_padded:
            self._adaptive.note(request_id, len(chunk.drafts), num_tokens - 1)
        return self._adaptive.next(request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended."""
        if self._adaptive is not None:
            self._adaptive.forget(request_id)

    def close(self) -> None:
        """Give back what the proposer holds."""
        self.proposer.close()
