"""The served page of a running server without a recording: its load over time, by ``/metrics`` and KV events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from typing import Any, NamedTuple

import panel as pn

from workbench.analysis.why_metrics import why_metrics
from workbench.trace.formats.live_scrapes import Moment, ServerFollower
from workbench.trace.readings.metrics import amount, number, percent
from workbench.viz.app import fit_phones, tell_lost_server
from workbench.viz.drawing import GRID, svg_file, text
from workbench.viz.fleet_page import REFRESH_MILLISECONDS, STYLE, scrolled
from workbench.viz.fleet_rows import CACHED, KV, LEFT, RUNNING, WAITING, WAY, WIDTH

ROW, GAP = 56, 22

ONLY_A_RECORDING = (
    "Counters hold no requests. Only a recording says why a request waits and behind whom, which chunk of a prompt a "
    "step computes, which KV blocks each request holds, and what another setting would change. To record, start the "
    "server with --scheduler-cls workbench.vllm.RecordingScheduler and WORKBENCH_TRACE_DIR=FOLDER, then run: workbench "
    "trace watch FOLDER"
)
"""The questions that the page cannot answer, and the option that switches recording on."""


class Row(NamedTuple):
    """A row of the picture.

    Attributes:
        title: Its name.
        lines: The values of each line, with its colour and its name.
        show: A value as text.
        top: The value at the upper edge; None for the largest one.
    """

    title: str
    lines: Sequence[tuple[str, str, Sequence[float | None]]]
    show: Callable[[float], str]
    top: float | None = None


def rows_of(moments: Sequence[Moment]) -> list[Row]:
    """The rows of the picture; one that the server says nothing about is left out."""

    def line(colour: str, name: str, field: str) -> tuple[str, str, Sequence[float | None]]:
        return colour, name, [getattr(moment, field) for moment in moments]

    rows = [
        Row("requests", [line(RUNNING, "running", "running"), line(WAITING, "waiting", "waiting")], number),
        Row("use of KV blocks", [line(KV, "of the fullest engine", "kv_use")], percent, 1.0),
        Row("blocks in the prefix cache", [line(CACHED, "by KV events", "cached_blocks")], number),
        Row("prompt tokens found in the prefix cache", [line(CACHED, "", "hit_rate")], percent, 1.0),
        Row(
            "mean wait",
            [
                line(WAITING, "in the queue, of requests that ended", "queue"),
                line(RUNNING, "to the first token", "ttft"),
            ],
            lambda seconds: amount(seconds, "s"),
        ),
        Row("preemptions", [line(WAY, "between two looks", "preemptions")], number),
        Row("output tokens per second", [line(RUNNING, "", "tokens")], number),
    ]
    return [row for row in rows if any(value is not None for *_, values in row.lines for value in values)]


def server_svg(moments: Sequence[Moment]) -> str:
    """Draw what a server said over time; a look without an answer is a gap.

    Args:
        moments: At least one, in order of time.
    """
    rows = rows_of(moments)
    first, last = moments[0].at, moments[-1].at
    bottom = 6 + (ROW + GAP) * len(rows)

    def to_x(at: float) -> float:
        return LEFT + (at - first) / ((last - first) or 1.0) * (WIDTH - 40 - LEFT)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0) if last > first else (0.0,):
        at = first + share * (last - first)
        parts.append(f'<path d="M{to_x(at):.1f} 6V{bottom}" stroke="{GRID}"/>')
        parts.append(text(to_x(at), bottom + 16, f"{datetime.fromtimestamp(at):%H:%M:%S}", "middle"))
    for place, row in enumerate(rows):
        top = 6 + GAP + (ROW + GAP) * place
        most = row.top or max((value or 0.0 for *_, values in row.lines for value in values), default=0.0) or 1.0
        parts += [text(LEFT - 6, top + 10, row.show(most), "end"), text(LEFT - 6, top + ROW, row.show(0.0), "end")]
        parts.append(text(LEFT, top - 6, row.title))
        x = LEFT + 12 + 6.5 * len(row.title)
        for colour, name, values in row.lines:
            if name:
                parts.append(f'<rect x="{x:.1f}" y="{top - 15}" width="10" height="10" fill="{colour}"/>')
                parts.append(text(x + 14, top - 6, name))
                x += 30 + 6.5 * len(name)
            path = _path([(to_x(moment.at), value) for moment, value in zip(moments, values)], top, most)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linecap="round"/>')
    label = f"{', '.join(row.title for row in rows)} over {last - first:.0f} s"
    return svg_file(WIDTH, bottom + 24, label, parts)


def _path(points: Sequence[tuple[float, float | None]], top: float, most: float) -> str:
    """A line through the points that have a value; a point without neighbours is a dot."""
    parts, is_begun = [], False
    for x, value in points:
        if value is None:
            is_begun = False
            continue
        y = top + ROW * (1 - min(1.0, value / most))
        parts.append(f"L{x:.1f} {y:.1f}" if is_begun else f"M{x:.1f} {y:.1f}h.1")
        is_begun = True
    return "".join(parts)


def server_html(follower: ServerFollower) -> str:
    """The page of a running server: what is wrong now, the picture, the last minute, and what only a recording says."""
    moments = tuple(follower.moments)
    said = []
    if follower.problem:
        since = next((each.at for each in reversed(moments) if each.running is not None), moments[0].at)
        said.append(f"no answer since {datetime.fromtimestamp(since):%H:%M:%S}: {follower.problem}")
    if (minute := follower.minute) is not None:
        said += repr(why_metrics(minute)).split("\n")
        said += str(minute.whole).split("\n")
    if (events := follower.events) is not None:
        lost = f", {events.num_lost} batches lost" if events.num_lost else ""
        said.append(
            f"KV events: {events.num_stored} blocks stored, {events.num_removed} removed, {events.num_again} of them "
            f"stored again, which means computed again{lost}"
        )
        said += [events.problem] if events.problem else []
        if not events.num_batches:
            said.append(f"no KV event came from {events.endpoint} so far: vLLM binds only an address with a *")
    drawn = server_svg(moments) if moments else "<p>waiting for the second look</p>"
    picture = scrolled("All metrics on one time axis", drawn)
    lines = "".join(f"<li>{escape(line)}</li>" for line in said)
    return (
        f'<section class="wb-fleet"><h1>{escape(follower.url)}, from its metrics alone</h1>{picture}'
        f"<h2>The last minute</h2><ul>{lines}</ul><p>{escape(ONLY_A_RECORDING)}</p></section>"
    )


def make_server_app(follower: ServerFollower) -> Callable[[], Any]:
    """Make the function that builds the page of a browser session.

    Args:
        follower: The server; asked elsewhere.
    """

    def session() -> Any:
        fit_phones()
        tell_lost_server()
        page = pn.pane.HTML(server_html(follower), stylesheets=[STYLE], sizing_mode="stretch_width", margin=0)

        def refresh() -> None:
            page.object = server_html(follower)

        def start() -> None:
            pn.state.add_periodic_callback(refresh, period=REFRESH_MILLISECONDS)

        pn.state.onload(start)
        pn.config.raw_css.append(STYLE)
        return page

    return session
