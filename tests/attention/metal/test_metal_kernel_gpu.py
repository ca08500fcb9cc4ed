"""The kernels on a GPU: Metal on Apple's, the translated source on NVIDIA's; skipped with the reason without either.

The cases are those that msl runs on a CPU. The bound is three times as wide: a GPU's ``tanh``, its division and the
order of additions inside a matrix product are its own, and all of them round in the last place.
"""

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import (
    KINDS,
    as_float64,
    assert_close,
    build,
    kind_case,
    published_edge_1,
    published_edge_2,
    published_edge_3,
    random_case,
)

from workbench import Engine, EngineConfig, SamplingParams
from workbench.apps.cli.kernel import print_check
from workbench.kernels.attention.metadata import AttentionMetadata
from workbench.kernels.attention.options import AttentionOptions
from workbench.kernels.attention.selection import get_backend

if not (mx.metal.is_available() or mx.cuda.is_available()):
    pytest.skip("needs a GPU: Apple's, or NVIDIA's with mlx[cuda13]", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("gpu")

NAME = "metal" if mx.metal.is_available() else "cuda"
SLACK = 3.0
EDGE_1, EDGE_2, EDGE_3 = published_edge_1(), published_edge_2(), published_edge_3()


@pytest.fixture
def kernels():
    return get_backend(NAME).kernels


@pytest.mark.parametrize("name", EDGE_1)
def test_published_v1_against_reference(kernels, name):
    batch = build(EDGE_1[name])
    assert_close(kernels.attend_v1(*batch.inputs, batch.options), batch.reference(), batch.case.dtype, SLACK)


@pytest.mark.parametrize("name", EDGE_2)
def test_published_tiled_against_v1(kernels, name):
    batch = build(EDGE_2[name])
    v1, tiled = (as_float64(attend(*batch.inputs, batch.options)) for attend in (kernels.attend_v1, kernels.attend))
    np.testing.assert_allclose(tiled, v1, atol=2e-4, rtol=1e-4 + 2**-10)


@pytest.mark.parametrize("name", EDGE_3)
def test_published_tiled_against_reference(kernels, name):
    batch = build(EDGE_3[name])
    assert_close(kernels.attend(*batch.inputs, batch.options), batch.reference(), batch.case.dtype, SLACK)


@pytest.mark.parametrize("seed", range(408))
def test_random(kernels, seed):
    case = random_case(seed)
    batch = build(case)
    expected = batch.reference()
    assert_close(kernels.attend_v1(*batch.inputs, batch.options), expected, case.dtype, SLACK)
    assert_close(kernels.attend(*batch.inputs, batch.options, kv_split=case.kv_split), expected, case.dtype, SLACK)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_reaches(kernels, kind, seed):
    case = kind_case(kind, seed)
    batch = build(case)
    expected = batch.reference()
    assert_close(kernels.attend_v1(*batch.inputs, batch.options), expected, case.dtype, SLACK)
    assert_close(kernels.attend(*batch.inputs, batch.options, kv_split=case.kv_split), expected, case.dtype, SLACK)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_dispatch_is_cut_into_runs_of_rows(kind, monkeypatch):
    batch = build(kind_case(kind, 1))
    monkeypatch.setattr("workbench.kernels.attention.metal.launch.PagedVarlenKernels.max_dispatch_flop", 1e5)
    result = get_backend(NAME).attend(*batch.inputs, batch.options)
    assert_close(result, batch.reference(), batch.case.dtype, SLACK)


def test_keys_and_values_are_written_in_place():
    """A write that copied the cache would take its size in memory once more."""
    backend = get_backend(NAME)
    shape = (2048, 16, 8, 128)  # 64 MiB in float16
    k_cache, v_cache = mx.zeros(shape, mx.float16), mx.zeros(shape, mx.float16)
    metadata = AttentionMetadata(
        np.array([0, 1], np.int32), np.array([9], np.int32), np.array([[5]], np.int32), np.array([5 * 16 + 8]), 16
    )
    options = AttentionOptions(128**-0.5)

    def step(number):
        q, k = (mx.full((1, heads, 128), number, mx.float16) for heads in (32, 8))
        mx.eval(backend.write_and_attend(q, k, k, k_cache, v_cache, metadata, options), k_cache, v_cache)

    mx.eval(k_cache, v_cache)
    step(1.0)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for number in range(2, 6):
        step(float(number))
    assert mx.get_peak_memory() - before < k_cache.nbytes // 2
    assert k_cache[5, 8, 0, 0].item() == v_cache[5, 8, 7, 127].item() == 5.0


def test_a_real_model_is_served_by_the_kernel():
    """No fallback, and the engine waits once per step."""
    config = EngineConfig(max_num_batched_tokens=64, num_blocks="auto", max_model_len=512)
    with Engine("smollm2", config) as engine:
        assert (engine.runner.backend_name, engine.runner.mode) == (NAME, "kernel")
        assert engine.runner.fallback_reason == ""
        engine.add_request("The capital of France is", SamplingParams(max_tokens=12))
        engine.add_request("One, two, three, four,", SamplingParams(max_tokens=12))
        assert "Paris" in engine.run(progress=False)[0].text


def test_kernel_check():
    assert print_check([NAME], full=True) == 0
