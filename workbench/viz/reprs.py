"""Notebook output of plain objects: HTML with images, without scripts, every text escaped.

The functions for objects of ``workbench.trace`` are attached to them by the table in ``workbench/__init__.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from workbench.base.text import counted, duration
from workbench.simulation.costs.stalls import stalls
from workbench.trace.readings.compare import Comparison
from workbench.trace.readings.computed_by import computed_by, expanded_words
from workbench.trace.readings.latency import Latency
from workbench.trace.readings.metrics import (
    LATENCIES,
    STATISTICS,
    SpeculationMetrics,
    Summary,
    heading_lines,
    open_note,
)
from workbench.trace.readings.metrics_by_request import HEADINGS, MetricsByRequest
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.narrate import end_of, end_words, shown
from workbench.trace.readings.outputs_before import outputs_before
from workbench.trace.readings.pool_state import PoolState
from workbench.trace.records import Event, StepRecord
from workbench.viz import svg
from workbench.viz.image import image
from workbench.viz.layout.packed_batch import packed_rows
from workbench.viz.palette import FOCUS_HUES
from workbench.viz.style import STYLE
from workbench.viz.words import role_of

if TYPE_CHECKING:
    from workbench.analysis.whatif import WhatIf
    from workbench.trace.readings.metrics import TraceMetrics
    from workbench.trace.trace import Trace

NO_BREAK = "\N{NO-BREAK SPACE}"

TEXT_LIMIT = 600
"""Maximum number of characters of a request's text in a static picture."""


def fragment(*parts: str) -> str:
    """A self-contained HTML fragment from parts that are HTML already."""
    return f'<div class="wb-repr"><style>{STYLE}</style>{"".join(parts)}</div>'


LONGEST_WORD = 30
"""Characters of a word that a cell keeps whole."""


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table of plain values; every cell is escaped. Only long words are broken."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    text = str(value)
    is_long = max(map(len, text.split()), default=0) > LONGEST_WORD
    return f"<td{' class=long' if is_long else ''}>{escape(text)}</td>"


def focus_of(request_ids: Iterable[str]) -> dict[str, int]:
    """Hue slots of the first requests; all others are grey."""
    return {request_id: slot for slot, request_id in zip(range(len(FOCUS_HUES)), request_ids)}


def step_html(record: StepRecord) -> str:
    """A step: packed batch, mask, block tables, events, and the requests that were not scheduled, with reasons."""
    focus = focus_of(chunk.request_id for chunk in record.chunks)
    tokens = f"{record.num_tokens} of {record.token_budget}" if record.token_budget else str(record.num_tokens)
    facts = [
        f"{tokens} tokens: {record.num_prefill_tokens} prefill, {record.num_decode_tokens} decode",
        f"{len(record.running)} running, {len(record.waiting)} waiting",
        f"{counted(record.free_blocks, 'block')} free after scheduling, {record.free_blocks_end:,} at the end",
    ]
    if record.timings:
        facts.append(" · ".join(f"{name} {duration(seconds)}" for name, seconds in record.timings.items()))
    if record.kernel:
        items = counted(len(record.kernel.work_items), "work item")
        words = filter(None, (computed_by(record.kernel), items, expanded_words(record.kernel)))
        facts.append(f"attention: {', '.join(words)}")
    parts = [f"<h4>Step {record.step}</h4>", f"<p>{escape('. '.join(facts))}.</p>"]
    if record.chunks:
        parts.append(f"<h5>Packed batch</h5>{image(svg.packed_batch(record, focus))}{_chunks_table(record)}")
        parts.append(f"<h5>Attention mask{_group_words(record)}</h5>{image(svg.mask(record, focus))}")
        if record.has_block_tables:
            parts.append(f"<h5>Block tables</h5>{image(svg.block_tables(record, focus))}")
    if record.events:
        parts.append(f"<h5>Events</h5>{events_table(record.events)}")
    if record.not_scheduled:
        reasons = [(svg.shorten(rid, 40), shown(reason)) for rid, reason in list(record.not_scheduled.items())[:20]]
        parts.append("<h5>Not scheduled</h5>" + table(("request", "why"), reasons))
    return fragment(*parts)


def _group_words(record: StepRecord) -> str:
    """The KV cache group that a step is drawn with, if there are several."""
    if record.num_groups == 1 or (layout := record.layout).group is None:
        return ""
    kind = f"window {record.window:,}" if record.window else "full attention"
    return f" of group {layout.group} ({kind}) of {record.num_groups} KV cache groups"


