"""The tokens of a recording's requests, or numbers that stand for them and are equal where prefixes are.

A recording without token ids says by hashes which blocks are equal, and an older one by the blocks that requests found
in the prefix cache. Here each different block gets a number, which stands in the place of each of its tokens. The
scheduler's prefix cache, and all else that compares tokens, then finds the same prefixes as with the tokens themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Literal

from workbench.trace import RequestInfo, Trace
from workbench.trace.lines import HASH_DIGITS

HASHES = "block_hashes"
"""Name of the supplement with the hashes of requests that have ended."""

FIRST_NUMBER = 2**30
"""The first number that stands for tokens: larger than any token id of a vocabulary."""


class Numbers:
    """Gives each different content a number; recordings that are compared share one."""

    def __init__(self) -> None:
        self._next = count(FIRST_NUMBER)
        self._known: dict[Any, int] = {}

    def of(self, content: Any) -> int:
        """The number of a content."""
        if (number := self._known.get(content)) is None:
            number = self._known[content] = next(self._next)
        return number

    def new(self) -> int:
        """A number that nothing else has."""
        return next(self._next)


def kind_of(trace: Trace) -> Literal["tokens", "hashes", "hits"]:
    """Whether tokens, hashes or hits tell which prefixes of a recording are equal; see `Contents`."""
    if trace.config.get("token_ids_recorded", True) and all(info.prompt_token_ids for info in trace.requests.values()):
        return "tokens"
    return "hashes" if trace.meta.prefix_hashes else "hits"


class Contents:
    """The tokens of a recording's requests, as far as they decide which prefixes are equal.

    Args:
        trace: The recording.
        numbers: Gives the numbers; recordings that share it can be compared. None for new ones.
        assume_shared: If the recording has neither tokens nor hashes, assume that prompts continue alike wherever
            nothing shows the opposite: the most that may be shared, instead of the least.

    Attributes:
        block_size: Prefixes are known in multiples of this number of tokens: 1 with token ids.
        kind: "tokens", "hashes", or "hits" if equal prefixes follow from hits of the prefix cache alone.
        why_unknown: Why not every equality of prefixes is known; "" if it is. It is not if hits show it and blocks were
            evicted, because a request that misses an evicted block is not seen to share it.
    """

    def __init__(self, trace: Trace, numbers: Numbers | None = None, *, assume_shared: bool = False) -> None:
        self._trace = trace
        self._numbers = numbers or Numbers()
        self._own: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = defaultdict(list)
        self._ended: dict[str, str] = {}
        self._lookahead, self._key_id, self._num_read = 0, "", 0
        self.block_size, self.why_unknown = 1, ""
        self.kind = kind_of(trace)
        if self.kind == "tokens":
            return
        if made := trace.meta.prefix_hashes:
            self._key_id = made.key_id
            self.block_size, self._lookahead = made.block_size, made.num_lookahead_tokens
            self._ended = dict(_ended_hashes(trace))
        else:
            self.block_size = trace.block_size
            self._number_hits(trace, assume_shared)
        self._num_read = self._num_facts()

    def _num_facts(self) -> int:
        """Number of the trace's lines that say which outputs are equal; it grows with a trace that is recorded now."""
        if self.kind == "hits":
            return len(self._trace)
        return sum(said.name == HASHES for said in self._trace.supplements) if self.kind == "hashes" else 0

    @property
    def is_complete(self) -> bool:
        """Whether every equality of prefixes is known."""
        return not self.why_unknown

    @property
    def is_outdated(self) -> bool:
        """Whether the trace has grown, and says more about the outputs now."""
        return self._num_facts() != self._num_read

    def blocks(self, request_id: str) -> list[int]:
        """A number for each full block of a request without token ids, with all before it; its output's included."""
        return self._blocks_of(request_id)

    def _blocks_of(self, request_id: str) -> list[int]:
        """The numbers of a request's blocks."""
        blocks = self._blocks[request_id]
        if not blocks and self.kind == "hashes":
            hashes = self._trace.requests[request_id].block_hashes + self._ended.get(request_id, "")
            blocks += [
                self._numbers.of((self._key_id, hashes[place : place + HASH_DIGITS]))
                for place in range(0, len(hashes) - HASH_DIGITS + 1, HASH_DIGITS)
            ]
        return blocks

    def _number_hits(self, trace: Trace, assume_shared: bool) -> None:
        size, of_block = self.block_size, dict[int, int]()
        if not trace.config.get("enable_prefix_caching"):
            self.why_unknown = "its engine had no prefix cache"
        elif trace.keyframe is not None:
            self.why_unknown = "it begins in the middle of a run"
        if len(trace.kv_cache_groups) > 1:
            self.why_unknown = self.why_unknown or "its blocks belong to several KV cache groups"
            return
        for record in trace:
            starting = {*record.admitted, *record.resumed}
            for index, chunk in enumerate(record.chunks):
                first, end = chunk.start // size, chunk.end // size
                is_starting = chunk.request_id in starting
                if end == first and not is_starting:
                    continue
                table, blocks = record.block_table(index), self._blocks[chunk.request_id]
                if is_starting:
                    found = table[: chunk.num_cached_tokens // size]
                    blocks += [of_block.get(block) or self._numbers.new() for block in found[len(blocks) :]]
                num_prompt_blocks = trace.requests[chunk.request_id].num_prompt_tokens // size
                for place in range(len(blocks), end):
                    alike = assume_shared and place < num_prompt_blocks
                    before = blocks[-1] if blocks else 0
                    blocks.append(self._numbers.of(("next", before)) if alike else self._numbers.new())
                for block, number in zip(table[first:end], blocks[first:end]):
                    if of_block.setdefault(block, number) != number:
                        self.why_unknown = self.why_unknown or "its engine evicted blocks"
                    of_block[block] = number

    def is_known(self, info: RequestInfo) -> bool:
        """Whether it is known which prefixes a request shares with others."""
        if info.prompt_token_ids:
            return True
        num_hashes = len(info.block_hashes) // HASH_DIGITS
        has_all = num_hashes >= (info.num_prompt_tokens - self._lookahead) // self.block_size
        return self.is_complete and (has_all or self.kind == "hits")

    def own(self, request_id: str) -> int:
        """The number of the tokens that a request is not known to share."""
        if (number := self._own.get(request_id)) is None:
            number = self._own[request_id] = self._numbers.new()
        return number

    def tokens(self, request_id: str, start: int, end: int) -> list[int]:
        """Numbers for the tokens ``[start, end)`` of a request without token ids, its output included."""
        blocks, size, lookahead = self._blocks_of(request_id), self.block_size, self._lookahead
        own = self.own(request_id)
        places = [max(0, position - lookahead) // size for position in range(start, end)]
        return [blocks[place] if place < len(blocks) else own for place in places]

    def prompt(self, info: RequestInfo) -> Sequence[int]:
        """The tokens of a prompt, or numbers for them."""
        return info.prompt_token_ids or self.tokens(info.request_id, 0, info.num_prompt_tokens)

    def why_not(self, sizes: Sequence[int]) -> str:
        """Why hits with blocks of these sizes are not known; "" if they are."""
        wrong = next((size for size in sizes if size % self.block_size), None)
        if wrong is None:
            return ""
        per = "tokens per block hash" if self.kind == "hashes" else "the recorded one: there are no token ids or hashes"
        return f"block_size must be a multiple of {self.block_size}, {per} of the recording, got {wrong}"


def _ended_hashes(trace: Trace) -> Iterator[tuple[str, str]]:
    """The hashes behind those of their prompts of requests that have ended."""
    for supplement in trace.supplements:
        if supplement.name == HASHES:
            for request_id, hashes in supplement.facts.items():
                if isinstance(hashes, str):
                    yield request_id, hashes
