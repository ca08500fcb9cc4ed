"""The bundled model's logits against a forward pass in float64 that knows nothing of mlx-lm.

It takes the tensors as the file stores them: q and k are not reordered, and RoPE turns neighbouring elements, which
is how llama.cpp computes. Fluent text would prove nothing: a model with q and k in the wrong order writes it too.
"""

import mlx.core as mx
import numpy as np
import pytest

from workbench.models import load_model
from workbench.models.gguf.file import GGUFFile

PROMPT = "The three primary colours are red, green and"


def rms_norm(x, weight, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rotate_neighbours(x, theta):
    """RoPE on pairs (2i, 2i + 1) of x [T, heads, head_dim]."""
    num_tokens, _, head_dim = x.shape
    wavelengths = theta ** (np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(num_tokens)[:, None, None] / wavelengths
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return out


def llama_logits_float64(file: GGUFFile, tokens) -> np.ndarray:
    """float64 [T, vocabulary], straight from the file's tensors."""
    facts = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    heads, kv_heads = facts["attention.head_count"], facts["attention.head_count_kv"]
    epsilon, theta = facts["attention.layer_norm_rms_epsilon"], facts["rope.freq_base"]

    def tensor(name):
        return file.tensors[name].float32().astype(np.float64)

    embeddings = tensor("token_embd.weight")
    x = embeddings[np.asarray(tokens)]
    num_tokens = len(tokens)
    hidden_from = np.triu(np.ones((num_tokens, num_tokens), bool), 1)
    for layer in range(facts["block_count"]):
        part = f"blk.{layer}."
        h = rms_norm(x, tensor(part + "attn_norm.weight"), epsilon)
        q, k, v = (h @ tensor(f"{part}attn_{name}.weight").T for name in "qkv")
        q = rotate_neighbours(q.reshape(num_tokens, heads, -1), theta)
        k = rotate_neighbours(k.reshape(num_tokens, kv_heads, -1), theta).repeat(heads // kv_heads, axis=1)
        v = v.reshape(num_tokens, kv_heads, -1).repeat(heads // kv_heads, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
        scores[:, hidden_from] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hts,shd->thd", weights, v).reshape(num_tokens, -1)
        x = x + attended @ tensor(part + "attn_output.weight").T
        h = rms_norm(x, tensor(part + "ffn_norm.weight"), epsilon)
        gate, up = h @ tensor(part + "ffn_gate.weight").T, h @ tensor(part + "ffn_up.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensor(part + "ffn_down.weight").T
    return rms_norm(x, tensor("output_norm.weight"), epsilon) @ embeddings.T


@pytest.fixture(scope="module")
def expected(smollm2):
    return llama_logits_float64(GGUFFile(smollm2.source), smollm2.tokenizer.encode(PROMPT))


def logits(loaded):
    return np.array(loaded.model(mx.array([loaded.tokenizer.encode(PROMPT)])))[0]


def test_logits_equal_a_float64_forward_pass_of_the_stored_tensors(smollm2, expected):
    assert np.abs(expected).max() > 10
    error = np.abs(logits(smollm2) - expected).max()
    assert error < 5e-4, f"largest error {error:.2e}"


def test_q_and_k_in_the_stored_order_give_other_logits(smollm2, expected, monkeypatch):
    """The negative control of the test above."""
    monkeypatch.setattr("workbench.models.gguf.loader._row_order", lambda *_: None)
    wrong = load_model(smollm2.source)
    assert np.abs(logits(wrong) - expected).max() > 1


def test_float32_weights_give_the_same_logits(smollm2, expected):
    kept = load_model("smollm2", weights="float32")
    assert (kept.quantized, smollm2.quantized) == ("", "4 and 8 bits")
    assert kept.num_parameters == smollm2.num_parameters == 134_515_008
    error = np.abs(logits(kept) - expected).max()
    assert error < 5e-4, f"largest error {error:.2e}"


def test_facts_of_the_bundled_model(smollm2):
    assert smollm2.architecture == "llama"
    assert smollm2.max_position == 8192
    assert smollm2.vocab_size == 49152
    assert smollm2.dtype == "float32"
    assert smollm2.eos_token_ids == {0, 2}
    assert repr(smollm2) == (
        "LoadedModel('smollm2': llama, 134.5M parameters, float32, 4 and 8 bits, context 8192, vocabulary 49152)"
    )
