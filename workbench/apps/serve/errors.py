"""Errors in the shape that OpenAI's clients know."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error that is the answer to a request.

    Args:
        status: HTTP status.
        message: The problem and its solution. Clients read it, so it never holds a path or a stack trace.
        kind: OpenAI's ``type``.
        param: Field of the request that is wrong.
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
    """The error of a full queue."""
    return too_busy(f"the server is at its limit of {limit} requests running and waiting")


def too_busy(reason: str, retry_after: int = 1) -> ApiError:
    """The error of a limit that a later request may find free."""
    return ApiError(
        429,
        f"{reason}: try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_after)},
    )


def unavailable(message: str) -> ApiError:
    """The error of a server that accepts no requests."""
    return ApiError(503, message, kind="server_error", code="unavailable", headers={"Retry-After": "5"})


def internal_error() -> ApiError:
    """The error of a server that failed; only its log holds the details."""
    return ApiError(500, "the server failed to answer; its log says why", kind="server_error")
