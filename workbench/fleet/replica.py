"""One replica of a fleet: a scheduler with its own clock, and what a router may know of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from workbench.config import EngineConfig
from workbench.costs.cost_model import StepCost
from workbench.scheduler.block_pool import extend_block_hashes
from workbench.simulation.arrivals import Arrival
from workbench.simulation.run import SimulatedRun
from workbench.trace import StepRecord
from workbench.trace.lines import TraceEndReason


class Run(Protocol):
    """Takes the steps of a simulated run, and keeps what is wanted of them."""

    def step(self) -> StepRecord | None:
        """Take one step; its record, if it is complete."""

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
        publishes: Keep the prefix cache as KV events tell it, for routers that read it.

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
        publishes: bool = False,
    ) -> None:
        if publishes and (len(config.cache_groups) > 1 or not config.enable_prefix_caching):
            raise ValueError(
                "this router reads prefix caches, so enable_prefix_caching must be True and there must be one KV cache "
                f"group; replica {index} has {config.enable_prefix_caching} and {len(config.cache_groups)} groups"
            )
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
        self._unseen: deque[tuple[float, list[str], StepRecord | None]] = deque()  # end of a step, what it ended
        self._to_arrive: deque[str] = deque()
        self._active: dict[str, None] = {}  # requests of the scheduler
        self._num_arrived = 0
        self._prefill_tokens: dict[str, int] = {}  # of requests without a first token
        self._prefixes = _PublishedPrefixes(self._run) if publishes else None

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

    def reach(self, request: Arrival) -> None:
        """Take the steps that begin before a request arrives, and see what had happened by then."""
        run = self._run
        while not run.rests and not run.is_due(request) and run.scheduler.step != self._max_steps:
            self._step()
        now = request.arrives_at or 0.0
        while self._unseen and (not self._has_clock or self._unseen[0][0] <= now):
            self._see(*self._unseen.popleft()[1:])

    def send(self, request: Arrival) -> None:
        """Send a request to it."""
        length = len(request.prompt_token_ids)
        tokens = length - self._prefixes.num_cached_tokens(request) if self._prefixes is not None else length
        self.num_in_flight += 1
        self.num_prefill_tokens += tokens
        self._prefill_tokens[request.request_id] = tokens
        self._to_arrive.append(request.request_id)
        self._run.add(request)

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

    def _step(self) -> None:
        run, active = self._run, self._active
        record = self._kept.step()
        for _ in range(run.num_arrived - self._num_arrived):
            active[self._to_arrive.popleft()] = None
        self._num_arrived = run.num_arrived
        left = run.scheduler.requests
        ended = [request_id for request_id in active if request_id not in left] if len(active) > len(left) else []
        for request_id in ended:
            del active[request_id]
        self._unseen.append((run.now, ended, record))
        if record is not None and self._prefixes is not None:
            self._prefixes.note(record)

    def _see(self, ended: list[str], record: StepRecord | None) -> None:
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


class _PublishedPrefixes:
    """The content of a prefix cache as KV events tell it, which are sent when a step ends."""

    def __init__(self, run: SimulatedRun) -> None:
        manager = run.scheduler.kv_cache
        self._pool = manager.block_pool
        self._block_size: int = manager.block_size
        self._num_lookahead: int = manager.num_hash_lookahead_tokens
        self._noted: deque[tuple[list[int], list[tuple[int, bytes]]]] = deque()  # evicted, and cached with its hash
        self._hash_of: dict[int, bytes] = {}
        self._counts: dict[bytes, int] = {}

    def num_cached_tokens(self, request: Arrival) -> int:
        """See `Replica.num_cached_tokens`."""
        length = len(request.prompt_token_ids)
        hashes: list[bytes] = []
        extend_block_hashes(
            hashes,
            request.prompt_token_ids,
            (length - 1) // self._block_size,
            self._block_size,
            self._num_lookahead,
            request.cache_salt,
        )
        for place, digest in enumerate(hashes):
            if digest not in self._counts:
                return place * self._block_size
        return len(hashes) * self._block_size

    def note(self, record: StepRecord) -> None:
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
