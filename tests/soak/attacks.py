"""Clients that attack a server; hostile.py runs them in another process.

Everything on 127.0.0.1 and bounded. They hold connections, send headers and bodies slowly, send garbage and lists
without end, leave in the middle, pipeline and leave, never read the trace and answers, open dashboards, add to their
documents, and tokenize long texts.
"""

import base64
import contextlib
import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter

HOST = b"Host: 127.0.0.1\r\n"


class Attack:
    """Counts what happens to the attackers, and gives each a connection."""

    def __init__(self, port):
        self.port, self.over, self.counts, self.lock = port, threading.Event(), Counter(), threading.Lock()

    def connect(self, buffer=None):
        connection = socket.socket()
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(5)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def count(self, name, number=1):
        with self.lock:
            self.counts[name] += number

    def repeat(self, attack, pause, seed):
        """Run an attack over and over, with a pause that keeps it bounded."""
        draw = random.Random(seed)
        while not self.over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                attack(self, draw)
                self.count(attack.__name__)
            self.over.wait(pause)


def post(path, body):
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (path.encode(), HOST, len(data), data)


def completion(draw, max_tokens=200, **fields):
    prompt = [draw.randrange(3, 120) for _ in range(draw.randint(1, 64))]
    return post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def hold_connections(attack, draw):
    """600 connections, most of them beyond the limit of one client, each with the beginning of a request."""
    held = []
    for _ in range(600):
        with contextlib.suppress(OSError):
            held.append(attack.connect())
            held[-1].sendall(b"GET /h")
    attack.over.wait(3)
    for connection in held:
        connection.close()


def leave_behind_bytes(attack, draw):
    connection = attack.connect()
    connection.sendall(completion(draw, stream=draw.random() < 0.5) + draw.choice((b"\r\n", b"x", b"GET /")))
    attack.over.wait(draw.random() / 10)
    connection.close()


def pipeline_and_leave(attack, draw):
    connection = attack.connect()
    connection.sendall(b"".join(completion(draw, 50) for _ in range(50)))
    attack.over.wait(0.05)
    connection.close()


def never_read_the_trace(attack, draw):
    connection = attack.connect(4096)
    connection.sendall(b"GET /trace/stream HTTP/1.1\r\n%b\r\n" % HOST)
    attack.over.wait(20)
    connection.close()


def never_read_an_answer(attack, draw):
    connection = attack.connect(4096)
    connection.sendall(completion(draw, stream=True, n=4, logprobs=20))
    attack.over.wait(5)
    connection.close()


def send_slowly(attack, draw):
    connection = attack.connect()
    for byte in b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000000\r\n":
        connection.sendall(bytes((byte,)))
        attack.over.wait(0.3)
    connection.close()


def send_garbage(attack, draw):
    connection = attack.connect()
    path = draw.choice((b"/static/%00", b"/" + draw.randbytes(20).replace(b" ", b""), b"/dashboard/ws", b"*"))
    header = draw.choice((b"Origin: http://[", b"Host: [", b"Cookie: =;" + draw.randbytes(9).hex().encode()))
    connection.sendall(b"GET %b HTTP/1.1\r\n%b%b\r\n\r\n%b" % (path, HOST, header, draw.randbytes(200)))
    status = connection.recv(1024)[9:12]
    attack.count(f"status {status.decode(errors='replace')}")
    connection.close()


def tokenize_long_texts(attack, draw):
    connection = attack.connect()
    connection.sendall(post("/tokenize", {"prompt": " w7" * 300_000}))
    attack.over.wait(draw.random() * 2)
    connection.close()


def open_dashboard(attack, draw):
    """A connection that asks for the websocket of a page; names of sessions are not signed, so it makes one up."""
    session = {"session_id": str(draw.random()), "session_expiry": time.time() + 60}
    connection = attack.connect(4096)
    connection.sendall(
        b"GET /dashboard/ws HTTP/1.1\r\n%bUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: bokeh, %b\r\n\r\n"
        % (HOST, base64.urlsafe_b64encode(json.dumps(session).encode()).rstrip(b"="))
    )
    return connection


def send_long_lists(attack, draw):
    """Requests that took the event loop seconds to check, or filled the trace."""
    name, fields = draw.choice(
        (
            ("logit_bias", {"n": 16, "logit_bias": {str(token): 1 for token in range(49_152)}}),
            ("stop_token_ids", {"stop_token_ids": [token % 100 for token in range(109_000)]}),
            ("stop", {"stop": [f"{index:02}" + "a" * 60_000 for index in range(16)]}),
        )
    )
    connection = attack.connect()
    connection.sendall(completion(draw, 4, **fields))
    with contextlib.suppress(TimeoutError):
        attack.count(f"{name}: status {connection.recv(1024)[9:12].decode(errors='replace')}")
    connection.close()


def load_dashboards(attack, draw):
    """20 pages, and 20 websockets that their browsers do not wait for."""
    connections = [attack.connect() for _ in range(20)]
    for connection in connections:
        connection.sendall(b"GET /dashboard HTTP/1.1\r\n%b\r\n" % HOST)
    connections += [open_dashboard(attack, draw) for _ in range(20)]
    attack.over.wait(draw.random() * 3)
    for connection in connections:
        connection.close()


def loaded_dashboard(attack, draw):
    """A websocket whose document is there; None if the server is full."""
    connection = open_dashboard(attack, draw)
    received = b""
    while b'"ACK"' not in received:
        part = connection.recv(4096)
        if not part or b" 503 " in part:
            return connection.close()
        received += part
    return connection


def send_patch(connection, event):
    """Send a change of the document in three frames, masked with zeros."""
    for part in {"msgid": "1", "msgtype": "PATCH-DOC"}, {}, {"events": [event]}:
        data = json.dumps(part).encode()
        connection.sendall(b"\x81\xfe%b\0\0\0\0%b" % (len(data).to_bytes(2, "big"), data))


def never_read_the_dashboard(attack, draw):
    """A page that says that it is loaded, and then takes none of the steps."""
    if (connection := loaded_dashboard(attack, draw)) is not None:
        ready = {"type": "event", "name": "document_ready", "values": {"type": "map", "entries": []}}
        send_patch(connection, {"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": ready})
        attack.over.wait(10)
        connection.close()


def add_to_the_dashboard(attack, draw):
    """A page that adds model after model to its document."""
    if (connection := loaded_dashboard(attack, draw)) is not None:
        for index in range(200):
            title = {"title": "x" * 50_000}
            model = {"type": "object", "name": "Slider", "id": f"x{index}", "attributes": title}
            send_patch(connection, {"kind": "RootAdded", "model": model})
            attack.count("models added")
        connection.close()


ATTACKS = {
    hold_connections: 1.0, leave_behind_bytes: 0.05, pipeline_and_leave: 0.5, never_read_the_trace: 0.1,
    never_read_an_answer: 0.5, send_slowly: 0.1, send_garbage: 0.05, tokenize_long_texts: 0.5, load_dashboards: 5.0,
    never_read_the_dashboard: 0.1, send_long_lists: 0.2, add_to_the_dashboard: 0.5,
}  # fmt: skip


def give_way():
    """Let the server and the probe run before this thread: clients have their own processors elsewhere."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


def attack_all(port):
    """All attacks until standard input ends, so that they end with the process that started them."""
    give_way()
    attack = Attack(port)
    threads = [
        threading.Thread(target=attack.repeat, args=(one, pause, seed))
        for seed, (one, pause) in enumerate(ATTACKS.items())
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    attack.over.set()
    for thread in threads:
        thread.join()
    print(json.dumps(attack.counts))
