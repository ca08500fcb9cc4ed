"""SmolLM2 on a CPU: Workbench against mlx-lm's batch_generate, with and without a real BLAS, and llama.cpp.

16 requests, prompts of 64 to 512 tokens (4,600 in total), 64 output tokens each, all queued at the start. Every arm is
a separate process, because a BLAS can only be put in front of MLX before MLX is imported; arms are interleaved.
Workbench runs with packed weights, with packed weights and activations of 8 bits, and with float32 weights, as all
versions before packed weights did. mlx-lm gets the float32 weights. "as its wheel comes" is mlx-lm with the reference
BLAS of MLX's Linux wheel.

    python benchmarks/bench_engine.py                      # workbench and mlx-lm with the same BLAS, 5 repeats
    python benchmarks/bench_engine.py --wheel 1            # also mlx-lm as its wheel comes, once (minutes)
    python benchmarks/bench_engine.py --llama PYTHON       # also llama.cpp, with a Python that has llama-cpp-python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from _common import before_arm, save, summarise

NUM_REQUESTS, OUTPUT_TOKENS, TOTAL_PROMPT_TOKENS = 16, 64, 4600

WORKBENCH: dict[str, dict[str, Any]] = {
    "workbench": {},
    "workbench_int8": {"activations": "int8"},
    "workbench_float32_weights": {"weights": "float32"},
}
"""Arms of Workbench, with their arguments of `Engine`."""


def prompts() -> list[list[int]]:
    """The prompts as token ids: lengths spread evenly from 64 to 512, then adjusted to 4,600 tokens in total."""
    import random

    generator = random.Random(0)
    lengths = [64 + round(448 * i / (NUM_REQUESTS - 1)) for i in range(NUM_REQUESTS)]
    index = 1
    while sum(lengths) != TOTAL_PROMPT_TOKENS:
        lengths[1 + index % (NUM_REQUESTS - 2)] += 1 if sum(lengths) < TOTAL_PROMPT_TOKENS else -1
        index += 1
    generator.shuffle(lengths)
    return [[generator.randrange(100, 40000) for _ in range(length)] for length in lengths]


class Meter:
    """Wall and CPU time of a run and the time to first token of each request."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        self.first: dict[object, float] = {}
        self.tokens = 0

    def token(self, request: object) -> None:
        self.tokens += 1
        self.first.setdefault(request, time.perf_counter() - self.wall)

    def result(self) -> dict[str, float]:
        return {
            "cpu_s": time.process_time() - self.cpu,
            "wall_s": time.perf_counter() - self.wall,
            "mean_ttft_s": sum(self.first.values()) / len(self.first),
            "output_tokens": self.tokens,
        }


