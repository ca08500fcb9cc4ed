"""/trace/stream: the lines of a trace file as server-sent events, from the next step on."""

from __future__ import annotations

import asyncio

from workbench.apps.serve.errors import unavailable
from workbench.apps.serve.handlers import ApiHandler
from workbench.trace import RequestInfo, StepRecord
from workbench.trace.line_codec import encode_line
from workbench.trace.lines import Keyframe, TraceLine

POLL_SECONDS = 0.5
"""Interval at which an idle stream sends what has become known about earlier steps."""

MAX_READERS = 32
"""Maximum number of readers; each may be some MiB behind."""


class TraceStream(ApiHandler):
    """Sends the state before the next step, then every step when it is done.

    Lines go straight into the connection, which holds a bounded number of bytes and cuts off a reader that is too far
    behind. No queue grows for a reader that does not read.
    """

    async def get(self) -> None:
        """Follow the engine until the reader disconnects."""
        engine = self.bridge.engine
        if self.bridge.num_readers >= MAX_READERS:
            raise unavailable(f"the trace already has {MAX_READERS} readers, the maximum: try again later")
        self.bridge.num_readers += 1
        self._early: list[tuple[StepRecord, list[RequestInfo]]] | None = []
        opening = asyncio.ensure_future(self.bridge.follow_steps(self._take))
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            self.start_events()
            self.send_event(_line(engine.trace.meta))
            await asyncio.wait([opening, gone], return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                self._begin(*opening.result())
            while not self.gone.is_set():
                self._send_supplements()
                await asyncio.wait([gone], timeout=POLL_SECONDS)
        finally:
            opening.cancel()
            gone.cancel()
            self.bridge.num_readers -= 1
            if self._take in self.bridge.step_listeners:
                self.bridge.step_listeners.remove(self._take)

    def _begin(self, open_requests: list[RequestInfo], keyframe: Keyframe) -> None:
        """Send the state before the first step, and the steps that have ended since."""
        # As one piece: a large state is not a reason to cut off a reader.
        self.send_event(b"\n\ndata: ".join([*map(_line, open_requests), _line(keyframe)]))
        self._sent_requests = {info.request_id for info in open_requests}
        self._sent_supplements: set[tuple[int, str]] = set()
        self._first_step = self._next_step = keyframe.step
        early, self._early = self._early or [], None
        for record, arrivals in early:
            self._take(record, arrivals)

    def _take(self, record: StepRecord, arrivals: list[RequestInfo]) -> None:
        """Send a step and the requests that arrived before it."""
        if self._early is not None:
            self._early.append((record, arrivals))
            return
        for info in arrivals:
            if info.request_id not in self._sent_requests:
                self.send_event(_line(info))
        self._sent_requests.difference_update(record.arrived)
        self.send_event(self.bridge.encoded(record))
        self._next_step = record.step + 1
        self._send_supplements()

    def _send_supplements(self) -> None:
        """Send what has become known about steps that have been sent."""
        known = {(found.step, found.name): found for found in self.bridge.engine.trace.supplements}
        for key, supplement in known.items():
            if self._first_step <= supplement.step < self._next_step and key not in self._sent_supplements:
                self.send_event(_line(supplement))
                self._sent_supplements.add(key)
        self._sent_supplements &= known.keys()  # an engine that forgets its oldest steps forgets theirs too


def _line(line: TraceLine) -> bytes:
    return encode_line(line).rstrip(b"\n")
