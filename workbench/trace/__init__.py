"""The record of a step, the trace that holds them, and what can be computed from a trace alone."""

from workbench.trace.checks import TraceError
from workbench.trace.compare import Comparison, compare
from workbench.trace.file import TraceWriter
from workbench.trace.follower import TraceFollower
from workbench.trace.records import (
    SCHEMA_VERSION,
    Chunk,
    Event,
    KernelLaunch,
    Keyframe,
    RequestInfo,
    StepRecord,
    TraceMeta,
    WorkItem,
)
from workbench.trace.trace import Trace

__all__ = [
    "SCHEMA_VERSION",
    "Chunk",
    "Comparison",
    "Event",
    "KernelLaunch",
    "Keyframe",
    "RequestInfo",
    "StepRecord",
    "Trace",
    "TraceError",
    "TraceFollower",
    "TraceMeta",
    "TraceWriter",
    "WorkItem",
    "compare",
]
