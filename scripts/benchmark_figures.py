"""Figures of docs/benchmarks.md, each drawn from one result file.

The figures have no hues, because in this project a hue stands for a request. Workbench is dark, everything else grey. A
thin line runs from the minimum to the maximum of the repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lanes import svg_text

from workbench.viz.palette import LIGHT

ROW, LEFT, PANEL, GAP, TOP = 26, 128, 250, 22, 40
ARM_NAMES = {
    "workbench": "Workbench",
    "workbench_float32": "with float32 weights",
    "workbench_http": "Workbench HTTP",
    "phase_separated": "phase-separated",
    "mlx_lm": "mlx-lm",
    "mlx_lm_http": "mlx-lm HTTP",
    "llama_cpp": "llama.cpp",
}
WATCHED_NAMES = {
    "off": "record off",
    "on": "record on",
    "saved": "saved as it grows",
    "dashboard": "dashboard open",
}
ARENA_NAMES = {"sessions": "generated requests", "mooncake": "Mooncake's conversations"}
Statistics = Mapping[str, float]


def serving_figure(result: Mapping[str, Any]) -> str:
    """One row per arm and four panels: duration, CPU time, time to first token in its two parts, the longest gaps."""
    arms: Mapping[str, Mapping[str, Statistics]] = result["arms"]
    panels = [
        ("duration, s", ["duration_s"]),
        ("CPU time, s", ["cpu_s"]),
        ("TTFT, s: queue + prefill", ["mean_queue_s", "mean_prefill_s"]),
        ("P99 ITL, s", ["p99_itl_s"]),
    ]
    height = TOP + ROW * len(arms)
    parts = []
    for number, (title, names) in enumerate(panels):
        left, top = LEFT + number % 2 * (PANEL + GAP), TOP + number // 2 * height
        parts.append(_text(left, top - 14, title))
        parts.append(f'<path d="M{left} {top}v{ROW * len(arms)}" stroke="{LIGHT.outline}"/>')
        largest = max(sum(arm[name]["median"] for name in names) for arm in arms.values())
        to_width = (PANEL - 44) / largest
        for row, (arm, values) in enumerate(arms.items()):
            parts.append(_bar(left, top + ROW * row + 4, [values[name] for name in names], to_width, arm))
            if left == LEFT:
                weight = 600 if arm.startswith("workbench") else 400
                parts.append(_text(LEFT - 8, top + ROW * row + 17, ARM_NAMES[arm], "end", weight=weight))
    return _svg(
        LEFT + 2 * (PANEL + GAP),
        2 * height + 12,
        "Serving: duration, CPU time, time to first token and inter-token latency",
        parts,
    )


def _bar(x: float, y: float, spans: Sequence[Statistics], to_width: float, arm: str) -> str:
    """A bar of one or two spans with its value, and whiskers if it has one span."""
    dark, light = (LIGHT.prefill, LIGHT.decode) if arm.startswith("workbench") else (LIGHT.owned, LIGHT.kv)
    parts, start = [], x
    for number, span in enumerate(spans):
        fill = light if len(spans) == 2 and number == 0 else dark
        width = span["median"] * to_width
        parts.append(f'<rect x="{start:.1f}" y="{y}" width="{width:.1f}" height="16" fill="{fill}"/>')
        start += width
    if len(spans) == 1 and spans[0]["repeats"] > 1:
        ends = [min(x + spans[0][name] * to_width, x + PANEL) for name in ("min", "max")]
        parts.append(f'<path d="M{ends[0]:.1f} {y + 18}H{ends[1]:.1f}" stroke="{LIGHT.outline}"/>')
    parts.append(_text(start + 5, y + 13, f"{sum(span['median'] for span in spans):.3g}"))
    return "".join(parts)


def chunk_size_figure(result: Mapping[str, Any]) -> str:
    """Throughput on the x axis, inter-token latency on the y axis; one point per budget, median and P99.

    Throughput is per second of CPU time, which equals wall time on an otherwise idle machine.
    """
    budgets: Mapping[str, Mapping[str, Statistics]] = result["budgets"]
    left, right, top, bottom = 64, 470, 36, 270
    num_tokens = result["workload"]["num_requests"] * result["workload"]["output_tokens"]
    rates = [num_tokens / row["cpu_s"]["median"] for row in budgets.values()]
    series = {name: [row[name]["median"] for row in budgets.values()] for name in ("p99_itl_s", "median_itl_s")}
    x_ticks, y_ticks = _ticks(max(rates)), _ticks(max(max(values) for values in series.values()))

    def place(rate: float, latency: float) -> tuple[float, float]:
        return left + rate / x_ticks[-1] * (right - left), bottom - latency / y_ticks[-1] * (bottom - top)

    parts = []
    for tick in x_ticks:
        x, _ = place(tick, 0)
        parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="{LIGHT.hairline}"/>')
        parts.append(_text(x, bottom + 18, f"{tick:g}", "middle"))
    for tick in y_ticks:
        _, y = place(0, tick)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{LIGHT.hairline}"/>')
        parts.append(_text(left - 8, y + 4, f"{tick:g}", "end"))
    for name, values in series.items():
        points = [place(rate, latency) for rate, latency in zip(rates, values, strict=True)]
        fill = LIGHT.prefill if name == "p99_itl_s" else LIGHT.background
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{line}" fill="none" stroke="{LIGHT.owned}"/>')
        for (x, y), budget in zip(points, budgets, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{LIGHT.outline}"/>')
            if name == "p99_itl_s":
                parts.append(_text(x + 9, y + 15, budget))
        parts.append(_text(points[0][0] - 12, points[0][1] + 4, "P99" if name == "p99_itl_s" else "median", "end"))
    parts.append(_text((left + right) / 2, bottom + 38, "output tokens per second of CPU time", "middle"))
    parts.append(_text(left - 48, top - 16, "inter-token latency, s, under three token budgets"))
    return _svg(right + 40, bottom + 50, "Token budget: throughput against inter-token latency", parts)


def arena_figure(result: Mapping[str, Any]) -> str:
    """Prompt tokens found in the cache against the size of the pool: a panel for each kind of requests.

    Belady's is the dark line and LRU's the dashed one; between them are the other policies.
    """
    top, height, width = 48, 200, 270
    bottom = top + height
    parts: list[str] = []
    for number, (workload, title) in enumerate(ARENA_NAMES.items()):
        left = 48 + number * (width + 80)
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in result["rows"]:
            if row["workload"] == workload:
                lines.setdefault(row["eviction"], []).append((row["pool"] / 1000, row["hit_tokens"] / 1e6))
        x_ticks, y_ticks = (_ticks(max(point[axis] for line in lines.values() for point in line)) for axis in (0, 1))
        parts.append(_text(left, top - 28, title, weight=600))
        parts.append(_text(left, top - 12, "hits, million tokens"))
        for tick in x_ticks:
            x = left + tick / x_ticks[-1] * width
            parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="{LIGHT.hairline}"/>')
            parts.append(_text(x, bottom + 18, f"{tick:g}", "middle"))
        for tick in y_ticks:
            y = bottom - tick / y_ticks[-1] * height
            parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="{LIGHT.hairline}"/>')
            parts.append(_text(left - 8, y + 4, f"{tick:g}", "end"))
        parts.append(_text(left + width / 2, bottom + 36, "blocks of the pool, thousands", "middle"))
        for name, line in lines.items():
            points = [(left + x / x_ticks[-1] * width, bottom - y / y_ticks[-1] * height) for x, y in line]
            style = {"belady": 'stroke-width="2.5"', "lru": 'stroke-width="1.5" stroke-dasharray="5 3"'}.get(name, "")
            stroke = LIGHT.prefill if style else LIGHT.owned
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(f'<path d="M{path}" fill="none" stroke="{stroke}" {style}/>')
            if style:
                x, y = points[len(points) // 2]
                above = name == "belady"
                label = "Belady's" if above else "LRU"
                parts.append(
                    _text(x + (-4 if above else 8), y + (-8 if above else 16), label, "end" if above else "start")
                )
    return _svg(48 + 2 * width + 110, bottom + 48, "Hits against the size of the pool, by eviction policy", parts)


def watched_figure(result: Mapping[str, Any]) -> str:
    """CPU time relative to the normal record: one point per arm, and a line over the repeats."""
    ratios: Mapping[str, Statistics] = result["cpu_over_record_on"]
    left, right = 180, 520
    low = min(0.95, *(ratio["min"] for ratio in ratios.values()))
    high = max(1.05, *(ratio["max"] for ratio in ratios.values()))

    def place(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    bottom = TOP + ROW * len(ratios)
    parts = [_text(left, TOP - 16, "CPU time of the engine's process over that of the record on")]
    for value in (low, 1.0, high):
        stroke = LIGHT.owned if value == 1.0 else LIGHT.hairline
        parts.append(f'<path d="M{place(value):.1f} {TOP - 4}V{bottom}" stroke="{stroke}"/>')
        parts.append(_text(place(value), bottom + 16, f"{value:.2f}", "middle"))
    for row, (arm, name) in enumerate(WATCHED_NAMES.items()):
        y = TOP + ROW * row + 12
        parts.append(_text(left - 12, y + 4, name, "end"))
        begin, end = place(ratios[arm]["min"]), place(ratios[arm]["max"])
        parts.append(f'<path d="M{begin:.1f} {y}H{end:.1f}" stroke="{LIGHT.outline}"/>')
        parts.append(f'<circle cx="{place(ratios[arm]["median"]):.1f}" cy="{y}" r="5" fill="{LIGHT.prefill}"/>')
    return _svg(right + 30, bottom + 26, "What it costs to be watched", parts)


def _ticks(largest: float) -> list[float]:
    """Ticks from 0 to ``largest`` or more, in four to seven round steps."""
    step = next(
        unit * factor
        for unit in (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
        for factor in (1, 2, 5)
        if largest / (unit * factor) <= 6
    )
    count = 1
    while count * step < largest:
        count += 1
    return [round(number * step, 6) for number in range(count + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start", weight: int = 400) -> str:
    return svg_text(f"{x:.1f}", f"{y:.1f}", text, anchor, weight)


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(label)}" font-family="system-ui, sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="{LIGHT.background}"/>{"".join(parts)}</svg>\n'
    )
