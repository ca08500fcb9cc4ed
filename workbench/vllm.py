"""The schedulers that record a running vLLM, at the path that vLLM's command line names.

    vllm serve MODEL --scheduler-cls workbench.vllm.RecordingScheduler

See `workbench.trace.recorders.vllm`. vLLM is imported when one of them is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import imported

if TYPE_CHECKING:
    from workbench.trace.recorders.vllm import AsyncRecordingScheduler, RecordingScheduler

__all__ = ["AsyncRecordingScheduler", "RecordingScheduler"]


def __getattr__(name: str) -> Any:
    """One of the schedulers, when it is first used."""
    if name in __all__:
        return imported("workbench.trace.recorders.vllm", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
