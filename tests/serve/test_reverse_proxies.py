"""The configurations of nginx and Caddy in examples/reverse-proxy, in front of a server."""

import asyncio
import contextlib
import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serve_helpers import ENGINE, make_chat_model, serving, wait_for
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from workbench.apps.serve.keys import ApiKey

EXAMPLES = Path(__file__).parents[2] / "examples" / "reverse-proxy"
KEY = "key-of-alice-1"
BEARER = {"Authorization": f"Bearer {KEY}"}
NAME = "workbench.example.org"
CLIENT = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"  # macOS has only one loopback address
LINES = {
    "nginx": ("listen 443 ssl;", "server 127.0.0.1:8000;", "/etc/ssl/workbench/cert.pem", "/etc/ssl/workbench/key.pem"),
    "caddy": (f"{NAME} {{", "reverse_proxy 127.0.0.1:8000 {\n"),
}
"""Lines that the owner of a server changes, and this test, too."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate of this test, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}",
         "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from workbench import Engine, EngineConfig

    log = tmp_path_factory.mktemp("log") / "access.log"
    with (
        Engine(make_chat_model(), EngineConfig(**ENGINE)) as engine,
        serving(
            engine, api_keys=(ApiKey.of(KEY, "alice"),), access_log=str(log), trusted_proxies=("127.0.0.1",),
            allowed_hosts=(NAME,), max_connections_per_client=4,
        ) as client,
    ):  # fmt: skip
        client.log = log
        yield client


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def nginx_options(text, folder):
    (folder / "workbench.conf").write_text(text)
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {temporary} scgi_temp_path {folder}/scgi; include {folder}/workbench.conf; }}\n"
    )
    return ["-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy_options(text, folder):
    (folder / "Caddyfile").write_text(text)
    return ["run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


def configuration(program, port, upstream, certificate):
    """The example with this test's ports and certificate."""
    cert, key = certificate
    values = {
        "nginx": (f"listen 127.0.0.1:{port} ssl;", f"server 127.0.0.1:{upstream};", str(cert), str(key)),
        "caddy": (
            "{\n\tadmin off\n\tauto_https disable_redirects\n}\n\n"
            f"https://127.0.0.1:{port}, https://{NAME}:{port} {{\n\tbind 127.0.0.1\n\ttls {cert} {key}",
            f"reverse_proxy 127.0.0.1:{upstream} {{\n",
        ),
    }
    text = (EXAMPLES / {"nginx": "nginx.conf", "caddy": "Caddyfile"}[program]).read_text()
    for line, value in zip(LINES[program], values[program], strict=True):
        assert text.count(line) == 1, f"{line!r} is no longer a line of the example"
        text = text.replace(line, value)
    return text


class Proxied:
    """Requests through a proxy, from an address that is not a trusted proxy."""

    def __init__(self, port, certificate):
        self.port, self.context = port, ssl.create_default_context(cafile=str(certificate))

    def open(self, method, path, body=None, headers=None):
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=60, context=self.context, source_address=(CLIENT, 0)
        )
        connection.request(method, path, body and json.dumps(body), headers or {})
        return connection, connection.getresponse()

    def ask(self, *request):
        connection, response = self.open(*request)
        answer = response.status, response.headers, response.read().decode()
        connection.close()
        return answer


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def proxy(request, server, certificate, tmp_path_factory):
    program = request.param
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin")  # not every user's PATH has it
    if found is None:
        pytest.skip(f"{program} is not installed (Debian's package {program})")
    folder, port = tmp_path_factory.mktemp(program), free_port()
    text = configuration(program, port, server.port, certificate)
    options = {"nginx": nginx_options, "caddy": caddy_options}[program](text, folder)
    with open(folder / "output", "w+b") as output:
        process = subprocess.Popen(
            [found, *options], stdout=output, stderr=output, env={"PATH": "/usr/bin:/bin", "HOME": str(folder)}
        )
        try:

            def is_up():
                assert process.poll() is None, (folder / "output").read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                    return True

            wait_for(is_up, 60)
            yield Proxied(port, certificate[0])
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # it waits for connections that a failed test left open
                process.kill()
                process.wait(60)


