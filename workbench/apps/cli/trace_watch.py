"""``workbench trace watch``: the live dashboard of recordings that grow, and of a running server without one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.apps.cli.options import (
    Commands,
    add_allow_host_option,
    add_command,
    add_dashboard_port_option,
    add_window_options,
    allow_hosts,
    check_port,
    has_window,
    load_trace,
    parts_of,
    place_around,
)
from workbench.apps.cli.say import say
from workbench.base.field_checks import integer

if TYPE_CHECKING:
    from workbench.trace import Trace

_EXAMPLES = """\
  workbench trace watch /var/log/vllm-traces           all ranks that record there, as they record
  workbench trace watch run.jsonl.gz --last 10m
  workbench trace watch /var/log/vllm-traces --metrics-port 9464      and the causes of latencies, for Prometheus
  workbench trace watch http://127.0.0.1:8000          a running vLLM that nobody records, by its /metrics
  workbench trace watch http://127.0.0.1:8000 --kv-events tcp://127.0.0.1:5557
"""


def add_parser(actions: Commands) -> None:
    """Add ``watch`` to the commands of ``trace``."""
    help = "serve the dashboard of a trace, and follow it while it is written; or the load of a running server"
    watch = add_command(actions, "watch", _watch, help, examples=_EXAMPLES, extra="serve")
    watch.add_argument("trace", help="trace file, a folder: all ranks that record there, or the URL of a vLLM server")
    add_dashboard_port_option(watch)
    add_allow_host_option(watch)
    help = "serve the causes of latencies on this port of 127.0.0.1 too, for Prometheus"
    watch.add_argument("--metrics-port", type=int, metavar="N", help=help)
    help = "address of a server's KV events, such as tcp://127.0.0.1:5557, beside its URL"
    watch.add_argument("--kv-events", metavar="ENDPOINT", help=help)
    add_window_options(watch, "what is written later is not followed then")


def _watch(options: argparse.Namespace) -> int:
    check_port(options)
    allow_hosts(options)
    if options.metrics_port is not None:
        integer("--metrics-port", options.metrics_port, 1, 65535)
        if options.metrics_port == options.port:
            raise ValueError(f"--metrics-port must be another one than --port, got {options.port} for both")
    if options.trace.startswith(("http://", "https://")):
        return _watch_server(options)
    if options.kv_events:
        raise ValueError(f"--kv-events goes with the URL of a server, and {options.trace} is a recording")
    path = Path(options.trace)
    if not path.exists() and not path.suffix:
        raise ValueError(
            f"{path} does not exist yet: a recorder makes this folder when its server starts "
            "(--scheduler-cls workbench.vllm.RecordingScheduler); watch it then"
        )
    from workbench.apps.cause_metrics import serve_causes
    from workbench.trace import TraceFollower
    from workbench.trace.readings.fleet import Fleet
    from workbench.viz import app
    from workbench.viz.fleet_page import make_fleet_app

    with ExitStack() as stack:
        if path.is_dir():
            fleet = stack.enter_context(Fleet(path, whole=has_window(options)))
            if has_window(options):
                fleet.traces = parts_of(fleet.traces, options)
            else:
                fleet.start()
            serve = partial(app.serve_session, make_fleet_app(fleet))

            def traces() -> dict[str, Trace]:
                return dict(fleet.traces)

        elif has_window(options):
            trace = load_trace(path, options)
            serve = partial(app.serve, trace, opens_at=place_around(trace, options))

            def traces() -> dict[str, Trace]:
                return {"": trace}

        else:
            follower = stack.enter_context(TraceFollower(path))
            path, serve = follower.path, partial(app.serve, follower.trace)

            def traces() -> dict[str, Trace]:
                return {"": follower.trace}

        if options.metrics_port is not None:
            stack.enter_context(serve_causes(traces, options.metrics_port))
        _serve(options, serve, path.name)
    return 0


def _watch_server(options: argparse.Namespace) -> int:
    from workbench.trace.formats.kv_events.live import LiveEvents
    from workbench.trace.formats.live_scrapes import ServerFollower
    from workbench.viz import app
    from workbench.viz.server_page import ONLY_A_RECORDING, make_server_app

    if options.metrics_port is not None:
        raise ValueError(f"--metrics-port serves what a recording says, and {options.trace} is a server with metrics")
    if has_window(options):
        raise ValueError(f"--from, --to, --last and --around take a part of a trace, and {options.trace} is a server")
    with ExitStack() as stack:
        follower = ServerFollower(options.trace)
        if options.kv_events:
            follower.events = stack.enter_context(LiveEvents(options.kv_events))
        stack.enter_context(follower)
        say(ONLY_A_RECORDING)
        _serve(options, partial(app.serve_session, make_server_app(follower)), options.trace)
    return 0


def _serve(options: argparse.Namespace, serve: Callable[..., Any], title: str) -> None:
    def say() -> None:
        print(f"{title} at http://127.0.0.1:{options.port} (Ctrl-C ends it)", flush=True)

    serve(port=options.port, title=title, on_listening=say, allow_hosts=allow_hosts(options))
