"""The link between rank 0 and each other rank: it carries messages, and a lost rank ends the job.

A star of TCP connections beside the collectives. A rank that waits in a collective spins on its socket (a processor
core per idle rank) and cannot receive anything, not even that nobody will come; a rank that waits on the link sleeps.
So the collectives carry the sums inside a forward pass, and everything that a rank waits for travels over the link. A
thread at both ends sends a heartbeat once a second. A rank is lost if

- its connection closes without a farewell: its process is gone;
- nothing arrives for ``silence_limit`` seconds: its machine is gone, or it hangs.

Then the job ends. A forward pass that waits for the lost rank cannot be interrupted, so every process prints the reason
on standard error and exits with status `EXIT_STATUS`.
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

from workbench.engine.distributed.group import sum_over_ranks

EXIT_STATUS = 70
"""Exit status of a process whose job ended because a rank was lost or failed (EX_SOFTWARE of sysexits.h)."""
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0
"""Far longer than a heartbeat: compiling a kernel or reading weights may delay it."""
CAUSE_SECONDS = 0.5
"""Time from the first problem that rank 0 hears of to its verdict: the cause may be heard after its effect."""
JOIN_SECONDS = 30.0
INTRODUCTION_SECONDS = 2.0
"""Time for a rank that has connected to send the secret and its rank."""
FAREWELL_SECONDS = 5.0
MAX_PAYLOAD = 1 << 28
TOKEN_BYTES = 16

_HEADER = struct.Struct("<BI")


class Kind(enum.IntEnum):
    """Kind of a message, with its payload in brackets."""

    BEAT = 0  # heartbeat
    OPEN = 1  # make a runner [EngineConfig as JSON]
    READY = 2  # the runner is made [its facts as JSON]
    STEP = 3  # run a forward pass [packed batch]
    CLOSE = 4  # drop the runner
    STOP = 5  # farewell; from rank 0: the job is done
    FAILED = 6  # this rank has failed [reason, UTF-8]
    END = 7  # the job has ended early [reason, UTF-8]


class Message(NamedTuple):
    """A message and the rank that sent it."""

    kind: Kind
    payload: bytes
    rank: int


class Link:
    """This rank's connections: rank 0 is connected to every other rank, the others only to rank 0.

    Args:
        rank: This rank.
        size: Number of ranks in the job.
        peers: Connected sockets by rank.
        silence_limit: Seconds without a message after which a rank counts as lost.
        leave: Ends the process; replaced in tests.

    Attributes:
        doing: Current activity of this rank, for messages about a lost rank.
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
        self._problems: dict[int, tuple[bool, str]] = {}  # by rank: whether it is gone, and the message
        self._problems_lock = threading.Lock()
        self._departed: set[int] = set()  # ranks that have said farewell
        self._closed = threading.Event()
        self._readers = [_start(f"link-{peer}", self._read, peer, connection) for peer, connection in peers.items()]
        _start("link-beat", self._beat)
        _start("link-watch", self._watch)

    # -- messages ---------------------------------------------------------------------------------------------

    def send(self, rank: int, kind: Kind, payload: bytes = b"") -> None:
        """Send a message to one rank; a failure to send is ignored, because the reading thread notices a lost rank."""
        with self._sending[rank], contextlib.suppress(OSError):
            self._peers[rank].sendall(_HEADER.pack(kind, len(payload)) + payload)

    def broadcast(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a message to every connected rank."""
        for rank in self._peers:
            self.send(rank, kind, payload)

    def receive(self) -> Message:
        """Sleep until a message arrives; the messages of one rank arrive in the order in which it sent them."""
        return self._inbox.get()

    def _read(self, peer: int, connection: socket.socket) -> None:
        """Read the messages of one rank until its connection closes."""
        try:
            while True:
                kind, length = _HEADER.unpack(receive_exactly(connection, _HEADER.size))
                if length > MAX_PAYLOAD:
                    raise OSError(f"it announced a message of {length} bytes, more than {MAX_PAYLOAD}")
                message = Message(Kind(kind), receive_exactly(connection, length), peer)
                self._heard[peer] = time.monotonic()
                if message.kind is Kind.FAILED:
                    self._note_problem(peer, gone=False, what=f"rank {peer} failed: {message.payload.decode()}")
                elif message.kind is Kind.END:
                    self._end(message.payload.decode())
                elif message.kind is Kind.STOP:
                    self._departed.add(peer)
                    if self.rank:  # rank 0 has no more work
                        self._closed.set()
                        self._inbox.put(message)
                elif message.kind is not Kind.BEAT:
                    self._inbox.put(message)
        except EOFError:
            self._note_problem(peer, gone=True, what=f"rank {peer} is gone: its connection closed without a farewell")
        except (OSError, ValueError) as problem:
            self._note_problem(peer, gone=True, what=f"rank {peer} is gone: {problem}")

    def _beat(self) -> None:
        while not self._closed.wait(min(BEAT_SECONDS, self._silence_limit / 4)):
            self.broadcast(Kind.BEAT)

    def _watch(self) -> None:
        """Look for silent ranks, in another thread than the heartbeat, which blocks on a full connection."""
        while not self._closed.wait(min(BEAT_SECONDS, self._silence_limit / 4)):
            for peer, heard in self._heard.items():
                silence = time.monotonic() - heard
                if silence > self._silence_limit:
                    self._note_problem(peer, gone=True, what=f"rank {peer} is lost: not heard of for {silence:.0f} s")

    # -- the end ----------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> NoReturn:
        """End the job because this rank has failed; tells the other ranks and does not return.

        A lost rank makes the collectives of its neighbours fail. So a rank that failed waits for the verdict of rank 0,
        which knows the lost ranks.
        """
        if self.rank:
            self.broadcast(Kind.FAILED, reason.encode())
        else:
            self._note_problem(0, gone=False, what=f"rank 0 failed: {reason}")
        if not self._closed.wait(4 * CAUSE_SECONDS):
            self._print_reason(reason)
        self._leave(EXIT_STATUS)

    def _note_problem(self, rank: int, *, gone: bool, what: str) -> None:
        """Note that a rank is gone or has failed; rank 0 ends the job soon, any other rank ends it now."""
        if self._closed.is_set() or rank in self._departed:
            return
        with self._problems_lock:
            first = not self._problems
            self._problems.setdefault(rank, (gone, what))
        if self.rank:
            self._end(what)
        elif first:
            _start("link-end", self._end_soon)

    def _end_soon(self) -> None:
        if not self._closed.wait(CAUSE_SECONDS):
            self._end_everywhere()

    def _end_everywhere(self) -> None:
        """End the job on every rank with the likeliest cause: a rank that is gone, else one that failed."""
        with self._problems_lock:
            gone_first = sorted(self._problems.values(), key=lambda problem: not problem[0])
        reason = f"{gone_first[0][1]} ({self.doing})"
        self.broadcast(Kind.END, reason.encode())
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._print_reason(reason)
        self._closed.set()
        self._leave(EXIT_STATUS)

    def _print_reason(self, reason: str) -> None:
        print(f"workbench: rank {self.rank} of {self.size} ends the job: {reason}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Say farewell and close the connections; from rank 0 this tells the other ranks that the job is done.

        If a rank is lost, the job ends with that reason: a launcher that then asks the others to end must not hide it.
        """
        if not self._closed.is_set():
            if any(gone for gone, _ in self._problems.values()):
                self._end_everywhere()
            self._closed.set()
            self.broadcast(Kind.STOP)
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + FAREWELL_SECONDS
        for reader in self._readers:  # closing a socket with unread messages discards messages that it has sent
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
        EOFError: The connection closed before they arrived.
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

    Rank 0 shares its port, and a secret that keeps strangers out, in one sum over the ranks.

    Args:
        group: All ranks, each of which calls this.
        host: Rank 0's address, see `workbench.engine.distributed.group.leader_host`.
        silence_limit: See `Link`.

    Raises:
        OSError: A rank could not be reached in time.
    """
    rank, size = group.rank(), group.size()
    if rank:
        port, secret = _share(group, 0, bytes(TOKEN_BYTES))
        connection = socket.create_connection((host, port), timeout=JOIN_SECONDS)
        connection.sendall(secret + struct.pack("<I", rank))
        peers = {0: connection}
    else:
        with socket.create_server((host, 0), backlog=size) as server:
            secret = secrets.token_bytes(TOKEN_BYTES)
            _share(group, server.getsockname()[1], secret)
            peers = _accept(server, size, secret)
    for connection in peers.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Link(rank, size, peers, silence_limit=silence_limit)


def _share(group: mx.distributed.Group, port: int, secret: bytes) -> tuple[int, bytes]:
    """Rank 0's port and secret on every rank; all others put zeros into the sum."""
    port, *secret_bytes = sum_over_ranks(group, [port, *secret])
    return port, bytes(secret_bytes)


def _accept(server: socket.socket, size: int, secret: bytes) -> dict[int, socket.socket]:
    """A connection from each rank above 0; connections without the secret are closed."""
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
    """The rank that a new connection announces; None without the secret, or if nothing arrives in time."""
    connection.settimeout(INTRODUCTION_SECONDS)
    try:
        shown = receive_exactly(connection, TOKEN_BYTES + 4)
    except (EOFError, OSError):
        return None
    if not hmac.compare_digest(shown[:TOKEN_BYTES], secret):
        return None
    return struct.unpack("<I", shown[TOKEN_BYTES:])[0]
