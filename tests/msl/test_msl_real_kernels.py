"""Kernels that mlx-lm ships for Macs, run here from its own source and compared with its own MLX operations."""

import mlx.core as mx
import numpy as np
import pytest
from msl_runs import skip_without_compiler

from workbench import msl

skip_without_compiler()


@pytest.fixture
def metal_on_the_cpu(monkeypatch):
    """Make mlx-lm compile its kernels with `msl.metal_kernel`."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", msl.metal_kernel)


@pytest.fixture
def normal():
    generator = np.random.default_rng(11)

    def array(*shape, scale=1.0, dtype=mx.float32):
        return mx.array(scale * generator.standard_normal(shape).astype(np.float32)).astype(dtype)

    return array


def largest_relative_error(got, expected):
    got, expected = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (got, expected))
    return np.abs(got - expected).max() / np.abs(expected).max()


def test_state_space_model_step(metal_on_the_cpu, monkeypatch, normal):
    ssm = pytest.importorskip("mlx_lm.models.ssm")
    monkeypatch.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())
    batch, heads, head_dim, groups, state_dim = 2, 4, 16, 2, 64
    arguments = [
        normal(batch, 1, heads, head_dim), normal(heads), normal(batch, 1, groups, state_dim),
        normal(batch, 1, groups, state_dim), normal(heads), normal(batch, 1, heads), normal(heads),
        normal(batch, heads, head_dim, state_dim), (0.001, 100.0),
    ]  # fmt: skip
    for got, expected in zip(ssm.ssm_update_kernel(*arguments), ssm.ssm_attn(*arguments)):
        assert largest_relative_error(got, expected) < 1e-6


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("vectorized", [False, True])
def test_gated_delta_rule(metal_on_the_cpu, monkeypatch, normal, dtype, vectorized):
    gated_delta = pytest.importorskip("mlx_lm.models.gated_delta")
    name = "_gated_delta_kernel_vec" if vectorized else "_gated_delta_kernel"
    monkeypatch.setattr(gated_delta, name, gated_delta._make_gated_delta_kernel(vectorized=vectorized))
    batch, tokens, key_heads, value_heads, key_dim, value_dim = 2, 5, 2, 4, 64, 16
    gates = (batch, tokens, value_heads, key_dim) if vectorized else (batch, tokens, value_heads)
    arguments = [
        normal(batch, tokens, key_heads, key_dim, scale=0.2, dtype=dtype),
        normal(batch, tokens, key_heads, key_dim, scale=0.2, dtype=dtype),
        normal(batch, tokens, value_heads, value_dim, dtype=dtype),
        mx.sigmoid(normal(*gates)), mx.sigmoid(normal(batch, tokens, value_heads)),
        normal(batch, value_heads, value_dim, key_dim),
    ]  # fmt: skip
    expected_y, expected_state = gated_delta.gated_delta_ops(*arguments)
    y, state = gated_delta.gated_delta_kernel(*arguments)
    assert largest_relative_error(y, expected_y) < (1e-6 if dtype == mx.float32 else 8e-3)
    assert largest_relative_error(state, expected_state) < 1e-6


@pytest.mark.parametrize("divide", [False, True])
def test_linear_layer_with_ternary_weights(metal_on_the_cpu, monkeypatch, normal, divide):
    layers = pytest.importorskip("mlx_lm.models.bitlinear_layers")
    monkeypatch.setattr(layers, "_bitlinear_kernel", layers.make_bitlinear_kernel())
    layer = layers.BitLinear(128, 64, bias=False, invert_weight_scales=divide)
    packed = np.random.default_rng(2).integers(0, 256, (16, 128)).astype(np.uint8)
    layer.weight, layer.weight_scale = mx.array(packed), mx.array([1.25])
    x = normal(3, 128)
    weights = np.concatenate([(packed >> shift & 3).astype(np.float32) - 1 for shift in (0, 2, 4, 6)])
    expected = np.array(x) @ weights.T * (1 / 1.25 if divide else 1.25)
    np.testing.assert_allclose(np.array(layer(x)), expected, rtol=1e-5, atol=1e-4)
