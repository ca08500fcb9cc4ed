"""The parts of a request's time: causes, the requests behind them, and what an explanation of it says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from workbench.analysis.check import MAX_ERROR
from workbench.base.on_demand import picture
from workbench.base.tables import table_lines, wrapped
from workbench.base.text import counted, printable, significant
from workbench.simulation.costs.fit import FitReport
from workbench.simulation.costs.slow_steps import SlowStep
from workbench.simulation.costs.stalls import Stall
from workbench.trace.readings.metrics import amount, still_without
from workbench.trace.reasons import Reason

OWN = "own computation"
RECOMPUTED = "recomputed after a preemption"
PROMPTS = "sharing steps with prompts"
DECODES = "sharing steps with decodes"
IN_PROGRESS = "the step in progress at its arrival"
BUDGET = "waiting for the token budget"
SEATS = "waiting for a seat (max_num_seqs)"
BLOCKS = "waiting for KV blocks"
PARTIAL = "waiting for the limit on partial prefills"
OTHER_WAIT = "waiting in the queue"
PREEMPTED = "preempted, waiting to resume"
PASSED_OVER = "passed over while running"
BETWEEN = "between steps"
BEFORE = "before the first step"
BEFORE_PART = "before this part of the run"
IDLE = ("between", "before", "before_part")
"""Kinds of time in which the trace has no step."""

SLOW = "slower than its contents explain"
STALL = "stalls: time that the contents of a step do not explain"

MAX_CULPRITS = 3
"""Maximum number of requests that a part names; the others are counted."""

MAX_SLOW = 3
"""Maximum number of slow steps that an explanation lists, those that lost most time."""


def misfit_words(problem: str) -> str:
    """A fit that does not hold, and what an answer goes by instead."""
    reason = problem.partition(". Step ")[0]
    return f"no fit: {reason}; steps are compared with others like them nearby, and divided by tokens"


SHARED = "a step that several requests share is divided by"

CUT = "prompt cut into small chunks by"
"""Followed by the limit: the time that the steps cost in which no more of the prompt was allowed."""

_WORDS = {
    "own": OWN,
    "recomputed": RECOMPUTED,
    "prompts": PROMPTS,
    "decodes": DECODES,
    "in_progress": IN_PROGRESS,
    "passed_over": PASSED_OVER,
    "between": BETWEEN,
    "before": BEFORE,
    "before_part": BEFORE_PART,
    "stall": STALL,
    "slow": SLOW,
    "token_budget": BUDGET,
    "kv_blocks": BLOCKS,
    "partial_prefills": PARTIAL,
    "state_boundary": "waiting for a state of recurrent layers",
    "output_in_flight": "waiting for its output in flight",
    "preempted": PREEMPTED,
    "policy": "left out by the scheduling policy",
    "grammar": "waiting for its grammar",
    "adapter": "waiting for a slot for its adapter",
    "transfer": "waiting for the transfer of its KV",
    "encoder": "waiting for the encoder",
}

KINDS = (*_WORDS, "seats", "cut", "behind", "unknown")
"""Every kind of a cause."""


class Cause(NamedTuple):
    """A cause of a part of a latency.

    Attributes:
        kind: A kind of reason (`workbench.trace.reasons.Kind`), or "own", "recomputed", "prompts", "decodes",
            "in_progress", "passed_over", "between" for time between steps, "before" for the wait for a run's first
            step, "before_part" for the time before a trace that lacks earlier steps, "stall" for the time that the
            contents of a step do not explain, "slow" for that of a step which is late without standing still, or "cut"
            for a chunk that a limit cut small.
        limit: For "cut" the limit, as in ``chunk.limited_by``; for "seats" and "adapter" the field of EngineConfig.
    """

    kind: str
    limit: str = ""

    @classmethod
    def of(cls, reason: Reason) -> Cause:
        """The cause of a step in which a request waits."""
        return cls(reason.root, reason.limit if reason.root in ("seats", "adapter") else "")

    @property
    def words(self) -> str:
        """The cause as a part of an explanation shows it."""
        if self.kind == "cut":
            return f"{CUT} {self.limit}"
        if self.kind == "seats":
            return f"waiting for a seat ({self.limit})" if self.limit else SEATS
        words = _WORDS.get(self.kind, OTHER_WAIT)
        return f"{words} ({self.limit})" if self.limit else words


def before(first_step: int) -> Cause:
    """The cause of the time before the first step of a trace."""
    return Cause("before_part" if first_step else "before")


class _PartFields(NamedTuple):
    cause: str
    amount: float
    culprits: tuple[str, ...]
    steps: tuple[int, ...]


class Part(_PartFields):
    """A part of a latency.

    Attributes:
        cause: The cause as it is shown.
        amount: Seconds, or steps where the trace has no clock.
        culprits: The requests behind it, the one with the largest share first; for the token budget, with most tokens.
        steps: The steps in which it happened.
        kind: The kind of the cause, see `Cause`.
        limit: Its limit, "" for none.
        factor: For slow steps the number of times that they took what their contents explain; 1 for other causes.
        tokens: For the token budget what each culprit got of it in these steps, in tokens; () for other causes.
    """

    kind: str
    limit: str
    factor: float
    tokens: tuple[int, ...]

    @classmethod
    def of(
        cls,
        cause: Cause,
        amount: float,
        culprits: tuple[str, ...],
        steps: tuple[int, ...],
        factor: float = 1.0,
        tokens: tuple[int, ...] = (),
    ) -> Part:
        """The part of a cause."""
        part = cls(cause.words, amount, culprits, steps)
        part.kind, part.limit = cause
        part.factor, part.tokens = factor, tokens
        return part

    def who(self) -> tuple[list[str], str]:
        """The first MAX_CULPRITS requests behind it, and words for the others, "" for none; with tokens if known."""
        named, others = list(self.culprits[:MAX_CULPRITS]), len(self.culprits) - MAX_CULPRITS
        more = f"{others:,} more" if others > 0 else ""
        if self.tokens:
            left = sum(self.tokens[MAX_CULPRITS:])
            named = [f"{name} ({counted(n, 'token')})" for name, n in zip(named, self.tokens)]
            more = more and f"{more} ({counted(left, 'token')})"
        return named, more

    @property
    def who_words(self) -> str:
        """The requests behind it, as they are shown; "" for none."""
        named, more = self.who()
        return ", ".join(named) + (f" and {more}" if more else "")

    @property
    def where(self) -> str:
        """The steps in which it happened, such as "steps 3 to 9"."""
        return f"steps {self.steps[0]} to {self.steps[-1]}" if len(self.steps) > 1 else f"step {self.steps[0]}"

    @property
    def words(self) -> str:
        """The cause, with the factor of slow steps."""
        return f"{self.cause} (x{significant(self.factor, 2)})" if self.kind == "slow" else self.cause

    @property
    def is_culprit(self) -> bool:
        """Whether it made the request slow: it is neither the request's work nor time in which no step was taken."""
        return self.kind != "own" and self.kind not in IDLE


