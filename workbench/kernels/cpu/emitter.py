"""The instructions of a register tile: a few input rows times one or two pairs of vectors of outputs.

Weights are unpacked in registers, for the rows of one tile, or once for many rows into a panel in memory, whose tiles
add to the results so far. Sums are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from workbench.kernels.cpu.attention.simd import (
    FLOAT,
    INDEX,
    LANES,
    VECTOR,
    loop,
    multiply_add,
    splat_scalar,
)
from workbench.kernels.cpu.formats import SUPER, TILE, UNIT, VECTORS, Activations, Format
from workbench.kernels.cpu.lookup import entries

BYTE, WORD = ir.IntType(8), ir.IntType(32)
WORDS = ir.VectorType(WORD, LANES)
_HALF, _HALF_FLOAT = ir.IntType(16), ir.HalfType()


class Emitter:
    """Emits the instructions of one tile, for float32 inputs.

    Args:
        builder: Builder of the function.
        form: The format of the weights.
        rows: Input rows of the tile.
        vectors: Vectors of outputs of the tile.
    """

    input_bytes = 4 * UNIT
    """Bytes of a unit of a prepared input row."""

    middle = 0
    """Subtracted from the codes of weights before they are multiplied."""

    activations: Activations = "float32"

    def __init__(self, builder: ir.IRBuilder, form: Format, rows: int, vectors: int) -> None:
        self.builder, self.format, self.rows, self.vectors = builder, form, rows, vectors
        self.first, self._on_panel = INDEX(0), False
        self.zero = INDEX(0)  # in a product: a 0 that LLVM does not know

    def panel_product(self, panel, first, first_unit, num_units, x, x_row, sums, sums_row, y, y_row) -> None:
        """Emit the tile for a panel; see `workbench.kernels.cpu.tiles.panel_tile`."""
        builder = self.builder
        x = self._plus(x, builder.mul(first_unit, INDEX(self.input_bytes)))
        sums = self._plus(sums, builder.mul(first_unit, INDEX(4 * self.format.sets)))
        self.format, self._on_panel = self.format.panel(self.activations), True
        self.product(panel, first, num_units, x, x_row, sums, sums_row, y, y_row)

    def unpack(self, weights, num_units, first_unit, count, panel) -> None:
        """Emit the writing of a panel; see `workbench.kernels.cpu.tiles.unpack`."""
        builder, form = self.builder, self.format
        target = form.panel(self.activations)
        units = self._first_unit_at(weights, num_units)

        def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            unit = self._plus(first_unit, index)
            at = self._plus(units, builder.mul(unit, INDEX(form.unit_bytes)))
            out = self._plus(panel, builder.mul(index, INDEX(target.unit_bytes)))
            super_at = self._super_at(weights, unit)
            self._prefetch(at)

            def unpack_vector(vector: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                self.first = vector
                numbers = self._unpacked(at)
                for minimum in (False, True)[: 1 + form.has_minima]:
                    numbers += [self._scale(at, super_at, number, 0, minimum=minimum) for number in range(form.sets)]
                for row, number in enumerate(numbers):
                    place = self._lane_address(self._plus(out, INDEX(4 * TILE * row)), 4, 0)
                    builder.store(number, builder.inttoptr(place, number.type.as_pointer()), align=4 * LANES)
                return []

            return loop(builder, INDEX(VECTORS), unpack_vector, [])

        loop(builder, count, step, [])

    def _unpacked(self, at: ir.Value) -> list[ir.Value]:
        """The numbers of a unit's columns that are multiplied, as they lie in a panel."""
        per_word = self._floats_per_word
        columns = [self._columns(at, INDEX(word), 0) for word in range(UNIT // per_word)]
        return [column(index) for column in columns for index in range(per_word)]

    def product(self, weights, first, num_units, x, x_row, sums, sums_row, y, y_row) -> None:
        """Emit the tile; the arguments are those of `workbench.kernels.cpu.tiles.product_tile`."""
        builder, form = self.builder, self.format
        # Registers on the stack must not lie across cache lines. (llvmlite writes the alignment beside others only.)
        builder.function.attributes.alignstack = 64
        builder.function.attributes.add("nounwind")
        units = self._first_unit_at(weights, num_units)
        self.first, self.zero = first, builder.lshr(num_units, INDEX(62))
        x_rows = [self._plus(x, builder.mul(x_row, INDEX(4 * row))) for row in range(self.rows)]
        sum_rows = [self._plus(sums, builder.mul(sums_row, INDEX(4 * row))) for row in range(self.rows)]
        outs = [
            self._vector_pointer(self._lane_address(self._plus(y, builder.mul(y_row, INDEX(4 * row))), 4, vector))
            for row in range(self.rows)
            for vector in range(self.vectors)
        ]
        totals = outs if self._on_panel else [cgutils.alloca_once(builder, VECTOR) for _ in outs]
        if totals is not outs:
            for total in totals:
                builder.store(ir.Constant(VECTOR, [0.0] * LANES), total)

        def step(unit: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            at = builder.add(units, builder.mul(unit, INDEX(form.unit_bytes)))
            if not self._on_panel:
                self._prefetch(at)
            columns = builder.mul(unit, INDEX(self.input_bytes))
            inputs = [self._plus(row, columns) for row in x_rows]
            if form.is_plain:
                sums = self._add_columns(at, range(UNIT), inputs, [builder.load(total) for total in totals])
                for total, sum_so_far in zip(totals, sums):
                    builder.store(sum_so_far, total)
                return []
            super_at = self._super_at(weights, unit)
            for number in range(form.sets):
                products = self._group_products(at, number, inputs)
                place = self._plus(builder.mul(unit, INDEX(4 * form.sets)), INDEX(4 * number))
                group_sums = [
                    splat_scalar(builder, builder.load(self._float_pointer(self._plus(row, place)))) for row in sum_rows
                ]
                self._add_scaled(at, super_at, number, products, group_sums, totals)
            return []

        loop(builder, num_units, step, [])
        if totals is not outs:
            for total, out in zip(totals, outs):
                builder.store(builder.load(total), out, align=4)

    @property
    def ahead(self) -> int:
        """Bytes between the weights in use and those being fetched; 0 leaves all fetching to the processor.

        A processor with AVX-512 (Zen 4) fetches a stream by itself: a row is up to 12% faster without instructions,
        4 rows, with more work between two lines, up to 20% slower.
        """
        return 0 if LANES == 16 and self.rows == 1 else 4096

    # -- columns -------------------------------------------------------------------------------------------------

    def _group_products(self, at: ir.Value, number: int, inputs: list[ir.Value]) -> list[ir.Value]:
        """The sums of one of a unit's groups, of each row and vector, before they are scaled."""
        columns = range(number * self.format.group, (number + 1) * self.format.group)
        return self._add_columns(at, columns, inputs, [ir.Constant(VECTOR, [0.0] * LANES)] * (self.rows * self.vectors))

    def _add_columns(
        self, at: ir.Value, columns: range, inputs: list[ir.Value], sums: list[ir.Value]
    ) -> list[ir.Value]:
        """Add the products of some columns of a unit; nothing is scaled. A loop over words keeps the code short."""
        builder, per_word = self.builder, self._floats_per_word
        first = columns.start // per_word

        def step(number: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            word = builder.add(number, INDEX(first))
            pointers = [builder.gep(self._float_pointer(row), [builder.mul(word, INDEX(per_word))]) for row in inputs]
            columns_of_vectors = [self._columns(at, word, vector) for vector in range(self.vectors)]
            for index in range(per_word):
                numbers = [column(index) for column in columns_of_vectors]
                for row, pointer in enumerate(pointers):
                    factor = splat_scalar(builder, builder.load(builder.gep(pointer, [INDEX(index)])))
                    for vector, number in enumerate(numbers):
                        place = row * self.vectors + vector
                        sums[place] = multiply_add(builder, number, factor, sums[place])
            return sums

        return loop(builder, INDEX(len(columns) // per_word), step, sums)

    @property
    def _floats_per_word(self) -> int:
        """Columns that are read together."""
        return 8 if self.format.bits >= 16 else UNIT // self.format.base

    def _columns(self, at: ir.Value, word: ir.Value, vector: int) -> Callable[[int], ir.Value]:
        """Reads one of a word's columns as float32, multiplied by the power of two that `factors` undoes."""
        if self.format.bits >= 16:
            return self._floats_of_columns(at, word, vector)
        if self.format.extra or self.format.table:
            return self._bytes_of_word(at, word, vector)
        return self._codes_of_word(at, word, vector)

    def _floats_of_columns(self, at: ir.Value, word: ir.Value, vector: int) -> Callable[[int], ir.Value]:
        """Reads floating-point numbers, see `_columns`."""
        size = self.format.bits // 8
        first = self._plus(at, self.builder.mul(word, INDEX(self._floats_per_word * TILE * size)))
        kind = "float32" if self.format.bits == 32 else self.format.scales
        return lambda index: self._floats(
            self._lane_address(self._plus(first, INDEX(index * TILE * size)), size, vector), kind
        )

    def _codes_of_word(self, at: ir.Value, word: ir.Value, vector: int) -> Callable[[int], ir.Value]:
        """Reads codes that lie in base words alone, see `_columns`."""
        base, builder, low = self.format.base, self.builder, self._word(at, word, vector)

        def column(index: int) -> ir.Value:
            if index == UNIT // base - 1:
                return builder.sitofp(builder.lshr(low, each(32 - base)), VECTOR)
            return builder.sitofp(builder.and_(low, each(((1 << base) - 1) << base * index)), VECTOR)

        return column

    def _bytes_of_word(self, at: ir.Value, word: ir.Value, vector: int) -> Callable[[int], ir.Value]:
        """Reads codes that have to be put together, or name entries of a table, see `_columns`."""
        builder, parts = self.builder, self.format.parts
        bytes_of_parts = [self._four_codes(at, word, part, vector) for part in range(parts)]

        def column(index: int) -> ir.Value:
            byte, four = index // parts, bytes_of_parts[index % parts]
            code = builder.lshr(four, each(24)) if byte == 3 else builder.and_(four, each(0xFF << 8 * byte))
            return builder.sitofp(code, VECTOR)

        return column

    def _four_codes(self, at: ir.Value, word: ir.Value, part: int, vector: int) -> ir.Value:
        """The codes of four columns, or the entries that they name, each in a byte: a part of a base word."""
        builder, form = self.builder, self.format
        codes = self._masked(self._word(at, word, vector), INDEX(part * form.base), form.base)
        if form.extra:
            sharing = form.base // form.extra  # base words whose extra bits lie in the same word
            extra = self._word(at, self._plus(builder.udiv(word, INDEX(sharing)), INDEX(form.base)), vector)
            shift = builder.mul(builder.urem(word, INDEX(sharing)), INDEX(form.extra))
            high = self._masked(extra, self._plus(shift, INDEX(part * form.base)), form.extra)
            codes = builder.or_(codes, builder.shl(high, each(form.base)))
        return entries(builder, form.table, codes) if form.table else codes

    def _masked(self, word: ir.Value, shift: ir.Value, bits: int) -> ir.Value:
        """The low bits of each byte after a shift to the right."""
        moved = self.builder.lshr(word, splat_integer(self.builder, self.builder.trunc(shift, WORD)))
        return self.builder.and_(moved, each(((1 << bits) - 1) * 0x01010101))

    def _word(self, at: ir.Value, word: ir.Value, vector: int) -> ir.Value:
        return self._load(self._lane_address(self._plus(at, self.builder.mul(word, INDEX(TILE * 4))), 4, vector), WORDS)

    # -- scales --------------------------------------------------------------------------------------------------

    def _add_scaled(self, at, super_at, number: int, products, group_sums, totals) -> None:
        """Add the products of a group to the totals, scaled and with their minimum or offset.

        Totals are cells: registers, or with a panel the outputs, each read and written by itself. With the results of
        both kinds in registers, LLVM moves the totals in a row, and 12 stores in a row cost AMD's Zen 3 24 cycles.
        """
        form, builder = self.format, self.builder
        offset = ir.Constant(VECTOR, [float(self.middle - (form.offset or 0))] * LANES)
        for vector in range(self.vectors):
            scale = self._scale(at, super_at, number, vector, minimum=False)
            minimum = self._scale(at, super_at, number, vector, minimum=True) if form.has_minima else None
            if minimum is not None and self.middle:
                minimum = multiply_add(builder, ir.Constant(VECTOR, [float(self.middle)] * LANES), scale, minimum)
            for row, group_sum in enumerate(group_sums):
                product, total = products[row * self.vectors + vector], totals[row * self.vectors + vector]
                if minimum is None and self.middle != form.offset:
                    product = multiply_add(builder, offset, group_sum, product)
                result = multiply_add(builder, scale, product, builder.load(total, align=4))
                if minimum is not None:
                    result = multiply_add(builder, minimum, group_sum, result)
                builder.store(result, total, align=4)

    def _scale(self, at, super_at, number: int, vector: int, *, minimum: bool) -> ir.Value:
        form, builder = self.format, self.builder
        offset = form.word_bytes + (number + form.sets * minimum) * TILE * form.scale_bytes
        place = self._lane_address(self._plus(at, INDEX(offset)), form.scale_bytes, vector)
        if form.scales != "codes":
            return self._floats(place, form.scales)
        codes = self._load(place, ir.VectorType(BYTE, LANES))
        wide = builder.sext(codes, WORDS) if form.signed else builder.zext(codes, WORDS)
        shared = self._lane_address(self._plus(super_at, INDEX(2 * TILE * minimum)), 2, vector)
        return builder.fmul(builder.sitofp(wide, VECTOR), self._floats(shared, "float16"))

    def _floats(self, place: ir.Value, kind: str) -> ir.Value:
        """LANES numbers of a floating-point type as float32."""
        builder = self.builder
        if kind == "float32":
            return self._load(place, VECTOR)
        if kind == "float16":
            return builder.fpext(self._load(place, ir.VectorType(_HALF_FLOAT, LANES)), VECTOR)
        bits = builder.zext(self._load(place, ir.VectorType(_HALF, LANES)), WORDS)
        return builder.bitcast(builder.shl(bits, each(16)), VECTOR)

    # -- addresses -----------------------------------------------------------------------------------------------

    def _first_unit_at(self, weights: ir.Value, num_units: ir.Value) -> ir.Value:
        """Address of a tile's units, behind its super-scales."""
        builder = self.builder
        supers = builder.udiv(builder.add(num_units, INDEX(SUPER - 1)), INDEX(SUPER))
        return self._plus(weights, builder.mul(supers, INDEX(self.format.super_bytes)))

    def _super_at(self, weights: ir.Value, unit: ir.Value) -> ir.Value:
        """Address of a unit's super-scales."""
        builder = self.builder
        return self._plus(weights, builder.mul(builder.udiv(unit, INDEX(SUPER)), INDEX(self.format.super_bytes)))

    def _plus(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.add(a, b)

    def _lane_address(self, at: ir.Value, size: int, vector: int) -> ir.Value:
        """Address of a vector's lanes in a row of TILE elements of ``size`` bytes."""
        lanes = self._plus(self.builder.mul(self.first, INDEX(LANES * size)), INDEX(vector * LANES * size))
        return self._plus(at, lanes)

    def _float_pointer(self, address: ir.Value) -> ir.Value:
        return self.builder.inttoptr(address, FLOAT.as_pointer())

    def _vector_pointer(self, address: ir.Value) -> ir.Value:
        return self.builder.inttoptr(address, VECTOR.as_pointer())

    def _load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def _prefetch(self, at: ir.Value) -> None:
        if not self.ahead:
            return
        builder = self.builder
        pointer = BYTE.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        for line in range(0, self.format.unit_bytes, 64):
            place = builder.inttoptr(self._plus(at, INDEX(self.ahead + line)), pointer)
            builder.call(function, [place, WORD(0), WORD(3), WORD(1)])  # to read, nearest level, data


def splat_integer(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """Copy a 32-bit integer to all lanes."""
    undefined = ir.Constant(WORDS, ir.Undefined)
    first = builder.insert_element(undefined, number, INDEX(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(WORDS, [0] * LANES))


def each(number: int) -> ir.Constant:
    """The same 32-bit number in every lane."""
    return ir.Constant(WORDS, [number] * LANES)
