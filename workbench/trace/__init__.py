"""The record of a step, the trace that holds them, and what can be computed from a trace alone."""

from workbench.trace.compare import Comparison, compare
from workbench.trace.errors import TraceError
from workbench.trace.file import TraceWriter
from workbench.trace.fleet import Fleet
from workbench.trace.follower import TraceFollower
from workbench.trace.lines import SCHEMA_VERSION, Keyframe, RequestInfo, Supplement, TraceMeta
from workbench.trace.narrate import narrate
from workbench.trace.pool_change import PoolChange
from workbench.trace.records import Chunk, Event, KernelLaunch, StepRecord, WorkItem
from workbench.trace.trace import Trace

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
