"""One replica of a fleet: a scheduler with its own clock, and what a router may know of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from workbench.config import EngineConfig
from workbench.scheduler.batch import ScheduledBatch
from workbench.scheduler.block_pool import extend_block_hashes
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import StepCost
from workbench.simulation.run import SimulatedRun
from workbench.trace import StepRecord
from workbench.trace.lines import TraceEndReason

Step = StepRecord | ScheduledBatch


class Run(Protocol):
    """Takes the steps of a simulated run, and keeps what is wanted of them."""

    def step(self) -> Step | None:
        """Take one step; its record or batch, if it is complete."""

    def rest(self) -> None:
        """Take the steps whose output is still in flight when the run ends."""


class Replica:
    """A simulated replica. Requests are sent to it one by one; its steps are taken when they are asked for.

    A router sees the state at the moment of a request's arrival: a step that ends later is not yet seen, and
    neither are the requests that end in it.

    Args:
        index: Its number, from 0.
        name: Its address.
        config: Its configuration.
        cost_model: Gives the duration of a step; None without a clock.
        keep: Makes what takes the steps of its run: a `TracedRun` or a `SummedRun`.
        max_steps: Maximum number of its steps.
        publishes: For routers that read prefix caches: the hashes of prompts. The cache is then kept as KV events tell
            it.

    Attributes:
        end: "done", "stuck" or "max_steps" after ``finish``.
        num_in_flight: Requests that were sent to it and had not ended.
        num_prefill_tokens: Prompt tokens that requests without a first token were expected to compute.
        num_waiting: Requests in its waiting queue.
        num_running: Requests that it runs.
    """

    def __init__(
        self,
        index: int,
        name: str,
        config: EngineConfig,
        cost_model: StepCost | None,
        keep: Callable[[SimulatedRun], Run],
        *,
        max_steps: int | None = None,
        publishes: PromptHashes | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.config = config
        self.end: TraceEndReason = ""
        self.num_in_flight = self.num_prefill_tokens = self.num_waiting = self.num_running = 0
        self._run = SimulatedRun(config, iter(()), cost_model, None)
        self._run.expects_more = True
        self._max_steps = max_steps
        self._kept = keep(self._run)
        self._has_clock = cost_model is not None
        self._num_free_blocks = config.num_pool_blocks - 1
        self._unseen: deque[tuple[float, list[str], Step | None]] = deque()  # end of a step, what it ended
        self._active: dict[str, Request] = {}  # requests of the scheduler
        self._prefill_tokens: dict[str, int] = {}  # of requests without a first token
        self._prefixes = _PublishedPrefixes(self._run, publishes) if publishes is not None else None

    @property
    def kv_use(self) -> float:
        """Share of its KV blocks that requests hold."""
        return 1 - self._num_free_blocks / (self.config.num_pool_blocks - 1)

    def num_cached_tokens(self, request: Arrival) -> int:
        """Prompt tokens in its prefix cache, without the last one, which is always computed."""
        assert self._prefixes is not None
        return self._prefixes.num_cached_tokens(request)

    def foresee(self, requests: Sequence[Arrival]) -> None:
        """Tell its eviction policy which requests will be sent to it."""
        self._run.scheduler.kv_cache.foresee(request.to_request() for request in requests)

    @property
    def now(self) -> float:
        """Seconds since the start, at the end of its latest step."""
        return self._run.now

    @property
    def rests(self) -> bool:
        """It takes no step before it gets another request, if it may take one at all."""
        return self._run.rests or self._run.scheduler.step == self._max_steps

    def reach(self, request: Arrival) -> None:
        """Take the steps that begin before a request arrives, and see what had happened by then."""
        while not self.rests and not self._run.will_see(request):
            self.step()
        self.see(request.arrives_at or 0.0)

    def see(self, time: float) -> None:
        """Let routers see the steps that had ended by a time."""
        while self._unseen and (not self._has_clock or self._unseen[0][0] <= time):
            self._see(*self._unseen.popleft()[1:])

    def send(self, request: Arrival) -> None:
        """Send a request to it."""
        length = len(request.prompt_token_ids)
        tokens = length - self._prefixes.num_cached_tokens(request) if self._prefixes is not None else length
        self.num_in_flight += 1
        self.num_prefill_tokens += tokens
        self._prefill_tokens[request.request_id] = tokens
        self._run.add(request)

    def receive(self, request: Arrival) -> int:
        """Take in the KV of a prompt that another replica has computed; returns the tokens whose KV was lacking."""
        manager, made = self._run.scheduler.kv_cache, request.to_request()
        return manager.block_size * len(manager.take_in(made, made.num_prompt_tokens - 1)[1])

    def stop(self) -> None:
        """End all its requests at once: it dies."""
        self._run.abandon()
        self._kept.step()
        self._active.clear()

    def finish(self) -> None:
        """Take all steps that are left: no request comes any more."""
        run = self._run
        run.expects_more = False
        self.end = "done"
        while not run.over:
            if run.scheduler.step == self._max_steps:
                self.end = "max_steps"
                break
            self._kept.step()
            if run.stuck:
                self.end = "stuck"
                break
        self._kept.rest()

    def step(self) -> list[Request]:
        """Take a step; returns the requests that ended with it."""
        run, active, requests = self._run, self._active, self._run.scheduler.requests
        record = self._kept.step()
        for request in run.arrived:
            active[request.request_id] = request
        ended = [active.pop(name) for name in [*active] if name not in requests] if len(active) > len(requests) else []
        self._unseen.append((run.now, [request.request_id for request in ended], record))
        if record is not None and self._prefixes is not None:
            self._prefixes.note(record)
        return ended

    def _see(self, ended: list[str], record: Step | None) -> None:
        """A step has ended: requests have ended, have their first token, and blocks were published."""
        for request_id in ended:
            self.num_in_flight -= 1
            self.num_prefill_tokens -= self._prefill_tokens.pop(request_id, 0)
        if record is None:
            return
        for chunk in record.chunks:
            if not chunk.is_partial_prefill:
                self.num_prefill_tokens -= self._prefill_tokens.pop(chunk.request_id, 0)
        self.num_waiting, self.num_running = len(record.waiting), len(record.running)
        self._num_free_blocks = record.free_blocks_end
        if self._prefixes is not None:
            self._prefixes.publish()


class PromptHashes:
    """The hashes of the latest prompt's full blocks, made once for all replicas whose blocks have the same size."""

    def __init__(self) -> None:
        self._request: Arrival | None = None
        self._found: dict[tuple[int, int], list[bytes]] = {}

    def of(self, request: Arrival, block_size: int, num_lookahead: int) -> list[bytes]:
        """Hashes of the blocks that end before the last token of a prompt.

        Args:
            request: The request.
            block_size: Tokens in a block.
            num_lookahead: Tokens after a block that its hash covers too.
        """
        if request is not self._request:
            self._request = request
            self._found.clear()
        key = (block_size, num_lookahead)
        if key not in self._found:
            prompt, hashes = request.prompt_token_ids, self._found.setdefault(key, [])
            count = (len(prompt) - 1) // block_size
            extend_block_hashes(hashes, prompt, count, block_size, num_lookahead, request.cache_salt, request.adapter)
        return self._found[key]


