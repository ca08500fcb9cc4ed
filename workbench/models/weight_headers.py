"""Looks at files of safetensors before their data is read: shapes, and whether a configuration asks for more."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base.outside_files import check_regular, open_bytes
from workbench.base.text import counted, shown

MAX_LAYERS = 2048
"""Largest number of layers of a model."""

MAX_TENSORS = 1_000_000
"""Largest number of tensors in the files of a model."""

_FEW_LAYERS = 64
"""Layers that take little memory, so that mlx-lm may say what is missing."""

_MOST_HOLES, _SMALL = 64, 2**24
_BITS_PER_BYTE = 8
_LAYERS = re.compile(r"(^|_)(n|num)_(\w+_)?layers?$")
_SIZES = re.compile(r"(hidden|intermediate|embed\w*|model|ffn|vocab)_(size|dim)$|^(d_model|n_embd|dim)$|(^|_)rank$")


class Header(NamedTuple):
    """A tensor in a file: its shape, and the name of its type, such as "BF16"."""

    shape: tuple[int, ...]
    dtype: str


def read_headers(path: Path, max_tensors: int = MAX_TENSORS) -> dict[str, Header]:
    """The tensors in a file of safetensors; the library checks the header against the size of the file.

    Raises:
        ValueError: It is not a regular file of safetensors, has too many tensors, or is nearly all hole.
        OSError: It cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    check_filled(path)
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            if len(names) > max_tensors:
                raise ValueError(f"{path} has {len(names):,} tensors, {max_tensors:,} are allowed")
            parts = ((name, file.get_slice(name)) for name in names)
            return {name: Header(tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts}
    except SafetensorError as problem:
        raise ValueError(f"{path} cannot be read as safetensors ({problem})") from None


def check_filled(path: Path) -> None:
    """Refuse a large file whose bytes are nearly all in holes: it takes 4 KiB to send and gigabytes to read.

    Raises:
        ValueError: Less than a sixty-fourth of its bytes is data.
    """
    if not hasattr(os, "SEEK_DATA"):
        return
    with open_bytes(path) as file:
        size, data = os.fstat(file.fileno()).st_size, 0
        if size <= _SMALL:
            return
        for begin, end in _pieces(file.fileno(), size):
            data += end - begin
            if data * 64 >= size:
                return
    raise ValueError(f"{path} has {size:,} bytes, of which {data:,} are data and the rest is holes: it is not complete")


def _pieces(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The pieces of a file that hold data, the first of them; the whole file if the system does not tell."""
    place = 0
    for _ in range(_MOST_HOLES):
        try:
            begin = os.lseek(descriptor, place, os.SEEK_DATA)
            place = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as problem:
            import errno

            if problem.errno != errno.ENXIO:  # that is the end; anything else: no such question on this system
                yield 0, size
            return
        yield begin, place
    yield 0, size


def check_config(config: Mapping[str, Any], paths: Iterable[Path], place: str) -> None:
    """Compare the sizes of a configuration with the weights that are there, before a model is built.

    A layer has at least one tensor, and an embedding has a bit for each number of it.

    Raises:
        ValueError: A size asks for more; the message names the field.
    """
    num_tensors = num_bytes = 0
    for path in paths:
        num_tensors += len(read_headers(path))
        num_bytes += path.stat().st_size
    allowed_layers = min(max(num_tensors, _FEW_LAYERS), MAX_LAYERS)
    for part in _parts(config):
        for name, value in part.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if _LAYERS.search(name) and not value <= allowed_layers:
                allowed = f"{counted(num_tensors, 'tensor')} of the weights allow {allowed_layers:,}"
                raise ValueError(f"{place}: {name} is {shown(value)}, and the {allowed}: they are not of one model")
            if _SIZES.search(name) and not value <= num_bytes * _BITS_PER_BYTE:
                allowed = f"the {num_bytes:,} bytes of the weights allow at most {num_bytes * _BITS_PER_BYTE:,}"
                raise ValueError(f"{place}: {name} is {shown(value)}, and {allowed}: they are not of one model")
        vocabulary, width = part.get("vocab_size"), part.get("hidden_size")
        if isinstance(vocabulary, int) and isinstance(width, int) and vocabulary * width > num_bytes * _BITS_PER_BYTE:
            raise ValueError(
                f"{place}: vocab_size {vocabulary:,} and hidden_size {width:,} need more than the {num_bytes:,} bytes "
                "of the weights: they are not of one model"
            )


def _parts(config: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """A configuration and its inner objects, such as that of the text."""
    yield config
    for value in config.values():
        if isinstance(value, dict) and depth < 4:
            yield from _parts(value, depth + 1)
