"""The record of a step, the trace that holds them, and what can be computed from a trace alone."""

from workbench.trace.records import (
    SCHEMA_VERSION,
    Chunk,
    Event,
    KernelLaunch,
    RequestInfo,
    StepRecord,
    TraceMeta,
    WorkItem,
)

__all__ = [
    "SCHEMA_VERSION",
    "Chunk",
    "Event",
    "KernelLaunch",
    "RequestInfo",
    "StepRecord",
    "TraceMeta",
    "WorkItem",
]
