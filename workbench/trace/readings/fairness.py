"""The service that tenants got, and how even it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workbench.trace import RequestInfo, Trace


def jain_index(values: Iterable[float]) -> float:
    """Jain's fairness index: 1 if all values are equal, 1/n if one of n has everything (Jain, Chiu and Hawe, 1984).

    Raises:
        ValueError: There is no value, or one is negative.

    Example:
        >>> jain_index([3, 3, 3]), jain_index([1, 0, 0, 0])
        (1.0, 0.25)
    """
    found = list(values)
    if not found or min(found) < 0:
        raise ValueError(f"the index needs values of 0 or more, got {found}")
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


def service(
    trace: Trace,
    tenant: Callable[[RequestInfo], str],
    *,
    output_weight: float = 2.0,
    until: float = float("inf"),
) -> dict[str, float]:
    """Tokens that each tenant was served: prompt tokens, and output tokens with their weight.

    Args:
        trace: The run.
        tenant: The tenant of a request.
        output_weight: Weight of an output token.
        until: Seconds since the start; steps that end later do not count.

    Example:
        >>> from workbench import service, simulate
        >>> requests = [{"id": name, "prompt": {"len": 20}, "max_tokens": 5} for name in ("a1", "a2", "b1")]
        >>> service(simulate({"requests": requests}), lambda request: request.request_id[0])
        {'a': 60.0, 'b': 30.0}
    """
    served = {tenant(info): 0.0 for info in trace.requests.values()}
    for step in trace:
        if step.end > until:
            break
        for chunk in step.chunks:
            whose = tenant(trace.requests[chunk.request_id])
            prompt = 0 if chunk.arm == "decode" else chunk.num_tokens - chunk.num_recomputed_tokens
            served[whose] += prompt + output_weight * len(chunk.accepted)
    return served
