"""The changes of block tables in all KV cache groups of vLLM, in the engine's process.

vLLM tells its workers the blocks that a request is given, and not those that fall out of a window. So the tables of
models with several groups are compared with what was seen of them before: in a step without changes that costs a length
and one or two entries per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TableWatch:
    """Remembers as much of each table as shows that it has changed.

    Args:
        managers: vLLM's managers of the groups, whose ``req_to_blocks`` are the tables.
    """

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._seen: dict[str, list[_Seen]] = {}

    def admit(self, request_id: str, tables: Sequence[list[int]]) -> None:
        """A request begins with these tables."""
        self._seen[request_id] = [_Seen(table) for table in tables]

    def forget(self, request_id: str) -> None:
        """A request has lost its blocks."""
        self._seen.pop(request_id, None)

    def changes(self, request_id: str) -> list[tuple[list[int], list[int]]] | None:
        """For each group the places that became null and the entries appended since the last call; None for none."""
        seen = self._seen.get(request_id)
        if seen is None:
            return None
        changed = [its.changes(manager.req_to_blocks[request_id]) for its, manager in zip(seen, self._managers)]
        return changed if any(removed or appended for removed, appended in changed) else None


class _Seen:
    """The length of a table, and its places that are held."""

    __slots__ = ("held", "length")

    def __init__(self, table: Sequence[int]) -> None:
        self.length = len(table)
        self.held = [place for place, block in enumerate(table) if block]

    def changes(self, table: Sequence[Any]) -> tuple[list[int], list[int]]:
        """The places that became null and the entries appended; ``table`` has vLLM's blocks."""
        length, held = self.length, self.held
        if len(table) == length and not (held and table[held[0]].is_null) and not (held and table[held[-1]].is_null):
            return [], []
        removed = [place for place in held if table[place].is_null]
        appended = [block.block_id for block in table[length:]]
        gone = set(removed)
        self.held = [place for place in held if place not in gone]
        self.held += [length + index for index, block in enumerate(appended) if block]
        self.length = len(table)
        return removed, appended