@dataclass(frozen=True)
class Span:
    """A stretch of a request's time, split into parts.

    Attributes:
        name: "time to first token", "gap before token 7" and so on; the first token is token 1.
        total: Its length in the unit of the explanation.
        parts: The parts, the largest first; their amounts add up to ``total``.
        is_open: It had not ended: ``total`` is the time so far, a lower bound.
    """

    name: str
    total: float
    parts: tuple[Part, ...]
    is_open: bool = False

    def amount(self, unit: str) -> str:
        """Its length as it is shown."""
        return f"{'at least ' if self.is_open else ''}{amount(self.total, unit)}"

    @property
    def shown(self) -> list[Part]:
        """The parts that an explanation lists, of half a percent or more."""
        return [part for part in self.parts if part.amount >= 0.005 * self.total]

    @property
    def smaller(self) -> float:
        """The sum of the other parts, in the unit of the explanation; 0 without any."""
        return sum(part.amount for part in self.parts if part.amount < 0.005 * self.total)

    def share(self, amount: float) -> str:
        """The share of a part, or of several, as text."""
        share = amount / self.total
        return f"{share:.0%}" if share >= 0.005 else "<1%"

    @property
    def biggest(self) -> Part | None:
        """The largest part, the request's own computation and the time between steps included; None without any."""
        return next((part for part in self.parts if part.amount > 0), None)

    @property
    def biggest_avoidable(self) -> Part | None:
        """The largest part without the request's own computation and the time between steps; None without any."""
        return next((part for part in self.parts if part.is_culprit and part.amount > 0), None)


