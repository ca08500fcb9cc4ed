"""Bursts of 16 streaming clients: `workbench serve` beside llama.cpp's server, with the same file and one thread.

Three servers run at the same time and take turns, burst by burst, while the others sleep: Workbench with float32
activations, Workbench with activations of 8 bits, and llama-server with its defaults and 16 slots. In a burst, 16
clients send at once; no two prompts share a beginning. Greedy bursts and bursts that sample alternate. Reported are the
server's processor time per token, times to the first token, times between two events of a stream, and peak memory.

    python benchmarks/bench_served.py --llama-server BINARY                      # the bundled SmolLM2, Q4_1
    python benchmarks/bench_served.py --llama-server BINARY --model FILE.gguf

`llama-quantize --allow-requantize` makes the other formats of a file.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from _common import RESULTS, before_arm, free_port, machine, summarise
from bench_llama_cpp import file_of

NUM_CLIENTS, NUM_WORDS, MAX_TOKENS = 16, (24, 48, 96, 192), 24
"""Clients of a burst, words of their prompts in turn (a word is a token or two), and tokens of each answer."""
SAMPLING = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "top_p": 0.95, "top_k": 40}}
WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "that", "on", "with", "as", "they", "one", "this", "some")
CONTEXT = 512
WORKBENCH, WORKBENCH_INT8, LLAMA_CPP = "workbench", "workbench_int8", "llama_cpp"


def prompt_of(burst: str, client: int) -> str:
    """Words in a random order, after the burst and the client, so that no other prompt begins alike."""
    draw = random.Random(f"{burst} {client}")
    words = draw.choices(WORDS, k=NUM_WORDS[client % len(NUM_WORDS)])
    return f"{burst} {client} {' '.join(words)}"


class Server:
    """A server process with its port, and the processor time it has used.

    Args:
        command: Its command.
        port: Its port; 0 if it prints one.
    """

    def __init__(self, command: list[str], port: int) -> None:
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL if port else subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._usage = psutil.Process(self._process.pid)
        self.port = port or int(re.search(r":(\d+) ", self._process.stdout.readline())[1])
        self._model = self._wait()

    def _wait(self) -> str:
        """The model's name, once the server answers."""
        for _ in range(600):
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                connection.request("GET", "/v1/models")
                response = connection.getresponse()
                answer = json.loads(response.read())
                if response.status == 200:
                    return str(answer["data"][0]["id"])
            except OSError:
                pass
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            time.sleep(0.1)
        raise RuntimeError("the server does not answer after a minute")

    def cpu_seconds(self) -> float:
        """Processor time of the process and all its threads."""
        times = self._usage.cpu_times()
        return float(times.user + times.system)

    def peak_mib(self) -> float:
        """Peak of resident memory."""
        status = Path(f"/proc/{self._process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)

    def stream(self, prompt: str, seed: int, sampling: dict[str, Any]) -> list[float]:
        """Seconds from the request to each event with text; the answer must have all its tokens."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        body |= {"seed": seed, "stream_options": {"include_usage": True}, **sampling}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        start, times, tokens = time.perf_counter(), [], 0
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        while line := response.readline():
            now = time.perf_counter() - start
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if any(choice.get("text") for choice in event.get("choices", ())):
                    times.append(now)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        connection.close()
        if tokens != MAX_TOKENS:
            raise RuntimeError(f"the server answered {response.status} with {tokens} tokens instead of {MAX_TOKENS}")
        return times

    def burst(self, name: str, sampling: dict[str, Any]) -> dict[str, float]:
        """All clients at once: CPU seconds per token, mean and largest TTFT, P99 of the gaps between events."""
        cpu, start = self.cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            prompts = [prompt_of(name, client) for client in range(NUM_CLIENTS)]
            streams = list(clients.map(lambda pair: self.stream(pair[1], pair[0], sampling), enumerate(prompts)))
        wall, cpu = time.perf_counter() - start, self.cpu_seconds() - cpu
        first = [times[0] for times in streams]
        gaps = [late - early for times in streams for early, late in itertools.pairwise(times)]
        return {
            "cpu_ms_per_token": 1000 * cpu / (NUM_CLIENTS * MAX_TOKENS),
            "duration_s": wall,
            "ttft_mean_s": statistics.fmean(first),
            "ttft_p99_s": max(first),
            "itl_p99_s": statistics.quantiles(gaps, n=100)[98],
        }

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(timeout=60)


def start_servers(path: str, binary: str) -> dict[str, Server]:
    """The three servers, each with one thread."""
    os.environ["WORKBENCH_THREADS"] = "1"
    ours = [sys.executable, "-m", "workbench", "serve", "--port", "0", "--model", path]
    port, context = free_port(), str(CONTEXT * NUM_CLIENTS)
    theirs = [binary, "--model", path, "--port", str(port), "--ctx-size", context, "--parallel", str(NUM_CLIENTS)]
    return {
        WORKBENCH: Server(ours, 0),
        WORKBENCH_INT8: Server([*ours, "--activations", "int8"], 0),
        LLAMA_CPP: Server([*theirs, "--threads", "1", "--threads-batch", "1"], port),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", metavar="BINARY", required=True, help="llama.cpp's server")
    parser.add_argument("--model", default="smollm2", help='"smollm2", "random-1b" or a GGUF file')
    parser.add_argument("--bursts", type=int, default=4, help="bursts of each server and kind of sampling")
    options = parser.parse_args()
    path = file_of(options.model)
    servers = start_servers(path, options.llama_server)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {kind: {name: [] for name in servers} for kind in SAMPLING}
    try:
        for number in range(-1, options.bursts):  # the first burst warms up
            for kind, sampling in SAMPLING.items():
                for name in sorted(servers, reverse=number % 2 == 0):
                    before_arm(name)
                    run = servers[name].burst(f"{kind} {number + 1}", sampling)
                    if number >= 0:
                        runs[kind][name].append(run)
        peaks = {name: server.peak_mib() for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.close()
    scenes: dict[str, Any] = {}
    for kind, arms in runs.items():
        scenes[kind] = {}
        for name, taken in arms.items():
            pairs = list(zip(taken, arms[LLAMA_CPP], strict=True))
            scenes[kind][name] = {
                key: summarise([run[key] for run in taken])
                | {"ratio": summarise([ours[key] / theirs[key] for ours, theirs in pairs])}
                for key in taken[0]
            }
            ratios = {key: round(value["ratio"]["median"], 2) for key, value in scenes[kind][name].items()}
            print(kind, name, ratios, flush=True)
    target = RESULTS / "served.json"
    saved = json.loads(target.read_text()) if target.exists() else {"benchmark": "served", "models": {}}
    saved["models"][Path(path).stem] = {"machine": machine(), "peak_mib": peaks, "scenes": scenes}
    target.write_text(json.dumps(saved, indent=2) + "\n")
    print(f"peak MiB: {peaks}\nsaved {target}")


if __name__ == "__main__":
    main()
