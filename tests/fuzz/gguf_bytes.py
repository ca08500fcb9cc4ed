"""GGUF files built byte by byte, so that they can have any fault; PyPI gguf writes only correct files."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gguf import GGMLQuantizationType

from workbench.models.gguf.file import GGUFFile

ALIGNMENT = 32


class Tensor(NamedTuple):
    """An entry of the tensor table; ``offset`` None stands for the real position of the data."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    data: bytes
    offset: int | None = None


def pack_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_value(value: Any) -> tuple[int, bytes]:
    """The type number and bytes of a metadata value: floats as float64, integers of any size as they fit."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        if 0 <= value < 2**32:
            return 4, struct.pack("<I", value)
        return (11, struct.pack("<q", value)) if value < 2**63 else (10, struct.pack("<Q", value))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, str):
        return 8, pack_string(value)
    packed = [pack_value(item) for item in value]
    kind = packed[0][0] if packed else 4
    assert all(other == kind for other, _ in packed), "an array has one type"
    return 9, struct.pack("<IQ", kind, len(packed)) + b"".join(data for _, data in packed)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Iterable[Tensor], version: int = 3) -> bytes:
    """A GGUF file."""
    tensors = list(tensors)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = pack_value(value)
        head += pack_string(key) + struct.pack("<I", kind) + data
    body = b""
    for tensor in tensors:
        offset = len(body) if tensor.offset is None else tensor.offset
        head += pack_string(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.type_number, offset)
        body += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT) + body


def tensors_of(file: GGUFFile) -> list[Tensor]:
    """The tensors of a correct file."""
    return [
        Tensor(tensor.name, tensor.shape, GGMLQuantizationType[tensor.type_name].value, tensor.raw.tobytes())
        for tensor in file.tensors.values()
    ]
