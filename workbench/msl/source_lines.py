"""Find the source line of an address in a compiled kernel.

This reads the line table that clang writes into the library (DWARF 4, section 6.2; ELF, 64-bit, little-endian), so no
tool other than the compiler is needed.
"""

from __future__ import annotations

import bisect
import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Numbers of the line number program's opcodes (DWARF 4, 6.2.5.2 and 6.2.5.3).
_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE, _SET_COLUMN, _NEGATE, _BASIC_BLOCK = range(1, 8)
_CONST_ADD_PC, _FIXED_ADVANCE_PC, _PROLOGUE_END, _EPILOGUE_BEGIN, _SET_ISA = range(8, 13)
_END_SEQUENCE, _SET_ADDRESS, _DEFINE_FILE, _SET_DISCRIMINATOR = range(1, 5)


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
        rows = sorted(_rows(_section(library.read_bytes(), b".debug_line")), key=lambda row: row[0])
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


def _section(image: bytes, name: bytes) -> bytes:
    """The contents of a section of an ELF file; empty if there is none."""
    if image[:6] != b"\x7fELF\x02\x01":
        return b""
    table, entry_size, count, names_index = struct.unpack_from("<Q10xHHH", image, 40)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    for name_offset, _, _, _, offset, size in headers:
        start = names_at + name_offset
        if image[start : image.index(b"\0", start)] == name:
            return image[offset : offset + size]
    return b""


class _Reader:
    """A cursor over little-endian data."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def number(self, size: int, signed: bool = False) -> int:
        value = int.from_bytes(self.data[self.at : self.at + size], "little", signed=signed)
        self.at += size
        return value

    def leb128(self, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text


def _rows(section: bytes) -> Iterator[tuple[int, SourceLine | None]]:
    """All rows (address, place) of all units; place is None at the end of a sequence."""
    start = 0
    while start < len(section):
        reader = _Reader(section, start)
        length = reader.number(4)
        end = reader.at + length
        if reader.number(2) <= 4:
            yield from _unit_rows(reader, end)
        start = end


def _unit_rows(reader: _Reader, end: int) -> Iterator[tuple[int, SourceLine | None]]:
    header_length = reader.number(4)
    program = reader.at + header_length
    instruction_length = reader.number(1)
    reader.number(1)  # operations per instruction
    reader.number(1)  # whether lines are statements by default
    line_base, line_range, opcode_base = reader.number(1, signed=True), reader.number(1), reader.number(1)
    operand_counts = [reader.number(1) for _ in range(opcode_base - 1)]
    while reader.text():  # directories
        pass
    files = [""]
    while name := reader.text():
        files.append(name)
        for _ in range(3):  # directory, time, size
            reader.leb128()
    reader.at = program
    address, file, line = 0, 1, 1
    while reader.at < end:
        opcode = reader.number(1)
        if opcode >= opcode_base:
            opcode -= opcode_base
            address += opcode // line_range * instruction_length
            line += line_base + opcode % line_range
            yield address, SourceLine(files[file], line)
        elif opcode == 0:
            after = reader.leb128()
            after += reader.at
            extended = reader.number(1)
            if extended == _END_SEQUENCE:
                yield address, None
                address, file, line = 0, 1, 1
            elif extended == _SET_ADDRESS:
                address = reader.number(8)
            reader.at = after
        elif opcode == _COPY:
            yield address, SourceLine(files[file], line)
        elif opcode == _ADVANCE_PC:
            address += reader.leb128() * instruction_length
        elif opcode == _ADVANCE_LINE:
            line += reader.leb128(signed=True)
        elif opcode == _SET_FILE:
            file = reader.leb128()
        elif opcode == _CONST_ADD_PC:
            address += (255 - opcode_base) // line_range * instruction_length
        elif opcode == _FIXED_ADVANCE_PC:
            address += reader.number(2)
        else:
            for _ in range(operand_counts[opcode - 1]):
                reader.leb128()