def _chunks_table(record: StepRecord) -> str:
    """The numbers of the packed batch and of the mask as text, which can be selected and read aloud."""
    rows, window = [], record.window
    reads = f"the {window:,} positions up to its own" if window else "positions 0 to its own"
    for row, chunk in list(zip(packed_rows(record), record.chunks))[: svg.MAX_ROWS]:
        rows.append(
            (
                svg.shorten(row.request_id, 40),
                role_of(row.arm),
                _span(row.q_start, row.q_end),
                f"{chunk.start} → {chunk.end}",
                f"{reads}, {_span(chunk.first_position, chunk.num_kv)}",
            )
        )
    return table(("request", "role", "rows", "num_kv_computed", "mask: a row reads"), rows)


def _span(start: int, stop: int) -> str:
    return f"{start} to {stop - 1}" if stop - start > 1 else str(start)


def events_table(events: Iterable[Event]) -> str:
    """A table of events with their reasons."""
    rows = []
    for event in events:
        why = end_words(event.reason) if event.kind == "finish" and event.reason else event.reason
        rows.append((event.step, event.kind, svg.shorten(event.request_id, 40), why))
    columns = 4 if any(why for *_, why in rows) else 3
    return table(("step", "event", "request", "why")[:columns], [row[:columns] for row in rows])


def trace_html(trace: Trace) -> str:
    """A trace: source, timeline, and the requests with their texts so far."""
    records = list(trace)
    parts = [f"<h4>{escape(trace.meta.source)}</h4>", f"<p>{escape(repr(trace))}</p>"]
    if records:
        sentences = {stall.step: str(stall) for stall in stalls(trace)}
        parts.append(f"<h5>Tokens per step</h5>{image(svg.timeline(records, stalls=sentences))}")
        parts += [f"<p>stall: {escape(sentence)}</p>" for sentence in sentences.values()]
        parts.append(f"<h5>Requests</h5>{_requests_table(trace)}")
    return fragment(*parts)


def _requests_table(trace: Trace, limit: int = 24) -> str:
    infos = dict(trace.requests)
    texts: dict[str, list[str]] = {request_id: [] for request_id in infos}
    before = outputs_before(trace)
    counts = {request_id: before.get(request_id, 0) for request_id in infos}
    for record in trace:
        for chunk in record.chunks:
            if chunk.accepted:
                counts[chunk.request_id] = (counts.get(chunk.request_id) or 0) + len(chunk.accepted)
                texts.setdefault(chunk.request_id, []).append(chunk.text)
    last = list(infos.items())[-limit:]
    prompts = _apart([info.prompt for _, info in last])
    rows = [
        (
            svg.shorten(request_id, 40),
            info.num_prompt_tokens,
            "–" if counts[request_id] is None else counts[request_id],
            _trimmed(prompt, PROMPT_LIMIT),
            ("… " if before.get(request_id) and any(texts[request_id]) else "")
            + _trimmed("".join(texts[request_id]), TEXT_LIMIT),
        )
        for (request_id, info), prompt in zip(last, prompts)
    ]
    note = f"<p>The last {limit} of {len(infos)} requests.</p>" if len(infos) > limit else ""
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
    picture = image(svg.pool(state, focus))
    return fragment(f"<h4>KV pool</h4><p>{escape(repr(state))}</p>", picture, f"<div>{keys}</div>")


def outputs_html(outputs: Any) -> str:
    """Outputs of requests: prompt, text, end, time to the first token, and tokens per second after it."""
    found = metrics(outputs.trace).requests
    rows = []
    for output, prompt in zip(outputs, _apart([output.prompt or "" for output in outputs])):
        times = found.get(output.request_id)
        rows.append(
            (
                svg.shorten(output.request_id, 40),
                _trimmed(prompt, PROMPT_LIMIT) or counted(len(output.prompt_token_ids), "token"),
                _trimmed(output.text, TEXT_LIMIT),
                len(output.token_ids),
                end_of(output, outputs.trace.requests),
                _latency(times.ttft) if times is not None and times.ttft is not None else "",
                _tokens_per_second(times.token_times) if times is not None else "",
            )
        )
    headings = ("request", "prompt", "text", "tokens", "end", "first token", "tokens/s")
    where = outputs.trace.meta.model.get("runs_on")
    note = f"<p>{escape(str(where))}</p>" if where else ""
    return fragment(table(headings, rows), note)


PROMPT_LIMIT = 80
"""Characters of a prompt in a table."""
KEPT = 3
"""Words before the first difference of prompts that stay, unless a line or a part of a template begins there."""


