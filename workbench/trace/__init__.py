"""The record of a step, and the trace that holds the records of a run."""

from typing import TYPE_CHECKING, Any

from workbench.base.on_demand import imported

if TYPE_CHECKING:
    from workbench.trace.errors import TraceError
    from workbench.trace.file import TraceWriter
    from workbench.trace.follower import TraceFollower
    from workbench.trace.lines import SCHEMA_VERSION, Keyframe, RequestInfo, Supplement, TraceMeta
    from workbench.trace.pool_change import PoolChange
    from workbench.trace.records import Chunk, Event, KernelLaunch, StepRecord, WorkItem
    from workbench.trace.trace import Trace

_NAMES = {
    "errors": ("TraceError",),
    "file": ("TraceWriter",),
    "follower": ("TraceFollower",),
    "lines": ("SCHEMA_VERSION", "Keyframe", "RequestInfo", "Supplement", "TraceMeta"),
    "pool_change": ("PoolChange",),
    "records": ("Chunk", "Event", "KernelLaunch", "StepRecord", "WorkItem"),
    "trace": ("Trace",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "SCHEMA_VERSION",
    "Chunk",
    "Event",
    "KernelLaunch",
    "Keyframe",
    "PoolChange",
    "RequestInfo",
    "StepRecord",
    "Supplement",
    "Trace",
    "TraceError",
    "TraceFollower",
    "TraceMeta",
    "TraceWriter",
    "WorkItem",
]


if not TYPE_CHECKING:  # type checkers see the imports above

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: a scheduler needs records, and no files of them."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = imported(_HOMES[name], name)
        return value
