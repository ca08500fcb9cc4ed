"""Fixtures shared by the tests: the bundled model, and a tiny random one.

Tests compare numbers to the last digits, so they compute on the CPU in float32 on every machine, unless the variable
WORKBENCH_DEVICE names another device. Processes that they start inherit the choice. A test of a GPU takes the fixture
``gpu``.
"""

import os
import signal
from importlib.util import find_spec

import pytest
from word_llama import make_tiny_llama

import workbench  # noqa: F401  (before any test imports MLX: it puts the BLAS in place)
from workbench.base import device
from workbench.base.device import DEVICE_VARIABLE, choose_device

os.environ.setdefault(DEVICE_VARIABLE, "cpu")
os.environ.setdefault("WORKBENCH_PREFLIGHT", "always")  # a kernel that a test breaks has to be checked
os.environ.setdefault("WORKBENCH_WAIT_FOR_COMPILED", "1")  # which steps are compiled must not depend on time
os.environ.pop("COLUMNS", None)  # set by xdist for its workers, which write to pipes
if find_spec("mlx") is not None:  # vLLM's environment has none
    choose_device()


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


@pytest.fixture
def no_compilation():
    """MLX compiles fused kernels with a C++ compiler on CPU, which takes longer than most tests."""
    import mlx.core as mx

    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def gpu(monkeypatch):
    """MLX's GPU as the default device for one test; skipped with the reason if there is none."""
    import mlx.core as mx

    if not (mx.metal.is_available() or mx.cuda.is_available()):
        pytest.skip("MLX has no GPU on this machine")
    try:
        mx.eval(mx.zeros(1, stream=mx.gpu))
    except ValueError as problem:  # tests/support/fake_gpu
        pytest.skip(f"MLX's GPU cannot compute: {problem}")
    before = mx.default_device()
    monkeypatch.setenv(DEVICE_VARIABLE, "gpu")
    monkeypatch.setattr(device, "_held", {})  # by engines of other tests, which are closed or take no step now
    choose_device()
    yield
    mx.set_default_device(before)
