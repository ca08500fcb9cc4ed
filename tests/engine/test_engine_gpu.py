"""The engine on a GPU, Apple's or NVIDIA's, against mlx-lm on the same GPU; skipped with the reason without one.

Products of float32 matrices are exact to float32 there only if MLX may not round them to TF32 (MLX_ENABLE_TF32=0).
"""

import os

import mlx.core as mx
import numpy as np
import pytest
from exactness import compare_every_step
from tiny_models import SERVED_AS, tiny_loaded_model

from workbench import SamplingParams

if not (mx.metal.is_available() or mx.cuda.is_available()):
    pytest.skip("needs a GPU: Apple's, or NVIDIA's with mlx[cuda13]", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("gpu")
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # read by MLX at its first product

SERVED = sorted(name for name, mode in SERVED_AS.items() if mode != "refused")


def prompts_of(lengths, seed):
    rng = np.random.default_rng(seed)
    return {f"q{i}": rng.integers(3, 60, size=n).tolist() for i, n in enumerate(lengths)}


@pytest.mark.parametrize("architecture", SERVED)
def test_every_step_has_the_logits_of_the_plain_model(architecture):
    """Chunks, decodes and company change nothing but the last digits."""
    loaded, prompts = tiny_loaded_model(architecture), prompts_of((37, 5, 61, 18), seed=1)
    worst, spread = compare_every_step(loaded, prompts, "auto", SamplingParams(max_tokens=6, ignore_eos=True))
    print(f"{architecture}: largest difference {worst:.2e}, logits spread over {spread:.1f}")
    assert worst < 1e-3 * spread


def test_shifted_positions_are_found():
    loaded, prompts = tiny_loaded_model("llama"), prompts_of((37, 5, 61, 18), seed=1)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    worst, spread = compare_every_step(loaded, prompts, "auto", params, shift=3)
    assert worst > 0.01 * spread
