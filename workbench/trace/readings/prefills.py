"""Prompts in progress step by step: what each still needs, and whether it counts as long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from workbench.trace import StepRecord, Trace


class Prefill(NamedTuple):
    """A request whose prompt a step works on.

    Attributes:
        request_id: The request.
        tokens_left: Tokens that are neither in the prefix cache nor computed before the step; those of a preempted
            request include its output.
        num_tokens: Tokens of them that the step computes, without drafts.
        is_long: They are more than ``long_prefill_token_threshold``, or than the token budget where that is 0: the
            request takes one of the ``max_long_partial_prefills`` places in this step.
    """

    request_id: str
    tokens_left: int
    num_tokens: int
    is_long: bool


def prefills(trace: Trace) -> Iterator[tuple[Prefill, ...]]:
    """The prompts in progress of every step, in the order of the packed batch.

    Args:
        trace: A run from its first step on.

    Raises:
        ValueError: The trace begins in the middle of a run, so the output of its requests is not known.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"config": {"max_num_batched_tokens": 4}, "requests": [{"id": "a", "prompt": {"len": 6}}]})
        >>> [step[0].tokens_left for step in list(prefills(trace))[:2]]
        [6, 2]
    """
    if trace.keyframe is not None:
        raise ValueError(f"the trace begins at step {trace.keyframe.step}; prefills() needs a run from its first step")
    threshold, outputs = trace.config.get("long_prefill_token_threshold") or 0, Counter[str]()
    for step in trace:
        yield tuple(_in_progress(trace, step, threshold, outputs))
        for chunk in step.chunks:
            outputs[chunk.request_id] += len(chunk.accepted)


def _in_progress(trace: Trace, step: StepRecord, threshold: int, outputs: Counter[str]) -> Iterator[Prefill]:
    for chunk in step.chunks:
        if chunk.arm != "decode":
            total = trace.requests[chunk.request_id].num_prompt_tokens + outputs[chunk.request_id]
            left = total - chunk.start
            computed = chunk.num_tokens - len(chunk.drafts)
            yield Prefill(chunk.request_id, left, computed, left > (threshold or step.token_budget))
