"""Serves the playground to this machine alone."""

from __future__ import annotations

import functools
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from workbench.base.served_names import ServedNames

HOST = "127.0.0.1"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval' blob:; worker-src 'self' blob:; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'"
)
"""The page and its worker may load their own files, and nothing else; a test compares it with the page's."""


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = {  # noqa: RUF012  # the base class declares it so
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, names: ServedNames, *args: Any, **options: Any) -> None:
        self._names = names
        super().__init__(*args, **options)

    def parse_request(self) -> bool:
        """Whether a request is well-formed, and for this server."""
        if not super().parse_request():
            return False
        if problem := self._names.refusal(self.headers.get("Host"), self.headers.get("Origin")):
            self.send_error(403, explain=problem)
        elif not unquote(self.path, errors="replace").isprintable():
            self.send_error(400, explain="the address holds a character that no address of this server has")
        else:
            return True
        return False

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def make_server(folder: Path, port: int = 0, names: ServedNames | None = None) -> ThreadingHTTPServer:
    """A server of the files in a folder on 127.0.0.1; ``serve_forever()`` runs it.

    Args:
        folder: The folder.
        port: The port; 0 for a free one.
        names: The Host and Origin headers that are answered; by default those of this machine alone.

    Raises:
        OSError: The port is in use.
    """
    return ThreadingHTTPServer(
        (HOST, port), functools.partial(_Handler, names or ServedNames(HOST), directory=str(folder))
    )
