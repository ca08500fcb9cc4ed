"""Products with packed weights, against float64 products with the weights that other code dequantises."""

import os

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import random_model, tiny_config, write_model
from llvmlite import binding
from product_mutants import PRODUCT_MUTANTS, random_matrix, wrong_table_entry
from stored_rows import dequantised, random_affine, random_rows

from workbench.kernels.cpu.attention import processor
from workbench.kernels.cpu.attention.simd import LANES
from workbench.kernels.cpu.formats import GGML_FORMATS, TILE
from workbench.kernels.cpu.kernels import MANY, PROBED_ROWS
from workbench.models import load_model
from workbench.models.packed import check, matrix
from workbench.models.packed.check import WrongProductError, check_products
from workbench.models.packed.int8 import why_no_int8
from workbench.models.packed.pack_model import sharing_layers, why_not_packed

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

NO_INT8 = pytest.mark.skipif(bool(why_no_int8()), reason=why_no_int8())
ACTIVATIONS = ["float32", pytest.param("int8", marks=NO_INT8)]
THOROUGH = bool(os.environ.get("WORKBENCH_THOROUGH"))
SHAPES = [(1, 256), (TILE, 512), (3 * TILE + 5, 256), (7, 768)]
if THOROUGH:
    SHAPES += [(TILE - 1, 256), (TILE + 1, 1024), (7, 2048), (1031, 768)]
ROWS = range(1, 701) if THOROUGH else (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 128, 259, 700)


def assert_close(result, x, weights):
    """Within float32 rounding of the terms of each sum."""
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    terms = np.abs(x).astype(np.float64) @ np.abs(weights).T.astype(np.float64)
    assert result.shape == expected.shape
    assert (np.abs(result - expected) <= 4e-6 * terms + 1e-30).all()


@pytest.mark.parametrize("type_name", GGML_FORMATS)
def test_ggml_types(type_name):
    for seed, (num_outputs, num_columns) in enumerate(SHAPES):
        rows = random_rows(type_name, num_outputs, num_columns, seed)
        weights = dequantised(type_name, rows)
        cut = num_outputs // 3
        packed = matrix.from_ggml(type_name, [part for part in (rows[:cut], rows[cut:]) if len(part)])
        assert np.array_equal(packed.rows(np.arange(num_outputs)), weights)
        x = np.random.default_rng(seed).standard_normal((max(ROWS), num_columns)).astype(np.float32)
        alone = packed.multiply(x[:1])
        for num_rows in ROWS:
            result = packed.multiply(x[:num_rows])
            assert_close(result, x[:num_rows], weights)
            assert np.array_equal(result[:1], alone)  # the rows beside it change nothing, to the last bit


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_codes_that_name_entries_of_a_table(activations):
    """Products are equal to the last bit to those with the entries themselves, which are numbers of 8 bits."""
    blocks = random_rows("IQ4_NL", TILE + 5, 512).reshape(TILE + 5, -1, 18)
    packed = matrix.from_ggml("IQ4_NL", [blocks.reshape(TILE + 5, -1)])
    table = np.array(packed.form.table, np.uint8) ^ 0x80
    numbers = np.concatenate([blocks[..., :2], table[blocks[..., 2:] & 15], table[blocks[..., 2:] >> 4]], axis=-1)
    wide = matrix.from_ggml("Q8_0", [numbers.reshape(TILE + 5, -1)])
    assert wide.nbytes * 18 == packed.nbytes * 34
    x = np.random.default_rng(1).standard_normal((MANY + 3, 512)).astype(np.float32)
    for product in (packed, wide):
        product.use(activations)
    assert np.array_equal(packed.multiply(x), wide.multiply(x))


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine_quantisation(bits, group_size, name):
    """Code is compiled for bits and a type of scales, whose readers do not know each other."""
    words, scales, biases = random_affine(bits, group_size, TILE + 3, 384, getattr(mx, name))
    float32 = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)
    unsigned = mx.uint32 if name == "float32" else mx.uint16
    stored = np.array(words), np.array(scales.view(unsigned)), np.array(biases.view(unsigned))
    packed = matrix.from_affine(bits, [stored], name)
    np.testing.assert_allclose(packed.rows(np.arange(TILE + 3)), np.array(float32), rtol=3e-7, atol=3e-7)
    x = np.random.default_rng(bits).standard_normal((MANY + 3, 384)).astype(np.float32)
    assert_close(packed.multiply(x), x, np.array(float32))


