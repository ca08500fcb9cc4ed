"""The instructions of a register tile for inputs of 8 bits.

Each 32 bits of a lane hold the codes of four columns of one output, and an instruction multiplies them with the input's
codes of the same columns and adds the four products. Processors with VNNI have one such instruction. With AVX2 or
AVX-512 alone, ``pmaddubsw`` adds pairs of products in 16 bits, which overflow when they are too many, and ``pmaddwd``
adds those in 32 bits. All sums of a group are integers and exact; its scale and that of the input then follow in
float32, as for float32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir
from numba.core import cgutils

from workbench.attention.cpu.simd import LANES, VECTOR, cpu_features, splat_scalar
from workbench.models.cpu.emitter import BYTE, WORD, WORDS, Emitter, each, splat_integer
from workbench.models.cpu.formats import INT8_UNIT_BYTES, UNIT

_BYTES = ir.VectorType(BYTE, 4 * LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_LARGEST_PAIR = 2 * 127
"""Largest sum of two products of a code 1 with codes of inputs."""


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
        sums = [each(0)] * (self.rows * self.vectors)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        for place in range(number * self.format.group, (number + 1) * self.format.group, 4):
            codes = [self._bytes(self._four_codes(at, place, vector)) for vector in range(self.vectors)]
            for row, input in enumerate(inputs):
                factors = self._four_inputs(input, place)
                for vector, code in enumerate(codes):
                    index = row * self.vectors + vector
                    sums[index] = self._call(name, WORDS, sums[index], code, factors)
        return sums

    def _added_in_halves(self, at: ir.Value, number: int, inputs: list[ir.Value]) -> list[ir.Value]:
        """The sums of a group, added in 16 bits as long as they fit."""
        builder, wide = self.builder, LANES == 16
        multiply_bytes = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
        multiply_halves = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
        sums: list[ir.Value] = []
        for shift, mask, factor, places in self._runs(number):
            halves: list[ir.Value] = []
            for place in places:
                words = [self._four_codes(at, place, vector) for vector in range(self.vectors)]
                codes = [self._bytes(self._masked(word, shift, mask)) for word in words]
                parts = []
                for input in inputs:
                    factors = self._four_inputs(input, place)
                    parts += [self._call(multiply_bytes, _HALVES, code, factors) for code in codes]
                halves = [builder.add(a, b) for a, b in zip(halves, parts)] if halves else parts
            factors = ir.Constant(_HALVES, [factor] * (2 * LANES))
            words = [self._call(multiply_halves, WORDS, half, factors) for half in halves]
            sums = [builder.add(a, b) for a, b in zip(sums, words)] if sums else words
        return sums

    def _runs(self, number: int) -> Iterator[tuple[int, int, int, range]]:
        """Places of a group whose sums fit into 16 bits, with the shift, mask and factor of their codes.

        Codes of 8 bits do not fit even once, so their halves of 4 bits are multiplied one after the other.
        """
        first, last = number * self.format.group, (number + 1) * self.format.group
        bits = self.format.bits
        halves = [(0, 0x0F0F0F0F, 1), (4, 0x0F0F0F0F, 16)] if bits == 8 else [(0, 0, 1)]
        largest = 15 if bits == 8 else (1 << bits) - 1
        length = 4 * (32767 // (largest * _LARGEST_PAIR))
        for half in halves:
            for start in range(first, last, length):
                yield *half, range(start, min(start + length, last), 4)

    def _four_codes(self, at: ir.Value, place: int, vector: int) -> ir.Value:
        """The codes of four columns, each in a byte: those of `column_order` from ``place`` on."""
        builder, form = self.builder, self.format
        per_word = UNIT // form.base
        word, shift = place // per_word, place % per_word // 4 * form.base
        codes = self._masked(self._word(at, ir.Constant(at.type, word), vector), shift, _in_each_byte(form.base))
        if form.extra:
            sharing = form.base // form.extra
            extra = self._word(at, ir.Constant(at.type, form.base + word // sharing), vector)
            shift += word % sharing * form.extra
            high = self._masked(extra, shift, _in_each_byte(form.extra))
            codes = builder.or_(codes, builder.shl(high, each(form.base)))
        return codes

    def _masked(self, word: ir.Value, shift: int, mask: int) -> ir.Value:
        word = self.builder.lshr(word, each(shift)) if shift else word
        return self.builder.and_(word, each(mask)) if mask else word

    def _four_inputs(self, input: ir.Value, place: int) -> ir.Value:
        """The input's codes of the same columns, in every lane."""
        four = self._load(self._plus(input, ir.Constant(input.type, place)), WORD)
        return self._bytes(splat_integer(self.builder, four))

    def _bytes(self, words: ir.Value) -> ir.Value:
        return self.builder.bitcast(words, _BYTES)

    def _call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        function_type = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments)


def _in_each_byte(bits: int) -> int:
    """A mask of the low bits of each byte; 0 for all 8."""
    return ((1 << bits) - 1) * 0x01010101 if bits < 8 else 0
