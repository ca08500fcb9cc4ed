"""The cost of HTTP: the same requests through `workbench serve` and through engine.run(), on SmolLM2.

Each repeat uses new prompts of random tokens, so that no prefix is found in the cache, and sends them to both sides in
alternating order: to an engine in this process, and as streams, all at once, to a server process with
the same configuration. The answers must be the same tokens. The script reports the processor time of the process that
runs the engine (without the clients) and the time from the first request to the last token.

    python benchmarks/bench_serve.py --repeats 7
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time

import psutil
from _common import save, summarise

CONFIG = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "num_blocks": 512}


def requests_of(repeat: int, count: int, max_tokens: int) -> list[tuple[list[int], int]]:
    """Prompts and output lengths for one repeat."""
    draw = random.Random(repeat)
    return [
        (
            [draw.randrange(100, 40000) for _ in range(draw.randrange(16, 200))],
            draw.randrange(max_tokens // 2, max_tokens),
        )
        for _ in range(count)
    ]


class Offline:
    """An engine in this process."""

    def __init__(self) -> None:
        from workbench import Engine, EngineConfig

        self.engine = Engine("smollm2", EngineConfig(**CONFIG))
        self.process = psutil.Process()

    def answer(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        """Token ids of every answer."""
        from workbench import SamplingParams

        names = [
            self.engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
            for prompt, count in requests
        ]
        self.engine.run(progress=False)
        return [list(self.engine.output(name).token_ids) for name in names]

    def close(self) -> None:
        self.engine.close()


class Served:
    """A server process with a separate client per request."""

    def __init__(self) -> None:
        options = [item for name, value in CONFIG.items() for item in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "workbench", "serve", "--port", "0", *options]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._port = int(re.search(r":(\d+) ", self._server.stdout.readline())[1])
        self.process = psutil.Process(self._server.pid)

    def answer(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        """Token ids of every answer."""
        with concurrent.futures.ThreadPoolExecutor(len(requests)) as clients:
            return list(clients.map(self._stream, requests))

    def _stream(self, request: tuple[list[int], int]) -> list[int]:
        prompt, count = request
        body = {
            "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body))
        lines = connection.getresponse().read().decode().splitlines()
        events = [line[6:] for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]", lines[-3:]
        return [token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]

    def close(self) -> None:
        self._server.send_signal(signal.SIGTERM)
        self._server.wait(timeout=60)


def measured(side: Offline | Served, requests: list[tuple[list[int], int]]) -> tuple[list[list[int]], float, float]:
    """Answers, processor time and wall-clock time."""
    before, start = side.process.cpu_times(), time.perf_counter()
    answers = side.answer(requests)
    after, wall = side.process.cpu_times(), time.perf_counter() - start
    return answers, after.user + after.system - before.user - before.system, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    sides = {"offline": Offline(), "served": Served()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    try:
        for repeat in range(-1, options.repeats):  # the first repeat warms up
            requests = requests_of(repeat, options.requests, options.max_tokens)
            answers = {}
            for name in sorted(sides, reverse=repeat % 2 == 0):
                answers[name], cpu, wall = measured(sides[name], requests)
                if repeat >= 0:
                    times[name].append((cpu, wall))
            assert answers["offline"] == answers["served"], "the server's answers are not the engine's"
    finally:
        for side in sides.values():
            side.close()
    results = {"repeats": options.repeats, "requests": options.requests, "max_tokens": options.max_tokens}
    for index, unit in enumerate(("cpu_seconds", "wall_seconds")):
        ratios = [served[index] / offline[index] for offline, served in zip(times["offline"], times["served"])]
        results[unit] = {name: summarise([pair[index] for pair in pairs]) for name, pairs in times.items()}
        results[unit]["served_over_offline"] = summarise(ratios)
        print(
            f"{unit}: served / offline = {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})"
        )
    save("serve", results)


if __name__ == "__main__":
    main()
