"""One lane per request, one column per step: a picture of the work in each step."""

from __future__ import annotations

from html import escape

from workbench import Trace
from workbench.base.text import counted
from workbench.viz.palette import FOCUS_HUES, LIGHT
from workbench.viz.words import limit_of

LEFT, TOP, LANE, STEP = 84, 30, 26, 15


def lanes(title: str, trace: Trace, num_steps: int = 40) -> str:
    """An SVG file. A bar's height is the square root of the chunk's share of the token budget.

    Black marks are arrivals. A filled bar is a prompt chunk, an outlined bar a decode, a hatched bar a recompute.
    """
    places = {rid: TOP + LANE * number for number, rid in enumerate(trace.requests)}
    hues = dict(zip(trace.requests, (LIGHT.muted, *FOCUS_HUES) if len(places) > len(FOCUS_HUES) else FOCUS_HUES))
    budget = trace.config["max_num_batched_tokens"]
    parts = [_hatching(number, hue) for number, hue in enumerate(hues.values())]
    parts.append(svg_text(LEFT, 18, title, weight=600))
    for rid, y in places.items():
        parts.append(svg_text(LEFT - 8, y + LANE - 8, rid, anchor="end"))
        parts.append(f'<path d="M{LEFT} {y + LANE - 4}h{num_steps * STEP}" stroke="{LIGHT.hairline}"/>')
    for index, record in enumerate(trace[:num_steps]):
        x = LEFT + index * STEP
        for rid in record.arrived:
            parts.append(f'<path d="M{x} {places[rid] + 2}v{LANE - 6}" stroke="{LIGHT.text}" stroke-width="2"/>')
        for rid in record.preempted:
            parts.append(svg_text(x + STEP / 2, places[rid] + LANE - 7, "▼", anchor="middle"))
        for chunk in record.chunks:
            hue, number = hues[chunk.request_id], list(hues).index(chunk.request_id)
            height = max(3.0, (LANE - 8) * (chunk.num_tokens / budget) ** 0.5)
            fill = "none" if chunk.is_decode else f"url(#h{number})" if chunk.num_recomputed_tokens else hue
            said = f"step {record.step}: {counted(chunk.num_tokens, 'token')}, {limit_of(chunk.limited_by)}"
            parts.append(
                f'<rect x="{x + 2}" y="{places[chunk.request_id] + LANE - 4 - height:.1f}" width="{STEP - 3}" '
                f'height="{height:.1f}" fill="{fill}" stroke="{hue}"><title>{said}</title></rect>'
            )
    bottom = TOP + LANE * len(places)
    for step in range(0, num_steps + 1, 5):
        parts.append(svg_text(LEFT + step * STEP, bottom + 12, str(step)))
    parts.append(svg_text(LEFT - 8, bottom + 12, "step", anchor="end"))
    width, height = LEFT + num_steps * STEP + 20, bottom + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{1.2 * width:.0f}" role="img" '
        f'font-size="11" font-family="system-ui, sans-serif" aria-label="{escape(title)}">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _hatching(number: int, hue: str) -> str:
    return (
        f'<pattern id="h{number}" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path d="M0 0V4" stroke="{hue}" stroke-width="2.4"/></pattern>'
    )


def svg_text(x: float | str, y: float | str, text: str, anchor: str = "start", weight: int = 400) -> str:
    """A text element in the light theme; coordinates that are strings are already formatted."""
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{LIGHT.text}">{escape(text)}</text>'
    )
