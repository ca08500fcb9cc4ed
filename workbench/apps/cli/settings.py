"""Options that set fields of a configuration, ``--set`` and ``--sweep``, and how a shell completes them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from workbench.apps.cli.options import Options
from workbench.base.tables import terminal_width, wrapped

Completer: TypeAlias = Callable[..., Iterable[str]]
"""Lists what may stand for an argument; called with ``prefix`` and ``parsed_args``, as argcomplete does."""

Fields: TypeAlias = Callable[[], Mapping[str, Sequence[str]]]
"""Fields that may be set, each with the words that it takes if there are few."""


def add_settings_option(parser: Options, help: str, fields: Fields | None = None) -> None:
    """Add ``--set``, whose values `workbench.analysis.sweep.read_settings` reads."""
    _add_fields(parser, "--set", "FIELD=VALUE", help, fields or config_fields)


def add_sweep_option(parser: Options, help: str, fields: Fields | None = None) -> None:
    """Add ``--sweep``, whose values `workbench.analysis.sweep.read_grid` reads."""
    _add_fields(parser, "--sweep", "FIELD=A,B,...", help, fields or config_fields)


def add_slo_option(parser: Options, help: str, required: bool) -> None:
    """Add ``--slo``, whose value `workbench.analysis.tuning.read_slo` reads."""

    def complete(prefix: str, **_: object) -> list[str]:
        from workbench.analysis.tuning import complete_slo

        return complete_slo(prefix)

    completed_by(parser.add_argument("--slo", required=required, metavar="NAME=TIME,...", help=help), complete)


class _AddSetting(argparse._AppendAction):
    """Append to the list; the word "help" lists the fields instead, and ends the program."""

    def __init__(self, *names: Any, fields: Fields, **keywords: Any) -> None:
        super().__init__(*names, **keywords)
        self.fields = fields

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if values != "help":
            return super().__call__(parser, namespace, values, option_string)
        from workbench.config import EngineConfig

        defaults = EngineConfig().to_dict()
        for name, default, words in [
            ("field", "default", ["words that it takes"]),
            *((name, str(defaults.get(name, "")).lower(), words) for name, words in self.fields().items()),
        ]:
            line = f"{name:<40}{default:<10}{' '.join(words)}".rstrip()
            print(*wrapped(line, terminal_width(), indent=20), sep="\n")
        if parser.prog.startswith("workbench trace"):
            print("A field that is not set keeps its recorded value; the defaults are those of an engine.")
        print("In Python, help(workbench.EngineConfig) explains them.")
        parser.exit()


def _add_fields(parser: Options, name: str, metavar: str, help: str, fields: Fields) -> None:
    help = f"{help}; may be repeated ({name} help lists the fields)"
    action = parser.add_argument(name, action=_AddSetting, fields=fields, default=[], metavar=metavar, help=help)
    completed_by(action, lambda prefix, **_: complete_setting(prefix, fields()))


def complete_setting(begun: str, fields: Mapping[str, Sequence[str]]) -> list[str]:
    """Completions of a setting: the names of fields, or the words that its field takes.

    Example:
        >>> complete_setting("pol", {"policy": ("fcfs", "priority"), "seed": ()})
        ['policy=', 'seed=']
        >>> complete_setting("policy=fcfs,", {"policy": ("fcfs", "priority"), "seed": ()})
        ['policy=fcfs,priority']
    """
    name, is_named, values = begun.partition("=")
    if not is_named:
        return [f"{field}=" for field in fields]
    return [f"{name}={each}" for each in complete_list(values, fields.get(name, ()))]


def complete_list(begun: str, words: Iterable[str]) -> list[str]:
    """Completions of words between commas: those that are not among them yet.

    Example:
        >>> complete_list("sticky,r", ("random", "round_robin", "sticky"))
        ['sticky,random', 'sticky,round_robin']
    """
    before = begun[: begun.rfind(",") + 1]
    return [f"{before}{word}" for word in words if word not in before.split(",")]


def completed_by(action: argparse.Action, completer: Completer) -> None:
    """Give an argument what completes it, in the place where argcomplete looks."""
    action.completer = completer  # type: ignore[attr-defined]


def config_fields() -> dict[str, tuple[str, ...]]:
    """The fields of EngineConfig, each with the words that it takes if there are few."""
    from workbench.base.keyword_fields import ConfigFields, PolicyName

    found = {name: _words_of(kind) for name, kind in get_type_hints(ConfigFields).items()}
    return {**found, "policy": _words_of(PolicyName)}


def tuned_fields() -> dict[str, tuple[str, ...]]:
    """The fields of EngineConfig, and the number of ranks, which ``trace tune`` may change."""
    from workbench.analysis.fleet.ranks import RANKS

    return {**config_fields(), RANKS: ()}


def vllm_fields() -> dict[str, tuple[str, ...]]:
    """The fields among them that vLLM has too, and those of its command line."""
    from workbench.analysis.flags import VLLM_FIELDS

    return {name: config_fields().get(name, ()) for name in VLLM_FIELDS}


def _words_of(kind: Any) -> tuple[str, ...]:
    """The words among the values of a type."""
    if kind is bool:
        return ("true", "false")
    if kind is type(None):
        return ("none",)
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return tuple(word for each in get_args(kind) for word in _words_of(each))
    return ()
