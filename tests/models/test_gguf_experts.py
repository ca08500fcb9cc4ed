"""GGUF files of mixtures of experts, against mlx-lm models that hold the same weights."""

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import random_model, tiny_config, write_model

from workbench.models import load_model
from workbench.models.gguf.file import GGUFError
from workbench.models.packed.activations import packed_matrices
from workbench.models.packed.pack_model import why_not_packed

TOKENS = mx.array(np.random.default_rng(5).integers(0, 262, (1, 23)))

MIXTURES = {
    "mixtral": ("llama", {"model_type": "mixtral"}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe": ("qwen3moe", {}),
    "olmoe": ("olmoe", {}),
}


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize(("model_type", "matrix_type"), [
    ("mixtral", "Q4_0"), ("qwen2_moe", "Q8_0"), ("qwen3_moe", "MXFP4"), ("olmoe", "Q5_1"), ("qwen3_moe", "BF16"),
])  # fmt: skip
@pytest.mark.parametrize("weights", ["packed", "float32"])
def test_logits_equal_the_model_with_the_same_weights(tmp_path, model_type, matrix_type, weights):
    architecture, changes = MIXTURES[model_type]
    config = tiny_config(architecture, **changes)
    model = random_model(config)
    stands_for = write_model(tmp_path / "m.gguf", architecture, config, model, matrix_type=matrix_type)
    model.load_weights([(name, mx.array(values)) for name, values in stands_for.items()], strict=True)
    loaded = load_model(tmp_path / "m.gguf", weights=weights)
    assert loaded.architecture == model_type
    expected = np.array(model(TOKENS))
    np.testing.assert_allclose(np.array(loaded.model(TOKENS)), expected, atol=2e-5 * max(1, np.abs(expected).max()))
    experts = [path for path in packed_matrices(loaded.model) if path.endswith("gate_proj[4]")]
    assert len(experts) == (3 if weights == "packed" and not why_not_packed() else 0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_gating_func": 2}, "olmoe.expert_gating_func=2 is not supported for this architecture, only 1 is"),
        ({"expert_weights_scale": 2.5}, "metadata olmoe.expert_weights_scale=2.5 is unknown"),
    ],
)
def test_other_mixtures_are_refused(tmp_path, metadata, message):
    config = tiny_config("olmoe")
    write_model(tmp_path / "m.gguf", "olmoe", config, random_model(config), metadata=metadata)
    with pytest.raises(GGUFError, match=message):
        load_model(tmp_path / "m.gguf")
