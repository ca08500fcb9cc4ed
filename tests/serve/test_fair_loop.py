"""The server's event loop serves a few ready sockets at a time, in turns, and listening ones in every turn."""

import asyncio
import selectors
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from workbench.apps.serve.fair_loop import MAX_READY, FairEventLoop, FairSelector


@pytest.fixture
def ready():
    """Sockets from which a byte can be read, and their file descriptors in order."""
    pairs = [socket.socketpair() for _ in range(3 * MAX_READY)]
    for writer, _ in pairs:
        writer.send(b"x")
    yield sorted((reader for _, reader in pairs), key=socket.socket.fileno)
    for pair in pairs:
        for end in pair:
            end.close()


def test_sockets_take_turns_and_first_ones_are_in_every_turn(ready):
    first, others = ready[-1], ready[:-1]
    with FairSelector() as selector:
        selector.first = frozenset((first.fileno(),))
        for reader in ready:
            selector.register(reader, selectors.EVENT_READ)
        turns = [[key.fileobj for key, _ in selector.select(0)] for _ in range(6)]
    assert all(turn[0] is first and len(turn) == 1 + MAX_READY for turn in turns)
    # Nothing was read, so every socket stays ready and has its turn again.
    assert [reader for turn in turns for reader in turn[1:]] == (3 * others)[: 6 * MAX_READY]


def test_a_few_sockets_are_served_at_once(ready):
    with FairSelector() as selector:
        for reader in ready[:MAX_READY]:
            selector.register(reader, selectors.EVENT_READ)
        assert len(selector.select(0)) == MAX_READY


def test_callbacks_run_between_the_sockets_of_a_burst(ready):
    order = []

    def read(loop, reader):
        reader.recv(1)
        order.append("socket")
        if len(order) == 1:
            loop.call_soon(order.append, "callback")

    async def serve():
        loop = asyncio.get_running_loop()
        for reader in ready:
            loop.add_reader(reader, read, loop, reader)
        while order.count("socket") < len(ready):
            await asyncio.sleep(0)

    def run():
        with asyncio.Runner(loop_factory=FairEventLoop) as runner:
            runner.run(serve())

    with ThreadPoolExecutor(1) as thread:  # a test of a page may have left its event loop in this one
        thread.submit(run).result()
    assert order.index("callback") <= MAX_READY + 1
