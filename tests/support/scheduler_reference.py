"""A second implementation of vLLM V1's scheduling rules, as plain as possible and without regard to speed.

Nothing is cached, counted or updated in place if it can be recomputed; a block's content is identified by all
tokens up to its end. The one difference from vLLM 0.33 is deliberate in the scheduler too: a request that is preempted
after it was scheduled in the same step withdraws the blocks it published in that step.
"""

from math import ceil
from typing import Any

from workbench.config import EngineConfig
from workbench.simulation.arrivals import Arrival
from workbench.simulation.workload import made_up_token


class _Request:
    def __init__(self, arrival: Arrival) -> None:
        self.id, self.tokens = arrival.request_id, list(arrival.prompt_token_ids)
        self.limit = len(self.tokens) + arrival.sampling.max_tokens
        self.key = (arrival.priority, arrival.arrival_time, arrival.request_id)
        self.computed, self.blocks, self.was_preempted = 0, [], False


class ReferenceScheduler:
    """Step through a list of arrivals and report each step in the format of vLLM's traces."""

    def __init__(self, config: EngineConfig, arrivals: list[Arrival]) -> None:
        self.config, self.arrivals, self.step_index = config, arrivals, 0
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []
        self.free = list(range(1, config.num_blocks))
        self.contents: dict[int, tuple[int, ...]] = {}  # in order of publication

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or any(a.arrival_step >= self.step_index for a in self.arrivals))

    def step(self) -> dict[str, Any]:
        config, size = self.config, self.config.block_size
        arrived = [a for a in self.arrivals if a.arrival_step == self.step_index]
        self.waiting += [_Request(arrival) for arrival in arrived]
        aborted = [a for a in self.arrivals if a.abort_step == self.step_index]
        aborted = [r for a in aborted for r in self.waiting + self.running if r.id == a.request_id]
        for request in aborted:
            self._release(request)
            (self.waiting if request in self.waiting else self.running).remove(request)

        cap, present = config.long_prefill_token_threshold, len(self.waiting) + len(self.running)
        if cap and config.long_prefill_token_threshold_adaptive:
            cap = max(cap, config.max_num_batched_tokens // max(1, present))
        cap = cap if cap and present > 1 else 10**9
        left = config.token_budget
        scheduled: list[tuple[_Request, int, int]] = []  # request, start, number of tokens
        published: dict[str, list[int]] = {}
        new, resumed, preempted = [], [], []

        todo = list(self.running)
        while todo and left > 0:
            request = todo.pop(0)
            limit = (config.max_model_len or 10**9) - request.computed - 1
            count = min(len(request.tokens) - request.computed, cap, left, limit)
            if count <= 0:
                continue
            needed = ceil((request.computed + count) / size) - len(request.blocks)
            while needed > len(self.free) and request in self.running:
                victim = self.running[-1]
                if config.policy == "priority":
                    victim = max(self.running, key=lambda r: r.key[:2])
                for entry in [entry for entry in scheduled if entry[0] is victim]:
                    scheduled.remove(entry)
                    left += entry[2]
                    for block in published.pop(victim.id, []):
                        del self.contents[block]
                self.running.remove(victim)
                if victim in todo:
                    todo.remove(victim)
                self._release(victim)
                victim.blocks, victim.computed, victim.was_preempted = [], 0, True
                self.waiting.insert(0, victim)
                preempted.append(victim.id)
            if request in self.running:
                self._allocate(request, needed)
                scheduled.append((request, request.computed, count))
                published[request.id] = self._publish(request, request.computed + count)
                left -= count
            elif config.policy == "fcfs":
                break

        seats = config.max_num_active_seqs or config.max_num_seqs
        while self.waiting and left > 0 and len(self.running) < seats and not preempted:
            if config.policy == "priority":
                self.waiting.sort(key=lambda r: r.key)
            request = self.waiting[0]
            hits = self._hits(request)
            start = len(hits) * size
            count = min(len(request.tokens) - start, cap, left)
            kept = int(config.watermark * config.num_blocks) if self.running else 0
            unheld = sum(block in self.free for block in hits)
            everything = len(request.tokens) if config.scheduler_reserve_full_isl else start + count
            if ceil(everything / size) - len(hits) + unheld > len(self.free) - kept:
                break
            for block in hits:
                if block in self.free:
                    self.free.remove(block)
            request.blocks = list(hits)
            self._allocate(request, ceil((start + count) / size) - len(hits))
            self.running.append(self.waiting.pop(0))
            (resumed if request.was_preempted else new).append(request.id)
            scheduled.append((request, start, count))
            self._publish(request, start + count)
            left -= count

        if config.policy == "priority":
            self.waiting.sort(key=lambda r: r.key)
        report = {
            "step": self.step_index,
            "arrived": [arrival.request_id for arrival in arrived],
            "aborted": [request.id for request in aborted],
            "scheduled": {request.id: count for request, _, count in scheduled},
            "num_computed_before": {request.id: start for request, start, _ in scheduled},
            "block_ids": {request.id: list(request.blocks) for request, _, _ in scheduled},
            "new": new,
            "resumed": resumed,
            "preempted": preempted,
            "num_running": len(self.running),
            "num_waiting": len(self.waiting),
            "total": sum(count for _, _, count in scheduled),
            "running": [request.id for request in self.running],
            "waiting": [request.id for request in self.waiting],
            "free_blocks": len(self.free),
        }
        sampled, finished = {}, []
        for request, start, count in scheduled:
            request.computed = start + count
            if request.computed < len(request.tokens):
                continue
            sampled[request.id] = made_up_token(f"{request.id}:{len(request.tokens)}")
            request.tokens.append(sampled[request.id])
            if len(request.tokens) >= min(request.limit, config.max_model_len or 10**9):
                finished.append(request.id)
                self.running.remove(request)
                self._release(request)
        self.step_index += 1
        return report | {"sampled": sampled, "finished": finished, "free_blocks_end": len(self.free)}

    def _content(self, request: _Request, index: int) -> tuple[int, ...]:
        return tuple(request.tokens[: (index + 1) * self.config.block_size])

    def _hits(self, request: _Request) -> list[int]:
        hits: list[int] = []
        for index in range((len(request.tokens) - 1) // self.config.block_size):
            content = self._content(request, index)
            found = [block for block, known in self.contents.items() if known == content]
            if not self.config.enable_prefix_caching or not found:
                break
            hits.append(found[0])
        return hits

    def _allocate(self, request: _Request, count: int) -> None:
        for _ in range(count):
            block = self.free.pop(0)
            self.contents.pop(block, None)
            request.blocks.append(block)

    def _publish(self, request: _Request, computed: int) -> list[int]:
        fresh = []
        for index in range(computed // self.config.block_size if self.config.enable_prefix_caching else 0):
            if request.blocks[index] not in self.contents:
                self.contents[request.blocks[index]] = self._content(request, index)
                fresh.append(request.blocks[index])
        return fresh

    def _release(self, request: _Request) -> None:
        others = [r for r in self.running if r is not request]
        blocks = [b for b in reversed(request.blocks) if not any(b in r.blocks for r in others)]
        self.free = (
            [block for block in blocks if block not in self.contents]
            + self.free
            + [block for block in blocks if block in self.contents]
        )