class _PublishedPrefixes:
    """The content of a prefix cache as KV events tell it, which are sent when a step ends."""

    def __init__(self, run: SimulatedRun, prompt_hashes: PromptHashes) -> None:
        manager = run.scheduler.kv_cache
        self._pool = manager.block_pool
        self._key = (manager.block_size, manager.num_hash_lookahead_tokens)
        self._prompt_hashes = prompt_hashes
        self._noted: deque[tuple[list[int], list[tuple[int, bytes]]]] = deque()  # evicted, and cached with its hash
        self._hash_of: dict[int, bytes] = {}
        self._counts: dict[bytes, int] = {}

    def num_cached_tokens(self, request: Arrival) -> int:
        """See `Replica.num_cached_tokens`."""
        hashes, counts = self._prompt_hashes.of(request, *self._key), self._counts
        return self._key[0] * next((place for place, digest in enumerate(hashes) if digest not in counts), len(hashes))

    def note(self, record: Step) -> None:
        """Remember the changes of a step until it ends."""
        evicted = [block for change in (record.pool, record.pool_end) if change for block in change.evicted]
        cached = [(block, digest) for block in record.cached_block_ids if (digest := self._pool.hash_of(block))]
        self._noted.append((evicted, cached))

    def publish(self) -> None:
        """The step that was noted first has ended."""
        evicted, cached = self._noted.popleft()
        for block in evicted:
            self._remove(block)
        for block, digest in cached:
            self._remove(block)
            self._hash_of[block] = digest
            self._counts[digest] = self._counts.get(digest, 0) + 1

    def _remove(self, block: int) -> None:
        if (digest := self._hash_of.pop(block, None)) is not None:
            self._counts[digest] -= 1
            if not self._counts[digest]:
                del self._counts[digest]
