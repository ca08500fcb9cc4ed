"""Comparisons of traces, and settings for properties of files."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings

from workbench.trace import StepRecord, Trace
from workbench.viz.layout.columns import columns_of

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def assert_same_trace(one: Trace, other: Trace) -> None:
    assert one.meta == other.meta
    assert dict(one.requests) == dict(other.requests)
    assert list(one.requests) == list(other.requests)
    assert list(one) == list(other)
    assert one.supplements == other.supplements
    assert [record.block_tables for record in one] == [record.block_tables for record in other]
    for mine, theirs in zip(one, other):
        np.testing.assert_array_equal(mine.slot_mapping, theirs.slot_mapping)


def said(record: StepRecord) -> dict[str, str]:
    """The sentence about each waiting request of a step."""
    return {request_id: str(reason) for request_id, reason in record.not_scheduled.items()}


def use_all_of(trace: Trace) -> None:
    """Use a loaded trace as views do: nothing may fail."""
    for index, record in enumerate(trace):
        assert len(record.positions) == len(record.slot_mapping) == record.num_tokens
        assert not len(record.slot_mapping) or record.slot_mapping.min() >= 0
        _ = record.events, record.not_scheduled, record.block_tables, repr(record)
        try:
            record.mask()
        except ValueError as problem:
            assert "cells" in str(problem)
        if trace.num_blocks is not None and trace.num_blocks < 10_000:
            trace.pool_state(index)
    for supplement in trace.supplements:
        assert trace.supplement(supplement.step, supplement.name) is supplement.facts
    assert columns_of(trace).num_steps == len(trace)
    assert repr(trace.metrics())
    assert trace.to_dict()
