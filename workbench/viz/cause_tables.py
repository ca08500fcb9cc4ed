"""Why requests took as long as they did, as tables of a notebook."""

from __future__ import annotations

from html import escape

from workbench.analysis.causes import CAUSE_COLUMNS, SMALLER, CauseTable, Explanation
from workbench.analysis.miss import MISS_COLUMNS, Misses
from workbench.analysis.misses import MissTable
from workbench.base.text import printable
from workbench.trace.readings.metrics import amount
from workbench.viz.reprs import fragment, table


def explanation_html(explanation: Explanation) -> str:
    """The parts of each stretch of a request's time, and what is to say about them."""
    rows = []
    for span in explanation.spans:
        name = f"{span.name}: {span.amount(explanation.unit)}"
        for part in span.shown:
            time, share = amount(part.amount, explanation.unit), span.share(part.amount)
            who = printable(part.who_words)  # names come from a file
            rows.append((name, _unbroken(time), share, part.words, who, _unbroken(part.where)))
            name = ""  # in the first row of the stretch alone
        if span.smaller:
            rows.append(
                (name, _unbroken(amount(span.smaller, explanation.unit)), span.share(span.smaller), SMALLER, "", "")
            )
    headings = ("stretch", "time", "share", "cause", "requests", "steps")
    return _fragment(explanation.request_id, headings, rows, explanation.notes)


def causes_html(causes: CauseTable) -> str:
    """The time of all requests, by its causes."""
    what, *notes = causes.heading
    return _fragment(what, CAUSE_COLUMNS, list(causes.cells), notes)


def misses_html(misses: MissTable) -> str:
    """The misses of a run by reason, and the changes that would have saved tokens."""
    total = sum(misses.lost.values())
    lost = [(f"{tokens:,}", f"{tokens / total:.1%}", reason) for reason, tokens in misses.lost.items()]
    changes = [(f"{change.saved:,}", f"{change.lost:,}", change.change) for change in misses.changes]
    parts = [f"<h4>{escape(misses.heading)}</h4>"]
    parts += [table(("lost tokens", "share", "reason"), lost)] if lost else []
    if changes:
        parts.append(
            table(("saved tokens", "lost", f"change, simulated with the same requests{misses.by_rules}"), changes)
        )
    if misses.unknown:
        parts.append(f"<p>What would have saved tokens is unknown: {escape(misses.unknown)}.</p>")
    return fragment(*parts)


def missed_html(misses: Misses) -> str:
    """The misses of a request, each with its reason."""
    return fragment(table(MISS_COLUMNS, misses.cells) if misses else f"<p>{escape(repr(misses))}</p>")


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _fragment(heading: str, columns: tuple[str, ...], rows: list[tuple], notes: list[str]) -> str:
    said = (f"<p>{escape(printable(note))}</p>" for note in notes)
    return fragment(f"<h4>{escape(printable(heading))}</h4>", *([table(columns, rows)] if rows else []), *said)
