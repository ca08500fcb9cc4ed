"""Estimated size in memory of what a trace keeps, so that a long run can bound it."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

import msgspec

from workbench.trace.records import StepRecord

_STEP, _CHUNK, _ID, _NUMBER, _REASON, _WORK_ITEM = 1500, 220, 8, 36, 150, 130


def size_of(value: Any) -> int:
    """Bytes of a line of a trace, or of a value in it; what several lines share counts each time.

    Example:
        >>> size_of(("a" * 1000, [7] * 1000)) > 37_000
        True
    """
    if isinstance(value, msgspec.Struct):
        return getsizeof(value) + sum(map(size_of, msgspec.structs.astuple(value)))
    if isinstance(value, dict):
        return getsizeof(value) + sum(size_of(key) + size_of(item) for key, item in value.items())
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], int):  # a prompt
            return _NUMBER * len(value)
        return getsizeof(value) + sum(map(size_of, value))
    return getsizeof(value)


def size_of_step(record: StepRecord) -> int:
    """Bytes of a step, from the numbers of its parts: it is asked for in every step."""
    chunks, kernel = record.chunks, record.kernel
    blocks = sum(len(chunk.new_block_ids) for chunk in chunks)
    return (
        _STEP
        + _CHUNK * len(chunks)
        + sum(2 * len(chunk.text) for chunk in chunks)
        + _NUMBER * (blocks + len(record.cached_block_ids))
        + _ID * (len(record.running) + len(record.waiting))
        + _REASON * len(record.passed_over)
        + (_WORK_ITEM * len(kernel.work_items) if kernel is not None else 0)
    )
