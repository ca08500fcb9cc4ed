"""Register tiles of a product with packed weights, emitted as vector instructions.

A tile multiplies a few input rows with one or two pairs of vectors of outputs. Weights are unpacked into registers,
once for all rows of the tile, and are never written to memory. The sums of a group of columns are taken before its
scale is applied. A row's arithmetic is the same in every tile, so its result does not depend on the number of rows
beside it.

Addresses are integers. That of packed weights has the type `PackedType`, which carries the format: numba compiles the
same function for each format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic, models, register_model

from workbench.attention.cpu.simd import INDEX
from workbench.models.cpu.emitter import Emitter
from workbench.models.cpu.formats import SUPER, Activations, Format
from workbench.models.cpu.int8_emitter import Int8Emitter


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
            emitter = Int8Emitter if signature.args[0].activations == "int8" else Emitter
            emitter(builder, signature.args[0].format, rows, vectors).product(*values)
            return context.get_dummy_value()

        return types.void(weights, *[types.intp] * 8), codegen

    return tile
