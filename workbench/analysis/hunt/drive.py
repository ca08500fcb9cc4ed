"""Drives any scheduler through a workload: requests arrive, are aborted, get tokens, and nothing is computed.

Every generated test contains this file, so it imports nothing but the standard library.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

IDLE_STEPS = 3
"""Consecutive steps without a token after which requests that are left will wait forever: more than are in flight."""


@dataclass(slots=True)
class PlannedChunk:
    """Tokens ``[start, start + num_tokens)`` of a request, the last of them drafts.

    A scheduler gives the first fields. ``samples`` says that the chunk reaches the last known token; None lets the
    driver decide. ``is_padded`` marks drafts that only fill rows and are never accepted.
    """

    request_id: str
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()
    samples: bool | None = None
    is_padded: bool = False
    num_cached_tokens: int = 0
    sampled: int | None = None
    sampled_before: tuple[int, ...] = ()
    num_accepted: int = 0
    discarded: bool = False

    @property
    def is_partial_prefill(self) -> bool:
        """More of the prompt follows."""
        return not self.samples


@dataclass(slots=True)
class Plan:
    """A step. A scheduler gives ``chunks``, and the requests it preempted, if it knows; the driver adds the rest.

    ``passed_over`` names the requests that wait for a grammar or for KV from elsewhere, with an object that has this
    ``kind``: "grammar" or "transfer".
    """

    chunks: list[PlannedChunk]
    preempted: list[str] | None = None
    handle: Any = None
    step: int = 0
    arrived: tuple[str, ...] = ()
    aborted: tuple[str, ...] = ()
    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    finish_reasons: dict[str, str] = field(default_factory=dict)
    free_blocks: int = 0
    free_blocks_end: int = 0
    token_budget: int = 0
    long_prefill_cap: int | None = None
    passed_over: dict[str, Any] = field(default_factory=dict)
    preempt_reasons: dict[str, Any] = field(default_factory=dict)  # empty: they are not known
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    loads: tuple[()] = ()  # a hunt has no second tier


@dataclass
class LiveRequest:
    """A request, with the tokens that it has so far. A scheduler may keep its own attributes here."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival_time: float
    cache_salt: str
    stop_token_ids: tuple[int, ...]
    arrival_step: int
    abort_step: int | None
    accepts: tuple[int, ...]
    status: str = "waiting"
    num_verified: int = 0
    num_expected: int = 0
    num_preemptions: int = 0
    was_admitted: bool = False
    ready_step: int | None = None  # the first step that sees its grammar compiled
    adapter: str = ""
    remote: dict[str, Any] | None = None  # {"num_tokens", "num_steps", "fails"}: KV that comes from elsewhere


def made_up_token(text: str) -> int:
    """A token id that depends on the text alone."""
    return 3 + crc32(text.encode("utf-8", "surrogatepass")) % 31997


def prompt_tokens(prompt: Any, seed: str) -> list[int]:
    """The tokens of a prompt: a list, ``{"len", "seed"}`` or ``{"parts"}``."""
    if isinstance(prompt, list):
        return list(prompt)
    if "parts" in prompt:
        return [token for part in prompt["parts"] for token in prompt_tokens(part, seed)]
    return [made_up_token(f"p{prompt.get('seed', seed)}:{position}") for position in range(prompt["len"])]


def live_request(index: int, given: dict[str, Any]) -> LiveRequest:
    """A request of a workload."""
    name = given["id"]
    prompt = prompt_tokens(given["prompt"], name)
    stop_at = given.get("stop_at")
    arrival_step = given.get("arrival_step", 0)
    return LiveRequest(
        name,
        prompt,
        len(prompt),
        given.get("max_tokens", 16),
        given.get("priority", 0),
        given.get("arrival_time", arrival_step + 1e-6 * index),
        given.get("cache_salt", ""),
        () if stop_at is None else (made_up_token(f"{name}:{len(prompt) + stop_at - 1}"),),
        arrival_step,
        given.get("abort_step"),
        tuple(given.get("accepts") or (0,)),
        ready_step=given["grammar"].get("ready_step", 0) if "grammar" in given else None,
        adapter=given.get("adapter", ""),
        remote=given.get("remote"),
    )


