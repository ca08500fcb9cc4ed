"""The page of a finding of the hunt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from workbench.trace.readings.narrate import narrate
from workbench.viz.export_html import html_page

if TYPE_CHECKING:
    from workbench.analysis.hunt.finding import Finding
    from workbench.trace import Trace


def page(trace: Trace, finding: Finding) -> str:
    """The page of a trace, which opens at the step that breaks the law, with the fault in red."""
    rows = []
    for record in trace:
        fatal = ' class="wb-fatal"' if record.step == finding.step else ""
        rows.append(f"<li{fatal} value={record.step}>{escape(narrate(record, trace.requests))}</li>")
    title = f"{finding.policy or finding.scheduler}: {finding.law}, {finding.place}"
    message = f"{finding.message}. {finding.smallest_change}"
    return _with_banner([trace], title, finding.title, message, f"<ol start=0>{''.join(rows)}</ol>", finding.step)


def page_of_two(traces: Sequence[Trace], facts: Mapping[str, Any], told: Sequence[Sequence[str]]) -> str:
    """The page of a difference: the steps of both sides beside each other, the lines that decide, and the traces.

    Args:
        traces: Those of A and B; fewer if a side refuses the workload or its steps are impossible.
        facts: The fields of its ``finding.json``.
        told: The sentences of the steps of A and of B.
    """
    sources = "".join(
        f"<h2>{side.upper()}: {escape(facts[side])}</h2><pre>{escape(_lines(facts[f'lines_{side}']))}</pre>"
        for side in ("a", "b")
    )
    how = "With these lines of A, B decides as A." if facts["by_trial"] else "These lines ran on one side only."
    message = f"{facts['message']}. {facts['means'].capitalize()}."
    steps = _side_by_side((facts["a"], facts["b"]), told, facts["step"])
    title = f"{facts['a']} and {facts['b']}: {facts['kind']}"
    rest = f"{steps}<p>The lines that decide. {how}</p>{sources}"
    return _with_banner(traces, title, f"Step {facts['step']}: {facts['kind']}", message, rest, facts["step"])


def page_of_certificate(trace: Trace, facts: Mapping[str, Any]) -> str:
    """The page of the first difference of a simulator: its steps beside the expected ones, and the expected run.

    Args:
        trace: The expected run.
        facts: ``title``, ``message``, ``step``, and the sentences of the steps ``expected`` and ``got``.
    """
    steps = _side_by_side(("expected", "got"), (facts["expected"], facts["got"]), facts["step"])
    message = f"Step {facts['step']}: {facts['message']}."
    return _with_banner([trace], facts["title"], facts["title"], message, steps, facts["step"])


def _side_by_side(heads: Sequence[str], sides: Sequence[Sequence[str]], step: int) -> str:
    """A table with a row for each step, the first one that differs in red."""
    rows = []
    for index, texts in enumerate(zip_longest(*sides, fillvalue="")):
        fatal = ' class="wb-fatal"' if index == step else ""
        rows.append(f"<tr{fatal}><td>{index}</td>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    cells = "".join(f"<th align=left>{escape(head)}</th>" for head in heads)
    return f"<table><thead><tr><th>step</th>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


_STYLE = (
    "<style>html { color-scheme: light dark; background: Canvas; color: CanvasText; } .wb-fatal { color: #c00; } "
    "@media (prefers-color-scheme: dark) { .wb-fatal { color: #ff8f84; } }</style>"
)
"""The page follows the system's theme, and so does the red of what is wrong."""


def _with_banner(traces: Sequence[Trace], title: str, heading: str, message: str, rest: str, step: int) -> str:
    """The page of one or two traces, or of none, with a text in front; it opens at a step."""
    banner = (
        '<section style="font: 14px/1.5 system-ui, sans-serif; max-width: 80em; margin: 1em auto; padding: 0 1em">'
        f'{_STYLE}<h1 class="wb-fatal" style="font-size: 1.3em">{escape(heading)}</h1><p>{escape(message)}</p>{rest}'
        "</section>"
    )
    if not traces:
        return f'<!doctype html><html lang="en"><meta charset=utf-8><title>{escape(title)}</title><body>{banner}'
    banner += f'<script>location.hash ||= "story/{min(step, max(0, len(traces[0]) - 1))}"</script>'
    other = traces[1] if len(traces) > 1 else None
    return html_page(traces[0], other=other, title=title).replace("<body>", f"<body>\n{banner}", 1)


def _lines(lines: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"{line['file']}:{line['number']} {line['function']}: {line['text']}" for line in lines) or "none"
