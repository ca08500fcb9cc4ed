"""Options that several commands have in common."""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from workbench.apps.cli.say import say, say_error
from workbench.base.field_checks import integer
from workbench.base.served_names import ServedNames
from workbench.base.tables import folded_command, wrapped

if TYPE_CHECKING:
    from workbench.trace import Trace
    from workbench.viz.export_html import PagePlace

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Type that ``ArgumentParser.add_subparsers`` returns."""

Options: TypeAlias = "argparse._ActionsContainer"
"""A parser, or a group of its options."""

COLLECT_AFTER = 100_000
"""New objects after which the garbage collector looks for cycles, once a trace is loaded."""

TRACE_SUFFIXES = (".jsonl", ".jsonl.gz")
TRACE_FILE = "trace file (.jsonl, .jsonl.gz)"
TRACE_OR_RANKS = f"{TRACE_FILE}, or a folder: all ranks"


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the command, option or value that was probably meant."""

    def parse_known_args(self, args=None, namespace=None):
        """Refuse what a command does not know itself, with its own usage and not that of ``workbench``."""
        self._given = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._not_known(unknown))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End with the usage, the message and a suggestion; without a command, with the list of commands."""
        if is_missing := message.startswith("the following arguments are required"):
            # Found first, although a word that is not known is perhaps a misspelt option.
            unknown = [word for word in self._given if word.startswith("--") and not self._is_known(word)]
            message = "; ".join([*([self._not_known(unknown)] if unknown else []), message])
        if is_missing and re.search(r"required: (COMMAND|ACTION)$", message):
            self.print_help(sys.stderr)
            if unknown:
                say_error(f"{self.prog}: error: {self._not_known(unknown)}")
            self.exit(2)
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message, re.S):
            similar = get_close_matches(choice[1], re.findall(r"[^\s',]+", choice[2]), n=1)
            message = message[: choice.start(2) - len("choose from ")]
            message += f"{f'did you mean {similar[0]}? ' if similar else ''}choose from {choice[2]})"
        self.print_usage(sys.stderr)
        say_error(f"{self.prog}: error: {message}")
        self.exit(2)

    def _is_known(self, word: str) -> bool:
        name = word.partition("=")[0]
        return any(option.startswith(name) for option in self._option_string_actions)

    def _not_known(self, words: Sequence[str]) -> str:
        return f"unrecognized arguments: {' '.join(words)}{self._suggested(words)}"

    def _suggested(self, unknown: Sequence[str]) -> str:
        after = dict(pairwise(self._given))
        for word in unknown:
            name, _, value = word.removeprefix("--").partition("=")
            value = value or ("true" if after.get(word, "-").startswith("-") else after[word])
            known = {field.replace("_", "-"): f"--set {field}={value}" for field in self._settings()}
            known |= {name[2:]: name for name in self._option_string_actions if name.startswith("--")}
            if similar := get_close_matches(name.replace("_", "-"), known, n=1):
                return f" (did you mean {known[similar[0]]}?)"
        return ""

    def _settings(self) -> Collection[str]:
        """The fields that ``--set`` takes, which vLLM has as options; none without ``--set``."""
        fields = getattr(self._option_string_actions.get("--set"), "fields", None)
        return fields() if fields else ()


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    *,
    examples: str = "",
    extra: str = "",
) -> argparse.ArgumentParser:
    """Add a command to the command line, or to a command that has its own commands.

    Args:
        commands: The commands to add it to.
        name: Its name.
        run: Function that carries it out and returns the exit status.
        help: A line for the list of commands.
        examples: Uses of the command, a line each, below its help.
        extra: The extra that brings all that the command needs; "" for a command that needs the base alone.
    """
    epilog = f"examples:\n{examples}" if examples else None
    parser = commands.add_parser(name, help=help, epilog=epilog, formatter_class=_Help)
    parser.set_defaults(run=run, extra=extra, full_name=parser.prog)
    return parser


def add_number(parser: Options, name: str, default: float, help: str) -> None:
    """Add an option with a number of the default's type, which the help names."""
    parser.add_argument(name, type=type(default), default=default, help=f"{help} (default {default:g})")


def add_list(parser: Options, name: str, metavar: str, help: str, type: Callable = str) -> None:
    """Add an option that may be repeated; its value is the list of all values."""
    parser.add_argument(name, type=type, action="append", default=[], metavar=metavar, help=f"{help}; may be repeated")


