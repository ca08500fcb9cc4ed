"""The laws' memory of a run: every number counted again from the steps alone.

Nothing here is taken from the scheduler's own counters. A request that began before the first step seen (a window, a
slice, a recording that began late) has ``num_tokens`` None until it is known, and the laws that need it pass it over.
While it counts, the history notes the faults that it meets, under the names of the rules that report them.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from workbench.trace.laws.contents import Contents
from workbench.trace.laws.known import Findings, Flight, Known
from workbench.trace.laws.state import Chunk, Limits, Step, is_special
from workbench.trace.laws.tables import Tables

_NO_LIMIT = sys.maxsize


class History:
    """A run as counted from its steps.

    Args:
        limits: The limits in force.
        whole: The first step seen is the first of the run.

    Attributes:
        limits: The limits in force.
        whole: The first step seen is the first of the run.
        requests: Unfinished requests by id.
        findings: Faults found while counting; emptied at each moment.
        running: The running requests, in order of admission.
        waiting: The waiting queue whose order was checked last.
        before: The running requests before the step, in order of admission.
        tables: The holders of each block.
        contents: The content of each block.
        whole_queue: Steps name every waiting request; a recording names those at the head of the queue.
        in_flight: The chunks of each step in flight, by request.
        delivered_since: A token was delivered, or a request came or went, since the law of progress looked.
        seen: States since then.
        num_steps: Number of steps seen.
        next_aborted: Requests that are known to be aborted before the next step.
        num_usable_blocks: KV blocks of the pool without block 0; None if it is not known.
    """

    def __init__(self, limits: Limits, *, whole: bool) -> None:
        self.whole = whole
        self.requests: dict[str, Known] = {}
        self.findings = Findings()
        self.report = self.findings.add
        self.running: list[Known] = []
        self.before: list[Known] = []
        self.tables = Tables(limits, self.findings, whole=whole)
        self.contents = Contents(limits, self.findings, whole=whole)
        self.in_flight: deque[dict[str, Flight]] = deque()
        self.whole_queue = True
        self.delivered_since = True
        self.seen: set[object] = set()
        self.waiting: Sequence[str] = ()
        self.num_steps = 0
        self.next_aborted: Sequence[str] = ()
        self.num_usable_blocks = None if limits.num_blocks is None else limits.num_blocks - 1
        self._running_ids: tuple[str, ...] | None = ()
        self._queued: object = None  # the queues that were found right, as long as nobody comes or goes
        self._next_arrival = self._next_admission = self._num_preemptions = 0
        self.limits = limits

    def relimit(self, limits: Limits, waiting: Sequence[str]) -> None:
        """Take over other limits; a queue that was sorted by another policy keeps its order."""
        if limits.policy != self.limits.policy:
            for request_id in waiting:
                self.requests[request_id].arrival = self._next_arrival
                self._next_arrival += 1
        self.limits, self.waiting = limits, ()
        self.contents.relimit(limits)

    def rank(self, known: Known) -> tuple[float, float, str]:
        """A request's place in the order of the waiting queue: smaller is served first."""
        if self.limits.policy == "priority":
            return (known.priority, known.arrival_time, known.request_id)
        # A preempted request goes back to the head of the queue.
        return (1, known.arrival, "") if known.preemption < 0 else (0, -known.preemption, "")

    def victim_rank(self, known: Known) -> tuple[float, ...]:
        """A running request's place in the order of preemption: the largest loses its blocks first."""
        return (known.priority, known.arrival_time) if self.limits.policy == "priority" else (known.admission,)

    def num_held(self, without: Collection[str] = ()) -> int:
        """Number of blocks in the tables of requests, some of them left out."""
        if not without:
            return len(self.tables.held)
        kept = [known for known in self.requests.values() if known.request_id not in without]
        return len({block for known in kept for table in known.tables for block in table} - {0})

    # -- a step is scheduled -----------------------------------------------------------------------------------

    def add(self, request: Any, tokens: list[int] | None, *, whole: bool = True, feeds: bool = False) -> Known:
        """A request that arrives."""
        request_id = request.request_id
        if request_id in self.requests:
            self.report("ends_once", request_id, "it arrives while it is unfinished")
        known = Known(request, tokens, self._next_arrival, len(self.limits.groups), whole=whole, feeds=feeds)
        self.requests[request_id] = known
        self._queued = None
        self._next_arrival += 1
        self.delivered_since = True
        return known

    def runs(self, known: Known, computed: int, tables: Sequence[Sequence[int]]) -> None:
        """A request that ran before the first step seen; they come in order of admission."""
        known.status, known.computed, known.admission = "running", computed, self._next_admission
        self._next_admission += 1
        self.tables.hold(known, tables)
        self.running.append(known)
        self._running_ids = None

    def scheduled(self, step: Step, tables: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        """Count what a step scheduled.

        Args:
            step: The step.
            tables: The block tables after it, if its chunks do not name their changes.
        """
        requests, limits = self.requests, self.limits
        self.num_steps = now = self.num_steps + 1
        for request_id in step.aborted:
            self.end(request_id)
        self.before = self.running
        if limits.max_long_partial_prefills is not None:
            for known in self.before:
                known.long = known.num_left > limits.long_threshold
        for request_id in step.preempted:
            self._preempt(request_id, step.preempt_reasons.get(request_id))
        let_in: set[str] = set()
        if step.admitted or step.resumed:
            let_in.update(step.admitted, step.resumed)
            in_order = [chunk.request_id for chunk in step.chunks if chunk.request_id in let_in]
            for request_id in (*in_order, *let_in.difference(in_order)):
                self._admit(request_id, first=request_id in step.admitted)
        for load in step.loads:
            if (loading := requests.get(load.request_id)) is not None:
                self.contents.load(loading, len(load.hit_ids), load.block_ids, step.step)
        flights: dict[str, Flight] = {}
        num_tokens, cap = 0, step.long_prefill_cap or _NO_LIMIT
        for chunk in step.chunks:
            name = chunk.request_id
            num_tokens += chunk.num_tokens
            if not 0 < chunk.num_tokens <= cap:
                self._find_length(chunk, cap)
            scheduled = requests.get(name)
            if scheduled is None or scheduled.status != "running" or scheduled.scheduled_in == now:
                self.report("scheduled_once", name, "it is scheduled twice, or does not run")
                continue
            scheduled.scheduled_in = now
            admitted = name in let_in
            lengths = None
            if tables is not None:
                lengths = self.tables.follow(scheduled, tables.get(name, ()))
            elif admitted or chunk.new_block_ids or chunk.removed or chunk.other_groups:
                lengths = self.tables.change(scheduled, chunk, admitted=admitted)
            flights[name] = self._take_chunk(scheduled, chunk, lengths, step.step, admitted=admitted)
        if num_tokens > (budget := min(limits.token_budget or num_tokens, step.token_budget or num_tokens)):
            self.report("budget", "", f"{num_tokens} tokens are scheduled, the budget is {budget}")
        if step.running != self._running_ids:
            self._running_ids = tuple(step.running)
            self.running = [live for name in step.running if (live := requests.get(name)) is not None]
        self.in_flight.append(flights)
        if tables is None:
            self.tables.scheduled(step)

    def check_queues(self, running: Sequence[str], waiting: Sequence[str]) -> None:
        """Every unfinished request waits or runs, and not both."""
        requests, queued = self.requests, (running, waiting)
        if queued == self._queued:
            return
        names = {*running, *waiting}
        if len(running) + len(waiting) == len(requests) and names == requests.keys():
            self._queued = queued
            return
        for name, count in Counter((*running, *waiting)).items():
            if count > 1:
                self.report("one_queue", name, "it is queued twice")
            elif name not in requests:
                self.report("one_queue", name, "it is queued, and has ended or never arrived")
        for name in requests.keys() - names:  # a recording may name the head of its queue only
            if self.whole_queue or requests[name].status == "running":
                self.report("one_queue", name, "it is in no queue")

    def _find_length(self, chunk: Chunk, cap: int) -> None:
        if chunk.num_tokens > cap:
            what = f"its chunk has {chunk.num_tokens} tokens, long_prefill_token_threshold is {cap}"
            self.report("cap", chunk.request_id, what)
        else:
            self.report("not_negative", chunk.request_id, f"its chunk has {chunk.num_tokens} tokens")

    def _preempt(self, request_id: str, reason: Any) -> None:
        known = self.requests.get(request_id)
        if known is None or known.status != "running":
            return self.report("ends_once", request_id, "it is preempted and does not run")
        if reason is not None and reason.requests == (request_id,) and known.num_tokens is not None:
            self._find_needless(known, reason.needed or 0)
        known.status, known.computed, known.placeholders, known.proposed = "preempted", 0, 0, 0
        self.tables.drop(known)
        known.stale = known.in_flight
        known.generation += 1
        known.preemption, self._num_preemptions = self._num_preemptions, self._num_preemptions + 1

    def _find_needless(self, known: Known, needed: int) -> None:
        """A request loses its blocks to itself for no more than the blocks that all of its tokens lack."""
        most, num_slots = 0, (known.num_tokens or 0) + known.placeholders + 2 * self.limits.num_drafts
        for group, table in zip(self.limits.groups, known.tables):
            if group.kind == "mamba" and self.limits.prefix_caching:
                most += 1
            else:
                num_places = -(-num_slots // group.block_size) + (0 if group.is_attention else self.limits.num_drafts)
                most += max(0, num_places - len(table))
        if needed > most:
            what = f"it loses its blocks to itself because it needs {needed}, all of its tokens take {most}"
            self.report("needless", known.request_id, what)

    def _admit(self, request_id: str, *, first: bool) -> None:
        known = self.requests.get(request_id)
        if known is None or known.status == "running":
            return self.report("ends_once", request_id, "it is admitted and does not wait")
        if first is not (known.admission < 0) and known.num_tokens is not None:
            self.report("ends_once", request_id, "it is admitted twice" if first else "it resumes and never ran")
        known.waited_as = self.rank(known)
        known.status, known.admission = "running", self._next_admission
        self._next_admission += 1

    def _take_chunk(
        self, known: Known, chunk: Chunk, lengths: Sequence[int] | None, step: int, *, admitted: bool
    ) -> Flight:
        limits = self.limits
        start, num_drafts, samples = chunk.start, len(chunk.drafts), not chunk.is_partial_prefill
        end = start + chunk.num_tokens
        if start != (chunk.num_cached_tokens if admitted else known.computed):
            self._find_start(known, chunk, admitted=admitted)
        if known.num_tokens is None and samples and not limits.asynchronous:
            known.num_tokens = end - num_drafts
        if known.num_tokens is not None:
            if admitted:
                known.long = known.num_tokens - start > limits.long_threshold
            if (reaches := end >= known.num_tokens + known.placeholders) is not samples:
                does = "reaches its last known token and samples nothing" if reaches else "samples before its last one"
                self.report("samples_last", known.request_id, f"its chunk [{start}, {end}) {does}")
        self.contents.read_and_write(known, start, end, lengths, step, admitted=admitted)
        if limits.has_exact_tables and len(table := known.tables[0]) != (needed := -(-end // limits.block_size)):
            what = f"it holds {len(table)} blocks for {end} tokens, not {needed}"
            self.report("tables_fit", known.request_id, what)
        if limits.num_lookahead_tokens and limits.is_plain:
            self._find_lookahead(known, chunk, end)
        if limits.recycled and known.num_tokens is not None:
            self._find_unread(known, start - (0 if admitted else known.in_flight))
        known.computed = end
        known.in_flight += chunk.num_tokens
        if samples and limits.asynchronous:
            known.placeholders += 1 + num_drafts
        return Flight(known, known.generation, chunk.num_tokens, samples, num_drafts)

    def _find_unread(self, known: Known, num_processed: int) -> None:
        for index, size, reach in self.limits.recycled:
            first = max(0, num_processed - reach) // size
            if any(known.tables[index][:first]):
                what = f"it holds a block before position {first * size}, and no row reads it any more"
                self.report("tables_fit", known.request_id, what)

    def _find_lookahead(self, known: Known, chunk: Chunk, end: int) -> None:
        if not hasattr(chunk, "request") or is_special(chunk):  # only our scheduler says who is served frugally
            return
        num_slots = min(end + self.limits.num_lookahead_tokens, self.limits.max_model_len or _NO_LIMIT)
        if (num_held := len(known.tables[0]) * self.limits.block_size) < num_slots:
            self.report("tables_fit", known.request_id, f"it holds {num_held} slots, its proposer writes {num_slots}")

    def _find_start(self, known: Known, chunk: Chunk, *, admitted: bool) -> None:
        if known.num_tokens is None and self.limits.num_drafts:
            return  # drafts of a step not seen may be taken back
        expected = chunk.num_cached_tokens if admitted else known.computed
        of = "its prefix hit ends" if admitted else "its computed tokens end"
        what = f"its chunk begins at {chunk.start}, {of} at {expected}"
        self.report("begins_at_computed", known.request_id, what)

    # -- its output comes in -----------------------------------------------------------------------------------

    def updated(
        self, chunks: Sequence[Chunk] | None, finish_reasons: Mapping[str, str], *, with_tokens: bool = True
    ) -> None:
        """Count what the oldest step in flight gave.

        Args:
            chunks: Its chunks, complete; None when no output came in.
            finish_reasons: Requests that end with it.
            with_tokens: Whether the tokens are recorded.
        """
        flights = self.in_flight.popleft() if chunks is not None and self.in_flight else {}
        for chunk in chunks or ():
            if (flight := flights.get(chunk.request_id)) is not None:
                self._take_output(flight, chunk, finish_reasons.get(chunk.request_id), with_tokens=with_tokens)
                self._check_length(flight.known)
        for request_id, reason in finish_reasons.items():
            known = self.requests.get(request_id)
            refused = reason == "error"  # its grammar cannot be compiled
            if known is None or (known.status == "waiting" and known.num_tokens is not None and not refused):
                self.report("ends_once", request_id, f"it ends ({reason}) and is not unfinished")
            elif reason == "length" and known.num_tokens is not None:
                limit = self.limits.max_model_len
                if known.num_output_tokens < known.max_tokens and known.num_tokens < (limit or _NO_LIMIT):
                    what = f"it ends with {known.num_output_tokens} of max_tokens {known.max_tokens}"
                    self.report("delivered_once", request_id, what)
            elif reason == "stop" and known.tokens and known.stops is not None and known.tokens[-1] not in known.stops:
                self.report("ends_once", request_id, f"it ends at token {known.tokens[-1]}, which does not end it")
            self.end(request_id)

    def _take_output(self, flight: Flight, chunk: Chunk, reason: str | None, *, with_tokens: bool) -> None:
        known, generation, num_tokens, samples, num_drafts = flight
        is_stale = generation != known.generation
        known.in_flight -= num_tokens
        if is_stale:
            known.stale -= num_tokens
        if reason == "error" and not is_stale:
            known.computed = chunk.start  # its rows did not run
            self.contents.forget_after(known)
        given = 0 if chunk.sampled is None else 1 + len(chunk.sampled_before) if with_tokens else 1 + chunk.num_accepted
        if self.requests.get(known.request_id) is not known:
            if given:
                self.report("delivered_once", known.request_id, f"{given} tokens are delivered after its end")
            return
        if given:
            self.delivered_since = True
            if not samples or given > 1 + num_drafts:
                kind = f"{num_drafts} drafts" if samples else "a chunk that does not sample"
                self.report("delivered_once", known.request_id, f"{given} tokens come from {kind}")
            if known.feeds and known.tokens is not None:
                known.tokens += [*chunk.sampled_before, chunk.sampled]
        elif samples and reason not in ("error", "abort") and not chunk.discarded:
            self.report("delivered_once", known.request_id, "its chunk sampled, and no token is delivered")
        if known.num_tokens is not None:
            known.num_tokens += given
        if is_stale or not samples:
            return
        if self.limits.asynchronous:
            known.placeholders -= 1 + num_drafts
        if num_rejected := num_drafts - chunk.num_accepted:
            known.computed -= num_rejected
            self.contents.forget_after(known)

    def _check_length(self, known: Known) -> None:
        if known.num_tokens is None:
            return
        num_tokens, limit = max(known.num_tokens, known.computed), self.limits.max_model_len
        if limit is not None and num_tokens > limit and num_tokens > known.num_prompt_tokens:
            self.report("length", known.request_id, f"it has {num_tokens} tokens, max_model_len is {limit}")
        if known.num_output_tokens > known.max_tokens:
            what = f"it has {known.num_output_tokens} tokens, max_tokens is {known.max_tokens}"
            self.report("length", known.request_id, what)

    def end(self, request_id: str) -> None:
        """A request ends."""
        known = self.requests.pop(request_id, None)
        if known is not None:
            self.delivered_since, self._queued = True, None
            self.tables.drop(known)
            if known.status == "running":
                self.running = [other for other in self.running if other is not known]
                self._running_ids = None
