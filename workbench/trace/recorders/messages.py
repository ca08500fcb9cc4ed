"""Messages from the engine's process to the writer's: plain facts, which msgspec packs in C, many at a time.

A packet is four bytes of length (little endian) and a MessagePack list of lists of messages. Times are seconds of the
engine's own clock since the start of the recording. This is not a file format: both ends have the same version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from workbench.trace.recorders.settings import RecordingSettings

LENGTH_BYTES = 4

_LIST_BYTES = 5
"""The header of a MessagePack list of 32 bits: 0xdd and the list's length, big endian."""


class Setup(msgspec.Struct, array_like=True, tag="setup"):
    """The first message: the files to write, and the facts in the trace's first line.

    Attributes:
        settings: Settings of the recording.
        file_prefix: Common beginning of the files' names.
        source: The engine's name and version.
        config: Its configuration by field name.
        model: Facts about the model by name.
        versions: Versions of the software involved.
        created: Wall-clock time, seconds since the epoch.
        start: The same moment by the clock of the steps' times.
        kv_cache_group: Index of the KV cache group whose blocks are recorded, if ``config`` does not have
            ``kv_cache_groups``: then those of all groups are.
        samples: Whether requests sample tokens; False for pooling models.
        run: A name that the ranks of the run share; "" for one rank.
        num_hash_lookahead_tokens: Tokens after a block that its hash covers too.
        watches_pool: Whether there is a PoolNews for every change of the block pool.
        pid: The engine's process.
        thread: Its thread that schedules.
    """

    settings: RecordingSettings
    file_prefix: str
    source: str
    config: dict[str, Any]
    model: dict[str, Any]
    versions: dict[str, str]
    created: float
    start: float
    kv_cache_group: int = 0
    samples: bool = True
    run: str = ""
    num_hash_lookahead_tokens: int = 0
    watches_pool: bool = False
    pid: int = 0
    thread: int = 0

    @property
    def records_all_groups(self) -> bool:
        """Whether the block tables of all KV cache groups are recorded."""
        return "kv_cache_groups" in self.config


class Arrival(msgspec.Struct, array_like=True, gc=False, tag="arrival"):
    """A request was added. ``queue_time`` orders requests of equal priority and may be from another clock.

    The writer keeps a digest of ``cache_salt``. ``inputs`` are identifier, first position and length of each multimodal
    input. Tokens are sent for their hashes too, and stored only if token ids are recorded.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    time: float
    queue_time: float
    prompt_token_ids: list[int] = []
    cache_salt: str = ""
    lora: str = ""
    inputs: list[tuple[str, int, int]] = []


class Preemption(msgspec.Struct, array_like=True, gc=False, tag="preemption"):
    """A running request is about to lose its blocks; ``block_ids`` is its whole block table.

    ``other_tables`` are those in the KV cache groups after the first, if all groups are recorded. ``is_reset``: it is
    preempted to reset the prefix cache, and not for a lack of blocks. ``is_unexplained``: the engine does not say why.
    """

    request_id: str
    block_ids: list[int]
    is_reset: bool
    other_tables: list[list[int]] = []
    is_unexplained: bool = False


class End(msgspec.Struct, array_like=True, gc=False, tag="end"):
    """A request has ended.

    Attributes:
        request_id: The request.
        reason: "stop", "length", "abort", "error" or another reason of the engine's.
        in_update: Whether it ended while a step's output was processed, and not between two steps.
        output_token_ids: All its output, for the hashes.
    """

    request_id: str
    reason: str
    in_update: bool
    output_token_ids: list[int] = []


class Pause(msgspec.Struct, array_like=True, gc=False, tag="pause"):
    """The engine's process collected garbage, for so long that a step may have waited for it."""

    started: float
    ended: float


