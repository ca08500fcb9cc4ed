"""A small simulator of vLLM's scheduler that speaks the protocol of `workbench certify`; it needs Python alone.

    workbench certify "python examples/simulators/first_come.py" --features "chunked prefill,preemption"

It has chunked prefill and preemption, first come, first served. Every other setting is one that it does not support,
and it says so: a simulator that passes over a setting that it does not know gives the schedule of another workload.
"""

import json
import sys
from collections import deque
from typing import Any

KNOWN: dict[str, Any] = {
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "block_size": 16,
    "num_blocks": 512,
    "max_model_len": None,  # the outputs of a workload end there
}
"""The settings that it has, with the values of those that are left out."""

SAME = {"enable_prefix_caching": False, "enable_chunked_prefill": True, "policy": "fcfs", "async_scheduling": False}
"""The settings of which it has one value."""

FIELDS = {"id", "prompt_token_ids", "output_token_ids", "max_tokens", "arrival_step", "arrival_time", "abort_step"}
"""The fields of a request that it has; the order of arrival is all that a time could change."""


class Request:
    """A request; its blocks are in the order of its tokens."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.name: str = given["id"]
        self.arrival: int = given.get("arrival_step", 0)
        self.abort: float = given.get("abort_step", float("inf"))
        self.num_tokens = len(given["prompt_token_ids"])  # prompt and what has been generated
        self.last = self.num_tokens + len(given["output_token_ids"])
        self.computed = 0
        self.blocks: list[int] = []


class Scheduler:
    """Decides a step at a time."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = KNOWN | config
        self.free = deque(range(1, self.config["num_blocks"]))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def schedule(self) -> dict[str, Any]:
        """Decide a step: running requests first, then waiting ones unless one was preempted."""
        step: dict[str, Any] = {"chunks": [], "hits": {}, "preempted": [], "finished": [], "blocks": {}}
        budget, index = self.config["max_num_batched_tokens"], 0
        while budget and index < len(self.running):
            request = self.running[index]
            count = min(budget, request.num_tokens - request.computed)
            while request in self.running and not self._allocate(request, count):
                step["preempted"].append(self._preempt())
            if request in self.running:
                budget, index = budget - self._add(step, request, count), index + 1
        while self.waiting and budget and not step["preempted"] and len(self.running) < self.config["max_num_seqs"]:
            request = self.waiting[0]
            count = min(budget, request.num_tokens)
            if self._num_blocks(request.num_tokens) > len(self.free):  # those of the whole prompt
                break
            self._allocate(request, count)
            self.running.append(self.waiting.popleft())
            step["hits"][request.name] = 0
            budget -= self._add(step, request, count)
        return step

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // int(self.config["block_size"]))

    def _allocate(self, request: Request, count: int) -> bool:
        needed = self._num_blocks(request.computed + count) - len(request.blocks)
        if needed > len(self.free):
            return False
        request.blocks += [self.free.popleft() for _ in range(needed)]
        return True

    def _add(self, step: dict[str, Any], request: Request, count: int) -> int:
        step["chunks"].append({"id": request.name, "start": request.computed, "num_tokens": count, "num_drafts": 0})
        step["blocks"][request.name] = [list(request.blocks)]
        return count

    def _preempt(self) -> str:
        victim = self.running.pop()
        self.release(victim)
        victim.computed = 0
        self.waiting.appendleft(victim)
        return victim.name

    def release(self, request: Request) -> None:
        """Give a request's blocks back; the last one is the first to be used again."""
        self.free.extendleft(request.blocks)
        request.blocks = []

    def update(self, step: dict[str, Any]) -> None:
        """Take the output of a step: a chunk up to the last token gives the next one."""
        for request, chunk in [(r, c) for c in step["chunks"] for r in self.running if r.name == c["id"]]:
            request.computed += chunk["num_tokens"]
            request.num_tokens += request.computed == request.num_tokens
            if request.num_tokens == request.last:
                self.running.remove(request)
                self.release(request)
                step["finished"].append(request.name)

    def abort(self, step: int) -> None:
        """Take away the requests that are aborted before a step."""
        for queue in (self.waiting, self.running):
            for request in [each for each in queue if each.abort <= step]:
                queue.remove(request)
                self.release(request)


def answer(workload: dict[str, Any]) -> dict[str, Any]:
    """The schedule of a workload, or the reason why there is none."""
    config = workload["config"]
    for name, value in config.items():
        if name in SAME and value != SAME[name]:
            return {"id": workload["id"], "unsupported": f"{name} {json.dumps(value)}"}
        if name not in KNOWN | SAME:
            return {"id": workload["id"], "unsupported": f"no {name}"}
    for field in sorted({field for request in workload["requests"] for field in request} - FIELDS):
        return {"id": workload["id"], "unsupported": f"no {field} of a request"}
    scheduler = Scheduler({name: value for name, value in config.items() if name in KNOWN})
    pending = deque(sorted(map(Request, workload["requests"]), key=lambda request: request.arrival))
    steps: list[dict[str, Any]] = []
    while pending or scheduler.waiting or scheduler.running:
        while pending and pending[0].arrival <= len(steps):
            scheduler.waiting.append(pending.popleft())
        scheduler.abort(len(steps))
        steps.append(scheduler.schedule())
        scheduler.update(steps[-1])
    return {"id": workload["id"], "steps": steps}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
