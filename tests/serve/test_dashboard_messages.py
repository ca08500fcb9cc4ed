"""The dashboard is read-only: its websocket takes the messages of a page, and disconnects who sends others."""

import asyncio
import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from raw_clients import is_idle, server_of
from serve_helpers import wait_for
from tornado.websocket import WebSocketClosedError, websocket_connect

from workbench.apps.serve.dashboard_socket import MAX_MESSAGE_BYTES
from workbench.trace import Trace, TraceMeta
from workbench.viz import feed as feeds
from workbench.viz.app import make_app
from workbench.viz.classroom import Classroom
from workbench.viz.feed import Feed

TRACE = Trace(TraceMeta())
SLIDER = {"type": "object", "name": "Slider", "id": "x1", "attributes": {"title": "x" * 1000}}


@pytest.fixture(scope="module")
def server(chat_model):
    with server_of(chat_model) as client:
        yield client


def message(kind, content, **header):
    return [json.dumps({"msgid": "1", "msgtype": kind, **header}), "{}", json.dumps(content)]


def patch(*events):
    return message("PATCH-DOC", {"events": events})


def changed(model, attr, new):
    return {"kind": "ModelChanged", "model": {"id": model}, "attr": attr, "new": new}


PULL = message("PULL-DOC-REQ", {})


class Page:
    """A websocket of the dashboard, its session, and the model that the page shows."""

    def __init__(self, server, socket, session):
        self.server, self.socket, self.session = server, socket, session
        self.document = session.document
        self.view = next(model.id for model in self.document.models if "command" in model.properties())

    def facts(self):
        """The parts of a document that messages could change."""
        view = self.document.get_model_by_id(self.view)
        parts = [root.id for root in self.document.roots], sorted(model.id for model in self.document.models)
        return *parts, self.document.title, view.command, view.cursor, view.step, view.packet, view.tags

    async def send(self, parts):
        for part in parts:
            with contextlib.suppress(WebSocketClosedError):  # it has been disconnected
                await self.socket.write_message(part, binary=isinstance(part, bytes))

    async def is_open(self):
        """Whether the server still answers, after it has taken everything that was sent."""
        while (answer := await asyncio.wait_for(self.socket.read_message(), 20)) is not None:
            if isinstance(answer, str) and '"reqid"' in answer:
                return True
        return False


def with_page(server, work):
    """The result of a coroutine function that is called with a page."""
    token = re.search(r'"token":\s*"([^"]+)"', server.ask("GET", "/dashboard")[2])[1]

    async def main():
        before = {session.id for session in server.server.dashboard.get_sessions("/dashboard")}
        address = f"ws://127.0.0.1:{server.port}/dashboard/ws"
        socket = await websocket_connect(address, subprotocols=["bokeh", token])
        try:
            assert json.loads(await asyncio.wait_for(socket.read_message(), 60))["msgtype"] == "ACK"
            await socket.read_message(), await socket.read_message()  # metadata and content
            sessions = server.server.dashboard.get_sessions("/dashboard")
            (session,) = [session for session in sessions if session.id not in before]
            return await work(Page(server, socket, session))
        finally:
            socket.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(main())).result()


def test_messages_of_a_page_are_taken(server):
    async def work(page):
        browser = next(model.id for model in page.document.models if "dark_mode" in model.properties())
        cursor = {"type": "map", "entries": [["step", 3], ["follow", False], ["request", None]]}
        args = {"type": "map", "entries": [["request_id", "none"]]}
        command = {"type": "map", "entries": [["id", 1], ["name", "explain"], ["args", args]]}
        ready = {"type": "event", "name": "document_ready", "values": {"type": "map"}}
        await page.send(PULL)
        assert await page.is_open()
        for events in (
            [changed(browser, "dark_mode", True), changed(browser, "timezone", "UTC")],
            [{"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": ready}],
            [changed(page.view, "mounted", True)],
            [changed(page.view, "cursor", cursor), changed(page.view, "step", 3)],
            [changed(page.view, "command", command)],
        ):
            await page.send(patch(*events))
            assert await page.is_open(), events
        view = page.document.get_model_by_id(page.view)
        return view.step, view.command["name"]

    assert with_page(server, work) == (3, "explain")


