"""``mlx_lm.server``, unchanged, with the weights and the tokens of the other arms."""

from __future__ import annotations

import sys
from typing import Any

import mlx_lm.server
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def load_bundled(*args: Any, **kwargs: Any) -> tuple[Any, TokenizerWrapper, dict[str, Any]]:
    """Replace ``mlx_lm.load``: the bundled GGUF model without an end token, so that outputs have fixed lengths."""
    from workbench.models import load_model

    loaded = load_model("smollm2", weights="float32")
    # The server needs a transformers tokenizer.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bundled_tokenizer())
    return loaded.model, TokenizerWrapper(tokenizer, BPEStreamingDetokenizer), {"model_type": loaded.architecture}


def bundled_tokenizer() -> Tokenizer:
    """The bundled model's tokenizer as one of PyPI ``tokenizers``, without special tokens."""
    from workbench.models.bundled import fetch_bundled
    from workbench.models.gguf.file import GGUFFile
    from workbench.models.gguf.pre_tokenizers import find_pre_tokenizer

    metadata = GGUFFile(fetch_bundled()).metadata
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    splitter = find_pre_tokenizer(metadata["tokenizer.ggml.pre"]).splitter()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def serve(port: int, concurrency: int) -> None:
    """Run the server's ``main`` until the process ends."""
    mlx_lm.server.load = load_bundled
    sys.argv = ["mlx_lm.server", "--model", "smollm2", "--host", "127.0.0.1", "--port", str(port)]
    sys.argv += ["--decode-concurrency", str(concurrency), "--log-level", "WARNING"]
    mlx_lm.server.main()
