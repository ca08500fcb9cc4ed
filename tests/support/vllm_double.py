"""A double of vLLM 0.33's V1 scheduler: the interface that a recorder uses, over Workbench's scheduler.

The two make the same decisions (test_vllm_traces.py), so a recording of the double can be compared with a simulation.
Names and shapes are those of vllm/v1/core/sched/output.py and vllm/v1/request.py; ``_preempt_request`` and
``_free_request`` are called at the same moments. tests/with_vllm checks that the double is faithful.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

from workbench.config import EngineConfig
from workbench.scheduler.block_pool import BlockPool
from workbench.scheduler.request import Request
from workbench.scheduler.scheduler import Scheduler
from workbench.simulation.arrivals import Arrival
from workbench.simulation.workload import made_up_token


class RequestDouble:
    """vLLM's Request."""

    def __init__(self, request: Request) -> None:
        self.inner = request
        self.request_id = request.request_id
        self.num_prompt_tokens = request.num_prompt_tokens
        self.prompt_token_ids = request.prompt_token_ids
        self.max_tokens = request.max_tokens
        self.priority = request.priority
        self.arrival_time = request.arrival_time
        self.finish_reason = ""

    @property
    def num_tokens(self) -> int:
        return self.inner.num_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.inner.output_token_ids

    @property
    def status(self) -> str:
        return f"FINISHED_{self.finish_reason}" if self.finish_reason else "RUNNING"

    def get_finished_reason(self) -> str:
        return self.finish_reason


@dataclass
class NewRequestData:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequestData:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int


@dataclass
class ModelRunnerOutput:
    req_ids: list[str]
    sampled_token_ids: list[list[int]]


class _Inner(Scheduler):
    """Workbench's scheduler, which reports preempted and freed requests through vLLM's methods."""

    def __init__(self, config: EngineConfig, outer: VllmSchedulerDouble) -> None:
        super().__init__(config, clock=lambda: 0.0, as_vllm=True)
        self.outer = outer

    def _preempt(self, victim: Request) -> None:
        self.outer._preempt_request(self.outer.requests[victim.request_id])

    def _finish(self, request: Request, reason: str) -> None:
        double = self.outer.requests[request.request_id]
        double.finish_reason = reason
        self.outer._free_request(double)


@dataclass
class BlockDouble:
    """vLLM's KVCacheBlock."""

    block_id: int
    pool: BlockPool

    @property
    def next_free_block(self) -> bool | None:
        return True if self.block_id in self.pool.free_queue else None

    @property
    def block_hash(self) -> bytes | None:
        return self.pool.hash_of(self.block_id)


class PoolDouble:
    """vLLM's BlockPool: its parts have the methods that vLLM calls when Workbench's pool changes."""

    def __init__(self, inner: BlockPool) -> None:
        self._inner, self._log, self._cache = inner, inner._log, inner.cache
        inner._log, inner.cache = self, self.cache
        self.blocks = [BlockDouble(block, inner) for block in range(inner.num_blocks)]
        self.free_block_queue = QueueDouble()
        self.cached_block_hash_to_block = MapDouble()

    def get_num_free_blocks(self) -> int:
        return self._inner.num_free_blocks

    def cache(self, block: int, digest: bytes) -> None:
        self._cache(block, digest)
        self.cached_block_hash_to_block.insert(digest, self.blocks[block])

    def evict(self, block: int) -> None:
        self._log.evict(block)
        self.cached_block_hash_to_block.pop(None, block)

    def give_back(self, front, back) -> None:
        self._log.give_back(front, back)
        self.free_block_queue.prepend_n([self.blocks[block] for block in front])
        self.free_block_queue.append_n([self.blocks[block] for block in back])

    def take(self, is_free):
        return self._log.take(is_free)


class QueueDouble:
    """vLLM's FreeKVCacheBlockQueue."""

    def prepend_n(self, blocks: list[BlockDouble]) -> None:
        pass

    def append_n(self, blocks: list[BlockDouble]) -> None:
        pass


class MapDouble:
    """vLLM's BlockHashToBlockMap."""

    def insert(self, key: bytes, block: BlockDouble) -> None:
        pass

    def pop(self, key: bytes, block_id: int) -> None:
        pass


