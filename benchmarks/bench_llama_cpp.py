"""Workbench beside llama.cpp on a CPU: decode, prefill, time to load and peak memory, of the same GGUF file.

All run as processes that load the file once, and take turns: one repeat of a scene in one, then in the next, while
the others sleep. Workbench runs twice, with float32 activations and with activations of 8 bits, through its engine,
scheduler and records included; llama.cpp through `llama_decode` with its defaults, and with greedy sampling in NumPy.
Ratios are taken repeat by repeat.

    python benchmarks/bench_llama_cpp.py --llama PYTHON                     # the bundled SmolLM2, Q4_1
    python benchmarks/bench_llama_cpp.py --llama PYTHON --model random-1b   # random weights in Q4_0, written to /tmp
    python benchmarks/bench_llama_cpp.py --llama PYTHON --model FILE.gguf --threads 1 2

PYTHON is a Python with llama-cpp-python and NumPy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import RESULTS, before_arm, machine, summarise

SCENES = {"decode, batch 1": (1, 16, 48), "decode, batch 4": (4, 16, 24), "decode, batch 16": (16, 16, 12)}
"""Requests, prompt tokens of each, and decoded tokens of each."""
PREFILL, PREFILL_TOKENS = "prefill of 512", 512
TARGETS = {"decode, batch 1": 1.0, "decode, batch 4": 1.5, "decode, batch 16": 2.0, PREFILL: 1.5}
NUM_BLOCKS, BLOCK_SIZE = 96, 16
WORKBENCH, WORKBENCH_INT8, LLAMA_CPP = "workbench", "workbench_int8", "llama_cpp"


def token_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(100, min(vocab_size, 30_000)) for _ in range(count)]


# -- the processes -------------------------------------------------------------------------------------------------


class WorkbenchArm:
    """The engine, with all it records.

    Args:
        path: The file.
        activations: "float32" or "int8".
    """

    def __init__(self, path: str, activations: str) -> None:
        from workbench import Engine, EngineConfig
        from workbench.models import load_model

        loaded = load_model(path, activations=activations)
        limits = {"max_num_batched_tokens": PREFILL_TOKENS, "max_num_seqs": 16, "enable_prefix_caching": False}
        self._engine = Engine(loaded, EngineConfig(num_blocks=NUM_BLOCKS, **limits))
        num_groups = len(self._engine.runner.groups)
        if num_groups > 1:  # a token takes a slot in the blocks of each group
            self._engine.close()
            self._engine = Engine(loaded, EngineConfig(num_blocks=NUM_BLOCKS * num_groups, **limits))
        self.vocab_size = loaded.vocab_size
        self.info = f"compiled step: {self._engine.runner.not_taken.get('compiled', 'yes')}"

    def add(self, prompt: list[int], max_tokens: int) -> None:
        from workbench import SamplingParams

        self._engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    def step(self) -> int:
        """One step; the number of tokens it sampled."""
        step = self._engine.step()
        return sum(chunk.sampled is not None for chunk in step.chunks) if step else 0


class LlamaArm:
    """llama.cpp with one KV buffer for all sequences."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp
        from baselines.llama_cpp import LlamaCppEngine

        self._engine = LlamaCppEngine(path, 16, NUM_BLOCKS * BLOCK_SIZE, PREFILL_TOKENS, threads)
        self.vocab_size = self._engine._vocab_size
        self.info = f"llama-cpp-python {llama_cpp.__version__}, " + llama_cpp.llama_print_system_info().decode().strip()
        self._added = 0

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self._engine.add(self._added, prompt, max_tokens)
        self._added += 1

    def step(self) -> int:
        """One step; the number of tokens it sampled."""
        return len(self._engine.step().tokens) if self._engine._slots else 0


def serve(arm_name: str, path: str, threads: int) -> None:
    """Load the file, then answer each scene that comes on standard input with its times."""
    if arm_name != LLAMA_CPP:
        import workbench
        import workbench.models.gguf.loader
        import workbench.models.packed.compiled_step  # noqa: F401  (what a start imports is not the model's memory)
        from workbench import Engine, EngineConfig, SamplingParams  # noqa: F401
    else:
        import baselines.llama_cpp  # noqa: F401
    imported = memory("VmRSS")
    clocks = time.perf_counter(), time.process_time()
    arm: WorkbenchArm | LlamaArm
    if arm_name == LLAMA_CPP:
        arm = LlamaArm(path, threads)
    else:
        arm = WorkbenchArm(path, "int8" if arm_name == WORKBENCH_INT8 else "float32")
    loading = {"wall_s": time.perf_counter() - clocks[0], "cpu_s": time.process_time() - clocks[1]}
    print(json.dumps({"info": arm.info, "load": loading}), flush=True)
    for line in sys.stdin:
        scene, seed = json.loads(line)
        print(json.dumps(run_scene(arm, scene, seed) | {"peak_mib": memory("VmHWM") - imported}), flush=True)


def run_scene(arm: WorkbenchArm | LlamaArm, scene: str, seed: int) -> dict[str, float]:
    """Tokens per second of one repeat."""
    count, length, tokens = SCENES.get(scene, (1, PREFILL_TOKENS, 1))
    for index in range(count):
        arm.add(token_ids(length, arm.vocab_size, seed * 100 + index), tokens + (scene != PREFILL))
    if scene != PREFILL:
        while arm.step() < count:  # the prompts
            pass
    wall, cpu, made = time.perf_counter(), time.process_time(), 0
    while made < count * tokens:
        made += arm.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    while arm.step():
        pass
    rows = PREFILL_TOKENS if scene == PREFILL else made
    return {"per_wall_second": rows / wall, "per_cpu_second": rows / cpu}


