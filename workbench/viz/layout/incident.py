"""Facts about a recording that a view cannot derive from the columns: causes, common properties, and stalls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.trace.errors import TraceError

if TYPE_CHECKING:
    from workbench.trace.trace import Trace


def incident_facts(trace: Trace) -> dict[str, Any]:
    """The answer of ``trace.incident`` as plain data.

    Returns:
        ``slow``: for each request its id, the cause of most of its time to first token with the requests behind it, and
        the share of that part in [0, 1]; ``apart``: sentences; ``stalls``: step and sentence of each, and the
        seconds that its contents do not explain; ``never``: ids of requests that nothing will serve.
    """
    from workbench.analysis.incident import incident

    try:
        found = incident(trace)
    except (ValueError, TraceError):  # durations or settings that no rule explains
        return {"slow": [], "apart": [], "stalls": [], "never": []}
    return {
        "slow": [(one.request_id, one.cause, one.share, one.culprits) for one in found.slow],
        "apart": [str(difference) for difference in found.apart],
        "stalls": [(stall.step, str(stall), stall.excess) for stall in found.stalls],
        "never": found.never_served,
    }
