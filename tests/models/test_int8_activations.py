"""Products with activations of 8 bits, against float64 products of the numbers that their codes stand for."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from gguf_files import random_model, tiny_config, write_model
from llvmlite import binding
from product_mutants import (
    minimum_of_the_neighbour,
    random_affine_matrix,
    random_matrix,
    scale_of_the_neighbour,
    tail_not_written,
)

from workbench import Engine, SamplingParams
from workbench.kernels.cpu.formats import GGML_FORMATS, TILE
from workbench.kernels.cpu.kernels import MANY
from workbench.models import load_model
from workbench.models.packed import description, int8, matrix, step_check
from workbench.models.packed.activations import float32_activations, packed_matrices
from workbench.models.packed.check import WrongProductError, check_products
from workbench.models.packed.pack_model import why_not_packed

CANNOT = why_not_packed() or int8.why_no_int8()
pytestmark = pytest.mark.skipif(bool(CANNOT), reason=CANNOT)

TYPES = [name for name, form in GGML_FORMATS.items() if form.takes("int8")]


def rounded(x):
    """The numbers that codes of 8 bits stand for, 32 columns at a time, computed number by number in float64."""
    out = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], 32):
            part = x[row, first : first + 32]
            scale = np.float32(np.abs(part).max()) / np.float32(127)
            if scale:
                codes = [round(float(number * (np.float32(1) / scale))) for number in part]
                out[row, first : first + 32] = np.float64(scale) * np.array(codes)
    return out


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(("num_outputs", "num_columns"), [(1, 256), (TILE, 512), (2 * TILE + 5, 256)])
def test_products_are_those_of_the_codes(type_name, num_outputs, num_columns):
    packed, weights = random_matrix(type_name, num_outputs, num_columns, "int8")
    x = np.random.default_rng(1).standard_normal((64, num_columns)).astype(np.float32)
    codes = rounded(x)
    alone = packed.multiply(x[:1])
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64):
        result = packed.multiply(x[:num_rows])
        terms = np.abs(codes[:num_rows]) @ np.abs(weights).T
        assert (np.abs(result - codes[:num_rows] @ weights.T) <= 4e-6 * terms).all()
        assert np.array_equal(result[:1], alone)  # the rows beside it change nothing, to the last bit
    exact = x.astype(np.float64) @ weights.T
    error = np.sqrt(np.square(result - exact).mean() / np.square(exact).mean())
    assert 1e-4 < error < 0.03  # the control: these are not the products of x itself


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_products_with_affine_quantisation_are_those_of_the_codes(bits, group_size):
    packed, weights = random_affine_matrix(bits, group_size, TILE + 5, 384, "int8")
    x = np.random.default_rng(bits).standard_normal((MANY + 3, 384)).astype(np.float32)
    codes = rounded(x)
    result = packed.multiply(x)
    assert (np.abs(result - codes @ weights.T) <= 4e-6 * (np.abs(codes) @ np.abs(weights).T)).all()
    assert not (np.abs(result - x @ weights.T) <= 4e-6 * (np.abs(codes) @ np.abs(weights).T)).all()
    check_products(packed, lambda outputs: weights[outputs], "layer")
    for mutant in (scale_of_the_neighbour, minimum_of_the_neighbour, tail_not_written):
        packed, _ = random_affine_matrix(bits, group_size, TILE + 5, 384, "int8")
        mutant(packed)
        with pytest.raises(WrongProductError):
            check_products(packed, lambda outputs: weights[outputs], "layer")


def test_sums_of_the_largest_codes_do_not_overflow():
    for type_name in TYPES:
        packed, weights = random_matrix(type_name, TILE, 256, "int8")
        x = np.where(weights[:1] > 0, 1.0, -1.0).astype(np.float32).repeat(MANY, axis=0)
        expected = x.astype(np.float64) @ weights.T
        assert (np.abs(packed.multiply(x) - expected) <= 4e-6 * np.abs(weights).sum(axis=1)).all()


@pytest.mark.parametrize("bits", [6, 8])
@pytest.mark.parametrize("largest", [True, False])
def test_sums_of_mlx_codes_at_their_ends_do_not_overflow(bits, largest):
    """32 codes of 6 bits are summed in two runs; the smallest code of 8 bits has no counterpart in signed bytes."""
    code, columns = ((1 << bits) - 1 if largest else 0), 64
    words = np.full((TILE, columns * bits // 32), 0xFFFFFFFF if largest else 0, np.uint32)
    scales, minima = (np.full((TILE, columns // 32), number, np.float16).view(np.uint16) for number in (0.25, -1.0))
    packed = matrix.from_affine(bits, [(words, scales, minima)], "float16")
    packed.use("int8")
    x = np.ones((MANY, columns), np.float32)
    x[1] = -1.0
    expected = columns * (0.25 * code - 1.0)
    assert np.allclose(packed.multiply(x)[:2], [[expected], [-expected]], rtol=1e-5)


def test_numbers_that_are_not_finite_or_very_small_stay_in_their_row():
    packed, _ = random_matrix("Q4_1", TILE, 256, "int8")
    x = np.random.default_rng(1).standard_normal((MANY + 2, 256)).astype(np.float32)
    x[2, 9], x[3, 40], x[4], x[5] = np.nan, -np.inf, 0.0, 1e-42
    result = packed.multiply(x)
    assert np.isnan(result[2:4]).all()
    assert (result[4:6] == 0).all()
    assert np.isfinite(np.delete(result, (2, 3), axis=0)).all()


# -- a model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    config = tiny_config("llama")
    path = tmp_path_factory.mktemp("int8") / "m.gguf"
    write_model(path, "llama", config, random_model(config), matrix_type="Q4_0")
    return path


def run(model, **limits):
    """The log-probabilities of a few requests, and the engine's facts about its model."""
    engine = Engine(model, num_blocks=40, block_size=4, **limits)
    for length in (3, 18):
        prompt = np.random.default_rng(length).integers(0, 250, length).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1))
    found = [[max(step.values()) for step in output.logprobs] for output in engine.run(progress=False)]
    facts = engine.runner.describe() | {"not_compiled": engine.runner.not_taken.get("compiled", "")}
    engine.close()
    return np.array([numbers[0] for numbers in found]), facts


