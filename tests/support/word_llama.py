"""A tiny random llama whose tokens are words, for tests that need an engine but no real language."""


class WordTokenizer:
    """A tokenizer for tests: every token id is a word."""

    vocab_size = 120
    eos_token_ids = frozenset({2})
    bos_token_id = 1
    adds_bos = False
    has_chat_template = False

    def encode(self, text):
        return [int(word.removeprefix("w")) for word in text.split()]

    def decode(self, ids):
        return "".join(f" w{i}" for i in ids)


class TemplateTokenizer(WordTokenizer):
    """Words under a chat template, which runs in the sandbox as a model's own does."""

    adds_bos = True
    has_chat_template = True

    def __init__(self, source):
        from workbench.models.tokenizer import ChatTemplate

        self.apply_chat_template = ChatTemplate(source).render


def make_tiny_llama():
    """A random llama of a few thousand parameters whose tokens are words."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.models import llama

    from workbench.models.load import LoadedModel

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4}
    args = llama.ModelArgs(
        model_type="llama", num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=WordTokenizer.vocab_size, **shape
    )
    mx.random.seed(0)
    model = llama.Model(args)
    # Wider than mlx-lm's initial values: a real model's logits are far apart, unlike those of a fresh model.
    model.update(
        tree_map(lambda weight: 2.5 * mx.random.normal(weight.shape) / weight.shape[-1] ** 0.5, model.parameters())
    )
    mx.eval(model.parameters())
    return LoadedModel(
        model=model,
        tokenizer=WordTokenizer(),
        name="tiny-llama",
        architecture="llama",
        max_position=512,
        eos_token_ids=WordTokenizer.eos_token_ids,
        vocab_size=WordTokenizer.vocab_size,
        dtype="float32",
        num_parameters=100_000,
        source="tests",
    )
