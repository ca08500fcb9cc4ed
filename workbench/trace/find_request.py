"""Requests by the beginning of their id: ids of servers are long."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import NoReturn, TypeVar

from workbench.base.field_checks import suggestion
from workbench.base.text import printable
from workbench.trace.errors import TraceError

V = TypeVar("V")

TRACE = "the trace"
"""The place of the requests that `find_request` finds."""

MAX_NAMED = 5
"""Maximum number of ids in a message."""

MAX_COMPARED = 10_000
"""Maximum number of ids among which a similar one is looked for."""


class UnknownRequest(TraceError, KeyError):
    """There is no request of this id; the message says which ones there are."""

    def __str__(self) -> str:
        return BaseException.__str__(self)  # that of a KeyError is in quotes


class ByRequest(dict[str, V]):
    """A dict by request id, which says what it has when it is asked for an id that it has not.

    Attributes:
        place: Its place, for that message.
    """

    place = TRACE

    def __missing__(self, request_id: str) -> NoReturn:
        raise UnknownRequest(_unknown(self, request_id, self.place))


def find_request(request_ids: Collection[str], name: str) -> str:
    """The request that is called so, or the only one whose id begins so.

    Args:
        request_ids: Ids of the requests there are.
        name: An id, or the beginning of one.

    Raises:
        UnknownRequest: There is no such request; the message lists those that there are.
        TraceError: Several ids begin so; the message lists them.

    Example:
        >>> find_request(["chatcmpl-81f", "chatcmpl-9e2"], "chatcmpl-8")
        'chatcmpl-81f'
    """
    if name in request_ids:
        return name
    matches = [request_id for request_id in request_ids if name and request_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = listed(matches)
        raise TraceError(f"request {name!r} is the beginning of {len(matches)} ids: {ids}; give more of the id")
    raise UnknownRequest(_unknown(request_ids, name))


def listed(request_ids: Collection[str]) -> str:
    """The first of some ids, and the number of the others."""
    more = f" and {len(request_ids) - MAX_NAMED:,} more" if len(request_ids) > MAX_NAMED else ""
    return (", ".join(map(printable, islice(request_ids, MAX_NAMED))) or "none") + more


def _unknown(request_ids: Collection[str], name: object, place: str = TRACE) -> str:
    likely = suggestion(name, islice(request_ids, MAX_COMPARED))
    every = ""
    if place == TRACE and len(request_ids) > MAX_NAMED:
        every = f"; list(trace.requests) or 'workbench trace explain FILE --slowest {len(request_ids)}' lists all"
    return f"{place} has no request {name!r}{likely}; it has {listed(request_ids)}{every}"
