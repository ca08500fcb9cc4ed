"""``workbench trace``: look at trace files from the command line."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any


def add_trace_parser(subparsers: Any) -> None:
    """Add ``trace`` and its own commands to the command line."""
    trace = subparsers.add_parser("trace", help="summarise, compare or convert trace files")
    commands = trace.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what a trace holds, and its latencies")
    info.add_argument("trace", type=Path, help="trace file (.jsonl, .jsonl.gz)")
    info.set_defaults(run=_info)

    html = commands.add_parser("html", help="one page that shows the trace, for any browser, without a network")
    html.add_argument("trace", type=Path, help="trace file (.jsonl, .jsonl.gz)")
    html.add_argument("out", type=Path, nargs="?", help="page to write (default: beside the trace, .html)")
    html.set_defaults(run=_html)

    perfetto = commands.add_parser("perfetto", help="convert to a Chrome trace, which opens in ui.perfetto.dev")
    perfetto.add_argument("trace", type=Path, help="trace file (.jsonl, .jsonl.gz)")
    perfetto.add_argument("out", type=Path, nargs="?", help="file to write (default: beside the trace, .perfetto.json)")
    perfetto.set_defaults(run=_perfetto)

    watch = commands.add_parser("watch", help="serve the dashboard of a trace, and follow it while it is written")
    watch.add_argument("trace", type=Path, help="trace file, or a folder: the file that was written last")
    watch.add_argument("--port", type=int, default=5006, help="port on 127.0.0.1 (default 5006)")
    watch.set_defaults(run=_watch)

    diff = commands.add_parser("diff", help="compare two traces of the same requests")
    diff.add_argument("a", type=Path, help="trace file")
    diff.add_argument("b", type=Path, help="trace file")
    diff.set_defaults(run=_diff)


def _load(path: Path) -> Any:
    from workbench.trace.trace import Trace

    return Trace.load(path)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl") + suffix)


def _info(options: argparse.Namespace) -> int:
    trace = _load(options.trace)
    print(trace)
    print(trace.metrics())
    return 0


def _html(options: argparse.Namespace) -> int:
    out = options.out or _beside(options.trace, ".html")
    _load(options.trace).to_html(out)
    print(f"wrote {out}")
    return 0


def _perfetto(options: argparse.Namespace) -> int:
    out = options.out or _beside(options.trace, ".perfetto.json")
    _load(options.trace).to_chrome_trace(out)
    print(f"wrote {out}: open it at https://ui.perfetto.dev")
    return 0


def _watch(options: argparse.Namespace) -> int:
    from workbench.trace.follower import TraceFollower

    if not 1 <= options.port <= 65535:
        raise ValueError(f"--port must be from 1 to 65535, got {options.port}")
    # By its name: the trace does not know who draws it.
    app = importlib.import_module("workbench.viz.app")
    with TraceFollower(options.trace) as follower:
        print(f"{follower.path.name} at http://127.0.0.1:{options.port} (Ctrl-C ends it)", flush=True)
        app.serve(follower.trace, port=options.port, title=follower.path.name)
    return 0


def _diff(options: argparse.Namespace) -> int:
    from workbench.trace.compare import compare

    print(compare(_load(options.a), _load(options.b)))
    return 0
