"""``workbench playground``: the scheduler in a web page, served from the installed package."""

from __future__ import annotations

import argparse
import tempfile
import webbrowser
from pathlib import Path

from workbench.apps.cli.options import Commands, add_allow_host_option, add_command, allow_hosts
from workbench.base.field_checks import integer
from workbench.base.served_names import ServedNames


def add_parser(commands: Commands) -> None:
    """Add ``playground`` to the commands."""
    help = "try the scheduler in a web page: workloads, settings, policies, recordings"
    parser = add_command(commands, "playground", run, help)
    parser.add_argument("--port", type=int, default=5007, metavar="N", help="port on 127.0.0.1 (default: %(default)s)")
    add_allow_host_option(parser)
    parser.add_argument("--fetch", action="store_true", help="fetch Pyodide with npm and pip, once, and end")
    parser.add_argument("--build", type=Path, metavar="DIR", help="write the page's files into DIR, and end")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")


def run(options: argparse.Namespace) -> int:
    """Serve the playground until Ctrl-C.

    Returns:
        Exit status.

    Raises:
        OSError: Pyodide cannot be fetched, or the port is in use.
    """
    from workbench.apps.playground import runtime, server, site

    integer("--port", options.port, 0, 65535)
    names = ServedNames(server.HOST, allow_hosts(options))
    if options.fetch:
        print(f"the playground's Python is in {runtime.fetch()}")
        return 0
    if not runtime.is_fetched():
        print("fetching Pyodide, which is Python for web pages: 6.6 MB, once", flush=True)
        runtime.fetch()
    if options.build:
        sizes = site.build(options.build)
        size = sum(sizes.values()) / 1e6
        print(f"the playground is in {options.build}: {len(sizes)} files, {size:.1f} MB compressed")
        return 0
    with tempfile.TemporaryDirectory(prefix="workbench-playground-") as name:
        print("building the page; the first time this takes some ten seconds", flush=True)
        site.build(Path(name))
        try:
            service = server.make_server(Path(name), options.port, names)
        except OSError as problem:
            raise OSError(f"port {options.port}: {problem.strerror}; give another one with --port") from None
        address = f"http://{server.HOST}:{service.server_port}/"
        print(f"playground on {address}  (Ctrl-C ends it)", flush=True)
        if not options.no_browser:
            webbrowser.open(address)
        with service:
            service.serve_forever()
    return 0
