"""Attention is computed as a model asks for it by its use of keys and values; other arithmetic is refused."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from tiny_configurations import SPECIAL
from tiny_models import tiny_model

from workbench.config import EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.kernels.attention import get_backend
from workbench.models import patch
from workbench.models.fetched import Fetched, Scores
from workbench.models.layer_cache import LayerKV
from workbench.models.paged_cache import PagedKVCache
from workbench.models.preflight import UnsupportedModelError, preflight
from workbench.models.trial_steps import STEPS, pack_probe

pytestmark = pytest.mark.usefixtures("no_compilation")


def served(architecture, **changes):
    return preflight(tiny_model(architecture, **changes), get_backend("cpu"))


class Written(llama.Attention):
    """Llama's attention written out; subclasses change a detail."""

    softcap = 0.0

    def __call__(self, x, mask=None, cache=None):
        rows, length, _ = x.shape
        q, k, v = (
            project(x).reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
            for project, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        offset = cache.offset
        k, v = cache.update_and_fetch(self.rope(k, offset=offset), v)
        q = self.rope(q, offset=offset).reshape(rows, self.n_kv_heads, -1, length, q.shape[-1])
        k, v = mx.expand_dims(k, 2), mx.expand_dims(v, 2)
        scores = self.scores(q, k)
        if isinstance(mask, str):
            keys = mx.arange(scores.shape[-1])
            mask = keys <= keys[scores.shape[-1] - length :, None]
        if mask is not None:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        out = mx.softmax(scores, axis=-1, precise=True) @ v
        out = out.reshape(rows, self.n_heads, length, -1).transpose(0, 2, 1, 3)
        return self.o_proj(out.reshape(rows, length, -1))

    def scores(self, q, k):
        return (q * self.scale) @ k.swapaxes(-1, -2)


class Capped(Written):
    def scores(self, q, k):
        scores = mx.matmul(q, k.transpose(0, 1, 2, 4, 3)) * self.scale
        return 3.0 * mx.tanh(scores / 3.0)


class CappedByMethods(Written):
    def scores(self, q, k):
        scores = super().scores(q, k)
        scores = mx.divide(scores, 2.0)
        scores = mx.tanh(scores)
        scores *= 2.0
        return scores


class Sharpened(Written):
    """The scale depends on the length of the context, and no kernel knows how."""

    def scores(self, q, k):
        return super().scores(q, k) * mx.log(mx.array(2.0 + k.shape[-2]))


def written(kind):
    model = tiny_model("llama")
    for layer in model.layers:
        layer.self_attn.__class__ = kind
    return model


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("backend", ["cpu", "gather", "dense"])
@pytest.mark.parametrize("kind", [Written, Capped, CappedByMethods])
def test_scale_and_soft_cap_are_read(kind, backend):
    result = preflight(written(kind), get_backend(backend))
    assert (result.mode, result.reads_arithmetic, result.reason) == ("kernel", True, "")


def test_a_soft_cap_reaches_the_kernel():
    """And without it the logits are others: a kernel that ignored it would not be accepted."""
    runner = ModelRunner(tiny_model("gemma2", attn_logit_softcapping=3.0), EngineConfig(num_blocks=8, block_size=8))
    options, attend = [], type(runner.backend).attend
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(
            type(runner.backend), "attend", lambda self, *given: options.append(given[-1]) or attend(self, *given)
        )
        metadata, positions, token_ids = pack_probe(STEPS[0], np.ones((3, 9), np.int32))
        runner.kv_cache.begin_step(positions, metadata)
        mx.eval(runner.model(mx.array(token_ids)[:, None], cache=runner.kv_cache.argument))
        runner.kv_cache.end_step()
    runner.close()
    assert len(options) == 4 and all(one.softcap == pytest.approx(3.0) for one in options)


def test_arithmetic_that_is_not_known_is_not_served_by_the_kernel():
    with pytest.raises(UnsupportedModelError, match="multiplies its scores by"):
        preflight(written(Sharpened), get_backend("cpu"))


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [("deepseek_v3", (24, 16)), ("mistral4", (24, 16)), ("kimi_linear", (24, 16)), ("longcat_flash", (24, 16))],
)
def test_the_pool_keeps_latents_alone(architecture, sizes):
    result = served(architecture)
    assert all(layer.latent for layer in result.layers)
    assert {(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in result.layers} == {(1, *sizes)}
    assert {layer.bytes_per_token for layer in result.layers} == {24 * 4}
    pool = PagedKVCache(result.layers, 4, 8, get_backend("cpu"))
    assert pool.nbytes == len(result.layers) * 4 * 8 * 24 * 4
    assert all(layer.k_cache is layer.v_cache for layer in pool.layers)


def test_a_wrong_scale_of_the_latents_is_noticed(monkeypatch):
    monkeypatch.setattr(Scores, "scale", property(lambda self: 1.05 * self.inner * self.outer))
    result = served("deepseek_v3")
    assert result.mode == "gather" and "logits differ" in result.reason


@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4_text", "afm7", "iquestloopcoder"])
def test_layers_that_share_keys_and_values_write_them_once(architecture):
    model = tiny_model(architecture)
    result = preflight(model, get_backend("cpu"))
    assert result.mode == "kernel"
    pool = PagedKVCache(result.caches, 8, 8, get_backend("cpu"), reads_arithmetic=result.reads_arithmetic)
    patches = patch.patch_model(model, get_backend("cpu"), result.reads_arithmetic)
    metadata, positions, token_ids = pack_probe(STEPS[0], np.ones((3, 9), np.int32))
    calls = []
    backend = type(get_backend("cpu"))
    original = backend.attend, backend.write
    try:
        backend.attend = lambda self, *given: calls.append("attend") or original[0](self, *given)
        backend.write = lambda self, *given: calls.append("write") or original[1](self, *given)
        pool.begin_step(positions, metadata)
        mx.eval(model(mx.array(token_ids)[:, None], cache=pool.argument))
        pool.check_reads()
    finally:
        backend.attend, backend.write = original
        for one in patches:
            one.restore()
    assert calls.count("write") == len(result.layers) < calls.count("attend")


class Masking(llama.LlamaModel):
    """Llama with a mask that a subclass makes."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        h = self.embed_tokens(inputs)
        offset = cache[0].offset
        keys, rows = mx.arange(0, offset + h.shape[1]), mx.arange(offset, offset + h.shape[1])[:, None]
        for layer, layer_cache in zip(self.layers, cache):
            h = layer(h, self.mask(rows, keys), cache=layer_cache)
        return self.norm(h)

    def mask(self, rows, keys):
        return keys <= rows


class Holes(Masking):
    """A mask that is not causal alone: every row misses position 2."""

    def mask(self, rows, keys):
        return (keys <= rows) & ((keys != 2) | (rows == 2))


@pytest.mark.parametrize(("kind", "mode"), [(Masking, "kernel"), (Holes, "refused")])
def test_masks_are_compared_with_what_the_kernel_does(kind, mode):
    model = tiny_model("llama")
    model.model.__class__ = kind
    if mode == "refused":
        with pytest.raises(UnsupportedModelError, match="passes a mask that is not causal"):
            preflight(model, get_backend("cpu"))
        return
    result = preflight(model, get_backend("cpu"))
    assert result.mode == mode and all(layer.masked for layer in result.layers)


def test_a_mask_that_the_preflight_has_not_seen_is_refused():
    layer = PagedKVCache([LayerKV(1, 8, 8, mx.float32)], 2, 4, get_backend("gather")).layers[0]
    rows = mx.zeros((1, 1, 1, 8))
    with pytest.raises(NotImplementedError, match="passes a mask"):
        layer.attention(rows, *layer.update_and_fetch(rows, rows), softmax_scale=1.0, mask=mx.ones((1, 1), mx.bool_))


@pytest.mark.parametrize("chunk_size", [3, 8])
def test_chunked_attention(chunk_size):
    text = {**SPECIAL["llama4"]["text_config"], "attention_chunk_size": chunk_size}
    result = served("llama4", text_config=text)
    assert result.mode == "kernel" and {layer.chunk_size for layer in result.layers} == {0, chunk_size}


def test_views_of_keys_keep_their_layer():
    layer = PagedKVCache([LayerKV(2, 8, 8, mx.float32)], 2, 4, get_backend("gather")).layers[0]
    keys, values = layer.update_and_fetch(mx.ones((3, 2, 1, 8)), mx.ones((3, 2, 1, 8)))
    queries = mx.ones((3, 2, 1, 8))
    assert isinstance(keys.swapaxes(2, 3), Fetched) and isinstance(queries @ keys.swapaxes(-1, -2), Scores)
    assert not isinstance(keys.swapaxes(0, 1), Fetched) and not isinstance(keys * 2, Fetched)
    assert not isinstance(mx.ones((3, 2, 1, 1)) @ values, Scores)
    with pytest.raises(NotImplementedError, match="positive number"):
        (queries @ keys.swapaxes(-1, -2)) * mx.ones(3)
    with pytest.raises(NotImplementedError, match="adds a mask"):
        (queries @ keys.swapaxes(-1, -2)) + mx.ones(3)
    with pytest.raises(NotImplementedError, match="values of the same layer"):
        (queries @ keys.swapaxes(-1, -2)).softmax(axis=-1) @ mx.ones(3)