class _Help(argparse.RawDescriptionHelpFormatter):
    """A help whose examples fit the terminal: a long command in several lines, its comment below it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        pairs = [re.match(r"( *\S.*?)(?: {3,}((?!--)\S.*))?$", line) for line in text.splitlines()]
        is_wide = any(match is not None and match[2] and len(match[0]) > width for match in pairs)
        lines: list[str] = []
        for line, match in zip(text.splitlines(), pairs):
            if match is None or not match[2] or not is_wide:
                lines += folded_command(line, width)
            else:
                lines += [*folded_command(match[1], width), *wrapped(f"      {match[2]}", width, indent=6)]
        return "".join(f"{indent}{line}\n" for line in lines)


class _LastWord(argparse.Action):
    """A word that may be left out, in favour of the option with its name."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        if values is not None:
            setattr(namespace, self.dest, values)


def add_out_option(
    parser: argparse.ArgumentParser,
    metavar: str,
    help: str,
    *,
    before: Sequence[str] = (),
    is_last_word: bool = False,
    required: bool = False,
) -> None:
    """Add ``--out``, also as ``-o``: the file or folder that a command writes.

    Args:
        parser: The command.
        metavar: The kind of file, such as "OUT.csv".
        help: Its meaning.
        before: Earlier spellings, which scripts may use; the help leaves them out.
        is_last_word: The file may also be the last word of the command, as that of ``cp``.
        required: The command does nothing without it.
    """
    if is_last_word:
        parser.add_argument("out", nargs="?", type=Path, action=_LastWord, help="the same as --out")
    parser.add_argument("--out", "-o", type=Path, metavar=metavar, required=required, help=help)
    for spelling in before:
        parser.add_argument(spelling, type=Path, dest="out", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_model_option(parser: Options) -> None:
    """Add ``--model``."""
    parser.add_argument("--model", default="smollm2", help='"smollm2" (bundled), a GGUF file, a folder or a repository')


def add_loading_options(parser: Options) -> None:
    """Add ``--chat-template`` and ``--ignore-config-key``, options of `load_model`."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a chat template in place of the model's: a file, or the template itself",
    )
    help = "a key of the model's files that is refused otherwise, and accepted without effect"
    add_list(parser, "--ignore-config-key", "KEY", help)


def add_dashboard_port_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--port``, where a dashboard is served; see `check_port`."""
    add_number(parser, "--port", 5006, "port of the dashboard on 127.0.0.1")


def add_allow_host_option(parser: Options) -> None:
    """Add ``--allow-host``; see `allow_hosts`."""
    add_list(parser, "--allow-host", "NAME", "a name by which this server is called, such as that of a proxy before it")


def allow_hosts(options: argparse.Namespace) -> tuple[str, ...]:
    """The values of ``--allow-host``.

    Raises:
        ValueError: One of them is not a name.
    """
    return ServedNames(allowed=tuple(options.allow_host)).allowed


def check_port(options: argparse.Namespace) -> int:
    """The value of ``--port``.

    Raises:
        ValueError: It is outside the range of ports.
    """
    return integer("--port", options.port, 1, 65535)


def check_suffix(name: str, path: Path | None, *suffixes: str) -> None:
    """Check the end of a file's name before the work whose result it gets.

    Raises:
        ValueError: The file is of another format, or there is a folder of its name.
    """
    if path and not path.name.endswith(suffixes):
        raise ValueError(f"{name} {path} must end in {' or '.join(suffixes)}")
    if path and path.is_dir():
        raise ValueError(f"{name} {path} is a folder: name a file")


def check_folder(name: str, path: Path | None) -> None:
    """Check the folder of a result before the work.

    Raises:
        ValueError: There is a file of its name.
    """
    if path and path.exists() and not path.is_dir():
        raise ValueError(f"{name} {path} is a file: name a folder, or one that does not exist yet")


def check_table_and_plot(options: argparse.Namespace) -> None:
    """Check the names of a table and a plot, ``--out`` and ``--plot``, as `check_suffix` does."""
    check_suffix("--plot", options.plot, ".svg")
    check_suffix("--out", options.out, ".csv", ".parquet")


@contextmanager
def writing(*files: tuple[Path | None, Callable[[Path], object], str]) -> Iterator[None]:
    """Write files before an answer is said, whose reader may leave early, as ``head`` does; they are named after it.

    Args:
        files: For each a path, None for none, a function that writes it, and its contents as in `say_written`.

    Raises:
        ValueError: A file cannot be written; raised after the answer, which may have taken long.
        OSError: Likewise.
    """
    written, problems = [], []
    for path, write, what in files:
        if path is not None:
            try:
                write(path)
                written.append((path, what))
            except (OSError, ValueError) as problem:
                problems.append(problem)
    yield
    for path, what in written:
        say_written(path, what)
    if problems:
        raise problems[0]


def plot(svg: Callable[[], str]) -> Callable[[Path], object]:
    """The function that writes a plot, which is drawn only for it."""
    return lambda path: path.write_text(svg(), encoding="utf-8")


def say_written(path: Path, what: str = "", hint: str = "") -> None:
    """Say that a file or folder was written: each command that writes does so in these words.

    Args:
        path: The file or folder.
        what: Its contents, such as "5 steps"; "" for a file whose name says it.
        hint: The use of it, or the way to read it; "" for none.
    """
    say(f"wrote {f'{what} to ' if what else ''}{path}{f': {hint}' if hint else ''}")


def add_unit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what an access log counts if it does not show that itself, and what to leave out."""
    group = parser.add_argument_group("units of an access log", "found in the log, unless two readings are possible")
    group.add_argument("--time-unit", metavar="UNIT", help="unit of its times: s, ms, us or ns")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens that each of its hash_ids stands for")
    help = "columns to leave out, such as one that is unknown here"
    group.add_argument("--ignore-columns", type=_names, default=(), metavar="NAME[,NAME...]", help=help)


def has_units(options: argparse.Namespace) -> bool:
    """Whether one of the options of `add_unit_options` is given."""
    return options.time_unit is not None or options.block_size is not None or bool(options.ignore_columns)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name.strip())


def add_hit_rate_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--hit-rate``, see `workbench.analysis.assumed_hits.AssumedHits`."""
    help = "share of prompt tokens in the prefix cache, for a log without contents (default: that of --cost-from)"
    parser.add_argument("--hit-rate", type=float, metavar="SHARE", help=help)


def add_window_options(parser: argparse.ArgumentParser, effect: str | None = None) -> None:
    """Add ``--from``, ``--to``, ``--last`` and ``--around``, by which `load_trace` takes a part of a trace."""
    group = parser.add_argument_group("part of the trace", effect)
    since = "since the first arrival, such as 90s, 10m or 1h, or of day, such as 12:08"
    group.add_argument("--from", dest="begin", metavar="TIME", help=f"steps from this time on, {since}")
    group.add_argument("--to", dest="end", metavar="TIME", help=f"steps up to this time, {since}")
    group.add_argument("--last", metavar="TIME", help="steps of this time before the end")
    help = "the time of a request with half as much before and after, or half a minute on each side of a time of day"
    group.add_argument("--around", metavar="REQUEST|TIME", help=help)


def has_window(options: argparse.Namespace) -> bool:
    """Whether an option of `add_window_options` is given."""
    return any((options.begin, options.end, options.last, options.around))


def place_around(trace: Trace, options: argparse.Namespace) -> PagePlace | None:
    """The place at which a page of a part opens: where ``--around`` looks, None without it."""
    from workbench.trace.window import step_around
    from workbench.viz.export_html import PagePlace

    if options.around is None:
        return None
    step, request_id = step_around(trace, options.around)
    return PagePlace(None, step, request_id, card=request_id is not None)


def load_trace(path: Path, options: argparse.Namespace | None = None) -> Trace:
    """The trace in a file, or the part of it that the options of `add_window_options` choose."""
    from workbench.trace import Trace

    trace = Trace.load(path)
    # It stays until the command ends, as do most objects that the answer is made of: the garbage collector need not
    # look through the first, and seldom through the others. `main` takes both back.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    return trace if options is None else part_of(trace, options)


def part_of(trace: Trace, options: argparse.Namespace) -> Trace:
    """The part of a trace that the options of `add_window_options` choose."""
    return parts_of({"": trace}, options)[""]


def parts_of(traces: Mapping[str, Trace], options: argparse.Namespace) -> dict[str, Trace]:
    """The part of several ranks' traces that the options of `add_window_options` choose."""
    from workbench.trace.window import read_moment, read_time, windows

    moments = {"begin": "--from", "end": "--to"}
    times = {
        field: read_moment(name, text, traces)
        for field, name in moments.items()
        if (text := getattr(options, field)) is not None
    }
    if options.last is not None:
        times["last"] = read_time("--last", options.last)
    return windows(traces, **times, around=options.around)


def load_ranks(path: Path, options: argparse.Namespace | None = None) -> dict[str, Trace]:
    """The trace in a file, under the name "", or those of all ranks in a folder; or parts of them, as `load_trace`.

    Standard error says which recordings of the folder are left out.
    """
    if not path.is_dir():
        return {"": load_trace(path, options)}
    from workbench.trace.readings.fleet import Fleet

    with Fleet(path) as fleet:
        if fleet.note:
            say_error(fleet.note)
        return dict(fleet.traces) if options is None else parts_of(fleet.traces, options)
