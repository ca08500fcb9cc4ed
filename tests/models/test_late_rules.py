"""Rules of a model that begin at a position or a length are noticed at load, whatever their number and its name."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from late_rules import BY_LENGTH, BY_POSITION, Mutant, draw, judge, make
from mlx_lm.models import ministral3, mistral3
from mlx_lm.models.cache import make_prompt_cache
from test_compiled_step import packed_model
from tiers import examples
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.kernels.attention.selection import get_backend
from workbench.models import far_trial, model_code, small_copy
from workbench.models.packed import step_check
from workbench.models.packed.pack_model import pack_model, why_not_packed
from workbench.models.preflight import UnsupportedModelError, preflight

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())
NUM_MUTANTS = examples(100, 10)
CONFIG = {"num_blocks": 40, "block_size": 8}


def plain_tokens(model, prompt, count):
    """Greedy tokens by mlx-lm's own caches."""
    entries, tokens, given = make_prompt_cache(model), [], prompt
    for _ in range(count):
        tokens.append(int(model(mx.array([given]), cache=entries)[0, -1].argmax()))
        given = tokens[-1:]
    return tokens


def ministral(original, architecture):
    text = {
        "rope_theta": 10000.0,
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": original,
        "llama_4_scaling_beta": 0.5,
    }
    loaded = tiny_loaded_model("ministral3", rope_parameters=text)
    if architecture == "mistral3":
        args = mistral3.ModelArgs(model_type="mistral3", text_config=vars(loaded.model.args))
        outer = mistral3.Model(args)
        outer.language_model = loaded.model
        assert isinstance(loaded.model, ministral3.Model)
        loaded.model = outer
    pack_model(loaded.model)
    return loaded


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("architecture", ["ministral3", "mistral3"])
@pytest.mark.parametrize("original", [16, 24, 100])
def test_ministral_has_the_tokens_of_mlx_lm_beyond_its_original_context(original, architecture):
    """Its queries are longer from there on, which compiled code does not know."""
    loaded = ministral(original, architecture)
    prompt = np.random.default_rng(original).integers(1, 260, original - 5).tolist()
    expected = plain_tokens(loaded.model, prompt, 40)
    engine = Engine(loaded, EngineConfig(**CONFIG))
    engine.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    (output,) = engine.run(progress=False)
    assert list(output.token_ids) == expected
    assert engine.describe()["forward_not_taken"]["compiled"] == (
        "layer 0 is given 'attn_scale', which compiled code does not know"
    )
    engine.close()


def test_random_rules_are_noticed_at_load():
    """At least 95 of 100 models are refused, or served in a way that has the rule."""
    generator, missed = np.random.default_rng(5), []
    for number in range(NUM_MUTANTS):
        mutant = draw(generator, 512)
        verdict, way = judge(make(mutant, number, f"late_rule_{number}"))
        assert verdict in ("refused", "right", "wrong")
        if verdict == "wrong":
            missed.append(f"{mutant}: {way}")
    assert len(missed) <= NUM_MUTANTS // 20, missed


@pytest.mark.parametrize("max_position", [64, 512, 1500])
def test_a_model_without_such_a_rule_is_compiled(max_position):
    assert judge(make(None, 3, f"no_late_rule_{max_position}", max_position)) == ("right", "compiled")


