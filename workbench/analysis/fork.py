"""Answer "what if": simulate a recorded run under another configuration, in steps or on a clock."""

from __future__ import annotations

import dataclasses
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Unpack

import msgspec

from workbench.analysis.loops import Loops, loops_of
from workbench.base.keyword_fields import ConfigChanges
from workbench.base.named_fields import show_fields
from workbench.config import EngineConfig, SamplingParams
from workbench.scheduler.policy import SchedulingPolicy, described
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival
from workbench.simulation.costs.cost_model import StepCost, as_step_cost
from workbench.simulation.limits import MAX_STEPS, count_prompt_tokens
from workbench.simulation.proposals import Proposal, RecordedProposals
from workbench.simulation.simulate import simulate_requests
from workbench.simulation.workload import made_up_token
from workbench.trace import RequestInfo, StepRecord, Trace, TraceMeta
from workbench.trace.readings.contents import Contents
from workbench.trace.reasons import Reason


def fork(
    trace: Trace,
    at_step: int = 0,
    *,
    cost_model: StepCost | None = None,
    without: Collection[str] = (),
    contents: Contents | None = None,
    open_loop: bool = False,
    **config_changes: Unpack[ConfigChanges],
) -> Trace:
    """Simulate the arrivals of a trace, with its sampled tokens, under another configuration.

    Without a cost model requests arrive and are aborted at the recorded steps. With one the simulation has a clock:
    requests arrive at their recorded times, and one that was aborted is aborted as long after its arrival, unless it
    has ended by then. A request whose prompt contains the answer to an earlier one arrives when that answer has ended,
    with as much time between as in the recording. A request that had ended gets the recorded tokens and ends with the
    same one. Any other request continues to its ``max_tokens`` with made-up tokens. At each place of its output a
    request has as many drafts as in the recording, of which as many are accepted, see `RecordedProposals`; of fewer
    drafts at most all are, and more are refused. A recording of vLLM is simulated with ``as_vllm``; if the setting
    would hang, the source of the trace says so, and its ``end`` is "stuck".

    Args:
        trace: The trace of an engine, of a simulation, or recorded from another engine.
        at_step: The first step under the new configuration; the steps before it are those of the trace.
        cost_model: Gives the duration of a step; None for a fork without a clock.
        without: Requests to leave out.
        contents: Says which prefixes are equal; None to read it from the trace.
        open_loop: Let follow-ups arrive at their recorded times too, whether the answers in them have ended or not.
        **config_changes: EngineConfig fields to change. ``block_size`` and ``num_blocks`` can only change at step 0.
            ``policy`` may also be a SchedulingPolicy object, from step 0.

    Returns:
        The simulated trace, from step 0.

    Raises:
        ValueError: at_step is outside the trace, the trace does not begin at step 0, a field or a request is unknown,
            a value is outside its range, no schedule can serve a request, or vLLM's engine would end.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 100}, "max_tokens": 2}]})
        >>> [len(fork(trace, max_num_batched_tokens=budget)) for budget in (10, 50, 512)]
        [11, 3, 2]
    """
    if not isinstance(at_step, int) or not 0 <= at_step <= len(trace):
        raise ValueError(f"at_step must be from 0 to {len(trace)}, the steps of the trace, got {at_step!r}")
    if problem := why_not_simulated(trace):
        raise ValueError(f"{problem}: fork an engine that keeps every step (keep_steps=None), or a whole recording")
    cost_model = as_step_cost(cost_model)
    for request_id in without:
        trace.requests[request_id]  # which says what there is instead
    changes = ", ".join(f"{name}={value!r}" for name, value in config_changes.items())
    policy: SchedulingPolicy | None = None
    if isinstance(config_changes.get("policy"), SchedulingPolicy):
        policy = config_changes.pop("policy")
        if at_step:
            raise ValueError(f"policy={policy!r} can only be given from step 0, got at_step={at_step}")
    recorded, past = recorded_config(trace), Past(trace, contents, open_loop=open_loop)
    changed = past.changed(recorded, config_changes)
    arrivals = [
        past.arrival(info, at_step) if cost_model is None else past.timed_arrival(info, at_step)
        for info in trace.requests.values()
        if info.request_id not in without
    ]
    if without:
        changes = ", ".join(filter(None, [changes, f"without {', '.join(without)}"]))
    source = f"{trace.meta.source}, forked at step {at_step}" + (f" with {changes}" if changes else "")
    meta = TraceMeta(
        source=source,
        config=described(changed, policy),
        model=trace.meta.model,
        versions=trace.meta.versions,
    )
    try:
        forked = simulate_requests(
            recorded if at_step else changed,
            arrivals,
            past.sample_token,
            config_at={at_step: changed} if at_step else {},
            cost_model=_RecordedThenModel(trace, at_step, cost_model) if cost_model and at_step else cost_model,
            policy=policy,
            as_vllm=trace.meta.is_of_vllm,
            meta=meta,
            max_steps=max_steps_of(trace),
        )
    except RuntimeError as assertion:
        raise ValueError(f"this setting would hang: vLLM's engine ends with {assertion}") from None
    if hang := why_hung(forked):
        forked.meta = msgspec.structs.replace(meta, source=f"{source}; {hang}")
    return forked


