"""KV cache groups of sliding windows: blocks below the window are given back, and a hit needs the last ones alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.scheduler.kv_cache_groups import Found, GroupManager, Shared
from workbench.scheduler.request import Request
from workbench.trace.kv_groups import KVCacheGroup


class SlidingWindow(GroupManager):
    """A group whose rows attend to the last ``sliding_window`` tokens."""

    def __init__(self, index: int, group: KVCacheGroup, shared: Shared, drops_last_block: bool) -> None:
        super().__init__(index, group, shared, drops_last_block)
        self._window = group.sliding_window
        most = min(self._window - 1 + shared.max_in_flight, shared.max_model_len)
        self.max_admission_blocks = -(-most // self.block_size) + 1

    def num_skipped_blocks(self, num_computed: int) -> int:
        """Blocks below the window of the next token."""
        return max(0, num_computed - self._window + 1) // self.block_size

    def _num_for_hit(self, drops: bool) -> int:
        """Consecutive blocks that a hit needs at its end."""
        return -(-(self._window - 1) // self.block_size) + drops

    def keeps(self, request: Request, first: int, last: int) -> Iterable[bool]:
        """The blocks in the window of each place where a hit may end."""
        interval, unit, _ = self._retention
        num_kept, shift = self._num_for_hit(self.drops_last_block), int(self.drops_last_block)
        keeps = [False] * (last - first)
        if interval != 0:
            segment = (interval or unit) // self.block_size
            if num_kept >= segment:
                return [True] * (last - first)
            for block in range(max(first, shift), last):
                keeps[block - first] = (block - shift) % segment >= segment - num_kept
        if interval is not None:
            for boundary in self._retention.boundaries(request, self.block_size, self.drops_last_block):
                end = boundary // self.block_size + shift
                for block in range(max(first, end - num_kept), min(last, end)):
                    keeps[block - first] = True
        return keeps

    def first_block_of_hit(self, end: int, found: int) -> int:
        """The first block in the window of a hit that ends after ``end`` blocks."""
        return max(0, end - self._num_for_hit(False))

    def find(self, request: Request, same: Sequence[GroupManager], num_tokens: int, drops: bool) -> Found:
        """From the right, the first place before which a whole window is cached."""
        unit, size, num_needed = self._retention.alignment, self.block_size, self._num_for_hit(drops)
        num_blocks = num_tokens // size
        hits = [[0] * num_blocks for _ in same]
        run, length = 0, -1
        for block in range(num_blocks - 1, -1, -1):
            if (found := self._lookup(request, same, block)) is None:
                run = 0
                continue
            if run == 0 and (block + (not drops)) * size % unit:
                continue
            for blocks, hit in zip(hits, found):
                blocks[block] = hit
            run += 1
            if run >= num_needed:
                length = block + run
                break
        if length < 0:  # the beginning of the request, if that is cached
            length = run - run * size % unit // size
        if drops and length:
            length -= 1
            length -= length * size % unit // size
        return [blocks[:length] for blocks in hits], length * size
