"""Errors in the shape that OpenAI's clients know."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: What was wrong and what to do; goes to the client, so it never holds a path or a stack trace.
        kind: OpenAI's ``type``.
        param: The field of the request that was wrong.
        code: OpenAI's ``code``.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def too_many_requests(limit: int) -> ApiError:
    """The queue is full."""
    return ApiError(
        429,
        f"the server is at its limit of {limit} requests running and waiting: try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


def unavailable(message: str) -> ApiError:
    """The server takes no requests at the moment."""
    return ApiError(503, message, kind="server_error", code="unavailable", headers={"Retry-After": "5"})


def internal_error() -> ApiError:
    """Something failed here; the details are in the server's log and nowhere else."""
    return ApiError(500, "the server failed to answer; its log says why", kind="server_error")
