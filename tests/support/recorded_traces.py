"""Compare a recording of another engine with a simulation of the same workload: they must be equal."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from workbench.trace import StepRecord, Trace

# Times depend on the engine, and a recorder does not know the scheduler's reasons.
NOT_COMPARED = {
    "step",
    "time",
    "end",
    "timings",
    "phase_starts",
    "waiting_reason",
    "passed_over",
    "preempt_reasons",
    "kernel",
}
COMPARED = [name for name in StepRecord.__struct_fields__ if name not in NOT_COMPARED]


def comparable(trace: Trace) -> list[dict[str, Any]]:
    """All steps in which something happened, with their block tables."""
    return [
        {name: getattr(record, name) for name in COMPARED} | {"block_tables": record.block_tables}
        for record in trace
        if record.chunks or record.events
    ]


def assert_same(recorded: Trace, simulated: Trace) -> None:
    """Check that every field of every step is the same."""
    ours, theirs = comparable(simulated), comparable(recorded)
    for index, (expected, found) in enumerate(zip(ours, theirs)):
        for name, value in expected.items():
            assert found[name] == value, f"{name} of step {index}"
    assert len(ours) == len(theirs)
    assert list(recorded.requests) == list(simulated.requests)
    for found, expected in zip(recorded.requests.values(), simulated.requests.values(), strict=True):
        assert found.num_prompt_tokens == expected.num_prompt_tokens
        assert (found.max_tokens, found.priority) == (expected.max_tokens, expected.priority)


def assert_pool_fits(trace: Trace) -> None:
    """Check that the pool rebuilt from the records always has as many free blocks as the engine counted."""
    for index in range(len(trace)):
        for moment in ("scheduled", "end"):
            assert trace.pool_state(index, moment).consistent, f"step {trace[index].step}, {moment}"


def tokens_of(trace: Trace) -> dict[str, list[int]]:
    """Sampled tokens by request."""
    tokens: dict[str, list[int]] = {}
    for record in trace:
        for chunk in record.chunks:
            if chunk.sampled is not None:
                tokens.setdefault(chunk.request_id, []).append(chunk.sampled)
    return tokens


def without_tokens(trace: Trace) -> list[StepRecord]:
    """The records as they would be without token ids, and without their times."""
    return [
        structs.replace(
            record,
            time=0.0,
            end=0.0,
            timings={},
            phase_starts={},
            chunks=tuple(structs.replace(chunk, sampled=chunk.sampled and 0) for chunk in record.chunks),
        )
        for record in trace
    ]
