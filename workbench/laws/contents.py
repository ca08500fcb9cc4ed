"""The content of each KV block, by the tokens from which it was computed; ids and hashes do not decide.

Inside a block the KV of a position stands at a fixed place, so what a block holds is a range of positions of one
request, ``[begin, end)``. It serves another request if the tokens of both are equal up to there. Chunks that are taken
back within their step are in no batch and write nothing. A block of recurrent state holds the state after ``end``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.laws.state import Chunk, Limits

if TYPE_CHECKING:
    from workbench.laws.history import Known


class Content(NamedTuple):
    """Positions ``[begin, end)`` of a request in a block, written for a KV cache group, for the last time in a step."""

    known: Known
    group: int
    begin: int
    end: int
    step: int


class Contents:
    """The content of the blocks, and the faults found in it.

    Args:
        limits: The limits in force.
        whole: Blocks that were not seen written hold nothing; else they may hold anything.

    Attributes:
        limits: The limits in force.
        found: Request ids and what is wrong, since the list was last emptied.
        missing: The same for places of a table that a row needs and that have no block.
    """

    def __init__(self, limits: Limits, *, whole: bool) -> None:
        self.limits = limits
        self.found: list[tuple[str, str]] = []
        self.missing: list[tuple[str, str]] = []
        self._whole = whole
        self._of: dict[int, Content] = {}
        self._hashes: dict[int, bytes] = {}
        self._tracks_states = limits.num_drafts == 0 or all(group.is_attention for group in limits.groups)

    # -- rows --------------------------------------------------------------------------------------------------

    def read_and_write(
        self, known: Known, chunk: Chunk, tables: Sequence[list[int]], step: int, *, admitted: bool
    ) -> None:
        """Check what the rows of a chunk read that they do not write, and note what they write."""
        start, end = chunk.start, chunk.start + chunk.num_tokens
        for index, (group, table) in enumerate(zip(self.limits.groups, tables)):
            if not group.is_attention:
                self._read_and_write_state(known, index, group.block_size, start, end, table, step, admitted=admitted)
                continue
            size = group.block_size
            before = [] if admitted or index >= len(known.tables) else known.tables[index]
            if table[: len(before)] != before or len(before) * size < start:
                self._read(known, index, size, start, table, before)
            self._check_places(known, group.sliding_window, size, start, end, table)
            for place in range(start // size, min(-(-end // size), len(table))):
                if block := table[place]:
                    self._write(
                        known, block, index, place * size, max(start, place * size), min(end, (place + 1) * size), step
                    )

    def _check_places(self, known: Known, window: int, size: int, start: int, end: int, table: Sequence[int]) -> None:
        """Every position that a row reads or writes has its block."""
        if window and self.limits.writes_ahead:
            window = 1  # vLLM's rounding of a dropped block can leave a hole in a window
        first = max(0, start - known.in_flight - window + 1) if window else 0
        if len(table) * size < end or not all(table[first // size : -(-end // size)]):
            held = sum(map(bool, table))
            self.missing.append((known.request_id, f"[{first}, {end}) has no place in its {held} blocks of {size}"))

    def _read(
        self, known: Known, group: int, size: int, start: int, table: Sequence[int], before: Sequence[int]
    ) -> None:
        for place in range(min(-(-start // size), len(table))):
            block = table[place]
            if block and not (place < len(before) and before[place] == block):
                end = min(start, (place + 1) * size)
                if (why := self._why_not(known, block, group, place * size, end)) is not None:
                    self.found.append((known.request_id, f"position {end - 1} is read from block {block}, {why}"))

    def _why_not(self, known: Known, block: int, group: int, begin: int, end: int) -> str | None:
        """Why a block does not hold positions ``[begin, end)`` of a request; None if it does."""
        content = self._of.get(block)
        if content is None:
            return "which was never written" if self._whole else None
        if content.group != group or content.begin > begin or content.end < end:
            return f"which holds [{content.begin}, {content.end}) of {content.known.request_id!r}"
        return self._why_other(known, content.known, end)

    @staticmethod
    def _why_other(known: Known, other: Known, end: int) -> str | None:
        """Why the KV of a request's first tokens does not serve another one; None if it does."""
        if known is other:
            return None
        if known.salt != other.salt:
            return f"which holds tokens of {other.request_id!r}, whose cache_salt is another"
        if known.tokens is None or other.tokens is None or known.tokens[:end] == other.tokens[:end]:
            return None
        return f"which holds other tokens, those of {other.request_id!r}"

    def _write(self, known: Known, block: int, group: int, first: int, begin: int, end: int, step: int) -> None:
        """Note rows ``[begin, end)`` in the block whose first position is ``first``."""
        content = self._of.get(block)
        if content is None:
            begin = begin if self._whole else first
        elif content.known is not known:
            other = content.known
            if group < len(other.tables) and block in other.tables[group]:
                self.found.append((other.request_id, f"its block {block} is written by {known.request_id!r}"))
        elif content.group == group and content.begin == first and content.end >= begin:
            begin = first
        self._of[block] = Content(known, group, begin, end, step)

    def forget_after(self, known: Known) -> None:
        """Rows of rejected drafts hold nothing that counts."""
        for index, (group, table) in enumerate(zip(self.limits.groups, known.tables)):
            size = group.block_size
            for place in range(known.computed // size, len(table)) if group.is_attention else ():
                content = self._of.get(table[place])
                if content is not None and content.known is known and content.group == index:
                    self._of[table[place]] = content._replace(end=min(content.end, known.computed))

    # -- recurrent state ---------------------------------------------------------------------------------------

    def _read_and_write_state(
        self,
        known: Known,
        group: int,
        size: int,
        start: int,
        end: int,
        table: Sequence[int],
        step: int,
        *,
        admitted: bool,
    ) -> None:
        if not self._tracks_states:  # a rejected draft takes its state back
            for block in table:
                self._of.pop(block, None)
            return
        cached = self.limits.prefix_caching
        if admitted and start and cached:
            block = table[(start - 1) // size]
            content = self._of.get(block)
            if content is None:
                why = "which was never written" if self._whole else None
            elif content.end != start:
                why = f"which holds the state after {content.end} tokens of {content.known.request_id!r}"
            elif content.step == step:
                why = "whose state is computed in this very step"
            else:
                why = self._why_other(known, content.known, start)
            if why is not None:
                self.found.append(
                    (known.request_id, f"the state after {start} tokens is read from block {block}, {why}")
                )
        place = (end - 1) // size if cached else 0
        if place < len(table) and table[place]:
            self._of[table[place]] = Content(known, group, 0, end, step)
        else:
            self.missing.append((known.request_id, f"the state after {end} tokens has no block"))

    # -- the prefix cache --------------------------------------------------------------------------------------

    def publish(self, blocks: Sequence[int]) -> None:
        """Check blocks that a step put into the prefix cache, when their hashes are not known.

        With several groups a hash may end inside a block, so they are passed over.
        """
        if not self.limits.is_plain:
            return
        for block in blocks:
            content = self._of.get(block)
            if content is not None:
                self._check_full(block, content, 0)

    def check_hashes(
        self,
        cached: Mapping[int, bytes],
        keys: Callable[[Any, int, int], tuple[Sequence[bytes], int]] | None,
    ) -> None:
        """Check the blocks that came into the prefix cache since the last call, by the hashes of their tokens."""
        if cached == self._hashes:
            return
        seen, self._hashes = self._hashes, dict(cached)
        for block, digest in cached.items():
            if seen.get(block) == digest:
                continue
            content = self._of.get(block)
            if content is None:
                if self._whole and self._tracks_states:
                    self.found.append(("", f"block {block} is in the prefix cache and was never written"))
                continue
            own: Sequence[bytes] = ()
            size, num_hashes = self.limits.groups[content.group].block_size, 0
            if keys is not None:
                place = (content.begin if self.limits.groups[content.group].is_attention else content.end - 1) // size
                own, num_hashes = keys(content.known.request, content.group, place)
                if digest not in own:
                    holds = f"[{content.begin}, {content.end}) of {content.known.request_id!r}"
                    self.found.append(
                        (content.known.request_id, f"block {block} is cached by the hash of other tokens than {holds}")
                    )
                    continue
            part = own.index(digest) + 1 if digest in own else num_hashes
            if self.limits.groups[content.group].is_attention:
                self._check_full(block, content, part * size // num_hashes if num_hashes else size)
            elif self._tracks_states and content.end % size:
                self.found.append((content.known.request_id, f"block {block} caches a state inside its block"))

    def _check_full(self, block: int, content: Content, num_needed: int) -> None:
        """A cached block is written as far as its hash reaches, with tokens that are known."""
        size = self.limits.groups[content.group].block_size
        end = content.begin + (num_needed or size)
        known, num_known = content.known, content.known.num_tokens
        if content.begin % size or content.end < end:
            self.found.append(
                (known.request_id, f"block {block} is cached up to {end}, it holds [{content.begin}, {content.end})")
            )
        elif num_known is not None and end > num_known:
            self.found.append(
                (known.request_id, f"block {block} is cached up to {end}, and {num_known} tokens are accepted")
            )
