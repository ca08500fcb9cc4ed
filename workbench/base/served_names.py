"""The Host and Origin headers that a server answers: how every server of the package keeps pages of other sites out.

A web page elsewhere can point its own name at 127.0.0.1 ("DNS rebinding") and then read what a server on this machine
answers. The browser still sends the page's name as Host, so a server answers its own names alone. Browsers also let any
page open a websocket to any server, and name the page's site as Origin.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

LOOPBACK_NAMES = ("localhost",)

HOST_REFUSED = "this Host is not served: call the server by its address, or start it with --allow-host NAME"

ORIGIN_REFUSED = "this Origin is not served: only the server's own pages may call it from a browser"

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def is_address(host: str) -> bool:
    """Whether a host is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is this machine as only it can call itself."""
    return host in LOOPBACK_NAMES or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_any(host: str) -> bool:
    """Whether a host stands for all addresses of this machine."""
    return host == "" or (is_address(host) and ipaddress.ip_address(host).is_unspecified)


def own_addresses() -> list[str]:
    """The IPv4 addresses by which other machines may reach this one, the one towards the gateway first.

    Nothing is sent: connecting a datagram socket only asks the routing table. Without psutil the others are those of
    this machine's name, which leaves out a hotspot's.
    """
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address of no machine
        found.append(probe.getsockname()[0])
    with contextlib.suppress(ImportError, OSError):
        import psutil

        interfaces = psutil.net_if_addrs().values()
        found += [each.address for interface in interfaces for each in interface if each.family == socket.AF_INET]
    with contextlib.suppress(OSError):
        found += [entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return [address for address in dict.fromkeys(map(str, found)) if not is_loopback(address)]


def reachable_origins(host: str, port: int) -> list[str]:
    """The beginnings of a server's addresses, such as "http://192.0.2.7:5006", by which other machines may reach it.

    Args:
        host: The address, or its name, on which it listens.
        port: The port on which it listens.
    """
    names = own_addresses() if is_any(host) else [] if is_loopback(host) else [host]
    return [f"http://{f'[{name}]' if ':' in name else name}:{port}" for name in names]


@dataclass(frozen=True)
class ServedNames:
    """The names of one server.

    Attributes:
        listens_on: The address, or its name, on which it listens. A server that other machines can reach is called by
            any of this machine's addresses, some of which only a router knows, so all addresses are served; no page
            can rebind one.
        allowed: Other names by which clients may call it, such as that of a proxy in front of it.

    Raises:
        ValueError: One of ``allowed`` is not a name.
    """

    listens_on: str = "127.0.0.1"
    allowed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.allowed:
            if not (_NAME.fullmatch(name) or is_address(name)):
                raise ValueError(
                    f"--allow-host takes names such as hub.example.org, without a scheme and a port, got {name[:100]!r}"
                )

    def serves_host(self, host: str) -> bool:
        """Whether a Host header, with a port or without, names this server."""
        return self._is_own(_without_port(host))

    def serves_origin(self, origin: str, host: str) -> bool:
        """Whether an Origin header is that of this server's own pages.

        Args:
            origin: The header, such as "http://127.0.0.1:5006".
            host: The Host header of the same request.
        """
        try:
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:  # such as "http://[", which no browser sends
            return False
        if netloc == "":
            return False
        # A proxy may pass on its own name as Origin and the server's as Host.
        return netloc == host.lower() or _without_port(netloc) in map(str.lower, self.allowed)

    def refusal(self, host: str | None, origin: str | None) -> str:
        """Why a request with these headers is refused, or "" if it is served."""
        if not self.serves_host(host or ""):
            return HOST_REFUSED
        if origin is not None and not self.serves_origin(origin, host or ""):
            return ORIGIN_REFUSED
        return ""

    def describe(self) -> str:
        """The names as a list for a person."""
        own = ("loopback addresses",) if is_loopback(self.listens_on) else ("IP addresses",)
        return ", ".join((*own, *LOOPBACK_NAMES, *self.allowed))

    def _is_own(self, name: str) -> bool:
        if is_loopback(name) or name in map(str.lower, (self.listens_on, *self.allowed)):
            return True
        return is_address(name) and not is_loopback(self.listens_on)


def _without_port(host: str) -> str:
    """The name in a Host header, without its port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
