"""The IPython shell that imports Workbench: short errors, and completions that IPython and Jedi do not find."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from types import FunctionType, MethodType, NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from workbench.base import keyword_fields
from workbench.base.on_demand import find
from workbench.base.short_traceback import shorten_in

_IN_DICT = re.compile(r"""\bconfig\s*=\s*(?:\{[^{}]*['"]|dict\([^()]*?)\w*$""")
"""The text before the cursor, inside ``config={"...`` or ``config=dict(...``."""

_OF_RESULT = re.compile(r"(\w+)((?:\.\w+)*(?:\([^()]*\)|\[[^][]*\])(?:\.\w+|\([^()]*\)|\[[^][]*\])*)\.(\w*)$")
"""A name, what is asked of it, with a call or an index, and the beginning of a member: ``trace.metrics().su``."""

_IN_TEXT = re.compile(
    r"""(?:(\w+)(\.trace)?\.|(?<![\w.]))(\w+)\((?:[^()]*?(\w+)\s*=\s*)?[\[(]?(?:['"][^'"]*['"],\s*)*['"]([^'"]*)$"""
)
"""A name and a method, or a function; perhaps an argument's name; and the beginning of a text:
``trace.watch(panels=["chunks", "kv_``."""

_BY_ID = re.compile(
    r"""(\w+)(\.trace)?\.(outputs|requests|block_tables|block_tables_by_group|num_kv_computed|not_scheduled)"""
    r"""\[['"]([^'"]*)$"""
)
"""A name, and the beginning of an id in a dict by request id: ``engine.outputs["as``."""

_OPEN_TEXT = re.compile(r"""^(?:[^'"]|'[^'\n]*'|"[^"\n]*")*['"][^'"]*$""")
"""Everything before the cursor, if this is inside a text."""


def set_up(field_names: Callable[[], frozenset[str]]) -> None:
    """Set up the shell that runs this process, if it is IPython's.

    Args:
        field_names: Gives the names of the fields of our configurations.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shorten_in(shell)
        complete_in(shell, field_names)


def complete_in(shell: Any, field_names: Callable[[], frozenset[str]]) -> None:
    """Complete fields in ``trace.fork(`` and the like.

    Jedi reads the sources of a class, in which methods that other rooms give to it do not stand.
    """
    completer = shell.Completer

    def fields_of_call(text: str) -> list[str]:
        before = completer.text_until_cursor
        if _IN_DICT.search(before):
            end = "" if before.removesuffix(text)[-1:] in ("'", '"') else "="
            fields = get_type_hints(keyword_fields.ConfigChanges)
            return sorted(name + end for name in fields if name.startswith(text.lstrip("'\"")))
        if _OPEN_TEXT.search(before):
            return []
        return [name for name in completer.python_func_kw_matches(text) if name.removesuffix("=") in field_names()]

    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher()  # what it finds and Jedi too is listed once
    def members_of_result(context: Any) -> dict[str, Any]:
        found = _OF_RESULT.search(context.text_until_cursor)
        begin = shell.user_ns.get(found[1]) if found else None
        names = sorted(name for name in members_after(begin, found[2]) if name.startswith(found[3])) if found else []
        return {"completions": list(map(SimpleCompletion, names)), "matched_fragment": found[3] if found else ""}

    @context_matcher()
    def texts_of_argument(context: Any) -> dict[str, Any]:
        if found := _BY_ID.search(context.text_until_cursor):
            name, trace, member, begin = found.groups()
            source = _value(shell.user_ns, name, trace)
            texts = list(getattr(source, member, ())) if _is_ours(source) else []
        elif found := _IN_TEXT.search(context.text_until_cursor):
            name, trace, function, argument, begin = found.groups()
            source = _value(shell.user_ns, name, trace) if name else shell.user_ns.get(function)
            texts = texts_for(source, function if name else "", argument, begin)
        else:
            return {"completions": []}
        texts = [text for text in texts if text.startswith(begin)]
        completions = list(map(SimpleCompletion, texts))
        return {"completions": completions, "matched_fragment": begin, "suppress": bool(texts)}

    names = {getattr(matcher, "__name__", "") for matcher in completer.custom_matchers}
    for matcher in (fields_of_call, members_of_result, texts_of_argument):
        if matcher.__name__ not in names:
            completer.custom_matchers.append(matcher)


def _value(variables: dict[str, Any], name: str, trace: str | None) -> Any:
    """A variable, or the trace of the engine that it holds."""
    value: Any = variables.get(name)
    return value.trace if trace and _is_ours(value) else value


def texts_for(source: Any, method: str, argument: str | None = None, begin: str = "") -> list[str]:
    """Texts that an argument takes: ids of requests, targets, models, or else the values of its type.

    Args:
        source: An engine or a trace, or a function or class of ours; nothing is found for other objects.
        method: Name of the method; "" for the call of a function or class.
        argument: Name of the argument; the first one by default.
        begin: The beginning of the text, which may name the folder of a model, or have a target already.
    """
    function = _public_method(source, method) if method else _own_call(source)
    if function is None:
        return []
    parameters = list(signature(function).parameters.values())[1 if method else 0 :]
    wanted = next((each for each in parameters if argument in (None, each.name)), None)
    if wanted is None:  # one of **changes, perhaps
        takes_fields = parameters and parameters[-1].kind is Parameter.VAR_KEYWORD
        kind = get_type_hints(keyword_fields.ConfigChanges).get(argument or "") if takes_fields else None
        return _literals(kind)
    if wanted.name == "request_id" and method:
        return list(source.requests if hasattr(source, "requests") else source.outputs)
    if wanted.name == "slo":
        return list(find("Trace.complete_slo")(begin))
    if wanted.name in _MODELS:
        return _models(begin)
    names = vars(keyword_fields) | vars(sys.modules[function.__module__])
    try:
        hints = get_type_hints(SimpleNamespace(__annotations__={"": wanted.annotation}), names)
    except NameError:  # a name that types alone need
        return []
    return _literals(hints[""])


_MODELS = ("model", "draft_model", "name_or_path")
"""Arguments of `workbench.Engine` and `workbench.load_model` that name a model."""


def _models(begin: str) -> list[str]:
    """The bundled model, and the GGUF files and folders where a path begins."""
    folder = begin[: begin.rfind("/") + 1]
    try:
        found = [each for each in Path(folder or ".").iterdir() if not each.name.startswith((".", "_"))]
    except OSError:
        found = []
    folders = [f"{folder}{each.name}/" for each in found if each.is_dir()]
    return ["smollm2", *sorted([*folders, *(f"{folder}{each.name}" for each in found if each.suffix == ".gguf")])]


def _own_call(source: Any) -> Any:
    """One of our functions or classes; None for anything else."""
    if not isinstance(source, (type, FunctionType)) or source.__module__.partition(".")[0] != "workbench":
        return None
    return source


def _public_method(source: Any, name: str) -> Any:
    function = getattr(type(source), name, None) if _is_ours(source) and not name.startswith("_") else None
    return function if hasattr(function, "__code__") else None


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "workbench"


def _literals(hint: Any) -> list[str]:
    """The texts of a type's literals, those of its parts too: ``Sequence[Literal["chunks"] | str]``."""
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if isinstance(value, str)]
    return [text for part in get_args(hint) for text in _literals(part)]


def members_after(begin: object, path: str) -> set[str]:
    """Public members of what a path of names, calls and indices leads to, by annotations alone: nothing is called.

    Args:
        begin: The object at which the path begins.
        path: Such as ``.metrics().summary``.
    """
    kind: Any = begin if isinstance(begin, (type, FunctionType, MethodType)) else type(begin)  # asks it nothing
    if not str(kind.__module__).startswith("workbench"):
        return set()
    try:
        for name, call in re.findall(r"\.(\w+)|([(\[])", path):
            kind = _after(kind, name or {"(": "__call__", "[": "__getitem__"}[call])
        fields = [name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())]
    except (
        AttributeError,
        StopIteration,
        KeyError,
        NameError,
        TypeError,
        ModuleNotFoundError,
    ):  # not annotated, or by a name that types alone need
        return set()
    return {name for name in (*dir(kind), *fields) if not name.startswith("_")}


def _after(kind: Any, name: str) -> Any:
    """The class or function that a member of a class is, or the class of what a class or function gives."""
    if name == "__call__" and (isinstance(kind, type) or hasattr(kind, "__code__")):
        return kind if isinstance(kind, type) else _result_of(kind)
    member = getattr(kind, name, None)
    if isinstance(member, property):
        return _result_of(member.fget)
    if name == "__getitem__" and member is not None:
        items = [each for each in get_args(kind) if each is not Ellipsis]
        return items[-1] if items else _result_of(member)
    if hasattr(member, "__code__"):
        return member
    home = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", ()))
    return _class_of(home.__annotations__[name], vars(sys.modules[home.__module__]))


def _result_of(function: Any) -> Any:
    return _class_of(function.__annotations__["return"], function.__globals__)


def _class_of(annotation: Any, names: dict[str, Any]) -> Any:
    """The first class of an annotation, which is resolved alone: others may have names that types alone need."""
    hint = get_type_hints(SimpleNamespace(__annotations__={"": annotation}), names)[""]
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next(each for each in union if each is not NoneType)
