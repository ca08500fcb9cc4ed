"""Many concurrent streams against a real server: every answer must equal the offline answer, and none may be lost.

    python tests/soak/many_streams.py --requests 2000 --streams 64
    python tests/soak/many_streams.py --requests 20000 --streams 32 --max-tokens 4 --keep-steps 1000

The second command looks for growth with the number of requests: the memory must be flat once the trace is full.
Prints one line of JSON.
"""

import argparse
import concurrent.futures
import http.client
import json
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

ENGINE = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "block_size": 16, "num_blocks": 1024}


def make_requests(count, max_tokens):
    """(prompt, max_tokens) of random shape, from a fixed seed."""
    draw = random.Random(0)
    return [
        ([draw.randrange(3, 120) for _ in range(draw.randint(1, 64))], draw.randint(1, max_tokens))
        for _ in range(count)
    ]


def resident_mib(pid):
    """Memory of a process; None if the system does not tell (Linux does)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


def offline_answers(requests):
    from word_llama import make_tiny_llama

    from workbench import Engine, EngineConfig, SamplingParams

    engine = Engine(make_tiny_llama(), EngineConfig(**ENGINE))
    ids = [engine.add_request(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in requests]
    start = time.perf_counter()
    engine.run(progress=False)
    seconds = time.perf_counter() - start
    answers = [list(engine.output(i).token_ids) for i in ids]
    engine.close()
    return answers, seconds


def stream(port, prompt, max_tokens):
    """Token ids of a streamed answer, and whether it was complete."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    connection.request("POST", "/v1/completions", json.dumps(body))
    events = [line[6:] for line in connection.getresponse().read().decode().splitlines() if line.startswith("data: ")]
    tokens = [t for event in events[:-1] for t in json.loads(event)["choices"][0]["token_ids"]]
    return tokens, events[-1:] == ["[DONE]"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--keep-steps", type=int, default=10_000)
    options = parser.parse_args()
    from serve_helpers import ServerProcess

    requests = make_requests(options.requests, options.max_tokens)
    expected, offline_seconds = offline_answers(requests)
    server = ServerProcess(engine=ENGINE, keep_steps=options.keep_steps)
    memory, over = [], threading.Event()

    def watch_memory():
        while not over.wait(0.1):
            memory.append(resident_mib(server.process.pid))

    watcher = threading.Thread(target=watch_memory)
    watcher.start()
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(options.streams) as pool:
        results = list(pool.map(lambda request: stream(server.port, *request), requests))
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    last_words = server.end()
    report = {
        "requests": options.requests,
        "streams": options.streams,
        "lost": sum(not done for _, done in results),
        "different": sum(tokens != answer for (tokens, _), answer in zip(results, expected)),
        "seconds": round(seconds, 2),
        "offline_seconds": round(offline_seconds, 2),
        "memory_mib": [round(memory[len(memory) * k // 10]) for k in range(10) if memory[0]] + [round(memory[-1] or 0)],
        "all_blocks_free": f"free blocks {ENGINE['num_blocks'] - 1}" in last_words,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
