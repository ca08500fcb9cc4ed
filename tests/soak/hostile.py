"""A server under attack from all sides at once, beside honest streams.

    python tests/soak/hostile.py --minutes 10 --write

Everything on 127.0.0.1 and bounded. Attackers hold connections, send headers and bodies slowly, send garbage, leave in
the middle, pipeline and leave, never read the trace and answers, open dashboards, and tokenize long texts. Sixteen
honest clients stream meanwhile, and every one of their answers must equal the offline one. Prints one line of JSON.
"""

import argparse
import base64
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

ENGINE = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "block_size": 16, "num_blocks": 1024}
MLX_CACHE_BYTES = 1 << 20
"""Limit of MLX's cache of freed buffers. MLX fills its own, 32 MiB on a CPU, over many minutes (see engine.py)."""

WARM_UP_SECONDS = 120
"""Time from which memory must be flat: the trace is full, and the largest bursts of several attacks have coincided."""

RESULT = Path(__file__).parent / "results" / "hostile.json"

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


def load_dashboards(attack, draw):
    """20 pages, and 20 websockets that their browsers do not wait for."""
    connections = [attack.connect() for _ in range(20)]
    for connection in connections:
        connection.sendall(b"GET /dashboard HTTP/1.1\r\n%b\r\n" % HOST)
    connections += [open_dashboard(attack, draw) for _ in range(20)]
    attack.over.wait(draw.random() * 3)
    for connection in connections:
        connection.close()


def never_read_the_dashboard(attack, draw):
    """A page that says that it is loaded, and then takes none of the steps."""
    connection = open_dashboard(attack, draw)
    received = b""
    while b'"ACK"' not in received:
        part = connection.recv(4096)
        if not part or b" 503 " in part:
            return connection.close()
        received += part
    ready = {"type": "event", "name": "document_ready", "values": {"type": "map", "entries": []}}
    event = {"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": ready}
    for part in {"msgid": "1", "msgtype": "PATCH-DOC"}, {}, {"events": [event]}:
        data = json.dumps(part).encode()
        connection.sendall(b"\x81\xfe%b\0\0\0\0%b" % (len(data).to_bytes(2, "big"), data))
    attack.over.wait(10)
    connection.close()


ATTACKS = {
    hold_connections: 1.0, leave_behind_bytes: 0.05, pipeline_and_leave: 0.5, never_read_the_trace: 0.1,
    never_read_an_answer: 0.5, send_slowly: 0.1, send_garbage: 0.05, tokenize_long_texts: 0.5, load_dashboards: 5.0,
    never_read_the_dashboard: 0.1,
}  # fmt: skip


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


def probe_health(port):
    """Print the times of /health on new connections, ten a second, until standard input ends.

    It runs in a separate process: in that of the clients it would wait for their turns of the interpreter.
    """
    over, seconds = threading.Event(), []

    def probe():
        while not over.wait(0.1):
            start = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            seconds.append(time.perf_counter() - start)
            connection.close()

    thread = threading.Thread(target=probe)
    thread.start()
    sys.stdin.read()
    over.set()
    thread.join()
    print(json.dumps(seconds))


