"""What the operator of a server chooses."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from workbench.engine.field_checks import integer, number

LOOPBACK_NAMES = ("localhost",)


@dataclass(frozen=True)
class ServeSettings:
    """Address, access and limits of a server.

    Attributes:
        host: Address to listen on. Anything but this machine's own needs ``api_key`` or ``insecure``.
        port: Port to listen on; 0 takes a free one.
        api_key: What clients must present; None asks for nothing.
        insecure: Listen on an address that others can reach without an API key.
        allowed_hosts: Names, besides this machine's addresses and "localhost", by which clients may call the server.
        max_queue: Requests that may wait beyond the ``max_num_seqs`` that run; one more gets status 429.
        max_body_bytes: Size of a request's body at most.
        prepare_seconds: Time a chat template and the tokenizer may take for one request.
        drain_seconds: Time that open requests have to end after SIGTERM.

    Raises:
        ValueError: A value is outside its range, or the server would be open to everyone.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    max_queue: int = 256
    max_body_bytes: int = 1 << 20
    prepare_seconds: float = 10.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        integer("port", self.port, 0, 65535)
        integer("max_queue", self.max_queue, 0, 1 << 20)
        integer("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        number("prepare_seconds", self.prepare_seconds, 0.1, 3600.0)
        number("drain_seconds", self.drain_seconds, 0.0, 3600.0)
        if self.api_key is not None and (len(self.api_key) < 8 or not self.api_key.isascii()):
            raise ValueError("api_key must have at least 8 characters, all of them ASCII")
        if not self.is_local and self.api_key is None and not self.insecure:
            raise ValueError(
                f"host={self.host!r} can be reached from other machines: give --api-key KEY, "
                "or --insecure to serve everyone who can reach it"
            )

    @property
    def is_local(self) -> bool:
        """Only this machine can connect."""
        return self.host in LOOPBACK_NAMES or (is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)


def is_address(host: str) -> bool:
    """Whether a host is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