def _arrival(given: dict[str, Any]) -> tuple[int, float]:
    return given.get("arrival_step", 0), given.get("arrival_time", 0.0)


class Run:
    """A scheduler under a workload.

    Args:
        scheduler: The scheduler, made for the workload's configuration.
        workload: The workload, in the format of ``workbench.simulation.workload``.
        watch: Called as ``watch.added(request)``, ``watch.scheduled(run, plan)``,
            ``watch.updated(run, plan, latest, ended)`` and ``watch.proposed(drafts)``; or None.

    Attributes:
        config: The workload's configuration.
        requests: Unfinished requests by id.
        step: Index of the next step.
        latest: The step that was scheduled last.
        in_flight: Steps whose output is to come.
        in_add: The scheduler is being given a request, which it may refuse.
    """

    def __init__(self, scheduler: Any, workload: dict[str, Any], watch: Any = None) -> None:
        self.config = config = workload.get("config") or {}
        self.scheduler, self.watch = scheduler, watch
        self.requests: dict[str, LiveRequest] = {}
        self.step = 0
        self.in_add = False
        self.latest: Any = None
        self.in_flight: deque[Any] = deque()
        self._depth = getattr(scheduler, "depth", 1)
        self._max_model_len = config.get("max_model_len") or 1 << 60
        self._num_drafts = 0 if self._depth > 1 else config.get("num_speculative_tokens") or 0
        in_order = sorted(enumerate(workload["requests"]), key=lambda each: _arrival(each[1]))
        made = [live_request(index, given) for index, given in in_order]
        self._pending = deque(made)
        self._aborts = [(request.abort_step, request.request_id) for request in made if request.abort_step is not None]
        self._order: list[str] = []
        self._num_idle = 0
        if hasattr(scheduler, "foresee"):
            scheduler.foresee(made)

    def drive(self, max_steps: int) -> Literal["done", "stuck", "max_steps"]:
        """Run to the end: "done"; "stuck" if requests wait forever; "max_steps"."""
        while self._pending or self.requests or any(plan.chunks for plan in self.in_flight):
            if self.step == max_steps:
                return "max_steps"
            self.iterate()
            if self._num_idle >= IDLE_STEPS and self.requests:
                return "stuck"
        return "done"

    def iterate(self) -> None:
        """Schedule a step, and take in the output of the oldest one if enough are in flight."""
        arrived, aborted = self._arrive()
        plan = self.scheduler.schedule()
        if isinstance(plan, Plan):
            plan.step, plan.arrived, plan.aborted = self.step, arrived, aborted
            self._complete(plan)
        self.latest = plan
        self.step += 1
        if self.watch is not None:
            self.watch.scheduled(self, plan)
        self.in_flight.append(plan)
        if len(self.in_flight) == self._depth:
            self._take_output(self.in_flight.popleft())
        coming = self._pending or any(name in self.requests for step, name in self._aborts if step >= self.step)
        coming = coming or any(reason.kind in ("grammar", "transfer") for reason in plan.passed_over.values())
        self._num_idle = 0 if plan.chunks or arrived or coming else self._num_idle + 1

    @property
    def takes_output(self) -> bool:
        """The step that was just scheduled is followed by the output of the oldest one in flight."""
        return len(self.in_flight) + 1 == self._depth

    def _arrive(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        arrived, aborted = [], []
        while self._pending and self._pending[0].arrival_step <= self.step:
            request = self._pending.popleft()
            self.in_add = True
            self.scheduler.add(request)
            self.in_add = False
            if self.watch is not None:
                self.watch.added(request)
            self.requests[request.request_id] = request
            arrived.append(request.request_id)
        for step, name in self._aborts:
            if step == self.step and name in self.requests:
                self.scheduler.abort(name)
                self._end(name)
                aborted.append(name)
        return tuple(arrived), tuple(aborted)

    def _end(self, name: str) -> None:
        self.requests.pop(name).status = "finished"
        if name in self._order:
            self._order.remove(name)

    def _complete(self, plan: Plan) -> None:
        """Add what follows from the chunks: who was admitted, resumed and preempted, and who samples."""
        tables = {name: [list(table) for table in self.scheduler.block_tables(name)] for name in self.requests}
        plan.tables = tables
        names = {chunk.request_id for chunk in plan.chunks}
        if plan.preempted is None:
            plan.preempted = [name for name in self._order if name not in names and not any(tables[name])]
        for name in plan.preempted:
            request = self.requests[name]
            request.status, request.num_expected = "preempted", 0
            request.num_preemptions += 1
            if name in self._order:
                self._order.remove(name)
        for chunk in plan.chunks:
            request = self.requests[chunk.request_id]
            if request.status != "running":
                (plan.resumed if request.was_admitted else plan.admitted).append(chunk.request_id)
                request.status, request.was_admitted = "running", True
                chunk.num_cached_tokens = chunk.start
                self._order.append(chunk.request_id)
            if chunk.samples is None:
                chunk.samples = chunk.start + chunk.num_tokens >= len(request.token_ids) + request.num_expected
            if chunk.samples and self._depth > 1:
                request.num_expected += 1 + len(chunk.drafts)
        running, waiting = self.queues()
        plan.running, plan.waiting = tuple(running), tuple(waiting)
        plan.free_blocks = self.num_free()

    def queues(self) -> tuple[list[str], list[str]]:
        """Running and waiting requests: as the scheduler tells, or in order of admission and of arrival."""
        if hasattr(self.scheduler, "queues"):
            running, waiting = self.scheduler.queues()
            return list(running), list(waiting)
        preempted = [name for name, request in self.requests.items() if request.status == "preempted"]
        return list(self._order), preempted + [n for n, request in self.requests.items() if request.status == "waiting"]

    def num_free(self) -> int:
        """Number of free blocks."""
        free = self.scheduler.free_blocks()
        return free if isinstance(free, int) else len(free)

    def _take_output(self, plan: Any) -> None:
        """Give the scheduler the output of a step, and the drafts of the next one."""
        tokens: dict[str, list[int]] = {}
        for chunk in plan.chunks:
            request = self.requests.get(chunk.request_id)
            if request is None:
                chunk.discarded = True
            elif chunk.samples:
                tokens[chunk.request_id] = self._output(request, chunk)
        ended = dict(self.scheduler.update(plan, tokens))
        if isinstance(self.latest, Plan):
            self.latest.finish_reasons |= ended
        for name in ended:
            if name in self.requests:
                self._end(name)
        if isinstance(self.latest, Plan):
            self.latest.free_blocks_end = self.num_free()
        if self._num_drafts:
            drafts = {name: self._drafts(self.requests[name]) for name in tokens if name in self.requests}
            self.scheduler.propose(drafts)
            if self.watch is not None:
                self.watch.proposed(drafts)
        if self.watch is not None:
            self.watch.updated(self, plan, self.latest, ended)

    def _output(self, request: LiveRequest, chunk: Any) -> list[int]:
        """The accepted drafts of a chunk and the token after them; the request takes those before its end."""
        accepted = 0
        if chunk.drafts and not chunk.is_padded:
            accepted = min(request.accepts[request.num_verified % len(request.accepts)], len(chunk.drafts))
            request.num_verified += 1
        known, name = len(request.token_ids), request.request_id
        tokens = [made_up_token(f"{name}:{known + i}") for i in range(accepted + 1)]
        given = []
        for token in tokens:
            given.append(token)
            request.token_ids.append(token)
            num_output = len(request.token_ids) - request.num_prompt_tokens
            full = num_output >= request.max_tokens or len(request.token_ids) >= self._max_model_len
            if full or token in request.stop_token_ids:
                break
        if self._depth > 1:
            request.num_expected = max(0, request.num_expected - 1 - len(chunk.drafts))
        if isinstance(chunk, PlannedChunk):
            chunk.num_accepted, chunk.sampled, chunk.sampled_before = accepted, given[-1], tuple(given[:-1])
        return tokens

    def _drafts(self, request: LiveRequest) -> list[int]:
        """Drafts of the next step: right as far as they will be accepted."""
        first = len(request.token_ids)
        right = [made_up_token(f"{request.request_id}:{first + i}") for i in range(self._num_drafts)]
        accepted = request.accepts[request.num_verified % len(request.accepts)]
        return right[:accepted] + [3 + (token - 3 + 1) % 31997 for token in right[accepted:]]
