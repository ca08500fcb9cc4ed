"""A miss of the prefix cache: what an admission looked up, what it found, and why it found no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from workbench.base.on_demand import picture
from workbench.base.text import counted

NEVER_COMPUTED = "never computed"
EVICTED = "computed and evicted"
NOT_FULL = "not full"
NOT_ALIGNED = "not aligned"
NOT_KEPT = "outside what the window kept"
LAST_TOKEN = "last token must be computed"  # noqa: S105
WITHDRAWN = "published and withdrawn"
OTHER_SALT = "cache salt differs"
OTHER_ADAPTER = "adapter differs"
CANNOT_DROP = "last block dropped for the drafter"
UNKNOWN = "unknown"

REASONS = (
    NEVER_COMPUTED,
    EVICTED,
    NOT_FULL,
    NOT_ALIGNED,
    NOT_KEPT,
    LAST_TOKEN,
    WITHDRAWN,
    OTHER_SALT,
    OTHER_ADAPTER,
    CANNOT_DROP,
    UNKNOWN,
)

_KINDS = {"full_attention": "full attention", "sliding_window": "sliding window", "mamba": "recurrent state"}


class Lost(NamedTuple):
    """Consecutive tokens that were not found for one reason."""

    reason: str
    tokens: int


@dataclass(frozen=True)
class Miss:
    """The first block that an admission did not find in a KV cache group.

    Attributes:
        request_id: The request that was admitted.
        admitted: Step of the admission.
        group: Index of the KV cache group.
        kind: Its kind, such as "full_attention".
        block: Index of the block in the request's block table.
        block_size: Tokens per block of the group.
        reason: One of REASONS.
        tokens: Consecutive tokens that were not found for this reason, from the end of the hit on.
        step: Step in which the block was evicted or withdrawn; None for other reasons.
        culprit: The request behind it: it took the block, had its blocks withdrawn, computed another token first, or
            computed the same tokens without leaving the block. None if there is none.
        position: Position of the first token that differs from the culprit's; for other reasons None.
        token_ids: That token and the culprit's; None for other reasons.
        looked_up: Tokens that the request had, of which the last one is always computed.
        found: Tokens that this group could have served.
        hit: Tokens found by all groups together.
        parts: Every token after ``found`` by reason, in order; they add up to ``looked_up - found``.
    """

    request_id: str
    admitted: int
    group: int
    kind: str
    block: int
    block_size: int
    reason: str
    tokens: int
    step: int | None
    culprit: str | None
    position: int | None
    token_ids: tuple[int, int | None] | None
    looked_up: int
    found: int
    hit: int
    parts: tuple[Lost, ...]

    @property
    def steps_ago(self) -> int | None:
        """Steps between the loss of the block and the admission; None if it was not lost."""
        return None if self.step is None else self.admitted - self.step

    @property
    def is_own_end(self) -> bool:
        """Only the request's last block was not found, which is not full."""
        return (
            self.reason == NOT_FULL and self.culprit == self.request_id and self.found + self.tokens == self.looked_up
        )

    @property
    def place(self) -> str:
        """The block by its place in the request, and its tokens: elsewhere "block 22" is a physical one."""
        first = self.block * self.block_size
        last = min(first + self.block_size, self.looked_up) - 1
        return f"its block {self.block} ({f'tokens {first} to {last}' if last > first else f'token {first}'})"

    @property
    def why(self) -> str:
        """The reason as a sentence about the block."""
        if not self.tokens:
            return "all its tokens were found, although the last one has to be computed"
        block, culprit = self.place, self.culprit
        ago = "in this step" if not self.steps_ago else f"{self.steps_ago} step{'s'[: self.steps_ago > 1]} before"
        match self.reason:
            case "computed and evicted":
                whom = f" for {culprit}" if culprit is not None else ", handed to no request"
                return f"{block} was computed, and evicted in step {self.step}{whom}, {ago}"
            case "published and withdrawn":
                return (
                    f"{block} was published for {culprit} and withdrawn in step {self.step}, {ago}: it was not computed"
                )
            case "never computed" if self.token_ids is not None:
                mine, other = self.token_ids
                return f"{block} was never computed: token {self.position} is {mine}, in {culprit} it is {other}"
            case "never computed" if culprit is not None:
                return f"{block} was never computed: {culprit} computed the {self.position} tokens before it, not these"
            case "never computed":
                return f"{block} was never computed: no request before begins like this one"
            case "not full" if self.is_own_end:
                return f"{block} is not full, and only full blocks are cached"
            case "not full":
                return f"{block} was not full in {culprit}, and only full blocks are cached"
            case "not aligned":
                return f"{block} is not a place where a hit of all groups can end"
            case "outside what the window kept":
                return f"{block} was computed by {culprit}, and not kept in the cache"
            case "last token must be computed":
                return f"{block} holds the last token, which is always computed"
            case "cache salt differs":
                return f"{block} was computed by {culprit}, with another cache salt"
            case "adapter differs":
                return f"{block} was computed by {culprit}, with another adapter"
            case "last block dropped for the drafter":
                return f"{block} is cached, and dropped: the drafter needs the tokens before the next one computed"
        return f"{block} was not found, and the trace does not tell why"

    def __repr__(self) -> str:
        return (
            f"{self.request_id}, admitted in step {self.admitted}, group {self.group} ({_KINDS[self.kind]}): "
            f"{self.found:,} of {counted(self.looked_up, 'token')} found; {self.why} "
            f"({counted(self.tokens, 'token')})"
        )


MISS_COLUMNS = ("request", "step", "group", "found", "looked up", "tokens", "reason", "why")


class Misses(list[Miss]):
    """The misses of a request: one per admission and KV cache group."""

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no misses: the request was never admitted, or nothing is cached"

    def in_short(self, step: int) -> str:
        """Why the admission in a step found no more; "" if there was nothing to find."""
        misses = [miss for miss in self if miss.admitted == step]
        shortest = min(misses, key=lambda miss: miss.found, default=None)
        if shortest is None or shortest.reason in (LAST_TOKEN, UNKNOWN) or shortest.is_own_end:
            return ""
        if shortest.reason == NEVER_COMPUTED and shortest.culprit is None:
            return ""
        group = f"group {shortest.group}: " if len(misses) > 1 else ""
        return f"{group}{shortest.why}"

    @property
    def cells(self) -> list[tuple[object, ...]]:
        """The rows of a table, whose columns are `MISS_COLUMNS`."""
        return [
            (m.request_id, m.admitted, f"{m.group} ({_KINDS[m.kind]})", m.found, m.looked_up, m.tokens, m.reason, m.why)
            for m in self
        ]

    def _repr_html_(self) -> str | None:
        return picture("Misses", self)


def by_admission(misses: Iterable[Miss]) -> Iterator[list[Miss]]:
    """The misses of each admission together, one per KV cache group."""
    group: list[Miss] = []
    for miss in misses:
        if group and (group[0].request_id, group[0].admitted) != (miss.request_id, miss.admitted):
            yield group
            group = []
        group.append(miss)
    if group:
        yield group


def lost_by_reason(misses: Iterable[Miss]) -> dict[str, int]:
    """Tokens that admissions looked up and did not find, by reason; the group that found least decides.

    The sum is the number of tokens looked up less the number found.
    """
    lost = dict.fromkeys(REASONS, 0)
    for groups in by_admission(misses):
        shortest = min(groups, key=lambda miss: miss.found)
        lost[NOT_ALIGNED] += shortest.found - shortest.hit
        for part in shortest.parts:
            lost[part.reason] += part.tokens
    return {reason: tokens for reason, tokens in lost.items() if tokens}
