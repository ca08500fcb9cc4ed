"""The part of speculative decoding that the scheduler has to know: how many drafts, and what their proposer needs.

The methods are vLLM's. They differ in the KV slots and the budget that a proposer takes beyond the rows of the model:

- "ngram" looks drafts up in the request's own tokens, and takes nothing. "custom", a proposer of the user's own, is
  scheduled in the same way.
- "draft_model" writes KV for its drafts in blocks of the same table, and computes one more row per request.
- "eagle" writes KV too, and its KV of a token depends on the token after it. So a block's hash covers one token more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from workbench.base.field_checks import choice, flag, integer

SPEC_METHODS = ("ngram", "draft_model", "eagle", "custom")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
MAX_DRAFTS = 1024
"""Maximum number of draft tokens of a request in a step."""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding as an EngineConfig describes it.

    Attributes:
        num_tokens: Draft tokens per request and step; 0 for off.
        method: One of SPEC_METHODS.
        disable_lookahead_block_hashes: "eagle" only: hash blocks as without speculation, and drop the last block of
            every prefix-cache hit instead.
        prompt_lookup_min: "ngram" only: shortest match, in tokens. One of the two alone stands for both, as in vLLM.
        prompt_lookup_max: "ngram" only: longest match, in tokens.
        draft_sample_method: "draft_model" only: "greedy" takes the draft model's most likely token, "probabilistic"
            draws from its distribution for requests that sample.
        num_layers: "draft_model" only: use that many first layers of the draft model, or of the model itself when there
            is none; None for all.
        adaptive: Let the engine propose fewer drafts while few are accepted. vLLM does not, and simulate() never does.
    """

    num_tokens: int = 0
    method: str = "ngram"
    disable_lookahead_block_hashes: bool = False
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    draft_sample_method: str = "greedy"
    num_layers: int | None = None
    adaptive: bool = False

    @classmethod
    def checked(cls, num_tokens: Any, options: Any) -> Speculation:
        """The fields ``num_speculative_tokens`` and ``speculative`` of an EngineConfig.

        Raises:
            ValueError: The message names field, value and range.
        """
        num_tokens = integer("num_speculative_tokens", num_tokens, 0, MAX_DRAFTS, " (0 turns speculation off)")
        names = [field.name for field in fields(cls)][1:]
        if options is None:
            return cls(num_tokens)
        if not isinstance(options, Mapping):
            raise ValueError(f'speculative must be None or like {{"method": "ngram"}}, got {options!r}')
        if unknown := [name for name in options if name not in names]:
            beside = " (num_speculative_tokens is a field beside it)" if "num_speculative_tokens" in unknown else ""
            raise ValueError(f"speculative has an unknown key {unknown[0]!r}{beside}; the keys are {', '.join(names)}")
        given = {name: value for name, value in options.items() if value is not None}
        # One of the two alone stands for both, as in vLLM.
        longest = given.get("prompt_lookup_max", given.get("prompt_lookup_min", cls.prompt_lookup_max))
        longest = integer('speculative["prompt_lookup_max"]', longest, 1, MAX_DRAFTS)
        num_layers = given.get("num_layers")
        return cls(
            num_tokens,
            method=choice('speculative["method"]', given.get("method", cls.method), SPEC_METHODS),
            disable_lookahead_block_hashes=flag(
                'speculative["disable_lookahead_block_hashes"]', given.get("disable_lookahead_block_hashes", False)
            ),
            prompt_lookup_min=integer(
                'speculative["prompt_lookup_min"]',
                given.get("prompt_lookup_min", longest),
                1,
                longest,
                ' (at most speculative["prompt_lookup_max"])',
            ),
            prompt_lookup_max=longest,
            draft_sample_method=choice(
                'speculative["draft_sample_method"]',
                given.get("draft_sample_method", cls.draft_sample_method),
                DRAFT_SAMPLE_METHODS,
            ),
            num_layers=None if num_layers is None else integer('speculative["num_layers"]', num_layers, 1, MAX_DRAFTS),
            adaptive=flag('speculative["adaptive"]', given.get("adaptive", False)),
        )

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots behind a chunk that the proposer writes."""
        return self.num_tokens if self.method in ("draft_model", "eagle") else 0

    @property
    def num_draft_slots(self) -> int:
        """Rows of the packed batch that the proposer adds to each scheduled request."""
        return int(self.num_tokens > 0 and self.method == "draft_model")

    @property
    def num_hash_lookahead_tokens(self) -> int:
        """Tokens after a block that its hash covers."""
        return int(self.num_tokens > 0 and self.method == "eagle" and not self.disable_lookahead_block_hashes)

    @property
    def drops_last_cached_block(self) -> bool:
        """Whether the last block of a prefix-cache hit is recomputed."""
        return self.num_tokens > 0 and self.method == "eagle" and self.disable_lookahead_block_hashes
