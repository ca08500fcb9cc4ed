"""Time to the first token of a served request: `workbench serve` beside llama-cpp-python's server, both on SmolLM2.

Both servers have the same GGUF file and one thread, and run at the same time. Requests come one at a time, to one
server and then to the other, and no two prompts share a beginning. Each asks for one token as a stream. The script
reports the time from the request to the first event, and the processor time of the server.

    python benchmarks/bench_served_ttft.py --llama PYTHON

PYTHON is a Python with ``llama-cpp-python[server]``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from _common import free_port, save, summarise

NUM_WORDS = (16, 128, 480)
"""Words of a prompt; most are one token."""
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "that",
    "on",
    "with",
    "as",
    "his",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
    "from",
    "or",
    "had",
    "by",
    "hot",
    "but",
    "some",
)
CONTEXT = 1024


def prompt_of(num_words: int, seed: int) -> str:
    """Words in a random order; the first two are numbers that no other prompt begins with."""
    draw = random.Random(f"{num_words} {seed}")
    return " ".join([str(1000 + 37 * seed + num_words), str(seed), *draw.choices(WORDS, k=num_words - 2)])


class Server:
    """A server process.

    Args:
        command: Its command.
        port: Its port; 0 if it prints one.
    """

    def __init__(self, command: list[str], port: int) -> None:
        quiet = {"stderr": subprocess.DEVNULL, "text": True}
        if port:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **quiet)
        else:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, **quiet)
            port = int(re.search(r":(\d+) ", self._process.stdout.readline())[1])
        self._port = port
        self._usage = psutil.Process(self._process.pid)
        self._wait()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/models")
        self._model = json.loads(connection.getresponse().read())["data"][0]["id"]

    def _wait(self) -> None:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError(f"the server ended with status {self._process.returncode}") from None
                time.sleep(0.1)
        raise RuntimeError("the server does not answer after a minute")

    def first_token(self, prompt: str) -> dict[str, float]:
        """Seconds to the first event, and processor time of the request."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        before, start = self._usage.cpu_times(), time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        while not (line := response.readline()).startswith(b"data: "):
            if not line:
                raise RuntimeError(f"the server answered {response.status} without a token")
        wall = time.perf_counter() - start
        response.read()
        connection.close()
        after = self._usage.cpu_times()
        return {"wall_s": wall, "cpu_s": after.user + after.system - before.user - before.system}

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", metavar="PYTHON", required=True, help="a Python that has llama-cpp-python[server]")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    from workbench.models.bundled import fetch_bundled

    path, port = str(fetch_bundled()), free_port()
    workbench = [sys.executable, "-m", "workbench", "serve", "--port", "0", "--model", path]
    llama = [options.llama, "-m", "llama_cpp.server", "--model", path, "--port", str(port), "--n_ctx", str(CONTEXT)]
    os.environ["WORKBENCH_THREADS"] = "1"
    servers = {
        "workbench": Server([*workbench, "--max-num-batched-tokens", "512"], 0),
        "llama_cpp": Server([*llama, "--n_threads", "1", "--n_threads_batch", "1", "--n_batch", "512"], port),
    }
    results: dict[str, object] = {"model": Path(path).stem, "repeats": options.repeats}
    try:
        for num_words in NUM_WORDS:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for repeat in range(-1, options.repeats):  # the first repeat warms up
                for name in sorted(servers, reverse=repeat % 2 == 0):
                    run = servers[name].first_token(prompt_of(num_words, repeat + 1))
                    if repeat >= 0:
                        runs[name].append(run)
            row: dict[str, object] = {}
            for key in ("wall_s", "cpu_s"):
                pairs = zip(runs["llama_cpp"], runs["workbench"], strict=True)
                row[key] = {name: summarise([run[key] for run in taken]) for name, taken in runs.items()}
                row[key]["times_as_fast"] = summarise([theirs[key] / max(ours[key], 1e-3) for theirs, ours in pairs])
            results[f"{num_words} words"] = row
            print(num_words, "words:", {key: row[key]["times_as_fast"] for key in row}, flush=True)
    finally:
        for server in servers.values():
            server.close()
    save("served_ttft", results)


if __name__ == "__main__":
    main()
