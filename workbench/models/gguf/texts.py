"""Many texts as their bytes: a list of a tokenizer's tokens or merges would take 60 bytes and more for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import overload

import numpy as np

_CHECKED = 4096


class Texts(Sequence[str]):
    """Texts that cannot be changed.

    Args:
        joined: The UTF-8 bytes of all texts, one text after another.
        lengths: Number of bytes of each text, integers [num_texts].

    Attributes:
        joined: See above.
        starts: First byte of each text, and the end: int32 [num_texts + 1].

    Raises:
        UnicodeDecodeError: A text is not valid UTF-8.
    """

    def __init__(self, joined: bytes, lengths: np.ndarray) -> None:
        self.joined = joined
        self.starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=self.starts[1:])
        blocks = [*range(0, len(lengths), _CHECKED), len(lengths)]
        for first, last in pairwise(self.starts[blocks].tolist()):
            joined[first:last].decode()
        data = np.frombuffer(joined, np.uint8)
        inside = self.starts[self.starts < data.size]
        inside = inside[data[inside] & 0xC0 == 0x80]
        if inside.size:
            raise UnicodeDecodeError("utf-8", joined, inside[0], inside[0] + 1, "a text begins within a character")

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """The same texts.

        Raises:
            UnicodeEncodeError: A text has half of a surrogate pair.
        """
        encoded = [text.encode() for text in texts]
        return cls(b"".join(encoded), np.array([len(text) for text in encoded], np.int64))

    def replaced(self, texts: Mapping[int, str]) -> Texts:
        """These texts with other ones at some places, which are in ascending order."""
        lengths, parts, end = np.diff(self.starts), [], 0
        for place, text in texts.items():
            start, stop = self.starts[place : place + 2].tolist()
            parts += [self.joined[end:start], text.encode()]
            lengths[place], end = len(parts[-1]), stop
        return Texts(b"".join([*parts, self.joined[end:]]), lengths)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start, stop = self.starts[place : place + 2].tolist()
        return self.joined[start:stop].decode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
