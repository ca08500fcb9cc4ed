"""The requests of a trace, in order of arrival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workbench.trace.records import RequestInfo


class Requests(Mapping[str, RequestInfo]):
    """RequestInfo by request id, in order of arrival. May be iterated while the engine adds to it."""

    def __init__(self) -> None:
        self._arrivals: dict[str, tuple[int, RequestInfo]] = {}

    def add(self, info: RequestInfo, num_steps_before: int) -> None:
        """Add a request that comes after so many steps of the trace."""
        self._arrivals[info.request_id] = (num_steps_before, info)

    def arrivals(self) -> list[tuple[int, RequestInfo]]:
        """Each request with the number of steps in the trace before it was added."""
        return list(self._arrivals.values())

    def __getitem__(self, request_id: str) -> RequestInfo:
        return self._arrivals[request_id][1]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._arrivals

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._arrivals))

    def __len__(self) -> int:
        return len(self._arrivals)

    def __repr__(self) -> str:
        return f"requests({', '.join(map(repr, self))})"
