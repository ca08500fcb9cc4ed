"""The text of ``workbench serve --check``: who can reach a server, and which addresses need a key."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from workbench.apps.serve.dashboard import DASHBOARD
from workbench.apps.serve.guard import OPEN_PATHS
from workbench.apps.serve.openapi import OPERATIONS
from workbench.apps.serve.settings import ServeSettings
from workbench.base.text import printable

PAGES = (
    ("GET", DASHBOARD, "A live view of the traffic, prompts and answers of everyone; it cannot change anything"),
    ("GET", "/static", "Scripts and styles of the dashboard"),
)
"""Addresses that are not part of the API's description."""


def exposure(settings: ServeSettings, key_file: str | None = None) -> str:
    """Describe the way to the server, its keys and limits, and each address with those for whom it is open."""
    rows = [
        ("address", _address(settings)),
        ("encryption", _encryption(settings)),
        ("host names", settings.names.describe()),
        ("other sites", ", ".join(map(printable, settings.allowed_origins)) or "none"),
        ("trusted proxies", ", ".join(settings.trusted_proxies) or "none"),
        *(("API key", text) for text in _keys(settings)),
        *(("key file", text) for text in _key_file(key_file)),
        ("access log", printable(settings.access_log or "none")),
        ("limits", _limits(settings)),
    ]
    lines = [f"{name:<16} {value}" for name, value in rows]
    operations = [(op.method.upper(), op.path, op.summary) for op in OPERATIONS if not op.rejects]
    by_access: dict[bool, list[str]] = {True: [], False: []}
    for method, path, summary in [*operations, *PAGES]:
        is_open = path in OPEN_PATHS or not settings.keys
        by_access[is_open].append(f"  {method:<4} {path:<22} {summary}")
    reach = "this machine" if settings.is_local else "every machine that can reach this one"
    for is_open, heading in ((True, f"open to {reach}, without a key"), (False, "open to every key")):
        if by_access[is_open]:
            lines += ["", heading, *by_access[is_open]]
    return "\n".join(lines)


def _address(settings: ServeSettings) -> str:
    scheme = "http" if settings.tls_cert is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    reach = "this machine only" if settings.is_local else "every machine that can reach this one"
    return f"{scheme}://{printable(host)}:{settings.port}, {reach}"


def _encryption(settings: ServeSettings) -> str:
    if settings.tls_cert is not None:
        return f"TLS 1.2 or newer, certificate {printable(settings.tls_cert)}"
    if settings.is_local:
        return "none; other machines cannot listen"
    return "none: keys, prompts and answers can be read on the way (give --tls-cert, or use a reverse proxy)"


def _keys(settings: ServeSettings) -> Iterator[str]:
    if not settings.keys:
        yield "none" if settings.is_local else "none: everyone may use the server (--insecure)"
    for key in settings.keys:
        limit = "any number of requests" if key.per_minute is None else f"{key.per_minute:g} POST requests a minute"
        yield f"{key.name or '(without a name)'}: {limit}"


def _key_file(path: str | None) -> Iterator[str]:
    if path is not None:
        others = Path(path).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
        warning = ": other users of this machine can read it (chmod 600)" if others else ""
        yield f"{printable(path)}{warning}"


def _limits(settings: ServeSettings) -> str:
    return (
        f"{settings.max_connections} connections, {settings.max_connections_per_client} of one address; "
        f"{settings.max_queue:,} waiting requests; bodies of {settings.max_body_bytes:,} bytes"
    )