REFUSED = {
    "a root": lambda view: patch({"kind": "RootAdded", "model": SLIDER}),
    "no root": lambda view: patch({"kind": "RootRemoved", "model": {"id": view}}),
    "a title": lambda view: patch({"kind": "TitleChanged", "title": "x" * 1000}),
    "a stream": lambda view: patch(
        {"kind": "ColumnsStreamed", "model": {"id": view}, "attr": "data", "data": {}, "rollover": None}
    ),
    "another property": lambda view: patch(changed(view, "packet", "x" * 1000)),
    "tags of the view": lambda view: patch(changed(view, "tags", "x")),
    "a model as a value": lambda view: patch(changed(view, "command", SLIDER)),
    "a model in a value": lambda view: patch(changed(view, "command", {"type": "map", "entries": [["a", SLIDER]]})),
    "another event": lambda view: patch(
        {"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": {"type": "event", "name": "button_click"}}
    ),
    "another document": lambda view: message("PUSH-DOC", {"doc": {"version": "3", "title": "x", "roots": [SLIDER]}}),
    "a question about the server": lambda view: message("SERVER-INFO-REQ", {}),
    "the document again": lambda view: PULL * 2,
    "parts without end": lambda view: message("PATCH-DOC", {"events": []}, num_buffers=10**9),
    "metadata": lambda view: [PULL[0], json.dumps({"a": "x" * 1000}), PULL[2]],
    "bytes": lambda view: [b"x" * 1000] * 3,
    "no JSON": lambda view: ["["] * 3,
    "a large text": lambda view: ["x" * (MAX_MESSAGE_BYTES + 1)],
    "a deep value": lambda view: [
        part.replace('"DEEP"', '{"type": "map", "entries": [["a", ' * 300 + "1" + "]]}" * 300)
        for part in patch(changed(view, "command", "DEEP"))
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_messages_disconnect_the_client_and_change_nothing(server, name):
    async def work(page):
        before = page.facts()
        await page.send(REFUSED[name](page.view))
        if name != "the document again":  # a valid message, which is answered if the connection is open
            await page.send(PULL)
        is_open = False
        while await page.is_open():
            is_open = name != "the document again"
        return is_open, page.socket.close_code, page.facts() == before

    assert with_page(server, partial(with_time_limit, work)) == (False, 1009 if name == "a large text" else 1008, True)


async def with_time_limit(work, page):
    return await asyncio.wait_for(work(page), 30)


def test_pings_disconnect(server):
    async def work(page):
        page.socket.ping(b"x")
        return await page.is_open(), page.socket.close_code

    assert with_page(server, work) == (False, 1008)


COMMANDS = {
    "start": {}, "step": {}, "pause": {}, "add_request": {"prompt": "w5"}, "abort": {"request_id": "x"},
    "fork": {"at_step": 0}, "add_breakpoint": {"kind": "preemption"}, "engine": {}, "attempt": {},
}  # fmt: skip


def test_commands_do_not_touch_the_engine(server):
    assert server.ask("POST", "/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True})[0] == 200
    wait_for(lambda: is_idle(server))
    engine = server.engine

    def state():
        return engine.scheduler.step, engine.state, len(engine.trace.requests), engine.scheduler.queues.requests

    before = state()

    async def work(page):
        for number, (name, args) in enumerate(COMMANDS.items(), 1):
            entries = [["id", number], ["name", name], ["args", {"type": "map", "entries": list(args.items())}]]
            await page.send(patch(changed(page.view, "command", {"type": "map", "entries": entries})))
            assert await page.is_open()
        return number

    assert with_page(server, work) == 9
    assert state() == before


def test_a_whole_packet_is_made_beside_the_event_loop():
    feed = Feed(lambda: TRACE)
    feed.next_packet()
    assert not feed.is_far_behind()
    feed.handle({"name": "resend", "id": 1})
    assert feed.is_far_behind()


def test_visitors_do_not_move_each_others_cursor():
    trace = Trace(TraceMeta())
    from workbench.viz.app import TracePage

    room = Classroom()
    first, second = (TracePage(Feed(lambda: trace, room=room)) for _ in range(2))
    first.cursor = {"step": 7, "follow": False, "request": "r0"}
    assert first.cursor["step"] == 7 and second.step is None and second.cursor == {}
    control, other = (TracePage(Feed(trace)) for _ in range(2))
    control.cursor = {"step": 7, "follow": False, "request": "r0"}
    assert other.step == 7
    assert callable(make_app(lambda: trace))


def test_questions_of_visitors_are_answered_one_at_a_time(monkeypatch):
    works = []
    monkeypatch.setattr(feeds, "in_background", lambda work, name: works.append(work))
    feed = Feed(lambda: TRACE)
    for number in range(5):
        feed.handle({"name": "tune", "id": number, "args": {"slo": "ttft_p99 < 1"}})
    assert len(works) == 1 and "still being computed" in feed.status()["message"]
    works.pop()()
    feed.handle({"name": "explain", "id": 9, "args": {"request_id": "x"}})
    assert len(works) == 1
