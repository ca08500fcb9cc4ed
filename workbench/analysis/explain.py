"""Say why a request took as long as it did: its time split exactly into causes, each with the requests behind it.

Time from arrival to the end is cut at the ends of the steps. In each piece the request either waited, and the record
says for which limit, or it was computed together with others; then the piece is divided by what the cost model (or the
number of tokens) says about the chunks. Each piece is asked about once (`Explainer`); all amounts follow from the
answers (`Course`), and add up to the recorded latency. A simulation of the run without the largest cause says what that
cause was worth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

from workbench.analysis.causes import Cause, Confirmation, Explanation, Part, Span, before
from workbench.analysis.course import Course, Piece, Share
from workbench.analysis.fork import Past, fork, recorded_config
from workbench.analysis.rerun import RecordedRun
from workbench.analysis.why import why
from workbench.base.field_checks import integer
from workbench.config import MAX_LORAS
from workbench.simulation.costs.cost_model import CostModel, StepCost, as_step_cost
from workbench.simulation.costs.fit import MIN_STEPS, Fit, FitReport
from workbench.simulation.costs.slow_steps import compare_steps, slow_steps
from workbench.simulation.costs.stalls import stalls
from workbench.trace import Chunk, StepRecord, Trace, TraceError
from workbench.trace.clock import time_of_day
from workbench.trace.readings.latency import RequestTimes
from workbench.trace.readings.metrics import RequestMetrics
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.readings.preempted_before import preempted_before
from workbench.trace.reasons import UNKNOWN, Reason
from workbench.trace.window import find_in

CAPS = ("long_prefill_token_threshold", "partial_prefill_slot", "policy")
"""Reasons for a short chunk that are settings, not a lack of anything."""

BEFORE = -1
"""Stands for a step before the first one that the trace knows."""

NO_CHANGE = 0.005
"""A simulation that differs by a smaller fraction confirms nothing."""


def explain(trace: Trace, request_id: str, cost_model: CostModel | None = None) -> Explanation:
    """Say why a request took as long as it did.

    Args:
        trace: A trace, of an engine, of a simulation or recorded from another engine.
        request_id: The request, or the beginning of its id if no other begins so.
        cost_model: Divides steps between the requests in them; None to fit it to the trace, or to divide by tokens if
            there are too few steps for that.

    Returns:
        The parts of its time, of its time to first token and of its long gaps.

    Raises:
        TraceError: The trace has no such request, or it was never computed in the trace.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": "long", "prompt": {"len": 900}}, {"id": "short", "prompt": {"len": 9}, "max_tokens": 1}]
        >>> trace = simulate({"config": {"max_num_batched_tokens": 100}, "requests": requests})
        >>> why = trace.explain("short").biggest_avoidable
        >>> why.cause, why.culprits
        ('waiting for the token budget', ('long',))
    """
    explainer = explainer_of(trace) if cost_model is None else Explainer(trace, cost_model)
    return explainer.explain(request_id)


def explainer_of(trace: Trace) -> Explainer:
    """The explainer of a trace, which is kept with it until the trace grows."""
    return trace.reading_so_far("explainer", Explainer)


class _Stretch(NamedTuple):
    """A stretch of the run: a step, or the time before one.

    Attributes:
        explained: The share of it that the step's contents explain; the rest has the cause
        late: "stall" or "slow".
    """

    begin: float
    end: float
    record: StepRecord
    is_step: bool
    explained: float = 1.0
    late: str = "stall"


class Explainer:
    """Explains the requests of one trace.

    The requests and latencies are those of the trace. The causes of a slice's are found in all steps of its run up to
    its last one, and the durations of steps are judged, and divided, by the fit of the whole run.

    Args:
        trace: The trace.
        cost_model: Divides steps between the requests in them; None to fit it, or to divide by tokens.

    Attributes:
        stalls: The stalls of the run up to the end of the trace, by their steps.
        slow: Its other slow steps, likewise.
        unit: "s", or "steps" if the trace has no clock.
    """

    def __init__(self, trace: Trace, cost_model: CostModel | None = None) -> None:
        self.trace = trace
        self.metrics = metrics(trace)
        self.unit = self.metrics.summary.unit
        self._given = as_step_cost(cost_model)
        self._fit: Fit | None = None
        if cost_model is None and self.unit == "s":
            compared = compare_steps(trace)
            if len(compared.steps) >= MIN_STEPS:
                self._fit = Fit(compared.steps, 1, compared.stalled)
        self._past: Past | None = None  # read when a simulation asks for it
        self._recorded: RecordedRun | None = None
        self._run = run = trace.whole[: trace.offset + len(trace)] if trace.offset else trace
        self.stalls = {stall.step: stall for stall in stalls(run)} if self.unit == "s" else {}
        late = slow_steps(run) if self.unit == "s" else ()
        self.slow = {step.step: step for step in late if step.step not in self.stalls}
        self._records = tuple(run)  # those that the metrics are of: the trace may grow
        self._first_step = self._records[0].step if self._records else 0
        self._ends = {step: self._record(step).end for step in (*self.stalls, *self.slow)}

    @cached_property
    def _fitted(self) -> tuple[CostModel | None, FitReport | None, str]:
        """The model, the report of its fit, and why there is none."""
        if self._fit is None:
            return self._given, None, ""
        try:
            return *CostModel.of_fit(self._fit), ""
        except ValueError as problem:  # durations do not follow from the chunks
            return None, None, str(problem)

    @property
    def model(self) -> CostModel | None:
        """Divides steps between the requests in them; fitted when somebody asks for it."""
        return self._fitted[0]

    @property
    def misfit(self) -> str:
        """Why no cost model could be fitted; "" if one was, or was given."""
        return "" if self._fit is None or self._fit.holds else self._fitted[2]

    def _record(self, step: int) -> StepRecord:
        """The record of a step."""
        return self._records[step - self._first_step]

    @cached_property
    def _shares(self) -> StepCost:
        return self.model or CostModel(per_prefill_token=1.0, per_sequence=1.0)

    @cached_property
    def _stretches(self) -> list[_Stretch]:
        return list(self._cut())

    @cached_property
    def _outputs_before(self) -> dict[str, int | None]:
        return outputs_before(self.trace)

    @cached_property
    def _states(self) -> dict[str, _States]:
        states = _States.of_all(self._records, self.metrics.requests.values())
        for request_id in preempted_before(self._run):
            if request_id in states:
                states[request_id].preempted_at.append(BEFORE)
        return states

    def _cut(self) -> Iterator[_Stretch]:
        """The run, cut at the beginnings and ends of its steps, so that no moment is in two pieces."""
        previous_end = 0.0
        for record in self._records:
            if self.unit == "steps":
                yield _Stretch(float(record.step), float(record.step + 1), record, True)
                continue
            end = max(previous_end, record.end)
            begin = min(end, max(previous_end, record.time))
            stall = self.stalls.get(record.step)
            if begin > previous_end:
                yield _Stretch(previous_end, begin, record, False, 0.0 if stall is not None and stall.before else 1.0)
            if end > begin:
                if stall is None and (slow := self.slow.get(record.step)) is not None:
                    yield _Stretch(begin, end, record, True, slow.expected / slow.seconds, "slow")
                else:
                    yield _Stretch(begin, end, record, True, 1.0 if stall is None else stall.share_of_step)
            previous_end = end

    # -- one request -----------------------------------------------------------------------------------------------

    def explain(self, request_id: str) -> Explanation:
        """See `explain`."""
        course = self._course(find_in([self.trace], request_id))
        arrival, end = course.arrival, course.end
        return Explanation(
            course.request_id,
            self.unit,
            end - arrival,
            course.parts(arrival, end),
            course.ttft(),
            course.long_gaps(),
            tuple([stall for stall in self.stalls.values() if arrival < self._ends[stall.step] and stall.time < end]),
            self._fitted[1],
            self._confirmer(course.request_id),
            self.metrics.requests[course.request_id].e2e is None,
            course.waiting(),
            tuple([slow for slow in self.slow.values() if arrival < self._ends[slow.step] and slow.time < end]),
            self.misfit,
            time_of_day(self.trace.meta.created, arrival) if self.unit == "s" else "",
            course.request_id in self.never_served,
        )

    @cached_property
    def never_served(self) -> tuple[str, ...]:
        """The requests that nothing will serve, of an engine that stands still at the end: the verdict of `why`."""
        last = self.trace[-1] if len(self.trace) else None
        if last is None or last.chunks or not last.waiting or self.trace.is_followed:
            return ()
        try:
            answer = why(self.trace)
        except TraceError:  # the state of its scheduler is not known
            return ()
        return answer.left if answer.verdict == "never" else ()

    def first_token(self, request_id: str) -> Span | None:
        """The time to first token of a request, by its full id, or the time so far; None if the trace lacks it."""
        course = self._course(request_id, is_ttft=True)
        return course.ttft() or course.waiting()

    def slowest(self, by: str = "ttft") -> list[str]:
        """The requests by a latency, "ttft" or "e2e", or by the time so far without it, the slowest first."""
        known = [
            (-_in_unit(latency, self.unit), request_id)
            for request_id, request in self.metrics.requests.items()
            if (latency := request.at_least(by)) is not None
        ]
        known.sort(key=itemgetter(0))
        return [request_id for _, request_id in known]

    # -- what is asked about a request -----------------------------------------------------------------------------

    def _course(self, request_id: str, is_ttft: bool = False) -> Course:
        """The course of a request, with its pieces up to its first token or its end.

        Raises:
            TraceError: It was never computed, in a trace without steps.
        """
        info, of_request = self.trace.requests[request_id], self.metrics.requests[request_id]
        arrival, tokens, before = info.arrival_time, of_request.token_times, of_request.token_before
        last_before = None if before is None else before.end
        if self.unit == "steps":
            arrival, tokens = float(info.arrival_step), tuple(step + 1.0 for step in of_request.token_steps)
            last_before = None if before is None else before.step + 1.0
        if of_request.e2e is not None:
            end = arrival + _in_unit(of_request.e2e, self.unit)
        elif len(self.trace) and of_request.age is not None:
            end = arrival + _in_unit(of_request.age, self.unit)
        else:
            raise TraceError(f"request {request_id!r} was never computed in this trace: it has no steps")
        last = tokens[0] if is_ttft and tokens else max((end, *tokens[-1:]))
        pieces = tuple(self._gathered(self._states[request_id], arrival, last))
        has_ttft, waits = of_request.ttft is not None, of_request.waited is not None
        num_before = self._outputs_before.get(request_id) or 0
        known = (num_before, last_before, has_ttft, waits)
        return Course(request_id, arrival, end, tokens, *known, pieces, self._first_step)

    def _gathered(self, states: _States, begin: float, end: float) -> Iterator[Piece]:
        """The pieces of a request's time that are in a stretch of it."""
        first = bisect_right(self._stretches, begin, key=attrgetter("end"))
        for index in range(first, len(self._stretches)):  # a slice would copy the rest of the run
            stretch = self._stretches[index]
            if stretch.begin >= end:
                break
            late = Share(Cause(stretch.late), 1.0 - stretch.explained, {})  # nobody is behind it
            causes = self._causes(states, stretch)
            shares = [late, *(Share(cause, share * stretch.explained, who) for cause, share, who in causes)]
            yield Piece(stretch.begin, stretch.end, stretch.record.step, [each for each in shares if each.share > 0])

    def _causes(self, states: _States, stretch: _Stretch) -> Iterator[Share]:
        """The causes of a stretch of the run for a request, without a stall."""
        record = stretch.record
        if not stretch.is_step:
            is_first = record.step == self._first_step
            yield Share(before(record.step) if is_first else Cause("between"), 1.0, {})
            return
        chunk = states.chunks.get(record.step)
        if chunk is not None:
            yield from self._shares_of(chunk, record)
        elif states.is_preempted_in(record.step):
            yield Share(Cause("preempted"), 1.0, _holders(record, states.request_id))
        elif record.step < states.first_seen:
            yield Share(Cause("in_progress"), 1.0, self._weights(record.chunks))
        elif states.request_id in record.running:
            yield Share(Cause("passed_over"), 1.0, self._weights(record.chunks))
        else:
            reason = record.passed_over.get(states.request_id) or record.waiting_reason or UNKNOWN
            yield Share(Cause.of(reason), 1.0, self._in_the_way(states.request_id, reason, record))

    def _weights(self, chunks: tuple[Chunk, ...]) -> dict[str, float]:
        """The share of each request in a step's work."""
        return {chunk.request_id: float(chunk.num_tokens) for chunk in chunks}

    def _in_the_way(self, request_id: str, reason: Reason, record: StepRecord) -> dict[str, float]:
        """The requests behind a reason to wait, with their weights."""
        if reason.root in ("grammar", "transfer"):
            return {}
        if reason.root == "adapter":
            return dict.fromkeys(reason.requests, 1.0)
        if reason.root == "seats":
            return dict.fromkeys(record.running, 1.0)
        if reason.root == "partial_prefills":
            named = reason.requests or [chunk.request_id for chunk in record.chunks if chunk.is_partial_prefill]
            return dict.fromkeys(named, 1.0) or self._weights(record.chunks)
        if reason.root in ("kv_blocks", "preempted"):
            holders = _holders(record, request_id)
            # The request in front counts as much as those that hold the blocks which it waits for.
            return {reason.behind: sum(holders.values()) or 1.0, **holders} if reason.behind else holders
        return self._weights(record.chunks)

    def _shares_of(self, own: Chunk, record: StepRecord) -> Iterator[Share]:
        """A step that computed the request, divided between its chunk, prompts of others and decodes of others."""
        others = [chunk for chunk in record.chunks if chunk.request_id != own.request_id]
        prompts = {chunk.request_id: float(chunk.num_tokens) for chunk in others if not chunk.is_decode}
        decodes = {chunk.request_id: float(chunk.num_tokens) for chunk in others if chunk.is_decode}
        if self.unit == "steps":
            budget = record.token_budget or record.num_tokens
            is_cut = own.is_partial_prefill and own.limited_by == "token_budget"
            of_prompts = sum(prompts.values()) / budget if is_cut else 0.0
            of_decodes = sum(decodes.values()) / budget if is_cut else 0.0
            of_each_step = 1.0
        else:
            whole = self._shares.step_seconds(record.chunks)
            without_prompts = [chunk for chunk in record.chunks if chunk.is_decode or chunk is own]
            of_prompts = (whole - self._shares.step_seconds(without_prompts)) / whole if prompts else 0.0
            of_decodes = 0.0
            if decodes:
                of_decodes = (self._shares.step_seconds(without_prompts) - self._shares.step_seconds([own])) / whole
            of_each_step = self._shares.step_seconds([]) / whole
        mine = max(0.0, 1.0 - of_prompts - of_decodes)
        if own.is_partial_prefill and own.limited_by in CAPS:
            cut = min(mine, of_each_step)
            mine -= cut
            yield Share(Cause("cut", own.limited_by), cut, {})
        again = mine * min(1.0, own.num_recomputed_tokens / max(1, own.num_tokens))
        yield Share(Cause("own"), mine - again, {})
        yield Share(Cause("recomputed"), again, {})
        yield Share(Cause("prompts"), of_prompts, prompts)
        yield Share(Cause("decodes"), of_decodes, decodes)

    # -- without the cause -----------------------------------------------------------------------------------------

    def _confirmer(self, request_id: str) -> Callable[[Part, bool], Confirmation | None]:
        def confirm(part: Part, is_ttft: bool) -> Confirmation | None:
            if self.unit == "s" and self.model is None:
                return None
            change = self._without(part, request_id)
            if change is None or self._first_step:
                return None
            words, arguments = change
            # A policy in Python is not in the trace: nothing can be simulated under it, and only its absence is known.
            as_it_was = "scheduling_policy" not in self.trace.config
            if not as_it_was and (part.kind, part.limit) != ("cut", "policy"):
                return None
            measured = self.metrics.requests[request_id]
            is_aborted = measured.finish_reason == "abort"  # at a time of its client's choice
            if is_aborted and not is_ttft and measured.ttft is not None:
                return None
            before = latency_of(self._simulated(request_id) if as_it_was else measured, is_ttft)
            after = latency_of(self._simulated(request_id, **arguments), is_ttft or is_aborted)
            if before is None or after is None or abs(after - before) < NO_CHANGE * before:
                return None
            recorded = latency_of(measured, is_ttft)
            if recorded is None:  # it has not ended
                return None
            what = "time to first token" if is_ttft else "end to end"
            if is_aborted and not is_ttft:
                what = "time to first token or abort"
            return Confirmation(f"{what} {words}", before, after, recorded, is_recorded=not as_it_was)

        def latency_of(request: RequestMetrics | RequestTimes | None, is_ttft: bool) -> float | None:
            latency = request and (request.ttft if is_ttft else request.e2e)
            return None if latency is None else _in_unit(latency, self.unit)

        return confirm

    def _simulated(
        self, request_id: str, without: Collection[str] = (), **changes: Any
    ) -> RequestMetrics | RequestTimes | None:
        """The times of a request in a simulation without some others, or with other settings."""
        if self.unit == "steps" or self.model is None:
            return metrics(fork(self._run, without=without, **changes)).requests.get(request_id)
        if self._past is None or self._recorded is None:
            self._past = Past(self._run)
            self._recorded = RecordedRun.of(self._run, self._past, self.model)
        config = self._past.changed(recorded_config(self.trace), changes)
        return self._recorded.without(without).times_of(request_id, config)

    def _without(self, part: Part, request_id: str) -> tuple[str, dict[str, Any]] | None:
        """The fork without a cause: its words and its arguments."""
        config = recorded_config(self.trace)
        match part.kind, part.limit:
            case "stall" | "slow", _:  # no simulation has one
                return None
            case "seats", _:
                seats = max(config.max_num_seqs * 2, len(part.culprits) * 2)
                return f"with max_num_seqs={seats}", {"max_num_seqs": seats, "max_num_active_seqs": None}
            case "adapter", "max_loras":
                slots = min(config.max_loras * 2, MAX_LORAS)
                return f"with max_loras={slots}", {"max_loras": slots}
            case "kv_blocks" | "preempted" | "recomputed", _:
                return f"with num_blocks={config.num_blocks * 4}", {"num_blocks": config.num_blocks * 4}
            case "cut", "long_prefill_token_threshold":
                return "with long_prefill_token_threshold=0", {"long_prefill_token_threshold": 0}
            case "cut", "policy":
                return "with policy='fcfs'", {"policy": "fcfs"}
            case "partial_prefills", _:  # without any limit it would wait for the budget instead
                slots = config.max_num_partial_prefills or 0
                changes = {"max_num_partial_prefills": slots * 2 or None, "max_long_partial_prefills": None}
                which = f"max_num_partial_prefills={slots * 2}" if slots else "any number of long prompts"
                return f"with {which}", changes
            case "cut", "partial_prefill_slot":
                limits = {"max_num_partial_prefills": None, "max_long_partial_prefills": None}
                return "without limits on partial prefills", limits
        culprits = [culprit for culprit in part.culprits if culprit != request_id]
        if not culprits:
            return None
        return f"without {culprits[0]}", {"without": (culprits[0],)}


