"""The served page of several schedulers: all on one time axis, and the dashboard of each behind a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any
from urllib.parse import quote

import panel as pn

from workbench.analysis.hit_rates import hit_rates
from workbench.trace.readings.fleet import Fleet
from workbench.trace.readings.metrics import Summary, number, percent
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.run_zero import seconds_late
from workbench.trace.trace import Trace
from workbench.viz.app import TracePage, fit_phones, keep_fresh, tell_lost_server
from workbench.viz.cursor import Cursor
from workbench.viz.feed import Feed
from workbench.viz.fleet_rows import fleet_svg
from workbench.viz.palette import DARK, LIGHT, Theme

REFRESH_MILLISECONDS = 1000

_LAYOUT = """
.wb-fleet { font: 14px/1.5 system-ui, sans-serif; margin: 24px auto; max-width: 1100px; padding: 0 16px; }
.wb-fleet h1 { font-size: 18px; font-weight: 600; overflow-wrap: anywhere; }
.wb-fleet div { overflow-x: auto; }
.wb-fleet table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.wb-fleet th { font-weight: 500; opacity: .75; }
.wb-fleet th, .wb-fleet td { border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent);
  padding: 6px 10px; text-align: right; white-space: nowrap; }
.wb-fleet :is(th, td):first-child { text-align: left; }
.wb-fleet svg { display: block; min-width: 720px; }
.wb-fleet form { margin: 8px 0 20px; }
.wb-fleet input, .wb-fleet button { font: inherit; }
.wb-fleet tr:last-child td { font-weight: 600; border-bottom: 0; }
.wb-ranks { font: 13px system-ui, sans-serif; padding: 8px 12px 0; }
.wb-ranks a { margin-right: 12px; }
.wb-ranks a[aria-current] { color: inherit; font-weight: 600; text-decoration: none; }
"""


def _colours(theme: Theme, link: str) -> str:
    return (
        f".wb-fleet, .wb-ranks {{ background: {theme.background}; color: {theme.text}; }} "
        f":is(.wb-fleet, .wb-ranks) a {{ color: {link}; }} body {{ background: {theme.background} !important; }}"
    )


_DARK = "@media (prefers-color-scheme: dark)"
STYLE = f"{_LAYOUT} {_colours(LIGHT, '#0B5CAD')} {_DARK} {{ {_colours(DARK, '#6CB6FF')} }}"

_SUMMARY: dict[str, Callable[[Summary], str]] = {
    "steps": lambda summary: f"{summary.num_steps:,}",
    "requests": lambda summary: f"{summary.num_requests:,}",
    "output tokens/s with idle time": lambda summary: number(summary.output_throughput),
    "preemptions": lambda summary: f"{summary.num_preemptions:,}",
    "TTFT mean": lambda summary: summary.ttft.amount("mean"),
    "TTFT p99": lambda summary: summary.ttft.amount("p99"),
    "ITL mean": lambda summary: summary.itl.amount("mean"),
    "ITL p99": lambda summary: summary.itl.amount("p99"),
}
"""Columns of the table that follow from a trace's metrics, by title."""


def make_fleet_app(fleet: Fleet) -> Callable[[], Any]:
    """Make the function that builds the page of a browser session.

    ``/`` shows all ranks, ``/?request=ID`` with the way of a request framed, and ``/?rank=NAME`` the dashboard of one.
    A fleet of one has its dashboard alone.

    Args:
        fleet: The ranks; polled elsewhere.
    """

    def session() -> Any:
        fit_phones()
        traces = dict(fleet.traces)
        asked, request_id = (
            b"".join(pn.state.session_args.get(name, [])[:1]).decode(errors="replace") for name in ("rank", "request")
        )
        name = next(iter(traces)) if len(traces) == 1 else asked
        if name not in traces:
            return _overview(fleet, request_id)
        feed = Feed(lambda: fleet.traces[name])
        page = TracePage(feed, Cursor(), options={"page": True}, sizing_mode="stretch_width")
        keep_fresh(page)
        if len(traces) == 1:
            note = [_html(f'<div class="wb-ranks">{_note(fleet)}</div>')] if fleet.note else []
            return pn.Column(*note, page, sizing_mode="stretch_width") if note else page
        return pn.Column(_html(links_html(traces, name)), page, sizing_mode="stretch_width")

    return session


def _html(text: str) -> Any:
    return pn.pane.HTML(text, stylesheets=[STYLE], sizing_mode="stretch_width", margin=0)


def _overview(fleet: Fleet, request_id: str) -> Any:
    tell_lost_server()
    table = _html(fleet_html(fleet, request_id))
    drawn = _lengths(fleet)

    def refresh() -> None:
        nonlocal drawn
        if (now := _lengths(fleet)) != drawn:
            drawn, table.object = now, fleet_html(fleet, request_id)

    def start() -> None:
        pn.state.add_periodic_callback(refresh, period=REFRESH_MILLISECONDS)

    pn.state.onload(start)
    pn.config.raw_css.append(STYLE)
    return table


