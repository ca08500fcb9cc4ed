"""Settings of a server."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.apps.serve.keys import MAX_PER_MINUTE, ApiKey
from workbench.base.field_checks import integer, number
from workbench.base.served_names import ServedNames, is_address, is_loopback

ANY_ORIGIN = "*"


def is_origin(text: str) -> bool:
    """Whether a text is an origin as browsers send it (scheme, host, perhaps a port), or "*" for any."""
    return text == ANY_ORIGIN or re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", text) is not None


@dataclass(frozen=True)
class ServeSettings:
    """Address, access and limits of a server.

    Attributes:
        host: Address to listen on. One that other machines can reach needs ``api_key`` or ``insecure``.
        port: Port to listen on; 0 takes a free one.
        api_key: Key that clients must send, without a name; None for no such key.
        api_keys: Keys with names, any of which clients may send, such as those of ``read_api_keys``.
        max_requests_per_minute: Maximum number of POST requests per minute for each key without a limit; None for any.
        access_log: File to which a line per request is appended; "-" for standard output; None for no log.
        insecure: Allow an address that other machines can reach without an API key.
        allowed_hosts: Names by which clients may call the server, besides "localhost" and its addresses.
        allowed_origins: Origins of other sites whose pages may call the API from a browser, such as
            "https://app.example.org"; "*" for all, which needs ``api_key`` or ``insecure``.
        max_queue: Maximum number of waiting requests, besides the ``max_num_seqs`` that run; one more gets status 429.
        max_body_bytes: Maximum size of a request's body.
        max_connections: Maximum number of open connections; one more is answered with status 503.
        max_connections_per_client: The same for the connections of one address.
        trusted_proxies: Addresses of reverse proxies: they have no limit per client, and the protocol of
            their clients is taken from ``X-Forwarded-Proto``.
        tls_cert: File with the certificate and its chain (PEM), for https; None for http.
        tls_key: File with its private key; None if ``tls_cert`` holds it.
        header_seconds: Time limit for the arrival of a request's headers.
        prepare_seconds: Time limit of the chat template and the tokenizer for one request.
        drain_seconds: Time that open requests have to finish after SIGTERM.

    Raises:
        ValueError: A value is outside its range, or the server would be open to everyone.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    max_requests_per_minute: float | None = None
    access_log: str | None = None
    insecure: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_body_bytes: int = 1 << 20
    max_connections: int = 1024
    max_connections_per_client: int = 512
    trusted_proxies: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    header_seconds: float = 10.0
    prepare_seconds: float = 10.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        integer("port", self.port, 0, 65535)
        integer("max_queue", self.max_queue, 0, 1 << 20)
        integer("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        integer("max_connections", self.max_connections, 1, 1 << 20)
        integer("max_connections_per_client", self.max_connections_per_client, 1, 1 << 20)
        number("header_seconds", self.header_seconds, 0.1, 3600.0)
        number("prepare_seconds", self.prepare_seconds, 0.1, 3600.0)
        number("drain_seconds", self.drain_seconds, 0.0, 3600.0)
        _ = self.names
        for proxy in self.trusted_proxies:
            if not is_address(proxy):
                raise ValueError(f"trusted_proxies must hold IP addresses, got {proxy!r}")
        for origin in self.allowed_origins:
            if not is_origin(origin):
                raise ValueError(
                    f"allowed_origins must hold origins such as 'https://app.example.org' in lower case, or '*', got "
                    f"{origin!r}"
                )
        keys = self.keys
        if ANY_ORIGIN in self.allowed_origins and not keys and not self.insecure:
            raise ValueError(
                "allowed_origins=['*'] lets every web page that someone on this machine opens use the model: give "
                "--api-key KEY, the origins one by one, or --insecure"
            )
        if self.max_requests_per_minute is not None:
            number("max_requests_per_minute", self.max_requests_per_minute, 0, MAX_PER_MINUTE, low_open=True)
            if not keys:
                raise ValueError("max_requests_per_minute limits each key: give --api-key-file FILE or --api-key KEY")
        if not self.is_local and not keys and not self.insecure:
            raise ValueError(
                f"host={self.host!r} can be reached from other machines: give --api-key KEY, or --insecure to serve "
                "everyone without a key; --api-key-file FILE reads several keys"
            )

    @cached_property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys, with their limits.

        Raises:
            ValueError: ``api_key`` is too short, or a character of it is not printable ASCII.
        """
        unnamed = () if self.api_key is None else (ApiKey.of(self.api_key),)
        default = self.max_requests_per_minute
        return tuple(
            key if key.per_minute is not None else replace(key, per_minute=default)
            for key in (*unnamed, *self.api_keys)
        )

    def tls_context(self) -> ssl.SSLContext | None:
        """The certificate to serve https with, or None.

        Raises:
            ValueError: The certificate or its key cannot be read, or they do not belong together.
        """
        if self.tls_cert is None:
            if self.tls_key is not None:
                raise ValueError("--tls-key needs --tls-cert, the certificate that the key belongs to")
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A key with a passphrase is refused; OpenSSL would ask for it on the terminal.
            context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: "")
        except (OSError, ValueError) as problem:
            raise ValueError(f"--tls-cert {self.tls_cert}, --tls-key {self.tls_key}: {problem}") from None
        return context

    def check_files(self) -> None:
        """Open the certificate and the access log, before a model is loaded for nothing.

        Raises:
            ValueError: One of them cannot be opened.
        """
        self.tls_context()
        if self.access_log not in (None, "-"):
            try:
                open(self.access_log, "ab").close()
            except OSError as problem:
                raise ValueError(f"--access-log {self.access_log}: {problem.strerror or problem}") from None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @cached_property
    def names(self) -> ServedNames:
        """The Host and Origin headers that are answered.

        Raises:
            ValueError: One of ``allowed_hosts`` is not a name.
        """
        return ServedNames(self.host, self.allowed_hosts)
