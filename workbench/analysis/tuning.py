"""The answer of ``tune``: a target, and the settings that come closest to it, each with its prediction."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.analysis.check import Check, is_told, off_words, shown
from workbench.analysis.flags import VLLM, Server
from workbench.analysis.intervals import Prediction
from workbench.analysis.predict import EXTRAPOLATED
from workbench.analysis.rerun import LARGEST_FITTED, SIZES
from workbench.analysis.values import OF_IDLE, STATISTICS, VALUES, value_names
from workbench.base.field_checks import number, suggestion
from workbench.base.on_demand import picture
from workbench.base.tables import folded_command, table_lines, terminal_width, wrapped_text
from workbench.base.text import counted, duration, settings_text
from workbench.trace.readings.two_sides import UNSERVED

MINIMA = ("output_throughput",)
"""Values whose limits are minima."""

COSTS = 1.05
"""A value is named as the cost of a setting if it is worse by more than this factor."""

NUM_NAMED = 3
"""Maximum number of requests that are named among those that would end later; the others are counted."""

_PRICES = ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "tpot_mean", "e2e_mean", "output_throughput")

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}


def read_slo(slo: str | Mapping[str, float]) -> dict[str, float]:
    """A target as limits in seconds by name.

    Args:
        slo: Text such as "ttft_p99=1s,itl_p99=100ms", or a mapping of the same names to seconds. Names are those of
            ``value_names()``; "output_throughput" is a minimum, in tokens per second without idle time.

    Raises:
        ValueError: A name is unknown or given twice, or a limit is not a time.

    Example:
        >>> read_slo("ttft_p99=1s,itl_p99=100ms")
        {'ttft_p99': 1.0, 'itl_p99': 0.1}
    """
    if isinstance(slo, str):
        parsed: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in slo.split(","))):
            name, _, text = part.partition("=")
            match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(us|ms|s|min|)", text.strip())
            if match is None or name.strip() in parsed:
                raise ValueError(f"target {part!r} must be NAME=TIME, once each, such as ttft_p99=1s or itl_p99=100ms")
            parsed[name.strip()] = float(match[1]) * UNITS[match[2]]
        slo = parsed
    if not isinstance(slo, Mapping):
        raise ValueError(f"slo must be a text such as 'ttft_p99=1s,itl_p99=100ms' or a mapping, got {slo!r}")
    known = value_names()
    for name in slo:
        if name not in known:
            raise ValueError(f"no target is known for {name!r}{_meant(name)}; the names are {_families(known)}")
    if not slo:
        raise ValueError("there is no target: give at least one limit, such as ttft_p99=1s")
    return {name: number(f"target {name}", limit, 0.0, low_open=True) for name, limit in slo.items()}


def complete_slo(begun: str) -> list[str]:
    """Completions of a target: the names of values that it does not have yet.

    Example:
        >>> complete_slo("ttft_p99=1s,ttft_m")
        ['ttft_p99=1s,ttft_mean=', 'ttft_p99=1s,ttft_max=']
    """
    before, comma, name = begun.rpartition(",")
    given = {part.partition("=")[0].strip() for part in before.split(",")}
    return [f"{before}{comma}{each}=" for each in value_names() if each.startswith(name.strip()) and each not in given]


def _meant(name: str) -> str:
    """The name that was probably meant, if another order, other letters or no statistic hide it, as a question."""
    words = re.findall(r"[a-z0-9]+", str(name).lower())
    both = [f"{value}_{statistic}" for value in VALUES for statistic in STATISTICS if {value, statistic} <= {*words}]
    alone = [f"{value}_p99" for value in VALUES if value in words]
    for found in both or alone:
        return f" (did you mean {found}?)"
    return suggestion("_".join(words), value_names())


def _families(known: Iterable[str]) -> str:
    """The names of all values, those of one latency together."""
    others = [name for name in known if name.rpartition("_")[0] not in VALUES]
    return f"{', '.join(VALUES)}, each with {', '.join(f'_{each}' for each in STATISTICS)}; {', '.join(others)}"


def score(values: Mapping[str, float], slo: Mapping[str, float]) -> float:
    """The worst ratio of a value to its limit: 1 or less meets the target, and smaller is better."""
    return max(_ratio(name, values.get(name, math.nan), limit) for name, limit in slo.items())


def _ratio(name: str, value: float, limit: float) -> float:
    if math.isnan(value):
        return math.inf
    if name in MINIMA:
        return limit / value if value else math.inf
    return value / limit


def limits_text(slo: Mapping[str, float]) -> str:
    """The limits of a target as text.

    Example:
        >>> limits_text({"ttft_p99": 1.0, "output_throughput": 10.0})
        'ttft_p99 <= 1 s, output_throughput >= 10 tokens/s'
    """
    return ", ".join(f"{name} {'>=' if name in MINIMA else '<='} {shown(name, limit)}" for name, limit in slo.items())


@dataclass(frozen=True, eq=False)
class Candidate:
    """A setting with its prediction.

    Attributes:
        changes: The fields that differ from the recorded configuration.
        score: Worst ratio of a value to its limit.
        prediction: Values with intervals, and the simulated run.
        same_as_best: Whether it cannot be told from the chosen one: repeated simulations disagree about the better one.
        server: The server whose options are told.
    """

    changes: Mapping[str, Any]
    score: float
    prediction: Prediction
    same_as_best: bool = False
    server: Server = VLLM

    @property
    def values(self) -> dict[str, float]:
        """The predicted values by name."""
        return {name: interval.value for name, interval in self.prediction.intervals.items()}

    @property
    def flags(self) -> str:
        """The server's options for the changes; "" for none."""
        return self.server.flags(self.changes)

    def shown_values(self, names: Iterable[str]) -> dict[str, str]:
        """The predicted values of these names with their intervals, as texts."""
        return {
            name: f"{shown(name, found.value)} ({shown(name, found.low)} to {shown(name, found.high)})"
            for name in names
            if (found := self.prediction.intervals.get(name)) is not None
        }