class VllmSchedulerDouble:
    """vLLM's Scheduler, built from the parts of a VllmConfig that ``vllm_config`` provides."""

    def __init__(self, vllm_config: SimpleNamespace) -> None:
        config = vllm_config.engine_config
        self.inner = _Inner(config, self)
        self.requests: dict[str, RequestDouble] = {}
        self.kv_cache_manager = SimpleNamespace(
            block_pool=PoolDouble(self.inner.kv_cache.block_pool),
            get_block_ids=lambda request_id: (list(self.inner.requests[request_id].block_table),),
        )
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.cache_config = SimpleNamespace(
            num_gpu_blocks=config.num_blocks, enable_prefix_caching=config.enable_prefix_caching
        )
        self.parallel_config = SimpleNamespace(data_parallel_index=0)
        spec = type("FullAttentionSpec", (), {"block_size": config.block_size})()
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        self.max_model_len = config.max_model_len or 131072
        self.was_shut_down = False

    @property
    def running(self) -> list[RequestDouble]:
        return [self.requests[request.request_id] for request in self.inner.running]

    @property
    def waiting(self) -> Iterable[RequestDouble]:
        return [self.requests[request.request_id] for request in self.inner.waiting]

    def add_request(self, request: RequestDouble) -> None:
        self.inner.add_request(request.inner)
        self.requests[request.request_id] = request

    def finish_requests(self, request_id: str) -> None:
        self.inner.abort_request(request_id)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        for request in reversed(self.running if reset_running_requests else []):
            self._preempt_request(request)
        return True

    def schedule(self) -> SchedulerOutput:
        batch = self.batch = self.inner.schedule()
        new, cached, resumed = [], CachedRequestData(), CachedRequestData()
        for chunk in batch.chunks:
            request_id = chunk.request.request_id
            blocks = (list(chunk.new_block_ids),) if chunk.new_block_ids else None
            if request_id in batch.admitted:
                new.append(NewRequestData(request_id, blocks, chunk.start))
                continue
            part = resumed if request_id in batch.resumed else cached
            part.req_ids.append(request_id)
            part.new_block_ids.append(blocks)
            part.num_computed_tokens.append(chunk.start)
        cached.req_ids += resumed.req_ids
        cached.new_block_ids += resumed.new_block_ids
        cached.num_computed_tokens += resumed.num_computed_tokens
        cached.resumed_req_ids = set(resumed.req_ids)
        tokens = {chunk.request.request_id: chunk.num_tokens for chunk in batch.chunks}
        return SchedulerOutput(new, cached, tokens, sum(tokens.values()))

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> None:
        tokens = dict(zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids))
        sampled = [(tokens[chunk.request.request_id] or [None])[0] for chunk in self.batch.chunks]
        self.inner.update(self.batch, sampled)

    def _preempt_request(self, request: RequestDouble) -> None:
        Scheduler._preempt(self.inner, request.inner)

    def _free_request(self, request: RequestDouble) -> None:
        del self.requests[request.request_id]
        Scheduler._finish(self.inner, request.inner, request.finish_reason)

    def shutdown(self) -> None:
        self.was_shut_down = True


class AsyncVllmSchedulerDouble(VllmSchedulerDouble):
    """A second class, without the behaviour of asynchronous scheduling."""


def vllm_config(config: EngineConfig, *, async_scheduling: bool = False) -> SimpleNamespace:
    """A stand-in for VllmConfig."""
    return SimpleNamespace(
        engine_config=config,
        scheduler_config=SimpleNamespace(**{**config.to_dict(), "async_scheduling": async_scheduling}),
        model_config=SimpleNamespace(model="double", dtype="torch.bfloat16"),
    )


def run_model(scheduler: VllmSchedulerDouble, output: SchedulerOutput) -> ModelRunnerOutput:
    """Made-up tokens, as in a simulation."""
    sampled = []
    for chunk in scheduler.batch.chunks:
        request = chunk.request
        sampled.append([made_up_token(f"{request.request_id}:{request.num_tokens}")] if chunk.samples else [])
    return ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)


def drive(scheduler: VllmSchedulerDouble, arrivals: list[Arrival], *, max_steps: int = 1000) -> int:
    """Run a workload to its end, or until there is no progress; return the steps taken."""
    pending = deque(sorted(arrivals, key=lambda arrival: arrival.arrival_step))
    step = num_idle = 0
    while (pending or scheduler.inner.has_unfinished_requests()) and step < max_steps and num_idle < 3:
        while pending and pending[0].arrival_step <= step:
            scheduler.add_request(RequestDouble(pending.popleft().to_request()))
        for arrival in arrivals:
            if arrival.abort_step == step:
                scheduler.finish_requests(arrival.request_id)
        output = scheduler.schedule()
        scheduler.update_from_output(output, run_model(scheduler, output))
        num_idle = 0 if output.num_scheduled_tokens or pending else num_idle + 1
        step += 1
    return step
