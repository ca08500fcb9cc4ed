"""Bounds of the numbers in a trace, as types that msgspec's decoder checks when a file is read.

The checks run in C, and only when a line is decoded: building a record in Python checks nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_TOKENS = 2**24
"""Largest position, chunk or context a trace may claim (16.8 million tokens)."""

MAX_BLOCKS = 2**22
"""Largest KV pool a trace may claim, in blocks."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Rows = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BLOCKS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
DraftId = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Window = Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
