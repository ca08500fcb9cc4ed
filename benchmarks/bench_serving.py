"""Serving with arrivals: Workbench against a phase-separated engine, mlx-lm, mlx-lm's server and llama.cpp.

Same file, same BLAS, same requests, greedy, fixed output lengths. Every arm is a separate process, arms are
interleaved, and after every repeat the medians so far are saved to benchmarks/results/serving_WORKLOAD[_small].json.

    python benchmarks/bench_serving.py --small                         # the serving table in ten minutes on two cores
    python benchmarks/bench_serving.py                                 # 100 requests of 1,024 in, 128 out
    python benchmarks/bench_serving.py --small --workload all          # all five workloads
    python benchmarks/bench_serving.py --workload sonnet --repeats 1 --arms workbench_float32,phase_separated,mlx_lm
    python benchmarks/bench_serving.py --small --llama PYTHON          # with a Python that has llama-cpp-python

Arms: workbench (the engine as it ships: the file's packed weights), workbench_http (its server), workbench_float32 (the
weights that mlx-lm computes with; every output is compared with this arm's), phase_separated (benchmarks/baselines),
mlx_lm (its BatchGenerator), mlx_lm_http (mlx_lm.server), llama_cpp. The two servers are measured from the client: for
them, queue is the time in the client before the request is sent.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _common import before_arm, machine, save, summarise
from serving.arm import SERVERS
from serving.http_client import replay_over_http, stream_completion, token_prompt
from serving.metrics import compare_outputs, serving_metrics
from serving.replay import Timeline
from serving.workloads import FULL, SMALL, Workload, make_workload

ARM_SCRIPT = Path(__file__).parent / "serving" / "arm.py"
REFERENCE = "workbench_float32"
"""The arm with which outputs are compared."""
ARMS = ("workbench", REFERENCE, "phase_separated", "mlx_lm", "workbench_http", "mlx_lm_http", "llama_cpp")
COMPARED = (
    *(("workbench", arm) for arm in ("mlx_lm", "llama_cpp")),
    *((REFERENCE, arm) for arm in ("phase_separated", "mlx_lm")),
    ("workbench_http", "mlx_lm_http"),
)
RATIOS = ("duration_s", "cpu_s", "mean_ttft_s", "mean_tpot_s", "p99_itl_s")


def bundled_tokenizer() -> tuple[Any, list[int], Path]:
    """The model's tokenizer, the tokens to build prompts from, and the model's file.

    The tokens are words with a leading space. Text made of such tokens is tokenized in the same way again when it is
    sent to mlx-lm's server, which takes only text.
    """
    from workbench.models.bundled import fetch_bundled
    from workbench.models.gguf.file import GGUFFile
    from workbench.models.gguf.tokenizer import GGUFTokenizer

    path = fetch_bundled()
    tokenizer = GGUFTokenizer(GGUFFile(path).metadata)
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    words = [token for token, text in texts.items() if re.fullmatch(r" [a-z]{2,}", text)]
    return tokenizer, [token for token in words if tokenizer.encode(texts[token]) == [token]], path


def package_version(python: str, package: str) -> str:
    """The version of a package in another Python."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", ask], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def run_engine(arm: str, workload_file: str, python: str, model: Path) -> tuple[dict[str, float], list[Timeline]]:
    """CPU seconds, passes, rows, and timelines of an arm that replays the workload itself."""
    command = [python, str(ARM_SCRIPT), arm, workload_file, str(model)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    told = json.loads(printed.splitlines()[-1])
    return told["result"], [Timeline(**timeline) for timeline in told["timelines"]]


def run_server(
    arm: str, workload: Workload, workload_file: str, tokenizer: Any
) -> tuple[dict[str, float], list[Timeline]]:
    """CPU seconds of the server, and timelines measured by a client."""
    command = [sys.executable, str(ARM_SCRIPT), arm, workload_file]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as server:
        try:
            line = server.stdout.readline()
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)", line)[1])
            ours = arm == "workbench_http"
            body: dict[str, Any] = {"temperature": 0.0, "stream": True}
            body |= {"ignore_eos": True, "return_token_ids": True} if ours else {"model": "default_model"}
            prompt_of = token_prompt if ours else lambda request: tokenizer.decode(request.prompt)
            wait_until_ready(port, body)
            before = cpu_time(server)
            timelines = replay_over_http(workload, port, body, prompt_of)
            return {"cpu_s": cpu_time(server) - before}, timelines
        finally:
            server.terminate()