@dataclass(frozen=True, eq=False)
class Tuning:
    """The answer of ``tune``.

    Attributes:
        slo: The limits by name, in seconds.
        best: The chosen setting.
        current: The recorded setting.
        runners_up: The next best settings.
        verdict: "meets", "misses" or "cannot tell": the target against the interval of the chosen setting, or against
            the record if the recorded setting is chosen.
        current_verdict: The same of the recorded setting.
        losers: Requests that end later than in the recorded setting, as (request, seconds before, seconds after).
        rows: Every setting of the sweep with its predicted values; "pareto" marks those that no other one beats.
        check: The recorded setting, predicted, beside what was measured; known without any new run.
        settings: Names of the fields that the sweep changed.
        notes: Other sentences that help to read the answer.
    """

    slo: Mapping[str, float]
    best: Candidate
    current: Candidate
    runners_up: tuple[Candidate, ...]
    verdict: str
    current_verdict: str
    losers: tuple[tuple[str, float, float], ...]
    rows: tuple[dict[str, Any], ...]
    check: Check
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def errors(self) -> Mapping[str, float]:
        """Relative error of the prediction of the recorded setting, by value."""
        return self.check.errors

    @property
    def errors_sentence(self) -> str:
        """The errors of the values of the target as a sentence; "" if none was measured."""
        off = ", ".join(f"{name} {off_words(self.errors[name])}" for name in self.slo if name in self.errors)
        return f"the prediction of the recorded setting is off by: {off}" if off else ""

    @property
    def recorded(self) -> Mapping[str, float]:
        """The values of the target as they were recorded; empty if one was not, or if requests had not ended."""
        known = {} if self.check.is_cut else self.check.measured
        return {name: known[name] for name in self.slo} if known.keys() >= self.slo.keys() else {}

    def shown_values(self, candidate: Candidate) -> dict[str, str]:
        """The values of the target as texts: predicted with intervals, and those recorded of the recorded setting."""
        texts = candidate.shown_values(self.slo)
        known = self.recorded if candidate is self.current else {}
        return {
            name: text + (f", recorded {shown(name, known[name])}" if known else "") for name, text in texts.items()
        }

    @property
    def _met_words(self) -> str:
        """The recorded values of the target, such as "ttft_p99 17.2 s"."""
        return ", ".join(f"{name} {shown(name, value)}" for name, value in self.recorded.items())

    @property
    def _judged(self) -> Mapping[str, float]:
        """The values of the chosen setting that its verdict is about: recorded ones if there are any."""
        return (self.recorded if self.best is self.current else {}) or self.best.values

    @property
    def misses(self) -> dict[str, float]:
        """The values of the chosen setting that miss their limits, each with its distance as a share of the limit."""
        values = self._judged
        ratios = {name: _ratio(name, values.get(name, math.nan), limit) for name, limit in self.slo.items()}
        return {name: 1 - 1 / ratio if name in MINIMA else ratio - 1 for name, ratio in ratios.items() if ratio > 1}

    @property
    def _misses_words(self) -> str:
        """The same as text, such as "ttft_p99 by 34% (1.2 s, limit 900 ms)"; a share of 100% or more is left out."""
        values = self._judged
        recorded = "recorded " if self.best is self.current and self.recorded else ""
        return ", ".join(
            f"{name}{f' by {miss:.0%}' * (miss < 1)} ({recorded}{shown(name, values[name])}, limit "
            f"{shown(name, self.slo[name])})"
            if name in values
            else f"{name}, which no request has"
            for name, miss in self.misses.items()
        )

    @property
    def is_closest(self) -> bool:
        """Whether no other setting of the answer is closer to the target than the chosen one."""
        return all(other.score >= self.best.score for other in (self.current, *self.runners_up))

    @property
    def words_of_best(self) -> str:
        """The advice: "take" for a setting that meets a target which the recorded one may miss, "keep" for the latter.

        Without advice it is "closest" or "best" by the target; "perhaps" where the limit lies inside the interval.
        """
        if self.verdict == "misses":
            return "closest" if self.is_closest else "best"
        if self.verdict == "meets" and self.best is self.current:
            return "keep"
        if self.check.caution:
            return "best"
        if self.verdict == "cannot tell":
            return "perhaps"
        return "best" if self.current_verdict == "meets" else "take"

    @property
    def named(self) -> list[tuple[str, Candidate]]:
        """The settings of the answer, the chosen one first, each with a word."""
        named = [(self.words_of_best, self.best)]
        if self.best is not self.current:
            named.append(("now", self.current))
        named += [(f"{place}.", candidate) for place, candidate in enumerate(self.runners_up, start=2)]
        return named

    @property
    def points(self) -> list[dict[str, Any]]:
        """The same as rows for a picture: "word", every value as its table has it, "idle", and "pareto"."""
        rows = [
            {
                **candidate.values,
                "word": word,
                "end": (outcome := candidate.prediction.outcome).end,
                "idle": outcome.idle,
            }
            for word, candidate in self.named
        ]
        return mark_front(rows, list(self.slo))

    @property
    def losers_sentence(self) -> str:
        """The requests that would end later than now, the first of them by name, and how many others; "" for none."""
        if not self.losers:
            return ""
        named = [f"{rid} ({duration(before)} to {duration(after)})" for rid, before, after in self.losers[:NUM_NAMED]]
        more = f" and {len(self.losers) - NUM_NAMED} more" if len(self.losers) > NUM_NAMED else ""
        return f"{counted(len(self.losers), 'request')} would end later than now: {', '.join(named)}{more}"

    @property
    def notes_of_candidates(self) -> list[str]:
        """The notes that limit the predictions, a line for each, with the words of the settings that have it."""
        words: dict[str, list[str]] = {}
        for word, candidate in self.named:
            for note in candidate.prediction.notes:
                if not note.startswith(EXTRAPOLATED) and note not in self.notes:
                    words.setdefault(note, []).append(word)
        notes = [f"{', '.join(whose)}: {note}" for note, whose in words.items()]
        return [*filter(None, [self._extrapolated_words]), *notes]

    @property
    def _extrapolated_words(self) -> str:
        """The settings with larger steps than any used for the fit, and how large they are; "" for none."""
        largest = self.check.fit.largest if self.check.fit is not None else {}
        found = {word: candidate.prediction.outcome.extrapolated for word, candidate in self.named}
        whose = {
            word: ", ".join(f"{most:,} {SIZES[size]}" for size, (_, most) in beyond.items())
            for word, beyond in found.items()
            if beyond
        }
        fitted = ", ".join(
            f"{largest[size]:,} {words}"
            for size, words in SIZES.items()
            if any(size in each for each in found.values())
        )
        told = "; ".join(f"{word} up to {sizes}" for word, sizes in whose.items())
        return f"{EXTRAPOLATED} beyond {LARGEST_FITTED} ({fitted}): {told}" if whose else ""

    @property
    def costs(self) -> dict[str, tuple[float, float]]:
        """The values that the chosen setting makes worse by more than COSTS: as recorded, and with it.

        Values whose prediction of the recorded setting is too far off to be relied on are left out.
        """
        before, after = (each.prediction.intervals for each in (self.current, self.best))
        unreliable = self.check.unreliable(_PRICES)
        names = [name for name in _PRICES if name not in unreliable and name in before and name in after]
        pairs = {name: (before[name].value, after[name].value) for name in names}
        return {
            name: (old, new)
            for name, (old, new) in pairs.items()
            if (old / new if name in MINIMA and new else new / old if old else 1.0) > COSTS
        }

    @property
    def costs_sentence(self) -> str:
        """The same as a sentence; "" if nothing is worse."""
        worse = [f"{name} {shown(name, old)} to {shown(name, new)}" for name, (old, new) in self.costs.items()]
        return f"it costs {', '.join(worse)}" if worse else ""

    @property
    def verdict_sentence(self) -> str:
        """The verdict as a sentence."""
        caution = f". {self.check.caution.removesuffix('.')}" if self.check.caution else ""
        if self.verdict == "meets" and self.best is self.current and self.recorded:
            return f"met the target when it was recorded ({self._met_words}){caution}"
        if caution:
            words = f"misses {self._misses_words}" if self.verdict == "misses" else ""
            return f"{words or 'cannot tell whether it meets the target'}{caution}"
        if self.verdict == "misses":
            values = self._judged
            worst = max(self.misses, key=lambda name: _ratio(name, values.get(name, math.nan), self.slo[name]))
            closest = (
                f"the worst value of this one, {worst}, is nearer to its limit than that of any other"
                if self.is_closest
                else "none is surely closer than this one"
            )
            return f"misses {self._misses_words}; no setting of the sweep meets the target, and {closest}"
        if unreliable := self.check.unreliable(self.slo):
            off = ", ".join(f"{name} {self.errors[name]:+z.0%}" for name in unreliable)
            return f"cannot tell whether it meets the target: its predictions are too far off ({off})"
        if bounds := [name for name in self.slo if self.best.prediction.outcome.is_bound(name)]:
            return (
                f"cannot tell whether it meets the target: {', '.join(bounds)} is at least that, as aborted requests "
                "had lasted longer than any that ended"
            )
        if self.best is self.current or self.verdict != "meets" or self.current_verdict != "meets":
            return _VERDICTS[self.verdict]
        also = (
            f"; the recorded setting met it: {self._met_words}" if self.recorded else ", and so does the setting of now"
        )
        return _VERDICTS[self.verdict] + also

    def _table(self) -> list[list[str]]:
        """The settings of the answer as rows under their headings, and the values that were recorded."""
        runs = [self.check.measured, *(candidate.values for _, candidate in self.named)]
        others = [name for name in _BESIDE if name in self.current.values and name not in self.slo]
        others = [name for name in others if is_told(name, *runs)]
        rows = [["", "setting", *self.slo, *others]]
        for word, candidate in self.named:
            targets = candidate.shown_values(self.slo)
            rest = [shown(name, candidate.values[name]) if name in candidate.values else "" for name in others]
            same = " (cannot tell from the first)" * candidate.same_as_best
            setting = (settings_text(candidate.changes) or "the recorded one, predicted") + same
            rows.append([word, setting, *(targets.get(name, "-") for name in self.slo), *rest])
        if self.recorded:
            known = self.check.measured
            cells = [shown(name, known[name]) if name in known else "" for name in (*self.slo, *others)]
            rows.append(["", "the recorded one, measured", *cells])
        return rows

    def _repr_html_(self) -> str | None:
        return picture("Tuning", self)

    def __repr__(self) -> str:
        width = terminal_width()
        chosen = f"{self.words_of_best}: {settings_text(self.best.changes) or 'the recorded setting'}"
        said = [f"  {each}" for each in (self.verdict_sentence, self.costs_sentence, self.losers_sentence) if each]
        answer = [f"target: {limits_text(self.slo)}", self.errors_sentence, chosen, *said]
        command = f"  {self.best.server.command(self.best.changes)}".rstrip() if self.best.changes else ""
        notes = [*self.notes, *self.notes_of_candidates]
        notes += [OF_IDLE] if any(each.prediction.outcome.idle for _, each in self.named) else []
        lines = [
            wrapped_text("\n".join(filter(None, answer)), width),
            *(folded_command(command, width) if command else ()),
            "",
            *table_lines(self._table(), width=width, title=(0, 1), left=(0, 1)),
            "",
            wrapped_text("\n".join([*(f"note: {note}" for note in notes), *str(self.check).splitlines()]), width),
        ]
        return "\n".join(lines)


_BESIDE = ("output_throughput", "num_preemptions", *UNSERVED, "hit_rate", "peak_kv_use")
"""Values beside those of the target in the table of settings."""

_VERDICTS = {
    "meets": "meets the target with its whole interval",
    "cannot tell": "cannot tell whether it meets the target: the limit lies inside the interval",
}


def mark_front(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Set ``pareto`` in every row: True if no other row is as good in every value of the target and better in one.

    Args:
        rows: Rows of a sweep.
        names: The values of the target; throughput is added, which should be large.
    """
    goals = [*names, *(["output_throughput"] if "output_throughput" not in names else [])]

    def losses(row: Mapping[str, Any]) -> tuple[float, ...] | None:
        if row.get("end") != "done" or any(name not in row for name in goals):
            return None
        return tuple(-row[name] if name in MINIMA else row[name] for name in goals)

    points = [losses(row) for row in rows]
    known = [point for point in points if point is not None]
    return [
        row
        | {
            "pareto": point is not None
            and not any(other != point and all(o <= p for o, p in zip(other, point)) for other in known)
        }
        for row, point in zip(rows, points)
    ]
