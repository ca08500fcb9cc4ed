"""Files of adapters (LoRA): those of mlx-lm and of PEFT.

Both are a folder with ``adapter_config.json`` and one file of safetensors. mlx-lm: ``adapters.safetensors``, matrices
``LAYER.lora_a`` [inputs, rank] and ``LAYER.lora_b`` [rank, outputs], and a scale. PEFT: ``adapter_model.safetensors``,
``base_model.model.LAYER.lora_A.weight`` [rank, inputs] and ``.lora_B.weight`` [outputs, rank], and ``lora_alpha``,
which is divided by the rank, or by its root with ``use_rslora``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from workbench.base.outside_files import open_bytes, read_json
from workbench.base.text import shown
from workbench.models.adapter_config import read_adapter_config
from workbench.models.weight_headers import Header, read_headers

Check = Callable[[str, int, int, int], None]
"""Refuses a layer by its name, the rank, and its numbers of inputs and outputs."""

Factors = tuple[np.ndarray, np.ndarray]
"""The matrices of a layer, float32 [rank, inputs] and [rank, outputs]; the second one holds the scale."""

_CHUNK_BYTES = 2**20
_CONFIG, _MAX_CONFIG_BYTES, _MAX_TENSORS = "adapter_config.json", 2**20, 100_000
_FLOATING = ("F64", "F32", "F16", "BF16")
_FORMS = {
    "mlx-lm": ("adapters.safetensors", ".lora_a", ".lora_b", ""),
    "PEFT": ("adapter_model.safetensors", ".lora_A.weight", ".lora_B.weight", "base_model.model."),
}


class AdapterError(ValueError):
    """An adapter cannot be used; the message names it, the file and the cause."""


def read_adapter(
    name: str, folder: Path, check: Check | None = None, num_layers: int | None = None
) -> dict[str, Factors]:
    """The matrices of an adapter by the dotted name of their layer.

    Args:
        name: The adapter, for messages.
        folder: Its folder.
        check: Called with the name of each layer, the rank, and the numbers of inputs and outputs, before any matrix
            is read; raises an error for a layer that cannot be used.
        num_layers: Number of layers of the model; None if it is unknown.

    Raises:
        AdapterError: A file is missing, damaged, or holds something else than an adapter of linear layers.
    """
    prefix = f"adapter {name!r} ({folder})"
    if not folder.is_dir():
        raise AdapterError(f"{prefix}: there is no such folder; it has {_CONFIG} and a file of safetensors")
    config = _read_config(prefix, folder / _CONFIG)
    try:
        meant = read_adapter_config(f"{prefix}: {_CONFIG}", config)
    except ValueError as problem:
        raise AdapterError(str(problem)) from None
    file, *_ = _FORMS[meant.kind]
    layers = _matrices(prefix, file, meant.kind, _headers(f"{prefix}: {file}", folder / file))
    scales = {}
    for path, (first, second) in layers.items():
        (rank, num_inputs), (other, num_outputs) = first.shape, second.shape
        if rank != other:
            raise AdapterError(f"{prefix}: the matrices of {path} have the ranks {rank} and {other}")
        if check is not None:
            check(path, rank, num_inputs, num_outputs)
        try:
            scales[path] = meant.factor(path, rank)
        except ValueError as problem:
            raise AdapterError(f"{prefix}: {_CONFIG}: {problem}") from None
    try:
        meant.check_layers(layers, num_layers)
    except ValueError as problem:
        raise AdapterError(f"{prefix}: {_CONFIG}: {problem}") from None
    tensors = _read_tensors(f"{prefix}: {file}", folder / file)
    factors: dict[str, Factors] = {}
    for path, pair in layers.items():
        a, b = (tensors[matrix.key].T if matrix.is_turned else tensors[matrix.key] for matrix in pair)
        for values, matrix in zip((a, b), pair):
            if not np.isfinite(values).all():
                raise AdapterError(f"{prefix}: {matrix.key} holds values that are not finite numbers")
        factors[path] = np.ascontiguousarray(a), np.ascontiguousarray(b * np.float32(scales[path]))
    return factors


Signature = tuple[tuple[int, int, int], ...]
"""Size, time of the last change and number of each file."""


def signature(folder: Path) -> Signature:
    """Facts about an adapter's files that change when one is written.

    Raises:
        AdapterError: There are none.
    """
    found = [path for path in _files(folder) if path.is_file()]
    if not found:
        raise AdapterError(f"{folder} has no files of an adapter any more")
    states = [path.stat() for path in found]
    return tuple((state.st_size, state.st_mtime_ns, state.st_ino) for state in states)


def digest(folder: Path) -> str:
    """Digest of an adapter's files.

    Raises:
        AdapterError: One cannot be read.
    """
    whole = hashlib.sha256()
    for path in _files(folder):
        if path.is_file():
            try:
                with open_bytes(path) as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        whole.update(chunk)
                whole.update(b"\0")
            except OSError as problem:
                raise AdapterError(f"{path} cannot be read ({problem.strerror})") from None
    return whole.hexdigest()


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in (_CONFIG, *(file for file, *_ in _FORMS.values()))]


class _Matrix(NamedTuple):
    """A matrix in a file: its name, its shape [rank, features], and whether the file has it the other way round."""

    key: str
    shape: tuple[int, int]
    is_turned: bool


def _matrices(prefix: str, file: str, form: str, headers: Mapping[str, Header]) -> dict[str, tuple[_Matrix, _Matrix]]:
    """The two matrices of each layer, from the header of the file."""
    _, first, second, start = _FORMS[form]
    found: dict[str, dict[str, _Matrix]] = {}
    for key, header in headers.items():
        ending = next((ending for ending in (first, second) if key.endswith(ending)), None)
        if ending is None or not key.startswith(start):
            raise AdapterError(
                f"{prefix}: {file} holds {shown(key)}; only matrices of linear layers are supported, whose names end "
                f"in {first} and {second}{f' and begin with {start}' if start else ''}"
            )
        if header.dtype not in _FLOATING:
            raise AdapterError(f"{prefix}: {file}: {key} must hold floating-point numbers, its type is {header.dtype}")
        if len(header.shape) != 2 or not all(header.shape):
            raise AdapterError(f"{prefix}: {key} must be a matrix, its shape is {list(header.shape)}")
        is_turned = (form == "mlx-lm") is (ending == first)
        rank, features = header.shape[::-1] if is_turned else header.shape
        path = key.removeprefix(start).removesuffix(ending)
        found.setdefault(path, {})[ending] = _Matrix(key, (rank, features), is_turned)
    if not found:
        raise AdapterError(f"{prefix}: {file} is empty")
    for path, pair in found.items():
        if len(pair) < 2:
            (present,), (absent,) = pair, {first, second} - set(pair)
            raise AdapterError(f"{prefix}: {path} has {present} and no {absent}")
    return {path: (pair[first], pair[second]) for path, pair in found.items()}


def _headers(place: str, path: Path) -> dict[str, Header]:
    try:
        return read_headers(path, _MAX_TENSORS)
    except FileNotFoundError:
        raise AdapterError(f"{place} is missing") from None
    except (OSError, ValueError) as problem:
        raise AdapterError(f"{place} cannot be read as safetensors ({problem})") from None


def _read_config(prefix: str, path: Path) -> Mapping[str, Any]:
    try:
        config = read_json(path, _MAX_CONFIG_BYTES)
    except OSError as problem:
        raise AdapterError(f"{prefix}: {path.name} cannot be read ({problem.strerror})") from None
    except ValueError as problem:
        raise AdapterError(f"{prefix}: {problem}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{prefix}: {path.name} must hold an object, got {shown(config)}")
    return config


def _read_tensors(place: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of safetensors, whose header is checked, as float32."""
    try:
        tensors: Any = mx.load(str(path))  # NumPy knows no bfloat16
        return {name: np.array(tensor.astype(mx.float32)) for name, tensor in tensors.items()}
    except (OSError, ValueError, TypeError, RuntimeError) as problem:
        raise AdapterError(f"{place} cannot be read as safetensors ({problem})") from None
