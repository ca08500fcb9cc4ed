"""Events of vLLM's prefix cache: blocks entered it or left it.

vLLM publishes them with ``--kv-events-config '{"enable_kv_cache_events": true}'`` over ZMQ, as msgpack.

Source: vLLM 0.33.0, vllm/distributed/kv_events.py. A batch is an array; an event is a map with its type, or, up to
2025, an array that begins with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from workbench.base.key_table import Rule, judge
from workbench.trace.errors import TraceError
from workbench.trace.fields import Seconds

BlockHash = int | str
"""A block's hash: a number, or its bytes as hexadecimal digits."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Blocks that entered the prefix cache, each the continuation of the one before.

    Attributes:
        block_hashes: Their hashes; each stands for all tokens up to the end of its block.
        parent_block_hash: The block before the first one; None at the beginning of a prompt.
        token_ids: Their tokens; empty if they were not recorded.
        block_size: Tokens in a block.
        medium: "GPU", "CPU" and so on; None if vLLM does not say.
        group_idx: KV cache group; None if vLLM does not say.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Blocks that left the prefix cache, because their memory was needed.

    Attributes:
        block_hashes: Their hashes.
        medium: See `BlockStored`.
        group_idx: See `BlockStored`.
    """

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The prefix cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

_GROUP = ("kv_cache_spec_kind", "kv_cache_spec_sliding_window")

_ARRAY_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys", "group_idx", *_GROUP),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Order of the fields in vLLM's older events, which are arrays."""

EVENT_RULES = (
    Rule("read", "type block_hashes parent_block_hash token_ids block_size medium group_idx", "blocks and their cache"),
    Rule("harmless", "lora_id lora_name extra_keys", "the hash of a block contains it"),
    Rule("harmless", " ".join(_GROUP), "it describes the group"),
)
"""The fields of an event."""


class KVEventBatch(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The events of one step of one engine.

    Attributes:
        seq: Number of the batch, one more than the one before; a gap is a lost batch.
        ts: Seconds since the epoch.
        events: The events, in order.
        rank: Data-parallel rank.
    """

    seq: int
    ts: Seconds
    events: list[KVEvent]
    rank: int = 0


def decode_batch(seq: int, payload: bytes) -> KVEventBatch:
    """A batch as vLLM publishes it.

    Args:
        seq: Number of the batch, from its own frame.
        payload: msgpack of vLLM's ``KVEventBatch``.

    Raises:
        TraceError: The payload is something else.

    Example:
        >>> events = [{"type": "BlockStored", "block_hashes": [7], "block_size": 16}]
        >>> decode_batch(0, msgspec.msgpack.encode([12.5, events])).events[0].block_hashes
        [7]
    """
    try:
        ts, events, *rest = msgspec.msgpack.decode(payload)
        (rank,) = rest or [None]
        facts = {"seq": seq, "ts": ts, "events": [_as_map(each) for each in events], "rank": rank or 0}
        return msgspec.convert(_without_bytes(facts), KVEventBatch)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError, KeyError) as problem:
        raise TraceError(f"batch {seq} holds no KV events of vLLM: {type(problem).__name__}: {problem}") from None


def _as_map(event: Any) -> Mapping[str, Any]:
    """An event with the fields that are read."""
    if not isinstance(event, Mapping):
        kind, *values = event
        event = {"type": kind, **dict(zip(_ARRAY_FIELDS[kind], values))}
        if len(values) > len(_ARRAY_FIELDS[kind]):
            raise ValueError(f"{kind} has {len(values)} fields, {len(_ARRAY_FIELDS[kind])} are known")
    findings = judge(str(event.get("type")), event, EVENT_RULES)
    return {finding.key: finding.value for finding in findings if finding.verdict == "read"}


def _without_bytes(value: Any) -> Any:
    """Hashes as hexadecimal digits: JSON has no bytes."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: _without_bytes(each) for key, each in value.items()}
    return [_without_bytes(each) for each in value] if isinstance(value, list | tuple) else value
