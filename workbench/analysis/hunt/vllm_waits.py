"""Waits of vLLM's requests for grammars and for KV from elsewhere, both made up: nothing is compiled or sent.

Every generated test of a finding in vLLM contains this file, too: it imports vLLM alone.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from workbench.analysis.hunt.drive import LiveRequest


def any_tokens() -> Any:
    """A grammar that allows every token; releases up to 0.29 ask whether it is one of theirs."""
    base = import_module("vllm.v1.structured_output.backend_types").StructuredOutputGrammar
    made: dict[str, Any] = {"accept_tokens": lambda *_: True, "validate_tokens": lambda _, tokens: tokens}
    kind: Any = type("AnyTokens", (base,), {**made, "is_terminated": lambda _: False})
    kind.__abstractmethods__ = frozenset()
    return kind()


def structured_output() -> Any:
    """Parameters of a request with a grammar.

    Raises:
        ValueError: This version has other ones.
    """
    kind = getattr(import_module("vllm.sampling_params"), "StructuredOutputsParams", None)
    if kind is None:
        raise ValueError("the grammars of this vLLM are not driven")
    return kind(json_object=True)


class Waits:
    """The waits of a scheduler's requests.

    Args:
        scheduler: vLLM's scheduler.
        is_async: Two steps are in flight.

    Attributes:
        step: Index of the next step.
    """

    def __init__(self, scheduler: Any, *, is_async: bool) -> None:
        self._scheduler, self._is_async, self.step = scheduler, is_async, 0
        self._live: dict[str, LiveRequest] = {}
        self._any_tokens = any_tokens()
        self._loads: dict[str, list[int]] = {}  # steps that are left, and the block that will not come, or 0
        self._failed: set[str] = set()

    def add(self, request: LiveRequest) -> None:
        """Know a request."""
        self._live[request.request_id] = request

    def begin(self) -> None:
        """Before a step: compile the grammars whose step has come."""
        for request in self._scheduler.requests.values():
            ready = self._live[request.request_id].ready_step
            if ready is not None and ready <= self.step and request.structured_output_request.grammar is None:
                request.structured_output_request.grammar = self._any_tokens
        self.step += 1

    def blocked(self) -> dict[str, Any]:
        """The requests that wait, after a step was scheduled."""
        blocked = {name: SimpleNamespace(kind="transfer") for name in self._loads if name in self._scheduler.requests}
        for name, request in self._scheduler.requests.items():
            if (ready := self._live[name].ready_step) is not None and ready >= self.step and not request.is_finished():
                blocked[name] = SimpleNamespace(kind="grammar")
        adapters, limits = {self._adapter(each) for each in self._scheduler.running} - {0}, self._scheduler.lora_config
        if limits is not None and len(adapters) >= limits.max_loras:
            waiting = {
                name for name, each in self._scheduler.requests.items() if self._adapter(each) not in adapters | {0}
            }
            blocked |= {name: SimpleNamespace(kind="adapter") for name in waiting - set(blocked)}
        return blocked

    @staticmethod
    def _adapter(request: Any) -> int:
        """The number of its adapter, or 0."""
        return request.lora_request.lora_int_id if request.lora_request else 0

    def connect(self) -> None:
        """Give the scheduler a KV connector."""
        base: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
        bases = (base.KVConnectorBase_V1, *([base.SupportsHMA] if hasattr(base, "SupportsHMA") else []))
        methods = {name: getattr(self, name) for name in ("get_num_new_matched_tokens", "update_state_after_alloc")}
        made: dict[str, Any] = {name: staticmethod(method) for name, method in methods.items()}
        made |= {"__init__": lambda _: None, "build_connector_meta": lambda *_: None}
        made |= dict.fromkeys(("request_finished", "request_finished_all_groups"), lambda *_: (False, None))
        kind: Any = type("Connector", bases, made)
        kind.__abstractmethods__ = frozenset()
        self._scheduler.connector = connector = kind()
        connector._kv_cache_config = self._scheduler.kv_cache_config
        if self._is_async and hasattr(self._scheduler, "defer_block_free"):
            self._scheduler.defer_block_free = True  # as a consumer with two steps in flight

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of a request that come from elsewhere, and whether it waits for them."""
        remote = self._live[request.request_id].remote
        if remote is None or request.request_id in self._failed:
            return 0, False
        count = max(0, remote["num_tokens"] - num_computed_tokens)
        return count, bool(count and remote["num_steps"])

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin to load, once there are blocks."""
        name, remote = request.request_id, self._live[request.request_id].remote
        if num_external_tokens and remote is not None and remote["num_steps"]:
            first, *others = blocks.get_block_ids()
            place = (remote["num_tokens"] - num_external_tokens) // self._scheduler.block_size
            fails = remote.get("fails") and not others
            self._loads[name] = [remote["num_steps"], first[place] if fails else 0]

    def output(self) -> dict[str, Any]:
        """After a step: the loads that are complete, as a field of its output."""
        for load in self._loads.values():
            load[0] -= 1
        done = {name for name, load in self._loads.items() if load[0] <= 0 and name in self._scheduler.requests}
        failed = {name: block for name in done if (block := self._loads.pop(name)[1])}
        self._failed.update(failed)
        if not done:
            return {}
        kind = import_module("vllm.v1.outputs").KVConnectorOutput
        return {"kv_connector_output": kind(finished_recving=done, invalid_block_ids={*failed.values()})}
