"""``workbench completion``: commands, options, files and fields, completed by the shell.

The script that a shell loads asks this program at each Tab, so one description serves bash, zsh and fish, and it is
never older than the program. (A script that holds the whole answer, as shtab writes it, needs no Python at a Tab. In
bash it completes no ``FIELD=VALUE``, which bash takes for three words.)
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from workbench.apps.cli.options import Commands, add_command
from workbench.apps.cli.settings import Completer, completed_by, config_fields

SHELLS = ("bash", "zsh", "fish")

_EXAMPLES = """\
  source <(workbench completion bash)                                            a line for ~/.bashrc
  source <(workbench completion zsh)                                             a line for ~/.zshrc, after compinit
  workbench completion fish | source                                             a line for ~/.config/fish/config.fish
"""

_FILE_WORDS = ("FILE", "MODEL", "PATH", "PROGRAM")
_FILE_NAMES = ("model", "source", "trace")
"""Arguments that are files, or something else that cannot be listed: a URL, a repository, "live"."""

_REQUEST_NAMES = ("around", "request", "request_id")

MAX_TRACE_BYTES = 1 << 20
"""Largest trace that is read for the ids of its requests: a Tab is answered at once, or not at all."""


def add_parser(commands: Commands) -> None:
    """Add ``completion`` to the commands."""
    help = "print the script with which a shell completes commands, options, files and fields"
    parser = add_command(commands, "completion", run, help, examples=_EXAMPLES, extra="completion")
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads it")


def run(options: argparse.Namespace) -> int:
    """Print the script.

    Raises:
        ModuleNotFoundError: argcomplete is not installed.
    """
    import argcomplete

    print(argcomplete.shellcode(["workbench"], shell="bash" if options.shell == "zsh" else options.shell))
    return 0


def answer(build_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Write the completions of the line that the shell's script has put into the environment, and end the process."""
    try:
        import argcomplete
        from argcomplete.completers import DirectoriesCompleter, FilesCompleter
    except ModuleNotFoundError:  # removed after the script was made: no completions
        raise SystemExit(1) from None
    command = _words(os.environ.get("COMP_LINE", ""))[1:2]
    parser = build_parser(*command)
    for action in _actions(parser):
        if completer := _completer(action, FilesCompleter(), DirectoriesCompleter()):
            completed_by(action, completer)
    argcomplete.autocomplete(
        parser, always_complete_options=False, default_completer=argcomplete.completers.SuppressCompleter()
    )


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quotation that is still open
        return line.split()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All options and arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        else:
            yield action


def _completer(action: argparse.Action, files: Completer, folders: Completer) -> Completer | None:
    """The completer of an argument; None if it brings its own, or its values cannot be listed."""
    if hasattr(action, "completer") or action.choices is not None or action.nargs == 0:
        return None
    if action.dest in _REQUEST_NAMES:
        return _request_ids
    if words := config_fields().get(action.dest):
        return lambda **_: words
    if action.metavar in ("DIR", "FOLDER"):
        return folders
    if action.type is Path or action.metavar in _FILE_WORDS or action.dest in _FILE_NAMES:
        return files
    return None


def _request_ids(*, parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """The ids of the requests in the trace that the line names, if it is small."""
    path = getattr(parsed_args, "trace", None)
    try:
        if path is None or Path(path).stat().st_size > MAX_TRACE_BYTES:
            return ()
        from workbench.trace import Trace

        return tuple(Trace.load(path).requests)
    except (ImportError, OSError, ValueError):
        return ()
