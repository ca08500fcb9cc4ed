"""Names replaced in a model's modules: they come back when the last patch is restored."""

import gc

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from tiny_models import tiny_model

from workbench.kernels.attention.selection import get_backend
from workbench.models import patch
from workbench.models.layer_cache import LayerKV
from workbench.models.paged_cache import PagedKVCache


def test_the_last_patch_puts_the_original_back():
    gc.collect()  # engines of other tests give their patches back now, and not in the middle of this one
    original = llama.scaled_dot_product_attention
    num_others = getattr(original, "num_holders", 0)  # engines of other tests that are still referenced
    patches = [patch.patch_model(tiny_model("llama"), get_backend("gather"))[0] for _ in range(2)]
    replacement = llama.scaled_dot_product_attention
    assert isinstance(replacement, patch.AttentionByCache) and replacement.num_holders == num_others + 2
    assert "mlx_lm.models.llama" in repr(patches[0])
    patches[0].restore()
    patches[0].restore()  # a second call does nothing
    assert llama.scaled_dot_product_attention is replacement
    patches[1].restore()
    assert llama.scaled_dot_product_attention is original


@pytest.mark.parametrize("given", [{"mask": "causal"}, {"softcap": 30.0}])
def test_a_kernel_is_not_given_options_that_it_does_not_take(given):
    attention = patch.AttentionByCache(llama.scaled_dot_product_attention)
    cache = PagedKVCache([LayerKV(1, 8, 8, mx.float32)], 2, 4, get_backend("gather")).layers[0]
    rows = mx.zeros((1, 1, 1, 8))
    with pytest.raises(NotImplementedError, match="a mask" if "mask" in given else "softcap"):
        attention(rows, rows, rows, cache=cache, **given)
