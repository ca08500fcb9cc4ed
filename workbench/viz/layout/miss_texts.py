"""Why admissions found no more in the prefix cache, for the views: asked only where the answer can say something."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from workbench.trace.errors import TraceError
from workbench.trace.lines import HASH_DIGITS, RequestInfo
from workbench.trace.records import StepRecord
from workbench.viz import svg

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

_SHOWN = 16
"""Number of characters that are shown of either prompt where two prompts part."""

_BEGINNING = 2
"""Number of prompt tokens that two requests share before the views compare them. One alone can be chance."""


class MissTexts:
    """Follows the requests of a trace.

    The answer takes a replay of the whole prefix cache, and is empty for a request that begins like no other one. A
    trace of such requests is never replayed.
    """

    def __init__(self) -> None:
        self._beginnings: Counter[tuple[int | str, ...]] = Counter()
        self._is_known = True

    def arrive(self, info: RequestInfo) -> None:
        """Add a request before its admission."""
        if beginning := _beginning(info):
            self._beginnings[beginning] += 1

    def of(self, trace: Trace, record: StepRecord) -> dict[str, str]:
        """For each request that a step admits, why it found no more; {} if there is nothing to say, or nobody knows."""
        admitted = [request_id for request_id in record.admitted if self._is_shared(trace, request_id)]
        infos = {request_id: trace.requests.get(request_id) for request_id in record.resumed}
        admitted += [request_id for request_id, info in infos.items() if info is not None and _beginning(info)]
        if not admitted or not self._is_known:
            return {}
        try:
            return {request_id: _in_words(trace, request_id, record.step) for request_id in admitted}
        except (ValueError, TraceError):  # another engine's configuration
            self._is_known = False
            return {}

    def _is_shared(self, trace: Trace, request_id: str) -> bool:
        """Whether another request begins like this one, or has a prompt too short to tell."""
        info = trace.requests.get(request_id)
        if info is None or not (beginning := _beginning(info)):
            return False
        return self._beginnings[beginning] > 1 or (len(beginning) > 1 and self._beginnings[beginning[:1]] > 0)


def _in_words(trace: Trace, request_id: str, step: int) -> str:
    """Why an admission found no more; where two prompts part, with their words instead of token ids."""
    from workbench.analysis.misses import why_missed

    misses = why_missed(trace, request_id)
    why = misses.in_short(step)
    for miss in misses:
        if miss.token_ids is None or miss.culprit is None or miss.why not in why:
            continue
        mine, other = trace.requests[request_id].prompt, trace.requests[miss.culprit].prompt
        same = next((at for at, (a, b) in enumerate(zip(mine, other)) if a != b), min(len(mine), len(other)))
        texts = [svg.shorten(" ".join(prompt[same:].split()), _SHOWN) for prompt in (mine, other)]
        if all(texts):
            words = f"after the same beginning its prompt has “{texts[0]}”, that of {miss.culprit} has “{texts[1]}”"
            return f"{miss.place} was never computed: {words}"
    return why


def _beginning(info: RequestInfo) -> tuple[int | str, ...]:
    """The first tokens of a prompt, or the hash of its first block."""
    first = info.block_hashes[:HASH_DIGITS]
    return info.prompt_token_ids[:_BEGINNING] or ((first,) if first else ())
