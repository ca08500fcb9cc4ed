"""The ``workbench`` command: one file per command, each with ``add_parser(commands)`` and ``run(options)``.

A command imports what it needs when it runs, so that ``--help`` is answered at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import sys
from importlib import import_module

import workbench
from workbench.apps.cli.options import Parser
from workbench.apps.cli.say import say_error
from workbench.base.on_demand import missing_extra
from workbench.base.text import printable

COMMANDS = (
    "demo",
    "simulate",
    "fleet",
    "hunt",
    "certify",
    "playground",
    "serve",
    "trace",
    "why",
    "bench",
    "kernel",
    "notebooks",
    "course",
    "doctor",
    "completion",
)
"""The commands, each in the module of its name."""

MAX_REASON = 2000
"""Maximum number of characters of an error message; files and options appear in it."""


UNREAD = 128 + 13
"""Exit status if nobody reads the output: that of a program that SIGPIPE ends."""


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """All commands and their options, or one command alone: a command reads no other one's module."""
    parser = Parser(prog="workbench", description="An LLM engine you can look inside.")
    parser.add_argument("--version", action="version", version=f"workbench {workbench.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in [command] if command in COMMANDS else COMMANDS:
        import_module(f"{__name__}.{name}").add_parser(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; bad input is one line on standard error and exit status 2."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import_module(f"{__name__}.completion").answer(build_parser)
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parsed(arguments)
    except BrokenPipeError:
        if _is_read():
            raise
        return UNREAD
    thresholds = gc.get_threshold()
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as problem:
        missing = missing_extra(options.full_name, problem, options.extra)
        if missing is problem:
            raise
        say_error(missing)
        return 2
    except (ValueError, OSError) as problem:
        if isinstance(problem, BrokenPipeError) and not _is_read():
            return UNREAD
        reason = str(problem)
        if isinstance(problem, OSError) and problem.filename:
            reason = f"{problem.filename}: {problem.strerror}"
        say_error(f"{options.full_name}: {printable(reason)[:MAX_REASON]}")
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """The options; a help or a list of fields is written whole before the program ends."""
    try:
        return build_parser(*arguments[:1]).parse_args(arguments)
    finally:
        sys.stdout.flush()


def _is_read() -> bool:
    """Whether somebody reads the output. If not, as behind ``head``, the rest of it goes nowhere, without a message."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):  # an error of a pipe without a reader
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False
