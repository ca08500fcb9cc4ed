"""Compare two traces of the same requests: the first divergence, and the latency and recomputed tokens of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING

from workbench.base.on_demand import picture
from workbench.base.tables import table_lines, terminal_width, wrapped
from workbench.base.text import counted, duration, printable, shown
from workbench.trace.errors import TraceError
from workbench.trace.readings.divergence import (
    Divergence,
    TokenDifference,
    chunks_by_request,
    common_steps,
    divergence,
    output_token_ids,
    token_difference,
)
from workbench.trace.readings.matching import Matching, match_requests
from workbench.trace.readings.metrics import RequestMetrics, amount, number
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.readings.recorded_when import recorded_when
from workbench.trace.readings.spread import typical_change
from workbench.trace.readings.two_sides import (
    UNEQUAL_STEPS,
    Measure,
    RequestComparison,
    has_unequal_steps,
    measures_of,
    minus,
)

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

MAX_ROWS = 20
"""Maximum number of requests in a repr."""

FORKED = ", forked at step"
"""Stands in the source of a run behind that of the run which `workbench.analysis.fork` simulated again."""

MAX_FIELDS = 3
"""Maximum number of fields that are listed by name when only one configuration has them; more are counted."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of ``compare``.

    Attributes:
        a: The first trace.
        b: The second trace.
        unit: Unit of latencies: "s", or "steps" if one of the traces has no clock.
        requests: Every request, those with a first token in one run alone first, then sorted by the change of TTFT,
            then of ITL, then of recomputed tokens, largest first; by recomputed tokens alone if only counts can be
            compared.
        first_divergence: The first step in which the schedules differ; None if they are equal.
        same_tokens: Whether all outputs agree up to the shorter one; None if one of the traces holds no tokens,
            or if its recorder left them out.
        first_token_difference: The token difference of the first such request in order of arrival.
        notes: Other differences that help to read the comparison, as text.
    """

    a: Trace
    b: Trace
    unit: str
    requests: tuple[RequestComparison, ...]
    first_divergence: Divergence | None
    same_tokens: bool | None
    first_token_difference: TokenDifference | None
    notes: tuple[str, ...]

    @property
    def badge(self) -> str:
        """One line that says whether both traces produced the same tokens."""
        if self.same_tokens is None:
            return "no tokens to compare"
        if self.first_token_difference is None:
            lengths = [(each.a.num_output_tokens, each.b.num_output_tokens) for each in self.requests]
            far = "" if all(of_a == of_b for of_a, of_b in lengths) else " as far as both have them"
            return f"same tokens{far}{self._taken_from}"
        difference = self.first_token_difference
        tokens = [("nothing" if token is None else f"token {token}") for token in (difference.a, difference.b)]
        return (
            f"different tokens: {difference.request_id}, output token {difference.index + 1}: "
            f"{tokens[0]} in A, {tokens[1]} in B"
        )

    @property
    def _taken_from(self) -> str:
        """The reason why a simulation has the tokens of a run, if equal tokens say nothing; "" if none is known."""
        (of_a, a_is_forked, _), (of_b, b_is_forked, _) = (run.meta.source.partition(FORKED) for run in (self.a, self.b))
        if of_a != of_b or not (a_is_forked or b_is_forked):
            return ""
        if a_is_forked and b_is_forked:
            return ": both are simulations, which take them from the run that was forked"
        one, other = "BA" if b_is_forked else "AB"
        return f": {one} is a simulation, which takes them from {other}"

    def sorted_by(self, value: str) -> list[RequestComparison]:
        """The requests, sorted by the size of a change, largest first.

        Args:
            value: "ttft", "itl" or "waste".

        Raises:
            ValueError: ``value`` is something else.
        """
        if value not in ("ttft", "itl", "waste"):
            raise ValueError(f'value must be "ttft", "itl" or "waste", got {value!r}')
        sizes = {request.request_id: abs(getattr(request, f"{value}_delta") or 0) for request in self.requests}
        if value == "ttft":
            return sorted(self.requests, key=lambda each: (-abs(each.lost_first_token), -sizes[each.request_id]))
        return sorted(self.requests, key=lambda each: -sizes[each.request_id])

    @property
    def lines(self) -> list[str]:
        """The comparison of the runs, a sentence each."""
        parted = str(self.first_divergence) if self.first_divergence else "never"
        return [
            *(
                ", ".join(filter(None, (f"{name}: {run.meta.source}", f"{len(run)} steps", recorded_when(run))))
                for name, run in (("A", self.a), ("B", self.b))
            ),
            self.badge,
            f"first divergence: {parted}",
            *self._changes(),
            *self.notes,
        ]

    @property
    def counts_only(self) -> bool:
        """Whether the runs have no times, and a latency in steps of one is another time in the other."""
        return self.unit == "steps" and has_unequal_steps(self.a, self.b)

    @cached_property
    def measures(self) -> list[Measure]:
        """Mean and P99 of both latencies, and the throughput, of both runs; counts if latencies cannot be compared."""
        return measures_of(self.a, self.b, self.requests, self.unit)

    def _changes(self) -> list[str]:
        """Each measure of both runs, and of a mean how many requests gain and pay if it changed."""
        lines = []
        order = {request_id: index for index, request_id in enumerate(self.a.requests)}
        requests = sorted(self.requests, key=lambda request: order[request.request_id])
        num_simulated = is_simulated(self.a) + is_simulated(self.b)
        is_measured = self.unit == "s" and num_simulated < 2
        for measure in self.measures:
            unit = f" {measure.unit}" if measure.unit not in ("", "s") else ""
            a, b = (amount(each, "s") if measure.unit == "s" else number(each) for each in (measure.a, measure.b))
            line = f"{measure.name}: {a} -> {b}{unit}"
            statistic, _, latency = measure.name.partition(" ")
            if statistic != "mean":
                # Nobody knows the spread of a tail, or of a throughput, from two runs alone.
                lines.append(line if is_measured or measure.is_of_unserved else f"{line}: {measure.words}")
                continue
            values = (
                (each.ttft_a, each.ttft_b) if latency == "TTFT" else (each.itl_a, each.itl_b) for each in requests
            )
            both = [(before, after) for before, after in values if before is not None and after is not None]
            change = typical_change(both) if is_measured else None
            if change is not None and not change.is_certain and not num_simulated:
                lines.append(f"{line}: no change beyond the spread of the runs ({change})")
                continue
            deltas = [minus(after, before) for before, after in both]
            deltas += [each.lost_first_token for each in requests] if latency == "TTFT" else []
            gain, pay = sum(delta < 0 for delta in deltas), sum(delta > 0 for delta in deltas)
            whose = f"{counted(gain, 'request')} gain{'s' * (gain == 1)}, {pay} pay{'s' * (pay == 1)}"
            words = f", {change}" if change else "" if is_measured else f": {measure.words}"
            lines.append(f"{line}{words}; {whose}")
        return [*lines, *filter(None, [self._whose_ttft])]

    @property
    def _whose_ttft(self) -> str:
        """The requests that mean and P99 of TTFT are of, if others have a first token in one run alone; "" if not."""
        if self.counts_only or not any(request.lost_first_token for request in self.requests):
            return ""
        both = sum(request.ttft_a is not None and request.ttft_b is not None for request in self.requests)
        have = "has" if both == 1 else "have"
        return f"mean and P99 TTFT are those of the {counted(both, 'request')} that {have} a first token in both runs"

    @property
    def alike(self) -> str:
        """The sentence that stands for a table without any change; "" if a request has one."""
        sides = [
            ((each.ttft_a, each.itl_a), (each.ttft_b, each.itl_b))
            for each in (() if self.counts_only else self.requests)
        ]
        if not self.requests or any(each.waste_delta for each in self.requests) or any(a != b for a, b in sides):
            return ""
        latencies = "" if self.counts_only else "latencies and "
        return f"each of the {counted(len(self.requests), 'request')} has the same {latencies}recomputed tokens in both"

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of the requests; without latencies that cannot be compared, and counts that are all 0.

        Empty without any row.
        """
        unit = "" if self.unit == "s" else f" {self.unit}"
        latencies = () if self.counts_only else (f"TTFT{unit}", f"ITL{unit}")
        has_waste = any(map(_has_waste, self.requests))
        names = (*latencies, "recomputed") if has_waste or self.counts_only else latencies
        title = ["request", *(f"{name} {side}" for name in names for side in ("A", "B", "Δ"))]
        latency = duration if self.unit == "s" else number
        rows = []
        for request in self._told[:MAX_ROWS]:
            ttft = _cells(request.ttft_a, request.ttft_b, request.ttft_delta, latency)
            itl = _cells(request.itl_a, request.itl_b, request.itl_delta, latency)
            times = [] if self.counts_only else [*ttft, *itl]
            recomputed = (request.a.num_recomputed_tokens, request.b.num_recomputed_tokens, request.waste_delta)
            rows.append([request.request_id, *times, *_cells(*recomputed, number)][: len(title)])
        return (title, rows) if rows else ([], [])

    @property
    def _told(self) -> Sequence[RequestComparison]:
        """The requests of which the table says something: all with latencies, else those with recomputed tokens."""
        return [each for each in self.requests if _has_waste(each)] if self.counts_only else self.requests

    def __repr__(self) -> str:
        title, rows = self.table
        width = terminal_width()
        lines = [piece for line in self.lines for piece in wrapped(printable(line), width)]
        if self.alike:
            return "\n".join([*lines, *wrapped(self.alike, width)])
        table = ["", *table_lines([title, *([printable(row[0]), *row[1:]] for row in rows)], left=(0,), width=width)]
        return "\n".join([*lines, *(table if rows else ()), *self.more])

    def _repr_html_(self) -> str | None:
        return picture("Comparison", self)

    @property
    def more(self) -> list[str]:
        """The number of requests that the table leaves out, as a sentence."""
        hidden = len(self._told) - MAX_ROWS
        return [f"... and {counted(hidden, 'request')} with smaller changes"] if hidden > 0 else []


