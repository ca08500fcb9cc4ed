"""The record of a step, and the trace that holds the records of a run."""

from typing import TYPE_CHECKING

from workbench.ground.attached import attached_functions
from workbench.trace.errors import TraceError
from workbench.trace.file import TraceWriter
from workbench.trace.follower import TraceFollower
from workbench.trace.lines import SCHEMA_VERSION, Keyframe, RequestInfo, Supplement, TraceMeta
from workbench.trace.pool_change import PoolChange
from workbench.trace.records import Chunk, Event, KernelLaunch, StepRecord, WorkItem
from workbench.trace.trace import Trace

if TYPE_CHECKING:
    from workbench.readings.compare import Comparison, compare
    from workbench.readings.fleet import Fleet
    from workbench.readings.narrate import narrate
else:
    __getattr__ = attached_functions(__name__)

__all__ = [
    "SCHEMA_VERSION",
    "Chunk",
    "Comparison",
    "Event",
    "Fleet",
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
    "compare",
    "narrate",
]
