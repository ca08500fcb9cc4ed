"""Fixtures shared by the tests: the bundled model, and a tiny random one."""

import signal

import pytest
from word_llama import make_tiny_llama

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


@pytest.fixture(scope="session")
def tiny_llama():
    """`make_tiny_llama`, made once."""
    return make_tiny_llama()
