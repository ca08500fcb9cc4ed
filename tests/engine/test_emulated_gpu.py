"""Engines and notebooks on a GPU that is emulated: MLX claims one, and `workbench.msl` runs its Metal kernels.

Each test runs in another process, because MLX has one default device per process.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from workbench.kernels.msl import why_unavailable

if reason := why_unavailable():
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
NOTEBOOK = "01_packed_prefill"
"""The one that runs in every tier: it compares logits, and calls the model itself."""


def environment(kernels, **variables):
    """The variables of a process with such a GPU."""
    plain = {name: value for name, value in os.environ.items() if name != "WORKBENCH_DEVICE"}
    path = os.pathsep.join(map(str, (SUPPORT / "fake_gpu", SUPPORT, ROOT)))
    return {**plain, "PYTHONPATH": path, "FAKE_GPU": kernels, "WORKBENCH_PREFLIGHT": "always", **variables}


def run(code, kernels="emulated", **variables):
    """The lines that code prints, in a process with such a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        env=environment(kernels, **variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


START = """
import workbench
import mlx.core as mx
from tiny_models import tiny_loaded_model
from workbench import Engine, load_model

def tokens(engine):
    engine.add_request([5 + i % 40 for i in range(75)], max_tokens=6, ignore_eos=True)
    engine.add_request([7, 8, 9], max_tokens=6, ignore_eos=True)
    return [output.token_ids for output in engine.run(progress=False)]

def refusal(make):
    try:
        return f"made {make()}"
    except ValueError as problem:
        return problem

def model():
    return tiny_loaded_model("gemma3_text")  # windows, and more than one launch per step
"""


@cache
def served():
    """Lines about an engine with the right kernel; the tokens of its requests are among them."""
    return run(
        """
with Engine(model(), num_blocks=64, max_num_batched_tokens=40) as engine:
    for array in engine.runner.kv_cache.arrays:
        array[...] = float("nan")
    mx.eval(engine.runner.kv_cache.arrays)
    first = tokens(engine)
    print(engine.device, "|", engine.describe()["runs_on"], "|", repr(engine))
    print(engine.trace[1]._repr_html_().split("attention: ")[1].split(",")[0])
    print({step.kernel.backend for step in engine.trace}, len(engine.trace))
    print(tokens(engine) == first, [chunk.num_cached_tokens for chunk in engine.trace[7].chunks])
    engine.add_request([5, 6, 7, 8], max_tokens=2)
    print(engine.shadow(engine.step()))
    print(first)
workbench.base.device.choose_device("cpu")
with Engine(model(), num_blocks=64, max_num_batched_tokens=40) as engine:
    print(engine.device, engine.trace.meta.model["runs_on"])
    print(tokens(engine) == first)
"""
    )


def test_the_metal_kernel_computes_every_step_and_says_so():
    """Slots without a token are NaN, and the same requests find their blocks afterwards."""
    on_gpu, step, backends, again, shadow, _, cpu, same = served()
    device, words, shown = on_gpu.split(" | ")
    assert device == "gpu" and words == "Metal kernel on Apple M3, emulated" and words in shown
    assert step == "Metal kernel" and backends == "{'metal'} 7" and again == "True [64, 0]"
    assert "agrees with the engine's result (Metal kernel, layer by layer)" in shadow
    assert cpu.startswith("cpu CPU, ") and cpu.endswith("it was asked for, and the GPU is not used") and same == "True"


def test_an_engine_for_the_other_device_is_refused_until_the_first_is_closed():
    lines = run(
        """
first = Engine(model(), num_blocks=64)
print(refusal(lambda: Engine("smollm2", device="cpu")))
print(refusal(lambda: load_model("smollm2", device="cpu")))
print(refusal(lambda: Engine(first.model, device="cpu")))
assert Engine(model()).device == "gpu"          # "auto" follows; nobody keeps this one
steps = first.step(), tokens(first)
first.close()
second = Engine("smollm2", device="cpu", num_blocks=64)
print(second.describe()["runs_on"])
print(refusal(lambda: Engine("smollm2", device="gpu")))
print(refusal(lambda: Engine(first.model)))
tokens(second)
print({step.kernel.backend for step in second.trace})
second.close()
print(refusal(lambda: Engine(second.model, device="gpu")))
loaded = load_model("smollm2", device="cpu")
print(loaded.device, loaded.quantized)
with Engine(loaded, num_blocks=64, batch_invariant=True) as invariant:
    print(invariant.describe()["runs_on"][:18], workbench.base.device.runs_on_gpu())
print(workbench.base.device.runs_on_gpu())
with Engine(first.model, num_blocks=64) as third:
    print(third.device, tokens(third) == steps[1])
print(refusal(lambda: Engine(model(), num_blocks=1)).__class__.__name__)
print(Engine("smollm2", device="cpu", num_blocks=64).device)        # one that could not be made holds nothing
""",
        WORKBENCH_PREFLIGHT="remembered",
    )
    assert [line.split(":")[0] for line in lines[:2]] == [
        "device is 'cpu', but engine 'tiny-gemma3_text' computes on the GPU, and MLX has one device per process"
    ] * 2
    assert "'tiny-gemma3_text' was loaded for the GPU: load it with load_model(..., device='cpu')" in lines[2]
    assert lines[3] == "CPU, compiled code: it was asked for, and the GPU is not used"
    assert "engine 'smollm2' computes on the CPU" in lines[4] and "engine 'smollm2' computes on the CPU" in lines[5]
    assert lines[6] == "{'cpu'}" and "'smollm2' was loaded for the CPU" in lines[7]
    assert lines[8] == "cpu 4 and 8 bits" and lines[9] == "CPU, compiled code False" and lines[10] == "True"
    assert lines[11:] == ["gpu True", "FieldError", "cpu"]


@pytest.mark.parametrize("kernels", ["wrong", "broken"])
def test_a_kernel_that_is_wrong_only_there_gives_way_and_the_record_says_why(kernels):
    facts, got = run(
        """
with Engine(model(), num_blocks=64, max_num_batched_tokens=40) as engine:
    got, facts = tokens(engine), engine.trace.meta.model
    print([facts["runs_on"], facts["attention_fallback_reason"], {step.kernel.backend for step in engine.trace}])
    print(got)
""",
        kernels,
    )
    words, reason, backends = eval(facts)
    assert backends == {"gather"} and words.startswith("MLX operations over gathered context on Apple M3")
    assert reason and words.endswith(f"not the Metal kernel: {reason}")
    assert got == served()[5]


def run_notebook(name, kernels):
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "--nbmake"]
    done = subprocess.run(
        [*command, f"notebooks/{name}.ipynb"],
        cwd=ROOT,
        env=environment(kernels, WORKBENCH_PREFLIGHT="remembered"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_notebook_on_the_gpu():
    run_notebook(NOTEBOOK, "emulated")


@pytest.mark.repeats(of="test_a_notebook_on_the_gpu")
@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("notebooks/*.ipynb") if path.stem != NOTEBOOK))
def test_every_other_notebook_on_the_gpu(name):
    run_notebook(name, "emulated")


@pytest.mark.repeats(of="test_a_kernel_that_is_wrong_only_there_gives_way_and_the_record_says_why")
def test_a_notebook_goes_on_with_a_wrong_kernel():
    run_notebook("02_paged_kv", "wrong")