def give_way():
    """Let the server and the probe run before this thread: clients have their own processors elsewhere."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


def separate_processors():
    """The processors, if the server can have one for itself: attackers are on other machines."""
    processors = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    return processors if len(processors) > 1 else set()


def start_part(option, port):
    """Another process of this script, which works until ``end_part``."""
    command = [sys.executable, __file__, option, str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end_part(process):
    """End a process of this script; returns what it found."""
    return json.loads(process.communicate(timeout=60)[0])


def be_honest(port, requests, results, over):
    """Stream answers, again where the server had no room, and keep those that are wrong."""
    from many_streams import stream

    give_way()
    while not over.is_set():
        (prompt, max_tokens), expected = requests()
        try:
            tokens, complete = stream(port, prompt, max_tokens)
        except (OSError, http.client.HTTPException, IndexError, KeyError):
            results["refused or cut"] += 1
            over.wait(0.05)
            continue
        if not tokens and not complete:  # status 429 or 503
            results["refused or cut"] += 1
            over.wait(0.05)
            continue
        results["equal" if tokens == expected and complete else "different"] += 1


def tenths(values):
    """Medians of the tenths of a run."""
    return [round(statistics.median(values[len(values) * k // 10 : len(values) * (k + 1) // 10])) for k in range(10)]


def quantiles_ms(seconds):
    cuts = statistics.quantiles([1000 * s for s in seconds], n=100, method="inclusive")
    return {
        "count": len(seconds),
        "p50": round(cuts[49], 2),
        "p99": round(cuts[98], 2),
        "max": round(1000 * max(seconds)),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--attack", type=int, metavar="PORT", help="only attack this port, until standard input ends")
    parser.add_argument("--probe", type=int, metavar="PORT", help="only time /health, until standard input ends")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--together", action="store_true", help="let attackers and clients use the server's processor")
    parser.add_argument("--write", action="store_true", help="keep the result in tests/soak/results")
    options = parser.parse_args()
    if options.attack:
        return attack_all(options.attack)
    if options.probe:
        return probe_health(options.probe)
    from many_streams import make_requests, offline_answers, resident_mib
    from serve_helpers import ServerProcess

    requests = make_requests(500, 24)
    expected, _ = offline_answers(requests)
    processors = set() if options.together else separate_processors()
    if processors:
        os.sched_setaffinity(0, {max(processors)})
    server = ServerProcess(engine=ENGINE, keep_steps=1000, serve={"max_queue": 512}, mlx_cache_bytes=MLX_CACHE_BYTES)
    if processors:  # of this process and of all that it starts from now on
        os.sched_setaffinity(0, processors - {max(processors)})
    draw, lock = random.Random(1), threading.Lock()

    def next_request():
        with lock:
            index = draw.randrange(len(requests))
        return requests[index], expected[index]

    results = Counter()
    memory = []

    def during(seconds, is_probed=True):
        """Let the honest clients stream; returns the times of /health meanwhile."""
        over = threading.Event()
        threads = [
            threading.Thread(target=be_honest, args=(server.port, next_request, results, over))
            for _ in range(options.streams)
        ]
        probe = start_part("--probe", server.port) if is_probed else None
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            memory.append(resident_mib(server.process.pid))
            time.sleep(1)
        latencies = end_part(probe) if probe else []
        over.set()
        for thread in threads:
            thread.join()
        return latencies

    during(5, is_probed=False)  # the first steps load and compile
    calm = during(min(30, options.minutes * 10))
    del memory[:]
    attackers = start_part("--attack", server.port)
    during(WARM_UP_SECONDS, is_probed=False)
    warming_up = tenths(memory)
    del memory[:]
    besieged = during(options.minutes * 60)
    counts = end_part(attackers)
    time.sleep(10)
    used = server.metric("vllm:kv_cache_usage_perc"), server.metric("vllm:num_requests_running")
    last_words = server.end()
    medians = tenths(memory)
    report = {
        "minutes": options.minutes,
        "server_on_separate_processor": bool(processors),
        "attacks": counts,
        "honest": dict(results),
        "health_ms_calm": quantiles_ms(calm),
        "health_ms_attacked": quantiles_ms(besieged),
        "memory_mib_warming_up": warming_up,
        "memory_mib": medians,
        "in_use_afterwards": used,
        "all_blocks_free": f"free blocks {ENGINE['num_blocks'] - 1}" in last_words,
        "log_lines": server.errors.count("\n"),
        "log_bytes": len(server.errors),
        "tracebacks": server.errors.count("Traceback"),
    }
    print(json.dumps(report))
    if options.write:
        RESULT.write_text(json.dumps(report, indent=2) + "\n")
    if report["tracebacks"]:
        print(server.errors[-3000:], file=sys.stderr)


if __name__ == "__main__":
    main()
