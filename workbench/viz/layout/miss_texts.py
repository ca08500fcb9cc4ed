"""Why admissions found no more in the prefix cache, for the views: asked only where the answer can say something."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from workbench.trace.errors import TraceError
from workbench.trace.lines import RequestInfo
from workbench.trace.records import StepRecord

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

_BEGINNING = 2
"""Number of prompt tokens that two requests share before the views compare them. One alone can be chance."""


class MissTexts:
    """Follows the requests of a trace.

    The answer takes a replay of the whole prefix cache, and is empty for a request that begins like no other one. A
    trace of such requests is never replayed.
    """

    def __init__(self) -> None:
        self._beginnings: Counter[tuple[int, ...]] = Counter()
        self._is_known = True

    def arrive(self, info: RequestInfo) -> None:
        """Add a request before its admission."""
        if info.prompt_token_ids:
            self._beginnings[_beginning(info)] += 1

    def of(self, trace: Trace, record: StepRecord) -> dict[str, str]:
        """For each request that a step admits, why it found no more; {} if there is nothing to say, or nobody knows."""
        admitted = [*filter(lambda request_id: self._is_shared(trace, request_id), record.admitted), *record.resumed]
        if not admitted or not self._is_known:
            return {}
        try:
            return {request_id: trace.why_missed(request_id).in_short(record.step) for request_id in admitted}
        except (ValueError, TraceError):  # another engine's configuration
            self._is_known = False
            return {}

    def _is_shared(self, trace: Trace, request_id: str) -> bool:
        """Whether another request begins like this one, or has a prompt too short to tell."""
        info = trace.requests.get(request_id)
        if info is None or not info.prompt_token_ids:
            return False
        tokens = _beginning(info)
        return self._beginnings[tokens] > 1 or self._beginnings[tokens[:1]] > 0


def _beginning(info: RequestInfo) -> tuple[int, ...]:
    return tuple(info.prompt_token_ids[:_BEGINNING])
