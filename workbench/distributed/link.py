"""The link between rank 0 and each other rank: messages, and the certainty that a lost rank ends the job.

A star of TCP connections beside the collectives, for what those cannot do. A rank that waits in a collective spins on
its socket (a processor core per idle rank) and cannot be told anything, not even that nobody will come; a rank that
waits here sleeps. So the collectives carry what they are made for, the sums inside a forward pass, and everything that
is waited for travels here. Both ends beat once a second, from a thread of their own:

- the connection closes without a word of farewell: the process at its other end is gone;
- nothing comes for ``silence_limit`` seconds: its machine is gone, or it hangs.

Then the job has ended. A forward pass that waits for the lost rank cannot be interrupted, so every process says why on
standard error and exits with status `EXIT_STATUS`.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx

EXIT_STATUS = 70
"""Of a process whose job ended because a rank was lost or failed (EX_SOFTWARE of sysexits.h)."""
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0
"""Far longer than a beat: compiling a kernel or reading weights may keep a process from beating."""
CAUSE_SECONDS = 0.5
"""How long rank 0 listens after the first bad news: a rank that only suffered from it may be heard first."""
JOIN_SECONDS = 30.0
INTRODUCTION_SECONDS = 2.0
"""A rank that has connected says at once which it is."""
FAREWELL_SECONDS = 5.0
MAX_PAYLOAD = 1 << 28
TOKEN_BYTES = 16

_HEADER = struct.Struct("<BI")


class Kind(enum.IntEnum):
    """What a message is about; its payload in brackets."""

    BEAT = 0  # nothing but a sign of life
    OPEN = 1  # make a runner [EngineConfig as JSON]
    READY = 2  # the runner is there [its facts as JSON]
    STEP = 3  # run a forward pass [packed batch]
    CLOSE = 4  # drop the runner
    STOP = 5  # farewell; from rank 0: the job is done
    FAILED = 6  # this rank cannot go on [why, UTF-8]
    END = 7  # the job has ended early [why, UTF-8]


class Message(NamedTuple):
    """One message and the rank it came from."""

    kind: Kind
    payload: bytes
    rank: int


class Link:
    """This rank's connections: to every other rank on rank 0, to rank 0 elsewhere.

    Args:
        rank: This rank.
        size: Ranks of the job.
        peers: A connected socket by rank.
        silence_limit: Seconds without a sign of life after which a rank counts as lost.
        leave: Ends the process; for tests.

    Attributes:
        doing: What this rank is doing, for messages about a lost rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        peers: dict[int, socket.socket],
        *,
        silence_limit: float = SILENCE_SECONDS,
        leave: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self.rank, self.size = rank, size
        self.doing = "starting"
        self._peers = peers
        self._silence_limit = silence_limit
        self._leave = leave
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sending = {peer: threading.Lock() for peer in peers}
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._verdict = threading.Lock()
        self._news: dict[int, tuple[bool, str]] = {}  # by rank: whether it is gone, and what to say
        self._departed: set[int] = set()  # ranks that have said farewell
        self._closed = threading.Event()
        self._readers = [_start(f"link-{peer}", self._read, peer, connection) for peer, connection in peers.items()]
        _start("link-beat", self._beat)
        _start("link-watch", self._watch)

    # -- messages ---------------------------------------------------------------------------------------------

    def send(self, rank: int, kind: Kind, payload: bytes = b"") -> None:
        """Send a message to one rank. That it may be lost is found out elsewhere."""
        with self._sending[rank], contextlib.suppress(OSError):
            self._peers[rank].sendall(_HEADER.pack(kind, len(payload)) + payload)

    def broadcast(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a message to every rank this one is connected to."""
        for rank in self._peers:
            self.send(rank, kind, payload)

    def receive(self) -> Message:
        """The next message, in the order in which one rank sent them; sleeps until it comes."""
        return self._inbox.get()

    def _read(self, peer: int, connection: socket.socket) -> None:
        """Take messages from one rank until its connection closes."""
        try:
            while True:
                kind, length = _HEADER.unpack(receive_exactly(connection, _HEADER.size))
                if length > MAX_PAYLOAD:
                    raise OSError(f"it announced a message of {length} bytes, more than {MAX_PAYLOAD}")
                message = Message(Kind(kind), receive_exactly(connection, length), peer)
                self._heard[peer] = time.monotonic()
                if message.kind is Kind.FAILED:
                    self._bad_news(peer, gone=False, what=f"rank {peer} failed: {message.payload.decode()}")
                elif message.kind is Kind.END:
                    self._end(message.payload.decode())
                elif message.kind is Kind.STOP:
                    self._departed.add(peer)
                    if self.rank:  # rank 0 has no more work for anybody
                        self._closed.set()
                        self._inbox.put(message)
                elif message.kind is not Kind.BEAT:
                    self._inbox.put(message)
        except EOFError:
            self._bad_news(peer, gone=True, what=f"rank {peer} is gone: its connection closed without a farewell")
        except (OSError, ValueError) as problem:
            self._bad_news(peer, gone=True, what=f"rank {peer} is gone: {problem}")

    def _beat(self) -> None:
        while not self._closed.wait(min(BEAT_SECONDS, self._silence_limit / 4)):
            self.broadcast(Kind.BEAT)

    def _watch(self) -> None:
        """Look for silence; not in the thread that beats, which a full connection may hold up."""
        while not self._closed.wait(min(BEAT_SECONDS, self._silence_limit / 4)):
            for peer, heard in self._heard.items():
                silence = time.monotonic() - heard
                if silence > self._silence_limit:
                    self._bad_news(peer, gone=True, what=f"rank {peer} is lost: not heard of for {silence:.0f} s")

    # -- the end ----------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> NoReturn:
        """End the job because this rank cannot go on. Says so to the others and does not return.

        A lost rank makes the collectives of its neighbours fail, so rank 0's verdict, which knows who is gone, is
        waited for.
        """
        if self.rank:
            self.broadcast(Kind.FAILED, reason.encode())
        else:
            self._bad_news(0, gone=False, what=f"rank 0 failed: {reason}")
        if not self._closed.wait(4 * CAUSE_SECONDS):
            self._say(reason)
        self._leave(EXIT_STATUS)

    def _bad_news(self, rank: int, *, gone: bool, what: str) -> None:
        """Note what happened to a rank; on rank 0 the job's end is near, elsewhere it is here."""
        if self._closed.is_set() or rank in self._departed:
            return
        with self._verdict:
            first = not self._news
            self._news.setdefault(rank, (gone, what))
        if self.rank:
            self._end(what)
        elif first:
            _start("link-end", self._judge)

    def _judge(self) -> None:
        if not self._closed.wait(CAUSE_SECONDS):
            self._tell_why()

    def _tell_why(self) -> None:
        """End the job on every rank with the reason: a rank that is gone explains one that failed."""
        with self._verdict:
            gone_first = sorted(self._news.values(), key=lambda news: not news[0])
        reason = f"{gone_first[0][1]} ({self.doing})"
        self.broadcast(Kind.END, reason.encode())
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._say(reason)
        self._closed.set()
        self._leave(EXIT_STATUS)

    def _say(self, reason: str) -> None:
        print(f"workbench: rank {self.rank} of {self.size} ends the job: {reason}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Say farewell and close the connections; on rank 0 the other ranks are told that the job is done.

        A job that has lost a rank ends as such: a launcher that asks the other ranks to end should not hide it.
        """
        if not self._closed.is_set():
            if any(gone for gone, _ in self._news.values()):
                self._tell_why()
            self._closed.set()
            self.broadcast(Kind.STOP)
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + FAREWELL_SECONDS
        for reader in self._readers:  # what is closed with messages unread takes messages back that are on their way
            reader.join(max(0.0, deadline - time.monotonic()))
        for connection in self._peers.values():
            connection.close()


def _start(name: str, work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """The next ``length`` bytes.

    Raises:
        EOFError: The connection closed before.
    """
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return bytes(data)


def open_link(group: mx.distributed.Group, host: str, *, silence_limit: float = SILENCE_SECONDS) -> Link:
    """Connect every rank of a group with rank 0.

    The port and a secret that keeps strangers out are agreed upon in one sum over the ranks.

    Args:
        group: All ranks; each of them calls this.
        host: Rank 0's address, see `workbench.distributed.group.leader_host`.
        silence_limit: See `Link`.

    Raises:
        OSError: A rank could not be reached in time.
    """
    rank, size = group.rank(), group.size()
    if rank:
        port, secret = _agree(group, 0, bytes(TOKEN_BYTES))
        connection = socket.create_connection((host, port), timeout=JOIN_SECONDS)
        connection.sendall(secret + struct.pack("<I", rank))
        peers = {0: connection}
    else:
        with socket.create_server((host, 0), backlog=size) as server:
            secret = secrets.token_bytes(TOKEN_BYTES)
            _agree(group, server.getsockname()[1], secret)
            peers = _accept(server, size, secret)
    for connection in peers.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Link(rank, size, peers, silence_limit=silence_limit)


def _agree(group: mx.distributed.Group, port: int, secret: bytes) -> tuple[int, bytes]:
    """Rank 0's port and secret on every rank: all others put zeros into the sum."""
    told = mx.distributed.all_sum(mx.array([port, *secret], dtype=mx.int32), group=group, stream=mx.cpu).tolist()
    return told[0], bytes(told[1:])


def _accept(server: socket.socket, size: int, secret: bytes) -> dict[int, socket.socket]:
    """A connection from each rank above 0; whoever does not know the secret is turned away."""
    peers: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_SECONDS
    while missing := [rank for rank in range(1, size) if rank not in peers]:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            raise OSError(f"ranks {missing} did not connect within {JOIN_SECONDS:.0f} s") from None
        rank = _introduced(connection, secret)
        if rank in missing:
            peers[rank] = connection
        else:
            connection.close()
    return peers


def _introduced(connection: socket.socket, secret: bytes) -> int | None:
    """The rank that a connection says it is; None for a stranger, who may also say nothing."""
    connection.settimeout(INTRODUCTION_SECONDS)
    try:
        shown = receive_exactly(connection, TOKEN_BYTES + 4)
    except (EOFError, OSError):
        return None
    if not hmac.compare_digest(shown[:TOKEN_BYTES], secret):
        return None
    return struct.unpack("<I", shown[TOKEN_BYTES:])[0]
