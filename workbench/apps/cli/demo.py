"""``workbench demo``: a real model serving real requests, seen step by step."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import webbrowser
from functools import partial
from typing import TYPE_CHECKING

from workbench.apps.cli.options import (
    Commands,
    add_allow_host_option,
    add_command,
    add_dashboard_port_option,
    add_model_option,
    allow_hosts,
    check_port,
)
from workbench.apps.cli.say import say, say_text
from workbench.base.served_names import is_any, is_loopback, reachable_origins

if TYPE_CHECKING:
    from workbench.engine.distributed.job import MakeEngine

REACHABLE = (
    "warning: everybody who reaches {host} can see this run, unencrypted. Only pages opened by the teacher's link "
    "control the engine; keep that link to yourself."
)

_EXAMPLES = """\
  workbench demo
  workbench demo --host 0.0.0.0 --port 8000
  workbench demo --headless --model model.gguf"""

BROWSER_SECONDS = 10
"""Maximum time that the run waits for the browser to show its page."""


def add_parser(commands: Commands) -> None:
    """Add ``demo`` to the commands."""
    help = "a real model serving real requests, with the dashboard"
    parser = add_command(commands, "demo", run, help, examples=_EXAMPLES, extra="serve")
    add_dashboard_port_option(parser)
    add_allow_host_option(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 lets a class in the same network follow (default: this machine only)",
    )
    add_model_option(parser)
    parser.add_argument("--headless", action="store_true", help="no server: print every text and a summary, then exit")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")


def run(options: argparse.Namespace) -> int:
    """Serve the dashboard until Ctrl-C, or run the requests without a server.

    Returns:
        The exit status: 1 if a request failed.
    """
    run_requests = (
        _run_headless
        if options.headless
        else partial(_run_served, options.host, check_port(options), allow_hosts(options), not options.no_browser)
    )
    from workbench.engine.distributed.job import run_engines

    return run_engines(options.model, run_requests)


def _run_headless(make_engine: MakeEngine) -> int:
    from workbench.apps.demo import CONFIG, Arrivals
    from workbench.base.text import counted
    from workbench.trace.readings.metrics_collector import metrics
    from workbench.trace.readings.narrate import end_of

    with make_engine(CONFIG) as engine:
        say_text(engine)
        Arrivals(engine).begin()
        engine.run(progress=False)
        outputs = engine.outputs.values()
        for output in outputs:
            length = counted(len(output.prompt_token_ids), "prompt token")
            say("", f"{output.request_id} ({length}, {end_of(output, engine.trace.requests)}):")
            say_text("  " + output.text.strip().replace("\n", "\n  "))
        say_text(f"\n{metrics(engine.trace)}")
    return 1 if any(output.finish_reason == "error" for output in outputs) else 0


def _run_served(
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
    browser: bool,
    make_engine: MakeEngine,
) -> int:
    from workbench.apps.demo import CONFIG, Arrivals
    from workbench.viz.app import check_port_is_free, serve
    from workbench.viz.classroom import Classroom

    check_port_is_free(port, host)
    is_alone = is_loopback(host) and not allow_hosts
    room = Classroom(is_open=is_alone)
    room.origins = reachable_origins(host, port)
    own = "127.0.0.1" if is_any(host) else f"[{host}]" if ":" in host else host
    address, *others = room.origins or [f"http://{own}:{port}"]
    with make_engine(CONFIG) as engine:
        say_text(engine)
        arrivals, seen = Arrivals(engine), threading.Event()

        def begin() -> None:
            """Print the address and start the run; where a browser opens, not before it shows the page."""
            print(f"dashboard: {address}", flush=True)
            print(f"to teach: {address}/#teach={room.key}; to follow: {address}/#follow", flush=True)
            if not is_alone:
                say(REACHABLE.format(host=host))
                for other in others:
                    print(f"  for the class: {other}/#follow", flush=True)
            if browser and open_browser(address if is_alone else f"{address}/#teach={room.key}"):
                say(f"waiting for the browser, at most {BROWSER_SECONDS} s")
                threading.Thread(target=start_when_seen, name="workbench-demo", daemon=True).start()
            else:
                start()

        def start_when_seen() -> None:
            seen.wait(BROWSER_SECONDS)
            start()

        def start() -> None:
            arrivals.begin()
            engine.start()

        with contextlib.suppress(KeyboardInterrupt):
            serve(
                engine, port=port, address=host, title="Workbench", on_listening=begin, on_seen=seen.set, room=room,
                allow_hosts=allow_hosts,
            )  # fmt: skip
        seen.set()
    print("stopped", file=sys.stderr)
    return 0


def open_browser(address: str) -> bool:
    """Open an address in the person's browser, if there is one with windows; a text browser would take the terminal.

    Returns:
        Whether a browser was started.
    """
    has_windows = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if not has_windows:
        return False
    try:
        return webbrowser.open(address)
    except (webbrowser.Error, OSError):
        return False
