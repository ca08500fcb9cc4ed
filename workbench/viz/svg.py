"""Static pictures of steps and traces: inline SVG without scripts, styled by the classes of ``style.STYLE``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from workbench.base.text import significant
from workbench.trace.fields import EMPTY
from workbench.trace.readings.pool_state import PoolState
from workbench.trace.records import StepRecord
from workbench.viz.layout.mask import mask_bands
from workbench.viz.layout.packed_batch import PackedRow, packed_rows, readable_scale
from workbench.viz.layout.pool import TAIL, block_table_rows, num_shown, pool_columns, pool_spans
from workbench.viz.layout.timeline import timeline_marks
from workbench.viz.palette import EVENT_MARKS
from workbench.viz.words import limit_of, role_of

WIDTH = 760
LEFT = 96
SPACE = WIDTH - LEFT - 12
SEQUENCES_TOP, ROW_HEIGHT = 84, 18
MAX_ROWS = 32
"""Maximum number of sequences in a static picture; a line says how many more there are."""

MASK_HEIGHT = 240
"""Maximum height of the picture of a mask in pixels."""

Focus = Mapping[str, int]
"""Hue slot of each request in focus."""


LABEL = 12
"""Characters of an id beside a picture."""


def shorten(text: str, limit: int) -> str:
    """The text, cut to ``limit`` characters with an ellipsis at the end if it is longer."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def names_in_pictures(request_ids: Sequence[str]) -> dict[str, str]:
    """Ids as labels of a picture: a long one goes without the beginning that all share, and without its middle.

    ``js/request.js`` has the same rule, with the ids of the whole run.

    Example:
        >>> names_in_pictures(["cmpl-bench-5-41-0-b3d21ef3", "cmpl-bench-5-7-0-84de5ffc"])
        {'cmpl-bench-5-41-0-b3d21ef3': '…41-0', 'cmpl-bench-5-7-0-84de5ffc': '…7-0'}
    """
    first, last = min(request_ids, default=""), max(request_ids, default="")  # all others are between them
    length = next((at for at, (one, other) in enumerate(zip(first, last)) if one != other), min(len(first), len(last)))
    start = len(re.sub(r"[^-_.:/]*$", "", first[:length])) if first != last else 0
    names = {}
    for request_id in request_ids:
        rest = re.sub(r"^((?:chat)?cmpl-.+)-[0-9a-f]{8}$", r"\1", request_id)[start:] or request_id[start:]
        short = f"…{rest}" if len(rest) < LABEL else f"{rest[: LABEL - 5]}…{rest[-4:]}"
        names[request_id] = request_id if len(request_id) <= LABEL else short
    return names


def _rect(x: float, y: float, width: float, height: float, classes: str, title: str = "") -> str:
    body = f"<title>{escape(title)}</title>" if title else ""
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
    return f'<rect {box} class="{classes}">{body}</rect>'