@pytest.mark.repeats(step=2)
def test_answers_keys_and_errors_pass(proxy, server):
    assert proxy.ask("GET", "/health")[0] == 200
    assert proxy.ask("GET", "/v1/models")[0] == 401
    body = {"prompt": [5, 9], "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    status, _, text = proxy.ask("POST", "/v1/completions", body, BEARER)
    direct = server.ask("POST", "/v1/completions", body, BEARER)[2]
    assert status == 200 and json.loads(text)["choices"] == json.loads(direct)["choices"]
    assert proxy.ask("GET", "/v1/models", None, BEARER | {"Host": f"{NAME}:{proxy.port}"})[0] == 200
    status, _, text = proxy.ask("POST", "/tokenize", {"prompt": "x" * (1 << 20)}, BEARER)
    assert status == 413 and "too large" in json.loads(text)["error"]["message"], "the server's own answer"


def test_tokens_are_passed_on_as_they_come(proxy, server):
    """The engine waits for the reader after each step, so an answer that is held back never arrives."""
    read = threading.Semaphore(3)
    remove = server.engine.on_step(lambda record: read.acquire(timeout=20))
    try:
        body = {"prompt": [5, 9], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
        connection, response = proxy.open("POST", "/v1/completions", body, BEARER)
        assert response.status == 200, response.read()
        num_events = 0
        while line := response.readline():
            if line.startswith(b"data: {"):
                num_events += 1
                read.release()
        assert num_events == 12 and line == b""
        connection.close()
    finally:
        remove()
        read.release(100)


def test_the_trace_stays_open_and_ends_with_its_reader(proxy, server):
    bridge = server.server.bridge
    connection, response = proxy.open("GET", "/trace/stream", None, BEARER)
    wait_for(lambda: bridge.step_listeners)
    server.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 3}, BEARER)
    kinds = set()
    while "step" not in kinds:
        line = response.readline()
        if line.startswith(b"data: "):
            kinds.add(json.loads(line[6:])["kind"])
    assert {"meta", "keyframe", "request", "step"} <= kinds
    response.close()
    connection.close()
    wait_for(lambda: not bridge.num_readers)


def test_a_client_that_leaves_ends_its_request(proxy, server):
    bridge = server.server.bridge
    wait_for(lambda: not bridge.num_open)
    aborted = bridge.metrics.finished["abort"]
    steps = threading.Semaphore(0)
    remove = server.engine.on_step(lambda record: steps.acquire(timeout=0.2))
    try:
        body = {"prompt": [5, 9], "max_tokens": 200, "ignore_eos": True, "stream": True}
        connection, response = proxy.open("POST", "/v1/completions", body, BEARER)
        assert response.status == 200, response.read()
        assert response.readline().startswith(b"data: ")
        response.close()
        connection.close()
        wait_for(lambda: bridge.metrics.finished["abort"] == aborted + 1)
    finally:
        remove()
        steps.release(1000)


def test_the_dashboards_cookie_is_secure_and_its_websocket_opens(proxy):
    status, headers, _ = proxy.ask("GET", f"/dashboard?api_key={KEY}")
    assert status == 302 and headers["Set-Cookie"].endswith("; Secure")
    cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
    status, _, page = proxy.ask("GET", "/dashboard", None, cookie)
    token = re.search(r'"token":\s*"([^"]+)"', page)[1]

    async def first_message(**headers):
        url = f"wss://127.0.0.1:{proxy.port}/dashboard/ws"
        request = HTTPRequest(url, headers=headers, connect_timeout=60, ssl_options=proxy.context)
        websocket = await websocket_connect(request, subprotocols=["bokeh", token])
        try:
            return json.loads(await asyncio.wait_for(websocket.read_message(), 60))
        finally:
            websocket.close()

    with ThreadPoolExecutor(1) as pool:  # if Playwright is in use, an event loop runs in this thread
        origin = f"https://127.0.0.1:{proxy.port}"
        assert pool.submit(lambda: asyncio.run(first_message(Origin=origin, **cookie))).result()["msgtype"] == "ACK"
    assert proxy.ask("GET", "/dashboard/ws", None, cookie | {"Origin": "https://evil.example"})[0] == 403


@pytest.mark.skipif(CLIENT == "127.0.0.1", reason="the client needs an address that is not a trusted proxy")
def test_the_access_log_names_the_client_and_not_the_proxy(proxy, server):
    before = len(server.log.read_text().splitlines())
    proxy.ask("GET", "/v1/models", None, BEARER | {"X-Forwarded-For": "6.6.6.6", "User-Agent": "proxied"})

    def lines():  # an earlier connection may be logged meanwhile
        return [line for line in server.log.read_text().splitlines()[before:] if '"proxied"' in line]

    wait_for(lines)
    assert lines()[0].startswith("127.0.0.2 - alice ")


def test_more_clients_than_one_address_may_have_pass(proxy):
    opened = [proxy.open("GET", "/trace/stream", None, BEARER) for _ in range(8)]
    assert [response.status for _, response in opened] == [200] * 8
    for connection, response in opened:
        response.close()
        connection.close()