def memory(field: str) -> float:
    """A line of /proc/self/status in MiB; 0 if there is no such file."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


# -- the comparison ------------------------------------------------------------------------------------------------


class Arm:
    """A process of `serve`."""

    def __init__(self, name: str, python: str, path: str, threads: int) -> None:
        environment = os.environ | {"WORKBENCH_THREADS": str(threads)}
        command = [python, __file__, "--serve", name, "--model", path, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about = self._answer()

    def run(self, scene: str, seed: int) -> dict[str, float]:
        self._process.stdin.write(json.dumps([scene, seed]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def compare(path: str, threads: int, llama: str, repeats: int) -> dict[str, Any]:
    """All scenes with a number of threads."""
    pythons = {WORKBENCH: sys.executable, WORKBENCH_INT8: sys.executable, LLAMA_CPP: llama}
    arms = {name: Arm(name, python, path, threads) for name, python in pythons.items()}
    results: dict[str, Any] = {"arms": {name: arm.about for name, arm in arms.items()}, "scenes": {}}
    peaks = dict.fromkeys(arms, 0.0)
    for scene in (*SCENES, PREFILL):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for repeat in range(-1, repeats):  # the first one warms both up
            for name, arm in arms.items():
                before_arm(name)
                run = arm.run(scene, repeat + 1)
                peaks[name] = max(peaks[name], run.pop("peak_mib"))
                if repeat >= 0:
                    runs[name].append(run)
        row: dict[str, Any] = {
            name: {key: summarise([run[key] for run in runs[name]]) for key in runs[name][0]} for name in arms
        }
        for name, key in itertools.product((WORKBENCH, WORKBENCH_INT8), ("per_wall_second", "per_cpu_second")):
            pairs = zip(runs[name], runs[LLAMA_CPP], strict=True)
            row[name][f"ratio, {key}"] = summarise([ours[key] / theirs[key] for ours, theirs in pairs])
        row["target"] = TARGETS[scene]
        results["scenes"][scene] = row
        speeds = [f"{row[name]['per_cpu_second']['median']:8.1f}" for name in arms]
        ratios = [f"{row[name]['ratio, per_cpu_second']['median']:.2f}" for name in (WORKBENCH, WORKBENCH_INT8)]
        print(
            f"{threads} threads, {scene:17s} {' '.join(speeds)} tok per CPU s, ratios {' '.join(ratios)} "
            f"(target {TARGETS[scene]})",
            flush=True,
        )
    for arm in arms.values():
        arm.close()
    results["peak_mib_above_imports"] = peaks
    return results


def write_random_1b(path: Path) -> None:
    """A llama with 1.2 billion random weights in Q4_0."""
    import gguf
    import numpy as np

    layers, hidden, wide, vocab, heads, kv_heads, head_dim = 16, 2048, 8192, 128_256, 32, 8, 64
    writer, generator = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(vocab)
    writer.add_file_type(2)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = [letters[number].encode() if number < 256 else b"t%d" % number for number in range(vocab)]
    tokens[300] = b"ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, outputs: int, columns: int) -> None:
        blocks = generator.integers(0, 256, (outputs, columns // 32, 18), dtype=np.uint8)
        scales = np.full((outputs, columns // 32, 1), columns**-0.5 / 4.6, np.float16)
        blocks[..., :2] = scales.view(np.uint8)
        writer.add_tensor(name, blocks.reshape(outputs, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    add("token_embd.weight", vocab, hidden)
    for layer in range(layers):
        for part, outputs, columns in (
            ("attn_q", heads * head_dim, hidden),
            ("attn_k", kv_heads * head_dim, hidden),
            ("attn_v", kv_heads * head_dim, hidden),
            ("attn_output", hidden, heads * head_dim),
            ("ffn_gate", wide, hidden),
            ("ffn_up", wide, hidden),
            ("ffn_down", hidden, wide),
        ):
            add(f"blk.{layer}.{part}.weight", outputs, columns)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_of(model: str) -> str:
    """The path of a model's file."""
    if model == "random-1b":
        path = Path(tempfile.gettempdir()) / "workbench-random-1b.gguf"
        if not path.exists():
            write_random_1b(path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        return str(path)
    if model == "smollm2":
        from workbench.models.bundled import fetch_bundled

        return str(fetch_bundled())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--model", default="smollm2", help='"smollm2", "random-1b" or a GGUF file')
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.model, options.threads[0])
        return
    path = file_of(options.model)
    size = Path(path).stat().st_size / 2**20
    for name in (WORKBENCH, WORKBENCH_INT8):
        Arm(name, sys.executable, path, 1).close()  # compiles what is not compiled yet
    target = RESULTS / "llama_cpp.json"
    saved = json.loads(target.read_text()) if target.exists() else {"benchmark": "llama_cpp", "models": {}}
    name = "random-1b" if options.model == "random-1b" else Path(path).stem
    for count in dict.fromkeys(options.threads):
        result = compare(path, count, options.llama, options.repeats)
        before = saved["models"].get(name, {}).get("threads", {})
        saved["models"][name] = {"machine": machine(), "file_mib": size, "threads": before | {str(count): result}}
        target.write_text(json.dumps(saved, indent=2) + "\n")
        print(f"saved {target}", flush=True)


if __name__ == "__main__":
    main()
