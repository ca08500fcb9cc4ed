"""The process that renders chat templates: run as a program by `workbench.models.template_renderer`.

A template comes with a model's file and is a program of a stranger. Jinja's sandbox keeps it from reaching anything;
the limits here keep it from using up the machine. Compiling counts too, because Jinja computes constants at that time.
The process imports little more than Jinja and the standard library. Requests and answers are JSON, and come and go
through the connection whose descriptor is its argument.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import sys
from collections.abc import Callable, Sized
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from workbench.base.resource_limits import limit_resources

MAX_CHARACTERS = 2**24
"""Maximum length of the text that a template makes, and of the texts and lists that operators and methods make."""

MAX_INTEGER_BITS = 4096
"""Maximum size of an integer that a template computes: one operation on large integers can take long."""

MAX_MEMORY = 2**28
"""Address space for a template besides what the process has when it begins (256 MiB)."""


class RefusedError(Exception):
    """The template called ``raise_exception``."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which keeps a template from reaching anything, with early limits on sizes."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse products, sums and formatted texts that would become too large."""
        numbers = isinstance(left, int) and isinstance(right, int)
        length_or_count = [_size_of(value) for value in (left, right)]
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        elif operator in ("*", "**") and numbers:
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check_size(bits, MAX_INTEGER_BITS)
        elif operator == "+" and not numbers:
            _check_size(sum(length_or_count))
        elif operator == "*" and not numbers:
            _check_size(math.prod(length_or_count))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse widths and counts that are too large."""
        for value in (*args, *kwargs.values()):
            _check_size(value if isinstance(value, int) else 0)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` and ``str.format_map``, with limits on widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_widths(value.__self__)
            return wrapped(*args, **kwargs)

        return checked


def _size_of(value: Any) -> int:
    """Length of a text or a list; the value of an integer, because it may be a number of repetitions."""
    if isinstance(value, Sized):
        return len(value)
    return value if isinstance(value, int) else 1


def _check_size(size: int, limit: int = MAX_CHARACTERS) -> None:
    if size > limit:
        raise SecurityError(f"a size of {size} is too large: the maximum is {limit}")


def _check_widths(layout: str) -> None:
    _check_size(max((int(digits[:20]) for digits in re.findall("[0-9]+", layout)), default=0))


class Generation(Extension):
    """``{% generation %}``, which marks the model's own text for training: only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """The ``tojson`` filter without Jinja's HTML escapes, because models were not trained on them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise RefusedError(str(message))


@lru_cache(maxsize=32)
def compiled(source: str) -> Template:
    """A template, compiled with the settings that Hugging Face's templates are written for."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)


def render(source: str, variables: dict[str, Any] | None) -> str:
    """The text that a template makes of its variables; "" after compiling it, if there are none."""
    template = compiled(source)
    if variables is None:
        return ""
    parts: list[str] = []
    size = 0
    for part in template.generate(**variables):
        parts.append(part)
        size += len(part)
        _check_size(size)
    return "".join(parts)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request: ``text``, or ``error`` with the class and the message of an exception."""
    # The default action ends the process, also in the middle of a long call. The other side has ended it before that,
    # if it still lives.
    signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1.0)
    try:
        return {"text": render(request["source"], request["variables"])}
    except MemoryError:
        return {"error": "MemoryError", "message": f"it needs more than {MAX_MEMORY >> 20} MiB of memory"}
    except Exception as problem:  # a template is a program and may raise anything
        return {"error": type(problem).__name__, "message": str(problem)[:10_000]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Answer requests until the other side ends."""
    compiled("{% for m in messages %}{{ m.content | trim }}{% endfor %}")  # imports what Jinja imports when it is used
    other_side = Connection(int(sys.argv[1]))
    limit_resources(MAX_MEMORY)
    other_side.send_bytes(b"")  # ready
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = json.loads(other_side.recv_bytes())
            try:
                encoded = json.dumps(answer(request)).encode()
            except MemoryError:
                encoded = json.dumps({"error": "MemoryError", "message": "its text is too large"}).encode()
            other_side.send_bytes(encoded)


if __name__ == "__main__":
    main()