@pytest.mark.parametrize(
    ("begins", "form"), [("position", form) for form in BY_POSITION] + [("keys", form) for form in BY_LENGTH]
)
def test_the_rules_matter(begins, form):
    """The control: without the far trial, these models are served in compiled code, with other logits."""
    mutant = Mutant(form, begins, 120, 1.4, "constant", None, 256)
    loaded = make(mutant, 1, f"late_rule_{begins}_{form.replace(' ', '_')}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_trial.FarTrial, "difference", lambda *_: "")
        patch.setattr(step_check, "position_limit", lambda _: 100)
        assert judge(loaded) == ("wrong", "compiled")
    verdict, way = judge(replace(loaded))  # nothing has been found about this object
    assert verdict == "refused" or (verdict == "right" and way == "layer by layer")


def test_a_rule_in_a_band_around_a_named_number_is_noticed():
    """It ends again, so that the last positions do not show it."""
    loaded = make(None, 0, "late_rule_band", 512)
    module = __import__("sys").modules[type(loaded.model).__module__]
    attention = module.Attention
    call = attention.__call__

    def banded(self, x, mask=None, cache=None):
        offset = cache.offset if cache is not None else 0
        out = call(self, x, mask, cache)
        position = offset[:, None] + mx.arange(1) if isinstance(offset, mx.array) else offset + mx.arange(x.shape[1])
        inside = (position >= 333) & (position < 336)
        return out * mx.where(inside, 1.5, 1.0)[..., None]

    attention.__call__ = banded
    engine = Engine(loaded, EngineConfig(**CONFIG))
    assert engine.describe()["forward"] == "layer by layer"
    engine.close()


def test_a_copy_without_a_head_is_not_made():
    """MLX divides by the number of heads of keys and values, and a whole-number division by 0 ends the process."""
    loaded = tiny_loaded_model("nemotron-nas")  # a layer has four query heads for each
    assert small_copy.small_copy(loaded.model) is None
    assert preflight(loaded.model, get_backend("cpu")).mode == "kernel"


def test_a_layer_that_was_exchanged_is_tried_as_it_is():
    """A copy that is built from the arguments would not have it."""
    loaded = packed_model("llama")
    old = loaded.model.model.layers[1].mlp

    class Late(type(old)):
        def __call__(self, x):
            return super().__call__(x) * (1.5 if x.shape[1] > 300 else 1.0)

    assert small_copy.small_copy(loaded.model) is not None
    old.__class__ = Late
    assert small_copy.small_copy(loaded.model) is None
    with pytest.raises(UnsupportedModelError, match="at positions 0 to 511 differ from the plain model's"):
        Engine(loaded, EngineConfig(**CONFIG))


def test_a_number_that_was_set_afterwards_is_no_copy_s():
    loaded = packed_model("llama")
    loaded.model.model.layers[2].self_attn.secret = 77
    assert small_copy.small_copy(loaded.model) is None
    assert 77 in model_code.named_numbers(loaded.model)


def test_what_was_found_holds_for_the_same_code():
    loaded = packed_model("qwen2")
    before = model_code.code_digest(loaded.model), model_code.fingerprint(loaded.model)
    engine = Engine(loaded, EngineConfig(**CONFIG))  # patched
    assert (model_code.code_digest(loaded.model), model_code.fingerprint(loaded.model)) == before
    engine.close()
    assert (model_code.code_digest(loaded.model), model_code.fingerprint(loaded.model)) == before
    attention = type(loaded.model.model.layers[0].self_attn)
    call = attention.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "__call__", lambda self, x, mask=None, cache=None: call(self, x, mask, cache) * 1.0)
        assert model_code.code_digest(loaded.model) != before[0]
    other = packed_model("qwen2", rope_theta=5000.0)
    assert model_code.code_digest(other.model) == before[0] and model_code.fingerprint(other.model) != before[1]


def test_another_engine_over_a_model_whose_code_has_changed_tries_it_again():
    loaded = make(None, 0, "late_rule_patched", 512)
    Engine(loaded, EngineConfig(**CONFIG)).close()
    mlp = type(loaded.model.model.layers[0].mlp)
    call = mlp.__call__
    mlp.__call__ = lambda self, x: call(self, x) * (1.2 if x.shape[1] > 77 else 1.0)
    with pytest.raises(UnsupportedModelError, match="differ from the plain model's"):
        Engine(loaded, EngineConfig(**CONFIG))


def test_the_copy_is_small_and_leaves_random_numbers_alone():
    loaded = tiny_loaded_model("gemma3_text", hidden_size=256, intermediate_size=512, head_dim=64)
    mx.random.seed(11)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(11)
    copy = small_copy.small_copy(loaded.model)
    assert mx.random.uniform(shape=(3,)).tolist() == expected
    assert copy.args.hidden_size == 32 and loaded.model.args.hidden_size == 256
    assert copy.args.sliding_window == loaded.model.args.sliding_window


def test_the_far_trial_reaches_the_last_position():
    loaded = tiny_loaded_model("llama", max_position_embeddings=3000)
    result = preflight(loaded.model, get_backend("cpu"))
    far = far_trial.far_trial(loaded.model, result)
    assert max(far.contexts) + far_trial.CHUNK + 1 == 3000 and far.longest == far_trial.LONGEST_RUN


def test_configured_names_do_not_matter(tmp_path):
    """Numbers are found in nested arguments too."""
    mutant = Mutant("query scale", "position", 217, 1.3, "nested", None, 512)
    loaded = make(mutant, 1, "late_rule_nested")
    assert 217 in model_code.named_numbers(loaded.model)
    assert json.dumps(vars(loaded.model.args))
