"""The triangle: a float64 reference, `paged_varlen_v1` and the tiled kernel, every access checked."""

import numpy as np
import pytest
from kernel_cases import (
    as_float64,
    assert_close,
    build,
    published_edge_1,
    published_edge_2,
    published_edge_3,
    random_case,
)
from msl_runs import skip_without_compiler

from workbench import msl
from workbench.attention.metal.launch import PagedVarlenKernels

skip_without_compiler()

KERNELS = [PagedVarlenKernels(msl.metal_kernel, order=order) for order in (0, 1)]
"""One set per order in which msl runs the threads of a threadgroup: a missing barrier shows in at least one."""

EDGE_1, EDGE_2, EDGE_3 = published_edge_1(), published_edge_2(), published_edge_3()


def published_tolerance(result, expected):
    np.testing.assert_allclose(result, expected, atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("name", EDGE_1)
def test_published_v1_against_reference(name):
    batch = build(EDGE_1[name])
    result, expected = KERNELS[0].attend_v1(*batch.inputs, **batch.options), batch.reference()
    published_tolerance(as_float64(result), expected)
    assert_close(result, expected, batch.case.dtype)


@pytest.mark.parametrize("name", EDGE_2)
def test_published_tiled_against_v1(name):
    batch = build(EDGE_2[name])
    v1 = as_float64(KERNELS[1].attend_v1(*batch.inputs, **batch.options))
    tiled = as_float64(KERNELS[1].attend(*batch.inputs, **batch.options))
    one_ulp = 2**-10  # both round to float16 once, at the end: a last bit may differ where they straddle its edge
    np.testing.assert_allclose(tiled, v1, atol=1e-4, rtol=1e-4 + one_ulp)


@pytest.mark.parametrize("name", EDGE_3)
def test_published_tiled_against_reference(name):
    batch = build(EDGE_3[name])
    result, expected = KERNELS[0].attend(*batch.inputs, **batch.options), batch.reference()
    published_tolerance(as_float64(result), expected)
    assert_close(result, expected, batch.case.dtype)


@pytest.mark.parametrize("seed", range(408))
def test_random(seed):
    case = random_case(seed)
    batch = build(case)
    expected = batch.reference()
    assert_close(KERNELS[seed // 24 % 2].attend_v1(*batch.inputs, **batch.options), expected, case.dtype)
    for kernels in KERNELS:
        assert_close(kernels.attend(*batch.inputs, **batch.options, kv_split=case.kv_split), expected, case.dtype)