@pytest.mark.parametrize("type_name", ["F32", "BF16", "F16"])
def test_columns_that_fill_no_unit(type_name):
    rows = random_rows(type_name, 21, 75)
    packed = matrix.from_ggml(type_name, [rows])
    x = np.random.default_rng(1).standard_normal((5, 75)).astype(np.float32)
    assert_close(packed.multiply(x), x, dequantised(type_name, rows))


def test_what_is_not_a_number_stays_in_its_row():
    rows = random_rows("Q4_1", TILE, 256)
    packed = matrix.from_ggml("Q4_1", [rows])
    x = np.random.default_rng(1).standard_normal((MANY + 1, 256)).astype(np.float32)
    x[2, 9] = np.nan
    result = packed.multiply(x)
    assert np.isnan(result[2]).all()
    assert np.isfinite(np.delete(result, 2, axis=0)).all()


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("num_rows", [1, 5, 37])
def test_the_number_of_threads_changes_no_bit(num_rows, activations, monkeypatch):
    packed, _ = random_matrix("Q4_1", 6 * TILE + 7, 256, activations)
    x = np.random.default_rng(num_rows).standard_normal((num_rows, 256)).astype(np.float32)
    alone = packed.multiply(x)
    monkeypatch.setattr(matrix, "_WORTH_THREADS", 0)
    for threads in range(1, 9):  # with eight, the last one's share is the tile that is partly empty
        monkeypatch.setenv("WORKBENCH_THREADS", str(threads))
        assert np.array_equal(packed.multiply(x), alone)


# -- the check when a model is loaded sees wrong products ----------------------------------------------------------


def packed_q4_0(num_outputs=2 * TILE + 5, activations="float32"):
    packed, weights = random_matrix("Q4_0", num_outputs, 256, activations)
    return packed, lambda outputs: weights[outputs]


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K"])
def test_threads_pack_the_same_bytes(type_name, threads, monkeypatch):
    """Also with a tensor that begins in the middle of a tile, and with more threads than tiles."""
    rows = random_rows(type_name, 5 * TILE + 3, 512, threads)
    monkeypatch.setattr(matrix, "_WORTH_PACKING", 0)

    def packed(count):
        monkeypatch.setenv("WORKBENCH_THREADS", str(count))
        return matrix.from_ggml(type_name, [rows[:7], rows[7:]]).data

    assert np.array_equal(packed(threads), packed(1))