def test_a_model_with_activations_of_8_bits(model_file):
    exact, facts = run(load_model(model_file))
    assert facts["activations"] == "float32"
    loaded = load_model(model_file, activations="int8")
    assert repr(loaded).count("int8 activations") == 1
    logprobs, facts = run(loaded)
    assert (facts["activations"], facts["forward"], facts["not_compiled"]) == ("int8", "compiled", "")
    assert 0 < np.abs(logprobs - exact).max() < 0.05
    assert np.array_equal(run(loaded, max_num_batched_tokens=40)[0], logprobs)


def test_the_number_of_threads_changes_nothing_with_8_bits(model_file, monkeypatch):
    loaded, found = load_model(model_file, activations="int8"), []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("WORKBENCH_THREADS", threads)
        found.append(run(loaded)[0].tolist())
    assert found[0] == found[1] == found[2]  # to the last bit


def test_a_model_that_depends_little_on_positions_has_a_compiled_step(tmp_path):
    """Rounding to 8 bits changes its logits as much as wrong positions do; those are compared with float32."""
    config = tiny_config("llama")
    model = random_model(config)
    for layer in model.layers:
        layer.self_attn.o_proj.weight *= 0.02
        layer.mlp.down_proj.weight *= 0.02
    write_model(tmp_path / "m.gguf", "llama", config, model, matrix_type="Q4_0")
    _, facts = run(load_model(tmp_path / "m.gguf", activations="int8"))
    assert (facts["forward"], facts["not_compiled"]) == ("compiled", "")


