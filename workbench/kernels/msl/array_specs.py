"""Arrays as text, for a command line and a notebook cell: ``x=float32[64,128]``, ``n=7``, ``x=weights.npy``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from workbench.kernels.msl.signature import DTYPE_NAMES, TemplateArgument

_DTYPES = {str(dtype).removeprefix("mlx.core.").rstrip("_"): dtype for dtype in DTYPE_NAMES}
_SHAPED = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\]")
_NUMBER = re.compile(r"(?:(?P<dtype>\w+):)?(?P<value>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|inf|nan|true|false))")
MAX_ELEMENTS = 1 << 28
LARGEST_RANDOM_INTEGER = 100


def dtype_named(name: str, option: str) -> mx.Dtype:
    """The dtype of a name such as "float32".

    Raises:
        ValueError: There is none.
    """
    if name not in _DTYPES:
        raise ValueError(f"{option} has the dtype {name!r}: the dtypes are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def named(words: Iterable[str], option: str) -> dict[str, str]:
    """NAME=VALUE words by name.

    Raises:
        ValueError: A word has no name, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or not value:
            raise ValueError(f"{option} has {word!r}: write NAME=VALUE, such as x=float32[64]")
        if name in found:
            raise ValueError(f"{option} has {name} twice")
        found[name] = value
    return found


def shaped(word: str, option: str) -> tuple[tuple[int, ...], mx.Dtype]:
    """Shape and dtype of a word such as "float32[64,128]".

    Raises:
        ValueError: The word has another form.
    """
    match = _SHAPED.fullmatch(word)
    if match is None:
        raise ValueError(f"{option} is {word!r}: write DTYPE[SHAPE], such as float32[64,128]")
    shape = tuple(int(size) for size in match["shape"].replace(" ", "").split(",") if size)
    if int(np.prod(shape, dtype=np.float64)) > MAX_ELEMENTS:
        raise ValueError(f"{option} is {word!r}: at most {MAX_ELEMENTS} elements")
    return shape, dtype_named(match["dtype"], option)


def array_of(name: str, word: str, seed: int, variables: Mapping[str, Any] | None = None) -> mx.array:
    """The array that a word describes: random numbers of a shape, a number, a file, or a variable.

    Floats are drawn from a normal distribution, integers from 0 to 99; they depend on the seed and the name alone.

    Args:
        name: Name of the input.
        word: ``float32[64,128]``, ``7``, ``float16:0.5``, ``FILE.npy``, ``FILE.safetensors:KEY``, or a variable's name.
        seed: Seed of the random numbers.
        variables: Arrays by name.

    Raises:
        ValueError: It describes none.
    """
    option = f"--inputs {name}"
    if variables is not None and word in variables:
        return mx.array(variables[word])
    if _SHAPED.fullmatch(word):
        shape, dtype = shaped(word, option)
        rng = np.random.default_rng([seed, *name.encode()])
        if mx.issubdtype(dtype, mx.floating):
            return mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)
        high = 2 if dtype == mx.bool_ else LARGEST_RANDOM_INTEGER
        return mx.array(rng.integers(0, high, shape, np.int32)).astype(dtype)
    if number := _NUMBER.fullmatch(word):
        text = number["value"]
        value = text == "true" if text in ("true", "false") else float(text)
        default = "bool" if text in ("true", "false") else "int32" if re.fullmatch(r"[-+]?\d+", text) else "float32"
        return mx.array(value).astype(dtype_named(number["dtype"] or default, option))
    if variables is not None and word.isidentifier():
        raise ValueError(f"{option}: the notebook has no variable {word}; define it, or write {name}=DTYPE[SHAPE]")
    return _from_file(word, option)


def _from_file(word: str, option: str) -> mx.array:
    path, _, key = word.partition(":")
    if Path(path).suffix not in (".npy", ".npz", ".safetensors"):
        raise ValueError(
            f"{option} is {word!r}: write DTYPE[SHAPE] for random numbers, a number, or a file "
            "(.npy, .npz:KEY, .safetensors:KEY)"
        )
    if not Path(path).is_file():
        raise ValueError(f"{option} is {word!r}: there is no file {path}")
    try:
        loaded: Any = mx.load(path)
    except (RuntimeError, ValueError, OSError) as problem:
        raise ValueError(f"{option}: {path} cannot be read: {problem}") from None
    if isinstance(loaded, mx.array):
        return loaded
    if key not in loaded:
        raise ValueError(f"{option} is {word!r}: {path} has {', '.join(sorted(loaded))}; write {path}:KEY")
    return loaded[key]


def template_of(words: Iterable[str]) -> list[tuple[str, TemplateArgument]]:
    """Template arguments from NAME=VALUE words: a dtype, an integer, true or false.

    Raises:
        ValueError: A value is none of these.
    """
    found: list[tuple[str, TemplateArgument]] = []
    for name, value in named(words, "--template").items():
        if value in ("true", "false"):
            found.append((name, value == "true"))
        elif re.fullmatch(r"[-+]?\d+", value):
            found.append((name, int(value)))
        else:
            found.append((name, dtype_named(value, f"--template {name}")))
    return found


def three(word: str, option: str) -> tuple[int, int, int]:
    """Up to three sizes such as "64", "64,2" or "64,2,1".

    Raises:
        ValueError: There are too many, or one is not a number.
    """
    parts = word.split(",")
    if len(parts) > 3 or not all(re.fullmatch(r"\s*\d+\s*", part) for part in parts):
        raise ValueError(f"{option} is {word!r}: write up to three sizes, such as 64 or 64,2,1")
    x, y, z = [*map(int, parts), 1, 1][:3]
    return x, y, z