def text(x: float, y: float, text: str, classes: str = "", anchor: str = "start") -> str:
    """An SVG text element; the text is escaped."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">{escape(text)}</text>'


def drawing(height: float, label: str, parts: Sequence[str], width: int = WIDTH) -> str:
    """An SVG element of these parts, with a label for screen readers."""
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(label, quote=True)}" style="max-width:100%;height:auto">{"".join(parts)}</svg>'
    )


def _fill(request_id: str, is_decode: bool, focus: Focus) -> str:
    slot = focus.get(request_id)
    phase = "decode" if is_decode else "prefill"
    return phase if slot is None else f"{phase} hue{slot}"


def packed_batch(record: StepRecord, focus: Focus) -> str:
    """Query rows as a ribbon, to scale and at a readable scale; below, a row per sequence against its KV."""
    rows = packed_rows(record)
    if not rows:
        return ""
    shown, total = rows[:MAX_ROWS], record.num_tokens
    parts = [*_ribbons(rows, total, record.token_budget, focus), *_sequences(shown, rows, focus)]
    height = SEQUENCES_TOP + len(shown) * ROW_HEIGHT + 6
    if len(rows) > len(shown):
        parts.append(text(LEFT, height + 8, f"and {len(rows) - len(shown)} more sequences", "muted"))
        height += 16
    return drawing(height, f"Packed batch of step {record.step}: {len(rows)} sequences, {total} rows", parts)


def _ribbons(rows: Sequence[PackedRow], total: int, token_budget: int, focus: Focus) -> list[str]:
    """The query rows of all sequences side by side: to scale against the token budget, and at a readable scale."""
    budget = max(token_budget, total)
    parts = [text(LEFT - 8, 16, "to scale", "muted", "end"), text(LEFT - 8, 52, "readable", "muted", "end")]
    parts.append(_rect(LEFT, 6, SPACE, 14, "slack"))
    for row in rows:
        x0, x1 = (LEFT + q / budget * SPACE for q in (row.q_start, row.q_end))
        parts.append(_rect(x0, 6, x1 - x0, 14, _fill(row.request_id, row.arm == "decode", focus), _describe(row)))
    if budget > total:
        parts.append(text(LEFT + SPACE, 32, f"{budget - total} of {budget} unused", "muted", "end"))
    end = str(total)
    free_from, free_to = -1e9, LEFT + SPACE - 6 * len(end) - 8  # the last edge has its place in any case
    for row, segment in zip(rows, readable_scale([row.num_rows for row in rows], SPACE, 22)):
        x, width = LEFT + segment.x0, segment.x1 - segment.x0
        parts.append(_rect(x, 42, width - 1, 16, _fill(row.request_id, row.arm == "decode", focus), _describe(row)))
        label = str(row.q_start)
        if x >= free_from and x + 6 * len(label) <= free_to:
            parts.append(text(x, 69, label, "number"))
            free_from = x + 6 * len(label) + 8
    parts.append(text(LEFT + SPACE, 69, end, "number", "end"))
    return [*parts, text(LEFT - 8, 69, "cu_seqlens_q", "number muted", "end")]


def _sequences(shown: Sequence[PackedRow], rows: Sequence[PackedRow], focus: Focus) -> list[str]:
    """The new rows of the sequences that are shown against their KV, at one scale for all rows of the batch."""
    parts = []
    scale = (SPACE - 220) / max(16, *(row.kv_end for row in rows))
    names = names_in_pictures([row.request_id for row in rows])
    for i, row in enumerate(shown):
        y = SEQUENCES_TOP + i * ROW_HEIGHT
        before, after = LEFT + row.kv_start * scale, LEFT + row.kv_end * scale
        parts.append(text(LEFT - 8, y + 11, names[row.request_id], "number", "end"))
        if row.kv_start:
            seen = LEFT + row.kv_seen * scale
            parts.append(_rect(seen, y + 3, before - seen, 10, "kv"))
        parts.append(_new_rows(row, y, after, scale, _fill(row.request_id, False, focus)))
        parts.append(text(after + 12, y + 11, row.label, "number muted"))
    return parts


def _new_rows(row: PackedRow, y: int, after: float, scale: float, classes: str) -> str:
    """A marker for a decode, the causal trapezoid for a chunk of a prompt."""
    title = f"<title>{escape(_describe(row))}</title>"
    if row.arm == "decode":
        return f'<path d="M{after:.1f} {y + 2}l5 6l-5 6l-5 -6z" class="{classes} outlined">{title}</path>'
    corners = " ".join(f"{LEFT + kv * scale:.1f},{y + 3 + 10 * q / row.num_rows:.1f}" for kv, q in row.trapezoid)
    return f'<polygon points="{corners}" class="{classes}">{title}</polygon>'


def _describe(row: PackedRow) -> str:
    return f"{row.request_id}: {role_of(row.arm)}, {row.label}, {limit_of(row.limited_by)}"


def mask(record: StepRecord, focus: Focus) -> str:
    """The block-diagonal causal mask: query rows downwards, the KV positions of all sequences side by side."""
    bands = mask_bands(record)
    if not bands:
        return ""
    num_rows, num_columns = bands[-1].rows.stop, bands[-1].columns.stop
    across, down = SPACE / num_columns, min(12.0, MASK_HEIGHT / num_rows)  # as wide as the pictures beside it
    parts = [_rect(LEFT, 0, num_columns * across, num_rows * down, "slack")]
    names = names_in_pictures([band.request_id for band in bands])
    for band in bands:
        points = " ".join(f"{LEFT + column * across:.2f},{row * down:.2f}" for column, row in band.outline)
        words = f"rows {_span(band.rows)}, columns {_span(band.columns)}"
        parts.append(
            f'<polygon points="{points}" class="{_fill(band.request_id, band.is_decode, focus)}">'
            f"<title>{escape(f'{band.request_id}: {words}')}</title></polygon>"
        )
        if len(band.rows) * down >= 9:
            name = names[band.request_id]
            parts.append(text(LEFT - 8, (band.rows.start + band.rows.stop) / 2 * down + 4, name, "number", "end"))
    label = f"Attention mask of step {record.step}: {num_rows} rows, {num_columns} KV positions, block-diagonal, causal"
    return drawing(num_rows * down + 2, label, parts)


def _span(indices: range) -> str:
    return f"{indices.start} to {indices.stop - 1}"


def block_tables(record: StepRecord, focus: Focus) -> str:
    """The logical blocks of each sequence with their physical ids, one row per KV cache group.

    A block is filled as far as it is used, if the record knows; a place that is not held is a dashed outline.
    """
    rows = block_table_rows(record)[:MAX_ROWS]
    if not rows:
        return ""
    cell = max(27.0, 6.7 * len(str(max(max(row.block_ids, default=0) for row in rows))) + 4)
    fits = int((WIDTH - LEFT - 60) / cell)
    names = names_in_pictures([row.request_id for row in rows])
    parts = []
    for i, row in enumerate(rows):
        y = i * 18.0
        name, classes = (f"group {row.group}", "muted") if row.group else (names[row.request_id], "number")
        parts.append(text(LEFT - 8, y + 12, name, classes, "end"))
        slot = focus.get(row.request_id)
        for place, logical, block, filled, is_new in row.cells(fits):
            x = LEFT + place * cell
            if not block:
                parts.append(_rect(x, y + 1, cell - 2, 14, "hole", f"logical block {logical}, not held"))
                continue
            new = " new" if is_new else ""
            parts.append(_rect(x, y + 1, cell - 2, 14, "kv"))
            hue = "owned" if slot is None else f"prefill hue{slot}"
            parts.append(
                _rect(x, y + 1, (cell - 2) * filled, 14, hue + new, f"logical block {logical}, physical block {block}")
            )
            ink = "label" if filled < 0.6 else "label on" if slot is None else f"label on{slot}"
            parts.append(text(x + cell / 2 - 1, y + 11.5, str(block), ink, "middle"))
        if len(row.block_ids) > fits:
            parts.append(text(LEFT + (fits - TAIL - 1) * cell + cell / 2 - 1, y + 11, "…", "muted", "middle"))
        end = LEFT + min(len(row.block_ids), fits) * cell + 6
        if (used := row.filled(len(row.block_ids) - 1)) is not None:
            parts.append(text(end, y + 12, f"{used}/{row.block_size}", "muted"))
    return drawing(len(rows) * 18 + 4, f"Block tables of step {record.step}", parts)


def step_ticks(first: int, last: int) -> range:
    """Up to nine round steps in [first, last), equally spaced."""
    stride = next(
        factor * 10**digits for digits in range(20) for factor in (1, 2, 5) if 8 * factor * 10**digits >= last - first
    )
    return range(-(-first // stride) * stride, last, stride)


EVENT_WORDS = {
    "admit": "admitted",
    "resume": "resumed",
    "preempt": "preempted",
    "finish": "finished",
    "abort": "aborted",
}
"""The words for the marks above the bars of a timeline."""


def _event(x: float, y: float, kind: str, title: str = "") -> str:
    """The mark of an event; x is its middle, y its upper edge."""
    shape, colour = EVENT_MARKS[kind]
    d = {
        "up": "l3 6h-6z",
        "down": "m0 6l3 -6h-6z",
        "half": "a3 3 0 0 0 0 6z",
        "cross": "m-2 0l2 2 2 -2 1 1 -2 2 2 2 -1 1 -2 -2 -2 2 -1 -1 2 -2 -2 -2z",
    }.get(shape, "m-2.5 1h5v5h-5z")
    body = f"<title>{escape(title)}</title>" if title else ""
    return f'<path d="M{x:.1f} {y:.0f}{d}" fill="{colour}">{body}</path>'


def _event_legend(kinds: Sequence[str], y: float) -> list[str]:
    """The meaning of the marks above the bars; "requests:" keeps an admission from being taken for an arrival."""
    parts, x = [text(LEFT, y, "requests:", "muted")], LEFT + 62.0
    for kind in kinds:
        parts += [_event(x + 3, y - 8, kind), text(x + 11, y, EVENT_WORDS[kind], "muted")]
        x += 26 + 6.2 * len(EVENT_WORDS[kind])
    return parts


def timeline(records: Sequence[StepRecord], at: int | None = None, stalls: Mapping[int, str] = EMPTY) -> str:
    """Tokens per step against the budget: decode at the bottom, prefill above it.

    A budget of which no step uses a quarter would leave nothing to see; it is named above the picture then.

    Args:
        records: Steps in order.
        at: The step to frame.
        stalls: A sentence about each step that stalled, which is marked.
    """
    marks = timeline_marks(records, at, stalls, max_bars=320)
    if marks is None:
        return ""
    bars, top = marks.bars, marks.top
    base, high = 78.0, 64.0
    width = SPACE / len(bars.step)
    scale = high / top
    parts = [
        text(LEFT - 8, base - top * scale + 4, f"{top:.0f}", "number muted", "end"),
        text(LEFT - 8, base, "0", "number muted", "end"),
        text(LEFT - 8, base + 14, "step", "muted", "end"),
    ]
    if top < bars.top:
        parts.append(text(LEFT + SPACE, 8, f"the budget of {bars.top:.0f} is higher than the picture", "muted", "end"))
    gap = 1 if width > 4 else 0
    for i, (step, decode, prefill, slack) in enumerate(zip(bars.step, bars.decode, bars.prefill, marks.slack)):
        x = LEFT + i * width
        title = f"step {step}: {significant(prefill, 6)} prefill, {significant(decode, 6)} decode tokens"
        parts.append(_rect(x, base - (decode + prefill + slack) * scale, width - gap, slack * scale, "slack", title))
        if prefill:
            parts.append(_rect(x, base - (decode + prefill) * scale, width - gap, prefill * scale, "prefill", title))
        if decode:
            parts.append(_rect(x, base - decode * scale, width - gap, decode * scale, "decode", title))
        if i == marks.framed:
            parts.append(_rect(x - 1, 4, width + 1, base, "cursor"))
    first, last = marks.span
    for step, kind in marks.events:
        x = LEFT + marks.place(step + 0.5) * SPACE
        parts.append(_event(x, 8 if kind == "finish" else 2, kind, f"{kind} in step {step}"))
    for step, words in marks.stalls:
        x = LEFT + marks.place(step + 0.5) * SPACE
        title = f"<title>stall: {escape(words)}</title>"
        parts.append(f'<path d="M{x - 1:.1f} 0h2v{base:.0f}h-2z" class="stall">{title}</path>')
    for tick in step_ticks(first, last):
        parts.append(text(LEFT + marks.place(tick) * SPACE, base + 14, str(tick), "number muted"))
    label, height = f"Tokens of steps {first} to {last - 1}", base + 20
    seen = {kind for _, kind in marks.events}
    if kinds := [kind for kind in EVENT_WORDS if kind in seen]:
        parts += _event_legend(kinds, base + 32)
        label, height = f"{label}; marks above: requests {', '.join(map(EVENT_WORDS.__getitem__, kinds))}", height + 18
    return drawing(height, label, parts)


def pool(state: PoolState, focus: Focus) -> str:
    """One cell per block at its fixed place, of a large pool up to the last used one; equal neighbours are joined."""
    slots, size = sorted(focus, key=lambda request_id: focus[request_id]), num_shown(state)
    spans = pool_spans(state, slots, size)
    cell = min(14.0, (WIDTH - 4) / pool_columns(size))
    parts = []
    for row, column, first, last, kind, slot in spans:
        classes = kind if slot < 0 else f"prefill hue{focus[slots[slot]]}"
        ids = f"blocks {first} to {last}" if last > first else f"block {first}"
        parts.append(_rect(2 + column * cell, 2 + row * cell, (last - first + 1) * cell - 1, cell - 1, classes, ids))
    label = f"KV pool: {state.num_owned} in use, {state.num_cached_free} cached, of {state.num_blocks - 1} blocks"
    height = (spans[-1].row + 1) * cell + 4
    if size < state.num_blocks:
        left_out = f"blocks {size:,} to {state.num_blocks - 1:,} are free, and left out"
        parts.append(text(2, height + 11, left_out, "muted"))
        height += 18
    return drawing(height, label, parts)
