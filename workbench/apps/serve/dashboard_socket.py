"""The websocket of the dashboard: it takes the messages that a page sends, and no others.

Bokeh's protocol lets a page change any part of its document on the server: add roots, replace the document, stream
data. A page of ours asks for its document once and then sets a few properties: the place of its cursor, a command, and
facts about the browser. Each of Bokeh's messages is three texts: header, metadata and content.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from panel.io.server import WSHandler

MAX_MESSAGE_BYTES = 1 << 14
"""Maximum size of a text."""

MAX_DEPTH = 5
"""Maximum number of mappings within each other in a value; a command that repeats another one has five."""

POLICY_VIOLATION = 1008

Scalar = None | bool | int | float | str


class Map(msgspec.Struct, forbid_unknown_fields=True, tag="map", tag_field="type"):
    """A mapping as Bokeh writes it."""

    entries: list[tuple[str, Scalar | Map]] = []

    def depth(self) -> int:
        """Number of mappings within each other."""
        return 1 + max((value.depth() for _, value in self.entries if isinstance(value, Map)), default=0)


class Model(msgspec.Struct, forbid_unknown_fields=True):
    """A reference to a part of the document."""

    id: str


class ModelChanged(msgspec.Struct, forbid_unknown_fields=True, tag="ModelChanged", tag_field="kind"):
    """The view, or the browser that shows it, has set a property."""

    model: Model
    attr: Literal[
        "command", "cursor", "mounted", "step",
        "dark_mode", "device_pixel_ratio", "language", "timezone", "timezone_offset", "webdriver", "webgl",
    ]  # fmt: skip
    new: Scalar | Map


class DocumentReady(msgspec.Struct, forbid_unknown_fields=True, tag="event", tag_field="type"):
    """The page has been drawn for the first time."""

    name: Literal["document_ready"]
    values: Map


class MessageSent(msgspec.Struct, forbid_unknown_fields=True, tag="MessageSent", tag_field="kind"):
    """An event of the document."""

    msg_type: Literal["bokeh_event"]
    msg_data: DocumentReady


class Patch(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a message that changes the document."""

    events: Annotated[list[ModelChanged | MessageSent], msgspec.Meta(min_length=1, max_length=16)]


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """The header of a message; it announces no further parts."""

    msgid: str
    msgtype: Literal["PULL-DOC-REQ", "PATCH-DOC"]


class Empty(msgspec.Struct, forbid_unknown_fields=True):
    """An empty mapping."""


class DashboardSocket(WSHandler):
    """Passes on the messages of a page, and disconnects a client that sends anything else."""

    _parts: tuple[str | bytes, ...] = ()
    _has_document = False

    def open(self) -> None:
        """Ask for the session that the client's token names, or disconnect a client whose token is none of ours."""
        try:
            super().open()
        except Exception as problem:  # a token is anything that a client sends
            self._refuse(f"{problem}")

    async def on_message(self, fragment: str | bytes) -> None:
        """Take a part of a message, and pass on the message when it is complete."""
        # Frames that have arrived together would otherwise be one turn of the event loop.
        await asyncio.sleep(0)
        try:
            if self.connection is None:
                raise ValueError("a message before the session's acknowledgement")
            parts = (*self._parts, fragment)
            if len(parts) < 3:
                self._parts = parts
                return
            self._parts = ()
            self._check(*parts)
        except (ValueError, RecursionError) as problem:  # msgspec's errors are ValueErrors
            self._refuse(f"{problem}")
            return
        for part in parts:
            await super().on_message(part)

    def _check(self, header: str | bytes, metadata: str | bytes, content: str | bytes) -> None:
        kind = msgspec.json.decode(header, type=Header).msgtype
        msgspec.json.decode(metadata, type=Empty)
        if kind == "PATCH-DOC":
            for event in msgspec.json.decode(content, type=Patch).events:
                if isinstance(event, ModelChanged) and isinstance(event.new, Map) and event.new.depth() > MAX_DEPTH:
                    raise ValueError(f"{event.attr} holds more than {MAX_DEPTH} mappings within each other")
            return
        msgspec.json.decode(content, type=Empty)
        if self._has_document:
            raise ValueError("a page asks for its document once")
        self._has_document = True

    def on_ping(self, data: bytes) -> None:
        """Disconnect: a page cannot send pings, and each would be answered."""
        self._refuse("a page sends no pings")

    def _refuse(self, reason: str) -> None:
        connection = self.ws_connection
        if connection is not None and connection.stream is not None:
            stream = connection.stream
            self.close(POLICY_VIOLATION, reason.encode()[:120].decode(errors="ignore"))
            stream.close()  # nothing more is read