def run_workbench(arm: str, budget: int) -> dict[str, float]:
    from workbench import Engine, EngineConfig, SamplingParams

    config = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=16, num_blocks=512)
    engine = Engine("smollm2", config, **WORKBENCH[arm])
    engine.add_request(list(range(100, 140)), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.run(progress=False)  # compiled kernels, warm weights
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    meter = Meter()
    for prompt in prompts():
        engine.add_request(prompt, params)
    while step := engine.step():
        for chunk in step.chunks:
            if chunk.sampled is not None:
                meter.token(chunk.request_id)
    return meter.result()


def run_mlx_lm() -> dict[str, float]:
    from workbench.models import load_model

    model = load_model("smollm2", weights="float32").model
    from mlx_lm.generate import BatchGenerator

    def generate(inputs: list[list[int]], max_tokens: int, meter: Meter) -> None:
        # The loop of mlx_lm.batch_generate with its defaults, and a clock at each request's first token.
        generator = BatchGenerator(model)
        generator.insert(inputs, [max_tokens] * len(inputs))
        with generator.stats():
            while responses := generator.next_generated():
                for response in responses:
                    meter.token(response.uid)
        generator.close()

    generate([list(range(100, 140))], 3, Meter())
    meter = Meter()
    generate(prompts(), OUTPUT_TOKENS, meter)
    return meter.result()


LLAMA = """
import ctypes, json, sys, time
import llama_cpp as L
path, prompts, output_tokens = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3])
L.llama_backend_init()
log = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(log, ctypes.c_void_p(0))
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
params = L.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, 512, 512, 16
params.n_threads = params.n_threads_batch = 1
params.kv_unified = True
context = L.llama_init_from_model(model, params)
size = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
batch = L.llama_batch_init(512, 0, 1)
def argmax(row):
    pointer = L.llama_get_logits_ith(context, row)
    import numpy
    return int(numpy.ctypeslib.as_array(pointer, shape=(size,)).argmax())
wall, cpu = time.perf_counter(), time.process_time()
todo = [(s, p, t, p == len(ids) - 1) for s, ids in enumerate(prompts) for p, t in enumerate(ids)]
last, first, count = {}, {}, [0] * len(prompts)
def decode(rows):
    batch.n_tokens = len(rows)
    for i, (s, p, t, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = t, p, 1, s, wanted
    assert L.llama_decode(context, batch) == 0
    for i, (s, p, t, wanted) in enumerate(rows):
        if wanted:
            last[s] = (p + 1, argmax(i)); count[s] += 1
            first.setdefault(s, time.perf_counter() - wall)
for start in range(0, len(todo), 512):
    decode(todo[start:start + 512])
for _ in range(output_tokens - 1):
    decode([(s, p, t, True) for s, (p, t) in last.items()])
print(json.dumps({"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall,
                  "mean_ttft_s": sum(first.values()) / len(first), "output_tokens": sum(count)}))
"""


def run_arm(arm: str, budget: int, llama: str | None) -> dict[str, float]:
    """Run one arm in a separate process."""
    environment = {**os.environ, "WORKBENCH_BLAS": "0" if arm == "mlx_lm_as_its_wheel_comes" else "1"}
    if arm == "llama_cpp":
        import tempfile

        from workbench.models.bundled import fetch_bundled

        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(prompts(), file)
            file.flush()
            command = [llama, "-c", LLAMA, str(fetch_bundled()), file.name, str(OUTPUT_TOKENS)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    else:
        command = [sys.executable, __file__, "--arm", arm, "--budget", str(budget)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(printed.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wheel", type=int, default=0, help="runs of mlx-lm as its wheel comes")
    parser.add_argument("--llama", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens of Workbench")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(run_workbench(options.arm, options.budget) if options.arm in WORKBENCH else run_mlx_lm()))
        return

    order = [*WORKBENCH, "mlx_lm", *(["llama_cpp"] if options.llama else [])]
    order = order * options.repeats + ["mlx_lm_as_its_wheel_comes"] * options.wheel
    runs: dict[str, list[dict[str, float]]] = {}
    for arm in order:
        before_arm(arm)
        result = run_arm(arm, options.budget, options.llama)
        runs.setdefault(arm, []).append(result)
        print(f"{arm:28s} cpu {result['cpu_s']:7.2f} s  ttft {result['mean_ttft_s']:6.2f} s", flush=True)
        # Save after every run: the last arm is slow, and an interruption must not lose the earlier results.
        save(
            "engine",
            {
                "workload": "16 requests, 64 to 512 prompt tokens (4600 in all), 64 output tokens each, greedy",
                "max_num_batched_tokens": options.budget,
                "arms": {
                    name: {key: summarise([result[key] for result in results]) for key in results[0]}
                    for name, results in runs.items()
                },
                "ratios": ratios(runs),
            },
        )
    for name, ratio in ratios(runs).items():
        print(f"{name:56s} {ratio['median']:.3f}")


def ratios(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Workbench with packed weights, and with activations of 8 bits, over every other arm, run by run."""
    return {
        f"{ours} / {other}, {key}": summarise(
            [one[key] / two[key] for one, two in zip(runs[ours], runs[other], strict=False)]
        )
        for ours in ("workbench", "workbench_int8")
        for other in runs
        if ours in runs and other != ours
        for key in ("cpu_s", "mean_ttft_s")
    }


if __name__ == "__main__":
    main()
