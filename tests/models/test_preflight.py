"""The preflight finds out how a model is served by running it, and refuses others with the reason."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tiny_configurations import NUM_LAYERS, WINDOW
from tiny_models import SERVED_AS, EinsumAttention, tiny_gathered_model, tiny_model

from workbench.config import EngineConfig
from workbench.engine.model_runner import ModelRunner
from workbench.kernels.attention import get_backend
from workbench.models import preflight as preflight_module
from workbench.models import preflight_once as once_module
from workbench.models import trial_steps
from workbench.models.preflight import UnsupportedModelError, preflight
from workbench.models.preflight_once import preflight_once
from workbench.models.preflight_result import PreflightResult
from workbench.models.remembered import NOTHING

pytestmark = pytest.mark.usefixtures("no_compilation")


@pytest.mark.repeats(step=7)
@pytest.mark.parametrize("architecture", sorted(SERVED_AS, key=lambda name: (SERVED_AS[name], name)))
def test_how_each_architecture_is_served(architecture):
    """Those that are refused come last, so that a part of the cases has one."""
    if SERVED_AS[architecture] == "refused":
        with pytest.raises(UnsupportedModelError):
            preflight(tiny_model(architecture), get_backend("gather"))
        return
    result = preflight(tiny_model(architecture), get_backend("gather"))
    assert result.mode == SERVED_AS[architecture], result.reason
    assert result.max_error < 1e-4 < 1e-2 < result.control_error
    assert bool(result.reason) == (result.mode == "gather")
    assert result.final_norm is not None or architecture in ("nanochat", "talkie")


def test_facts_about_a_model():
    result = preflight(tiny_model("gemma3_text", num_key_value_heads=1, head_dim=32), get_backend("gather"))
    assert result.num_layers == NUM_LAYERS and result.num_heads == 4
    assert result.windows == (WINDOW, -1, WINDOW, -1)
    first = result.layers[0]
    assert (first.num_kv_heads, first.k_head_dim, first.v_head_dim, first.dtype) == (1, 32, 32, mx.float32)
    assert first.bytes_per_token == 2 * 32 * 4
    assert result.final_norm == "model.norm"


@pytest.mark.parametrize("window", [128, 4096])
def test_windows_longer_than_the_preflight_are_still_tested(window):
    result = preflight(tiny_model("gpt_oss", sliding_window=window), get_backend("gather"))
    assert result.mode == "kernel" and result.windows == (window, -1, window, -1)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("baichuan_m1", "layer 0 hands its recurrent state to no module"),
        ("gear", "the plain model does not run here"),
        ("deepseek_v32", "indexer"),
    ],
)
def test_a_refusal_gives_the_reason(architecture, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        preflight(tiny_model(architecture), get_backend("gather"))


@pytest.mark.parametrize(("architecture", "sizes"), [("deepseek_v2", (24, 16)), ("youtu_llm", (192, 128))])
def test_keys_and_values_of_different_sizes(architecture, sizes):
    result = preflight(tiny_model(architecture), get_backend("cpu"))
    assert result.mode == "kernel" and {(one.key_dim, one.value_dim) for one in result.layers} == {sizes}


def test_damaged_weights_are_refused():
    model = tiny_model("llama")
    model.model.norm.weight = model.model.norm.weight * mx.nan
    with pytest.raises(UnsupportedModelError, match="not finite"):
        preflight(model, get_backend("gather"))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_models_pass(dtype):
    result = preflight(tiny_model("llama", dtype=dtype), get_backend("gather"))
    assert result.mode == "kernel" and result.layers[0].dtype == dtype


def test_the_model_is_left_as_it_was():
    model = tiny_model("llama")
    attention, norm, logits = llama.scaled_dot_product_attention, type(model.model.norm), plain(model)
    preflight(model, get_backend("gather"))
    assert llama.scaled_dot_product_attention is attention
    assert type(model.model.norm) is norm and not vars(model.model.norm).keys() - vars(norm(4)).keys()
    assert np.array_equal(plain(model), logits)


def plain(model):
    return np.array(model(mx.array([[3, 1, 4, 1, 5]])))


# -- models that are wrong in ways a list of names could not know -------------------------------------------


def changed_llama(make_cache=None, **methods):
    model = tiny_model("llama")
    model.__class__ = type("ChangedLlama", (llama.Model,), {**({"make_cache": make_cache} if make_cache else {})})
    for layer in model.layers:
        layer.self_attn.__class__ = type("ChangedAttention", (llama.Attention,), methods)
    return model


def own_attention(self, x, mask=None, cache=None):
    """Llama's attention with the arithmetic written out: the patched name is never called."""
    rows, length, _ = x.shape
    q, k, v = (
        proj(x).reshape(rows, length, heads, -1).swapaxes(1, 2)
        for proj, heads in ((self.q_proj, self.n_heads), (self.k_proj, self.n_kv_heads), (self.v_proj, self.n_kv_heads))
    )
    offset = cache.offset
    k, v = cache.update_and_fetch(self.rope(k, offset=offset), v)
    out = mx.fast.scaled_dot_product_attention(self.rope(q, offset=offset), k, v, scale=self.scale, mask=mask)
    return self.o_proj(out.swapaxes(1, 2).reshape(rows, length, -1))