def compare(a: Trace, b: Trace) -> Comparison:
    """Compare two traces of the same workload, request by request.

    Args:
        a: The trace to compare with.
        b: The trace to compare; deltas are b minus a.

    Returns:
        The comparison; its repr is a table.

    Requests are matched by id; ids of vLLM, which differ between runs, without their random end; others by arrival and
    length.

    Raises:
        TraceError: One of them is not a trace, or they hold different requests or different prompts.

    Example:
        >>> from workbench import simulate
        >>> workload = {"requests": [{"id": "r", "prompt": {"len": 100}, "max_tokens": 2}]}
        >>> result = compare(simulate(workload), simulate(workload, config={"max_num_batched_tokens": 50}))
        >>> print(result.first_divergence)
        step 0, r: A computes tokens [0, 100), B computes tokens [0, 50)
        >>> result.requests[0].ttft_delta
        1.0
    """
    for name, given in (("a", a), ("b", b)):
        if not hasattr(given, "requests"):
            raise TraceError(f"{name} must be a Trace, such as engine.trace, got {shown(given)}")
    matching = match_requests(a, b)
    _check_same_workload(a, b, matching.pairs)
    metrics_a, metrics_b = metrics(a), metrics(b)
    unit = "s" if metrics_a.summary.unit == metrics_b.summary.unit == "s" else "steps"
    before = common_steps(a, b)
    chunks_a, chunks_b = chunks_by_request(a, before), chunks_by_request(b, before)
    tokens_a, tokens_b = output_token_ids(a), output_token_ids(b)
    before_a, before_b = outputs_before(a), outputs_before(b)
    requests = []
    for request_id, id_in_b in matching.pairs:
        of_a, of_b = metrics_a.requests[request_id], metrics_b.requests[id_in_b]
        ended = all(measured.finish_reason not in ("", "abort") for measured in (of_a, of_b))
        first_a, first_b, different = before_a.get(request_id, 0), before_b.get(id_in_b, 0), None
        if first_a is not None and first_b is not None:
            both = request_id, tokens_a[request_id], tokens_b[id_in_b], ended
            different = token_difference(*both, before=(first_a, first_b))
        requests.append(
            RequestComparison(
                request_id,
                of_a,
                of_b,
                divergence(request_id, a, b, chunks_a[request_id], chunks_b[id_in_b], id_in_b),
                different,
                _ttft(of_a, unit),
                _ttft(of_b, unit),
                _itl(of_a, unit),
                _itl(of_b, unit),
            )
        )
    divergences = [request.divergence for request in requests if request.divergence]
    differences = [request.token_difference for request in requests if request.token_difference]
    known = all(
        any(tokens.values()) and trace.config.get("token_ids_recorded", True)
        for trace, tokens in ((a, tokens_a), (b, tokens_b))
    )
    counts_only = unit == "steps" and has_unequal_steps(a, b)
    size = (lambda request: abs(request.waste_delta)) if counts_only else _size_of_change
    return Comparison(
        a=a,
        b=b,
        unit=unit,
        requests=tuple(sorted(requests, key=size, reverse=True)),
        first_divergence=min(divergences, key=lambda divergence: divergence.step, default=None),
        same_tokens=not differences if known else None,
        first_token_difference=differences[0] if differences and known else None,
        notes=(*([UNEQUAL_STEPS] if counts_only else []), *_one_predicted(a, b, unit), *_notes(a, b, matching)),
    )


