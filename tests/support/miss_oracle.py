"""Why admissions missed, by brute force over everything that a live scheduler ever cached, evicted and computed.

The oracle watches the scheduler's own pool while it runs, and knows nothing of records. Contents are the tokens
themselves, not hashes, and every question is answered by looking through the whole history.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest

from workbench.scheduler.block_pool import BlockPool
from workbench.scheduler.cache_groups import CacheGroups
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.scheduler import Scheduler


class MissOracle:
    """Answers for every admission and group.

    Attributes:
        answers: For each request the answers to its admissions, in order: one dict per group.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.step = 0
        self.content: dict[int, Any] = {}
        self.live: Counter[Any] = Counter()
        self.removed: dict[Any, tuple[int, str, str]] = {}
        self.computed: dict[str, tuple[str, list[int], int]] = {}
        self.publisher: dict[int, str] = {}
        self.before_step: dict[str, int] = {}
        self.requests: dict[str, Any] = {}
        self.taken_back = False
        self.actor = self.deed = ""
        self.caching: Any = None

    @contextmanager
    def watching(self):
        """Watch every scheduler that runs inside."""
        oracle = self
        cache, evict = BlockPool.cache, BlockPool.evict
        names = ("cache_full_blocks", "allocate_slots", "evict_newly_cached", "evict", "free")
        kinds = (KVCacheManager, CacheGroups)
        methods = {(kind, name): getattr(kind, name) for kind in kinds for name in names}
        schedule = Scheduler.schedule

        def watched_cache(pool, block, digest):
            cache(pool, block, digest)
            oracle.cached(block)

        def watched_evict(pool, block):
            evict(pool, block)
            content = oracle.content.pop(block)
            if content is None:
                return
            oracle.live[content] -= 1
            if not oracle.live[content]:
                withdrawn = oracle.deed == "published and withdrawn"
                culprit = oracle.publisher[block] if withdrawn else oracle.actor
                before = oracle.removed.get(content)
                if withdrawn or before is None or before[::2] != (oracle.step, "published and withdrawn"):
                    oracle.removed[content] = (oracle.step, culprit, oracle.deed)

        def watched_cache_full_blocks(manager, request, num_computed):
            oracle.caching = manager, request
            oracle.requests[request.request_id] = request
            methods[type(manager), "cache_full_blocks"](manager, request, num_computed)
            known = min(num_computed, len(request.token_ids))
            before = oracle.computed.get(request.request_id, ("", [], 0))[2]
            oracle.before_step.setdefault(request.request_id, before)
            oracle.computed[request.request_id] = (
                (request.cache_salt, request.adapter),
                request.token_ids,
                max(known, before),
            )

        def watched_allocate(manager, request, num_tokens, hit=None, removed=()):
            if hit is not None and manager.enable_prefix_caching:
                oracle.answer(manager, request, hit.num_tokens)
            oracle.actor, oracle.deed = request.request_id, "computed and evicted"
            return methods[type(manager), "allocate_slots"](manager, request, num_tokens, hit, removed)

        def watched_withdraw(manager, request, num_computed):
            oracle.deed, oracle.taken_back = "published and withdrawn", True
            return methods[type(manager), "evict_newly_cached"](manager, request, num_computed)

        def watched_drop(manager, blocks):
            oracle.deed = "published and withdrawn"
            methods[type(manager), "evict"](manager, blocks)

        def watched_free(manager, request, *, keep_cached=True):
            oracle.deed = "published and withdrawn"
            if oracle.taken_back:  # its chunk of this step is never computed
                salt, tokens, num_computed = oracle.computed[request.request_id]
                num_computed = oracle.before_step.get(request.request_id, num_computed)
                oracle.computed[request.request_id] = salt, tokens, num_computed
                oracle.taken_back = False
            else:
                oracle.note(manager, request)
            methods[type(manager), "free"](manager, request, keep_cached=keep_cached)

        def watched_schedule(scheduler):
            oracle.step = scheduler.step
            oracle.before_step = {}
            for request in oracle.requests.values():
                oracle.note(scheduler.kv_cache, request)
            return schedule(scheduler)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockPool, "cache", watched_cache)
            patch.setattr(BlockPool, "evict", watched_evict)
            watched = (watched_cache_full_blocks, watched_allocate, watched_withdraw, watched_drop, watched_free)
            for kind in kinds:
                for name, instead in zip(names, watched):
                    patch.setattr(kind, name, instead)
            patch.setattr(Scheduler, "schedule", watched_schedule)
            yield self

    def note(self, manager: KVCacheManager, request: Any) -> None:
        """Count the decodes that fill no block: the scheduler tells the manager nothing of them."""
        salt, tokens, num_computed = self.computed.get(request.request_id, (("", ""), [], 0))
        if manager.rests_inside_blocks:
            num_computed = max(num_computed, min(request.num_kv_computed, len(tokens)))
            self.computed[request.request_id] = salt, tokens, num_computed

    def cached(self, block: int) -> None:
        """A block was cached: note the tokens that it and everything before it hold."""
        manager, request = self.caching
        for group, table in zip(manager.groups, request.block_tables):
            if block in table:
                end = (table.index(block) + 1) * group.block_size + manager.num_hash_lookahead_tokens
                content = None
                if end <= len(request.token_ids) and end <= request.num_kv_computed + manager.num_hash_lookahead_tokens:
                    content = (group.index, (request.cache_salt, request.adapter), tuple(request.token_ids[:end]))
                    self.live[content] += 1
                self.content[block], self.publisher[block] = content, request.request_id
                return
        raise AssertionError(f"block {block} is in no table of {request}")

    # -- the answers -----------------------------------------------------------------------------------------

    def answer(self, manager: KVCacheManager, request: Any, num_hits: int) -> None:
        """The first block that each group lacks, and the reason."""
        for other in self.requests.values():
            self.note(manager, other)
        answers = self.answers.setdefault(request.request_id, [])
        for group in manager.groups:
            answers.append(self._answer(manager, group, request, num_hits))

    def _answer(self, manager: KVCacheManager, group: Any, request: Any, num_hits: int) -> dict[str, Any]:
        tokens, size, unit = request.token_ids, group.block_size, manager.alignment
        lookahead, salt = manager.num_hash_lookahead_tokens, (request.cache_salt, request.adapter)
        contents = [
            (group.index, salt, tuple(tokens[: (block + 1) * size + lookahead]))
            for block in range(len(tokens) // size + 2)
        ]
        is_live = [
            len(tokens) >= (block + 1) * size + lookahead and self.live[contents[block]] > 0
            for block in range(len(contents))
        ]
        found = num_hits if len(manager.groups) == 1 else self._found(manager, group, is_live, len(tokens))
        same = {
            rid: _common(tokens, theirs[:n])
            for rid, (their_salt, theirs, n) in self.computed.items()
            if their_salt == salt
        }
        other = {
            rid: _common(tokens, theirs[:n])
            for rid, (their_salt, theirs, n) in self.computed.items()
            if their_salt != salt
        }
        repeated = max(same.values(), default=0)
        possible = max(0, min(repeated - lookahead, len(tokens) - 1)) // unit * unit
        found = max(found, num_hits)
        fact = {"group": group.index, "found": found, "looked_up": len(tokens), "hit": num_hits}

        def of(block: int) -> tuple[str, int | None, Any]:
            end = (block + 1) * size
            if end >= len(tokens):
                return ("not full" if end > len(tokens) else "last token must be computed"), None, {request.request_id}
            if is_live[block]:
                return ("last block dropped for the drafter" if group.drops_last_block else "not aligned"), None, {None}
            if contents[block] in self.removed:
                step, culprit, deed = self.removed[contents[block]]
                return deed, step, {culprit}
            if repeated - lookahead >= end:
                return "not aligned", None, {rid for rid, n in same.items() if n == repeated}
            if max(other.values(), default=0) - lookahead >= end:
                most = max(other.values())
                nearest = {rid for rid, n in other.items() if n == most}
                salted = {rid for rid in nearest if self.computed[rid][0][0] != salt[0]}
                return ("cache salt differs", None, salted) if salted else ("adapter differs", None, nearest)
            nearest = {rid for rid, n in same.items() if n == repeated}
            apart = {rid for rid in nearest if self.computed[rid][2] > repeated}
            if apart and repeated:
                return "never computed", None, apart
            if repeated > block * size:
                return "not full", None, nearest
            return "never computed", None, nearest if repeated else {None}

        if found < possible:
            end = possible // size
            needed = range(found // size, end)
            if group.group.kind == "sliding_window":
                needed = range(max(0, end - -(-(group.group.sliding_window - 1) // size)), end)
            if group.group.kind == "mamba":
                needed = range(end - 1, end)
            lacking = [block for block in needed if not is_live[block]]
            if not lacking:
                block, why = found // size, of(found // size)
            elif contents[lacking[0]] in self.removed:
                step, culprit, deed = self.removed[contents[lacking[0]]]
                block, why = lacking[0], (deed, step, {culprit})
            else:
                full = group.group.kind == "full_attention"
                reason = "not aligned" if full else "outside what the window kept"
                block, why = lacking[0], (reason, None, {rid for rid, n in same.items() if n == repeated})
        else:
            block = found // size
            why = of(block)
        lost: Counter[str] = Counter()
        for position in range(found, len(tokens)):
            lost[why[0] if position < possible else of(position // size)[0]] += 1
        return fact | {"block": block, "reason": why[0], "step": why[1], "culprits": why[2], "lost": dict(lost)}

    @staticmethod
    def _found(manager: KVCacheManager, group: Any, is_live: list[bool], num_tokens: int) -> int:
        size, unit, drops = group.block_size, manager.alignment, group.drops_last_block
        limit = num_tokens - 1
        is_state = group.group.kind == "mamba"
        drops = drops and not is_state
        if drops:
            limit = min(limit + size, num_tokens - manager.num_hash_lookahead_tokens)
        best = 0
        for count in range(1, limit // size + 1):
            end = (count - drops) * size
            if group.group.kind == "full_attention":
                if all(is_live[:count]):
                    best = end // unit * unit
            elif end % unit == 0:
                num_needed = 1
                if not is_state:
                    num_needed = max(1, -(-(group.group.sliding_window - 1) // size) + drops)
                if all(is_live[max(0, count - num_needed) : count]):
                    best = end
                    if count < num_needed and not is_state:  # the beginning: rounded before and after the drop
                        best = max(0, count * size // unit * unit - drops * size) // unit * unit
        return best


def _common(a: list[int], b: list[int]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