def test_a_layer_that_bypasses_the_paged_attention_is_noticed():
    result = preflight(tiny_gathered_model(), get_backend("gather"))
    assert result.mode == "gather" and "called the paged attention 0 times" in result.reason


def test_one_such_layer_is_enough():
    model = tiny_model("llama")
    model.layers[2].self_attn.__class__ = EinsumAttention
    result = preflight(model, get_backend("gather"))
    assert result.mode == "gather" and "called the paged attention 0 or 1 times" in result.reason


def test_attention_that_calls_mlx_itself_is_read():
    result = preflight(changed_llama(__call__=own_attention), get_backend("gather"))
    assert result.mode == "kernel" and result.reads_arithmetic
    assert mx.fast.scaled_dot_product_attention is llama.mx.fast.scaled_dot_product_attention
    assert isinstance(mx, ModuleType)


def test_an_attention_that_ignores_its_cache_is_refused():
    def forgetful(self, x, mask=None, cache=None):
        cache.update_and_fetch(*(mx.zeros((x.shape[0], self.n_kv_heads, x.shape[1], self.head_dim)),) * 2)
        return self.o_proj(mx.tile(self.v_proj(x), (1, 1, 2)))

    with pytest.raises(UnsupportedModelError, match="too little to tell right from wrong"):
        preflight(changed_llama(__call__=forgetful), get_backend("gather"))


def test_a_window_that_only_the_mask_knows_is_not_lost():
    def hidden_window(self, inputs, cache=None, input_embeddings=None):
        h = self.embed_tokens(inputs)
        mask = base.create_attention_mask(h, cache[0], window_size=64)
        for layer, layer_cache in zip(self.layers, cache):
            h = layer(h, mask, cache=layer_cache)
        return self.norm(h)

    model = tiny_model("llama")
    model.model.__class__ = type("HiddenWindow", (llama.LlamaModel,), {"__call__": hidden_window})
    result = preflight(model, get_backend("gather"))
    assert result.mode == "gather" and "logits differ" in result.reason


def test_a_window_with_kept_first_tokens_is_refused():
    model = changed_llama(make_cache=lambda self: [RotatingKVCache(8, keep=4) for _ in self.layers])
    with pytest.raises(UnsupportedModelError, match="keeps its first tokens"):
        preflight(model, get_backend("gather"))


def test_an_unknown_cache_is_refused_by_name():
    class SecretCache(KVCache):
        pass

    model = changed_llama(make_cache=lambda self: [SecretCache() for _ in self.layers])
    with pytest.raises(UnsupportedModelError, match="layer 0 uses a SecretCache: an unknown kind of cache"):
        preflight(model, get_backend("gather"))


def test_a_norm_in_front_of_the_layers_is_not_taken_for_the_final_norm():
    def norm_first(self, inputs, cache=None, input_embeddings=None):
        h = self.norm(self.embed_tokens(inputs))
        for layer, layer_cache in zip(self.layers, cache):
            h = layer(h, base.create_attention_mask(h, layer_cache), cache=layer_cache)
        return h

    model = tiny_model("llama")
    model.model.__class__ = type("NormFirst", (llama.LlamaModel,), {"__call__": norm_first})
    result = preflight(model, get_backend("gather"))
    assert result.mode == "kernel" and result.final_norm is None


