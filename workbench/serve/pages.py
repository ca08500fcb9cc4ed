"""Makes pages of the dashboard one at a time, with a pause after each, so that the event loop serves others in between.

Making a page takes the event loop 30 to 50 milliseconds. A hundred browsers at once would keep /health waiting for all
of their pages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, RequestStartLine, ResponseStartLine

PAUSE = 9.0
"""Pause after a page, as a multiple of the time that it took the event loop."""

MAX_WAITING = 128
"""Maximum number of pages that wait for their turn; one more gets status 503."""


class PageQueue:
    """The turns of pages."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self.num_waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether no more page may wait."""
        return self.num_waiting >= MAX_WAITING

    async def make(self, page: PageInTurn) -> None:
        """Make a page when it is its turn, unless its client has disconnected."""
        self.num_waiting += 1
        try:
            async with self._turn:
                if page.is_wanted:
                    start = time.thread_time()
                    page.make()
                    await asyncio.sleep(0.001)  # ends when the page's turn of the event loop is over
                    await asyncio.sleep(PAUSE * (time.thread_time() - start))
        finally:
            self.num_waiting -= 1


class PageInTurn(HTTPMessageDelegate):
    """Passes on a request for a page, whose handler begins when it is its turn.

    Args:
        delegate: Handles the request.
        queue: The turns.
        on_lost: Called if the client leaves before its page begins.
    """

    def __init__(self, delegate: HTTPMessageDelegate, queue: PageQueue, on_lost: Callable[[], None]) -> None:
        self._delegate = delegate
        self._queue = queue
        self._on_lost = on_lost
        self.is_wanted = True
        self.is_begun = False

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        """Pass on the headers."""
        return self._delegate.headers_received(start_line, headers)

    def finish(self) -> None:
        """Wait for the page's turn."""
        self._making = asyncio.ensure_future(self._queue.make(self))

    def make(self) -> None:
        """Begin the page."""
        self.is_begun = True
        self._delegate.finish()

    def on_connection_close(self) -> None:
        """Leave the page out if it has not begun."""
        self.is_wanted = False
        if not self.is_begun:
            self._on_lost()
        self._delegate.on_connection_close()
