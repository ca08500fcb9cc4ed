"""The layout of packed weights: how a matrix of some bits per weight lies in memory.

Outputs (rows of the matrix) are cut into tiles of `TILE`, four vector registers wide; an output is a lane. Columns are
cut into units of 32. A unit of a tile holds, one after another and each with `TILE` lanes:

- ``base`` words of 32 bits with the low bits of the columns: word j holds columns j * (32 / base) and following, lowest
  bits first, so a mask and a conversion give ``q * 2**(base * i)``, and the input is multiplied by ``2**-(base * i)``
  beforehand;
- ``extra`` words with the high bits of widths 3, 5 and 6, placed so that a shift by a few bits brings the extra bits of
  a column beside its low bits;
- one scale per group of 16 or 32 columns, and one minimum per group if the format has minima.

A weight is ``scale * (q - offset)`` or ``scale * q + minimum``, where q is a code, or the entry of a table of 16 bytes
that a code of 4 bits names. Scales are float16, bfloat16 or float32, or codes of 8
bits that multiply a float16 per 256 columns; those lie in front of a tile's units. Formats of 16 and 32 bits have
neither scales nor codes: a unit is 32 times `TILE` numbers.

A panel is a part of a tile that has been unpacked for many input rows, in a layout of the same kind, see
`Format.panel`: numbers of 8 or 32 bits instead of codes, with scales.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from workbench.kernels.cpu.attention.processor import LANES

UNIT = 32
"""Columns of a unit."""

VECTORS = 4
"""Vector registers across a tile."""

TILE = VECTORS * LANES
"""Outputs of a tile."""

SUPER = 8
"""Units that share a super-scale of a format with codes: 256 columns."""

ScaleKind = Literal["float16", "bfloat16", "float32", "codes", "none"]

Activations = Literal["float32", "int8"]
"""The factors of weights: the input as it is, or codes of 8 bits with a scale per unit, which change the result."""

INT8_UNIT_BYTES = UNIT + 4 + 2 * 4
"""Bytes of a unit of an input of 8 bits: its codes, their scale, and two first summands."""


class Format(NamedTuple):
    """A way to keep weights.

    Attributes:
        bits: Bits per weight: 2, 3, 4, 5, 6 or 8; 16 and 32 are floating-point numbers.
        group: Columns per scale, 16 or 32; 32 if there are none.
        scales: Type of the scales; that of the weights themselves for 16 bits; "none" for float32 weights.
        offset: Subtracted from every code; None if each group has a minimum.
        signed: Whether the codes of scales are signed.
        table: The number from 0 to 255 that each code of 4 bits stands for; empty if codes are numbers.
    """

    bits: int
    group: int
    scales: ScaleKind
    offset: int | None
    signed: bool = False
    table: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether weights are floating-point numbers without scales."""
        return self.bits == 16 or self.scales == "none"

    @property
    def parts(self) -> int:
        """Columns that share a byte of base words."""
        return max(1, 8 // self.base)

    @property
    def base(self) -> int:
        """Bits of a column in the base words."""
        return {3: 2, 5: 4, 6: 4}.get(self.bits, self.bits)

    @property
    def extra(self) -> int:
        """Bits of a column beside the base words."""
        return self.bits - self.base

    @property
    def largest(self) -> int:
        """The largest number that is multiplied with inputs."""
        return max(self.table) if self.table else (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """Subtracted from codes before they are multiplied with inputs of 8 bits: the offset, or half of all codes."""
        return 1 << (self.bits - 1) if self.offset is None else self.offset

    def panel(self, activations: Activations) -> Format:
        """The format of a panel of codes: as the numbers that are multiplied, with scales of float32."""
        return Format(8 if activations == "int8" else 32, self.group, "float32", self.offset)

    def takes(self, activations: Activations) -> bool:
        """Whether weights can be multiplied with such activations: numbers of 16 and 32 bits have no codes."""
        return activations == "float32" or not self.is_plain

    @property
    def has_minima(self) -> bool:
        """Whether each group has a minimum."""
        return not self.is_plain and self.offset is None

    @property
    def sets(self) -> int:
        """Scales of an output in a unit."""
        return UNIT // self.group

    @property
    def word_bytes(self) -> int:
        """Bytes of a unit's words."""
        return self.bits * UNIT * TILE // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, 0 if there are none."""
        return 0 if self.is_plain else {"float32": 4, "codes": 1}.get(self.scales, 2)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a tile."""
        return self.word_bytes + self.scale_bytes * self.sets * TILE * (1 + self.has_minima)

    @property
    def super_bytes(self) -> int:
        """Bytes of the super-scales of 256 columns of a tile."""
        return 2 * TILE * (1 + self.has_minima) if self.scales == "codes" else 0

    def tile_bytes(self, num_units: int) -> int:
        """Bytes of a tile of ``num_units`` units."""
        return self.super_bytes * -(-num_units // SUPER) + self.unit_bytes * num_units


_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The 16 values of IQ4_NL (``kvalues_iq4nl`` in ``ggml-common.h``)."""

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The 16 values of mxfp4, doubled so that they are integers."""

MXFP4 = Format(4, 32, "bfloat16", 12, table=tuple(value + 12 for value in _E2M1))
"""Floating-point numbers of 4 bits; half of their scale, which is a power of two, is a bfloat16."""

GGML_FORMATS: dict[str, Format] = {
    "Q4_0": Format(4, 32, "float16", 8),
    "Q4_1": Format(4, 32, "float16", None),
    "Q5_0": Format(5, 32, "float16", 16),
    "Q5_1": Format(5, 32, "float16", None),
    "Q8_0": Format(8, 32, "float16", 128),
    "IQ4_NL": Format(4, 32, "float16", 128, table=tuple(value + 128 for value in _IQ4_NL)),
    "MXFP4": MXFP4,
    "Q2_K": Format(2, 16, "codes", None),
    "Q3_K": Format(3, 16, "codes", 4, signed=True),
    "Q4_K": Format(4, 32, "codes", None),
    "Q5_K": Format(5, 32, "codes", None),
    "Q6_K": Format(6, 16, "codes", 32, signed=True),
    "F16": Format(16, 32, "float16", 0),
    "BF16": Format(16, 32, "bfloat16", 0),
    "F32": Format(32, 32, "none", 0),
}
"""The format of each ggml type that can be packed."""


def affine_format(bits: int, scales: ScaleKind) -> Format:
    """The format of MLX's affine quantisation; its groups of 64 and 128 become groups of 32 with equal scales."""
    return Format(bits, UNIT, scales, None)
