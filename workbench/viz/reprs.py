"""Notebook output of plain objects: HTML with inline SVG, without scripts, every text escaped.

The functions for objects of ``workbench.trace`` are attached to them by the table in ``workbench/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any

from workbench.base.text import counted
from workbench.simulation.costs.stalls import stalls
from workbench.trace.readings.narrate import shown
from workbench.trace.readings.pool_state import PoolState
from workbench.trace.records import Event, StepRecord
from workbench.viz import svg
from workbench.viz.palette import DARK, EVENT_MARKS, FOCUS_HUES, LIGHT, Theme, ink_on, mix

if TYPE_CHECKING:
    from workbench.trace.readings.metrics import TraceMetrics
    from workbench.trace.trace import Trace

TEXT_LIMIT = 600
"""Maximum number of characters of a request's text in a static picture."""


def _variables(theme: Theme) -> str:
    roles = "".join(f"--wb-{role}:{colour};" for role, colour in asdict(theme).items())
    light = "".join(f"--wb-d{i}:{mix(hue, theme.background, 0.45)};" for i, hue in enumerate(FOCUS_HUES))
    return roles + light


_HUES = "".join(
    f".wb-repr .prefill.hue{i}{{fill:{hue}}}.wb-repr .decode.hue{i}{{fill:var(--wb-d{i})}}"
    f".wb-repr .dot{i}{{background:{hue}}}.wb-repr svg .on{i}{{fill:{ink_on(hue)}}}"
    for i, hue in enumerate(FOCUS_HUES)
)

STYLE = (
    f".wb-repr{{{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{.wb-repr{{{_variables(DARK)}}}}}"
    f"[data-jp-theme-light=true] .wb-repr{{{_variables(LIGHT)}}}"
    f"[data-jp-theme-light=false] .wb-repr,body.vscode-dark .wb-repr{{{_variables(DARK)}}}"
    f"body.vscode-light .wb-repr{{{_variables(LIGHT)}}}"
    ".wb-repr{color:var(--jp-content-font-color1,currentColor);font:13px/1.45 system-ui,sans-serif;max-width:780px}"
    ".wb-repr h4{font-size:14px;font-weight:600;margin:4px 0 2px}"
    ".wb-repr h5{font-size:12px;font-weight:600;margin:12px 0 4px}"
    ".wb-repr p{margin:2px 0;opacity:.8}"
    ".wb-repr .prefill{fill:var(--wb-prefill)}.wb-repr .decode{fill:var(--wb-decode)}"
    ".wb-repr .kv{fill:var(--wb-kv)}.wb-repr .owned{fill:var(--wb-owned)}.wb-repr .cached{fill:var(--wb-cached)}"
    ".wb-repr .free{fill:var(--wb-free);stroke:var(--wb-hairline)}.wb-repr .reserved{fill:var(--wb-hairline)}"
    ".wb-repr .hole{fill:none;stroke:var(--wb-owned);stroke-dasharray:2}"
    ".wb-repr .slack{fill:none;stroke:var(--wb-hairline)}.wb-repr .new{stroke:currentColor;stroke-width:1.2}"
    ".wb-repr .outlined{stroke:currentColor;stroke-width:.75}"
    f".wb-repr .stall{{fill:{EVENT_MARKS['stall'][1]}}}"
    ".wb-repr .cursor{fill:none;stroke:var(--wb-cursor);stroke-width:1.5}"
    ".wb-repr svg text{fill:currentColor;font:11px system-ui,sans-serif}"
    ".wb-repr svg .number{font:10px ui-monospace,Menlo,Consolas,monospace}"
    ".wb-repr svg .muted{opacity:.7;font-size:10px}"
    ".wb-repr svg .label{font:9.5px ui-monospace,Menlo,Consolas,monospace}.wb-repr svg .on{fill:#111418}"
    ".wb-repr table{border-collapse:collapse;font-size:12px;margin:4px 0}"
    ".wb-repr th{font-weight:500;opacity:.7}"
    # Named three times to take precedence over the rules of notebooks, which align tables to the right.
    ".wb-repr.wb-repr.wb-repr :is(td,th){padding:2px 14px 2px 0;vertical-align:top;text-align:left;background:none}"
    ".wb-repr td{font-variant-numeric:tabular-nums;overflow-wrap:anywhere;white-space:pre-wrap}"
    ".wb-repr.wb-repr.wb-repr pre{font:12px/1.45 ui-monospace,Menlo,Consolas,monospace}"
    ".wb-repr td:first-child{overflow-wrap:normal}"
    ".wb-repr i.dot{display:inline-block;width:8px;height:8px;border-radius:2px;margin-right:6px}" + _HUES
)
"""Styles of a fragment; each rule is scoped to ``.wb-repr``. Dark or light follows the notebook."""


def fragment(*parts: str) -> str:
    """A self-contained HTML fragment from parts that are HTML already."""
    return f'<div class="wb-repr"><style>{STYLE}</style>{"".join(parts)}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table of plain values; every cell is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def focus_of(request_ids: Iterable[str]) -> dict[str, int]:
    """Hue slots of the first requests; all others are grey."""
    return {request_id: slot for slot, request_id in zip(range(len(FOCUS_HUES)), request_ids)}


