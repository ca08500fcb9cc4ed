"""``mlx_lm.server`` as it is, on the weights and the tokenizer that every other arm has."""

from __future__ import annotations

import sys
from typing import Any

import mlx_lm.server
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from transformers import PreTrainedTokenizerFast


def load_bundled(*args: Any, **kwargs: Any) -> tuple[Any, TokenizerWrapper, dict[str, Any]]:
    """Stands in for ``mlx_lm.load``: the bundled GGUF model, and no end token, so that outputs have fixed lengths."""
    from workbench.models import load_model

    loaded = load_model("smollm2")
    # The server wants a transformers tokenizer; ours is made of the same library's fast one.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=loaded.tokenizer._tokenizer)
    return loaded.model, TokenizerWrapper(tokenizer, BPEStreamingDetokenizer), {"model_type": loaded.architecture}


def serve(port: int, concurrency: int) -> None:
    """Run the server's own ``main`` until the process ends."""
    mlx_lm.server.load = load_bundled
    sys.argv = ["mlx_lm.server", "--model", "smollm2", "--host", "127.0.0.1", "--port", str(port)]
    sys.argv += ["--decode-concurrency", str(concurrency), "--log-level", "WARNING"]
    mlx_lm.server.main()
