"""The products' vector code for Arm, as LLVM writes it on any machine: what its inner loops are made of."""

import subprocess
import sys
from collections import Counter

import pytest
from llvmlite import binding

EMIT = """
import re, sys
import numba
from llvmlite import binding
from numba.core import types
from workbench.kernels.cpu.attention.simd import LANES
from workbench.kernels.cpu.formats import GGML_FORMATS
from workbench.kernels.cpu.kernels_code import PackedType, _block

assert LANES == 4

def rows_of_a_tile(weights, units, x, x_row, sums, sums_row, y, y_row, left):
    _block(weights, units, x, x_row, sums, sums_row, y, y_row, left)

signature = types.void(PackedType(GGML_FORMATS[sys.argv[1]]), *[types.intp] * 8)
code = numba.cfunc(signature, error_model="numpy")(rows_of_a_tile).inspect_llvm()
triple = "aarch64-unknown-linux-gnu"
code = code.replace("llvm.x86.ssse3.pshuf.b.128", "llvm.aarch64.neon.tbl1.v16i8")  # the same for indices below 16
code = re.sub(r'target triple = ".*"', f'target triple = "{triple}"', re.sub(r'target datalayout = ".*"', "", code))
binding.initialize_all_targets()
binding.initialize_all_asmprinters()
module = binding.parse_assembly(code)
machine = binding.Target.from_triple(triple).create_target_machine(cpu="generic", opt=3)
module.data_layout = str(machine.target_data)
print(machine.emit_assembly(module))
"""


def instructions(type_name, monkeypatch):
    """Counts of the instructions in the product with a type for a processor with NEON, and the functions it calls."""
    # numba then takes four lanes; the other features only let this machine link the code, which it does not run.
    features = "+avx,+f16c,+fma" if "x86" in binding.get_default_triple() else ""
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    finished = subprocess.run([sys.executable, "-c", EMIT, type_name], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-2000:]
    functions = finished.stdout.split(".Lfunc_end")
    product = max(functions, key=lambda text: text.count("fmla"))  # the others are numba's, for Python's sake
    lines = [words for line in product.splitlines() if (words := line.split())]
    return Counter(words[0] for words in lines), {words[1] for words in lines if words[0] == "bl"}


@pytest.mark.skipif("x86" not in binding.get_default_triple(), reason="on Arm the tests of products run this code")
def test_products_are_made_of_vector_instructions(monkeypatch):
    counts, called = instructions("Q4_0", monkeypatch)
    assert called == set()  # no multiplication, conversion or widening of float16 is a call
    # Eight rows with two vectors, and one to six with four: each of a word's eight columns multiplies them all.
    assert counts["fmla"] >= 8 * (8 * 2 + sum(range(1, 7)) * 4)
    assert counts["scvtf"] + counts["ucvtf"] >= 8 * (2 + 6 * 4)
    assert counts["fcvtl"] > 0 and counts["fmadd"] == 0


@pytest.mark.skipif("x86" not in binding.get_default_triple(), reason="on Arm the tests of products run this code")
def test_tables_are_looked_up_by_an_instruction(monkeypatch):
    counts, called = instructions("IQ4_NL", monkeypatch)
    assert called == set()
    assert counts["tbl"] >= 2 * (2 + 6 * 4)  # once for the even and once for the odd columns of a word
    assert counts["fmla"] >= 8 * (8 * 2 + sum(range(1, 7)) * 4)
