"""The most likely tokens of a sampled token's row, as a step's supplement "top_tokens" holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from workbench.trace.records import Count

NAME = "top_tokens"
"""Name of the supplement. The facts are ``{"tokens": [...]}``, a `TopTokens` for each output token of the step."""

Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Candidate(msgspec.Struct, frozen=True):
    """A token that could have been sampled.

    Attributes:
        id: The token.
        probability: Its probability by the model alone, before penalties and temperature.
        drawn: The probability with which it was drawn; None when the request brings a sampler.
        removed_by: The parameter that ruled it out, such as "top_p"; "" when it could be drawn.
        text: Its text, "" without a tokenizer.
    """

    id: Count
    probability: Probability
    drawn: Probability | None = None
    removed_by: str = ""
    text: str = ""


class TopTokens(msgspec.Struct, frozen=True):
    """The candidates for one output token.

    Attributes:
        request: Its request. Several tokens of one request in a step are in order.
        sampled: The token that was sampled; None before sampling.
        candidates: The most likely tokens by the model, most likely first, and the sampled one.
        how: The way in which the token was chosen, as a phrase.
        num_allowed: Tokens that the request's grammar allows here, the most likely of which are candidates too; None
            without a grammar.
        removed: The model's probability of all others.
    """

    request: str
    sampled: Count | None
    candidates: tuple[Candidate, ...]
    how: str = ""
    num_allowed: Count | None = None
    removed: Probability | None = None

    def with_texts(self, decode: Callable[[list[int]], str]) -> TopTokens:
        """The same with the texts of the candidates.

        Args:
            decode: Text of token ids.
        """
        named = tuple(msgspec.structs.replace(candidate, text=decode([candidate.id])) for candidate in self.candidates)
        return msgspec.structs.replace(self, candidates=named)


def read_top_tokens(facts: Mapping[str, Any]) -> tuple[TopTokens, ...] | None:
    """The facts of a supplement "top_tokens", checked; None if they have another form."""
    try:
        return msgspec.convert(facts.get("tokens"), tuple[TopTokens, ...])
    except msgspec.ValidationError:
        return None
