"""A run as a link: its recording, compressed, in the part of the playground's address after "#".

Browsers do not send this part to servers, so nothing is uploaded: the run is known to those who have the link.
"""

from __future__ import annotations

import base64
import os
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from workbench.base.text import counted, shown
from workbench.trace.window import find_in

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

MAX_CHARACTERS = 100_000
"""Maximum length of a link. Firefox and Chromium open longer ones, but chats cut them."""

LOCAL_PLAYGROUND = "http://127.0.0.1:5007/"
"""Address of the page that ``workbench playground`` serves on the reader's machine."""


def link_to(
    trace: Trace, *, step: int | None = None, request_id: str | None = None, playground: str | None = None
) -> str:
    """A link that opens a run in the playground, at the step and the request in question.

    Example:
        >>> from workbench import simulate
        >>> trace = simulate({"requests": [{"id": "sky", "prompt": [5, 6], "max_tokens": 2}]})
        >>> trace.to_link(step=1, request_id="sky").partition("run=")[0]
        'http://127.0.0.1:5007/#step=1&request=sky&'

    Args:
        trace: The run, or a part of it, such as ``trace[100:200]``.
        step: Number of the step at which the playground opens it.
        request_id: The request that it selects, by its id or the beginning of it.
        playground: Address of the playground; by default the one that the variable WORKBENCH_PLAYGROUND names, else
            that of ``workbench playground`` on the reader's machine.

    Raises:
        ValueError: The trace is empty or does not fit, it has no such step or request, or the address is not one.
    """
    if not len(trace):
        raise ValueError("the run has no steps yet, so there is nothing to link to")
    if step is not None and not trace[0].step <= step <= trace[-1].step:
        raise ValueError(f"step must be from {trace[0].step} to {trace[-1].step}, got {shown(step)}")
    if request_id is not None:
        request_id = find_in([trace], request_id)
    address = playground or os.environ.get("WORKBENCH_PLAYGROUND") or LOCAL_PLAYGROUND
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
        raise ValueError(f"playground must be an http or https address, got {shown(address)}")
    place = {name: value for name, value in (("step", step), ("request", request_id)) if value is not None}
    link = f"{urlsplit(address)._replace(fragment='').geturl()}#{urlencode(place | {'run': _packed(trace)})}"
    if len(link) > MAX_CHARACTERS:
        raise ValueError(
            f"a link to {counted(len(trace), 'step')} would have {len(link):,} characters, and the limit is "
            f"{MAX_CHARACTERS:,}: send a page (Save HTML, trace.to_html) or the trace file"
            + (", or link to fewer steps" if len(trace) > 1 else "")
        )
    return link


def _packed(trace: Trace) -> str:
    """The lines of the trace's file, compressed, in the base64 of addresses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        trace.save(path)
        lines = path.read_bytes()
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return base64.urlsafe_b64encode(packer.compress(lines) + packer.flush()).decode().rstrip("=")
