"""The instructions of a register tile: a few input rows times one or two pairs of vectors of outputs."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from workbench.attention.cpu.simd import FLOAT, INDEX, LANES, VECTOR, loop, multiply_add, splat_scalar, store_vector
from workbench.models.cpu.formats import SUPER, TILE, UNIT, Format
from workbench.models.cpu.lookup import entries

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

    ahead = 4096
    """Bytes between the weights in use and those being fetched."""

    def __init__(self, builder: ir.IRBuilder, form: Format, rows: int, vectors: int) -> None:
        self.builder, self.format, self.rows, self.vectors = builder, form, rows, vectors

    def product(self, weights, first, num_units, x, x_row, sums, sums_row, y, y_row) -> None:
        """Emit the tile; the arguments are those of `workbench.models.cpu.tiles.product_tile`."""
        builder, form = self.builder, self.format
        # Registers on the stack must not lie across cache lines. (llvmlite writes the alignment beside others only.)
        builder.function.attributes.alignstack = 64
        builder.function.attributes.add("nounwind")
        supers = builder.udiv(builder.add(num_units, INDEX(SUPER - 1)), INDEX(SUPER))
        units = builder.add(weights, builder.mul(supers, INDEX(form.super_bytes)))
        self.first = first
        x_rows = [self._plus(x, builder.mul(x_row, INDEX(4 * row))) for row in range(self.rows)]
        sum_rows = [self._plus(sums, builder.mul(sums_row, INDEX(4 * row))) for row in range(self.rows)]
        zero = ir.Constant(VECTOR, [0.0] * LANES)

        def step(unit: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            at = builder.add(units, builder.mul(unit, INDEX(form.unit_bytes)))
            self._prefetch(at)
            columns = builder.mul(unit, INDEX(self.input_bytes))
            inputs = [self._plus(row, columns) for row in x_rows]
            if form.is_plain:
                return self._add_columns(at, range(UNIT), inputs, totals)
            super_at = builder.add(weights, builder.mul(builder.udiv(unit, INDEX(SUPER)), INDEX(form.super_bytes)))
            for number in range(form.sets):
                products = self._group_products(at, number, inputs)
                place = self._plus(builder.mul(unit, INDEX(4 * form.sets)), INDEX(4 * number))
                group_sums = [
                    splat_scalar(builder, builder.load(self._float_pointer(self._plus(row, place)))) for row in sum_rows
                ]
                totals = self._scaled(at, super_at, number, products, group_sums, totals)
            return totals

        totals = loop(builder, num_units, step, [zero] * (self.rows * self.vectors))
        for row in range(self.rows):
            out = self._plus(y, builder.mul(y_row, INDEX(4 * row)))
            for vector in range(self.vectors):
                place = self._lane_address(out, 4, vector)
                store_vector(builder, totals[row * self.vectors + vector], self._float_pointer(place))

    # -- columns -------------------------------------------------------------------------------------------------

    def _group_products(self, at: ir.Value, number: int, inputs: list[ir.Value]) -> list[ir.Value]:
        """The sums of one of a unit's groups, of each row and vector, before they are scaled."""
        columns = range(number * self.format.group, (number + 1) * self.format.group)
        return self._add_columns(at, columns, inputs, [ir.Constant(VECTOR, [0.0] * LANES)] * (self.rows * self.vectors))

    def _add_columns(
        self, at: ir.Value, columns: range, inputs: list[ir.Value], sums: list[ir.Value]
    ) -> list[ir.Value]:
        """Add the products of some columns of a unit; nothing is scaled. A loop over words keeps the code short."""
        builder, form = self.builder, self.format
        per_word = 8 if form.is_plain else UNIT // form.base
        first = columns.start // per_word

        def step(number: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            word = builder.add(number, INDEX(first))
            pointers = [builder.gep(self._float_pointer(row), [builder.mul(word, INDEX(per_word))]) for row in inputs]
            read = self._floats_of_columns if form.is_plain else self._codes_of_word
            columns_of_vectors = [read(at, word, per_word, vector) for vector in range(self.vectors)]
            for index in range(per_word):
                numbers = [column(index) for column in columns_of_vectors]
                for row, pointer in enumerate(pointers):
                    factor = splat_scalar(builder, builder.load(builder.gep(pointer, [INDEX(index)])))
                    for vector, number in enumerate(numbers):
                        place = row * self.vectors + vector
                        sums[place] = multiply_add(builder, number, factor, sums[place])
            return sums

        return loop(builder, INDEX(len(columns) // per_word), step, sums)

    def _floats_of_columns(self, at: ir.Value, word: ir.Value, per_word: int, vector: int) -> Callable[[int], ir.Value]:
        """Reads one of some columns of floating-point weights."""
        size = self.format.bits // 8
        first = self._plus(at, self.builder.mul(word, INDEX(per_word * TILE * size)))
        kind = "float32" if self.format.scales == "none" else self.format.scales
        return lambda index: self._floats(
            self._lane_address(self._plus(first, INDEX(index * TILE * size)), size, vector), kind
        )

    def _codes_of_word(self, at: ir.Value, word: ir.Value, per_word: int, vector: int) -> Callable[[int], ir.Value]:
        """Reads one of a word's columns as float32, multiplied by the power of two that `factors` undoes."""
        form, builder = self.format, self.builder
        low = self._word(at, word, vector)
        if form.table:
            return self._entries_of_word(low)
        moved = last_moved = low
        if form.extra:
            sharing = form.base // form.extra  # base words whose extra bits lie in the same word
            extra = self._word(at, self._plus(builder.udiv(word, INDEX(sharing)), INDEX(form.base)), vector)
            shift = builder.mul(builder.urem(word, INDEX(sharing)), INDEX(form.extra))
            amount = splat_integer(builder, builder.trunc(shift, WORD))
            moved = builder.shl(extra, builder.sub(each(form.base), amount))
            last_moved = builder.lshr(extra, builder.add(each(form.base * (per_word - 2)), amount))

        def column(index: int) -> ir.Value:
            place = form.base * index
            if index == per_word - 1:
                code, high, place = builder.lshr(low, each(32 - form.base)), last_moved, 0
            else:
                code, high = builder.and_(low, each(((1 << form.base) - 1) << place)), moved
            if form.extra:
                mask = ((1 << form.extra) - 1) << (place + form.base)
                code = builder.or_(code, builder.and_(high, each(mask)))
            return builder.sitofp(code, VECTOR)

        return column

    def _entries_of_word(self, codes: ir.Value) -> Callable[[int], ir.Value]:
        """Reads the table's entry of one of a word's columns, see `_codes_of_word`."""
        builder = self.builder
        halves = [
            entries(builder, self.format.table, builder.and_(builder.lshr(codes, each(shift)), each(0x0F0F0F0F)))
            for shift in (0, 4)
        ]

        def column(index: int) -> ir.Value:
            byte, half = index // 2, halves[index % 2]
            is_last = byte == 3
            number = builder.lshr(half, each(24)) if is_last else builder.and_(half, each(0xFF << 8 * byte))
            return builder.sitofp(number, VECTOR)

        return column

    def _word(self, at: ir.Value, word: ir.Value, vector: int) -> ir.Value:
        return self._load(self._lane_address(self._plus(at, self.builder.mul(word, INDEX(TILE * 4))), 4, vector), WORDS)

    # -- scales --------------------------------------------------------------------------------------------------

    def _scaled(self, at, super_at, number: int, products, group_sums, totals) -> list[ir.Value]:
        """Add the products of a group to the totals, scaled and with their minimum or offset."""
        form, builder = self.format, self.builder
        totals = list(totals)
        for vector in range(self.vectors):
            scale = self._scale(at, super_at, number, vector, minimum=False)
            minimum = self._scale(at, super_at, number, vector, minimum=True) if form.has_minima else None
            if minimum is not None and self.middle:
                minimum = multiply_add(builder, ir.Constant(VECTOR, [float(self.middle)] * LANES), scale, minimum)
            for row, group_sum in enumerate(group_sums):
                index = row * self.vectors + vector
                product = products[index]
                if minimum is None and self.middle != form.offset:
                    offset = ir.Constant(VECTOR, [float(self.middle - (form.offset or 0))] * LANES)
                    product = multiply_add(builder, offset, group_sum, product)
                total = multiply_add(builder, scale, product, totals[index])
                totals[index] = total if minimum is None else multiply_add(builder, minimum, group_sum, total)
        return totals

    def _scale(self, at, super_at, number: int, vector: int, *, minimum: bool) -> ir.Value:
        form, builder = self.format, self.builder
        size = {"float32": 4, "codes": 1}.get(form.scales, 2)
        offset = form.word_bytes + (number + form.sets * minimum) * TILE * size
        place = self._lane_address(self._plus(at, INDEX(offset)), size, vector)
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

    def _plus(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.add(a, b)

    def _lane_address(self, at: ir.Value, size: int, vector: int) -> ir.Value:
        """Address of a vector's lanes in a row of TILE elements of ``size`` bytes."""
        lanes = self._plus(self.builder.mul(self.first, INDEX(LANES * size)), INDEX(vector * LANES * size))
        return self._plus(at, lanes)

    def _float_pointer(self, address: ir.Value) -> ir.Value:
        return self.builder.inttoptr(address, FLOAT.as_pointer())

    def _load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def _prefetch(self, at: ir.Value) -> None:
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
