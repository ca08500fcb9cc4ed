"""Fixtures shared by the tests: the bundled model, and a tiny random one."""

import pytest

import workbench  # noqa: F401  (before any test imports MLX: it puts the BLAS in place)


@pytest.fixture(scope="session")
def smollm2():
    """The bundled SmolLM2, loaded once; skipped with the reason where it cannot be fetched."""
    from workbench.models import load_model
    from workbench.models.bundled import BundledModelError

    try:
        return load_model("smollm2")
    except BundledModelError as problem:
        pytest.skip(f"the bundled model is not here: {problem}")


@pytest.fixture
def tiny_llama():
    """A random llama of a few thousand parameters with a byte-level tokenizer stand-in."""
    from tiny_models import tiny_loaded_model

    return tiny_loaded_model("llama")
