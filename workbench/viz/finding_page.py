"""The page of a finding of the hunt."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

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
