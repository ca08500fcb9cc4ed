"""A proposer of the user's own: a function from tokens to drafts."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence

from workbench.engine.speculation.proposer import NO_DRAFTS, ComputedChunk, Drafts, Proposer

log = logging.getLogger("workbench")

DraftFunction = Callable[[list[int], int], Iterable[int]]
"""``propose(token_ids, num_drafts)``: the tokens expected after ``token_ids``, at most ``num_drafts``."""


class CustomProposer(Proposer):
    """Asks a function for the drafts of each request.

    A request whose drafts cannot be used has none in that step, because drafts change no token. The reason is logged
    the first time.

    Args:
        function: See `DraftFunction`. It is given a copy of the tokens.
        vocab_size: Size of the model's vocabulary.
    """

    def __init__(self, function: DraftFunction, vocab_size: int) -> None:
        if not callable(function):
            raise ValueError(f"proposer must be a function of (token_ids, num_drafts), got {function!r}")
        self._function = function
        self._vocab_size = vocab_size
        self._complained = False

    def propose(self, chunks: Sequence[ComputedChunk]) -> list[Drafts]:
        """See `Proposer.propose`."""
        return [self._propose(chunk) if chunk.num_drafts else NO_DRAFTS for chunk in chunks]

    def _propose(self, chunk: ComputedChunk) -> Drafts:
        try:
            drafts = self._function(list(chunk.sequence.token_ids), chunk.num_drafts)
            return Drafts(checked_drafts(drafts, chunk.num_drafts, self._vocab_size))
        except Exception as problem:  # in the user's function, or in what it returned
            if not self._complained:
                self._complained = True
                request_id = chunk.sequence.request_id
                log.exception("request %r has no drafts: %s: %s", request_id, type(problem).__name__, problem)
            return NO_DRAFTS


def checked_drafts(drafts: Iterable[int], num_drafts: int, vocab_size: int) -> tuple[int, ...]:
    """The drafts that a function returned, as token ids.

    Raises:
        ValueError: Too many, not integers, or outside the vocabulary; the message names the draft and the range.
    """
    if hasattr(drafts, "tolist"):  # an array of numpy or MLX
        drafts = drafts.tolist()
    if not isinstance(drafts, Iterable) or isinstance(drafts, str | bytes):
        raise ValueError(f"the proposer must return a list of token ids, got {drafts!r}")
    token_ids = []
    for index, token in enumerate(drafts):
        try:
            if isinstance(token, bool):
                raise TypeError
            token_ids.append(operator.index(token))
        except TypeError:
            raise ValueError(f"drafts[{index}] must be a token id, an integer, got {token!r}") from None
        if not 0 <= token_ids[-1] < vocab_size:
            raise ValueError(f"drafts[{index}]={token!r} is outside the vocabulary: 0 to {vocab_size - 1}")
        if len(token_ids) > num_drafts:
            raise ValueError(f"the proposer returned more than {num_drafts} drafts: return at most num_drafts")
    return tuple(token_ids)