def test_a_compiled_step_with_codes_in_a_wrong_order_is_refused(model_file, monkeypatch):
    right = description.code_bits
    monkeypatch.setattr(description, "code_bits", lambda form, activations: 2 * right(form, activations))
    logprobs, facts = run(load_model(model_file, activations="int8"))
    assert facts["not_compiled"].startswith("its logits in compiled code with activations of 8 bits differ from those")
    assert np.isfinite(logprobs).all()


def test_a_comparison_that_sees_nothing_refuses_the_compiled_step(model_file, monkeypatch):
    monkeypatch.setattr(step_check, "INT8_RATIO", 1e4)
    _, facts = run(load_model(model_file, activations="int8"))
    assert facts["not_compiled"].endswith("with codes in a wrong order")


def test_exact_activations_for_a_while(model_file):
    loaded = load_model(model_file, activations="int8")
    with float32_activations(loaded.model) as changed:
        assert changed and {packed.activations for packed in packed_matrices(loaded.model).values()} == {"float32"}
    assert {packed.activations for packed in packed_matrices(loaded.model).values()} == {"int8"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "int4"}, 'activations is \'int4\'; it must be "float32" or "int8"'),
        ({"activations": "int8", "weights": "float32"}, 'weights="float32" have no codes; use activations="float32"'),
    ],
)
def test_other_activations_are_refused(options, message, model_file):
    with pytest.raises(ValueError, match=message):
        Engine(model_file, **options)


def test_weights_without_codes_and_processors_without_instructions_are_refused(tmp_path, monkeypatch, model_file):
    config = tiny_config("llama")
    write_model(tmp_path / "m.gguf", "llama", config, random_model(config), matrix_type="F16")
    with pytest.raises(ValueError, match="needs quantised weights, and this model has none"):
        load_model(tmp_path / "m.gguf", activations="int8")
    monkeypatch.setattr(int8, "instruction_set", lambda: "")
    with pytest.raises(ValueError, match="is not possible: compiled code knows no instructions of this processor"):
        load_model(model_file, activations="int8")


def test_a_loaded_model_has_its_activations(model_file):
    with pytest.raises(ValueError, match="activations='int8' has no effect on a LoadedModel: pass it to load_model"):
        Engine(load_model(model_file), activations="int8")


# -- instructions of other processors, which this machine need not have --------------------------------------------

EMIT = """
import numba
from numba.core import types
from workbench.kernels.cpu.formats import GGML_FORMATS
from workbench.kernels.cpu.tiles import PackedType, product_tile

tile = product_tile(2, 2)

def two_rows(weights, first, units, x, x_row, sums, sums_row, y, y_row):
    tile(weights, first, units, x, x_row, sums, sums_row, y, y_row)

signature = types.void(PackedType(GGML_FORMATS["Q4_0"], "int8"), *[types.intp] * 8)
print(numba.cfunc(signature, error_model="numpy")(two_rows)._library.get_asm_str())
"""
AVX512 = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq"


@pytest.mark.repeats(step=2)
@pytest.mark.skipif("x86" not in binding.get_default_triple(), reason="instructions of x86")
@pytest.mark.parametrize(
    ("features", "expected", "width"),
    [
        ("+avx,+avx2,+fma,+f16c,+avxvnni", {"vpdpbusd": 32}, "ymm"),
        (f"{AVX512},+avx512vnni", {"vpdpbusd": 32}, "zmm"),
        (AVX512, {"vpmaddubsw": 32, "vpmaddwd": 4}, "zmm"),
    ],
)
def test_instructions_of_other_processors(features, expected, width, monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", "x86-64")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    finished = subprocess.run([sys.executable, "-c", EMIT], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-2000:]
    lines = [line.split() for line in finished.stdout.splitlines() if f"%{width}" in line]
    counts = Counter("vpdpbusd" if "vpdpbusd" in words else words[0] for words in lines)
    assert {name: counts[name] for name in expected} == expected  # eight times for each of two rows and two vectors
    assert not {"vpmaddubsw", "vpdpbusd"} - expected.keys() & counts.keys()