show_fields(EngineConfig, fork)


def why_not_simulated(trace: Trace, name: str = "this trace") -> str:
    """Why the run of a trace cannot be simulated again, a sentence part; "" if it has its first steps."""
    if not len(trace) or not trace[0].step:
        return ""
    return f"a simulation runs from step 0, and {name} has only {trace.steps_in_words}"


def recorded_requests(trace: Trace, *, open_loop: bool = False) -> tuple[list[Arrival], Callable[[Request], int]]:
    """The requests of a recording as they arrived, each with as many tokens as it got, and what gives those tokens.

    A request that was aborted could have had more, and is aborted again. One that waited for an engine to begin does so
    again: it arrived before it is seen.

    Args:
        trace: A recording with a clock.
        open_loop: Let follow-ups arrive at their recorded times.
    """
    past = Past(trace, open_loop=open_loop)
    arrivals = [
        arrival
        if arrival.abort_step is not None
        else dataclasses.replace(arrival, sampling=past.as_many(arrival.request_id))
        for arrival in [past.timed_arrival(info, 0) for info in trace.requests.values()]
    ]
    return past.loops.in_sessions(arrivals) if not open_loop else arrivals, past.sample_token


def why_hung(trace: Trace) -> str:
    """A sentence if a simulated run did not end, with the first request that waits forever; "" if it did."""
    return "" if trace.end == "done" or not len(trace) else hang_of(trace[-1], len(trace))


def hang_of(last: StepRecord, num_steps: int) -> str:
    """The same for a run that did not end, from its last step and its number of steps."""
    for request_id, reason in last.not_scheduled.items():
        return f"this setting would hang: {request_id} waits forever: {reason}"
    names = ", ".join([*last.running, *last.waiting])
    return f"this setting would hang: {names} had not ended after {num_steps} steps"


def max_steps_of(trace: Trace) -> int:
    """Maximum number of steps of a simulation of a recorded run."""
    return max(MAX_STEPS, 10 * len(trace))


def recorded_config(trace: Trace) -> EngineConfig:
    """The configuration of a trace, as far as EngineConfig has its fields."""
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    return EngineConfig.from_dict({name: value for name, value in trace.config.items() if name in known})