class _States:
    """The place of one request in each step.

    Attributes:
        request_id: The request.
        first_seen: First step whose scheduling could see it.
        chunks: Its chunks by step.
        preempted_at: Steps that preempted it, `BEFORE` for one that the trace has forgotten.
    """

    def __init__(self, request_id: str, first_seen: int) -> None:
        self.request_id = request_id
        self.first_seen = first_seen
        self.chunks: dict[int, Chunk] = {}
        self.preempted_at: list[int] = []

    @classmethod
    def of_all(cls, records: Sequence[StepRecord], requests: Collection[RequestMetrics]) -> dict[str, _States]:
        """Those of every request of a trace."""
        states = {request.request_id: cls(request.request_id, request.arrival_step) for request in requests}
        for record in records:
            for chunk in record.chunks:
                if chunk.request_id in states:
                    states[chunk.request_id].chunks[record.step] = chunk
            for request_id in record.preempted:
                if request_id in states:
                    states[request_id].preempted_at.append(record.step)
        return states

    def is_preempted_in(self, step: int) -> bool:
        """Whether the request waits to resume in a step."""
        since = max((at for at in self.preempted_at if at <= step), default=None)
        return since is not None and not any(since < at <= step for at in self.chunks)


def _holders(record: StepRecord, request_id: str) -> dict[str, float]:
    """The requests that hold KV blocks in a step, with their numbers of blocks."""
    tables = record.block_tables if record.has_block_tables else {}
    held = {rid: float(len(table)) for rid, table in tables.items() if rid != request_id and table}
    return held or dict.fromkeys((rid for rid in record.running if rid != request_id), 1.0)


