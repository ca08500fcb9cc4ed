"""A trace as one HTML file: the dashboard with all steps, which opens offline from a file manager or web server.

The file holds the ES module of a live view and the same packet, gzipped and in base64. Its content security policy
forbids every connection, so opening the file sends nothing to anyone.
"""

from __future__ import annotations

import base64
import gzip
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.base.whole_file import replace_text
from workbench.viz.bundle import bundle
from workbench.viz.layout.columns import columns_of
from workbench.viz.layout.comparison import encode_other
from workbench.viz.layout.explanation import explanation_facts
from workbench.viz.layout.incident import incident_facts
from workbench.viz.layout.packet import encode_packet, trace_facts

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

MAX_EXPLAINED = 20
"""Number of requests that a page explains: those with the longest times to first token, then the longest ones."""

OFFLINE_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
"""
"""The beginning of a page that may ask no server for anything."""

_PAGE = (
    OFFLINE_HEAD
    + """<style>html, body {{ margin: 0; background: Canvas; color-scheme: light dark; }}</style>
</head>
<body>
<main id="view"></main>
<noscript><p>{summary}</p><p>This page is drawn with JavaScript, which is turned off.</p></noscript>
{packets}
<script type="module">
{module}
const unpack = async (id) => {{
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new DataView(await new Response(stream).arrayBuffer());
}};
const values = {{ status: {{ live: false }}, options: {{ page: true }} }}, has = (id) => document.getElementById(id);
if (has("answers")) Object.assign(values.status, JSON.parse(new TextDecoder().decode(await unpack("answers"))));
values.packet = await unpack("packet");
if (has("other")) values.other = await unpack("other");
if (has("place")) {{
  const {{ view, ...place }} = JSON.parse(new TextDecoder().decode(await unpack("place")));
  if (view) values.options.view = view;
  values.cursor = {{ ...place, follow: false }};
}}
const model = {{ get: (name) => values[name], set() {{}}, save_changes() {{}}, on() {{}}, off() {{}} }};
render({{ model, el: document.getElementById("view") }});
</script>
</body>
</html>
"""
)


class PagePlace(msgspec.Struct, frozen=True):
    """The place at which a page opens.

    Attributes:
        view: The view that it shows first, such as "scheduler"; None for the one that suits the trace.
        step: The number of the step at the cursor.
        request: The request that is chosen; None for none.
        card: Whether the card of that request is open.
    """

    view: str | None
    step: int
    request: str | None = None
    card: bool = False


def html_page(
    trace: Trace,
    *,
    other: Trace | None = None,
    fork: dict[str, Any] | None = None,
    unchanged: Trace | None = None,
    title: str | None = None,
    opens_at: PagePlace | None = None,
) -> str:
    """The HTML of the page of a trace.

    Args:
        trace: The trace to show.
        other: A second trace of the same workload to compare it with.
        fork: The facts of `encode_other` if the other trace was simulated.
        unchanged: The prediction of the trace as it was, if the other one was predicted; see `encode_other`.
        title: Title of the page; by default the model or source of the trace.
        opens_at: The place at which the page opens; by default a step that shows something, or the largest stall.
    """
    packets = {
        "packet": encode_packet(columns_of(trace), extra={"facts": trace_facts(trace)}),
        "answers": msgspec.json.encode(_answers(trace)),
    }
    if opens_at is not None:
        packets["place"] = msgspec.json.encode(opens_at)
    if other is not None:
        packets["other"] = encode_other(trace, other, fork, unchanged)
    name = trace.meta.model.get("name") or trace.meta.source
    if len(trace) < len(trace.whole):
        name = f"{name}, {trace.steps_in_words} of {len(trace.whole):,}"
    elif len(trace) and trace[0].step:
        name = f"{name}, {trace.steps_in_words} of a longer run"
    return offline_page(title=title or f"Workbench: {name}", summary=repr(trace), packets=packets, module=bundle())


def offline_page(*, title: str, summary: str, packets: Mapping[str, bytes], module: str) -> str:
    """The HTML of a page that needs no network.

    Args:
        title: Title of the page.
        summary: Text for a browser without JavaScript.
        packets: Input of the page's module, by name; "packet" is one of them.
        module: The ES module that draws it.
    """
    return _PAGE.format(
        title=escape(title),
        summary=escape(summary),
        packets="\n".join(_packet_element(name, packet) for name, packet in packets.items()),
        # An end tag inside a string would close the script element.
        module=module.replace("</", "<\\/"),
    )


def _answers(trace: Trace) -> dict[str, Any]:
    """The answers of a server: causes of the slowest requests, and for a recording its incident."""
    from workbench.analysis.explain import slowest

    explained = {each.request_id: each for each in slowest(trace, MAX_EXPLAINED)}
    if len(explained) < MAX_EXPLAINED:  # in a part, others have their first token before it
        for each in slowest(trace, MAX_EXPLAINED, "e2e"):
            explained.setdefault(each.request_id, each)
    chosen = [*explained.values()][:MAX_EXPLAINED]
    answers: dict[str, Any] = {
        "explanations": {each.request_id: explanation_facts(each, confirmed=False) for each in chosen}
    }
    return answers | {"incident": incident_facts(trace)} if trace.meta.is_of_server else answers


def to_html(
    trace: Trace, path: str | os.PathLike[str], *, other: Trace | None = None, opens_at: PagePlace | None = None
) -> None:
    """Write a page that shows the trace step by step, in one file that needs no network.

    The file is written under a temporary name first, so it appears complete or not at all.

    Args:
        trace: The trace to show.
        path: The HTML file; replaced if it exists.
        other: A second trace of the same workload to compare it with.
        opens_at: The place at which the page opens, as for `html_page`.

    Raises:
        OSError: The file cannot be written; an earlier file of that name is left unchanged.
    """
    replace_text(Path(path), html_page(trace, other=other, opens_at=opens_at))


def _packet_element(name: str, packet: bytes) -> str:
    # Level 6 takes three times as long and makes the file 4% smaller.
    data = base64.b64encode(gzip.compress(packet, 4, mtime=0)).decode("ascii")
    return f'<script type="text/plain" id="{name}">{data}</script>'
