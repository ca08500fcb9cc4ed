"""Requests by the beginning of their id: ids of servers are long."""

from __future__ import annotations

from collections.abc import Collection

from workbench.trace.errors import TraceError

MAX_NAMED = 5
"""Maximum number of ids in a message."""


def find_request(request_ids: Collection[str], name: str) -> str:
    """The request that is called so, or the only one whose id begins so.

    Args:
        request_ids: Ids of the requests there are.
        name: An id, or the beginning of one.

    Raises:
        TraceError: There is no such request, or several ids begin so; the message lists them.

    Example:
        >>> find_request(["chatcmpl-81f", "chatcmpl-9e2"], "chatcmpl-8")
        'chatcmpl-81f'
    """
    if name in request_ids:
        return name
    matches = [request_id for request_id in request_ids if name and request_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    listed = matches or list(request_ids)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    ids = (", ".join(listed[:MAX_NAMED]) or "none") + more
    if matches:
        raise TraceError(f"request {name!r} is the beginning of {len(matches)} ids: {ids}; give more of the id")
    raise TraceError(f"the trace has no request {name!r}; it has {ids}")
