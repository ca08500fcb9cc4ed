"""Follow the prefix cache through a trace: which content it held, lost and never got, and what admissions missed.

Records name blocks and not their content. The content follows from the requests' tokens: a KVCacheManager like the
scheduler's caches the same blocks again and looks the same prefixes up. The scheduler itself keeps no history, so that
an autopsy costs nothing while it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from workbench.analysis.computed_tokens import ComputedTokens, Repetition
from workbench.analysis.fork import recorded_config
from workbench.analysis.miss import (
    CANNOT_DROP,
    EVICTED,
    LAST_TOKEN,
    NEVER_COMPUTED,
    NOT_ALIGNED,
    NOT_FULL,
    NOT_KEPT,
    OTHER_ADAPTER,
    OTHER_SALT,
    UNKNOWN,
    WITHDRAWN,
    Lost,
    Miss,
)
from workbench.scheduler.kv_cache_groups import GroupManager
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.recurrent_state import CachedState
from workbench.scheduler.request import Request
from workbench.scheduler.sliding_window import SlidingWindow
from workbench.trace import Chunk, StepRecord, Trace
from workbench.trace.readings.contents import Contents
from workbench.trace.records import TableChange


class _Removal(NamedTuple):
    """The end of a content in the prefix cache: its step, the request behind it, and EVICTED or WITHDRAWN."""

    step: int
    culprit: str | None
    reason: str


class _Cause(NamedTuple):
    """The fields of a Miss that say why."""

    reason: str
    step: int | None = None
    culprit: str | None = None
    position: int | None = None
    token_ids: tuple[int, int | None] | None = None


class PrefixHistory:
    """The autopsy of every admission in a trace, growing or not.

    Args:
        trace: The trace. Without its first steps, or without token ids, some reasons are unknown.

    Attributes:
        manager: Caches and looks up blocks as the scheduler's did.
        contents: The requests' tokens, or what stands for them.
        misses: For each request the misses of its admissions, one per admission and KV cache group.
        num_read: Number of steps that are read.

    Raises:
        ValueError: The trace's configuration is not one of this scheduler's.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace: Trace = weakref.proxy(trace)  # a cache of histories must not keep traces alive
        config = recorded_config(trace)
        self.manager = KVCacheManager(config)
        self._pool = self.manager.block_pool
        self._groups = self.manager.groups
        self._rests_inside_blocks, self._block_size = self.manager.rests_inside_blocks, self.manager.block_size
        self._is_async = config.async_scheduling
        self._steps_ahead = config.async_scheduling or config.num_speculative_tokens > 0
        self._requests: dict[str, Request] = {}
        self._computed: dict[tuple[str, str], ComputedTokens] = {}
        self._grown: dict[str, tuple[Request, int]] = {}
        self._removed: dict[bytes, _Removal] = {}
        self._before: tuple[Chunk, ...] = ()
        self._evicted: set[int] | None = None
        self._unknown: set[str] = set()
        self.contents = Contents(self._trace)
        self._has_numbers = self.contents.kind != "tokens"
        self._begins_late = trace.keyframe is not None
        self.misses: dict[str, list[Miss]] = {}
        self.num_read = 0
        self._is_broken = False
        if (keyframe := trace.keyframe) is not None:
            for request_id, table in keyframe.block_tables.items():
                request = self._request(request_id)
                request.status = "running"
                request.block_tables = [list(table), *map(list, keyframe.other_tables.get(request_id, ()))]
                self._compute(request, keyframe.num_kv_computed.get(request_id, 0))

    @property
    def enabled(self) -> bool:
        """Whether there is a prefix cache at all."""
        return self.manager.enable_prefix_caching

    def advance(self) -> None:
        """Read the steps that the trace has and this does not.

        Raises:
            ValueError: A step does not follow from those before it, as in the run of a faulty scheduler.
        """
        if not self.enabled:
            return
        while self.num_read < len(self._trace):
            record = self._trace[self.num_read]
            try:
                if self._is_broken:
                    raise LookupError
                self._schedule(record)
                self._finish(record)
            except LookupError as problem:  # a block or a token that there cannot be
                self._is_broken = True
                raise ValueError(
                    f"step {record.step} does not follow from those before it, so nobody knows what the prefix cache "
                    "had: trace.check() tells which law is broken"
                ) from problem
            self._pool.take_change()  # nobody else does, and it would grow
            self.num_read += 1

    # -- requests --------------------------------------------------------------------------------------------

    def _request(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            info = self._trace.requests[request_id]
            if not self.contents.is_known(info):
                self._unknown.add(request_id)
            prompt = self.contents.prompt(info)
            request = self._requests[request_id] = Request(
                request_id, prompt, cache_salt=info.cache_salt, adapter=info.adapter
            )
            request.reset_blocks(len(self._groups))
        return request

    def _compute(self, request: Request, num_computed: int) -> None:
        """The KV of a request's first tokens is computed, and the blocks that they fill are cached."""
        request.num_kv_computed = num_computed
        # Most decodes complete no block, and the manager then has nothing to cache.
        if not self._rests_inside_blocks or num_computed // self._block_size > request.num_cached_blocks[0]:
            self.manager.cache_full_blocks(request, num_computed)
        num_known = len(request.token_ids)
        self._grown[request.request_id] = request, num_computed if num_computed < num_known else num_known

    def _tree(self, sharing: tuple[str, str]) -> ComputedTokens:
        tree = self._computed.get(sharing)
        if tree is None:
            tree = self._computed[sharing] = ComputedTokens()
        return tree

    # -- one step --------------------------------------------------------------------------------------------

    def _schedule(self, record: StepRecord) -> None:
        self.manager.begin_step()
        self._evicted = None if record.pool is None else set(record.pool.evicted)
        for request_id in record.aborted:
            self._requests.pop(request_id, None)
        withdrawn = [
            (request_id, key)
            for request_id in record.preempted
            for key in self._preempt(record, self._request(request_id))
        ]
        admitted, requests = {*record.admitted, *record.resumed}, self._requests
        for index, chunk in enumerate(record.chunks):
            request, num_hits = requests.get(chunk.request_id) or self._request(chunk.request_id), 0
            if admitted and chunk.request_id in admitted:
                self._admit(record, request, chunk)
                num_hits = chunk.num_cached_tokens
            if chunk.new_block_ids or chunk.other_groups or chunk.removed:
                changes = [TableChange(chunk.new_block_ids), *chunk.other_groups]
                self._take(record, request, changes, num_hits)
                request.block_tables = [record.block_table(index, group) for group in range(len(self._groups))]
            self._compute(request, chunk.start + chunk.num_tokens)
        for request_id, key in withdrawn:
            if not self.is_cached(key):
                self._removed[key] = _Removal(record.step, request_id, WITHDRAWN)
        if self._evicted:  # those that no request was given
            for block in self._evicted.difference(record.cached_block_ids):
                self._remove(block, _Removal(record.step, None, EVICTED))

    def _preempt(self, record: StepRecord, request: Request) -> list[bytes]:
        """Take a request's blocks.

        Returns:
            The contents that it cached in this very step, before its chunk was taken out of the batch again.
        """
        request_id, keys = request.request_id, []
        if request_id in record.unscheduled_block_ids:
            changes = record.unscheduled_changes.get(request_id, ())
            gained = [TableChange(record.unscheduled_block_ids[request_id]), *changes]
            self._take(record, request, gained, 0)
            withdrawn, end = set(record.withdrawn_block_ids), 0
            published = withdrawn.union(record.cached_block_ids)
            for group, table, change in zip(self._groups, request.block_tables, gained):
                table += change.new_block_ids
                for place in range(request.num_cached_blocks[group.index], len(table)):
                    if table[place] in published:
                        end = max(end, (place + 1) * group.block_size)
            first = len(self.manager.newly_cached)
            self.manager.cache_full_blocks(request, end)
            for block in self.manager.newly_cached[first:]:
                if block in withdrawn and (key := self._pool.hash_of(block)) is not None:
                    self._pool.evict(block)
                    keys.append(key)
        request.reset_blocks(len(self._groups))
        request.status = "preempted"
        return keys

    def _take(self, record: StepRecord, request: Request, changes: Sequence[TableChange], num_hits: int) -> None:
        """Blocks that a request is given behind its hit lose their content; if the recorder could not know, all do."""
        evicted = self._evicted
        for group, change in zip(self._groups, changes):
            for block in change.new_block_ids[num_hits // group.block_size :]:
                if evicted is None or block in evicted:
                    self._remove(block, _Removal(record.step, request.request_id, EVICTED))

    def _remove(self, block: int, removal: _Removal) -> None:
        key = self._pool.hash_of(block)
        if key is not None:
            self._pool.evict(block)
            if not self.is_cached(key):
                self._removed[key] = removal

    def _finish(self, record: StepRecord) -> None:
        """Process the output that came in this step, and the ends of requests."""
        requests = self._requests
        for chunk in self._before if self._is_async else record.chunks:
            if (token := chunk.sampled) is None or (request := requests.get(chunk.request_id)) is None:
                continue
            if self._steps_ahead or self._has_numbers or chunk.sampled_before:
                self._append(request, chunk)
            else:
                request.token_ids.append(token)
        self._before = record.chunks
        if record.pool_end is not None and record.pool_end.evicted:
            failed = next((rid for rid, reason in record.finish_reasons.items() if reason == "error"), None)
            for block in record.pool_end.evicted:
                self._remove(block, _Removal(record.step, failed, WITHDRAWN))
        for request_id in record.finished:
            self._requests.pop(request_id, None)

    def _append(self, request: Request, chunk: Chunk) -> None:
        if self.shows_tokens(request):
            request.token_ids += chunk.accepted
        else:
            self._add_numbers(request, len(chunk.accepted))
        if self._steps_ahead and request.status == "running":
            num_rejected = max(0, len(chunk.drafts) - chunk.num_accepted)
            self._compute(request, min(chunk.num_kv - num_rejected, len(request.token_ids) - 1))

    def _add_numbers(self, request: Request, num_tokens: int) -> None:
        num_known = len(request.token_ids)
        request.token_ids += self.contents.tokens(request.request_id, num_known, num_known + num_tokens)

    # -- an admission ----------------------------------------------------------------------------------------

    def _admit(self, record: StepRecord, request: Request, chunk: Chunk) -> None:
        num_lost, num_hits = chunk.end - len(request.token_ids), chunk.num_cached_tokens
        # Tokens that were sampled before the trace began, or a file that gives a request more hits than tokens.
        if num_lost > 0 and (self._begins_late or num_hits >= len(request.token_ids)):
            self._unknown.add(request.request_id)
            self._add_numbers(request, num_lost)
        hit = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        request.status = "running"
        request.reset_blocks(len(self._groups))
        request.num_cached_blocks = [num_hits // group.block_size for group in self._groups]
        inquiry = _Inquiry(self, record.step, request, num_hits)
        self.misses.setdefault(request.request_id, []).extend(map(inquiry.miss, self._groups))

    def num_found(self, request: Request, group: GroupManager, num_hits: int) -> int:
        """The hit that a group could serve alone."""
        if len(self._groups) == 1:
            return num_hits
        limit, drops = len(request.token_ids) - 1, group.drops_last_block
        if drops and group.group.is_attention:
            hash_size = group.block_size // group.hashes_per_block
            limit = min(limit + group.block_size, len(request.block_hashes) * hash_size)
        return max(num_hits, group.find(request, [group], limit, drops)[1])

    def is_cached(self, key: bytes) -> bool:
        """Whether a block with this content can be found."""
        return self._pool.get_cached_block(key) is not None

    def is_new(self, key: bytes) -> bool:
        """Whether a block with this content was cached in the present step."""
        return any(self._pool.hash_of(block) == key for block in self.manager.newly_cached)

    def removal(self, key: bytes) -> _Removal | None:
        """When and why a content left the cache for the last time; None if it never did."""
        return self._removed.get(key)

    def repetition(self, request: Request) -> Repetition:
        """The longest beginning of a request that requests of its salt computed before."""
        for other, num_computed in self._grown.values():  # only admissions ask, so decodes are entered many at a time
            self._tree(_sharing(other)).add(other.request_id, other.token_ids, num_computed)
        self._grown.clear()
        return self._tree(_sharing(request)).longest(request.token_ids)

    def repetition_elsewhere(self, request: Request) -> tuple[Repetition, str]:
        """The same for requests with another salt or another adapter, and the reason why it is of no use."""
        here = _sharing(request)
        others = [(tree.longest(request.token_ids), key) for key, tree in self._computed.items() if key != here]
        longest, (salt, _) = max(
            others,
            key=lambda other: (other[0].num_tokens, other[1][0] != request.cache_salt),
            default=(Repetition(0, None, None, None), here),
        )
        return longest, OTHER_SALT if salt != request.cache_salt else OTHER_ADAPTER

    def shows_tokens(self, request: Request) -> bool:
        """Whether a request's tokens are recorded."""
        return not self._has_numbers or bool(self._trace.requests[request.request_id].prompt_token_ids)

    def is_unknown(self, request: Request) -> bool:
        """Whether other requests may have had the tokens of a request without a sign of it in the trace."""
        return self._begins_late or request.request_id in self._unknown


def _sharing(request: Request) -> tuple[str, str]:
    """The properties that requests share if they find each other's blocks."""
    return request.cache_salt, request.adapter


class _Inquiry:
    """Why an admission found no more than it did."""

    def __init__(self, history: PrefixHistory, step: int, request: Request, num_hits: int) -> None:
        self._history, self._step, self._request = history, step, request
        self._num_tokens = len(request.token_ids)
        self._num_hits = min(num_hits, self._num_tokens)
        self._num_groups = len(history.manager.groups)
        self._unit = history.manager.alignment
        lookahead = history.manager.num_hash_lookahead_tokens
        self._repetition = history.repetition(request)
        self._num_repeated = max(0, self._repetition.num_tokens - lookahead)
        self._lookahead = lookahead

    @cached_property
    def _elsewhere(self) -> tuple[Repetition, str]:
        return self._history.repetition_elsewhere(self._request)

    def miss(self, group: GroupManager) -> Miss:
        """The first block that a group did not find, and the reasons for all tokens behind its hit."""
        size, num_tokens = group.block_size, self._num_tokens
        found = self._history.num_found(self._request, group, self._num_hits)
        parts: list[Lost] = []
        first, cause = None, None
        position = found
        # The longest hit that there would be if every block that was ever computed were still cached.
        possible = min(self._num_repeated, num_tokens - 1) // self._unit * self._unit
        if found < possible:
            first, cause = self._gap(group, found, possible)
            parts.append(Lost(cause.reason, possible - found))
            position = possible
        last = (num_tokens - 1) // size * size
        while position < num_tokens:
            block = position // size
            reason = self._cause(group, block)
            if first is None or cause is None:
                first, cause = block, reason
            if position >= last:
                length = num_tokens - position
            elif reason.reason in (NEVER_COMPUTED, UNKNOWN):
                length = last - position
            else:
                length = size
            if parts and parts[-1].reason == reason.reason:
                parts[-1] = Lost(reason.reason, parts[-1].tokens + length)
            else:
                parts.append(Lost(reason.reason, length))
            position += length
        if first is None or cause is None:  # a recorded engine that computes nothing behind a whole hit
            first, cause, parts = num_tokens // size, _Cause(UNKNOWN), [Lost(UNKNOWN, 0)]
        return Miss(
            request_id=self._request.request_id,
            admitted=self._step,
            group=group.index,
            kind=group.group.kind,
            block=first,
            block_size=size,
            reason=cause.reason,
            tokens=parts[0].tokens,
            step=cause.step,
            culprit=cause.culprit,
            position=cause.position,
            token_ids=cause.token_ids,
            looked_up=num_tokens,
            found=found,
            hit=self._num_hits,
            parts=tuple(parts),
        )

    def _gap(self, group: GroupManager, found: int, possible: int) -> tuple[int, _Cause]:
        """Why a group does not serve a prefix that was computed: the first block that it lacks."""
        history, request, end = self._history, self._request, possible // group.block_size
        for block in range(group.first_block_of_hit(end, found // group.block_size), end):
            key = group.key(request, block)
            if not history.is_cached(key):
                removal = history.removal(key)
                if removal is not None:
                    return block, _Cause(removal.reason, removal.step, removal.culprit)
                if self._is_unsure:
                    return block, _Cause(UNKNOWN)
                kept = isinstance(group, SlidingWindow | CachedState)
                return block, _Cause(NOT_KEPT if kept else NOT_ALIGNED, culprit=self._repetition.first)
        return found // group.block_size, self._cause(group, found // group.block_size)

    def _cause(self, group: GroupManager, block: int) -> _Cause:
        """Why a block is not part of the hit, if nothing before it is missing."""
        history, request, repetition = self._history, self._request, self._repetition
        end = (block + 1) * group.block_size
        if end > self._num_tokens:
            return _Cause(NOT_FULL, culprit=request.request_id)
        if end == self._num_tokens:
            return _Cause(LAST_TOKEN, culprit=request.request_id)
        key = group.key(request, block)
        if history.is_cached(key):
            if group.drops_last_block:
                return _Cause(CANNOT_DROP)
            if self._num_groups > 1:
                return _Cause(NOT_ALIGNED)
            return _Cause(NEVER_COMPUTED if history.is_new(key) else UNKNOWN)
        if (removal := history.removal(key)) is not None:
            return _Cause(removal.reason, removal.step, removal.culprit)
        if self._num_repeated >= end:
            return _Cause(NOT_ALIGNED, culprit=repetition.first)
        elsewhere, differs = self._elsewhere
        if elsewhere.num_tokens - self._lookahead >= end:
            return _Cause(differs, culprit=elsewhere.first)
        if self._is_unsure:
            return _Cause(UNKNOWN)
        if repetition.diverging is not None and repetition.num_tokens and history.shows_tokens(request):
            tokens = request.token_ids[repetition.num_tokens], repetition.other_token
            return _Cause(NEVER_COMPUTED, None, repetition.diverging, repetition.num_tokens, tokens)
        if repetition.num_tokens > block * group.block_size:
            return _Cause(NOT_FULL, culprit=repetition.first)
        return _Cause(NEVER_COMPUTED, culprit=repetition.first, position=repetition.num_tokens)

    @property
    def _is_unsure(self) -> bool:
        return self._history.is_unknown(self._request)
