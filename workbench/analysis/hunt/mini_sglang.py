"""mini-sglang's Scheduler, prefill adder and radix cache behind the hunt's protocol; they need torch and no GPU.

MINI_SGLANG=CHECKOUT workbench hunt --scheduler workbench.analysis.hunt.mini_sglang:MiniScheduler --out found
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from workbench.analysis.hunt.drive import LiveRequest, Plan, PlannedChunk

FOLDER = Path(os.environ.get("MINI_SGLANG", "mini-sglang")).resolve() / "python"


class MiniScheduler:
    """mini-sglang's Scheduler with a made-up engine. Its pages count from 0, blocks from 1."""

    features, folders = ("caching", "async"), (str(FOLDER),)
    # Prompts come first, and whole outputs are reserved.
    allows = ("a running request is skipped", "a step is wasted", "a request waits without need")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._torch: Any = import_module("torch")
        if "minisgl" not in sys.modules:
            self._import()
        self._parts: Any = import_module("minisgl.scheduler.scheduler")
        self._core: Any = import_module("minisgl.core")
        self._size, self.depth = config["block_size"], 2 if config.get("async_scheduling") else 1
        vars(self._core)["_GLOBAL_CTX"] = self._core.Context(self._size)
        pages, seats = config["num_blocks"] - 1, config["max_num_seqs"]
        longest = min(config.get("max_model_len") or 4096, pages * self._size)
        table = self._torch.zeros((seats + 1, longest + self._size), dtype=self._torch.int32)
        engine = MagicMock(page_table=table, max_seq_len=longest, num_pages=pages, device=self._torch.device("cpu"))
        engine.forward_batch, engine.graph_runner.pad_batch = self._forward, lambda b: setattr(b, "padded_reqs", b.reqs)
        vars(sys.modules["minisgl.engine"])["Engine"] = lambda _: engine
        made = MagicMock(page_size=self._size, max_running_req=seats, offline_mode=True)
        made.max_extend_tokens = config["max_num_batched_tokens"]
        made.cache_type = "radix" if config.get("enable_prefix_caching", True) else "naive"
        self.scheduler = self._parts.Scheduler(made)
        self._replies, self._requests, self._tables = list[Any](), list[LiveRequest](), dict[str, list[int]]()
        self.scheduler.send_result, self.scheduler.eos_token_id = self._replies.extend, 1

    def _import(self) -> None:
        """Import it without what needs a GPU, a compiler or a network."""
        sys.path.insert(0, str(FOLDER))
        stubs: Any = {name: MagicMock() for name in ("engine", "kernel", "utils.hf", "utils.mp")}
        stubs["engine"].EngineConfig = object
        stubs["kernel"].fast_compare_key = lambda a, b: int((a[: len(b)] == b[: len(a)]).cumprod(0).sum())
        sys.modules.update({f"minisgl.{name}": stub for name, stub in stubs.items()})
        import_module("minisgl.distributed.info").set_tp_info(0, 1)
        self._torch.Tensor.pin_memory = lambda tensor: tensor
        for name in ("Stream", "stream", "set_stream"):
            setattr(self._torch.cuda, name, MagicMock())
        for name in ("empty", "tensor"):
            make = getattr(self._torch, name)
            setattr(self._torch, name, lambda *a, pin_memory=False, make=make, **more: make(*a, **more))

    def _forward(self, batch: Any, _: Any) -> Any:
        for request in batch.reqs:
            request.complete_one()
        return SimpleNamespace(next_tokens_gpu=self._torch.zeros(len(batch.reqs), dtype=self._torch.int32))

    def add(self, request: LiveRequest) -> None:  # noqa: D102
        if request.cache_salt or len(request.token_ids) + request.max_tokens > self.scheduler.engine.max_seq_len:
            raise ValueError("mini-sglang has no salts, and shortens what its pool cannot hold")
        ids = self._torch.tensor(request.token_ids, dtype=self._torch.int32)
        options = self._core.SamplingParams(max_tokens=request.max_tokens)
        self.scheduler._process_one_msg(self._parts.UserMsg(len(self._requests), ids, options))
        self._requests.append(request)
        self._tables[request.request_id] = []

    def abort(self, request_id: str) -> None:  # noqa: D102
        place = [request.request_id for request in self._requests].index(request_id)
        self.scheduler._process_one_msg(self._parts.AbortBackendMsg(place))

    def schedule(self) -> Plan:  # noqa: D102
        chunks, given = [], self.scheduler._schedule_next_batch()
        for each in given.batch.reqs if given else ():
            name = self._requests[each.uid].request_id
            row = self.scheduler.engine.page_table[each.table_idx, : each.device_len : self._size]
            self._tables[name] = [place // self._size + 1 for place in row.tolist()]
            chunks.append(PlannedChunk(name, each.cached_len, each.extend_len, samples=type(each) is self._core.Req))
        return Plan(chunks, handle=given and (given, self.scheduler._forward(given).next_tokens_gpu))

    def update(self, plan: Plan, tokens: Mapping[str, Sequence[int]]) -> dict[str, str]:  # noqa: D102
        self._replies.clear()
        if plan.handle:
            given, sampled = plan.handle
            for place, request in enumerate(self._requests[each.uid] for each in given.batch.reqs):
                token = tokens.get(request.request_id, (3,))[0]
                sampled[place] = 1 if token in request.stop_token_ids else token  # there is one end token
            self.scheduler._process_last_data((given, (None, sampled, MagicMock())))
        ended = {self._requests[each.uid].request_id: each.next_token for each in self._replies if each.finished}
        return {name: "stop" if token == 1 else "length" for name, token in ended.items() if name in tokens}

    def block_tables(self, request_id: str) -> list[list[int]]:  # noqa: D102
        return [self._tables[request_id]]

    def free_blocks(self) -> set[int]:  # noqa: D102
        places, cache = self.scheduler.cache_manager.free_slots.tolist(), self.scheduler.cache_manager.prefix_cache
        nodes = [cache.root_node] if hasattr(cache, "root_node") else []
        for node in nodes:
            nodes += node.children.values()
            places += [] if node.ref_count else node.value.tolist()
        return {place // self._size + 1 for place in places}
