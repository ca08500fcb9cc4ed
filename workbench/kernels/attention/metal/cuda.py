"""The same Metal source on an NVIDIA GPU, through ``mx.fast.cuda_kernel``.

CUDA has no address spaces in its types, so their names are removed from the text, and threadgroup arrays become
``__shared__`` arrays. Macros cannot do this, because ``__device__`` expands to an attribute spelled ``device``. All
other Metal names are defined by metal_on_cuda.cuh.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

_SHARED_ARRAY = re.compile(r"\bthreadgroup\s+([\w:]+(?:<[^;<>]*>)?\s+\w+\s*\[[^;]*\]\s*;)")
_ADDRESS_SPACE = re.compile(r"\b(?:device|constant|thread|threadgroup)\b ?")
_METAL_INCLUDE = re.compile(r"^#include <metal_\w+>\n", re.MULTILINE)


def to_cuda(text: str) -> str:
    """Translate Metal source to CUDA source, to be compiled after metal_on_cuda.cuh.

    >>> to_cuda("threadgroup float sums[8]; const device T* from = q;")
    '__shared__ float sums[8]; const T* from = q;'
    """
    text = _METAL_INCLUDE.sub("", text)
    text = _SHARED_ARRAY.sub(r"__shared__ \1", text)
    return _ADDRESS_SPACE.sub("", text)


def cuda_prelude() -> str:
    """The text of metal_on_cuda.cuh."""
    return files(__package__).joinpath("metal_on_cuda.cuh").read_text()


def metal_kernel_on_cuda(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
) -> Callable[..., Any]:
    """``mx.fast.cuda_kernel`` with the signature of ``mx.fast.metal_kernel``.

    Grids must be multiples of their threadgroup: CUDA rounds them up, while Metal runs partial threadgroups.
    """
    import mlx.core as mx

    kernel: Any = mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=to_cuda(source),
        header=cuda_prelude() + to_cuda(header),
    )
    return kernel
