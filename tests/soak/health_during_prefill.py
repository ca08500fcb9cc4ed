"""Latency of /health while the server computes a long prompt: the event loop must not wait for the engine.

    python tests/soak/health_during_prefill.py --prompts 5

Starts `workbench serve` with SmolLM2 and requests /health every 10 ms on one connection: first while the server
computes prompts of 3,000 tokens one after another (as text, so that they are tokenized too), then while it is idle, as
a control. Prints one line of JSON.
"""

import argparse
import http.client
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time


def start_server(*options):
    """The process and its port."""
    command = [sys.executable, "-m", "workbench", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, int(re.search(r":(\d+) ", process.stdout.readline())[1])


def ask(port, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.status == 200, answer
    return answer


def long_prompt(port, draw, num_tokens):
    """A text of random words with this number of tokens; no two texts begin alike."""
    words = [
        "river",
        "stone",
        "light",
        "under",
        "quiet",
        "sky",
        "where",
        "seven",
        "old",
        "engines",
        "hum",
        "in",
        "rows",
    ]
    text = " ".join(draw.choice(words) for _ in range(num_tokens))
    while (count := ask(port, "/tokenize", {"prompt": text})["count"]) > num_tokens:
        text = " ".join(text.split()[: -max(1, (count - num_tokens) // 2)])
    return text


def probe(port, seconds, over):
    """Append the time of each /health to ``seconds``, at most a hundred a second."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not over.wait(0.01):
        start = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - start)


def watched(port, work):
    """Latency of /health in milliseconds during some work, and the duration of the work."""
    seconds, over = [], threading.Event()
    prober = threading.Thread(target=probe, args=(port, seconds, over))
    start = time.perf_counter()
    prober.start()
    work()
    took = time.perf_counter() - start
    over.set()
    prober.join()
    cuts = statistics.quantiles([1000 * s for s in seconds], n=100)
    return {
        "seconds": round(took, 2), "count": len(seconds), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2),
        "max_ms": round(1000 * max(seconds), 2),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--max-num-batched-tokens", default="512")
    options = parser.parse_args()
    process, port = start_server("--max-num-batched-tokens", options.max_num_batched_tokens)
    try:
        draw = random.Random(0)
        prompts = [long_prompt(port, draw, options.tokens) for _ in range(options.prompts)]

        def prefill():
            for prompt in prompts:
                answer = ask(port, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 64

        ask(port, "/v1/completions", {"prompt": "warm up", "max_tokens": 4})
        report = {
            "prompt_tokens": options.tokens, "max_num_batched_tokens": int(options.max_num_batched_tokens),
            "prefill": watched(port, prefill), "idle": watched(port, lambda: time.sleep(3)),
        }  # fmt: skip
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
