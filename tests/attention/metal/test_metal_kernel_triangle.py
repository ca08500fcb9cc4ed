"""The triangle: a float64 reference, `paged_varlen_v1` and the tiled kernel, every access checked."""

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
from msl_runs import skip_without_compiler

from workbench import msl
from workbench.kernels.attention.metal.launch import PagedVarlenKernels

skip_without_compiler()

KERNELS = [PagedVarlenKernels(msl.metal_kernel, order=order) for order in (0, 1)]
"""One set per order in which msl runs the threads of a threadgroup; a missing barrier shows in at least one."""

EDGE_1, EDGE_2, EDGE_3 = published_edge_1(), published_edge_2(), published_edge_3()


def check_published(batch, result):
    """Compare with the reference, within the published tolerance and within ours."""
    expected = batch.reference()
    np.testing.assert_allclose(as_float64(result), expected, atol=1.5e-2, rtol=1e-2)
    assert_close(result, expected, batch.case.dtype)


@pytest.mark.parametrize("name", EDGE_1)
def test_published_v1_against_reference(name):
    batch = build(EDGE_1[name])
    check_published(batch, KERNELS[0].attend_v1(*batch.inputs, batch.options))


@pytest.mark.repeats(step=6)
@pytest.mark.parametrize("name", EDGE_2)
def test_published_tiled_against_v1(name):
    batch = build(EDGE_2[name])
    v1 = as_float64(KERNELS[1].attend_v1(*batch.inputs, batch.options))
    tiled = as_float64(KERNELS[1].attend(*batch.inputs, batch.options))
    one_ulp = 2**-10  # both round to float16 once, at the end, so the last bit may differ
    np.testing.assert_allclose(tiled, v1, atol=1e-4, rtol=1e-4 + one_ulp)


@pytest.mark.repeats(step=5)
@pytest.mark.parametrize("name", EDGE_3)
def test_published_tiled_against_reference(name):
    batch = build(EDGE_3[name])
    check_published(batch, KERNELS[0].attend(*batch.inputs, batch.options))


@pytest.mark.repeats(step=150)
@pytest.mark.parametrize("seed", range(408))
def test_random(seed):
    case = random_case(seed)
    batch = build(case)
    expected = batch.reference()
    assert_close(KERNELS[seed // 24 % 2].attend_v1(*batch.inputs, batch.options), expected, case.dtype)
    for kernels in KERNELS:
        assert_close(kernels.attend(*batch.inputs, batch.options, kv_split=case.kv_split), expected, case.dtype)


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_reaches(kind, seed):
    case = kind_case(kind, seed)
    batch = build(case)
    expected = batch.reference()
    assert_close(KERNELS[seed % 2].attend_v1(*batch.inputs, batch.options), expected, case.dtype)
    for kernels in KERNELS:
        assert_close(kernels.attend(*batch.inputs, batch.options, kv_split=case.kv_split), expected, case.dtype)
