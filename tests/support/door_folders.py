"""Folders of tiny random models as tools write them, with any keys in config.json and any tokenizer."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tiny_configurations import COMMON, SPECIAL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|bos|>", "<|im_end|>", "[gMASK]", "<sop>", "<think>", "</think>")
CHATML = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(special=SPECIAL_TOKENS):
    """A tokenizer of single bytes, and a few special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def fields_of(architecture, **changes):
    """The tiny configuration of an architecture: the fields that it reads, and no others."""
    known = importlib.import_module(f"mlx_lm.models.{architecture}").ModelArgs.__dataclass_fields__
    fields = {name: value for name, value in COMMON.items() if name in known or name == "max_position_embeddings"}
    fields = {**fields, "model_type": architecture, **SPECIAL.get(architecture, {}), "vocab_size": 300, **changes}
    return fields


def write_folder(path, config, *, shapes=None, tokenizer=None, tokenizer_config=None, template=CHATML, files=None):
    """Write a folder.

    Args:
        path: The folder.
        config: Content of config.json.
        shapes: The fields that the weights are made from; None for those of ``config``.
        tokenizer: A tokenizer of PyPI ``tokenizers``.
        tokenizer_config: Keys of tokenizer_config.json.
        template: The chat template.
        files: Further files by name.
    """
    path, made = Path(path), {**config, **(shapes or {})}
    path.mkdir(parents=True)
    module = importlib.import_module(f"mlx_lm.models.{made['model_type']}")
    rng = np.random.default_rng(0)
    weights = {}
    for name, array in tree_flatten(module.Model(module.ModelArgs.from_dict(made)).parameters()):
        values = rng.standard_normal(array.shape) * (2 * array.shape[-1] ** -0.5 if array.ndim > 1 else 0.1)
        weights[name] = mx.array((values + name.endswith("norm.weight")).astype(np.float32))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    (tokenizer or byte_tokenizer()).save(str(path / "tokenizer.json"))
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|bos|>"}
    usual |= {"chat_template": template} if template else {}
    (path / "tokenizer_config.json").write_text(json.dumps(usual | (tokenizer_config or {})))
    for name, content in (files or {}).items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path