def _has_waste(request: RequestComparison) -> bool:
    """Whether one of both runs computed tokens of a request again."""
    return bool(request.a.num_recomputed_tokens or request.b.num_recomputed_tokens)


def _check_same_workload(a: Trace, b: Trace, pairs: Iterable[tuple[str, str]]) -> None:
    for request_id, in_b_id in pairs:
        in_a, in_b = a.requests[request_id], b.requests[in_b_id]
        if in_a.num_prompt_tokens != in_b.num_prompt_tokens:
            lengths = f"{in_a.num_prompt_tokens} tokens in A, {in_b.num_prompt_tokens} in B"
            raise TraceError(f"the prompts of request {request_id!r} differ in length: {lengths}")
        tokens = in_a.prompt_token_ids, in_b.prompt_token_ids
        if all(tokens) and tokens[0] != tokens[1]:
            index = next(i for i, (x, y) in enumerate(zip(*tokens)) if x != y)
            raise TraceError(
                f"the prompts of request {request_id!r} differ: token {index + 1} is {tokens[0][index]} in A, "
                f"{tokens[1][index]} in B"
            )
        if _hash_key(a) == _hash_key(b) and in_a.block_hashes != in_b.block_hashes and _hash_key(a):
            raise TraceError(f"the prompts of request {request_id!r} differ, as their block hashes show")


