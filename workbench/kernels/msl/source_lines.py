"""Find the source line of an address in a compiled kernel, by the line table that clang writes into the library."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile


@dataclass(frozen=True)
class SourceLine:
    """A place in a source: the name of a file and a line, from 1."""

    file: str
    line: int


class LineTable:
    """The line table of a shared library.

    Attributes:
        addresses: Offsets in the library at which a line begins, ascending.
    """

    def __init__(self, library: Path) -> None:
        """Read the table of ``library``; it is empty if the library has none."""
        rows = sorted(_rows(library), key=lambda row: row[0])
        self.addresses = [address for address, _ in rows]
        self._places = [place for _, place in rows]

    def find(self, offset: int) -> SourceLine | None:
        """The place of the instruction at ``offset`` from the library's start, or None.

        The compiler gives no line for an instruction that it made from several; the last line before it counts then.
        """
        at = bisect.bisect_right(self.addresses, offset) - 1
        while at >= 0 and (place := self._places[at]):
            if place.line:
                return place
            at -= 1
        return None


@functools.lru_cache(maxsize=64)
def line_table(library: Path) -> LineTable:
    """The line table of a library, read once."""
    return LineTable(library)


def _rows(library: Path) -> Iterator[tuple[int, SourceLine | None]]:
    """All rows (address, place) of all units; place is None at the end of a sequence."""
    with library.open("rb") as stream:
        try:
            tables = ELFFile(stream).get_dwarf_info()
        except ELFError:  # a library of a Mac
            return
        for unit in tables.iter_CUs():
            program = tables.line_program_for_CU(unit)
            files = [entry.name.decode() for entry in program["file_entry"]] if program else []
            for row in program.get_entries() if program else ():
                if (state := row.state) is not None:
                    place = None if state.end_sequence else SourceLine(files[state.file - 1], state.line)
                    yield state.address, place