def test_no_two_threads_pack_into_one_tile():
    rng = np.random.default_rng(0)
    for first, num_rows, threads in rng.integers([0, 1, 1], [3 * TILE, 9 * TILE, 12], (500, 3)).tolist():
        parts = [matrix.rows_of_thread(first, num_rows, thread, threads) for thread in range(threads)]
        assert [row for part in parts for row in range(*part)] == list(range(num_rows))
        tiles = [{(first + row) // TILE for row in range(*part)} for part in parts]
        assert sum(map(len, tiles)) == len(set().union(*tiles))


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_right_products_pass_the_check(activations):
    check_products(*packed_q4_0(activations=activations), "layer")


def one_code_wrong(packed):
    packed.data[-packed.form.unit_bytes + 5] ^= 0x08


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("mutant", PRODUCT_MUTANTS)
def test_a_wrong_product_is_seen(mutant, activations):
    packed, weights = packed_q4_0(activations=activations)
    mutant(packed)
    with pytest.raises(WrongProductError, match=r"the product with layer \(4 bits, .* differs from that with"):
        check_products(packed, weights, "layer")


def test_a_wrong_row_of_an_embedding_is_seen(monkeypatch):
    packed, weights = packed_q4_0()
    right = packed.rows
    monkeypatch.setattr(packed, "rows", lambda outputs: np.roll(right(outputs), 1, axis=1))
    with pytest.raises(WrongProductError, match=r"rows of layer \(4 bits, .* differ from its dequantised weights by"):
        check_products(packed, weights, "layer")


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_wrong_entry_of_a_table_is_seen(activations):
    packed, weights = random_matrix("IQ4_NL", 2 * TILE + 5, 256, activations)
    check_products(packed, lambda outputs: weights[outputs], "layer")
    wrong_table_entry(packed)
    with pytest.raises(WrongProductError):
        check_products(packed, lambda outputs: weights[outputs], "layer")


@pytest.mark.parametrize("rows", PROBED_ROWS)
def test_a_tile_that_is_wrong_for_some_number_of_rows_is_seen(rows, monkeypatch):
    packed, weights = packed_q4_0()
    right = packed.multiply
    monkeypatch.setattr(packed, "multiply", lambda x: right(x) * (1.01 if len(x) == rows else 1.0))
    with pytest.raises(WrongProductError):
        check_products(packed, weights, "layer")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_damaged_weight_is_named_instead_of_a_wrong_product(value):
    packed, weights = packed_q4_0()
    damaged = weights(np.arange(packed.num_outputs)).copy()
    damaged[-1, 7] = value
    with pytest.raises(WrongProductError, match=r"^layer holds weights that are not finite numbers"):
        check_products(packed, lambda outputs: damaged[outputs], "layer")


def test_one_wrong_code_is_seen_in_the_last_tile():
    packed, weights = packed_q4_0(2 * TILE)
    one_code_wrong(packed)
    with pytest.raises(WrongProductError):
        check_products(packed, weights, "layer")


def test_a_check_that_sees_nothing_fails(monkeypatch):
    """The control: with a tolerance that any product meets, the shifted input does not differ enough."""
    monkeypatch.setattr(check, "TOLERANCE", 10.0)
    with pytest.raises(WrongProductError, match="a shifted input changes"):
        check_products(*packed_q4_0(), "layer")


def test_layers_that_share_their_input():
    assert sharing_layers(["a.q_proj", "a.k_proj", "a.o_proj", "a.v_proj", "b.q_proj", "head"]) == [
        ("a.q_proj", "a.k_proj", "a.v_proj"),
        ("a.o_proj",),
        ("b.q_proj",),
        ("head",),
    ]


@pytest.mark.skipif("x86" not in binding.get_default_triple() or LANES != 8, reason="compiles for AVX2")
@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ("+avx,+avx2,+fma,+f16c", ""),
        ("+avx2", "NUMBA_CPU_NAME and NUMBA_CPU_FEATURES leave out fma, f16c"),
        ("+avx,+sse4.2", "NUMBA_CPU_NAME and NUMBA_CPU_FEATURES leave out avx2, fma, f16c"),
    ],
)
def test_instructions_that_are_left_out_are_named(features, reason, monkeypatch):
    """Without f16c, LLVM would call a function that is not there, and end the process."""
    monkeypatch.setattr(processor.config, "CPU_FEATURES", features)
    assert why_not_packed() == reason


def test_a_model_whose_products_are_wrong_is_loaded_as_float32(tmp_path, monkeypatch, caplog):
    config = tiny_config("llama")
    write_model(tmp_path / "m.gguf", "llama", config, random_model(config), matrix_type="Q4_0")
    monkeypatch.setattr(check, "TOLERANCE", 1e-12)
    loaded = load_model(tmp_path / "m.gguf")
    assert loaded.quantized == ""
    assert 'weights="packed" becomes weights="float32": the product with' in caplog.text
