"""Fixtures shared by the tests: the bundled model, and a tiny random one."""

import signal

import pytest

import workbench  # noqa: F401  (before any test imports MLX: it puts the BLAS in place)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works():
    """A shell that runs tests in the background makes them, and every process they start, ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2():
    """The bundled SmolLM2, loaded once; skipped with the reason where it cannot be fetched."""
    from workbench.models import load_model
    from workbench.models.bundled import BundledModelError

    try:
        return load_model("smollm2")
    except BundledModelError as problem:
        pytest.skip(f"the bundled model is not here: {problem}")


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


@pytest.fixture(scope="session")
def tiny_llama():
    """`make_tiny_llama`, made once."""
    return make_tiny_llama()


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
    # Wider than mlx-lm's own start values: the logits of a real model are far apart, those of a fresh one are not.
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
