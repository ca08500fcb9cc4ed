"""The fields of records: bounded numbers, and mappings that never change.

Bounds are types that msgspec's decoder checks when a file is read. The checks run in C, and only when a line is
decoded: building a record in Python checks nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import msgspec

if TYPE_CHECKING:
    from workbench.base.on_demand import np

K = TypeVar("K")
V = TypeVar("V")


MAX_TOKENS = 2**24
"""Largest position, chunk or context a trace may claim (16.8 million tokens)."""

MAX_BLOCKS = 2**22
"""Largest KV pool a trace may claim, in blocks."""

MAX_SECONDS = 1e12
"""Largest time that any file may claim, in seconds (30,000 years): sums and differences of such times stay finite."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Rows = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCKS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
DraftId = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Window = Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Offset = Annotated[float, msgspec.Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]


class FrozenDict(dict[K, V]):
    """A dict that refuses every change. It equals a dict with the same contents, and JSON encoders write it as one.

    Copies are ordinary dicts: ``dict(frozen)``, ``copy.copy(frozen)``, and what pickle makes.
    """

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("what is read from a record never changes: copy this with dict(...) and change the copy")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


EMPTY: FrozenDict[Any, Any] = FrozenDict()
"""The empty mapping, shared by all records."""


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, which refuses every change from now on."""
    array.flags.writeable = False
    return array