class Admission(msgspec.Struct, array_like=True, gc=False):
    """A request that left the waiting queue in a step.

    Attributes:
        request_id: The request.
        num_computed_tokens: KV progress before the step, as vLLM calls it: the tokens that were found.
        num_tokens: Number of its known tokens; its prefill ends there.
        block_ids: Its whole block table after scheduling.
        other_tables: Those in the KV cache groups after the first, if all groups are recorded.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    block_ids: list[int]
    other_tables: list[list[int]] = []


class PoolNews(msgspec.Struct, array_like=True, gc=False, tag="pool"):
    """Changes to the block pool in the call that the next message is about, a Schedule or an Update.

    Attributes:
        content: In order, a block that was cached, or with a minus sign one that lost its content.
        given_back: In order, blocks that were put before the free queue (True) or behind it, and are still there.
    """

    content: list[int] = []
    given_back: list[tuple[bool, list[int]]] = []


class Schedule(msgspec.Struct, array_like=True, gc=False, tag="schedule"):
    """The decisions of one call of ``schedule()``.

    Attributes:
        output_id: Distinguishes its output from others that exist at the same time.
        started: Time of the call.
        ended: Time of the return.
        free_blocks: Number of free KV blocks afterwards.
        request_ids: Scheduled requests, in scheduling order. None for those of the step before that have not ended or
            been preempted since, and then the admissions: a list of 256 names takes longer to send than all the rest.
        num_computed_tokens: KV progress before the step, of each scheduled request not admitted in it, in order.
        new_block_ids: Blocks that each of these requests was given in each KV cache group, or None.
        num_scheduled_tokens: Number of tokens of every scheduled request, in order; empty for one each.
        admissions: Requests that left the waiting queue.
        running: Running requests afterwards, to correct the receiver's own count; usually None.
        waiting: Waiting requests afterwards, likewise.
        drafts: Draft tokens by request, those of which none is known as -1.
        table_changes: If all KV cache groups are recorded: for each request that was not admitted and whose tables
            changed, the places that became null and the entries appended, per group.
    """

    output_id: int
    started: float
    ended: float
    free_blocks: int
    request_ids: list[str] | None
    num_computed_tokens: list[int]
    new_block_ids: list[list[list[int]] | None]
    num_scheduled_tokens: list[int] = []
    admissions: list[Admission] = []
    running: list[str] | None = None
    waiting: list[str] | None = None
    drafts: dict[str, list[int]] = {}
    table_changes: dict[str, list[tuple[list[int], list[int]]]] = {}


class Update(msgspec.Struct, array_like=True, gc=False, tag="update"):
    """The output of a step was processed.

    Attributes:
        output_id: ``output_id`` of the step's Schedule.
        started: Time when the processing began.
        ended: Time when it ended.
        free_blocks: Number of free KV blocks afterwards.
        request_ids: Requests of ``token_ids``, in its order; empty if the tokens are left out.
        token_ids: New tokens of each request; zeros if token ids are not recorded.
        num_given: Number of tokens that the model gave each of them, those behind its end included; empty in a step
            without drafts.
    """

    output_id: int
    started: float
    ended: float
    free_blocks: int
    request_ids: list[str] = []
    token_ids: list[list[int]] = []
    num_given: list[int] = []


Message = Setup | Arrival | Preemption | End | Pause | PoolNews | Schedule | Update

_decoder = msgspec.msgpack.Decoder(list[list[Message]])


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python objects."""
    to_list = getattr(value, "tolist", None)
    return to_list() if to_list is not None else str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


class Packet:
    """Messages to send, encoded as they are added because the objects they refer to may change later."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._bytes = bytearray(LENGTH_BYTES + _LIST_BYTES)
        self._num_added = 0

    def add(self, messages: Sequence[Message | tuple[Any, ...]]) -> None:
        """Append messages in order; a tuple is encoded like the message with the same fields."""
        _encoder.encode_into(messages, self._bytes, -1)
        self._num_added += 1

    def take(self) -> bytearray:
        """Return the packet as it is written to the pipe, and begin another one."""
        packed = self._bytes
        num_bytes = (len(packed) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        packed[: LENGTH_BYTES + _LIST_BYTES] = num_bytes + b"\xdd" + self._num_added.to_bytes(4, "big")
        self._begin()
        return packed


def unpack(buffer: bytearray) -> Iterator[Message]:
    """Remove all complete packets from the front of a buffer and yield their messages."""
    begin = 0
    try:
        while len(buffer) - begin >= LENGTH_BYTES:
            body = begin + LENGTH_BYTES
            end = body + int.from_bytes(buffer[begin:body], "little")
            if end > len(buffer):
                break
            added = _decoder.decode(bytes(buffer[body:end]))
            begin = end
            for messages in added:
                yield from messages
    finally:
        del buffer[:begin]
