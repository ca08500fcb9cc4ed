"""The trace as a stream, and the dashboard's page and websocket."""

import asyncio
import http.client
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from serve_helpers import ENGINE, make_chat_model, serving, wait_for
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from workbench.apps.serve.prometheus import ServerMetrics
from workbench.trace import Supplement, Trace

KEY = "secret-key-1"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server():
    from workbench import Engine, EngineConfig

    with Engine(make_chat_model(), EngineConfig(**ENGINE)) as engine, serving(engine, api_key=KEY) as client:
        yield client


def complete(server, prompt, max_tokens):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    status, _, text = server.ask("POST", "/v1/completions", body, BEARER)
    assert status == 200, text


class StreamReader(threading.Thread):
    """Reads the lines of /trace/stream, up to a step."""

    def __init__(self, server):
        super().__init__()
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.request("GET", "/trace/stream", headers=BEARER)
        self._response = self._connection.getresponse()
        assert self._response.headers["Content-Type"].startswith("text/event-stream")
        self.lines, self.began, self.last_step = [], threading.Event(), None
        self.start()

    def run(self):
        while True:
            event, empty = self._response.readline(), self._response.readline()
            assert event.startswith(b"data: {") and empty == b"\n"
            self.lines.append(event[6:])
            line = json.loads(event[6:])
            if line["kind"] == "keyframe":
                self.began.set()
            if line["kind"] == "step" and line["step"] == self.last_step:
                return self._connection.close()


def same(records):
    return [(r.step, r.chunks, r.block_tables, r.running, r.free_blocks_end, r.finish_reasons) for r in records]


@pytest.mark.parametrize("num_open", [0, 12], ids=["idle", "in the middle"])
def test_the_trace_stream_is_the_trace(server, tmp_path, num_open):
    engine = server.engine
    complete(server, [9, 8, 7], 3)
    wait_for(lambda: engine.state == "idle")
    for i in range(num_open):  # 8 of them run and 4 wait when the reader connects
        engine.add_request([20 + i] * 9, max_tokens=12, ignore_eos=True)
    for _ in range(5 if num_open else 0):
        engine.step()
    first = engine.scheduler.step

    def tell(record):
        """Something becomes known about a step during the next one."""
        engine.trace.add_supplement(Supplement(record.step - 1, "late", {"known_in": record.step}))

    stop_telling = engine.on_step(tell)
    reader = StreamReader(server)
    assert reader.began.wait(60)
    for length in (12, 2):
        complete(server, [5, 6, 7, 8, length], length)
    wait_for(lambda: engine.state == "idle")
    reader.last_step = engine.scheduler.step
    complete(server, [5, 6], 1)
    reader.join(60)
    stop_telling()
    path = tmp_path / "streamed.jsonl"
    path.write_bytes(b"".join(reader.lines))
    streamed, whole = Trace.load(path), engine.trace
    assert streamed[0].step == first and len(streamed) == len(whole) - first
    assert same(streamed) == same(whole[first:]) and streamed.keyframe == whole[first:].keyframe
    # tell() runs after the server's own listener, so what is known in a step may be sent as late as after the next one.
    told = [supplement for supplement in whole[first:].supplements if supplement.step < reader.last_step - 2]
    assert len(told) > 10 and streamed.supplements[: len(told)] == told
    assert len(streamed.requests) == num_open + 3, "earlier requests are not sent"
    assert all(whole.requests[name] == info for name, info in streamed.requests.items())


def sign_in(server):
    """The cookie that a browser gets for the key."""
    status, headers, _ = server.ask("GET", f"/dashboard?api_key={KEY}")
    assert status == 302
    return headers["Set-Cookie"].partition(";")[0]


def test_a_reader_that_leaves_before_the_first_step_gets_no_steps(server, monkeypatch):
    bridge, looks = server.server.bridge, []
    monkeypatch.setattr(bridge.engine, "before_step", looks.append)

    async def follow_and_give_up():
        following = asyncio.ensure_future(bridge.follow_steps(print))
        while not looks:
            await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.wait([following])
        looks[0]()
        await asyncio.sleep(0.01)
        return print in bridge.step_listeners

    assert not asyncio.run_coroutine_threadsafe(follow_and_give_up(), server.loop).result(30)


def test_the_dashboards_websocket_is_on_the_same_port_behind_the_same_guard(server):
    cookie = {"Cookie": sign_in(server)}
    status, _, page = server.ask("GET", "/dashboard", headers=cookie)
    assert status == 200 and KEY not in page
    token = re.search(r'"token":\s*"([^"]+)"', page)[1]

    async def handshake(headers):
        request = HTTPRequest(f"ws://127.0.0.1:{server.port}/dashboard/ws", headers=headers, connect_timeout=60)
        socket = await websocket_connect(request, subprotocols=["bokeh", token])
        try:
            return json.loads(await asyncio.wait_for(socket.read_message(), 60))
        finally:
            socket.close()

    def connect(**headers):
        # In another thread: if Playwright is in use, an event loop runs in this one.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(handshake(headers))).result()

    def rejected(**headers):
        with pytest.raises(HTTPClientError) as error:
            connect(**headers)
        return error.value.code

    own = f"http://127.0.0.1:{server.port}"
    assert rejected() == 401 and rejected(Origin=own) == 401
    assert rejected(Origin="http://evil.example", **cookie) == 403
    assert rejected(Origin=own, Cookie="workbench_api_key=guess") == 401
    assert connect(Origin=own, **cookie)["msgtype"] == "ACK"
    assert connect(**BEARER)["msgtype"] == "ACK"


def test_the_scripts_of_the_page_are_the_servers_own(server):
    cookie = {"Cookie": sign_in(server)}
    page = server.ask("GET", "/dashboard", headers=cookie)[2]
    scripts = re.findall(r'<script[^>]+src="([^"]+)"', page)
    assert scripts and all(not re.match(r"(https?:)?//", script) for script in scripts)
    path = scripts[0] if scripts[0].startswith("/") else f"/{scripts[0]}"
    assert server.ask("GET", path, headers=cookie)[0] == 200 and server.ask("GET", path)[0] == 401


def test_a_model_of_any_name_has_metrics_that_can_be_read():
    scheduler = SimpleNamespace(num_running=1, num_waiting=2, num_free_blocks=3)
    config = SimpleNamespace(
        num_usable_blocks=4, num_blocks=5, block_size=4, enable_prefix_caching=True, num_speculative_tokens=2
    )
    engine = SimpleNamespace(name='a"b\\c\nd', scheduler=scheduler, config=config)
    samples = [line for line in ServerMetrics(engine).render().splitlines() if not line.startswith("# ")]
    assert len(samples) > 20
    for sample in samples:
        assert re.fullmatch(r'vllm:\w+\{model_name="a\\"b\\\\c\\nd",engine="0"(,\w+="[^"]*")*\} [0-9.]+', sample), (
            sample
        )
