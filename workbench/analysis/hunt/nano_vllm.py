"""nano-vllm's scheduler and block manager behind the hunt's protocol; they need numpy and xxhash, no torch and no GPU.

NANO_VLLM=CHECKOUT workbench hunt --scheduler workbench.analysis.hunt.nano_vllm:NanoScheduler --out found
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from workbench.analysis.hunt.drive import LiveRequest, Plan, PlannedChunk

FOLDER = Path(os.environ.get("NANO_VLLM", "nano-vllm")).resolve()


class NanoScheduler:
    """nano-vllm's Scheduler. Its blocks count from 0, the hunt's from 1."""

    features, folders = ("caching",), (str(FOLDER),)
    # It allocates for whole prompts, computes them first, splits one; a resumed one samples a step later.
    allows = ("a request holds", "a request waits", "a running request is", "a token is sampled", "the token budget")

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not config.get("enable_prefix_caching", True) or config["block_size"] == 1:
            raise ValueError("nano-vllm always caches prefixes, and its blocks have more than one token")
        package = sys.modules.setdefault("nanovllm", ModuleType("nanovllm"))  # itself it imports torch
        package.__path__ = [str(FOLDER / "nanovllm")]
        sys.modules["nanovllm.config"] = SimpleNamespace(Config=SimpleNamespace)  # type: ignore[assignment]
        kind = import_module("nanovllm.engine.scheduler").Scheduler
        self._kind = import_module("nanovllm.engine.sequence").Sequence
        self._kind.block_size = size = config["block_size"]
        made = {**config, "num_kvcache_blocks": config["num_blocks"] - 1, "kvcache_block_size": size, "eos": -1}
        if "batched_tokens >= self.max_model" in (FOLDER / "nanovllm/config.py").read_text("utf-8"):  # it has no chunks
            made["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_model_len"])
        self._requests, self._source = dict[str, Any](), inspect.getsource(kind.postprocess)
        self.scheduler = kind(SimpleNamespace(**made))

    def add(self, request: LiveRequest) -> None:  # noqa: D102
        if request.cache_salt:
            raise ValueError("nano-vllm has no salts")
        options = SimpleNamespace(temperature=1.0, max_tokens=request.max_tokens, ignore_eos=True)
        made = self._requests[request.request_id] = self._kind(list(request.token_ids), options)
        made.name, made.stops = request.request_id, request.stop_token_ids
        self.scheduler.add(made)

    def abort(self, request_id: str) -> None:  # noqa: D102
        request = self._requests.pop(request_id)
        (self.scheduler.running if request in self.scheduler.running else self.scheduler.waiting).remove(request)
        self.scheduler.block_manager.deallocate(request)

    def schedule(self) -> Plan:  # noqa: D102
        requests, is_prefill = ([], True) if self.scheduler.is_finished() else self.scheduler.schedule()
        chunks = []
        for each in requests:
            count = getattr(each, "num_scheduled_tokens", len(each) - each.num_cached_tokens if is_prefill else 1)
            start = min(each.num_cached_tokens, len(each) - count) if is_prefill else len(each) - 1
            skips = is_prefill and each.num_completion_tokens > 0 and "num_completion_tokens > 0" in self._source
            chunks.append(PlannedChunk(each.name, start, count, samples=start + count >= len(each) and not skips))
        return Plan(chunks, handle=(requests, is_prefill))

    def update(self, plan: Plan, tokens: Mapping[str, Sequence[int]]) -> dict[str, str]:  # noqa: D102
        requests, *is_prefill = plan.handle
        sampled = [tokens.get(request.name, (0,))[0] for request in requests]
        for each in [request for request, token in zip(requests, sampled) if token in request.stops]:
            each.max_tokens = each.num_completion_tokens + 1  # nano-vllm knows one end of all requests
        self.scheduler.postprocess(requests, sampled, *is_prefill[: "is_prefill" in self._source])
        return {each.name: ("length", "stop")[each.last_token in each.stops] for each in requests if each.is_finished}

    def block_tables(self, request_id: str) -> list[list[int]]:  # noqa: D102
        return [[block + 1 for block in self._requests[request_id].block_table]]

    def free_blocks(self) -> set[int]:  # noqa: D102
        return {block + 1 for block in self.scheduler.block_manager.free_block_ids}
