"""ggml's types of tensors and of tokens, as numbers in a GGUF file.

PyPI ``gguf`` has the same tables, and its import takes a tenth of the time to the first token.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class GGMLType(NamedTuple):
    """A type of tensors.

    Attributes:
        name: ggml's name.
        elements: Elements of a block.
        size: Bytes of a block.
    """

    name: str
    elements: int
    size: int


GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}
"""Types of tensors by their number."""


class TokenType(IntEnum):
    """Types of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def ggml_type(number: int) -> GGMLType:
    """A type of tensors; PyPI ``gguf`` is asked for one that is not in the table.

    Raises:
        ValueError: It does not know the type either.
    """
    if number in GGML_TYPES:
        return GGML_TYPES[number]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found = GGMLQuantizationType(number)
    return GGMLType(found.name, *GGML_QUANT_SIZES[found])
