"""The values that transformers' own class of a model gives to the keys of its configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any


class TransformersValues:
    """The values that transformers' class of a model gives to keys.

    Args:
        model_type: The model.
        config: Its configuration.
    """

    def __init__(self, model_type: str, config: Mapping[str, Any]) -> None:
        self._class, self._config = _class_of(model_type), dict(config)

    @property
    def exists(self) -> bool:
        """Whether there is a class."""
        return self._class is not None

    def may_read(self, key: str) -> bool:
        """Whether transformers' model may read a key: there is no class, or it knows the key."""
        return self._class is None or self.of(key)[0]

    def of(self, key: str) -> tuple[bool, Any]:
        """Whether the class knows a key, and its value in a configuration that does not name it."""
        if self._class is None:
            return False, None
        others = {name: value for name, value in self._config.items() if name != key}
        values = self._values(others)
        values = self._values({}) if values is None else values  # transformers refuses some combinations of values
        if values is None:
            return False, None
        return key in values, json.loads(json.dumps(values.get(key), default=str))

    def _values(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The values of a configuration; None if the class refuses it."""
        with _quiet():
            try:
                return dict(self._class(**given).to_dict())
            except Exception:
                return None

    def attribute(self, name: str) -> Any:
        """An attribute of the class, under any of its names; None if it has none."""
        if self._class is None or not name:
            return None
        with _quiet():
            try:
                value = getattr(self._class(**self._config), name, None)
                return json.loads(json.dumps(value))
            except Exception:  # transformers checks combinations of values
                return None


@cache
def _class_of(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]
    except Exception:  # unknown, or it needs a package that is missing
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which warns of values that are judged here."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    theirs.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        theirs.set_verbosity(before)
