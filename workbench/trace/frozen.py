"""Mappings that never change, for the fields of records."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that refuses every change. It equals a dict with the same contents, and JSON encoders write it as one.

    Copies are ordinary dicts: ``dict(frozen)``, ``copy.copy(frozen)``, and what pickle makes.
    """

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the mappings of a record never change: copy this one with dict(...) and change the copy")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


EMPTY: FrozenDict[Any, Any] = FrozenDict()
"""The empty mapping, shared by all records."""


class Frozen(msgspec.Struct, frozen=True):
    """A struct whose mappings never change either: it takes copies of those that somebody else may hold.

    Attributes:
        mappings: Names of the fields that are mappings.
    """

    _mappings: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self._mappings:
            if type(value := getattr(self, name)) is not FrozenDict:
                msgspec.structs.force_setattr(self, name, FrozenDict(value) if value else EMPTY)
