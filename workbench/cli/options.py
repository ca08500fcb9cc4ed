"""Options that several commands have in common."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from workbench.ground.field_checks import integer

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Type that ``ArgumentParser.add_subparsers`` returns."""


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``."""
    parser.add_argument("--model", default="smollm2", help='"smollm2" (bundled), a GGUF file, a folder or a repository')


def add_settings_option(parser: argparse.ArgumentParser, help: str) -> None:
    """Add ``--set``, whose values `workbench.analysis.sweep.read_settings` reads."""
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=f"{help}; may be repeated")


def add_dashboard_port_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--port``, where a dashboard is served; see `check_port`."""
    parser.add_argument("--port", type=int, default=5006, help="port of the dashboard on 127.0.0.1 (default 5006)")


def check_port(options: argparse.Namespace) -> int:
    """The value of ``--port``.

    Raises:
        ValueError: It is outside the range of ports.
    """
    return integer("--port", options.port, 1, 65535)
