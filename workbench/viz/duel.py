"""A duel of two runs of the same arrivals: the class bets first, then one side is simulated and both are measured.

A side is the trace of one engine, or the traces of a fleet's replicas. In a live duel A is the run itself, B the same
requests under another configuration, or both are fleets that get its requests; in the playground the sides differ in a
setting, a policy or a router. Both are measured on the same clock, seconds where both have times and steps otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.base.field_checks import choice
from workbench.trace.readings.compare import compare
from workbench.trace.readings.metrics import Distribution, RequestMetrics, amount, number, percent
from workbench.trace.readings.metrics_collector import latency_distribution, metrics
from workbench.trace.readings.prefix_hits import hit_rate
from workbench.trace.readings.run_clock import clock_of
from workbench.trace.readings.two_sides import BOUNDS, NOTHING, UNEQUAL, has_unequal_steps, unserved_of, unserved_values
from workbench.trace.trace import Trace
from workbench.viz.changed_run import AT_WORK, BOTH, uncertainty
from workbench.viz.layout.comparison import change_words

if TYPE_CHECKING:
    from workbench.trace import RequestInfo
    from workbench.viz.changed_run import Changed

SIDES = ("A", "B", "neither")
"""The bets: this run, the other one, or a tie, see `tie_of`."""

REFUSED = (
    f"{UNEQUAL}, so they cannot settle this duel: choose the hit rate as the measure, change another setting, or give "
    "both runs times: a workload by a cost model, a recording by a longer run with less else running"
)
"""Why steps do not settle a duel between two values of a setting that bounds what a step holds."""

TIE = 0.01
"""Relative difference up to which neither side wins, unless `tie_of` says more."""

Side = Sequence[Trace]
"""The traces of one side: one, or one for each replica of a fleet."""


class Measure(NamedTuple):
    """A value by which a duel is decided.

    Attributes:
        better: The word for the value that wins: "shorter", "lower" or "higher".
        value: Its value for a side, in a unit of time; None if the side lacks it.
        words: The value and its unit as text.
        predicted: Its name among predicted values in seconds; "" for one that is not a time.
    """

    better: str
    value: Callable[[Side, str], float | None]
    words: Callable[[float, str], str] = amount
    predicted: str = ""


def _requests(side: Side) -> list[RequestMetrics]:
    return [request for trace in side for request in metrics(trace).requests.values()]


def _first_tokens(side: Side, unit: str) -> Distribution:
    """The times to first token, as the summary of a run has them."""
    requests = _requests(side)
    has_one = any(request.token_steps for request in requests)
    return latency_distribution(requests if has_one else [], "ttft", unit == "s")


def _longest_pause(side: Side, unit: str) -> float | None:
    return max((gap for request in _requests(side) for gap in request.gaps(unit)), default=None)


def _until_the_end(side: Side, unit: str) -> float | None:
    runs = [trace for trace in side if len(trace)]
    if not runs:
        return None
    return float(max(map(len, runs))) if unit == "steps" else clock_of(runs).at_work


def _throughput(side: Side, unit: str) -> float | None:
    tokens, time = sum(metrics(trace).summary.num_output_tokens for trace in side), _until_the_end(side, unit)
    return tokens / time if tokens and time else None


def busiest(side: Side) -> float | None:
    """The share of the requests that the replica with the most of them got; None without requests."""
    counts = [len(trace.requests) for trace in side]
    return max(counts) / sum(counts) if sum(counts) else None


def _percent_words(value: float, _: str) -> str:
    return percent(value)


def _rate_words(value: float, unit: str) -> str:
    return f"{number(value)}/{'s' if unit == 's' else 'step'}"


MEASURES = {
    "median time to first token": Measure(
        "shorter", lambda side, unit: _first_tokens(side, unit).p50, predicted="ttft_p50"
    ),
    "mean time to first token": Measure(
        "shorter", lambda side, unit: _first_tokens(side, unit).mean, predicted="ttft_mean"
    ),
    "P99 of the time to first token": Measure(
        "shorter", lambda side, unit: _first_tokens(side, unit).p99, predicted="ttft_p99"
    ),
    "longest pause between two tokens": Measure("shorter", _longest_pause, predicted="itl_max"),
    "time until all are finished": Measure("shorter", _until_the_end, predicted=AT_WORK),
    "throughput of output tokens": Measure("higher", _throughput, _rate_words, "output_throughput"),
    "hit rate of prompt tokens": Measure("higher", lambda side, _: hit_rate(_requests(side)), _percent_words),
    "share of requests at the busiest replica": Measure("lower", lambda side, _: busiest(side), _percent_words),
}
"""The measures of a duel by name. The last one is for fleets: a single engine gets all requests."""

FLEET_ONLY = "share of requests at the busiest replica"


def measure_words(num_replicas: int = 1) -> list[tuple[str, str]]:
    """The measures that are offered to sides of so many replicas, as (name, words with what wins)."""
    offered = [name for name in MEASURES if num_replicas > 1 or name != FLEET_ONLY]
    return [(name, f"{MEASURES[name].better} {name}") for name in offered]


def counts_alone(num_replicas: int = 1) -> list[tuple[str, str]]:
    """The same without times and rates: what settles a duel in steps that do not last equally long."""
    return [(name, words) for name, words in measure_words(num_replicas) if not is_time(name)]


SETTINGS = {
    "max_num_batched_tokens": "token budget",
    "max_num_seqs": "seats",
    "num_blocks": "KV blocks",
    "long_prefill_token_threshold": "chunk cap",
}
"""The words of the sliders of *What if* (js/what_if.js), by field."""

POLICIES = {"fcfs": "first come, first served", "priority": "priority"}
"""The policies that are offered there, with their words."""


class Score(NamedTuple):
    """The end of a duel.

    Attributes:
        winner: One of SIDES.
        sentence: The measure that decided, with both values.
        notes: Reasons and conditions, a sentence or more each.
        rows: The measures that differ, as (name, value of A, value of B).
        pictures: A picture of each side as SVG with its caption; none if both are shown elsewhere.
    """

    winner: str
    sentence: str
    notes: tuple[str, ...] = ()
    rows: tuple[tuple[str, str, str], ...] = ()
    pictures: tuple[tuple[str, str], ...] = ()


def question(
    changes: Mapping[str, Any],
    measure: str,
    routers: Mapping[str, Any] | None = None,
    unit: str = "s",
    now: Mapping[str, Any] | None = None,
    uncertain: float = 0.0,
) -> str:
    """The question to the class.

    Args:
        changes: The settings in which B differs from the run.
        measure: The measure that decides, see MEASURES.
        routers: The routers of both sides and the number of replicas (`workbench.viz.router_duel`), instead of changes.
        unit: Unit in which the duel will be settled: "s" or "steps".
        now: The settings of this run.
        uncertain: The relative difference of predictions of this run that says nothing.

    Raises:
        ValueError: There is no change, no such measure, or the duel cannot be settled.
    """
    choice("measure", measure, tuple(MEASURES))
    if unit == "steps" and BOUNDS & changes.keys() and is_time(measure):
        raise ValueError(f"the times of this run cannot be predicted, and {REFUSED}")
    which = f"Which has the {MEASURES[measure].better} {measure}?"
    if unit == "steps" and is_time(measure):
        which += " Steps count, not seconds."
    if (tie := tie_of(measure, unit, uncertain)) > TIE:
        which += f" A difference of less than {tie:.0%} is a tie here."
    if routers is not None:
        return f"The requests of this run go to {routers['replicas']} replicas, by router A or by router B. {which}"
    if not changes:
        raise ValueError("a duel needs a setting that differs: move a slider first")
    what = ", ".join(_setting_words(name, value) for name, value in changes.items())
    known = ", ".join(_setting_words(name, now[name]) for name in changes if name in now) if now else ""
    return f"A is this run{f', with {known}' if known else ''}. B has the same requests with {what}. {which}"


def _setting_words(name: str, value: Any) -> str:
    """A setting in the words of *What if*."""
    return f"{SETTINGS.get(name, name)} {POLICIES.get(str(value), value) if name == 'policy' else value}"


def is_time(measure: str) -> bool:
    """Whether a measure is a time or a rate, which without a clock is one in steps."""
    return MEASURES[measure].words is not _percent_words


def tie_of(measure: str, unit: str, uncertain: float) -> float:
    """The relative difference up to which neither side wins: of predicted times at least the one that says nothing.

    Args:
        measure: See MEASURES.
        unit: Unit in which the duel is settled: "s" or "steps".
        uncertain: See `workbench.viz.changed_run.uncertainty`.
    """
    return max(TIE, uncertain) if unit == "s" and is_time(measure) else TIE


def are_unequal(a: Side, b: Side) -> bool:
    """Whether a number of steps of one side lasts another time than as many of the other: see `has_unequal_steps`."""
    return any(has_unequal_steps(one, other) for one in a for other in b)


def settled(trace: Trace, changed: Changed, measure: str, unit: str, uncertain: float = 0.0) -> Score:
    """The end of a duel of a run and a change of it: of two predictions, if times can be predicted.

    Args:
        trace: The run.
        changed: The run with the change.
        measure: See MEASURES.
        unit: The unit that the question was asked in.
        uncertain: The difference that said nothing when the question was asked; a larger one counts by now.

    Raises:
        ValueError: See `outcome`.
    """
    a, b = [trace] if changed.unchanged is None else [changed.unchanged], [changed.trace]
    notes = []
    if compare(*a, *b).first_divergence is None:
        notes.append(f"{NOTHING[0].upper()}{NOTHING[1:]}.")
    if unit == "s" and "no_times" in changed.facts:
        notes.append("The question was about seconds. Times vary too much by now, so this counts steps.")
    elif unit == "s" and changed.values is not None and is_time(measure):
        trust = changed.caution or _error_of(changed, measure)
        notes.append(" ".join(filter(None, (BOTH, changed.limits, trust))))
    notes += [unserved] if (unserved := unserved_words(a, b)) else []
    values = changed.values if unit == "s" else None
    error = changed.errors.get(MEASURES[measure].predicted, 0.0)
    tie = tie_of(measure, unit, max(uncertain, uncertainty(changed.caution, error)))
    return Score(*outcome(a, b, measure, unit=unit, predicted=values, tie=tie), tuple(notes))


def unserved_words(a: Side, b: Side) -> str:
    """The numbers of requests that get no answer, which no measure has, if the sides differ in them; "" if not."""
    unserved = unserved_of(*(unserved_values(_requests(side)) for side in (a, b)))
    told = "; ".join(f"{each.name}: A {each.values()[0]}, B {each.values()[1]}" for each in unserved)
    return f"{told[0].upper()}{told[1:]}." if told else ""


def _error_of(changed: Changed, measure: str) -> str:
    """The error of the prediction of a run as it was, as a sentence; "" if the run had not ended."""
    from workbench.analysis.check import off_words

    error = changed.errors.get(MEASURES[measure].predicted)
    if error is None:
        return ""
    return f"Of the run as it was, the prediction of this measure is off by {off_words(error)}."


def outcome(
    a: Side,
    b: Side,
    measure: str,
    clock: str = "",
    unit: str = "",
    predicted: tuple[Mapping[str, float], Mapping[str, float]] | None = None,
    tie: float = TIE,
) -> tuple[str, str]:
    """The winner, one of SIDES, and the sentence with both values.

    Args:
        a: One side.
        b: The other side.
        measure: See MEASURES.
        clock: "steps" if each second of both sides is a step, as with `workbench.viz.router_duel`.
        unit: The unit that the question was asked in: "steps" also for sides that have times; "" for the best one.
        predicted: The predicted values of both sides by name, which count instead of those of the traces.
        tie: Relative difference up to which neither side wins, see `tie_of`.

    Raises:
        ValueError: There is no such measure, the sides have different requests, times in steps that do not last
            equally long would be compared, or a run lacks the measure, such as a time to first token before any token.
    """
    better, value, words, name = MEASURES[choice("measure", measure, tuple(MEASURES))]
    known = unit_of(a, b)
    unit = "steps" if unit == "steps" else known
    if unit == "steps" and is_time(measure) and are_unequal(a, b):
        raise ValueError(REFUSED)
    of_a, of_b = value(a, unit), value(b, unit)
    if predicted is not None and all(name in values for values in predicted):
        of_a, of_b = (values[name] for values in predicted)
    if of_a is None or of_b is None:
        raise ValueError(f"the runs have no {measure} yet: let the engine run on")
    is_tie = abs(of_a - of_b) <= tie * max(of_a, of_b)
    winner = "neither" if is_tie else SIDES[(of_b < of_a) != (better == "higher")]
    idle = _idle_words(a, b, measure, unit)
    told = f"{measure}: A {words(of_a, clock or unit)}, B {words(of_b, clock or unit)}{idle}"
    why = f": a difference of less than {tie:.0%} is a tie here" if tie > TIE else ""
    return winner, f"{told[0].upper()}{told[1:]}. {f'Neither wins{why}' if is_tie else f'{winner} wins'}."


def _idle_words(a: Side, b: Side, measure: str, unit: str) -> str:
    """That a measure leaves idle time out; "" if it has none to do with it, or no side has any."""
    if unit == "steps" or MEASURES[measure].value not in (_until_the_end, _throughput):
        return ""
    return " (without idle time)" if any(clock_of(side).idle for side in (a, b)) else ""


def changes_of_fleets(a: Side, b: Side) -> str:
    """Two runs of fleets in one line: those of the measures that a router changes which differ.

    Raises:
        ValueError: The sides have different requests.
    """
    rows = measures_of_fleets(a, b)
    changes = [change_words(*row) for row in rows]
    return "; ".join(filter(None, changes)) or ("no measure changes" if rows else "")


def measures_of_fleets(a: Side, b: Side, clock: str = "") -> list[tuple[str, str, str]]:
    """The measures that a router changes, as (name, value of A, value of B); those that both sides have.

    Args:
        a: One side.
        b: The other side.
        clock: See `outcome`.

    Raises:
        ValueError: The sides have different requests.
    """
    unit = unit_of(a, b)
    first = ("mean time to first token", "P99 of the time to first token", "throughput of output tokens")
    rows = []
    for name in (*first, "hit rate of prompt tokens", FLEET_ONLY):
        before, after = (MEASURES[name].value(side, unit) for side in (a, b))
        if before is not None and after is not None:
            words = MEASURES[name].words
            rows.append((name, words(before, clock or unit), words(after, clock or unit)))
    return rows


def _differ(one: RequestInfo, other: RequestInfo) -> bool:
    """Whether two prompts differ, as far as both are known."""
    tokens = one.prompt_token_ids, other.prompt_token_ids
    return all(tokens) and tokens[0] != tokens[1]


def unit_of(a: Side, b: Side) -> str:
    """The unit in which both sides can be measured.

    Raises:
        ValueError: The sides have different requests.
    """
    requests = [{name: info for trace in side for name, info in trace.requests.items()} for side in (a, b)]
    for name in sorted(requests[0].keys() | requests[1].keys()):
        one, other = (side.get(name) for side in requests)
        if one is None or other is None or one.num_prompt_tokens != other.num_prompt_tokens or _differ(one, other):
            raise ValueError(f"the sides have different requests, such as {name!r}: a duel needs the same arrivals")
    timed = all(metrics(trace).summary.unit == "s" for side in (a, b) for trace in side if len(trace))
    return "s" if timed else "steps"
