"""Logits of an engine against those of the plain mlx-lm model."""

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from workbench import Engine, EngineConfig


def plain_logits(model, token_ids):
    """Logits of every position from mlx-lm: one unchunked forward pass."""
    logits = model(mx.array([token_ids]), cache=make_prompt_cache(model))[0]
    return np.array(logits.astype(mx.float32))


def compare_every_step(loaded, prompts, backend, params, shift=0):
    """Largest difference between an engine's logits and the plain model's, over every sampling row."""
    engine = Engine(
        loaded,
        EngineConfig(
            max_num_batched_tokens=24, block_size=8, num_blocks=64, attention_backend=backend, max_model_len=256
        ),
    )
    for name, tokens in prompts.items():
        engine.add_request(tokens, params, request_id=name)
    rows = []
    while (phase := engine.step_into()) is not None:
        batch = None
        while isinstance(phase, tuple):
            name, value = phase
            if name == "schedule":
                batch = value
            elif name == "prepare" and shift:
                # RoPE depends only on distances: a shift of all rows changes nothing, so the first ones stay.
                value.positions[value.positions >= 8] += shift
            elif name == "forward":
                sampling = [c.request for c in batch.chunks if c.samples]
                rows += [
                    (r.request_id, len(r.token_ids), row) for r, row in zip(sampling, np.array(value), strict=True)
                ]
            phase = engine.step_into()
    worst = spread = 0.0
    finals = {name: prompts[name] + list(engine.output(name).token_ids) for name in prompts}
    engine.close()
    references = {name: plain_logits(loaded.model, tokens) for name, tokens in finals.items()}
    assert len(rows) == len(prompts) * params.max_tokens
    for name, length, row in rows:
        reference = references[name][length - 1]
        worst = float(np.maximum(worst, np.abs(row - reference).max()))  # keeps NaN, unlike max()
        spread = max(spread, float(reference.max() - reference.min()))
    return worst, spread
