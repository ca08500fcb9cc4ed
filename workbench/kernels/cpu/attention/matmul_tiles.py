"""Register tiles of a matrix product, emitted as vector instructions.

The sums of a tile stay in registers over the whole depth of the product. This makes a matrix product fast, and a loop
vectoriser does not do it. A matrix lies in a float32 array, b also in a narrower one; ``x_at`` is the index of its
first element, ``x_row`` and ``x_col`` are the distances between its rows and between its columns, in elements.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from workbench.kernels.cpu.attention.layout import LOCKSTEP
from workbench.kernels.cpu.attention.simd import (
    INDEX,
    LANES,
    VECTOR,
    element_pointer,
    load_vector,
    loop,
    multiply_add,
    prefetch_elements,
    splat_scalar,
    store_vector,
    sum_lanes,
    sums_of_four,
    sums_of_two,
)


def matmul_tile(rows: int, vectors: int, accumulate: bool) -> Callable[..., None]:
    """A function ``c = a @ b`` (or ``c += a @ b``) for a tile of ``rows`` x ``vectors * LANES`` elements.

    Its arguments are ``(c, c_at, c_row, a, a_at, a_row, a_col, b, b_at, b_row, depth)``: c is [rows, vectors *
    LANES], a is [rows, depth], b is [depth, vectors * LANES]; the columns of b and c are adjacent elements.
    """

    def codegen(context, builder, signature, values):
        c, c_at, c_row, a, a_at, a_row, a_col, b, b_at, b_row, depth = values
        c_first = element_pointer(context, builder, signature.args[0], c, c_at)
        a_first = element_pointer(context, builder, signature.args[3], a, a_at)
        b_first, b_type = element_pointer(context, builder, signature.args[7], b, b_at), signature.args[7].dtype
        places = [
            builder.gep(c_first, [builder.add(builder.mul(c_row, INDEX(row)), INDEX(vector * LANES))])
            for row in range(rows)
            for vector in range(vectors)
        ]

        def step(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            b_offset, a_offset = builder.mul(k, b_row), builder.mul(k, a_col)
            factors = []
            for row in range(rows):
                a_place = builder.gep(a_first, [builder.add(a_offset, builder.mul(a_row, INDEX(row)))])
                factors.append(splat_scalar(builder, builder.load(a_place)))
            updated = list(sums)
            for vector in range(vectors):
                b_place = builder.gep(b_first, [builder.add(b_offset, INDEX(vector * LANES))])
                b_vector = load_vector(builder, b_place, b_type)
                for row, factor in enumerate(factors):
                    at = row * vectors + vector
                    updated[at] = multiply_add(builder, factor, b_vector, sums[at])
            return updated

        zero = ir.Constant(VECTOR, [0.0] * LANES)
        for value, place in zip(loop(builder, depth, step, [zero] * len(places)), places):
            # Added last, so that a short sum added to a long one is rounded once instead of at every step.
            total = builder.fadd(load_vector(builder, place), value) if accumulate else value
            store_vector(builder, total, place)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, c, c_at, c_row, a, a_at, a_row, a_col, b, b_at, b_row, depth):
        at = types.intp
        return types.void(c, at, at, a, at, at, at, b, at, at, at), codegen

    return tile


def dot_tile(rows: int, keys: int) -> Callable[..., None]:
    """A function ``c = a @ b.T`` for a few rows, with the depth of the product along the lanes.

    Its arguments are ``(c, c_at, c_row, a, a_at, a_row, b, places, first, step, offset, vectors)``: a is [rows,
    vectors * LANES] with adjacent columns. Row ``key`` of b begins at element ``places[first + key * step] + offset``,
    and its product with a row of a is written to element ``c_at + row * c_row + key * step``. Each vector of b is
    loaded, and widened, once for all rows. ``keys`` is 1 or 4, whose sums are added together.
    """

    def codegen(context, builder, signature, values):
        c, c_at, c_row, a, a_at, a_row, b, places, first, distance, offset, vectors = values
        c_first = element_pointer(context, builder, signature.args[0], c, c_at)
        a_first = element_pointer(context, builder, signature.args[3], a, a_at)
        b_first, b_type = element_pointer(context, builder, signature.args[6], b, offset), signature.args[6].dtype
        places_first = element_pointer(context, builder, signature.args[7], places, first)
        b_rows = [
            builder.gep(b_first, [builder.load(builder.gep(places_first, [builder.mul(distance, INDEX(key))]))])
            for key in range(keys)
        ]

        def products_of(b_rows: list[ir.Value]) -> list[list[ir.Value]]:
            """Products of each row of a with some rows of b, before their lanes are added."""

            def step(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                at = builder.mul(k, INDEX(LANES))
                a_vectors = [
                    load_vector(builder, builder.gep(a_first, [builder.add(at, builder.mul(a_row, INDEX(row)))]))
                    for row in range(rows)
                ]
                updated = list(sums)
                for key, b_row in enumerate(b_rows):
                    b_vector = load_vector(builder, builder.gep(b_row, [at]), b_type)
                    for row in range(rows):
                        place = row * len(b_rows) + key
                        updated[place] = multiply_add(builder, a_vectors[row], b_vector, sums[place])
                return updated

            zero = ir.Constant(VECTOR, [0.0] * LANES)
            products = loop(builder, vectors, step, [zero] * (rows * len(b_rows)))
            return [products[row * len(b_rows) : (row + 1) * len(b_rows)] for row in range(rows)]

        if keys == 1:
            totals = [[sum_lanes(builder, *own)] for own in products_of(b_rows)]
        else:
            pairs = []
            together = 2 if LANES == 8 and b_type == types.int8 else keys  # LLVM spills 12 sums of codes
            for key in range(0, keys, together):
                products = products_of(b_rows[key : key + together])
                for at in range(0, together, 2):
                    pairs.append([sums_of_two(builder, *own[at : at + 2]) for own in products])
            fours = [sums_of_four(builder, *own) for own in zip(*pairs)]
            lanes = [INDEX(key) for key in range(keys)]
            totals = [[builder.extract_element(own, lane) for lane in lanes] for own in fours]
        for row, sums in enumerate(totals):
            for key, total in enumerate(sums):
                at = builder.add(builder.mul(c_row, INDEX(row)), builder.mul(distance, INDEX(key)))
                builder.store(total, builder.gep(c_first, [at]))
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, c, c_at, c_row, a, a_at, a_row, b, places, first, step, offset, vectors):
        at = types.intp
        return types.void(c, at, at, a, at, at, b, places, at, at, at, at), codegen

    return tile


def weighted_tile(rows: int, vectors: int) -> Callable[..., None]:
    """A function ``c += a @ b`` for a tile of ``rows`` x ``vectors * LANES`` elements, whose rows of b lie anywhere.

    Its arguments are ``(c, c_at, c_row, a, a_at, a_row, b, places, first, offset, depth, later, later_first)``: c is
    [rows, vectors * LANES] and a is [rows, depth], both with adjacent columns. Row ``key`` of b begins at element
    ``places[first + key] + offset``. With it, as many elements are prefetched of the array ``later``, from
    ``places[later_first + LOCKSTEP * (key % 4) + key // 4] + offset`` on.
    """

    def codegen(context, builder, signature, values):
        c, c_at, c_row, a, a_at, a_row, b, places, first, offset, depth, later, later_first = values
        c_first = element_pointer(context, builder, signature.args[0], c, c_at)
        a_first = element_pointer(context, builder, signature.args[3], a, a_at)
        b_first = element_pointer(context, builder, signature.args[6], b, offset)
        later_at = element_pointer(context, builder, signature.args[11], later, offset)
        places_first, later_places = (
            element_pointer(context, builder, signature.args[7], places, at) for at in (first, later_first)
        )
        b_type = signature.args[6].dtype
        cells = [
            builder.gep(c_first, [builder.add(builder.mul(c_row, INDEX(row)), INDEX(vector * LANES))])
            for row in range(rows)
            for vector in range(vectors)
        ]

        def step(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            run = builder.and_(k, INDEX(3))
            coming = builder.add(builder.mul(run, INDEX(LOCKSTEP)), builder.lshr(k, INDEX(2)))
            later_row = builder.gep(later_at, [builder.load(builder.gep(later_places, [coming]))])
            prefetch_elements(builder, later_row, vectors * LANES, b_type.bitwidth // 8)
            b_row = builder.gep(b_first, [builder.load(builder.gep(places_first, [k]))])
            factors = []
            for row in range(rows):
                a_place = builder.gep(a_first, [builder.add(k, builder.mul(a_row, INDEX(row)))])
                factors.append(splat_scalar(builder, builder.load(a_place)))
            updated = list(sums)
            for vector in range(vectors):
                place = builder.gep(b_row, [INDEX(vector * LANES)])
                b_vector = load_vector(builder, place, b_type)
                for row, factor in enumerate(factors):
                    at = row * vectors + vector
                    updated[at] = multiply_add(builder, factor, b_vector, sums[at])
            return updated

        zero = ir.Constant(VECTOR, [0.0] * LANES)
        for value, cell in zip(loop(builder, depth, step, [zero] * len(cells)), cells):
            # Added last, so that a short sum added to a long one is rounded once instead of at every step.
            store_vector(builder, builder.fadd(load_vector(builder, cell), value), cell)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, c, c_at, c_row, a, a_at, a_row, b, places, first, offset, depth, later, later_first):
        at = types.intp
        return types.void(c, at, at, a, at, at, b, places, at, at, at, later, at), codegen

    return tile
