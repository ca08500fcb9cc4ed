"""Read GGUF files: the metadata, and the tensors as they are stored or as float32.

The layout is that of the GGUF specification (versions 2 and 3, little-endian): a header, key/value metadata, a
table of tensors, then their data. PyPI ``gguf`` knows the quantised types and how to dequantise them. Its reader
turns every string into numpy arrays, which takes seconds for a vocabulary, so the metadata is read here.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.base.outside_files import open_bytes
from workbench.base.text import shown
from workbench.models.gguf.fields import GGUFError, whole_number
from workbench.models.gguf.types import ggml_type
from workbench.models.weight_headers import check_filled

__all__ = ["MAGIC", "GGUFError", "GGUFFile", "GGUFTensor"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_PARTS = 99_999
MAX_NESTING = 3
"""Maximum depth of arrays within arrays; known files have none."""

# Value types of the metadata, by the number that precedes the value.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: Name in the file.
        type_name: ggml type, such as "Q4_K".
        shape: Shape in elements, outermost dimension first (the file stores it innermost first).
        raw: The stored data: uint8 [..., bytes per row] of a quantised type, else an array of ``shape``.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    raw: np.ndarray

    def float32(self, rows: np.ndarray | None = None) -> np.ndarray:
        """The values as float32, shaped ``shape``.

        Args:
            rows: Order of the rows of the outermost dimension; None to keep them.

        Raises:
            GGUFError: PyPI gguf cannot dequantise the type.
        """
        return self.values(self.raw if rows is None else self.raw[rows])

    def values(self, stored: np.ndarray) -> np.ndarray:
        """Stored rows of this tensor as float32.

        Raises:
            GGUFError: PyPI gguf cannot dequantise the type.
        """
        if self.type_name in ("F32", "F16"):
            return stored.astype(np.float32, copy=False)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return dequantize(stored, GGMLQuantizationType[self.type_name]).astype(np.float32, copy=False)
        except NotImplementedError:
            raise GGUFError(
                f"tensor {self.name!r} has ggml type {self.type_name}, which PyPI gguf cannot dequantise: "
                "use a file of another quantisation, such as Q4_K_M or Q8_0"
            ) from None


class _TensorEntry(NamedTuple):
    """One line of the file's table of tensors; ``offset`` counts bytes from the start of the tensors' data."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class GGUFFile:
    """A memory-mapped GGUF file, or all files of a model that is split over several.

    Args:
        path: The file, or the first part of a split model, "NAME-00001-of-0000N.gguf".

    Attributes:
        path: The file.
        paths: All files of the model.
        metadata: Metadata values by key; arrays are lists.
        tensors: Tensors by name, in file order.

    Raises:
        GGUFError: It is not a GGUF file, its version is unknown, or it is cut short.
        FileNotFoundError: No such file.
    """

    def __init__(self, path: str | Path) -> None:
        self._open(Path(path))
        self.paths = [self.path]
        num_parts = whole_number(self.metadata, "split.count", 0, low=0, high=MAX_PARTS)
        if num_parts is not None and num_parts > 1:
            self._join_parts(num_parts)

    def _open(self, path: Path) -> None:
        self.path = path
        self._other_buffers: list[mmap.mmap] = []
        check_filled(self.path)
        with open_bytes(self.path) as stream:
            if self.path.stat().st_size < 24 or stream.read(4) != MAGIC:
                raise GGUFError(f"{self.path} is not a GGUF file: it does not start with the letters GGUF")
            self._buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, IndexError) as problem:
            raise GGUFError(f"{self.path} is damaged or cut short ({problem}): download it again") from problem

    def _read(self) -> None:
        cursor = _Cursor(self._buffer, 4)
        version = cursor.scalar("<I")
        if version not in VERSIONS:
            raise GGUFError(_wrong_version(self.path, version))
        num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            if key in self.metadata:
                raise GGUFError(f"{self.path}: metadata {key} occurs twice: download the file again")
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        table = [_tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = whole_number(self.metadata, "general.alignment", DEFAULT_ALIGNMENT) or DEFAULT_ALIGNMENT
        self._start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        self._add_tensors(self._map_tensor(entry, self._start) for entry in table)

    def _add_tensors(self, tensors: Iterable[GGUFTensor]) -> None:
        for tensor in tensors:
            if tensor.name in self.tensors:
                raise GGUFError(f"{self.path}: tensor {tensor.name!r} occurs twice: download the file again")
            self.tensors[tensor.name] = tensor

    def _join_parts(self, num_parts: int) -> None:
        first_suffix = f"-00001-of-{num_parts:05d}.gguf"
        if not self.path.name.endswith(first_suffix):
            raise GGUFError(
                f"{self.path} is one of {num_parts} parts: give the first one, which ends in {first_suffix}"
            )
        stem = self.path.name.removesuffix(first_suffix)
        for number in range(2, num_parts + 1):
            path = self.path.with_name(f"{stem}-{number:05d}-of-{num_parts:05d}.gguf")
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing: the model is split into {num_parts} files")
            part = GGUFFile.__new__(GGUFFile)
            part._open(path)
            if (found := part.metadata.get("split.no", number - 1)) != number - 1:
                raise GGUFError(
                    f"{path}: metadata split.no={shown(found)} must be {number - 1} in part {number} of {num_parts}: "
                    "download this part again"
                )
            self._add_tensors(part.tensors.values())
            self._other_buffers.append(part._buffer)
            self.paths.append(path)

    def forget(self, data: np.ndarray) -> None:
        """Let go of the memory of a tensor's data, or of some of its rows; the next use reads the file again."""
        for buffer in (self._buffer, *self._other_buffers):
            start = data.__array_interface__["data"][0] - np.frombuffer(buffer, np.uint8).ctypes.data
            if 0 <= start < len(buffer):
                _let_go(buffer, start, start + data.nbytes)

    def forget_tokenizer(self) -> None:
        """Let go of the tokenizer's part of the metadata, which is most of it, once the tokenizer is built."""
        for key in [key for key in self.metadata if key.startswith("tokenizer.")]:
            del self.metadata[key]
        _let_go(self._buffer, 0, self._start)

    def _map_tensor(self, entry: _TensorEntry, start: int) -> GGUFTensor:
        """The tensor of an entry, whose data is not read yet; ``start`` is the byte where all tensors' data begins."""
        name, shape, type_number, offset = entry
        try:
            kind = ggml_type(type_number)
        except ValueError:
            raise GGUFError(
                f"{self.path}: tensor {name!r} has ggml type {type_number}, which this version of PyPI gguf "
                "does not know: upgrade gguf, or use a file of another quantisation"
            ) from None
        num_columns = shape[-1] if shape else 1
        if num_columns % kind.elements:
            raise GGUFError(
                f"{self.path}: tensor {name!r} has rows of {num_columns}, which is not a multiple of "
                f"{kind.elements}, the block of {kind.name}"
            )
        dtype = _PLAIN_DTYPES.get(kind.name, np.dtype(np.uint8))
        num_bytes = num_columns // kind.elements * kind.size
        stored = (*shape[:-1], num_bytes // dtype.itemsize)
        count = math.prod(stored)
        if count == 0:
            raise GGUFError(f"{self.path}: tensor {name!r} has shape {shape}: it is empty")
        if start + offset + count * dtype.itemsize > len(self._buffer):
            raise GGUFError(f"{self.path} is cut short: tensor {name!r} ends after the file: download it again")
        raw = np.frombuffer(self._buffer, dtype, count, start + offset).reshape(stored)
        return GGUFTensor(name, kind.name, shape, raw)

    def __repr__(self) -> str:
        architecture = self.metadata.get("general.architecture", "?")
        return f"GGUFFile({str(self.path)!r}, architecture={architecture!r}, {len(self.tensors)} tensors)"


def _wrong_version(path: Path, version: int) -> str:
    """The message for a file of a version that cannot be read."""
    versions = " and ".join(map(str, VERSIONS))
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        return (
            f"{path} is big-endian, and only little-endian GGUF files can be read: download or convert the model again"
        )
    return f"{path} has GGUF version {version}; versions {versions} can be read: download or convert the model again"


# Types whose elements numpy knows; every other type is kept as bytes.
_PLAIN_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("<i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


def _let_go(buffer: mmap.mmap, start: int, end: int) -> None:
    """Drop the pages of some bytes of a file from this process's memory, where the system can."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = start - start % mmap.PAGESIZE
        buffer.madvise(mmap.MADV_DONTNEED, first, end - first)


def _tensor_entry(cursor: _Cursor) -> _TensorEntry:
    name = cursor.string()
    num_dimensions = cursor.scalar("<I")
    if num_dimensions > MAX_DIMENSIONS:
        raise IndexError(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(cursor.scalar("<Q") for _ in range(num_dimensions))
    return _TensorEntry(name, shape[::-1], cursor.scalar("<I"), cursor.scalar("<Q"))


class _Cursor:
    """Reads values one after another from a buffer."""

    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self.buffer = buffer
        self.position = position

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.buffer, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        texts, end, size = [], self.position, len(self.buffer)
        for _ in range(count):  # of which a vocabulary has many
            start = end + _LENGTH.size
            end = start + _LENGTH.unpack_from(self.buffer, end)[0]
            if end > size:
                raise IndexError(f"a text of {end - start} bytes at byte {start}")
            texts.append(self.buffer[start:end].decode())
        self.position = end
        return texts

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise IndexError(f"metadata value type {kind} at byte {self.position}")
        return self.scalar(_SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if depth > MAX_NESTING:
            raise IndexError(f"arrays within arrays, more than {MAX_NESTING} deep, at byte {self.position}")
        if count > len(self.buffer):
            raise IndexError(f"an array of {count} values at byte {self.position}")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            return [self.value(kind, depth) for _ in range(count)]
        layout = f"<{count}{_SCALARS[kind][1]}"
        values = struct.unpack_from(layout, self.buffer, self.position)
        self.position += struct.calcsize(layout)
        return list(values)
