"""Python time of a decode step outside MLX's evaluation, on the path of the Metal kernel, at 30 layers.

While Python builds the graph of a step and reads its result, a GPU waits. So this time is measured where no GPU is: the
engine runs a small model of 30 layers with the Metal backend, whose kernels are replaced by a function that returns its
queries. Norms and RoPE are one operation each, as on a GPU; on a CPU MLX makes about ten of each. All other Python of a
step is the real one. The time inside ``mx.eval`` is left out.

"python per step" is a step as it runs, with its graph replayed if the checkout can do that. The other numbers are those
of a step whose graph is built layer by layer: all of it, without mlx-lm's layers ("workbench per step"), and the
attention of one layer.

    python benchmarks/bench_step_overhead.py
    git worktree add /tmp/before 2fcb5b5
    python benchmarks/bench_step_overhead.py --before /tmp/before  # both, interleaved, each in its own process
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import save, summarise

HERE = Path(__file__).parents[1]
NUM_LAYERS = 30
NUM_REQUESTS = 8
STEPS = 150
SKIPPED = 30


def measure() -> dict[str, float]:
    """Microseconds of CPU time per step, in this process."""
    import workbench  # noqa: F401  (before MLX: it installs the BLAS)

    import mlx.core as mx  # isort: skip
    from mlx_lm.models import llama  # isort: skip

    from workbench import Engine, EngineConfig, SamplingParams
    from workbench.engine import model_runner
    from workbench.kernels.attention.metal.backend import MetalBackend
    from workbench.kernels.attention.selection import get_backend
    from workbench.models.load import LoadedModel
    from workbench.models.preflight import preflight

    def kernel(**_text: Any) -> Any:
        def launch(*, inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            rest = [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes[1:], output_dtypes[1:])]
            return [inputs[0], *rest]

        return launch

    class Pretended(MetalBackend):
        kernel_maker = staticmethod(lambda: kernel)

    backend = Pretended()
    # The preflight would notice that nothing attends; what it finds out about the model is the same for each backend.
    model_runner._tried_backend = lambda model, config: (backend, preflight(model.model, get_backend("gather")), "")

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    arguments = llama.ModelArgs(
        model_type="llama", num_hidden_layers=NUM_LAYERS, rms_norm_eps=1e-5, vocab_size=256, head_dim=16, **sizes
    )
    model = llama.Model(arguments)
    mx.eval(model.parameters())
    loaded = LoadedModel(model, None, "layers", "llama", 4096, frozenset(), 256, "float32", 1, "")
    engine = Engine(loaded, EngineConfig(num_blocks=512, max_num_seqs=NUM_REQUESTS, enable_prefix_caching=False))
    assert engine.runner.mode == "kernel"
    mx.fast.rms_norm = lambda x, weight, eps: mx.softmax(x, axis=-1)
    mx.fast.rope = lambda x, dims, **_: mx.sort(x)
    for index in range(NUM_REQUESTS):
        engine.add_request([index + 1] * 40, SamplingParams(max_tokens=STEPS + 20, ignore_eos=True))

    evaluating = 0.0
    evaluate = mx.eval

    def timed(*arrays: Any) -> None:
        nonlocal evaluating
        started = time.thread_time()
        evaluate(*arrays)
        evaluating += time.thread_time() - started

    attending = modelling = 0.0
    inner = Pretended.write_and_attend
    call_model = llama.Model.__call__

    def timed_model(self: Any, *inputs: Any, **named: Any) -> mx.array:
        nonlocal modelling
        started = time.thread_time()
        out = call_model(self, *inputs, **named)
        modelling += time.thread_time() - started
        return out

    def timed_attention(self: Any, *arrays: Any, **named: Any) -> mx.array:
        nonlocal attending
        started = time.thread_time()
        out = inner(self, *arrays, **named)
        attending += time.thread_time() - started
        return out

    mx.eval = timed
    steps: list[tuple[float, float, float]] = []  # outside of mx.eval; attention per layer; outside of mlx-lm's layers

    take_step = engine._stepper.take if hasattr(engine, "_stepper") else engine._step  # type: ignore[attr-defined]

    def one_step() -> None:
        nonlocal evaluating, attending, modelling
        evaluating = attending = modelling = 0.0
        started = time.thread_time()
        take_step()
        total = time.thread_time() - started
        outside = total - evaluating
        steps.append((1e6 * outside, 1e6 * attending / NUM_LAYERS, 1e6 * (outside - modelling + attending)))

    for _ in range(STEPS // 2):
        engine._thread.call(one_step)
    outside = [row[0] for row in steps[SKIPPED:]]
    replayed: Any = engine.runner.path
    if replayed.name == "replayed":
        assert replayed.num_recorded and not replayed.not_replayed, "no graph was replayed"
        engine.runner.path = engine.runner.watched_path
    Pretended.write_and_attend = timed_attention
    llama.Model.__call__ = timed_model
    for _ in range(STEPS // 2):
        engine._thread.call(one_step)
    assert all(row[1] for row in steps[STEPS // 2 :]), "a step without attention was measured"
    return {
        "python per step, us": statistics.median(outside),
        "layer by layer, us": statistics.median(row[0] for row in steps[STEPS // 2 :]),
        "workbench per step, us": statistics.median(row[2] for row in steps[STEPS // 2 :]),
        "attention per layer, us": statistics.median(row[1] for row in steps[STEPS // 2 :]),
    }


def measure_in(checkout: Path) -> dict[str, float]:
    """`measure` in a process of a checkout."""
    command = [sys.executable, __file__, "--measure"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    arms = {"here": HERE} | ({"before": options.before.resolve()} if options.before else {})
    measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(options.repeats):
        for arm, checkout in arms.items():
            measured[arm].append(measure_in(checkout))
    results: dict[str, Any] = {"layers": NUM_LAYERS, "requests": NUM_REQUESTS}
    for what in measured["here"][0]:
        results[what] = {arm: summarise([run[what] for run in runs]) for arm, runs in measured.items()}
        medians = {arm: row["median"] for arm, row in results[what].items()}
        print(what, {arm: round(median, 1) for arm, median in medians.items()})
        if "before" in medians:
            results[what]["ratio"] = medians["here"] / medians["before"]
            print(f"    ratio {results[what]['ratio']:.2f}")
    save("step_overhead", results)


if __name__ == "__main__":
    main()
