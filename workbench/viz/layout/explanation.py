"""The parts of a request's time, as the drawer of the dashboard shows them: bars, words and links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.analysis.causes import IDLE, KINDS
from workbench.trace.readings.metrics import amount

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_GAPS = 2
"""Maximum number of long gaps between tokens that are shown."""

MIN_SHARE = 0.005
"""Smaller parts are not listed; the bar still has them."""

NUM_PATTERNS = 6
"""Number of patterns in ``controls.css``; each is drawn in several weaves."""

_OWN = ("own", *IDLE)
MARKS = {
    kind: divmod(place, NUM_PATTERNS)[::-1]
    for kinds in (_OWN, [kind for kind in KINDS if kind not in _OWN])
    for place, kind in enumerate(kinds)
}
"""The pattern and the weave of each kind of cause: the same in every card. Those of `_OWN` have a light grey."""


def explanation_facts(explanation: Any, *, confirmed: bool = True) -> dict[str, Any]:
    """An explanation as plain data.

    Args:
        explanation: The answer of ``trace.explain``.
        confirmed: Simulate the run without the largest cause, which takes longer than everything else.

    Returns:
        ``request``, ``spans`` with ``name``, ``total`` and ``parts``, and ``confirmation``: one sentence
        about the run without the largest cause, "" if there is none; ``verdict``, that the request is never served, and
        ``division``, how shared steps are divided: sentences, "" for none. Each part has ``cause``, ``share`` of the
        span in [0, 1], ``amount``, ``culprits`` (request ids), ``tokens`` (words that follow each of them, "" unless
        they used the token budget), ``more`` (words for the others), ``first`` and ``last`` (steps), ``is_own`` (no
        cause of slowness), ``is_listed``, and ``mark``, the pattern and the weave of its cause.
    """
    unit = explanation.unit
    whole = "from arrival to the end of the trace" if explanation.is_open else "from arrival to the end"
    if explanation.waiting is not None:
        whole += ", without a token"
    spans = [(whole, explanation.total, explanation.parts)]
    if (ttft := explanation.ttft) is not None:
        spans.append((ttft.name, ttft.total, ttft.parts))
    spans += [(gap.name, gap.total, gap.parts) for gap in explanation.gaps[:MAX_GAPS]]
    return {
        "request": explanation.request_id,
        "spans": [
            {"name": name, "total": amount(total, unit), "parts": _parts(parts, total, unit)}
            for name, total, parts in spans
            if total > 0
        ],
        "confirmation": _sentence(explanation.confirmation, unit) if confirmed else "",
        "verdict": _as_sentence(explanation.verdict),
        "division": _as_sentence(explanation.division),
    }


def _parts(parts: Sequence[Any], total: float, unit: str) -> list[dict[str, Any]]:
    return [_part(part, total, unit) for part in parts if part.amount > 0]


def _part(part: Any, total: float, unit: str) -> dict[str, Any]:
    named, more = part.who()
    culprits = list(part.culprits[: len(named)])
    return {
        "cause": part.cause,
        "kind": part.kind,
        "share": part.amount / total,
        "amount": amount(part.amount, unit),
        "culprits": culprits,
        "tokens": [words.removeprefix(name) for words, name in zip(named, culprits)],
        "more": more,
        "first": part.steps[0],
        "last": part.steps[-1],
        "is_own": not part.is_culprit,
        "is_listed": part.amount >= MIN_SHARE * total,
        "mark": list(MARKS.get(part.kind, MARKS["unknown"])),
    }


def _as_sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}.".removeprefix(".")


def _sentence(confirmation: Any, unit: str) -> str:
    said = confirmation.sentence(unit) if confirmation is not None else ""
    return said[:1].upper() + said[1:]