@dataclass(frozen=True)
class Confirmation:
    """The same run without the largest cause.

    Attributes:
        change: The change, such as "without r7" or "max_num_seqs=64".
        before: The latency in a simulation of the run as it was.
        after: The latency in a simulation without the cause.
        recorded: The recorded latency. It is ``before`` if the run was under a policy in Python, which cannot be
            simulated from the trace.
        is_recorded: Whether ``before`` is the recorded latency.
        between: The part of the recorded latency in which no step was taken, which a simulation has not.
        when: The words for that part.
    """

    change: str
    before: float
    after: float
    recorded: float
    is_recorded: bool = False
    between: float = 0.0
    when: str = BETWEEN

    @property
    def holds(self) -> bool:
        """Whether the simulation of the run as it was is near enough to the recorded latency."""
        return abs(self.before - self.recorded) <= MAX_ERROR * self.recorded

    def sentence(self, unit: str) -> str:
        """Both latencies, where they come from, and whether the change does not help."""
        before, recorded = amount(self.before, unit), amount(self.recorded, unit)
        if not self.holds:
            why = ""
            if self.between and abs(self.before + self.between - self.recorded) <= MAX_ERROR * self.recorded:
                why = f", because it leaves out the {amount(self.between, unit)} {self.when}"
            gives = f"the simulation of the run as it was gives {before}, not {recorded}{why}"
            return f"{self.change}: not confirmed, {gives}; rely on the measured parts"
        which = "simulated and recorded" if self.is_recorded else f"both simulated, recorded {recorded}"
        after = amount(self.after, unit)
        helps = self.after < self.before and after != before
        return f"{self.change}{'' if helps else ' is not shorter'}: {after} instead of {before} ({which})"


