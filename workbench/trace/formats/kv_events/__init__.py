"""KV cache events of vLLM: blocks that entered its prefix cache, left it, and were needed again."""

from workbench.trace.formats.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    decode_batch,
)
from workbench.trace.formats.kv_events.history import CacheHistory, Return
from workbench.trace.formats.kv_events.recording import KVEvents, collect, is_kv_events, read_kv_events

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheHistory",
    "KVEvent",
    "KVEventBatch",
    "KVEvents",
    "Return",
    "collect",
    "decode_batch",
    "is_kv_events",
    "read_kv_events",
]
