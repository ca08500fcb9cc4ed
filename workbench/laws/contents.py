"""The content of each KV block, by the tokens from which it was computed; ids and hashes do not decide.

Inside a block the KV of a position stands at a fixed place, so what a block holds is a range of positions of one
request, ``[begin, end)``. It serves another request if the tokens of both are equal up to there. Chunks that are taken
back within their step are in no batch and write nothing. A block of recurrent state holds the state after ``end``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workbench.laws.known import Findings, Known
from workbench.laws.state import Limits


class Content:
    """Positions ``[begin, end)`` of a request in a block, written for a KV cache group, for the last time in a step."""

    __slots__ = ("begin", "end", "group", "known", "step")

    def __init__(self, known: Known, group: int, begin: int, end: int, step: int) -> None:
        self.known, self.group, self.begin, self.end, self.step = known, group, begin, end, step


class Contents:
    """The content of the blocks, and the faults found in it.

    Args:
        limits: The limits in force.
        findings: Takes what is wrong.
        whole: Blocks that were not seen written hold nothing; else they may hold anything.
    """

    def __init__(self, limits: Limits, findings: Findings, *, whole: bool) -> None:
        self._find = findings.add
        self._whole = whole
        self._of: dict[int, Content] = {}
        self._hashes: dict[int, bytes] = {}
        self.relimit(limits)

    def relimit(self, limits: Limits) -> None:
        """Take over other limits."""
        self.limits = limits
        self._tracks_states = limits.num_drafts == 0 or all(group.is_attention for group in limits.groups)
        self._groups = [  # vLLM's rounding of a dropped block can leave a hole in a window
            (
                index,
                group.is_attention,
                group.block_size,
                1 if group.sliding_window and limits.writes_ahead else group.sliding_window,
            )
            for index, group in enumerate(limits.groups)
        ]

    # -- rows --------------------------------------------------------------------------------------------------

    def read_and_write(
        self, known: Known, start: int, end: int, lengths: Sequence[int] | None, step: int, *, admitted: bool
    ) -> None:
        """Check what the rows of a chunk read that they do not write, and note what they write.

        Args:
            known: The request; its tables are those after scheduling.
            start: First position of the chunk.
            end: One past its last position.
            lengths: The lengths of the tables before the step, if they have changed.
            step: The step.
            admitted: The request is admitted in this step.
        """
        contents, tables = self._of, known.tables
        for index, is_attention, size, window in self._groups:
            table = tables[index]
            if not is_attention:
                self._read_and_write_state(known, index, size, start, end, table, step, admitted=admitted)
                continue
            first, last = start // size, -(-end // size)
            if lengths is not None or window:
                if lengths is not None and lengths[index] * size < start:
                    self._read(known, index, size, start, table, lengths[index])
                needed = max(0, start - known.in_flight - window + 1) if window else 0
                if len(table) < last or 0 in table[needed // size : last]:
                    self._find_missing(known, needed, end, size, table)
            elif len(table) < last:
                self._find_missing(known, 0, end, size, table)
            for place, block in enumerate(table[first:last], first):
                if not block:
                    continue
                content = contents.get(block)
                position = place * size
                begin = start if start > position else position
                until = end if end < position + size else position + size
                if content is None:
                    contents[block] = Content(known, index, begin if self._whole else position, until, step)
                elif (
                    content.known is known
                    and content.group == index
                    and content.begin == position
                    and content.end >= begin
                ):
                    content.end, content.step = until, step
                else:
                    other = content.known
                    if other is not known and block in other.tables[content.group]:
                        self._find(
                            "contents", other.request_id, f"its block {block} is written by {known.request_id!r}"
                        )
                    contents[block] = Content(known, index, begin, until, step)

    def _find_missing(self, known: Known, first: int, end: int, size: int, table: Sequence[int]) -> None:
        held = sum(map(bool, table))
        self._find("places", known.request_id, f"[{first}, {end}) has no place in its {held} blocks of {size}")

    def _read(self, known: Known, group: int, size: int, start: int, table: Sequence[int], num_before: int) -> None:
        """Check the blocks behind the first ``num_before`` from which rows before ``start`` are read."""
        agreed: dict[Known, int] = {}
        for place in range(num_before, min(-(-start // size), len(table))):
            if block := table[place]:
                end = min(start, (place + 1) * size)
                if (why := self._why_not(known, block, group, place * size, end, agreed)) is not None:
                    self._find("contents", known.request_id, f"position {end - 1} is read from block {block}, {why}")

    def _why_not(
        self, known: Known, block: int, group: int, begin: int, end: int, agreed: dict[Known, int]
    ) -> str | None:
        """Why a block does not hold positions ``[begin, end)`` of a request; None if it does."""
        content = self._of.get(block)
        if content is None:
            return "which was never written" if self._whole else None
        if content.group != group or content.begin > begin or content.end < end:
            return f"which holds [{content.begin}, {content.end}) of {content.known.request_id!r}"
        return self._why_other(known, content.known, end, agreed)

    @staticmethod
    def _why_other(known: Known, other: Known, end: int, agreed: dict[Known, int]) -> str | None:
        """Why the KV of a request's first tokens does not serve another one; None if it does.

        Args:
            known: The request that reads.
            other: The request that wrote.
            end: Number of tokens.
            agreed: For each other request the number of first tokens that were compared already.
        """
        if known is other:
            return None
        if known.salt != other.salt:
            return f"which holds tokens of {other.request_id!r}, whose cache_salt is another"
        begin = agreed.get(other, 0)
        if known.tokens is None or other.tokens is None or known.tokens[begin:end] == other.tokens[begin:end]:
            agreed[other] = end
            return None
        return f"which holds other tokens, those of {other.request_id!r}"

    def forget_after(self, known: Known) -> None:
        """Rows of rejected drafts hold nothing that counts."""
        for index, is_attention, size, _ in self._groups:
            for block in known.tables[index][known.computed // size :] if is_attention else ():
                content = self._of.get(block)
                if (
                    content is not None
                    and content.known is known
                    and content.group == index
                    and content.end > known.computed
                ):
                    content.end = known.computed

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
                why = self._why_other(known, content.known, start, {})
            if why is not None:
                self._find(
                    "contents", known.request_id, f"the state after {start} tokens is read from block {block}, {why}"
                )
        place = (end - 1) // size if cached else 0
        if place < len(table) and table[place]:
            self._of[table[place]] = Content(known, group, 0, end, step)
        else:
            self._find("places", known.request_id, f"the state after {end} tokens has no block")

    # -- the prefix cache --------------------------------------------------------------------------------------

    def publish(self, blocks: Sequence[int]) -> None:
        """Check blocks that a step put into the prefix cache.

        With several groups a hash may end inside a block, so they are passed over.
        """
        if not self.limits.is_plain:
            return
        for block in blocks:
            content = self._of.get(block)
            if content is not None:
                self._check_full(block, content, self.limits.groups[0].block_size)

    def check_hashes(
        self,
        cached: Mapping[int, bytes],
        by_hash: Mapping[bytes, Sequence[int]] | None,
        keys: Callable[[Known, int, int], tuple[Sequence[bytes], int]] | None,
    ) -> None:
        """Check the changes of the prefix cache since the last call, by the hashes of the tokens.

        Args:
            cached: The cached blocks with their hashes.
            by_hash: The same the other way round; None if it is not known.
            keys: As ``SchedulerState.block_keys``.
        """
        if cached == self._hashes:
            return
        seen, self._hashes = self._hashes, dict(cached)
        new = [(block, digest) for block, digest in cached.items() if seen.get(block) != digest]
        for block, digest in new:
            self._check_hash(block, digest, keys)
        if by_hash is not None:
            gone = [(block, digest) for block, digest in seen.items() if cached.get(block) != digest]
            wrong = [block for block, digest in new if block not in by_hash.get(digest, ())]
            wrong += [block for block, digest in gone if block in by_hash.get(digest, ())]
            if wrong:
                self._find("prefix_cache", "", f"block {wrong[0]} is found by another hash than the one it has")

    def _check_hash(
        self, block: int, digest: bytes, keys: Callable[[Known, int, int], tuple[Sequence[bytes], int]] | None
    ) -> None:
        content = self._of.get(block)
        if content is None:
            if self._whole and self._tracks_states:
                self._find("contents", "", f"block {block} is in the prefix cache and was never written")
            return
        known, group = content.known, self.limits.groups[content.group]
        size, num_needed = group.block_size, group.block_size
        if keys is not None:
            place = (content.begin if group.is_attention else content.end - 1) // size
            own, num_hashes = keys(known, content.group, place)
            if digest not in own:
                holds = f"[{content.begin}, {content.end}) of {known.request_id!r}"
                self._find(
                    "contents", known.request_id, f"block {block} is cached by the hash of other tokens than {holds}"
                )
                return
            num_needed = (own.index(digest) + 1) * size // num_hashes
        if group.is_attention:
            self._check_full(block, content, num_needed)
        elif self._tracks_states and content.end % size:
            self._find("contents", known.request_id, f"block {block} caches a state inside its block")

    def _check_full(self, block: int, content: Content, num_needed: int) -> None:
        """A cached block is written as far as its hash reaches, with tokens that are known."""
        known, end = content.known, content.begin + num_needed
        holds = f"block {block} is cached up to {end}"
        if content.begin % self.limits.groups[content.group].block_size or content.end < end:
            self._find("contents", known.request_id, f"{holds}, it holds [{content.begin}, {content.end})")
        elif known.num_tokens is not None and end > known.num_tokens:
            self._find("contents", known.request_id, f"{holds}, and {known.num_tokens} tokens are accepted")