def _in_unit(latency: Any, unit: str) -> float:
    return float(latency.seconds if unit == "s" else latency.steps)


class Explanations(list[Explanation]):
    """Explanations of several requests; printed with an empty line between them."""

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self)) or "no request"

    def _repr_html_(self) -> str | None:
        return "".join(filter(None, (each._repr_html_() for each in self))) or None


def slowest(trace: Trace, count: int | None = 10, by: Literal["ttft", "e2e"] = "ttft") -> Explanations:
    """Explain the requests that waited longest.

    Args:
        trace: The trace.
        count: Number of requests; None for all.
        by: "ttft" or "e2e".

    Raises:
        ValueError: ``by`` is something else, or ``count`` is not a number from 1 on.

    Example:
        >>> from workbench import simulate
        >>> requests = [{"id": "long", "prompt": {"len": 900}}, {"id": "short", "prompt": {"len": 9}, "max_tokens": 1}]
        >>> trace = simulate({"config": {"max_num_batched_tokens": 100}, "requests": requests})
        >>> [explanation.request_id for explanation in trace.slowest(1)]
        ['short']
    """
    if by not in ("ttft", "e2e"):
        raise ValueError(f'by must be "ttft" or "e2e", got {by!r}')
    if count is not None:
        count = integer("count", count, 1, hint=", or None for all")
    explainer = explainer_of(trace)
    return Explanations(explainer.explain(request_id) for request_id in explainer.slowest(by)[:count])
