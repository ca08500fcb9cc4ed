"""The part of a scheduler that the hunt needs: six methods, and a few more that let it check more.

    class MyScheduler:
        def __init__(self, config): ...          # the workload's configuration, a dict under EngineConfig's names
        def add(self, request): ...              # a LiveRequest: request_id, token_ids, max_tokens, priority, ...
        def abort(self, request_id): ...
        def schedule(self): ...                  # -> Plan([PlannedChunk(request_id, start, num_tokens), ...])
        def update(self, plan, tokens): ...      # tokens: {request_id: [ids]} -> {request_id: "length" | "stop"}
        def block_tables(self, request_id): ...  # -> [[block ids]], one list per KV cache group
        def free_blocks(self): ...               # -> the free block ids, or their number

Block ids count from 1; 0 stands for a place without a block, and the pool's ``num_blocks`` includes it, as in vLLM.
``workbench hunt --scheduler module:factory`` calls the factory with the configuration; a factory that raises ValueError
refuses it. A KV cache whose size the scheduler does not know is told by ``config["num_blocks"]``.

Optional parts, whose laws are checked if the scheduler has them: ``depth``, the maximum number of steps in flight, and
``allows``, the messages of rules that it breaks on purpose; ``foresee(requests)``, called once before the first step;
``propose(drafts)``, the draft tokens of the next step; ``queues()``, the ids that run and that wait, in order;
``counters(request_id)``, its own counters of a request; ``pool()``, the fields of `workbench.trace.laws.SchedulerState`
from ``ref_counts`` on; ``close()``, called when the run is over.
"""

from __future__ import annotations

from typing import NamedTuple


class Counters(NamedTuple):
    """A scheduler's own counters of a request, which the laws compare with their own recount.

    Attributes:
        token_ids: Its known tokens.
        status: "waiting", "running" or "preempted".
        num_kv_computed: Tokens whose KV is computed.
        num_output_placeholders: Output tokens that steps in flight will give.
        num_in_flight_tokens: Tokens of its chunks in flight.
        num_stale_output_tokens: Those of them that were scheduled before its latest preemption.

    A number of None is not compared.
    """

    token_ids: list[int]
    status: str
    num_kv_computed: int | None = None
    num_output_placeholders: int | None = None
    num_in_flight_tokens: int | None = None
    num_stale_output_tokens: int | None = None
