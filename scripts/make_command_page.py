"""Write docs/commands.md from the commands' help: ``python scripts/make_command_page.py``. ``--check`` compares."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from generated_files import write_or_check
from make_reference import cell

from workbench.apps.cli import build_parser

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
BEGINNING = """# Commands

All commands and their options, written from their `--help` by `scripts/make_command_page.py`. Tab completes them
([completion in the shell](install.md#completion-in-the-shell)); a misspelt one is told its nearest.
"""


def commands_of(parser: argparse.ArgumentParser, help: str = "") -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The commands below a parser that do something themselves, each with its line of help."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not any(action.required for action in inner):
        yield parser, parser.description or help
    for action in inner:
        lines = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, each in action.choices.items():
            yield from commands_of(each, lines.get(name, ""))


def name_of(action: argparse.Action) -> str:
    """An option with its value, as the help writes it, or the name of an argument."""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    value = action.metavar or choices
    value = value if isinstance(value, str) else " ".join(value)
    if not action.option_strings:
        return value if action.metavar else action.dest
    names = ", ".join(action.option_strings)
    return f"{names} {value}" if action.nargs != 0 else names


def table(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A row for each argument and option."""
    actions = [action for action in parser._actions if action.help not in (None, argparse.SUPPRESS)]
    rows = [each for each in actions if not isinstance(each, argparse._HelpAction | argparse._SubParsersAction)]
    if not rows:
        return
    yield from ("| argument | meaning |", "|---|---|")
    for action in rows:
        words = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield f"| `{name_of(action).replace('|', chr(92) + '|')}` | {cell(' '.join(words.split()))} |"
    yield ""


def page() -> str:
    """The whole page."""
    lines = [BEGINNING]
    for parser, help in commands_of(build_parser()):
        lines += [f"## {parser.prog}", "", f"{help[:1].upper()}{help[1:].rstrip('.')}.", "", *table(parser)]
        if parser.epilog:
            examples = parser.epilog.rstrip().split("\n")[1:]
            lines += ["```", *(line.removeprefix("  ") for line in examples), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page or check it."""
    return write_or_check(__doc__.splitlines()[0], [(PAGE, page())], "the help of the commands")


if __name__ == "__main__":
    raise SystemExit(main())
