"""Register tiles of a product with packed weights, emitted as vector instructions.

A tile multiplies a few input rows with one or two pairs of vectors of outputs. Weights are unpacked into registers,
once for all rows of the tile; for many rows, a few units of them are unpacked once into a panel, which stays in the
caches until all rows have been multiplied with it. The sums of a group of columns are taken before its scale is
applied. A row's arithmetic is the same in every tile, so its result does not depend on the number of rows beside it.

Addresses are integers. That of packed weights has the type `PackedType`, which carries the format: numba compiles the
same function for each format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic, models, register_model

from workbench.kernels.cpu.attention.simd import INDEX, LANES
from workbench.kernels.cpu.emitter import Emitter
from workbench.kernels.cpu.formats import SUPER, VECTORS, Activations, Format
from workbench.kernels.cpu.int8_emitter import Int8Emitter


class PackedType(types.Type):
    """Numba's type of the address of packed weights.

    Args:
        format: Their format.
        activations: The factors of the weights.
    """

    def __init__(self, format: Format, activations: Activations = "float32") -> None:
        self.format, self.activations = format, activations
        super().__init__(name=f"Packed({', '.join(map(str, format))}, {activations})")


@register_model(PackedType)
class _PackedModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: types.Type):
        super().__init__(manager, numba_type, INDEX)


@intrinsic
def tile_at(typing_context, weights, num_units, tile):
    """Address of a tile of packed weights with ``num_units`` units."""

    def codegen(context, builder, signature, values):
        base, units, index = values
        form = signature.args[0].format
        supers = builder.udiv(builder.add(units, INDEX(SUPER - 1)), INDEX(SUPER))
        size = builder.add(builder.mul(supers, INDEX(form.super_bytes)), builder.mul(units, INDEX(form.unit_bytes)))
        return builder.add(base, builder.mul(size, index))

    return weights(weights, types.intp, types.intp), codegen


def product_tile(rows: int, vectors: int) -> Callable[..., None]:
    """A function that multiplies ``rows`` rows of input with ``vectors`` vectors of a tile of outputs.

    Its arguments are ``(weights, first, num_units, x, x_row, sums, sums_row, y, y_row)``: the address of the tile; the
    first of its vectors; the address of the prepared input and the distance of its rows in elements; likewise the
    sums of its groups; and the address of the first row of the tile's outputs, which are written.
    """

    @intrinsic
    def tile(typing_context, weights, first, num_units, x, x_row, sums, sums_row, y, y_row):
        def codegen(context, builder, signature, values):
            _emitter(builder, signature, rows, vectors).product(*values)
            return context.get_dummy_value()

        return types.void(weights, *[types.intp] * 8), codegen

    return tile


def panel_tile(rows: int, vectors: int) -> Callable[..., None]:
    """A function that multiplies with a panel and adds to the outputs.

    Its arguments are ``(weights, panel, first, first_unit, num_units, x, x_row, sums, sums_row, y, y_row)``: the
    address of packed weights, for its type alone; that of the panel; the first of its vectors; its first unit in the
    tile, and its number of units; the others are those of `product_tile`.
    """

    @intrinsic
    def tile(typing_context, weights, panel, first, first_unit, num_units, x, x_row, sums, sums_row, y, y_row):
        def codegen(context, builder, signature, values):
            if _panel_rows(signature.args[0]):
                _emitter(builder, signature, rows, vectors).panel_product(*values[1:])
            return context.get_dummy_value()

        return types.void(weights, *[types.intp] * 10), codegen

    return tile


@intrinsic
def unpack(typing_context, weights, num_units, first_unit, count, panel):
    """Write ``count`` units of a tile, from ``first_unit`` on, to a panel, whose address is aligned to 64 bytes."""

    def codegen(context, builder, signature, values):
        if _panel_rows(signature.args[0]):
            _emitter(builder, signature, 0, VECTORS).unpack(*values)
        return context.get_dummy_value()

    return types.void(weights, *[types.intp] * 4), codegen


_PANEL_UNITS = {"float32": 4, "int8": 16}
"""Units of a panel: some 18 KB, so that it fits into the first-level cache with the inputs of six rows."""


def _panel_rows(kind: PackedType) -> int:
    """Number of input rows from which on panels are faster; 0 if they never are.

    Panels are for the 16 registers of AVX2, where tiles have few rows. They pay soon for codes that have to be put
    together; others take little time to unpack again, and none to speak of if inputs have 8 bits.
    """
    if LANES != 8 or kind.format.is_plain:
        return 0
    if kind.activations == "int8":
        return 7 if kind.format.extra else 0
    return 5 if kind.format.extra else 25


def _constant(number_of: Callable[[PackedType], int]) -> Callable[..., Any]:
    """A function of packed weights whose value is known when it is compiled."""

    @intrinsic
    def number(typing_context, weights):
        def codegen(context, builder, signature, values):
            return INDEX(number_of(signature.args[0]))

        return types.intp(weights), codegen

    return number


panel_rows = _constant(_panel_rows)
"""Number of input rows from which on panels are faster; 0 if they never are."""

panel_units = _constant(lambda kind: _PANEL_UNITS[kind.activations])
"""Units of a panel."""

panel_bytes = _constant(lambda kind: _PANEL_UNITS[kind.activations] * kind.format.panel(kind.activations).unit_bytes)
"""Bytes of a panel."""


def _emitter(builder: Any, signature: Any, rows: int, vectors: int) -> Emitter:
    """The emitter for the weights that are a function's first argument."""
    kind = signature.args[0]
    emitter = Int8Emitter if kind.activations == "int8" else Emitter
    return emitter(builder, kind.format, rows, vectors)
