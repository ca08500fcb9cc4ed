"""The IPython shell that imports Workbench: short errors, and the names of fields as completions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from workbench.base.short_traceback import shorten_in

_IN_DICT = re.compile(r"""\bconfig\s*=\s*(?:\{[^{}]*['"]|dict\([^()]*?)\w*$""")
"""The text before the cursor, inside ``config={"...`` or ``config=dict(...``."""


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
            return sorted(name + end for name in field_names() if name.startswith(text.lstrip("'\"")))
        return [name for name in completer.python_func_kw_matches(text) if name.removesuffix("=") in field_names()]

    if not any(getattr(matcher, "__name__", "") == fields_of_call.__name__ for matcher in completer.custom_matchers):
        completer.custom_matchers.append(fields_of_call)
