"""One step with a chunk in each of the four roles, and the functions that one path took the place of."""

from __future__ import annotations

from collections.abc import Iterator

from lanes import svg_text

from workbench import Trace
from workbench.trace import Chunk, StepRecord
from workbench.viz.palette import FOCUS_HUES, LIGHT

LEFT, TOP, WIDTH, LINE = 165, 10, 600, 18

REMOVED = (
    ("single-request prefill", "packed prefill", "batched decode"),
    ("prefill inputs", "packed prefill inputs", "decode inputs"),
    ("dense causal mask", "packed mask", "no mask"),
    ("attention of the prompt", "attention of the prompt", "attention of the cache"),
)
"""Functions of a step with phases: forward passes, their inputs, masks and attention; a column per phase."""

PATH = ("prepare_unified", "one forward pass", "AttentionBackend.attend: a row sees up to itself")
ROLES = {
    "decode": "decode",
    "new_final": "new prompt",
    "intermediate": "intermediate chunk",
    "cached_final": "last chunk",
}


def roles(trace: Trace, step: StepRecord) -> str:
    """An SVG file. Dashed boxes were removed; the bar is the packed batch, each chunk as wide as its rows."""
    y = TOP + 4 * LINE + 60
    parts = [*_before(TOP), *_batch(step, y)]
    y += 46
    for number, name in enumerate(PATH):
        parts.append(_box(LEFT, y + number * 26, WIDTH, 22, ""))
        parts.append(svg_text(LEFT + WIDTH / 2, y + number * 26 + 15, name, anchor="middle", weight=600))
    y += 3 * 26 + 20
    parts.extend(_table(trace, step, y))
    width, height = LEFT + WIDTH + 10, y + 5 * LINE + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'font-size="11" font-family="system-ui, sans-serif" aria-label="One path for four roles of a chunk">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _before(y: int) -> Iterator[str]:
    yield svg_text(LEFT - 12, y + 14, "removed", anchor="end", weight=600)
    for place in range(3):
        x = LEFT + place * (WIDTH + 12) / 3
        yield _box(x, y, (WIDTH - 24) / 3, 4 * LINE + 8, "4 3")
        for line, names in enumerate(REMOVED):
            yield svg_text(x + 10, y + 16 + LINE * line, names[place])
    yield f'<path d="M{LEFT + WIDTH / 2} {y + 4 * LINE + 14}v16m-4 -5l4 5l4 -5" stroke="{LIGHT.text}" fill="none"/>'


def _batch(step: StepRecord, y: int) -> Iterator[str]:
    """The rows of the step, and a line from each chunk to its role's column."""
    yield svg_text(LEFT - 12, y + 16, f"step {step.step}: {step.num_tokens} rows", anchor="end", weight=600)
    x = float(LEFT)
    for hue, chunk in zip(FOCUS_HUES, step.chunks):
        width = WIDTH * chunk.num_tokens / step.num_tokens
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{hue}" stroke="{LIGHT.text}"/>'
            f'<path d="M{x + width / 2:.1f} {y + 24}v10" stroke="{LIGHT.text}"/>'
        )
        if width > 60:
            yield svg_text(f"{x + width / 2:.1f}", y + 16, ROLES[chunk.arm], anchor="middle")
        else:
            yield svg_text(f"{x:.1f}", y - 5, ROLES[chunk.arm])
        x += width
    yield f'<path d="M{LEFT} {y + 34}h{WIDTH}" stroke="{LIGHT.text}"/>'


def _table(trace: Trace, step: StepRecord, y: int) -> Iterator[str]:
    """The facts that tell the roles apart, from the record."""
    for line, name in enumerate(
        ("", "rows", "first position", "KV length after it", "kept: Sampler", "kept: Scheduler.update")
    ):
        yield svg_text(LEFT - 12, y + LINE * line, name, anchor="end", weight=600)
    for column, (hue, chunk) in enumerate(zip(FOCUS_HUES, step.chunks)):
        x = LEFT + column * WIDTH / 4
        yield f'<rect x="{x}" y="{y - 9}" width="9" height="9" fill="{hue}" stroke="{LIGHT.text}"/>'
        yield svg_text(x + 14, y, ROLES[chunk.arm], weight=600)
        for line, fact in enumerate(_facts(trace, chunk), start=1):
            yield svg_text(x + 14, y + LINE * line, fact)


def _facts(trace: Trace, chunk: Chunk) -> tuple[str, ...]:
    length = trace.requests[chunk.request_id].num_prompt_tokens
    rows = "1" if chunk.is_decode else f"{chunk.num_tokens} of a prompt of {length}"
    samples = f"row {chunk.num_tokens}" if chunk.accepted else "no row"
    return rows, str(chunk.start), str(chunk.end), samples, "1 token more" if chunk.accepted else "no token"


def _box(x: float, y: float, width: float, height: float, dashes: str) -> str:
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="4" fill="{LIGHT.surface}" '
        f'stroke="{LIGHT.muted}"{dash}/>'
    )
