"""Experts with packed weights, against mlx-lm's layers with dequantised weights, and checks that see wrong ones."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU
from product_mutants import random_matrix, scale_of_the_neighbour

from workbench.models.packed import check
from workbench.models.packed.check import ProductChecks, WrongProductError
from workbench.models.packed.experts import PackedExperts
from workbench.models.packed.pack_model import pack_model, why_not_packed
from workbench.models.remembered import NOTHING

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

NUM_EXPERTS = 5


def random_experts(type_name="Q4_0", num_outputs=37, num_columns=256):
    matrices, weights = zip(
        *(random_matrix(type_name, num_outputs, num_columns, seed=seed) for seed in range(NUM_EXPERTS))
    )
    return PackedExperts(matrices), np.stack(weights)


def check_layer(experts, weights):
    """Run the check of a start."""
    ProductChecks(NOTHING).check_experts(experts, lambda expert, rows: weights[expert][rows], "mlp.up_proj")


@pytest.mark.parametrize("num_tokens", [1, 40])  # from 64 choices on, mlx-lm sorts them by expert
@pytest.mark.parametrize("bits", [4, 16])
def test_a_gated_mixture(bits, num_tokens):
    layer = SwitchGLU(64, 96, NUM_EXPERTS, bias=True)
    for index, projection in enumerate((layer.gate_proj, layer.up_proj, layer.down_proj)):
        projection.bias = mx.random.normal(projection.bias.shape, key=mx.random.key(index))
    layer.set_dtype(mx.bfloat16)
    if bits == 4:
        layer.update_modules({name: layer[name].to_quantized(32, 4) for name in ("gate_proj", "up_proj", "down_proj")})
    generator = np.random.default_rng(num_tokens)
    x = mx.array(generator.standard_normal((2, num_tokens, 64)).astype(np.float32))
    indices = mx.array(generator.integers(0, NUM_EXPERTS, (2, num_tokens, 3)))
    stored = sum(projection.weight.nbytes for projection in (layer.gate_proj, layer.up_proj, layer.down_proj))
    exact = SwitchGLU(64, 96, NUM_EXPERTS, bias=True)
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = layer[name].weight
        if bits == 4:
            scales, biases = layer[name].scales.astype(mx.float32), layer[name].biases.astype(mx.float32)
            weight = mx.dequantize(weight, scales, biases, 32, 4)
        exact[name].weight, exact[name].bias = weight.astype(mx.float32), layer[name].bias.astype(mx.float32)
    expected = np.array(exact(x, indices))
    pack_model(layer)
    assert all(isinstance(layer[name], PackedExperts) for name in ("gate_proj", "up_proj", "down_proj"))
    assert layer.up_proj.weight.shape == (NUM_EXPERTS, 96, 64)
    codes = sum(layer[name].num_packed_weights for name in ("gate_proj", "up_proj", "down_proj")) * bits // 8
    assert codes == stored
    np.testing.assert_allclose(np.array(layer(x, indices)), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("type_name", ["Q4_0", "Q6_K", "MXFP4"])
def test_right_experts_pass_the_check(type_name):
    check_layer(*random_experts(type_name))


def test_experts_in_a_wrong_order_are_seen():
    experts, weights = random_experts()
    swapped = PackedExperts([experts.matrices[index] for index in (0, 2, 1, 3, 4)])  # the first is right
    with pytest.raises(WrongProductError, match=r"a product with expert [12] of mlp.up_proj is off by"):
        check_layer(swapped, weights)


def test_a_wrong_product_of_every_expert_is_seen():
    experts, weights = random_experts()
    for matrix in experts.matrices:
        scale_of_the_neighbour(matrix)
    with pytest.raises(WrongProductError, match="differs from that with its dequantised weights"):
        check_layer(experts, weights)


def test_a_damaged_weight_of_an_expert_is_named():
    experts, weights = random_experts()
    weights[1:, -1, 0] = np.nan  # the first expert's matrix is checked by itself
    with pytest.raises(WrongProductError, match=r"^expert [1-4] of mlp\.up_proj holds weights that are not finite"):
        check_layer(experts, weights)


def test_a_check_of_experts_that_sees_nothing_fails(monkeypatch):
    experts, weights = random_experts()
    monkeypatch.setattr(check, "TOLERANCE", 10.0)
    with pytest.raises(WrongProductError, match=r"another expert changes a product with mlp\.up_proj by"):
        check.check_experts(experts, lambda expert, rows: weights[expert][rows], "mlp.up_proj")
