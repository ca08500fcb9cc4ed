"""Record the KV cache events that a running vLLM publishes over ZMQ."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from workbench.trace.errors import TraceError
from workbench.trace.file_lock import open_locked
from workbench.trace.formats.kv_events.events import BlockStored, KVEventBatch, decode_batch
from workbench.trace.formats.kv_events.recording import KVEventHeader, KVEvents, collect

END = (-1).to_bytes(8, "big", signed=True)
"""The number with which vLLM ends its answer to a request for earlier batches."""

REPLAY_SECONDS = 5.0
"""Maximum time to wait for earlier batches."""

POLL_SECONDS = 0.2


def record_kv_events(
    endpoint: str,
    path: str | os.PathLike[str],
    *,
    replay_endpoint: str | None = None,
    topic: str = "",
    with_tokens: bool = False,
    seconds: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> KVEvents:
    """Subscribe to KV cache events and write each batch as a line, until the time is over or Ctrl-C.

    Args:
        endpoint: Address of vLLM's publisher, such as "tcp://127.0.0.1:5557"; each rank has another port.
        path: File to write; replaced if it exists.
        replay_endpoint: Address at which vLLM repeats earlier batches (``replay_endpoint`` of its configuration); with
            it the recording begins with the oldest batch that vLLM still has.
        topic: Beginning of the topics to subscribe to.
        with_tokens: Write the tokens of blocks too, which are the users' texts.
        seconds: Time to record; None for no end.
        stop: Asked five times a second; True ends the recording.

    Returns:
        The recorded events.

    Raises:
        TraceError: A message is not a batch of KV events.
        ValueError: The address is malformed.
        OSError: The file cannot be written.
        ModuleNotFoundError: pyzmq, of the extra ``serve``, is not installed; vLLM brings it.
    """
    import zmq

    until = None if seconds is None else time.monotonic() + seconds
    batches: list[KVEventBatch] = []
    live = subscribe(endpoint, topic=topic, stop=lambda: stop() or (until is not None and time.monotonic() >= until))
    with contextlib.closing(live), zmq.Context() as context, open_locked(Path(path)) as file:

        def take(batch: KVEventBatch) -> None:
            kept = batch if with_tokens else _without_tokens(batch)
            batches.append(kept)
            file.write(msgspec.json.encode(kept) + b"\n")
            file.flush()

        file.write(msgspec.json.encode(KVEventHeader(endpoint=endpoint)) + b"\n")
        seen: set[int] = set()
        with contextlib.suppress(KeyboardInterrupt):
            if replay_endpoint is not None:
                for batch in _earlier(context, replay_endpoint):
                    seen.add(batch.seq)
                    take(batch)
            for batch in live:
                if batch.seq not in seen:  # published while vLLM repeated the earlier ones
                    take(batch)
    return collect(endpoint, batches)


def subscribe(
    endpoint: str, *, topic: str = "", stop: Callable[[], bool] = lambda: False
) -> Generator[KVEventBatch, None, None]:
    """The batches of a publisher as they come; it is subscribed to at once, and nothing after that is lost.

    Args:
        endpoint: Address of vLLM's publisher.
        topic: Beginning of the topics to subscribe to.
        stop: Asked five times a second; True ends the batches.

    Raises:
        TraceError: A message is not a batch of KV events; from the batches.
        ValueError: The address is malformed.
        ModuleNotFoundError: pyzmq is not installed.
    """
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)  # no limit: a batch that is dropped is lost
    socket.setsockopt_string(zmq.SUBSCRIBE, topic)
    try:
        _connect(socket, endpoint)
    except ValueError:
        context.destroy(linger=0)
        raise

    def batches() -> Generator[KVEventBatch, None, None]:
        try:
            while not stop():
                if socket.poll(int(POLL_SECONDS * 1000)):
                    frames = socket.recv_multipart()
                    if len(frames) != 3:
                        raise TraceError(f"{endpoint} sent {len(frames)} frames, and a batch of KV events has 3")
                    yield decode_batch(int.from_bytes(frames[1], "big"), frames[2])
        finally:
            context.destroy(linger=0)

    return batches()


def _connect(socket: Any, endpoint: str) -> None:
    import zmq

    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
    except zmq.ZMQError as problem:
        raise ValueError(f"endpoint {endpoint!r} must be an address such as tcp://127.0.0.1:5557: {problem}") from None


def _earlier(context: Any, endpoint: str) -> Iterator[KVEventBatch]:
    """The batches that vLLM still has."""
    import zmq

    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVHWM, 0)
        _connect(socket, endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while socket.poll(int(REPLAY_SECONDS * 1000)):
            _, _, number, payload = socket.recv_multipart()
            if number == END:
                return
            yield decode_batch(int.from_bytes(number, "big"), payload)


def _without_tokens(batch: KVEventBatch) -> KVEventBatch:
    events = [replace(event, token_ids=[]) if isinstance(event, BlockStored) else event for event in batch.events]
    return replace(batch, events=events)