def _apart(prompts: Sequence[str]) -> list[str]:
    """The prompts of a table, without the words that all of them begin with if they do not fit it otherwise."""
    known = {prompt for prompt in prompts if prompt}
    if len(known) < 2 or all(len(prompt.strip()) <= PROMPT_LIMIT for prompt in known):
        return list(prompts)
    first, last = min(known), max(known)  # all others are between them, and begin as both do
    length = next((place for place, (one, other) in enumerate(zip(first, last)) if one != other), len(first))
    shared = first[:length]
    words = [found.end() for found in re.finditer(r"[ \n>]+", shared)][-KEPT - 1 :]  # where the last words begin
    begins = (at for at in reversed(words) if shared[at - 1] != " " and all(each[at:].strip() for each in known))
    cut = next(begins, words[0] if len(words) > KEPT else 0)
    return [f"… {prompt[cut:].lstrip()}" if prompt else "" for prompt in prompts] if cut else list(prompts)


def _trimmed(text: str, limit: int) -> str:
    """A text without the spaces and line breaks at its beginning, for a row of a table."""
    return svg.shorten(text.lstrip(), limit)


def _latency(latency: Latency) -> str:
    return counted(latency.steps, "step") if latency.seconds is None else duration(latency.seconds)


def _tokens_per_second(times: Sequence[float]) -> str:
    """The pace of a request after its first token; "" if it is not known."""
    return f"{(len(times) - 1) / (times[-1] - times[0]):.1f}" if len(times) > 1 and times[-1] > times[0] else ""


def metrics_html(metrics: TraceMetrics) -> str:
    """Metrics as a table in which each latency has its unit; ``print`` shows the same numbers as text."""
    return _summary(metrics.summary, metrics.speculation, metrics.pauses_note)


def requests_html(requests: MetricsByRequest) -> str:
    """The metrics of requests, a row for each."""
    rows = [[svg.shorten(row[0], 40), *(cell.replace(" ", NO_BREAK) for cell in row[1:])] for row in requests.rows]
    return fragment(table(HEADINGS, rows), f"<p>{requests.more}</p>" if requests.more else "")


def summary_html(summary: Summary) -> str:
    """The same without the fate of drafts, which a summary does not know."""
    return _summary(summary, SpeculationMetrics())


def _summary(summary: Summary, speculation: SpeculationMetrics, pauses: str = "") -> str:
    first, *others = heading_lines(summary, speculation)
    rows = []
    for title, name in LATENCIES:
        found = getattr(summary, name)
        cells = [found.amount(statistic).replace(" ", NO_BREAK) for statistic in STATISTICS]
        rows.append((title.replace("  ", 2 * NO_BREAK), *cells, f"{found.count:,}"))
    notes = filter(None, (open_note(summary), pauses))
    return fragment(
        f"<h4>{escape(first)}</h4>",
        *(f"<p>{escape(line)}</p>" for line in others),
        table(("latency", *STATISTICS, "count"), rows),
        *(f"<p>{escape(note)}</p>" for note in notes),
    )


def whatif_html(answer: WhatIf) -> str:
    """A changed setting beside the recorded one: what stands in its way, the table, the notes and the command."""
    obstacle = answer.prediction.obstacle
    headings, *rows = answer.table
    return fragment(
        f"<h4>{escape(obstacle)}</h4>" if obstacle else "",
        table(headings, rows),
        *(f"<p>{escape(remark)}</p>" for remark in answer.remarks),
        f"<p><code>{escape(answer.command)}</code></p>" if answer.command else "",
    )


def comparison_html(comparison: Comparison) -> str:
    """Two runs: what differs, and the latencies of each request."""
    lines = [f"<p>{escape(line)}</p>" for line in comparison.lines]
    if comparison.alike:
        return fragment(*lines, f"<p>{escape(comparison.alike)}</p>")
    headings, rows = comparison.table
    rest = [f"<p>{escape(line)}</p>" for line in comparison.more]
    return fragment(*lines, table(headings, rows) if rows else "", *rest)


def engine_html(engine: Any) -> str:
    """An engine: facts about it, its last steps, and the requests with their texts so far."""
    facts, trace = engine.facts(), engine.trace
    rows = [(name.replace("_", " "), value) for name, value in facts.items()]
    parts = [f"<h4>Engine: {escape(str(facts.get('model', 'model')))}</h4>", table(("fact", "value"), rows)]
    if len(trace):
        records = list(trace[-200:])
        parts.append(f"<h5>Tokens per step</h5>{image(svg.timeline(records, at=records[-1].step))}")
        parts.append(f"<h5>Requests</h5>{_requests_table(trace, limit=12)}")
    else:
        parts.append("<p>No steps yet: add a request, then call step() or run().</p>")
    return fragment(*parts)
