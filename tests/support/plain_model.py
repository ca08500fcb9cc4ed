"""Random prompts, and what the plain mlx-lm model answers to them."""

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache


def random_prompts(lengths, vocab_size, seed=1):
    """Random prompts of these lengths, named r0, r1 and so on."""
    rng = np.random.default_rng(seed)
    return {f"r{i}": rng.integers(1, vocab_size, size=n).tolist() for i, n in enumerate(lengths)}


def greedy(model, prompt, num_tokens):
    """Tokens of the plain mlx-lm model with its own caches."""
    caches, tokens, output = make_prompt_cache(model), mx.array([prompt]), []
    for _ in range(num_tokens):
        output.append(int(mx.argmax(model(tokens, cache=caches)[0, -1])))
        tokens = mx.array([output[-1:]])
    return output
