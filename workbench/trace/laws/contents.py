"""The content of each KV block, by the tokens from which it was computed; ids and hashes do not decide.

Inside a block the KV of a position stands at a fixed place, so what a block holds is a range of positions of one
request, ``[begin, end)``. It serves another request if the tokens of both are equal up to there. Chunks that are taken
back within their step are in no batch and write nothing. A block of recurrent state holds the state after ``end``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workbench.trace.laws.known import Findings, Known, Writing
from workbench.trace.laws.state import Limits

_STATE = -1
"""In the place of a place: the block holds a recurrent state."""


class Contents:
    """The content of the blocks, and the faults found in it.

    A block's content is a writing and a place of the table: the part of what was written that lies there. So a chunk
    costs no more than the blocks that it is the first to write.

    Args:
        limits: The limits in force.
        findings: Takes what is wrong.
        whole: Blocks that were not seen written hold nothing; else they may hold anything.

    Attributes:
        hashes: The prefix cache when it was last checked.
    """

    def __init__(self, limits: Limits, findings: Findings, *, whole: bool) -> None:
        self._find = findings.add
        self._whole = whole
        self._of: dict[int, tuple[Writing, int]] = {}
        self.hashes: Mapping[int, bytes] = {}
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

    def _range(self, writing: Writing, place: int) -> tuple[int, int]:
        """The positions that a block holds."""
        if place == _STATE:
            return 0, writing.end
        size = self._groups[writing.group][2]
        return max(writing.begin, place * size), min(writing.end, (place + 1) * size)

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
        if admitted or not known.writings:
            known.writings = [
                Writing(known, index, start if self._whole else start - start % size, start // size, step)
                for index, _, size, _ in self._groups
            ]
        for (index, is_attention, size, window), table, writing in zip(self._groups, known.tables, known.writings):
            if not is_attention:
                self._read_and_write_state(known, index, size, start, end, table, step, admitted=admitted)
                continue
            last = -(-end // size)
            if lengths is not None or window:
                if lengths is not None and lengths[index] * size < start:
                    self._read(known, index, size, start, table, lengths[index])
                needed = max(0, start - known.in_flight - window + 1) if window else 0
                if len(table) < last or 0 in table[needed // size : last]:
                    self._find_missing(known, needed, end, size, table)
            elif len(table) < last:
                self._find_missing(known, 0, end, size, table)
            writing.end = end
            if last > (first := writing.num_places):
                writing.num_places = last
                self._enter(writing, first, table[first:last])

    def load(self, known: Known, first: int, blocks: Sequence[int], step: int) -> None:
        """Note blocks whose content came from the second tier, from a place of a request's table on."""
        size, last = self._groups[0][2], first + len(blocks)
        self._enter(Writing(known, 0, first * size, last, step, last * size), first, blocks)

    def _enter(self, writing: Writing, first: int, blocks: Sequence[int]) -> None:
        """Note the blocks that a writing reaches for the first time, from a place on."""
        contents, known = self._of, writing.known
        for place, block in enumerate(blocks, first):
            if not block:
                continue
            if (content := contents.get(block)) is not None:
                other = content[0].known
                if other is not known and block in other.tables[content[0].group]:
                    self._find("contents", other.request_id, f"its block {block} is written by {known.request_id!r}")
            contents[block] = (writing, place)

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
        writing = content[0]
        first, last = self._range(*content)
        if writing.group != group or first > begin or last < end:
            return f"which holds [{first}, {last}) of {writing.known.request_id!r}"
        return self._why_other(known, writing.known, end, agreed)

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
        if known.sharing != other.sharing:
            return f"which holds tokens of {other.request_id!r}, whose cache_salt or adapter is another"
        begin = agreed.get(other, 0)
        if known.tokens is None or other.tokens is None or known.tokens[begin:end] == other.tokens[begin:end]:
            agreed[other] = end
            return None
        return f"which holds other tokens, those of {other.request_id!r}"

    @staticmethod
    def forget_after(known: Known) -> None:
        """Rows of rejected drafts hold nothing that counts."""
        for writing in known.writings:
            writing.end = min(writing.end, known.computed)

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
            block = next(iter(table[(start - 1) // size :]), 0)
            if (content := self._of.get(block)) is None:
                why = "which was never written" if self._whole else None
            elif (writing := content[0]).end != start:
                why = f"which holds the state after {writing.end} tokens of {writing.known.request_id!r}"
            elif writing.step == step:
                why = "whose state is computed in this very step"
            else:
                why = self._why_other(known, writing.known, start, {})
            if why is not None:
                self._find(
                    "contents", known.request_id, f"the state after {start} tokens is read from block {block}, {why}"
                )
        place = (end - 1) // size if cached else 0
        if place < len(table) and table[place]:
            self._of[table[place]] = (Writing(known, group, 0, 0, step, end), _STATE)
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
            if block in self._of:
                self._check_full(block, self.limits.block_size)

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
        if cached == self.hashes:
            return  # comparing dictionaries of the same objects is quick
        seen, self.hashes = self.hashes, dict(cached)
        new = [(block, digest) for block, digest in cached.items() if seen.get(block) != digest]
        for block, digest in new:
            self._check_hash(block, digest, keys)
        if by_hash is not None:
            wrong = [block for block, digest in new if block not in by_hash.get(digest, ())]
            if len(seen) + len(new) != len(cached):  # some are gone, or have another hash
                wrong += [b for b, digest in seen.items() if cached.get(b) != digest and b in by_hash.get(digest, ())]
            if wrong:
                self._find("prefix_cache", "", f"block {wrong[0]} is found by another hash than the one it has")

    def _check_hash(
        self, block: int, digest: bytes, keys: Callable[[Known, int, int], tuple[Sequence[bytes], int]] | None
    ) -> None:
        if (content := self._of.get(block)) is None:
            if self._whole and self._tracks_states:
                self._find("contents", "", f"block {block} is in the prefix cache and was never written")
            return
        writing, place = content
        known, (_, is_attention, size, _) = writing.known, self._groups[writing.group]
        num_needed = size
        if keys is not None:
            own, num_hashes = keys(known, writing.group, place if is_attention else (writing.end - 1) // size)
            if digest not in own:
                first, last = self._range(writing, place)
                what = f"block {block} is cached by the hash of other tokens than [{first}, {last})"
                self._find("contents", known.request_id, f"{what} of {known.request_id!r}")
                return
            num_needed = size if num_hashes == 1 else (own.index(digest) + 1) * size // num_hashes
        if is_attention:
            self._check_full(block, num_needed)
        elif self._tracks_states and writing.end % size:
            self._find("contents", known.request_id, f"block {block} caches a state inside its block")

    def _check_full(self, block: int, num_needed: int) -> None:
        """A cached block is written as far as its hash reaches, with tokens that are known."""
        writing, place = self._of[block]
        known, (first, last) = writing.known, self._range(writing, place)
        begin = place * self._groups[writing.group][2]
        end, num_known = begin + num_needed, known.num_tokens
        holds = f"block {block} is cached up to {end}"
        if first > begin or last < end:
            self._find("contents", known.request_id, f"{holds}, it holds [{first}, {last})")
        elif num_known is not None and end > num_known:
            self._find("contents", known.request_id, f"{holds}, and {num_known} tokens are accepted")
