"""Clients as bytes on a socket, and servers of a thread for them."""

import contextlib
import json
import re
import socket

from serve_helpers import ENGINE, serving

PROMPT = [101, 5, 9, 102, 17, 33, 8, 103]


@contextlib.contextmanager
def server_of(chat_model, **settings):
    """A server of a thread, which keeps 200 steps."""
    from workbench import Engine, EngineConfig

    with Engine(chat_model, EngineConfig(**ENGINE), keep_steps=200) as engine, serving(engine, **settings) as client:
        yield client


def connect(server, data=b"", receive_buffer=None):
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


def get(path, version="1.1"):
    return f"GET {path} HTTP/{version}\r\nHost: 127.0.0.1\r\n\r\n".encode()


def post(path="/v1/completions", **fields):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, **fields})
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def read_until(connection, text, count=1):
    """The bytes up to a text, and those that come with it."""
    received = b""
    while received.count(text) < count:
        part = connection.recv(65536)
        assert part, f"the connection was closed after {received[-200:]}"
        received += part
    return received


def read_to_end(connection):
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    connection.close()
    return b"".join(parts)


def open_dashboard(server, receive_buffer=None, token=None):
    """A connection that asks for the websocket of a page of the dashboard, with the page's token or another one."""
    token = token or re.search(r'"token":"([^"]+)"', server.ask("GET", "/dashboard")[2])[1]
    return connect(
        server,
        b"GET /dashboard/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: bokeh, %b\r\n\r\n" % token.encode(),
        receive_buffer,
    )


def is_idle(server):
    return server.engine.state == "idle" and not server.server.bridge.num_open