def _lengths(fleet: Fleet) -> dict[str, int]:
    return {name: len(trace) for name, trace in fleet.traces.items()}


def links_html(traces: Mapping[str, Trace], shown: str) -> str:
    """Links to the table of all ranks and to the dashboard of each."""
    links = ['<a href="?">All ranks</a>']
    for name in traces:
        here = ' aria-current="page"' if name == shown else ""
        links.append(f'<a href="?rank={quote(name)}"{here}>{escape(name)}</a>')
    return f'<nav class="wb-ranks">{"".join(links)}</nav>'


def fleet_html(fleet: Fleet, request_id: str = "") -> str:
    """All ranks: their load over time, their state now, and their latencies so far.

    Args:
        fleet: The ranks.
        request_id: A request whose way is framed; "" for none.
    """
    traces = dict(fleet.traces)
    rows = []
    for name, trace in traces.items():
        link = f'<a href="?rank={quote(name)}">{escape(name)}</a>'
        rows.append(_row(link, _now([trace]), metrics(trace).summary))
    rows.append(_row("together", _now(list(traces.values())), fleet.metrics().summary))
    now = [f"{title}, now (most)" for title in ("running", "waiting", "KV in use")]
    head = "".join(f"<th>{title}</th>" for title in ("", *now, *_SUMMARY))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return (
        f'<section class="wb-fleet"><h1>{len(traces)} recordings in {escape(str(fleet.folder))}</h1>{_note(fleet)}'
        f"{_picture(traces, request_id)}{scrolled('Numbers of each', table)}{_hits(traces)}</section>"
    )


def _note(fleet: Fleet) -> str:
    """The recordings that are left out."""
    return f"<p>{escape(fleet.note)}</p>" if fleet.note else ""


def scrolled(label: str, content: str) -> str:
    """A part of the page that can be wider than the window; it can be scrolled with keys, and has a name."""
    return f'<div tabindex="0" role="region" aria-label="{escape(label)}">{content}</div>'


def _hits(traces: Mapping[str, Trace]) -> str:
    """The hits in the prefix cache by depth, adapter, turn and session; nothing before all runs are over."""
    caching = [trace for trace in traces.values() if trace.config.get("enable_prefix_caching")]
    if not caching or not all(trace.has_ended for trace in traces.values()):
        return ""
    return scrolled("Hits in the prefix cache", f"<pre>{escape(str(hit_rates(caching)))}</pre>")


def _picture(traces: Mapping[str, Trace], request_id: str) -> str:
    """The ranks as rows of one time axis, with a field for a request; nothing without a clock."""
    try:
        picture, problem = fleet_svg(traces), ""
        if request_id:
            picture = fleet_svg(traces, request_id)
    except ValueError as error:
        if not request_id:
            return ""
        problem = f' <span role="status">{escape(str(error))}</span>'
    return (
        f"{scrolled('All on one time axis', picture)}"
        f'<form><label>Show the way of request <input name="request" value="{escape(request_id)}">'
        f"</label> <button>Show</button>{problem}</form>"
    )


def _now(traces: list[Trace]) -> tuple[str, str, str]:
    """Running and waiting requests, and use of the KV blocks: after the newest step of each trace, and their most.

    A run that is over has nothing to run and nothing in use, so its most says more. That of several traces is the most
    at one moment, or the sum of each one's most without clocks.
    """
    newest = [(trace, trace[-1]) for trace in traces if len(trace)]
    blocks = sum((trace.num_blocks or 1) - 1 for trace, _ in newest)
    free = sum(record.free_blocks_end for _, record in newest)
    ended = [{*record.finished, *record.aborted} for _, record in newest]
    running = sum(len(set(record.running) - over) for (_, record), over in zip(newest, ended, strict=True))
    waiting = sum(len(record.waiting) for _, record in newest)
    names = ("num_running", "num_waiting", "owned_blocks")
    most_running, most_waiting, most_held = (_most([trace for trace, _ in newest], name) for name in names)
    shares = [percent(held / blocks if blocks else None) for held in (blocks - free, most_held)]
    return f"{running:,} ({most_running:,})", f"{waiting:,} ({most_waiting:,})", f"{shares[0]} ({shares[1]})"


def _most(traces: list[Trace], name: str) -> int:
    """The largest sum of a column of the metrics over traces, each with the value of its last step so far."""
    changes, starts = [], seconds_late(dict(enumerate(traces)))
    for rank, trace in enumerate(traces):
        if not trace[-1].end:
            return sum(max(0, *metrics(each).columns[name]) for each in traces)
        columns, start = metrics(trace).columns, starts[rank]
        changes += [(start + time, 1, rank, value) for time, value in zip(columns["time"], columns[name])]
        changes.append((start + trace[-1].end, 0, rank, 0))
    now, most = [0] * len(traces), 0
    for _, _, rank, value in sorted(changes):
        now[rank] = max(0, value)
        most = max(most, sum(now))
    return most


def _row(name: str, now: tuple[str, str, str], summary: Summary) -> str:
    cells = (*now, *(column(summary) for column in _SUMMARY.values()))
    return f"<tr><td>{name}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
