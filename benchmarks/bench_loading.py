"""Starts of a model in separate processes: processor time, time to the first token, and memory.

Three kinds of start take turns: "cold" with an empty cache folder, which compiles the kernels; "checked", which finds
compiled kernels and runs every check; and "remembered", which finds the results of the checks too. Each process imports
everything, loads the model, makes an engine, and generates one token from a prompt of 64.

Memory is the peak of the resident set above that after the imports. The KV pool is part of it.

A fourth kind, "process", does what a user's script does, and counts everything from the start of the process to the
first token, with all that earlier starts keep: Python's bytecode too, although the environment may tell Python to
write none. With ``--other CHECKOUT``, "process, other" does the same with another checkout of this repository.

With ``--llama PYTHON``, llama.cpp loads the same file and generates the same token, in turns.

    python benchmarks/bench_loading.py --model smollm2
    python benchmarks/bench_loading.py --model random-1b --cold 0 --repeats 2
    python benchmarks/bench_loading.py --cold 0 --other /tmp/base
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _common import RESULTS, before_arm, machine, summarise
from bench_llama_cpp import NUM_BLOCKS, LlamaArm, WorkbenchArm, file_of, memory, token_ids

PROMPT_TOKENS = 64
HERE = Path(__file__).parents[1]
PROGRAM = """
import json, sys, time
from workbench import Engine, SamplingParams
engine = Engine(sys.argv[1])
request = engine.add_request([index % 100 for index in range({tokens})], SamplingParams(max_tokens=1))
while not engine.output(request).token_ids:
    engine.step()
print(json.dumps(dict(cpu_s=time.process_time(), modules=len(sys.modules), numba=int("numba.core" in sys.modules))))
sys.stdout.flush()
"""
"""A script from its first line to the first token."""


def start(arm_name: str, path: str) -> dict[str, float]:
    """Load a file in this process and generate a token; times in seconds, memory in MiB."""
    begin = time.process_time()
    if arm_name == "workbench":
        import workbench.models.gguf.loader
        import workbench.models.packed.compiled_step  # noqa: F401
        from workbench import Engine, EngineConfig, SamplingParams  # noqa: F401

        imported = memory("VmRSS")
        imports = time.process_time() - begin
    else:
        import baselines.llama_cpp  # noqa: F401

        imported, imports = memory("VmRSS"), time.process_time() - begin
    cpu, wall = time.process_time(), time.perf_counter()
    arm = WorkbenchArm(path, "float32") if arm_name == "workbench" else LlamaArm(path, 1)
    ready = time.process_time() - cpu
    arm.add(token_ids(PROMPT_TOKENS, arm.vocab_size, 0), 1)
    while not arm.step():
        pass
    return {
        "imports_cpu_s": imports,
        "ready_cpu_s": ready,
        "first_token_cpu_s": time.process_time() - cpu,
        "first_token_wall_s": time.perf_counter() - wall,
        "peak_mib_above_imports": memory("VmHWM") - imported,
    }


def script(path: str, checkout: Path, bytecode: str) -> dict[str, float]:
    """A start of the script with a checkout, with all that earlier starts keep, Python's bytecode included."""
    environment = os.environ | {"WORKBENCH_PREFLIGHT": "remembered", "PYTHONPATH": str(checkout)}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", PROGRAM.format(tokens=PROMPT_TOKENS), path]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout) as process:
        line = process.stdout.readline()
        wall = time.perf_counter() - begin
    return {**json.loads(line), "wall_s": wall}


def run(kind: str, path: str, cache: Path | None, llama: str | None) -> dict[str, float]:
    """One start in a separate process."""
    environment = os.environ | {"WORKBENCH_PREFLIGHT": "always" if kind == "checked" else "remembered"}
    if cache is not None:
        environment["WORKBENCH_CACHE"] = str(cache)
    python = llama if kind == "llama_cpp" and llama else sys.executable
    arm = "llama_cpp" if kind == "llama_cpp" else "workbench"
    command = [python, __file__, "--start", arm, "--model", path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", "random-1b" or a GGUF file')
    parser.add_argument("--llama", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="another checkout for starts of a script")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", type=int, default=1, help="number of cold starts")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(options.start, options.model)))
        return
    path = file_of(options.model)
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.cold):
        before_arm("cold")
        cache = Path(tempfile.mkdtemp())
        runs.setdefault("cold", []).append(run("cold", path, cache, None))
        shutil.rmtree(cache)
    for _ in range(2):
        run("remembered", path, None, None)  # compiles what is not compiled, and remembers
    kinds = ["checked", "remembered", *(["llama_cpp"] if options.llama else [])]
    scripts = {"process": HERE} | ({"process, other": options.other.resolve()} if options.other else {})
    bytecode = tempfile.mkdtemp()
    for checkout in scripts.values():
        for _ in range(2):
            script(path, checkout, bytecode)
    for repeat in range(options.repeats):
        for kind in sorted(scripts, reverse=repeat % 2 == 1):
            before_arm(kind)
            runs.setdefault(kind, []).append(script(path, scripts[kind], bytecode))
        for kind in kinds:
            before_arm(kind)
            runs.setdefault(kind, []).append(run(kind, path, None, options.llama))
    shutil.rmtree(bytecode)
    results: dict[str, Any] = {
        kind: {name: summarise([one[name] for one in of_kind]) for name in of_kind[0]} for kind, of_kind in runs.items()
    }
    measured = {kind: results.pop(kind) for kind in scripts}
    target = RESULTS / "loading.json"
    saved = json.loads(target.read_text()) if target.exists() else {"benchmark": "loading", "models": {}}
    name = "random-1b" if options.model == "random-1b" else Path(path).stem
    saved["models"][name] = {
        "machine": machine(),
        "file_mib": Path(path).stat().st_size / 2**20,
        "pool_blocks": NUM_BLOCKS,
        "prompt_tokens": PROMPT_TOKENS,
        "starts": saved["models"].get(name, {}).get("starts", {}) | results,
        "scripts": measured,
    }
    target.write_text(json.dumps(saved, indent=2) + "\n")
    for kind, row in (measured | results).items():
        print(kind, {key: round(value["median"], 2) for key, value in row.items()}, flush=True)


if __name__ == "__main__":
    main()
