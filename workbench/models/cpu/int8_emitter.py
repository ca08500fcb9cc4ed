"""The instructions of a register tile for inputs of 8 bits.

Each 32 bits of a lane hold the codes of four columns of one output, and an instruction multiplies them with the input's
codes of the same columns and adds the four products. Processors with VNNI have one such instruction. With AVX2 or
AVX-512 alone, ``pmaddubsw`` adds pairs of products in 16 bits, which overflow when they are too many, and ``pmaddwd``
adds those in 32 bits. All sums of a group are integers and exact; its scale and that of the input then follow in
float32, as for float32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from llvmlite import ir
from numba.core import cgutils

from workbench.attention.cpu.simd import INDEX, LANES, VECTOR, cpu_features, loop, splat_scalar
from workbench.models.cpu.emitter import BYTE, WORD, WORDS, Emitter, each, splat_integer
from workbench.models.cpu.formats import INT8_UNIT_BYTES, UNIT
from workbench.models.cpu.lookup import entries

_BYTES = ir.VectorType(BYTE, 4 * LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_LARGEST_PAIR = 2 * 127
"""Largest sum of two products of a code 1 with codes of inputs."""
_LARGEST_SUM = 32767
_MANY_WORDS = 4

Step = Callable[[ir.Value, list[ir.Value]], list[ir.Value]]


def instruction_set() -> str:
    """The instructions that multiply bytes: "VNNI", "AVX-512", "AVX2", or "" for none that is known."""
    features = cpu_features()
    if LANES == 16:
        return "VNNI" if "avx512vnni" in features else "AVX-512" if "avx512bw" in features else ""
    if LANES == 8:
        return "VNNI" if "avxvnni" in features else "AVX2"
    return ""


class Int8Emitter(Emitter):
    """Emits the instructions of one tile, for inputs of 8 bits."""

    input_bytes = INT8_UNIT_BYTES
    ahead = 2 * Emitter.ahead  # a unit takes about half the time

    def _group_products(self, at: ir.Value, number: int, inputs: list[ir.Value]) -> list[ir.Value]:
        builder = self.builder
        if instruction_set() == "VNNI":
            sums = self._added_in_words(at, number, inputs)
        else:
            sums = self._added_in_halves(at, number, inputs)
        products = []
        for row, input in enumerate(inputs):
            scale = builder.load(self._float_pointer(self._plus(input, ir.Constant(input.type, UNIT))))
            scales = splat_scalar(builder, scale)
            for total in sums[row * self.vectors : (row + 1) * self.vectors]:
                products.append(builder.fmul(builder.sitofp(total, VECTOR), scales))
        return products

    def _added_in_words(self, at: ir.Value, number: int, inputs: list[ir.Value]) -> list[ir.Value]:
        """The sums of a group, added in 32 bits at once."""
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"

        def add(total: ir.Value, codes: ir.Value, factors: ir.Value) -> ir.Value:
            return self._call(name, WORDS, total, codes, factors)

        sums = [each(0)] * (self.rows * self.vectors)
        words = self.format.group // self._per_word
        for word in range(number * words, (number + 1) * words):
            sums = self._add_word(at, inputs, 0, 0, add, INDEX(word), sums)
        return sums

    def _added_in_halves(self, at: ir.Value, number: int, inputs: list[ir.Value]) -> list[ir.Value]:
        """The sums of a group, added in 16 bits as long as they fit."""
        builder, wide = self.builder, LANES == 16
        multiply_bytes = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
        multiply_halves = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"

        def add(half: ir.Value, codes: ir.Value, factors: ir.Value) -> ir.Value:
            return builder.add(half, self._call(multiply_bytes, _HALVES, codes, factors))

        zeros = [ir.Constant(_HALVES, [0] * (2 * LANES))] * (self.rows * self.vectors)
        sums: list[ir.Value] = []
        for shift, mask, factor, run in self._runs(number):
            halves = self._for_each_word(run, partial(self._add_word, at, inputs, shift, mask, add), zeros)
            factors = ir.Constant(_HALVES, [factor] * (2 * LANES))
            words = [self._call(multiply_halves, WORDS, half, factors) for half in halves]
            sums = [builder.add(a, b) for a, b in zip(sums, words)] if sums else words
        return sums

    def _add_word(
        self,
        at: ir.Value,
        inputs: list[ir.Value],
        shift: int,
        mask: int,
        add: Callable[[ir.Value, ir.Value, ir.Value], ir.Value],
        word: ir.Value,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """``sums[i] = add(sums[i], codes, inputs)`` for the codes of a base word, shifted and masked."""
        sums = list(sums)
        for part in range(self._per_word // 4):
            words = [self._four_codes(at, word, part, vector) for vector in range(self.vectors)]
            codes = [self._bytes(self._masked(word, shift, mask)) for word in words]
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
        load the inputs of all words first, and move sums to the stack and back.
        """
        first, count = run.start // self._per_word, len(run) // self._per_word
        if LANES == 8 and count >= _MANY_WORDS and not self.format.extra:
            hidden = self.builder.asm(ir.FunctionType(INDEX, [INDEX]), "", "=r,0", [INDEX(count)], False)
            return loop(self.builder, hidden, lambda word, sums: step(self._plus(word, INDEX(first)), sums), values)
        for word in range(first, first + count):
            values = step(INDEX(word), values)
        return values

    def _runs(self, number: int) -> Iterator[tuple[int, int, int, range]]:
        """Columns of a group whose sums fit into 16 bits, with the shift, mask and factor of their codes.

        Numbers of 8 bits do not fit even once, so their halves of 4 bits are multiplied one after the other.
        """
        first, last = number * self.format.group, (number + 1) * self.format.group
        is_cut = self.format.largest * _LARGEST_PAIR > _LARGEST_SUM
        halves = [(0, 0x0F0F0F0F, 1), (4, 0x0F0F0F0F, 16)] if is_cut else [(0, 0, 1)]
        largest = 15 if is_cut else self.format.largest
        length = 4 * (_LARGEST_SUM // (largest * _LARGEST_PAIR)) // self._per_word * self._per_word
        for half in halves:
            for start in range(first, last, length):
                yield *half, range(start, min(start + length, last))

    def _four_codes(self, at: ir.Value, word: ir.Value, part: int, vector: int) -> ir.Value:
        """The codes of four columns, each in a byte: a part of a base word."""
        builder, form = self.builder, self.format
        shift = part * form.base
        codes = self._masked(self._word(at, word, vector), shift, _in_each_byte(form.base))
        if form.extra:
            sharing = form.base // form.extra
            extra = self._word(at, INDEX(form.base + word.constant // sharing), vector)
            shift += word.constant % sharing * form.extra
            high = self._masked(extra, shift, _in_each_byte(form.extra))
            codes = builder.or_(codes, builder.shl(high, each(form.base)))
        return entries(builder, form.table, codes) if form.table else codes

    def _masked(self, word: ir.Value, shift: int, mask: int) -> ir.Value:
        word = self.builder.lshr(word, each(shift)) if shift else word
        return self.builder.and_(word, each(mask)) if mask else word

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


def _in_each_byte(bits: int) -> int:
    """A mask of the low bits of each byte; 0 for all 8."""
    return ((1 << bits) - 1) * 0x01010101 if bits < 8 else 0
