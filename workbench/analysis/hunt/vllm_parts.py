"""Parts of vLLM's configuration, made without a model and a GPU, from any released version.

Every generated test of a finding in vLLM contains this file.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING
from typing import Any

parameters = functools.cache(lambda made: inspect.signature(made).parameters)


def call(made: Any, values: Mapping[str, Any], dropped: list[str] | None = None, *, like: Any = None) -> Any:
    """Call a class with the values that it takes, or another does; the names of the others go to ``dropped``."""
    names = getattr(made, "__dataclass_fields__", None) or parameters(like or made)
    if dropped is not None:
        dropped += [name for name in values if name not in names]
    return made(**{name: value for name, value in values.items() if name in names})


@functools.cache
def _defaults(kind: Any) -> dict[str, Any]:
    values = {}
    for name, field in kind.__dataclass_fields__.items():  # the default of pydantic is a field again
        factories = [getattr(source, "default_factory", None) for source in (field.default, field)]
        default = getattr(field.default, "default", field.default)
        values[name] = None if default in (MISSING, ...) or "Undefined" in type(default).__name__ else default
        if factory := next(filter(callable, factories), None):
            with suppress(Exception):  # some parts cannot be made without a model or a GPU
                values[name] = factory()
    return values


def made_part(kind: Any, **values: Any) -> Any:
    """A part of the configuration with vLLM's defaults, and without its checks: there is no model and no GPU."""
    made = object.__new__(kind)
    vars(made).update(_defaults(kind) | values)
    return made


class Model:
    """Stands for the ModelConfig of a made-up model: what it does not have is None."""

    architectures, runner_type, skip_tokenizer_init = ("LlamaForCausalLM",), "generate", True
    max_model_len = 1_000_000

    def __getattr__(self, name: str) -> None:
        return None
