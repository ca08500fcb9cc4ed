"""Changes that the server makes in its process: garbage collections, and failures that nobody awaits."""

import asyncio
import gc
import logging
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import panel.io.document
import pytest
from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketClosedError

from workbench.apps.serve import server


def run(coroutine):
    """Run it on another thread: this one may have an event loop, of a browser's tests."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, coroutine).result()


class Node:
    """An object that only a garbage collection can free."""

    def __init__(self):
        self.self = self


@pytest.fixture
def generations(monkeypatch):
    """The generations collected since the server took over."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(panel.io.document, "_garbage_collect", gc.collect)
    before, collected = gc.get_threshold(), []

    def watch(phase, info):
        if phase == "start":
            collected.append(info["generation"])

    server._share_the_interpreter()
    gc.callbacks.append(watch)
    yield collected
    gc.callbacks.remove(watch)
    gc.set_threshold(*before)


def look_for_garbage():
    async def look():
        collecting = asyncio.ensure_future(server._collect_garbage())
        await asyncio.sleep(0)
        collecting.cancel()

    run(look())


def test_only_the_server_collects_older_garbage(generations):
    young = weakref.ref(Node())
    objects = [Node() for _ in range(20_000)]
    assert set(generations) == {0}, "Python collects the youngest generation"
    look_for_garbage()
    assert generations[-1] == 1 and young() is None
    node = Node()
    gc.collect(1)
    old = weakref.ref(node)
    del node
    look_for_garbage()
    assert generations[-1] == 2 and old() is None
    assert len(objects) == 20_000


def test_nothing_is_collected_while_nothing_happens(generations):
    gc.collect()
    del generations[:]
    look_for_garbage()
    panel.io.document._garbage_collect()
    assert not {1, 2} & set(generations)


@pytest.mark.parametrize(
    ("failure", "is_logged"), [(WebSocketClosedError(), False), (StreamClosedError(), False), (ValueError(), True)]
)
def test_a_client_that_leaves_is_no_failure_of_the_server(failure, is_logged, caplog):
    async def fail():
        asyncio.get_running_loop().set_exception_handler(server._report_failure)

        async def raise_it():
            raise failure

        task = asyncio.ensure_future(raise_it())
        await asyncio.wait([task])
        del task
        gc.collect()

    with caplog.at_level(logging.ERROR):
        run(fail())
    assert bool(caplog.records) == is_logged
