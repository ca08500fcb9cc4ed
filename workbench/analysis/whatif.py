"""The answer to "what if": a changed setting beside the recorded one, both predicted, and how far the latter is off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workbench.analysis.check import COUNTS, MAX_ERROR, Check, is_told, shown
from workbench.analysis.flags import Server
from workbench.analysis.intervals import Prediction
from workbench.analysis.values import OF_IDLE
from workbench.base.on_demand import picture
from workbench.base.tables import folded_command, table_lines, terminal_width, wrapped_text
from workbench.base.text import printable
from workbench.trace.readings.two_sides import served_by_b, unserved_of

_LATENCIES = ("ttft_mean", "ttft_p50", "ttft_p99", "tpot_mean", "itl_mean", "itl_p99", "e2e_mean")
_TIMES = ("duration", *_LATENCIES, "output_throughput")
"""Values in seconds, or by seconds, that are told."""


@dataclass(frozen=True, eq=False, repr=False)
class WhatIf:
    """A changed setting beside the recorded one; its repr is the table that ``workbench trace whatif`` prints.

    Attributes:
        prediction: The changed setting; ``unchanged`` if nothing changes.
        unchanged: The recorded setting, predicted like any other.
        check: The latter beside what was measured.
        server: The server whose options are told.
        force: Whether there are seconds even if the prediction of the recorded setting is far from what was measured.
    """

    prediction: Prediction
    unchanged: Prediction
    check: Check
    server: Server
    force: bool = False

    @property
    def _gives_seconds(self) -> bool:
        return self.check.grade != "steps" or self.force

    @property
    def _is_changed(self) -> bool:
        return self.prediction is not self.unchanged

    @property
    def _served(self) -> str:
        """The word "fewer" or "more" if another number of requests than now has latencies; "" for as many."""
        return served_by_b(unserved_of(self.unchanged.outcome.values, self.prediction.outcome.values))

    @property
    def _names(self) -> list[str]:
        """The values that are told."""
        runs = self.prediction.outcome.values, self.unchanged.outcome.values, self.check.measured
        names = [*(_TIMES if self._gives_seconds else ()), *COUNTS]
        return [name for name in names if name in self.prediction.intervals and is_told(name, *runs)]

    @property
    def table(self) -> list[list[str]]:
        """The values under both settings, with the error of the recorded one; the first row has the headings."""
        changed = ["changed, predicted", "change"] if self._is_changed else []
        table = [["", "now, predicted", *changed, "interval", "now, recorded", "off by", ""]]
        predicted = {name: interval.value for name, interval in self.unchanged.intervals.items()}
        for name in self._names:
            interval, now = self.prediction.intervals[name], predicted.get(name)
            texts = [shown(name, of[name]) if name in of else "-" for of in (predicted, self.check.measured)]
            change = f"{interval.value / now - 1:+z.0%}" if now and not (self._served and name in _LATENCIES) else ""
            changed = [shown(name, interval.value), change] if self._is_changed else []
            spread = f"{shown(name, interval.low)} to {shown(name, interval.high)}"
            error = self.check.errors.get(name)
            off = "" if error is None else f"{error:+z.1%}"
            table.append([name, texts[0], *changed, spread, texts[1], off, "!" * len(self.check.unreliable([name]))])
        return table

    @property
    def remarks(self) -> Iterator[str]:
        """The sentences below the table."""
        if "duration" in self._names and self.prediction.outcome.idle:
            yield f"note: {OF_IDLE}"
        if any(row[-1] for row in self.table):
            yield f"! the prediction of now is off by more than {MAX_ERROR:.0%}: do not rely on this value"
        if not self._gives_seconds:
            yield f"{self.check.refusal}; --force prints them"
        elif self.check.caution:
            yield f"! {self.check.caution}"
        if self._served and any(name in _LATENCIES for name in self._names):
            yield f"note: latencies are those of {self._served} requests than now, so they have no change"
        for note in (*self.prediction.notes, *self.check.notes):
            if note != self.prediction.obstacle:
                yield f"note: {note}"

    @property
    def command(self) -> str:
        """The server's command line with the changes; "" if they change nothing, or nobody can use them."""
        differs = self.prediction.outcome.values != self.unchanged.outcome.values
        return self.server.command(self.prediction.changes) if differs and not self.prediction.obstacle else ""

    def text(self, width: int | None = None) -> str:
        """The answer, what stands in the way of the setting first.

        Args:
            width: Columns of the terminal; None for any number. If they are too few, the table is split.
        """
        first = [f"! {self.prediction.obstacle}"] if self.prediction.obstacle else []
        above, below = ([wrapped_text(printable(each), width) for each in part] for part in (first, self.remarks))
        command = folded_command(self.command, width) if self.command else []
        return "\n".join([*above, *self._table_lines(width), *below, *command])

    def _table_lines(self, width: int | None) -> list[str]:
        table = self.table
        interval_at = len(table[0]) - 4
        lines = table_lines(table, left=(0, interval_at))
        if width is None or max(map(len, lines)) <= width:
            return lines
        changed = ["changed", "change"] if self._is_changed else []
        rows = [[cell.replace(" tokens/s", "/s") for cell in row] for row in table[1:]]
        ahead = [["predicted", "now", *changed, "interval", ""]]
        ahead += [[*row[: interval_at + 1], row[-1]] for row in rows]
        behind = [["now", "predicted", "recorded", "off by", ""]]
        behind += [[*row[:2], *row[interval_at + 1 :]] for row in rows]
        lines = [*table_lines(ahead, width=width, title=(0, interval_at + 1), left=(0, interval_at)), ""]
        return [*lines, *table_lines(behind, width=width, title=(0, 4), left=(0,))]

    def __repr__(self) -> str:
        return self.text(terminal_width())

    def _repr_html_(self) -> str | None:
        return picture("WhatIf", self)
