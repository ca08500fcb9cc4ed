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
        fatal = ' style="color: #c00"' if record.step == finding.step else ""
        rows.append(f"<li{fatal} value={record.step}>{escape(narrate(record))}</li>")
    banner = (
        '<section style="font: 14px/1.5 system-ui, sans-serif; max-width: 70em; margin: 1em auto; padding: 0 1em">'
        f'<h1 style="color: #c00; font-size: 1.3em">{escape(finding.title)}</h1>'
        f"<p>{escape(finding.message)}. {escape(finding.smallest_change)}</p><ol start=0>{''.join(rows)}</ol></section>"
        f'<script>location.hash ||= "story/{min(finding.step, max(0, len(trace) - 1))}"</script>'
    )
    title = f"{finding.policy or finding.scheduler}: {finding.law}, {finding.place}"
    return html_page(trace, title=title).replace("<body>", f"<body>\n{banner}", 1)


def page_of_two(traces: Sequence[Trace], facts: Mapping[str, Any]) -> str:
    """The page of a difference: the steps of both sides beside each other, the lines that decide, and the traces.

    Args:
        traces: Those of A and B; fewer if one side refuses the workload.
        facts: The fields of its ``finding.json``.
    """
    rows = []
    told = [[narrate(record) for record in trace] for trace in traces]
    for step, texts in enumerate(zip_longest(*told, fillvalue="")):
        first = ' style="color: #c00"' if step == facts["step"] else ""
        rows.append(f"<tr{first}><td>{step}</td>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    sources = "".join(
        f"<h2>{side.upper()}: {escape(facts[side])}</h2><pre>{escape(_lines(facts[f'lines_{side}']))}</pre>"
        for side in ("a", "b")
    )
    how = "With these lines of A, B decides as A." if facts["by_trial"] else "These lines ran on one side only."
    banner = (
        '<section style="font: 14px/1.5 system-ui, sans-serif; max-width: 80em; margin: 1em auto; padding: 0 1em">'
        f'<h1 style="color: #c00; font-size: 1.3em">Step {facts["step"]}: {escape(facts["kind"])}</h1>'
        f"<p>{escape(facts['message'])}. {escape(facts['means'].capitalize())}.</p>"
        "<table><thead><tr><th>step</th>"
        + "".join(f"<th align=left>{escape(facts[side])}</th>" for side, _ in zip(("a", "b"), traces))
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table><p>The lines that decide. {how}</p>{sources}</section>"
    )
    title = f"{facts['a']} and {facts['b']}: {facts['kind']}"
    if not traces:
        return f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><body>{banner}"
    link = f'<script>location.hash ||= "story/{min(facts["step"], max(0, len(traces[0]) - 1))}"</script>'
    other = traces[1] if len(traces) > 1 else None
    return html_page(traces[0], other=other, title=title).replace("<body>", f"<body>\n{banner}{link}", 1)


def page_of_certificate(trace: Trace, facts: Mapping[str, Any]) -> str:
    """The page of the first difference of a simulator: its steps beside the expected ones, and the expected run.

    Args:
        trace: The expected run.
        facts: ``title``, ``message``, ``step``, and the sentences of the steps ``expected`` and ``got``.
    """
    rows = []
    for step, texts in enumerate(zip_longest(facts["expected"], facts["got"], fillvalue="")):
        first = ' style="color: #c00"' if step == facts["step"] else ""
        rows.append(f"<tr{first}><td>{step}</td>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    banner = (
        '<section style="font: 14px/1.5 system-ui, sans-serif; max-width: 80em; margin: 1em auto; padding: 0 1em">'
        f'<h1 style="color: #c00; font-size: 1.3em">{escape(facts["title"])}</h1>'
        f"<p>Step {facts['step']}: {escape(facts['message'])}.</p><table><thead><tr><th>step</th>"
        f"<th align=left>expected</th><th align=left>got</th></tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
        f'<script>location.hash ||= "story/{min(facts["step"], max(0, len(trace) - 1))}"</script>'
    )
    return html_page(trace, title=facts["title"]).replace("<body>", f"<body>\n{banner}", 1)


def _lines(lines: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"{line['file']}:{line['number']} {line['function']}: {line['text']}" for line in lines) or "none"
