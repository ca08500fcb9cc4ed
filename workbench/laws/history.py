"""The laws' memory of a run: every number counted again from the steps alone, and the content of each block.

Nothing here is taken from the scheduler's own counters. A request that began before the first step seen (a window, a
slice, a recording that began late) has ``num_tokens`` None until it is known, and the laws that need it pass it over.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from workbench.laws.contents import Contents
from workbench.laws.state import Chunk, Limits, Step

_NO_LIMIT = sys.maxsize

Finding = tuple[str, str]
"""A request id, and what is wrong."""


class Known:
    """A request as counted from the steps.

    Attributes:
        request_id: Its id.
        request: Its source in the scheduler or the trace: prompt, priority, arrival.
        tokens: Its known tokens; None if they are not recorded.
        num_tokens: Number of known tokens; None if its beginning was not seen.
        num_prompt_tokens: Length of the prompt.
        computed: ``num_kv_computed``.
        placeholders: Output tokens that steps in flight will give.
        in_flight: Tokens of its chunks in flight.
        stale: Those of them that were scheduled before its latest preemption.
        generation: Number of preemptions.
        arrival: Place in the order of arrival.
        admission: Place in the order of admission, -1 for one that was never admitted.
        preemption: Place of its latest preemption in the order of all, -1 for one that was never preempted.
        tables: Its block tables, with the places that were checked.
        long: It had more than the threshold left when it was admitted, or when the step began.
        status: "waiting", "running" or "preempted".
        waited_as: Its place in the order of the waiting queue before it was admitted.
    """

    __slots__ = (
        "admission",
        "arrival",
        "arrival_time",
        "computed",
        "generation",
        "in_flight",
        "long",
        "num_prompt_tokens",
        "num_tokens",
        "placeholders",
        "preemption",
        "priority",
        "request",
        "request_id",
        "salt",
        "stale",
        "status",
        "tables",
        "tokens",
        "waited_as",
    )

    def __init__(self, request_id: str, request: Any, tokens: list[int] | None, arrival: int, *, whole: bool) -> None:
        self.request_id = request_id
        self.request = request
        self.tokens = tokens
        self.num_prompt_tokens: int = request.num_prompt_tokens
        self.num_tokens: int | None = self.num_prompt_tokens if whole else None
        self.priority: int = request.priority
        self.arrival_time: float = request.arrival_time
        self.salt: str = request.cache_salt
        self.computed = self.placeholders = self.in_flight = self.stale = self.generation = 0
        self.arrival = arrival
        self.admission = self.preemption = -1
        self.tables: list[list[int]] = []
        self.long = False
        self.status = "waiting"
        self.waited_as: tuple[Any, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far; 0 if they are not known."""
        return 0 if self.num_tokens is None else self.num_tokens - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Known and expected tokens that are not computed; 0 if they are not known."""
        return 0 if self.num_tokens is None else self.num_tokens + self.placeholders - self.computed


class Flight(NamedTuple):
    """A chunk in flight: whose it is, its generation, whether it samples, and the tokens it may give."""

    known: Known
    generation: int
    num_tokens: int
    samples: bool
    num_drafts: int


class History:
    """A run as counted from its steps.

    Args:
        limits: The limits in force.
        whole: The first step seen is the first of the run.

    Attributes:
        limits: The limits in force.
        whole: The first step seen is the first of the run.
        requests: Unfinished requests by id.
        found: Faults found while counting, by predicate; emptied at each moment.
        before: The running requests before the step, in order of admission.
        contents: The content of each block.
        whole_queue: Steps name every waiting request; a recording names those at the head of the queue.
        in_flight: The chunks of each step in flight.
        delivered_since: A token was delivered, or a request came or went, since the law of progress looked.
        seen: States since then.
        num_usable_blocks: KV blocks of the pool without block 0; None if it is not known.
    """

    def __init__(self, limits: Limits, *, whole: bool) -> None:
        self.limits = limits
        self.whole = whole
        self.requests: dict[str, Known] = {}
        self.found: dict[str, list[Finding]] = {}
        self.running: list[Known] = []
        self.before: list[Known] = []
        self.contents = Contents(limits, whole=whole)
        self.in_flight: deque[list[Flight]] = deque()
        self.whole_queue = True
        self.delivered_since = True
        self.seen: set[object] = set()
        self.num_usable_blocks = None if limits.num_blocks is None else limits.num_blocks - 1
        self._held: Counter[int] = Counter()
        self._next_arrival = self._next_admission = self._num_preemptions = 0

    def find(self, predicate: str, request_id: str, detail: str) -> None:
        """Note something that is wrong."""
        self.found.setdefault(predicate, []).append((request_id, detail))

    def relimit(self, limits: Limits, waiting: Sequence[str]) -> None:
        """Take over other limits; a queue that was sorted by another policy keeps its order."""
        if limits.policy != self.limits.policy:
            for request_id in waiting:
                self.requests[request_id].arrival = self._next_arrival
                self._next_arrival += 1
        self.limits = self.contents.limits = limits

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
            return len(self._held)
        kept = [known for known in self.requests.values() if known.request_id not in without]
        return len({block for known in kept for table in known.tables for block in table} - {0})

    def hold(self, known: Known, tables: Sequence[list[int]]) -> None:
        """Give a request its block tables."""
        held = self._held
        held.subtract(block for table in known.tables for block in table)
        held.update(block for table in tables for block in table)
        for block in {block for table in known.tables for block in table if held[block] <= 0}:
            del held[block]
        held.pop(0, None)
        known.tables = [list(table) for table in tables]

    # -- a step is scheduled -----------------------------------------------------------------------------------

    def add(self, request_id: str, request: Any, tokens: list[int] | None, *, whole: bool = True) -> Known:
        """A request that arrives."""
        if request_id in self.requests:
            self.find("ends_once", request_id, "it arrives while it is unfinished")
        known = self.requests[request_id] = Known(request_id, request, tokens, self._next_arrival, whole=whole)
        self._next_arrival += 1
        return known

    def runs(self, known: Known, computed: int, tables: Sequence[list[int]]) -> None:
        """A request that ran before the first step seen; they come in order of admission."""
        known.status, known.computed, known.admission = "running", computed, self._next_admission
        self._next_admission += 1
        self.hold(known, tables)
        self.running.append(known)

    def scheduled(self, step: Step, tables: Mapping[str, Sequence[list[int]]]) -> None:
        """Count what a step scheduled.

        Args:
            step: The step.
            tables: The block tables of the scheduled requests after it.
        """
        for request_id in step.aborted:
            self.end(request_id)
        self.before = self.running
        for runs in self.before:
            runs.long = runs.num_left > self.limits.long_threshold
        for request_id in step.preempted:
            self._preempt(request_id)
        admitted, let_in = set(step.admitted), {*step.admitted, *step.resumed}
        in_order = [chunk.request_id for chunk in step.chunks if chunk.request_id in let_in]
        for request_id in (*in_order, *let_in.difference(in_order)):
            self._admit(request_id, first=request_id in admitted)
        flights: list[Flight] = []
        names = set()
        for chunk in step.chunks:
            scheduled = self.requests.get(name := chunk.request_id)
            if scheduled is None or scheduled.status != "running" or name in names:
                self.find("scheduled_once", name, "it is scheduled twice, or does not run")
                continue
            names.add(name)
            flights.append(self._take_chunk(scheduled, chunk, tables[name], step.step, admitted=name in let_in))
        self.running = [live for name in step.running if (live := self.requests.get(name)) is not None]
        self.in_flight.append(flights)
        if step.arrived or step.aborted:
            self.delivered_since = True

    def _preempt(self, request_id: str) -> None:
        known = self.requests.get(request_id)
        if known is None or known.status != "running":
            return self.find("ends_once", request_id, "it is preempted and does not run")
        known.status, known.computed, known.placeholders = "preempted", 0, 0
        self.hold(known, ())
        known.stale = known.in_flight
        known.generation += 1
        known.preemption, self._num_preemptions = self._num_preemptions, self._num_preemptions + 1

    def _admit(self, request_id: str, *, first: bool) -> None:
        known = self.requests.get(request_id)
        if known is None or known.status == "running":
            return self.find("ends_once", request_id, "it is admitted and does not wait")
        if first is not (known.admission < 0) and known.num_tokens is not None:
            self.find("ends_once", request_id, "it is admitted twice" if first else "it resumes and never ran")
        known.waited_as = self.rank(known)
        known.status, known.admission = "running", self._next_admission
        self._next_admission += 1

    def _take_chunk(
        self, known: Known, chunk: Chunk, tables: Sequence[list[int]], step: int, *, admitted: bool
    ) -> Flight:
        start = chunk.num_cached_tokens if admitted else known.computed
        unsure = known.num_tokens is None and self.limits.num_drafts  # drafts of a step not seen may be taken back
        if chunk.start != start and not unsure:
            of = "its prefix hit ends" if admitted else "its computed tokens end"
            self.find("begins_at_computed", known.request_id, f"its chunk begins at {chunk.start}, {of} at {start}")
        if admitted and known.num_tokens is not None:
            known.long = known.num_tokens - start > self.limits.long_threshold
        end, samples = chunk.start + chunk.num_tokens, not chunk.is_partial_prefill
        if known.num_tokens is None and samples and not self.limits.asynchronous:
            known.num_tokens = end - len(chunk.drafts)
        if known.num_tokens is not None:
            reaches = end >= known.num_tokens + known.placeholders
            if reaches is not samples:
                does = (
                    "reaches its last known token and samples nothing" if reaches else "samples before its last token"
                )
                self.find("samples_last", known.request_id, f"its chunk [{chunk.start}, {end}) {does}")
        self.contents.read_and_write(known, chunk, tables, step, admitted=admitted)
        known.computed = end
        known.in_flight += chunk.num_tokens
        if samples and self.limits.asynchronous:
            known.placeholders += 1 + len(chunk.drafts)
        if known.tables != tables:
            self.hold(known, tables)
        return Flight(known, known.generation, chunk.num_tokens, samples, len(chunk.drafts))

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
        took = self.in_flight.popleft() if chunks is not None and self.in_flight else ()
        flights = {flight.known.request_id: flight for flight in took}
        for chunk in chunks or ():
            if (flight := flights.get(chunk.request_id)) is not None:
                self._take_output(flight, chunk, finish_reasons.get(chunk.request_id), with_tokens=with_tokens)
        for request_id, reason in finish_reasons.items():
            known = self.requests.get(request_id)
            if known is None or (known.status == "waiting" and known.num_tokens is not None):
                self.find("ends_once", request_id, f"it ends ({reason}) and is not unfinished")
            elif reason == "length" and known.num_tokens is not None:
                limit = self.limits.max_model_len
                if known.num_output_tokens < known.request.max_tokens and known.num_tokens < (limit or _NO_LIMIT):
                    self.find(
                        "delivered_once",
                        request_id,
                        f"it ends with {known.num_output_tokens} of max_tokens {known.request.max_tokens}",
                    )
            self.end(request_id)

    def _take_output(self, flight: Flight, chunk: Chunk, reason: str | None, *, with_tokens: bool) -> None:
        known = flight.known
        is_stale = flight.generation != known.generation
        known.in_flight -= flight.num_tokens
        if is_stale:
            known.stale -= flight.num_tokens
        if reason == "error" and not is_stale:
            known.computed = chunk.start  # its rows did not run
            self.contents.forget_after(known)
        given = 0 if chunk.sampled is None else 1 + len(chunk.sampled_before)
        if given and not with_tokens:
            given = 1 + chunk.num_accepted
        name, has_ended = known.request_id, self.requests.get(known.request_id) is not known
        if has_ended:
            if given:
                self.find("delivered_once", name, f"{given} tokens are delivered after its end")
            return
        if given and not flight.samples:
            self.find("delivered_once", name, f"{given} tokens come from a chunk that does not sample")
        if flight.samples and not given and reason not in ("error", "abort") and not chunk.discarded:
            self.find("delivered_once", name, "its chunk sampled, and no token is delivered")
        if given > 1 + flight.num_drafts:
            self.find("delivered_once", name, f"{given} tokens come from {flight.num_drafts} drafts")
        if given:
            self.delivered_since = True
        if known.num_tokens is not None:
            known.num_tokens += given
        if known.tokens is not None and known.tokens is not getattr(known.request, "token_ids", None):
            known.tokens.extend([*chunk.sampled_before, chunk.sampled] if chunk.sampled is not None else ())
        if is_stale or not flight.samples:
            return
        if self.limits.asynchronous:
            known.placeholders -= 1 + flight.num_drafts
        if num_rejected := flight.num_drafts - chunk.num_accepted:
            known.computed -= num_rejected
            self.contents.forget_after(known)

    def end(self, request_id: str) -> None:
        """A request ends."""
        known = self.requests.pop(request_id, None)
        if known is not None:
            self.delivered_since = True
            self.hold(known, ())
            if known.status == "running":
                self.running = [other for other in self.running if other is not known]
