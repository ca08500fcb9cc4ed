"""What the engine's process tells the writer's: plain facts, packed by msgspec in C, many messages at a time.

A packet is four bytes of length (little endian) and a MessagePack list of lists of messages. Times are seconds of the
engine's own clock since the recording began. Nothing here is a file format: both ends are of the same version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from workbench.integrations.recorder.settings import RecordingSettings

LENGTH_BYTES = 4

_LIST_BYTES = 5
"""A MessagePack list of 32 bits: 0xdd and its length, big endian."""


class Setup(msgspec.Struct, array_like=True, tag="setup"):
    """The first message: where to write, and the facts of the trace's first line.

    Attributes:
        settings: Settings of the recording.
        file_prefix: Names of the recording's files begin with it.
        source: The engine's name and version.
        config: Its configuration by field name.
        model: Facts about the model by name.
        versions: Versions of the software involved.
        created: Wall-clock time, seconds since the epoch.
        start: The same moment by the clock that times the steps.
        kv_cache_group: Index of the KV cache group whose blocks are recorded.
        samples: Requests sample tokens; False for pooling models.
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


class Arrival(msgspec.Struct, array_like=True, gc=False, tag="arrival"):
    """A request was added. ``queue_time`` decides between equal priorities; it may be of another clock."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    time: float
    queue_time: float
    prompt_token_ids: list[int] = []


class Preemption(msgspec.Struct, array_like=True, gc=False, tag="preemption"):
    """A running request is about to lose its blocks: all those it holds, in logical order."""

    request_id: str
    block_ids: list[int]
    reason: str


class End(msgspec.Struct, array_like=True, gc=False, tag="end"):
    """A request has ended.

    Attributes:
        request_id: The request.
        reason: "stop", "length", "abort", "error" or another word of the engine's.
        in_update: It ended while a step's output was processed, and not between two steps.
    """

    request_id: str
    reason: str
    in_update: bool


class Admission(msgspec.Struct, array_like=True, gc=False):
    """A request that left the waiting queue in a step.

    Attributes:
        request_id: The request.
        num_computed_tokens: Tokens whose KV was found, before the step.
        num_tokens: Tokens known of it; its prefill ends there.
        block_ids: Its whole block table after scheduling.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    block_ids: list[int]


class Schedule(msgspec.Struct, array_like=True, gc=False, tag="schedule"):
    """What one call of ``schedule()`` decided.

    Attributes:
        output_id: Tells its output from others that live at the same time.
        started: When it was called.
        ended: When it returned.
        free_blocks: Free KV blocks now.
        request_ids: Who was scheduled, in scheduling order; None for the same requests as in the step before.
        num_computed_tokens: Of each of them who was not admitted, in order, its progress before the step.
        new_block_ids: Of the same, the blocks that it was given in each KV cache group, or None.
        num_scheduled_tokens: Tokens of every scheduled request, in order; empty for one each.
        admissions: Requests that left the waiting queue.
        running: Running requests now, where the receiver shall not work them out by itself; None otherwise.
        waiting: Waiting requests likewise.
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


class Update(msgspec.Struct, array_like=True, gc=False, tag="update"):
    """The output of a step was processed.

    Attributes:
        output_id: That of the step's Schedule.
        started: When the processing began.
        ended: When it was done.
        free_blocks: Free KV blocks now.
        request_ids: Requests that ``token_ids`` belongs to, in its order; empty when it was left out.
        token_ids: The tokens each request was given; where token ids are not recorded, zeros.
    """

    output_id: int
    started: float
    ended: float
    free_blocks: int
    request_ids: list[str] = []
    token_ids: list[list[int]] = []


Message = Setup | Arrival | Preemption | End | Schedule | Update

_decoder = msgspec.msgpack.Decoder(list[list[Message]])


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's own."""
    to_list = getattr(value, "tolist", None)
    return to_list() if to_list is not None else str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


class Packet:
    """Messages on their way, encoded when they are added: what they refer to may change after that."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._bytes = bytearray(LENGTH_BYTES + _LIST_BYTES)
        self._num_added = 0

    def add(self, messages: list[Message]) -> None:
        """Append messages, in order."""
        _encoder.encode_into(messages, self._bytes, -1)
        self._num_added += 1

    def take(self) -> bytearray:
        """The packet as it goes into the pipe; another one begins."""
        packed = self._bytes
        num_bytes = (len(packed) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        packed[: LENGTH_BYTES + _LIST_BYTES] = num_bytes + b"\xdd" + self._num_added.to_bytes(4, "big")
        self._begin()
        return packed


def unpack(buffer: bytearray) -> Iterator[Message]:
    """Take the messages of all complete packets from the front of a buffer."""
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
