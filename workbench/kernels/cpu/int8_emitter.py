"""The instructions of a register tile for inputs of 8 bits.

Each 32 bits of a lane hold the codes of four columns of one output, and an instruction multiplies them with the input's
codes of the same columns and adds the four products. Processors with VNNI have one such instruction. With AVX2 or
AVX-512 alone, ``pmaddubsw`` adds pairs of products in 16 bits, and ``pmaddwd`` adds those in 32 bits: once per group of
codes of up to 5 bits, twice with 6, and after each multiplication of numbers of 8 bits. All sums of a group are
integers and exact; its scale and that of the input then follow in float32, as for float32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from numba.core import cgutils

from workbench.kernels.cpu.attention.processor import instruction_set
from workbench.kernels.cpu.attention.simd import INDEX, LANES, VECTOR, loop, splat_scalar
from workbench.kernels.cpu.emitter import BYTE, WORD, WORDS, Emitter, each, splat_integer
from workbench.kernels.cpu.formats import INT8_UNIT_BYTES, UNIT, Format
from workbench.kernels.cpu.int8_inputs import PART, SIGN_BIT, run_length

_BYTES = ir.VectorType(BYTE, 4 * LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_MANY_WORDS = 4

Step = Callable[[ir.Value, list[ir.Value]], list[ir.Value]]


class Int8Emitter(Emitter):
    """Emits the instructions of one tile, for inputs of 8 bits."""

    input_bytes = INT8_UNIT_BYTES
    activations = "int8"

    def __init__(self, builder: ir.IRBuilder, form: Format, rows: int, vectors: int) -> None:
        super().__init__(builder, form, rows, vectors)
        self.middle = 0 if instruction_set() == "VNNI" else form.middle

    @property
    def ahead(self) -> int:
        """See `Emitter.ahead`; with AVX-512, 1 and 4 rows are faster without by a fifth to two thirds."""
        return 0 if LANES == 16 else 8192  # a unit takes about half the time of one for float32

    def _group_products(self, at: ir.Value, number: int, inputs: list[ir.Value]) -> list[ir.Value]:
        builder = self.builder
        columns = range(number * self.format.group, (number + 1) * self.format.group)
        if instruction_set() == "VNNI":
            sums = self._summed_in_words(at, columns, inputs)
        elif self.middle == SIGN_BIT:
            sums = self._summed_with_signs(at, columns, inputs)
        else:
            sums = self._summed_in_halves(at, columns, inputs)
        products = []
        for row, input in enumerate(inputs):
            scale = builder.load(self._float_pointer(self._plus(input, INDEX(UNIT))))
            scales = splat_scalar(builder, scale)
            for total in sums[row * self.vectors : (row + 1) * self.vectors]:
                products.append(builder.fmul(builder.sitofp(total, VECTOR), scales))
        return products

    def _summed_in_words(self, at: ir.Value, columns: range, inputs: list[ir.Value]) -> list[ir.Value]:
        """The sums of a group, added in 32 bits at once."""
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"

        def add(total: ir.Value, codes: ir.Value, factors: ir.Value) -> ir.Value:
            return self._call(name, WORDS, total, codes, factors)

        sums = [each(0)] * (self.rows * self.vectors)
        for word in range(columns.start // self._per_word, columns.stop // self._per_word):
            sums = self._add_word(at, inputs, add, INDEX(word), sums)
        return sums

    def _summed_in_halves(self, at: ir.Value, columns: range, inputs: list[ir.Value]) -> list[ir.Value]:
        """The sums of a group, added in 16 bits as long as they fit."""
        builder = self.builder

        def add(half: ir.Value, codes: ir.Value, factors: ir.Value) -> ir.Value:
            return builder.add(half, self._multiply_bytes(codes, factors))

        length = run_length(self.middle, self.format.group)
        sums: list[ir.Value] = []
        for start in range(columns.start, columns.stop, length):
            run = range(start, start + length)
            halves = [builder.bitcast(begin, _HALVES) for begin in self._starts(inputs, run)]
            halves = self._for_each_word(run, partial(self._add_word, at, inputs, add), halves)
            words = [self._added_pairs(half) for half in halves]
            sums = [builder.add(a, b) for a, b in zip(sums, words)] if sums else words
        return sums

    def _summed_with_signs(self, at: ir.Value, columns: range, inputs: list[ir.Value]) -> list[ir.Value]:
        """The sums of a group of numbers of 8 bits: magnitudes of weights times inputs with the signs of the weights.

        Two products of 128 and 127 are the largest that fit into 16 bits.
        """
        builder = self.builder

        def add(total: ir.Value, codes: ir.Value, factors: ir.Value) -> ir.Value:
            weights = builder.xor(codes, ir.Constant(_BYTES, [-SIGN_BIT] * 4 * LANES))
            magnitudes = self._call(f"llvm.abs.v{4 * LANES}i8", _BYTES, weights, ir.Constant(ir.IntType(1), 0))
            products = self._multiply_bytes(magnitudes, self._with_signs(factors, weights))
            return builder.add(total, self._added_pairs(products))

        zeros = [each(0)] * (self.rows * self.vectors)
        return self._for_each_word(columns, partial(self._add_word, at, inputs, add), zeros)

    def _starts(self, inputs: list[ir.Value], run: range) -> list[ir.Value]:
        """First summands of a run, of each row and vector."""
        place = INDEX(UNIT + 4 + 4 * (run.start // PART))
        starts = [splat_integer(self.builder, self._load(self._plus(input, place), WORD)) for input in inputs]
        return [start for start in starts for _ in range(self.vectors)]

    def _multiply_bytes(self, codes: ir.Value, factors: ir.Value) -> ir.Value:
        """Products of unsigned and signed bytes, two of them added in 16 bits."""
        name = "llvm.x86.avx512.pmaddubs.w.512" if LANES == 16 else "llvm.x86.avx2.pmadd.ub.sw"
        return self._call(name, _HALVES, codes, factors)

    def _added_pairs(self, halves: ir.Value) -> ir.Value:
        """Two neighbours of 16 bits, added in 32 bits."""
        name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
        return self._call(name, WORDS, halves, ir.Constant(_HALVES, [1] * (2 * LANES)))

    def _with_signs(self, factors: ir.Value, weights: ir.Value) -> ir.Value:
        """Inputs, negated where the weight is negative."""
        if LANES == 8:
            return self._call("llvm.x86.avx2.psign.b", _BYTES, factors, weights)
        negative = self.builder.ashr(weights, ir.Constant(_BYTES, [7] * 4 * LANES))
        return self.builder.sub(self.builder.xor(factors, negative), negative)

    def _add_word(
        self,
        at: ir.Value,
        inputs: list[ir.Value],
        add: Callable[[ir.Value, ir.Value, ir.Value], ir.Value],
        word: ir.Value,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """``sums[i] = add(sums[i], codes, inputs)`` for the codes of a base word."""
        sums = list(sums)
        for part in range(self.format.parts):
            codes = [self._bytes(self._four_codes(at, word, part, vector)) for vector in range(self.vectors)]
            for row, input in enumerate(inputs):
                factors = self._four_inputs(input, word, part)
                for vector, code in enumerate(codes):
                    index = row * self.vectors + vector
                    sums[index] = add(sums[index], code, factors)
        return sums

    @property
    def _per_word(self) -> int:
        return UNIT // self.format.base

    def _for_each_word(self, run: range, step: Step, values: list[ir.Value]) -> list[ir.Value]:
        """``values = step(word, values)`` for the base words of a run.

        With the 16 registers of AVX2, many words are a loop whose length LLVM does not know. It would unroll the loop,
        load the inputs of all words first, and move sums to the stack and back. (Hidden by inline assembly instead, a
        tile of 3 rows of Q8_0 was compiled to wrong code for processors such as Zen 1 and Haswell.)
        """
        first, count = run.start // self._per_word, len(run) // self._per_word
        if LANES == 8 and count >= _MANY_WORDS and not self.format.extra:
            hidden = self._plus(INDEX(count), self.zero)
            return loop(self.builder, hidden, lambda word, sums: step(self._plus(word, INDEX(first)), sums), values)
        for word in range(first, first + count):
            values = step(INDEX(word), values)
        return values

    def _unpacked(self, at: ir.Value) -> list[ir.Value]:
        words = range(self.format.base)
        return [self._four_codes(at, INDEX(word), part, 0) for word in words for part in range(self.format.parts)]

    def _four_inputs(self, input: ir.Value, word: ir.Value, part: int) -> ir.Value:
        """The input's codes of the same columns, in every lane."""
        place = self._plus(self.builder.mul(word, INDEX(self._per_word)), INDEX(4 * part))
        return self._bytes(splat_integer(self.builder, self._load(self._plus(input, place), WORD)))

    def _bytes(self, words: ir.Value) -> ir.Value:
        return self.builder.bitcast(words, _BYTES)

    def _call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        function_type = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments)