def in_the_same_memory(recorded: EngineConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changed fields with the number of blocks of another size that the memory of the recorded pool holds.

    A server takes its pool from its memory. The fields stay as they are if ``num_blocks`` is among them or "auto", if
    the size of the blocks stays, or if a block does not grow with it: a state has another size, and a KV cache group
    may have its own.

    Raises:
        ValueError: A field is unknown, or a value is outside its range.

    Example:
        >>> in_the_same_memory(EngineConfig(block_size=16, num_blocks=128), {"block_size": 8})
        {'block_size': 8, 'num_blocks': 256}
    """
    changed, num_blocks = recorded.replace(**changes), recorded.num_blocks
    if changed.block_size == recorded.block_size or "num_blocks" in changes or num_blocks == "auto":
        return dict(changes)
    pairs = zip(recorded.cache_groups, changed.cache_groups)
    sizes = recorded.block_size, changed.block_size
    if any(not new.is_attention or (old.block_size, new.block_size) != sizes for old, new in pairs):
        return dict(changes)
    return {**changes, "num_blocks": max(2, num_blocks * recorded.block_size // changed.block_size)}


def _check_drafts(recorded: EngineConfig, changed: EngineConfig) -> None:
    """Refuse more drafts than were recorded: at the positions behind them no acceptance is known."""
    known, asked = recorded.num_speculative_tokens, changed.num_speculative_tokens
    if asked > known:
        have = f"has {known} drafts per request and step" if known else "has no drafts"
        raise ValueError(
            f"num_speculative_tokens must be from 0 to {known}, got {asked}: the recording {have}, and does not say "
            f"how many of {asked} would be accepted; record a run with {asked}"
        )


STOP_NUMBER = 2**31 - 1
"""Stands for a stop token that is not recorded."""


class Past:
    """The requests of a trace as they arrived, and the tokens that they got.

    Args:
        trace: The trace.
        contents: Says which prefixes are equal; None to read it from the trace.
        open_loop: Ignore which requests follow the ends of others.
        loops: Those that do, if they are known already, as for several ranks; None to find them.
    """

    def __init__(
        self,
        trace: Trace,
        contents: Contents | None = None,
        *,
        open_loop: bool = False,
        loops: Loops | None = None,
    ) -> None:
        self._trace, self._open_loop, self._loops = trace, open_loop, loops
        self._contents = contents or Contents(trace)
        self._first_step, self._first_time = (trace[0].step, trace[0].time) if len(trace) else (0, 0.0)
        # An asynchronous step is scheduled when the one before it begins.
        self._is_async = bool(trace.config.get("async_scheduling"))
        # Four bytes for a token instead of forty: other processes get a copy of all of them.
        self._sampled: dict[str, array[int]] = defaultdict(partial(array, "i"))
        self._proposals: dict[str, RecordedProposals] = defaultdict(RecordedProposals)
        # An asynchronous engine fills up the rows of a request with placeholders.
        self._fills_up = self._is_async and any(
            draft >= 0 for record in trace for chunk in record.chunks for draft in chunk.drafts
        )
        self._num_blocks: dict[str, int] = defaultdict(int)  # in the table of each request, only with drafts
        self._ended: dict[str, str] = {}  # the reason, "" if it is not known
        self._aborted: dict[str, int] = {}  # in order
        self._begins, self._ends = array("d"), array("d")  # of each step, in seconds
        self._config = recorded_config(trace)
        for record in trace:
            self._begins.append(record.time)
            self._ends.append(record.end)
            if self._config.num_speculative_tokens:
                self._note_proposals(record)
            for chunk in record.chunks:
                self._sampled[chunk.request_id].extend(chunk.accepted)
            self._ended.update({name: record.finish_reasons.get(name, "") for name in record.finished})
            self._aborted.update(dict.fromkeys(record.aborted, record.step))
        self._places = {name: place for place, name in enumerate(self._aborted)}
        made_up = (info.num_prompt_tokens for info in trace.requests.values() if not info.prompt_token_ids)
        count_prompt_tokens(made_up, "the recording has no token ids")
        if self._contents.kind != "tokens":
            for info in trace.requests.values():
                self._stand_in(info)

    def _note_proposals(self, record: StepRecord) -> None:
        """Note the drafts of each decode, none included; where a limit cut them, all that are allowed."""
        most = self._config.num_speculative_tokens
        for request_id in record.preempted:
            lost = Proposal(min(most, self._num_lost(record, request_id)), 0)
            self._proposals[request_id].add(len(self._sampled[request_id]), lost)
            self._num_blocks[request_id] = 0
        for chunk in record.chunks:
            self._num_blocks[chunk.request_id] += len(chunk.new_block_ids)
            is_padded = chunk.request_id in record.admitted or chunk.request_id in record.resumed
            if chunk.arm == "decode" and not chunk.discarded and not is_padded:
                num_drafts = len(chunk.drafts) if chunk.limited_by == "complete" else most
                if self._fills_up:
                    num_drafts = sum(draft >= 0 for draft in chunk.drafts)
                place = len(self._sampled[chunk.request_id])
                self._proposals[chunk.request_id].add(place, Proposal(num_drafts, chunk.num_accepted))

    def _num_lost(self, record: StepRecord, request_id: str) -> int:
        """Drafts that a preemption left unverified: as few as need the blocks that the request took or asked for."""
        reason, taken = record.preempt_reasons.get(request_id), record.unscheduled_block_ids.get(request_id)
        num_new = None if taken is None else len(taken)
        if num_new is None and isinstance(reason, Reason) and reason.requests == (request_id,):
            num_new = reason.needed
        if num_new is None:
            return self._config.num_speculative_tokens
        num_known = self._trace.requests[request_id].num_prompt_tokens + len(self._sampled[request_id])
        num_blocks = self._num_blocks[request_id] + num_new
        return max(0, (num_blocks - 1) * self._config.block_size + 1 - num_known) if num_new else 0

    def _stand_in(self, info: RequestInfo) -> None:
        """Put numbers in the place of output tokens that are not recorded."""
        request_id, outputs = info.request_id, self._sampled[info.request_id]
        if info.prompt_token_ids or not outputs:
            return
        start = info.num_prompt_tokens
        outputs[:] = array("i", self._contents.tokens(request_id, start, start + len(outputs)))
        if self._ended.get(request_id) == "stop":  # its KV is not computed, so no other request can find it
            outputs[-1] = STOP_NUMBER

    @cached_property
    def loops(self) -> Loops:
        """The requests that follow the ends of others, whether they are simulated so or not."""
        return self._loops if self._loops is not None else loops_of(self._trace, self._contents)

    @property
    def why_unknown(self) -> str:
        """Why a setting may find prefixes that the recording does not show; "" if no setting can.

        Without a prefix cache none does: turning it on is refused if nothing shows what is shared.
        """
        return self._contents.why_unknown if self._trace.config.get("enable_prefix_caching") else ""

    @property
    def tokens(self) -> dict[str, array[int]]:
        """The output of each request, or numbers that stand for it."""
        return self._sampled

    def changed(self, recorded: EngineConfig, changes: Mapping[str, Any]) -> EngineConfig:
        """A changed configuration under which the run can be simulated.

        Raises:
            ValueError: A field is unknown, a value is outside its range, or the recording does not say enough.
        """
        changed = recorded.replace(**changes)
        _check_drafts(recorded, changed)
        self._check_prefixes(recorded, changed)
        return changed

    def _check_prefixes(self, recorded: EngineConfig, changed: EngineConfig) -> None:
        """Refuse settings under which hits of the prefix cache are not known.

        Raises:
            ValueError: The message names the field.
        """
        if not changed.enable_prefix_caching:
            return
        if problem := self._contents.why_not([group.block_size for group in changed.cache_groups]):
            raise ValueError(problem)
        if self._contents.kind == "hits" and not recorded.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching=True has no answer: the recording has neither token ids nor block hashes, and "
                "its engine cached no prefixes, so it does not say which are equal"
            )

    def arrival(self, info: RequestInfo, at_step: int = 0) -> Arrival:
        """A request that arrives, and is aborted, at its recorded step; from a step on a follow-up when it can."""
        request_id = info.request_id
        arrival = Arrival(
            request_id=request_id,
            prompt_token_ids=self._contents.prompt(info),
            sampling=self._sampling(info),
            priority=info.priority,
            arrival_step=info.arrival_step,
            arrival_time=info.arrival_time,
            abort_step=self._aborted.get(request_id),
            index=self._places.get(request_id, 0),
            proposals=self._proposals[request_id],
            cache_salt=info.cache_salt,
            adapter=info.adapter,
        )
        return arrival if self._open_loop or info.arrival_step < at_step else self.loops.tie(arrival)

    def timed_arrival(self, info: RequestInfo, at_step: int) -> Arrival:
        """A request that is seen and aborted at its recorded times, or at its recorded steps before ``at_step``."""
        arrival = self.arrival(info, at_step)
        if arrival.abort_step is not None and arrival.abort_step > at_step:
            arrival = dataclasses.replace(arrival, abort_step=at_step, timeout=self._timeout(info))
        if info.arrival_step < at_step:
            return dataclasses.replace(arrival, arrives_at=self._first_time)
        return dataclasses.replace(arrival, arrival_step=at_step, arrives_at=self._first_look(info.arrival_time))

    def stepped_arrival(self, info: RequestInfo) -> Arrival:
        """A request that is seen and aborted at its recorded steps, on a clock of which a second is a step."""
        arrival, at, aborted = self.timed_arrival(info, 0), float(info.arrival_step), self._aborted.get(info.request_id)
        timeout, think = None if aborted is None else float(aborted) - at, float(arrival.think_steps)
        return dataclasses.replace(arrival, arrives_at=at, arrival_time=at, think=think, timeout=timeout)

    def _timeout(self, info: RequestInfo) -> float:
        """Seconds from arrival to abort, which came between two looks of the scheduler at its requests."""
        seen = max(0, self._aborted[info.request_id] - self._first_step - self._is_async)
        earliest = max(self._begins[max(0, seen - 1)], info.arrival_time)
        return max(0.0, (earliest + self._begins[seen]) / 2 - info.arrival_time)

    def _first_look(self, arrived: float) -> float:
        """When the scheduler could first take a request: at once, or when the next step began if none was running.

        An engine that was not started yet, was paused or worked between steps kept the request waiting, and does so
        under every setting.
        """
        following = bisect_right(self._begins, arrived)
        if following == len(self._begins) or (following and self._ends[following - 1] >= arrived):
            return arrived
        return self._begins[following]

    def _sampling(self, info: RequestInfo) -> SamplingParams:
        """Limits under which a request that had ended ends at the same token again.

        A stop token stays one. An asynchronous scheduler foresees an end by ``max_tokens``, and for an end by a stop
        token it has scheduled one chunk too many. A last token that also came earlier was none: a stop string ended
        the request.
        """
        *before, last = self._sampled[info.request_id] or [-1]
        if info.request_id not in self._ended:
            return SamplingParams(max_tokens=info.max_tokens)
        if self._ended[info.request_id] == "stop" and last >= 0 and last not in before:
            return SamplingParams(max_tokens=max(info.max_tokens, len(before) + 1), stop_token_ids=(last,))
        return self.as_many(info.request_id)

    def as_many(self, request_id: str) -> SamplingParams:
        """As many tokens as in the recording."""
        return SamplingParams(max_tokens=max(1, len(self._sampled[request_id])))

    def sample_token(self, request: Request) -> int:
        """The recorded token, or a made-up one after the end of the recording."""
        tokens, index = self._sampled[request.request_id], request.num_output_tokens
        return tokens[index] if index < len(tokens) else made_up_token(f"{request.request_id}:{request.num_tokens}")


class _RecordedThenModel:
    """The recorded times of the steps before a step, idle times included, and a cost model's from there on."""

    def __init__(self, trace: Trace, at_step: int, cost_model: StepCost) -> None:
        times = [record.time for record in trace[: at_step + 1] if record.chunks]
        if at_step == len(trace):
            times.append(trace[-1].end)
        self._recorded = iter([after - before for before, after in pairwise(times)])
        self._cost_model = cost_model

    def step_seconds(self, chunks: Sequence[Any]) -> float:
        """Duration of the next step."""
        recorded = next(self._recorded, None)
        return self._cost_model.step_seconds(chunks) if recorded is None else recorded