def step_html(record: StepRecord) -> str:
    """A step: packed batch, block tables, events, and the requests that were not scheduled, with reasons."""
    focus = focus_of(chunk.request_id for chunk in record.chunks)
    tokens = f"{record.num_tokens} of {record.token_budget}" if record.token_budget else str(record.num_tokens)
    facts = [
        f"{tokens} tokens: {record.num_prefill_tokens} prefill, {record.num_decode_tokens} decode",
        f"{len(record.running)} running, {len(record.waiting)} waiting",
        f"{counted(record.free_blocks, 'block')} free after scheduling, {record.free_blocks_end} at the end",
    ]
    if record.timings:
        facts.append(" · ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in record.timings.items()))
    if record.kernel:
        facts.append(f"attention {record.kernel.backend}, {counted(len(record.kernel.work_items), 'work item')}")
    parts = [f"<h4>Step {record.step}</h4>", f"<p>{escape('. '.join(facts))}.</p>"]
    if record.chunks:
        parts.append(f"<h5>Packed batch</h5>{svg.packed_batch(record, focus)}")
        if record.has_block_tables:
            parts.append(f"<h5>Block tables</h5>{svg.block_tables(record, focus)}")
    if record.events:
        parts.append(f"<h5>Events</h5>{events_table(record.events)}")
    if record.not_scheduled:
        reasons = [(svg.shorten(rid, 40), shown(reason)) for rid, reason in list(record.not_scheduled.items())[:20]]
        parts.append("<h5>Not scheduled</h5>" + table(("request", "why"), reasons))
    return fragment(*parts)


def events_table(events: Iterable[Event]) -> str:
    """A table of events with their reasons."""
    return table(
        ("step", "event", "request", "why"),
        [(event.step, event.kind, svg.shorten(event.request_id, 40), event.reason) for event in events],
    )


def trace_html(trace: Trace) -> str:
    """A trace: source, timeline, and the requests with their texts so far."""
    records = list(trace)
    parts = [f"<h4>{escape(trace.meta.source)}</h4>", f"<p>{escape(repr(trace))}</p>"]
    if records:
        sentences = {stall.step: str(stall) for stall in stalls(trace)}
        parts.append(f"<h5>Tokens per step</h5>{svg.timeline(records, stalls=sentences)}")
        parts += [f"<p>stall: {escape(sentence)}</p>" for sentence in sentences.values()]
        parts.append(f"<h5>Requests</h5>{_requests_table(trace)}")
    return fragment(*parts)


def _requests_table(trace: Trace, limit: int = 24) -> str:
    texts: dict[str, list[str]] = {request_id: [] for request_id in trace.requests}
    counts = dict.fromkeys(texts, 0)
    for record in trace:
        for chunk in record.chunks:
            if chunk.accepted:
                counts[chunk.request_id] = counts.get(chunk.request_id, 0) + len(chunk.accepted)
                texts.setdefault(chunk.request_id, []).append(chunk.text)
    rows = [
        (
            svg.shorten(request_id, 40),
            info.num_prompt_tokens,
            counts[request_id],
            svg.shorten(info.prompt, 80),
            svg.shorten("".join(texts[request_id]), TEXT_LIMIT),
        )
        for request_id, info in list(trace.requests.items())[-limit:]
    ]
    note = f"<p>The last {limit} of {len(trace.requests)} requests.</p>" if len(trace.requests) > limit else ""
    # A simulation has no texts.
    headings = ("request", "prompt tokens", "tokens", "prompt", "text")
    kept = [place for place in range(len(headings)) if place < 3 or any(row[place] for row in rows)]
    return note + table([headings[place] for place in kept], ([row[place] for place in kept] for row in rows))


def pool_html(state: PoolState) -> str:
    """The KV pool at one moment."""
    focus = focus_of(state.block_tables)
    keys = "".join(
        f'<span style="margin-right:14px"><i class="dot dot{slot}"></i>{escape(svg.shorten(request_id, 24))}</span>'
        for request_id, slot in focus.items()
    )
    return fragment(f"<h4>KV pool</h4><p>{escape(repr(state))}</p>", svg.pool(state, focus), f"<div>{keys}</div>")


def metrics_html(metrics: TraceMetrics) -> str:
    """Metrics as the text table that ``print`` shows."""
    return fragment(f"<pre>{escape(str(metrics))}</pre>")


def engine_html(engine: Any) -> str:
    """An engine: facts about it, its last steps, and the requests with their texts so far."""
    facts, trace = engine.facts(), engine.trace
    rows = [(name.replace("_", " "), value) for name, value in facts.items()]
    parts = [f"<h4>Engine: {escape(str(facts.get('model', 'model')))}</h4>", table(("", ""), rows)]
    if len(trace):
        records = list(trace[-200:])
        parts.append(f"<h5>Tokens per step</h5>{svg.timeline(records, at=records[-1].step)}")
        parts.append(f"<h5>Requests</h5>{_requests_table(trace, limit=12)}")
    else:
        parts.append("<p>No steps yet: add a request, then call step() or run().</p>")
    return fragment(*parts)