def _hash_key(trace: Trace) -> str:
    made = trace.meta.prefix_hashes
    return made.key_id if made else ""


def _notes(a: Trace, b: Trace, matching: Matching) -> list[str]:
    notes = [f"{name} is not whole: {problem}" for name, trace in (("A", a), ("B", b)) for problem in trace.problems]
    if matching.note:
        notes.append(matching.note)
    moved = [
        (id_a, id_b) for id_a, id_b in matching.pairs if a.requests[id_a].arrival_step != b.requests[id_b].arrival_step
    ]
    if moved:
        first_a, first_b = moved[0]
        steps = f"{a.requests[first_a].arrival_step} in A, {b.requests[first_b].arrival_step} in B"
        if len(moved) == 1:
            notes.append(f"request {first_a} arrives in different steps: {steps}")
        else:
            notes.append(f"{len(moved)} requests arrive in different steps, the first is {first_a}: {steps}")
    changed = [
        f"{name} {a.config[name]!r} -> {b.config[name]!r}"
        for name in sorted(a.config.keys() & b.config.keys())
        if a.config[name] != b.config[name]
    ]
    if changed:
        notes.append(f"config: {', '.join(changed)}")
    if _hash_key(a) != _hash_key(b) and _hash_key(a) and _hash_key(b):
        notes.append("block hashes were made with different keys: prefixes shared across the two runs are unknown")
    one_sided = [known for known in (_known_only("A", a, b), _known_only("B", b, a)) if known]
    if one_sided:
        notes.append(f"config, in one trace only: {'; '.join(one_sided)}")
    return notes


def _known_only(name: str, one: Trace, other: Trace) -> str:
    """The fields that only one configuration has: a few by name; many come from another recorder, and tell nothing."""
    fields = sorted(one.config.keys() - other.config.keys())
    if len(fields) > MAX_FIELDS:
        return ""
    return ", ".join(f"{field} {one.config[field]!r}" for field in fields) + f" in {name}" if fields else ""


def is_simulated(trace: Trace) -> bool:
    """Whether its times come from a cost model, so that the same run would take the same time again."""
    return trace.meta.source.startswith("simulation") or FORKED in trace.meta.source


def _one_predicted(a: Trace, b: Trace, unit: str) -> list[str]:
    """A note on a measured run beside a simulated one; none if their times are of one kind."""
    if unit != "s" or is_simulated(a) == is_simulated(b):
        return []
    simulated, other = "AB" if is_simulated(a) else "BA"
    return [
        f"the times of {simulated} are predicted, those of {other} are measured: the changes contain the error of the "
        "prediction; for the effect of a setting compare two predictions, such as trace.whatif() and "
        "trace.whatif(max_num_seqs=16)"
    ]


def _ttft(metrics: RequestMetrics, unit: str) -> float | None:
    if metrics.ttft is None:
        return None
    return metrics.ttft.seconds if unit == "s" else float(metrics.ttft.steps)


def _itl(metrics: RequestMetrics, unit: str) -> float | None:
    gaps = metrics.gaps(unit)
    return fmean(gaps) if gaps else None


def _size_of_change(request: RequestComparison) -> tuple[float, ...]:
    sizes = (abs(delta or 0) for delta in (request.ttft_delta, request.itl_delta, request.waste_delta))
    return (abs(request.lost_first_token), *sizes)


def _cells(a: float | None, b: float | None, delta: float | None, words: Callable[[float], str]) -> list[str]:
    """Both values and their signed difference; a dash for None."""
    signed = "0" if delta == 0 else None if delta is None else f"{'+' if delta > 0 else '-'}{words(abs(delta))}"
    return ["-" if value is None else words(value) for value in (a, b)] + [signed or "-"]
