"""Replicas as rows of one time axis, as an SVG: what each runs, what waits there, and what its KV pool holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.trace import Trace
from workbench.trace.readings.metrics_collector import metrics
from workbench.viz.pareto import GRID, INK, scale, text

WIDTH, ROW, LEFT, BINS = 900, 56, 110, 360
RUNNING, WAITING, KV, CACHED, WAY = "#0072b2", "#e69f00", "#555555", "#009e73", "#d55e00"


def fleet_svg(traces: Mapping[str, Trace], request_id: str = "") -> str:
    """Draw a row for each replica; the way of one request is framed.

    Args:
        traces: Runs by name. The clock of the one that began first is the picture's.
        request_id: A request to show from its first to its last step, on each replica that ran it; "" for none.

    Raises:
        ValueError: No trace has a step, or the request is in none.
    """
    first = min((trace.meta.created for trace in traces.values()), default=0.0)
    starts = {name: trace.meta.created - first for name, trace in traces.items()}
    ends = [starts[name] + trace[-1].end for name, trace in traces.items() if len(trace) and trace[-1].end]
    if not (end := max(ends, default=0.0)):
        raise ValueError("nothing to draw: no replica has a step that took time")
    ticks, to_x = scale([0.0, end], LEFT, WIDTH - 16)
    rows = [_binned(trace, starts[name], end) for name, trace in traces.items()]
    most = max(running + waiting for row in rows for running, waiting, *_ in row) or 1
    bottom = 20 + (ROW + 8) * len(rows)
    parts = []
    for tick in ticks:
        if to_x(tick) <= WIDTH:
            parts.append(f'<path d="M{to_x(tick):.1f} 20V{bottom}" stroke="{GRID}"/>')
            parts.append(text(to_x(tick), bottom + 16, f"{tick:g} s", "middle"))
    found = False
    for number, ((name, trace), row) in enumerate(zip(traces.items(), rows)):
        top = 20 + (ROW + 8) * number
        parts.append(text(8, top + 24, name))
        parts.append(text(8, top + 40, f"{len(trace.requests)} requests"))
        parts += [text(LEFT - 6, top + 10, f"{most}", "end"), text(LEFT - 6, top + ROW, "0", "end")]
        places = [to_x(end * place / BINS) for place in range(BINS + 1)]
        for colour, heights in ((WAITING, [r + w for r, w, *_ in row]), (RUNNING, [r for r, *_ in row])):
            parts.append(_area(places, [top + ROW * (1 - height / most) for height in heights], top + ROW, colour))
        for colour, dashes, shares in (
            (CACHED, ' stroke-dasharray="4 3"', [full for *_, full in row]),
            (KV, "", [use for *_, use, _ in row]),
        ):
            line = "L".join(f"{x:.1f} {top + ROW * (1 - share):.1f}" for x, share in zip(places, shares))
            parts.append(f'<path d="M{line}" fill="none" stroke="{colour}"{dashes}/>')
        steps = [step for step in trace if any(chunk.request_id == request_id for chunk in step.chunks)]
        if steps:
            found = True
            x = to_x(starts[name] + steps[0].time)
            width = to_x(starts[name] + steps[-1].end) - x
            frame = f'x="{x:.1f}" y="{top}" width="{max(width, 2):.1f}" height="{ROW}"'
            parts.append(f'<rect {frame} fill="none" stroke="{WAY}" stroke-width="2"/>')
    if request_id and not found:
        raise ValueError(f"request {request_id!r} has no step in any of the traces")
    legend = [(RUNNING, "running requests"), (WAITING, "waiting"), (KV, "KV blocks in use")]
    legend += [(CACHED, "with those kept in the prefix cache")]
    legend += [(WAY, f"the way of {request_id}")] if request_id else []
    x = LEFT
    for colour, word in legend:
        parts.append(f'<rect x="{x}" y="{bottom + 26}" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, bottom + 36, word))
        x += 48 + 6 * len(word)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 46}" role="img" '
        f'aria-label="{len(rows)} replicas over {end:.4g} s; the highest row has {most} requests" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def _binned(trace: Trace, start: float, end: float) -> list[tuple[int, int, float, float]]:
    """The most running and waiting requests in parts of the time, and the highest shares of blocks in use and filled.

    Filled blocks are in use or in the prefix cache, which keeps them while nothing runs.
    """
    bins: list[tuple[int, int, float, float] | None] = [None] * BINS
    steps = metrics(trace).columns
    names = ("time", "duration", "num_running", "num_waiting", "owned_blocks", "cached_blocks")
    blocks = max(1, (trace.num_blocks or 1) - 1)
    for time, seconds, running, waiting, owned, kept in zip(*(steps[name] for name in names)):
        now = (running, waiting, max(0, owned) / blocks, max(0, owned + kept) / blocks)
        begin = start + time
        for place in range(int(BINS * begin / end), min(BINS - 1, int(BINS * (begin + seconds) / end)) + 1):
            bins[place] = tuple(map(max, bins[place] or now, now))
    filled: list[tuple[int, int, float, float]] = []
    for each in bins:
        filled.append(each or (0, 0, 0.0, filled[-1][-1] if filled else 0.0))
    return filled


def _area(places: Sequence[float], heights: Sequence[float], base: float, colour: str) -> str:
    steps = "".join(f"V{y:.1f}H{right:.1f}" for y, right in zip(heights, places[1:]))
    return f'<path d="M{places[0]:.1f} {base}{steps}V{base}Z" fill="{colour}"/>'
