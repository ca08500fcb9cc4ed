"""The interface of proposers: the chunks they are given, the drafts they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

    from workbench.config import SamplingParams


class TokenSequence(Protocol):
    """A request as proposers and the sampler see it.

    Attributes:
        request_id: Name of the request.
        token_ids: Prompt and output so far.
        num_prompt_tokens: Number of prompt tokens among them.
        sampling: The parameters by which its tokens are chosen.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams


class ComputedChunk(NamedTuple):
    """A chunk that a step has computed, and the number of drafts that its request may have in the next step.

    Attributes:
        sequence: The request, with the tokens that the step sampled.
        block_ids: Its block table.
        start: First position that the step computed.
        end: One past the last position whose KV is valid: rows of rejected drafts do not count.
        num_drafts: Maximum number of drafts; 0 when none are wanted.
    """

    sequence: TokenSequence
    block_ids: Sequence[int]
    start: int
    end: int
    num_drafts: int


class Drafts(NamedTuple):
    """Draft tokens of a request.

    Attributes:
        token_ids: The tokens that are expected next.
        probabilities: The distributions that they were drawn from, float64 [len(token_ids), vocab_size], rows add up to
            1; None when nothing was drawn at random.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: np.ndarray | None = None


NO_DRAFTS = Drafts()


class Proposer(ABC):
    """Makes drafts. Every method is for the thread that runs the model."""

    @abstractmethod
    def propose(self, chunks: Sequence[ComputedChunk]) -> list[Drafts]:
        """Drafts for each chunk of a step, at most its ``num_drafts``; called after every step that ran the model."""

    def close(self) -> None:
        """Give back what the proposer holds."""
        return