def test_a_wrong_backend_is_caught():
    class OffByOne(type(get_backend("gather"))):
        """Attends with a context that lacks its last token."""

        def attend(self, q, k_cache, v_cache, metadata, options):
            return super().attend(q, k_cache, v_cache * 1.01, metadata, options)

    result = preflight(tiny_model("llama"), OffByOne())
    assert result.mode == "gather" and "logits differ" in result.reason


@pytest.mark.parametrize("bad_step", [0, 1])
def test_nan_is_not_taken_for_agreement(bad_step):
    class LosesAStep(type(get_backend("gather"))):
        """Right in one of the two steps, NaN in the other."""

        def attend(self, q, k_cache, v_cache, metadata, options):
            out = super().attend(q, k_cache, v_cache, metadata, options)
            first = int(metadata.seqused_k.sum()) < trial_steps.NUM_SEQS * trial_steps.NUM_TOKENS
            return out * mx.nan if first == (bad_step == 0) else out

    result = preflight(tiny_model("llama"), LosesAStep())
    assert result.mode == "gather" and "logits differ" in result.reason


def test_the_negative_control_would_fail_the_comparison(monkeypatch):
    """Positions off by 3 in the second step, through the same comparison that accepts a model."""
    step_errors = preflight_module._Trial._step_errors

    def shifted(self, kv_cache, step, final_norm, shift=0):
        return step_errors(self, kv_cache, step, final_norm, shift=3 if step is trial_steps.STEPS[-1] else 0)

    monkeypatch.setattr(preflight_module._Trial, "_step_errors", shifted)
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        preflight(tiny_model("llama"), get_backend("gather"))


def test_it_is_quick_on_smollm2(smollm2):
    result = preflight(smollm2.model, get_backend("auto"))
    assert result.mode == "kernel" and result.num_layers == 30 and result.num_heads == 9
    assert isinstance(smollm2.model.model.norm, nn.RMSNorm) and result.final_norm == "model.norm"
    assert result.max_error < 1e-4


def test_the_second_engine_over_a_model_reuses_the_first_result(tiny_llama, monkeypatch):
    """Until the weights are other arrays, or another backend serves the model."""
    loaded = replace(tiny_llama)
    runs = []

    def counted(model, backend, kv_cache_dtype):
        runs.append(backend.name)
        return preflight(model, backend, kv_cache_dtype)

    def serve(backend):
        runner = ModelRunner(loaded, EngineConfig(num_blocks=8, attention_backend=backend))
        runner.close()
        return runner.preflight

    monkeypatch.setattr(once_module, "preflight", counted)
    assert serve("gather") is serve("gather")
    assert runs == ["gather"]
    serve("dense")
    serve("gather")
    assert runs == ["gather", "dense"]
    norm = loaded.model.model.norm
    monkeypatch.setitem(norm, "weight", 2 * norm.weight)  # a module is a dictionary of its arrays
    serve("gather")
    assert runs == ["gather", "dense", "gather"]


def test_replaced_weights_are_tested_again(monkeypatch):
    tested, result = [], PreflightResult("gather", (), 0, None, max_error=0.0, control_error=1.0)
    monkeypatch.setattr(once_module, "preflight", lambda model, *_: tested.append(model.weight) or result)
    loaded = SimpleNamespace(model=nn.Linear(4, 4, bias=False), preflights={}, remembered=NOTHING)
    for _ in range(2):
        assert preflight_once(loaded, get_backend("gather")) == result
    assert len(tested) == 1
    place = id(loaded.model.weight)
    tested.clear()
    del loaded.model["weight"]  # the next array may have its id
    others = []
    while id(array := mx.random.normal((4, 4))) != place:
        others.append(array)
        assert len(others) < 10_000
    loaded.model.weight = array
    preflight_once(loaded, get_backend("gather"))
    assert len(tested) == 1
