"""N-gram proposer (prompt lookup): what followed the last time that the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.engine.speculation.proposer import NO_DRAFTS, ComputedChunk, Drafts, Proposer


class NgramProposer(Proposer):
    """Looks drafts up in the request's own tokens, see `find_drafts`.

    Args:
        prompt_lookup_min: Shortest n-gram, in tokens.
        prompt_lookup_max: Longest n-gram, in tokens.
    """

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._shortest = prompt_lookup_min
        self._longest = prompt_lookup_max

    def propose(self, chunks: Sequence[ComputedChunk]) -> list[Drafts]:
        """See `Proposer.propose`."""
        return [
            Drafts(tuple(find_drafts(chunk.sequence.token_ids, chunk.num_drafts, self._shortest, self._longest)))
            if chunk.num_drafts
            else NO_DRAFTS
            for chunk in chunks
        ]


def find_drafts(token_ids: Sequence[int], num_drafts: int, shortest: int, longest: int) -> list[int]:
    """The tokens that followed an earlier occurrence of the last n tokens.

    The rule is vLLM's: the longest n-gram of ``shortest`` to ``longest`` tokens that occurs before the end counts, and
    of its occurrences the first. An occurrence may overlap the end of the text.

    Args:
        token_ids: The text.
        num_drafts: Maximum number of tokens.
        shortest: Shortest n-gram.
        longest: Longest n-gram.

    Returns:
        Up to ``num_drafts`` tokens; none when no n-gram occurs twice.
    """
    tokens = np.array(token_ids, dtype=np.int64)
    last = len(tokens) - 1
    # Ends of the n-grams that equal the last n tokens: those of n + 1 tokens are among those of n tokens.
    ends = np.flatnonzero(tokens[:last] == tokens[last]) if last > 0 else np.empty(0, dtype=np.int64)
    matched = ends
    length = int(len(ends) > 0)
    while len(ends) and length < longest:
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[last - length]]
        if len(ends):
            matched, length = ends, length + 1
    if length < shortest or not length:
        return []
    start = int(matched[0]) + 1
    return tokens[start : start + num_drafts].tolist()