def wait_until_ready(port: int, body: dict[str, Any], seconds: float = 120.0) -> None:
    """Wait for the server's first connection, and have it serve one short request.

    Raises:
        ConnectionError: The server took no connection within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            stream_completion(port, {**body, "prompt": " the end of the story is near", "max_tokens": 4})
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def cpu_time(server: subprocess.Popen[str]) -> float:
    """CPU seconds used by the server."""
    server.stdin.write("\n")
    server.stdin.flush()
    return float(server.stdout.readline())


def print_results(results: dict[str, Any]) -> None:
    """Print the medians, one column per arm, and the number of equal outputs."""
    arms = results["arms"]
    print(f"{'':22s}" + "".join(f"{arm:>17s}" for arm in arms))
    for row in arms[REFERENCE]:
        cells = (f"{values[row]['median']:17.3f}" if row in values else f"{'':17s}" for values in arms.values())
        print(f"{row:22s}" + "".join(cells))
    for arm, compared in results["outputs_compared_with_float32"].items():
        print(f"{arm}: {compared['equal']} of {compared['requests']} outputs equal to those of {REFERENCE}")


def measure(name: str, options: argparse.Namespace, tokenizer: Any, vocabulary: list[int], model: Path) -> None:
    """Run one workload with all arms, interleaved, and save after every repeat."""
    workload = make_workload(name, (SMALL if options.small else FULL)[name], vocabulary, options.seed)
    texts = [tokenizer.decode(request.prompt) for request in workload.requests]
    if any(tokenizer.encode(text) != request.prompt for text, request in zip(texts, workload.requests, strict=True)):
        raise RuntimeError("a prompt is tokenized differently when it is sent as text")
    print(f"{name}: {workload.shape}", flush=True)
    load_average = machine()["load_average"]
    llama_version = package_version(options.llama, "llama-cpp-python") if "llama_cpp" in options.arms else None
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    first: dict[str, list[Timeline]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(json.dumps(workload.to_dict()))
        for repeat in range(options.repeats):
            turn = repeat % len(options.arms)  # no arm always follows the same one
            for arm in options.arms[turn:] + options.arms[:turn]:
                before_arm(arm)
                if arm in SERVERS:
                    result, timelines = run_server(arm, workload, str(file), tokenizer)
                else:
                    python = options.llama if arm == "llama_cpp" else sys.executable
                    result, timelines = run_engine(arm, str(file), python, model)
                result |= serving_metrics(workload, timelines)
                runs[arm].append(result)
                first.setdefault(arm, timelines)
                print(
                    f"{repeat} {arm:16s} {result['duration_s']:7.2f} s  cpu {result['cpu_s']:7.2f} s  "
                    f"ttft {result['mean_ttft_s']:6.2f} s  tpot {result['mean_tpot_s']:6.3f} s",
                    flush=True,
                )
            results = {
                "load_average_at_start": load_average,
                "workload": asdict(workload.shape),
                "seed": options.seed,
                "llama_cpp_python": llama_version,
                **summary(runs),
                "outputs_compared_with_float32": {
                    arm: compare_outputs(first[REFERENCE], timelines, tokenizer.decode)
                    for arm, timelines in first.items()
                    if arm != REFERENCE
                },
            }
            save(f"serving_{name}{'_small' if options.small else ''}", results)
    print_results(results)


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Each arm's rows over the repeats, and the ratios between compared arms, taken repeat by repeat."""
    return {
        "arms": {arm: {row: summarise([run[row] for run in runs[arm]]) for row in runs[arm][0]} for arm in runs},
        "ratios": {
            f"{ours} / {theirs}": {
                row: summarise([a[row] / b[row] for a, b in zip(runs[ours], runs[theirs], strict=True)])
                for row in RATIOS
            }
            for ours, theirs in COMPARED
            if ours in runs and theirs in runs
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="random", choices=[*FULL, "all"])
    parser.add_argument("--small", action="store_true", help="the same proportions, for two cores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", help=f"some of {', '.join(ARMS)}, with commas between; {REFERENCE} is always there")
    parser.add_argument("--llama", metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = set(options.arms.split(",")) if options.arms else set(ARMS)
    if unknown := chosen - set(ARMS):
        parser.error(f"--arms: {', '.join(sorted(unknown))} is not one of {', '.join(ARMS)}")
    if not options.llama:
        chosen.discard("llama_cpp")
    sizes = SMALL if options.small else FULL
    if options.workload not in (*sizes, "all"):
        parser.error(f"--workload {options.workload} has no small size")
    options.arms = [arm for arm in ARMS if arm in chosen | {REFERENCE}]
    tokenizer, vocabulary, model = bundled_tokenizer()
    for name in sizes if options.workload == "all" else [options.workload]:
        measure(name, options, tokenizer, vocabulary, model)


if __name__ == "__main__":
    main()
