"""The custom kernels of the installed mlx-lm on this CPU, recorded, replayed, and compared with what they stand for."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kernel_replay import bytes_of, replay

from workbench import msl

pytest_plugins = ("workbench.apps.metal_on_cpu",)


def normal(*shape, dtype=mx.float32, seed=0, scale=1.0):
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def close(got, expected, dtype=mx.float32, factor=1.0):
    """Within the rounding of a dtype, relative to the largest element."""
    roundoff = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    got, expected = (np.array(x.astype(mx.float32)) for x in (got, expected))
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= factor * roundoff * max(1.0, np.abs(expected).max())


def rms_norm(x, eps, weight=None):
    x = x.astype(mx.float32)
    normed = x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def qk_norm(kernels, dtype):
    module = kernels.imported("mlx_lm.kernels.qk_norm")
    heads, kv_heads, dim = 4, 2, 64
    x = normal(3, 2 * (heads + kv_heads) * dim, dtype=dtype)
    q, k = module.qk_norm(x, n_heads=heads, n_kv_heads=kv_heads, head_dim=dim, eps=1e-5, query_scale=0.5)
    split = x.reshape(3, -1, dim)
    close(q, rms_norm(split[:, :heads], 1e-5) * 0.5, dtype)
    close(k, rms_norm(split[:, heads : heads + kv_heads], 1e-5), dtype)


def qk_norm_rope(kernels, dtype):
    module = kernels.imported("mlx_lm.kernels.qk_norm_rope")
    heads, kv_heads, dim = 4, 2, 64
    x = normal(1, 5, 2 * (heads + kv_heads) * dim, dtype=dtype)
    q, k = module.qk_norm_rope(
        x, n_heads=heads, n_kv_heads=kv_heads, head_dim=dim, eps=1e-5, query_scale=0.5, rope_base=10000.0, offset=7
    )
    split = rms_norm(x.reshape(1, 5, -1, dim), 1e-5)

    def rotated(part):
        moved = part.transpose(0, 2, 1, 3)
        return mx.fast.rope(moved, dim, traditional=True, base=10000.0, scale=1.0, offset=7).transpose(0, 2, 1, 3)

    close(q, rotated(split[:, :, :heads] * 0.5), dtype, 2)
    close(k, rotated(split[:, :, heads : heads + kv_heads]), dtype, 2)


def expert_routing(kernels, dtype):
    module = kernels.imported("mlx_lm.kernels.expert_routing")
    logits, bias = normal(5, 40), normal(40, seed=1, scale=0.1)
    chosen, weights = module.expert_routing(logits, bias, top_k=4, multiplier=1.5, score_eps=1e-6, route_scale=2.0)
    scores = np.array(mx.sigmoid(logits * 1.5))
    order = np.argsort(-(scores + np.array(bias)), axis=-1, kind="stable")[:, :4]
    assert np.array_equal(np.array(chosen), order)
    picked = np.take_along_axis(scores, order, -1)
    close(weights, mx.array(picked / (picked.sum(-1, keepdims=True) + 1e-6) * 2.0))


def post_expert_norm_combine(kernels, dtype):
    module = kernels.imported("mlx_lm.kernels.post_expert_norm_combine")
    experts, weights, weight = normal(3, 4, 96, dtype=dtype), normal(3, 4, seed=1), normal(96, seed=2)
    out = module.post_expert_norm_combine(experts, weights, norm_weight=weight, eps=1e-5)
    scaled = experts.astype(mx.float32) * weight
    close(out, (rms_norm(scaled, 1e-5) * weights[..., None]).sum(axis=-2), dtype, 4)


def rms_norm_sigmoid_gate(kernels, dtype):
    module = kernels.imported("mlx_lm.kernels.rms_norm_sigmoid_gate")
    x, gate = normal(2, 3, 5, 64, dtype=dtype), normal(2, 5, 192, dtype=dtype, seed=1)
    expected = rms_norm(x.transpose(0, 2, 1, 3), 1e-5).reshape(2, 5, 192) * mx.sigmoid(gate.astype(mx.float32))
    close(module.rms_norm_sigmoid_gate(x, gate, eps=1e-5), expected, dtype)


def norm_add_norm(kernels, dtype):
    module = kernels.imported("mlx_lm.kernels.norm_add_norm")
    dim = 160
    branch, stream = normal(3, dim, dtype=dtype), normal(3, dim, seed=1)
    alpha, beta, weight = (normal(dim, seed=seed) for seed in (2, 3, 4))
    norm = nn.RMSNorm(dim, eps=1e-5)
    norm.weight = normal(dim, seed=5)
    for next_norm in (norm, None):
        new, normed = module.norm_add_norm(
            branch, stream, alpha=alpha, beta=beta, post_weight=weight, post_eps=1e-6, next_norm=next_norm
        )
        assert np.isfinite(np.array(new)).all()
        if next_norm is not None:
            close(normed, rms_norm(new, 1e-5, norm.weight), dtype, 2)
            close(module.pre_norm(new, norm, dtype=dtype), rms_norm(new, 1e-5, norm.weight), dtype, 2)


def gated_delta(kernels, dtype, dim=64, vectorized=False, masked=False):
    module = kernels.imported("mlx_lm.models.gated_delta")
    batch, steps, heads_k, heads_v, dim_v = 2, 3, 2, 4, 16
    q, k = (normal(batch, steps, heads_k, dim, dtype=dtype, seed=s, scale=dim**-0.5) for s in (0, 1))
    v = normal(batch, steps, heads_v, dim_v, dtype=dtype, seed=2)
    g = mx.sigmoid(normal(*(batch, steps, heads_v, dim)[: 4 if vectorized else 3], seed=3))
    beta = mx.sigmoid(normal(batch, steps, heads_v, seed=4)).astype(dtype)
    state = normal(batch, heads_v, dim_v, dim, seed=5)
    mask = mx.array([[True, True, False], [True, False, True]]) if masked else None
    expected = module.gated_delta_ops(q, k, v, g, beta, state, mask)
    got = module.gated_delta_kernel(q, k, v, g, beta, state, mask)
    if masked:  # the kernel writes 0 where the reference leaves what the state gives
        keep = mask[..., None, None]
        got, expected = [mx.where(keep, got[0], 0), got[1]], [mx.where(keep, expected[0], 0), expected[1]]
    for one, other in zip(got, expected):
        close(one, other, dtype, 4)
    if dim == 128 and not masked and not vectorized:
        packed, tree = (
            module.gated_delta_kernel(q, k, v, g, beta, state),
            module.gated_delta_kernel_xtree(q, k, v, g, beta, state),
        )
        assert all(mx.array_equal(a, b) for a, b in zip(packed, tree))


def ssm(kernels, dtype):
    module = kernels.imported("mlx_lm.models.ssm")
    batch, heads, dim, groups, states = 2, 4, 16, 2, 64
    x, b, c = (
        normal(batch, 1, *shape, dtype=dtype, seed=s)
        for s, shape in enumerate(((heads, dim), (groups, states), (groups, states)))
    )
    a_log, d, dt_bias = (normal(heads, seed=s) for s in (3, 4, 5))
    dt, state = normal(batch, 1, heads, seed=6), normal(batch, heads, dim, states, seed=7)
    limits = (0.001, 100.0)
    y, new = module.ssm_update(x, a_log, b, c, d, dt, dt_bias, state, limits)
    expected, expected_state = module.ssm_attn(x, a_log, b, c, d, dt, dt_bias, state, limits)
    close(y, expected, dtype, 8)
    close(new, expected_state, dtype, 8)


def wkv7(kernels, dtype):
    module = kernels.imported("mlx_lm.models.rwkv7")
    batch, steps, heads, dim = 1, 3, 2, 32
    r, k, v, a, b = (normal(batch, steps, heads, dim, seed=s, scale=0.3) for s in range(5))
    w, state = mx.sigmoid(normal(batch, steps, heads, dim, seed=5)), normal(batch, heads, dim, dim, seed=6)
    y, new = module.wkv7_kernel(r, w, k, v, a, b, state)
    rows = []
    for t in range(steps):
        out, state = module._wkv7_step_ops(r[:, t], w[:, t], k[:, t], v[:, t], a[:, t], b[:, t], state)
        rows.append(out[..., 0])
    close(y, mx.stack(rows, axis=1))
    close(new, state)


def attention_residuals(kernels, dtype):
    module = kernels.imported("mlx_lm.models.kimi_k3")
    raw, partial, weight = normal(3, 5, 96, dtype=dtype), normal(5, 96, dtype=dtype, seed=1), normal(96, seed=2)
    wide = raw.astype(mx.float32)

    class Blocks:
        pass

    blocks = Blocks()
    blocks.raw, blocks.inv_rms = raw, mx.rsqrt((wide * wide).mean(axis=-1) + 1e-6)
    got = module._attn_res_mix(blocks, partial, weight, 1e-6)
    close(got, module._attn_res_combine(raw, blocks.inv_rms, partial, weight, 1e-6), dtype, 2)


def sinkhorn(kernels, dtype):
    module = kernels.imported("mlx_lm.models.deepseek_v41")
    comb, eps = mx.exp(normal(7, 4, 4)), mx.array([1e-6])
    got = module._sinkhorn(comb, iters=3, eps=eps)
    expected = comb / (mx.sum(comb, axis=-2, keepdims=True) + eps)
    for _ in range(2):
        expected = expected / (mx.sum(expected, axis=-1, keepdims=True) + eps)
        expected = expected / (mx.sum(expected, axis=-2, keepdims=True) + eps)
    close(got, expected)


def bitlinear(kernels, dtype):
    module = kernels.imported("mlx_lm.models.bitlinear_layers")
    layer = module.BitLinear(128, 16, bias=False)
    codes = np.random.default_rng(0).integers(0, 3, (16, 128))
    packed = sum(codes.reshape(4, 4, 128)[i].astype(np.uint8) << 2 * i for i in range(4))
    layer.weight_scale = mx.array([0.5]).astype(dtype)
    x = normal(3, 128, dtype=dtype)
    got = layer.execute_matmul_kernel(x, mx.array(packed))
    close(got, x.astype(mx.float32) @ mx.array(codes - 1.0).astype(mx.float32).T * 0.5, dtype, 4)


def losses(kernels, dtype):
    module = kernels.imported("mlx_lm.tuner.losses")
    q, p = normal(2, 3000, dtype=dtype), normal(2, 3000, dtype=dtype, seed=1)

    def reference(q, p):
        log_q, log_p = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (q, p))
        return (mx.exp(log_p) * (log_p - log_q)).sum(axis=-1)

    def symmetric(q, p):
        log_q, log_p = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (q, p))
        log_m = mx.logaddexp(log_q, log_p) - math.log(2.0)
        return 0.5 * ((mx.exp(log_p) * (log_p - log_m)).sum(-1) + (mx.exp(log_q) * (log_q - log_m)).sum(-1))

    for loss, expected in ((module._kl_div_loss, reference), (lambda q, p: module._js_div_loss(q, p)[0], symmetric)):
        close(loss(q, p), expected(q, p), factor=4)
        close(mx.grad(lambda q, f=loss: f(q, p).sum())(q), mx.grad(lambda q, f=expected: f(q, p).sum())(q), factor=4)


CASES = {
    "qk_norm": qk_norm,
    "qk_norm_rope": qk_norm_rope,
    "expert_routing": expert_routing,
    "post_expert_norm_combine": post_expert_norm_combine,
    "rms_norm_sigmoid_gate": rms_norm_sigmoid_gate,
    "norm_add_norm": norm_add_norm,
    "gated_delta": gated_delta,
    "gated_delta, a gate per element": lambda kernels, dtype: gated_delta(kernels, dtype, vectorized=True),
    "gated_delta, masked": lambda kernels, dtype: gated_delta(kernels, dtype, masked=True),
    "gated_delta, both": lambda kernels, dtype: gated_delta(kernels, dtype, vectorized=True, masked=True),
    "gated_delta, packed": lambda kernels, dtype: gated_delta(kernels, dtype, dim=128),
    "ssm": ssm,
    "wkv7": wkv7,
    "attention_residuals": attention_residuals,
    "sinkhorn": sinkhorn,
    "bitlinear": bitlinear,
    "losses": losses,
}
FOUND = {
    "gated_delta, masked": ("device race", "y[dv_idx] = static_cast<InT>(0);"),
    "gated_delta, both": ("device race", "y[dv_idx] = static_cast<InT>(0);"),
    "losses": ("threadgroup race", "shared[simd_group_id * 2 + "),
}
"""Faults of mlx-lm 0.32.2 that docs/msl.md describes: a kernel without its fault leaves this table."""
IN_FLOAT32_ALONE = ("expert_routing", "wkv7", "sinkhorn", "losses")


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_of_mlx_lm_computes_what_it_stands_for(metal_on_cpu, name, dtype, order):
    if name in IN_FLOAT32_ALONE and dtype != mx.float32:
        pytest.skip("the kernel is used in float32 alone")
    metal_on_cpu.order, metal_on_cpu.threadgroups = order, 2
    if name in FOUND:
        with pytest.raises(msl.MslError) as raised:
            CASES[name](metal_on_cpu, dtype)
        kind, line = FOUND[name]
        assert raised.value.kind == kind and line in str(raised.value)
        metal_on_cpu.checks = False
    CASES[name](metal_on_cpu, dtype)
    assert metal_on_cpu.runs
    for run in metal_on_cpu.runs:
        assert len(run.events) and (run.fault is None) == (name not in FOUND)
        if run.fault is not None:  # lanes stand before the end of their last simd function
            continue
        for output, (data, written) in zip(run.outputs, replay(run, run.inputs).values()):
            assert np.array_equal(bytes_of(output)[written], data[written])


@pytest.mark.parametrize("order", [0, 1])
def test_the_losses_with_barriers_have_no_fault(metal_on_cpu, monkeypatch, order):
    """The control: a barrier before threadgroup memory is used again, and barriers that order it."""
    make = mx.fast.metal_kernel
    changes = {
        "// Share the sum_exp across the threadgroup": "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "mem_flags::mem_none": "mem_flags::mem_threadgroup",
    }

    def mended(*, source, **kernel):
        for old, new in changes.items():
            assert old in source or "backward" in kernel["name"]
            source = source.replace(old, new)
        return make(source=source, **kernel)

    monkeypatch.setattr(mx.fast, "metal_kernel", mended)
    metal_on_cpu.order = order
    losses(metal_on_cpu, mx.float32)
    assert len(metal_on_cpu.runs) == 6 and all(run.fault is None for run in metal_on_cpu.runs)
