"""What if: a recorded run under another configuration, simulated."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

from workbench.engine.config import EngineConfig, SamplingParams
from workbench.engine.policy import SchedulingPolicy, described
from workbench.engine.request import Request
from workbench.engine.simulate import simulate_requests
from workbench.engine.workload import Arrival, made_up_token
from workbench.trace import Trace, TraceMeta


def fork(trace: Trace, at_step: int = 0, **config_changes: Any) -> Trace:
    """Run the arrivals of a trace again, with the tokens it sampled, under another configuration.

    Requests arrive and are aborted at the steps they did. A request that had ended is given as many tokens as it
    got, whatever ended it; one that had not ended goes on to its ``max_tokens`` with made-up tokens.

    Args:
        trace: A run of the engine, of a simulation, or recorded from another engine.
        at_step: The first step under the new configuration; the steps before it are those of the trace.
        **config_changes: EngineConfig fields to change. ``block_size`` and ``num_blocks`` can only change at step 0.
            ``policy`` may also be a SchedulingPolicy object, from step 0.

    Returns:
        The simulated trace, from step 0.

    Raises:
        ValueError: at_step is outside the trace, the trace does not begin at step 0, an unknown field, or a value
            outside its range.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 100}, "max_tokens": 2}]})
        >>> [len(fork(trace, max_num_batched_tokens=budget)) for budget in (10, 50, 512)]
        [11, 3, 2]
    """
    if not isinstance(at_step, int) or not 0 <= at_step <= len(trace):
        raise ValueError(f"at_step must be from 0 to {len(trace)}, the steps of the trace, got {at_step!r}")
    if len(trace) and trace[0].step:
        raise ValueError(
            f"a fork runs from step 0, and this trace has only {trace.steps_in_words}: fork an engine that keeps every "
            "step (keep_steps=None), or a whole recording"
        )
    changes = ", ".join(f"{name}={value!r}" for name, value in config_changes.items())
    policy: SchedulingPolicy | None = None
    if isinstance(config_changes.get("policy"), SchedulingPolicy):
        policy = config_changes.pop("policy")
        if at_step:
            raise ValueError(f"policy={policy!r} can only be given from step 0, got at_step={at_step}")
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    recorded = EngineConfig.from_dict({name: value for name, value in trace.config.items() if name in known})
    changed = recorded.replace(**config_changes)
    sampled: dict[str, list[int]] = defaultdict(list)
    ended: set[str] = set()
    aborted: dict[str, int] = {}
    for record in trace:
        for chunk in record.chunks:
            if chunk.sampled is not None:
                sampled[chunk.request_id].append(chunk.sampled)
        ended.update(record.finished)
        aborted.update(dict.fromkeys(record.aborted, record.step))
    arrivals = [
        Arrival(
            request_id=info.request_id,
            # A recording without tokens still has lengths: made-up tokens then, which share no prefix.
            prompt_token_ids=info.prompt_token_ids
            or [made_up_token(f"{info.request_id} prompt:{i}") for i in range(info.num_prompt_tokens)],
            sampling=SamplingParams(
                max_tokens=max(1, len(sampled[info.request_id])) if info.request_id in ended else info.max_tokens
            ),
            priority=info.priority,
            arrival_step=info.arrival_step,
            arrival_time=info.arrival_time,
            abort_step=aborted.get(info.request_id),
        )
        for info in trace.requests.values()
    ]

    def sample_token(request: Request) -> int:
        tokens, index = sampled[request.request_id], request.num_output_tokens
        return tokens[index] if index < len(tokens) else made_up_token(f"{request.request_id}:{request.num_tokens}")

    meta = TraceMeta(
        source=f"{trace.meta.source}, forked at step {at_step}" + (f" with {changes}" if changes else ""),
        config=described(changed, policy),
        model=trace.meta.model,
        versions=trace.meta.versions,
    )
    return simulate_requests(
        recorded if at_step else changed,
        arrivals,
        sample_token,
        config_at={at_step: changed} if at_step else {},
        policy=policy,
        meta=meta,
    )
