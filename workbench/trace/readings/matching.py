"""Find the same requests in two runs, whose ids may differ: vLLM appends random characters to a client's id."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from workbench.trace.errors import TraceError

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""The random end of a request id in vLLM, such as "-8cbdd319" in "cmpl-bench-0-0-8cbdd319"."""

MIN_MATCHED = 0.5
"""Minimum fraction of the requests of both traces that have to be found in the other one."""


class Matching(NamedTuple):
    """Requests of two traces that are the same.

    Attributes:
        pairs: Ids in the first and in the second trace, in order of arrival in the first.
        note: The way in which they were found, and the number of those that were not; "" if all ids are equal.
    """

    pairs: tuple[tuple[str, str], ...]
    note: str


def match_requests(a: Trace, b: Trace) -> Matching:
    """The requests that two traces share: by id, by id without vLLM's random end, or by order of arrival and length.

    Raises:
        TraceError: Neither way finds most of the requests.
    """
    if not a.requests.keys() - b.requests.keys() and not b.requests.keys() - a.requests.keys():
        return Matching(tuple((request_id, request_id) for request_id in a.requests), "")
    by_id = _by_stripped_id(a, b)
    for pairs, way in ((by_id, "by id without its random end"), (_by_arrival(a, b), "by arrival and length")):
        if pairs and len(pairs) >= MIN_MATCHED * max(len(a.requests), len(b.requests)):
            num_missing = len(a.requests) + len(b.requests) - 2 * len(pairs)
            left_out = f"; {num_missing} requests that only one run has are left out" if num_missing else ""
            return Matching(tuple(pairs), f"{len(pairs)} requests matched {way}{left_out}")
    only = [
        f"only {name} has {', '.join(map(repr, missing[:3]))}{' and others' if len(missing) > 3 else ''}"
        for name, one, other in (("A", a, b), ("B", b, a))
        if (missing := [request_id for request_id in one.requests if request_id not in other.requests])
    ]
    if a.is_part or b.is_part:
        held = f"{a.steps_in_words} of A and {b.steps_in_words} of B"
        raise TraceError(f"{held} have different requests ({'; '.join(only)}): compare the whole runs")
    raise TraceError(f"the traces hold different requests ({'; '.join(only)}): compare runs of the same workload")


def _by_stripped_id(a: Trace, b: Trace) -> list[tuple[str, str]]:
    """Pairs whose ids are equal without the random end; only ids that are then unique in their trace."""
    if not any(RANDOM_SUFFIX.search(request_id) for trace in (a, b) for request_id in trace.requests):
        return []
    in_b = _stripped(b)
    return [(found, in_b[name]) for name, found in _stripped(a).items() if name in in_b]


def _stripped(trace: Trace) -> dict[str, str]:
    names: defaultdict[str, list[str]] = defaultdict(list)
    for request_id in trace.requests:
        names[RANDOM_SUFFIX.sub("", request_id)].append(request_id)
    return {name: found[0] for name, found in names.items() if len(found) == 1}


def _by_arrival(a: Trace, b: Trace) -> list[tuple[str, str]]:
    """Pairs in order of arrival among requests of equal prompt length and limit, if their ids are not the client's."""
    if any(request_id in b.requests for request_id in a.requests):
        return []
    waiting: defaultdict[tuple[int, int], deque[str]] = defaultdict(deque)
    for info in sorted(b.requests.values(), key=lambda info: (info.arrival_step, info.arrival_time)):
        waiting[info.num_prompt_tokens, info.max_tokens].append(info.request_id)
    pairs = []
    for info in sorted(a.requests.values(), key=lambda info: (info.arrival_step, info.arrival_time)):
        if same := waiting[info.num_prompt_tokens, info.max_tokens]:
            pairs.append((info.request_id, same.popleft()))
    return pairs
