"""Find the source line of an address in a compiled kernel, by the line table that clang writes into the library."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.dwarf.ranges import RangeEntry
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
        self._inlined = list(_inlined_calls(library))

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

    def callers(self, offset: int) -> tuple[SourceLine, ...]:
        """The calls of inlined functions around the instruction at ``offset``, the outermost first."""
        return tuple(call for begin, end, call in self._inlined if begin <= offset < end)


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


def _inlined_calls(library: Path) -> Iterator[tuple[int, int, SourceLine]]:
    """First and last address of each inlined call and its place; a call is followed by those inside it."""
    with library.open("rb") as stream:
        try:
            tables = ELFFile(stream).get_dwarf_info()
        except ELFError:  # a library of a Mac
            return
        ranges = tables.range_lists()
        for unit in tables.iter_CUs():
            program = tables.line_program_for_CU(unit)
            files = [entry.name.decode() for entry in program["file_entry"]] if program else []
            base = unit.get_top_DIE().attributes.get("DW_AT_low_pc")
            for entry in unit.iter_DIEs():
                if entry.tag != "DW_TAG_inlined_subroutine" or "DW_AT_call_line" not in entry.attributes:
                    continue
                has = {name: attribute.value for name, attribute in entry.attributes.items()}
                place = SourceLine(files[has["DW_AT_call_file"] - 1], has["DW_AT_call_line"])
                if "DW_AT_ranges" in has and ranges is not None:
                    start = base.value if base else 0
                    for part in ranges.get_range_list_at_offset(has["DW_AT_ranges"]):
                        if isinstance(part, RangeEntry):
                            yield start + part.begin_offset, start + part.end_offset, place
                elif "DW_AT_low_pc" in has:
                    # The end is a length, unless it is an address.
                    end = has["DW_AT_high_pc"]
                    is_address = entry.attributes["DW_AT_high_pc"].form == "DW_FORM_addr"
                    yield has["DW_AT_low_pc"], end if is_address else has["DW_AT_low_pc"] + end, place
