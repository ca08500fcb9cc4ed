"""Changes that the server makes in its process: garbage collections, and failures that nobody awaits."""

import asyncio
import gc
import logging
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketClosedError

from workbench.serve import server


def run(coroutine):
    """Run it on another thread: this one may have an event loop, of a browser's tests."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, coroutine).result()


class Node:
    """An object that only a garbage collection can free."""

    def __init__(self):
        self.self = self


def test_only_the_server_collects_all_garbage(monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    before = gc.get_threshold()
    oldest = []

    def watch(phase, info):
        oldest.append(info["generation"] == 2)

    async def collect():
        collecting = asyncio.ensure_future(server._collect_garbage())
        await asyncio.sleep(0)
        collecting.cancel()

    try:
        server._share_the_interpreter()
        node = weakref.ref(Node())
        gc.callbacks.append(watch)
        objects = [Node() for _ in range(100_000)]
        assert oldest and not any(oldest), "Python collects the younger generations"
        run(collect())
        assert node() is None
    finally:
        gc.callbacks.remove(watch)
        gc.set_threshold(*before)
    assert len(objects) == 100_000


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