@dataclass(frozen=True, eq=False)
class Explanation:
    """The answer of ``trace.explain``.

    Attributes:
        request_id: The request.
        unit: "s", or "steps" if the trace has no clock.
        total: From arrival to the end, or to the end of the trace if it has not ended.
        parts: Parts of ``total``, the largest first; their amounts add up to it.
        ttft: The time to first token; None if it got none.
        gaps: Its long gaps between tokens, the longest first.
        stalls: The stalled steps in its time.
        slow: The steps in its time that were slower than others like them.
        arrived: The time of day of its arrival; "" if the trace does not say it.
        misfit: Why the durations of steps do not follow from their contents; "" if they do, or no fit was made.
        fit: Errors of the cost model that divides steps; None if it was given, or steps are divided by tokens.
        is_open: It has not ended in the trace.
        waiting: The time without a token of a request that got none; None for others.
        is_never_served: The engine stands still, and `trace.why()` says that nothing will serve the request.
    """

    request_id: str
    unit: str
    total: float
    parts: tuple[Part, ...]
    ttft: Span | None
    gaps: tuple[Span, ...]
    stalls: tuple[Stall, ...]
    fit: FitReport | None
    _confirm: Callable[[Part, bool], Confirmation | None]
    is_open: bool = False
    waiting: Span | None = None
    slow: tuple[SlowStep, ...] = ()
    misfit: str = ""
    arrived: str = ""
    is_never_served: bool = False

    @property
    def biggest(self) -> Part | None:
        """The largest part of ``total``, as `Span.biggest` has it; None without any."""
        return Span("", self.total, self.parts).biggest

    @property
    def biggest_avoidable(self) -> Part | None:
        """The largest part that something else than the request made, as `Span.biggest_avoidable` has it."""
        return Span("", self.total, self.parts).biggest_avoidable

    @cached_property
    def confirmation(self) -> Confirmation | None:
        """The latency without the largest avoidable cause, simulated; None without a cause or a way to remove it."""
        in_ttft = self.ttft.biggest_avoidable if self.ttft is not None else None
        biggest = self.biggest_avoidable
        if biggest is None:
            return None
        is_early = in_ttft is not None and in_ttft.cause == biggest.cause
        parts = self.ttft.parts if is_early and self.ttft is not None else self.parts
        idle = [part for part in parts if part.kind in IDLE and part.amount > 0]
        found = self._confirm(biggest, is_early)
        between, when = sum(part.amount for part in idle), " and ".join(part.cause for part in idle) or BETWEEN
        return found and replace(found, between=between, when=when)

    def span(self, by: str) -> Span | None:
        """The time to first token ("ttft") or the whole time ("e2e"), or the time so far; None if nothing is known."""
        return self.ttft or self.waiting if by == "ttft" else Span("end to end", self.total, self.parts, self.is_open)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The whole time, the time to first token if there is one, and the long gaps, with their names as shown."""
        until = "the end of the trace" if self.is_open else "its end"
        if self.waiting is not None:
            until += ", without a token"
        elif self.is_open:
            until += "; it has not ended"
        arrival = f"arrival at {self.arrived}" if self.arrived else "arrival"
        whole = Span(f"from {arrival} to {until}", self.total, self.parts)
        return (whole, *([self.ttft] if self.ttft is not None else []), *self.gaps)

    @property
    def notes(self) -> list[str]:
        """Sentences about the verdict, stalls, slow steps, the run without the largest cause, and shared steps."""
        lines = [self.verdict] if self.verdict else []
        lines += [f"stall: {stall}" for stall in self.stalls]
        lines += [
            f"slow: {step}" for step in sorted(self.slow, key=lambda step: step.expected - step.seconds)[:MAX_SLOW]
        ]
        if (said := self.confirmation) is not None:
            lines.append(said.sentence(self.unit))
        return lines + ([self.division] if self.division else [])

    @property
    def verdict(self) -> str:
        """That the request is never served; "" for others."""
        return NEVER_SERVED if self.is_never_served else ""

    @property
    def division(self) -> str:
        """The rule by which shared steps are divided, a sentence part; "" with a given cost model, and for few steps.

        The fit of a running engine changes, and with it the parts of requests that have ended.
        """
        if self.fit is not None:
            steps, error = self.fit.num_fitted + self.fit.num_held_out, self.fit.median_error
            costs = f"the step costs of this run as fitted over {counted(steps, 'step')}"
            return f"{SHARED} {costs}, which are within {error:.1%} for half of the steps"
        return f"{SHARED} tokens, because times here do not follow from the contents of steps" if self.misfit else ""

    def text(self, width: int | None = None) -> str:
        """The explanation as text.

        Args:
            width: Columns that a line may have; None for any number.
        """
        whole, *others = self.spans
        lines = self._lines(f"{self.request_id}: {amount(whole.total, self.unit)} {whole.name}", whole, width)
        for span in others:
            lines += self._lines(f"{span.name}: {span.amount(self.unit)}", span, width)
        return "\n".join([*lines, *(line for note in self.notes for line in wrapped(printable(note), width))])

    def __repr__(self) -> str:
        return self.text()

    def _lines(self, heading: str, span: Span, width: int | None) -> list[str]:
        lines = wrapped(printable(heading), width)  # names come from a file
        for part in span.shown:
            what = ": ".join(filter(None, (part.words, part.who_words)))
            numbers = f"  {amount(part.amount, self.unit):>10}  {span.share(part.amount):>4}  "
            lines += wrapped(printable(f"{numbers}{what} ({part.where})"), width, indent=len(numbers))
        if span.smaller:
            lines.append(f"  {amount(span.smaller, self.unit):>10}  {span.share(span.smaller):>4}  {SMALLER}")
        return lines

    def _repr_html_(self) -> str | None:
        return picture("Explanation", self)


NEVER_SERVED = "never served: its wait never clears (trace.why() says what frees it)"
"""The verdict on a request that an engine which stands still will not serve."""

SMALLER = "in smaller parts"
"""The cause of the parts of a stretch that are too small for a separate line."""

CAUSE_COLUMNS = ("share", "mean", "requests", "biggest avoidable", "cause")
"""Headings of a `CauseTable`."""


class CauseRow(NamedTuple):
    """A cause in all requests.

    Attributes:
        cause: One of the causes of this module.
        amount: Its sum over all requests.
        num_requests: Number of requests that have it.
        num_biggest: Number of requests whose largest avoidable cause it is.
        culprit: The request that is most often the first behind it; "" for none.
        is_avoidable: It is neither the requests' own computation nor time in which no step was taken.
    """

    cause: str
    amount: float
    num_requests: int
    num_biggest: int
    culprit: str
    is_avoidable: bool


@dataclass(frozen=True, eq=False)
class CauseTable:
    """The time of all requests, by its causes.

    Attributes:
        by: "ttft" or "e2e".
        unit: "s", or "steps" if the trace has no clock.
        total: The latency of all requests together.
        num_requests: Number of requests.
        rows: The causes, the largest first; their amounts add up to ``total``.
        num_open: Number of requests whose latency had not ended, and counts with the time so far.
    """

    by: str
    unit: str
    total: float
    num_requests: int
    rows: tuple[CauseRow, ...]
    num_open: int = 0

    @property
    def heading(self) -> list[str]:
        """Sentences about the sum, and about requests whose latency had not ended."""
        if not self.num_requests:
            return [none_has(self.by)]
        what = "time to first token" if self.by == "ttft" else "time from arrival to the end"
        mean = amount(self.total / self.num_requests, self.unit)
        least = "at least " if self.num_open else ""
        lines = [f"{what} of {counted(self.num_requests, 'request')}, {least}{mean} on average"]
        if self.num_open:
            lines.append(still_without(self.num_open, "first token" if self.by == "ttft" else "end"))
        return lines

    @property
    def cells(self) -> Iterator[tuple[str, str, int, str, str]]:
        """The rows as they are shown, in the order of `CAUSE_COLUMNS`."""
        for row in self.rows:
            share = row.amount / self.total if self.total else 0.0
            biggest = f"{row.num_biggest}" if row.is_avoidable else "–"
            behind = f", most often {row.culprit}" if row.culprit else ""
            mean = amount(row.amount / self.num_requests, self.unit)
            yield f"{share:.0%}", mean, row.num_requests, biggest, f"{row.cause}{behind}"

    def text(self, width: int | None = None) -> str:
        """The table as text.

        Args:
            width: Columns that a line may have; None for any number. If the columns need more, each row is a block.
        """
        cells = ([printable(f"{cell}") for cell in row] for row in self.cells)  # names come from a file
        heading = [line for sentence in self.heading for line in wrapped(sentence, width)]
        if not self.rows:
            return "\n".join(heading)
        cause = len(CAUSE_COLUMNS) - 1
        return "\n".join([*heading, *table_lines([CAUSE_COLUMNS, *cells], width=width, title=(cause,), left=(cause,))])

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str | None:
        return picture("CauseTable", self)


def none_has(by: str) -> str:
    """The sentence about steps in which no request has a latency, "ttft" or "e2e"."""
    return "no request got its first token in these steps" if by == "ttft" else "no request ran or ended in these steps"


def tabulate(explanations: Sequence[Explanation], by: str) -> CauseTable:
    """Add up the explanations of many requests, of one trace or of several.

    Args:
        explanations: At least one; requests without a first token count with the time so far.
        by: "ttft" or "e2e".
    """
    spans = [span for each in explanations if (span := each.span(by)) is not None]
    amounts: defaultdict[str, float] = defaultdict(float)
    having: Counter[str] = Counter()
    biggest: Counter[str] = Counter()
    culprits: defaultdict[str, Counter[str]] = defaultdict(Counter)
    avoidable = {part.cause for span in spans for part in span.parts if part.is_culprit}
    for span in spans:
        if span.biggest_avoidable is not None:
            biggest[span.biggest_avoidable.cause] += 1
        for part in span.parts:
            amounts[part.cause] += part.amount
            having[part.cause] += part.amount > 0
            culprits[part.cause].update(part.culprits[:1])
    rows = []
    for cause, value in sorted(amounts.items(), key=lambda item: -item[1]):
        culprit = next((request_id for request_id, _ in culprits[cause].most_common(1)), "")
        rows.append(CauseRow(cause, value, having[cause], biggest[cause], culprit, cause in avoidable))
    unit = explanations[0].unit if explanations else "s"
    num_open = sum(span.is_open for span in spans)
    return CauseTable(by, unit, sum(span.total for span in spans), len(spans), tuple(rows), num_open)
