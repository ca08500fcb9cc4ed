"""``mlx_lm.server``, unchanged, with the weights and the tokenizer of the other arms."""

from __future__ import annotations

import sys
from typing import Any

import mlx_lm.server
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from transformers import PreTrainedTokenizerFast


def load_bundled(*args: Any, **kwargs: Any) -> tuple[Any, TokenizerWrapper, dict[str, Any]]:
    """Replace ``mlx_lm.load``: the bundled GGUF model without an end token, so that outputs have fixed lengths."""
    from workbench.models import load_model

    loaded = load_model("smollm2")
    # The server needs a transformers tokenizer; ours wraps the same library's fast tokenizer.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=loaded.tokenizer._tokenizer)
    return loaded.model, TokenizerWrapper(tokenizer, BPEStreamingDetokenizer), {"model_type": loaded.architecture}


def serve(port: int, concurrency: int) -> None:
    """Run the server's ``main`` until the process ends."""
    mlx_lm.server.load = load_bundled
    sys.argv = ["mlx_lm.server", "--model", "smollm2", "--host", "127.0.0.1", "--port", str(port)]
    sys.argv += ["--decode-concurrency", str(concurrency), "--log-level", "WARNING"]
    mlx_lm.server.main()
