"""A server under attack from all sides at once, on a machine that makes trouble, beside honest streams.

    python tests/soak/hostile.py --minutes 10 --write

The attacks are in attacks.py, what the machine does in hardships.py. Sixteen honest clients stream meanwhile, and four
more in a process that is stopped and continued; every one of their answers must equal the offline one. Prints one line
of JSON.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from attacks import attack_all, give_way  # noqa: E402 - beside this file

ENGINE = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "block_size": 16, "num_blocks": 1024}
MLX_CACHE_BYTES = 1 << 20
"""Limit of MLX's cache of freed buffers. MLX fills its own, 32 MiB on a CPU, over many minutes (see engine.py)."""

WARM_UP_SECONDS = 120
"""Time from which memory must be flat: the trace is full, and the largest bursts of several attacks have coincided."""

RESULT = Path(__file__).parent / "results" / "hostile.json"
NUM_STOPPED = 4
"""Honest clients in the process that is stopped and continued."""


def probe_health(port):
    """Print the times of /health on new connections, ten a second, until standard input ends.

    It runs in a separate process: in that of the clients it would wait for their turns of the interpreter.
    """
    over, seconds = threading.Event(), []

    def probe():
        while not over.wait(0.1):
            start = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            seconds.append(time.perf_counter() - start)
            connection.close()

    thread = threading.Thread(target=probe)
    thread.start()
    sys.stdin.read()
    over.set()
    thread.join()
    print(json.dumps(seconds))


def separate_processors():
    """The processors, if the server can have one for itself: attackers are on other machines."""
    processors = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    return processors if len(processors) > 1 else set()


def be_honest_together(port, path):
    """Honest clients with the requests and answers of a file, until standard input ends."""
    pairs, draw, results, over = json.loads(Path(path).read_text()), random.Random(2), Counter(), threading.Event()
    clients = [
        threading.Thread(target=be_honest, args=(port, lambda: draw.choice(pairs), results, over))
        for _ in range(NUM_STOPPED)
    ]
    for client in clients:
        client.start()
    sys.stdin.read()
    over.set()
    for client in clients:
        client.join()
    print(json.dumps(results))


def start_part(option, *values):
    """Another process of this script, which works until ``end_part``."""
    command = [sys.executable, __file__, option, *map(str, values)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end_part(process):
    """End a process of this script; returns what it found."""
    return json.loads(process.communicate(timeout=300)[0])


def be_honest(port, requests, results, over):
    """Stream answers, again where the server had no room, and keep those that are wrong."""
    from many_streams import stream

    give_way()
    while not over.is_set():
        (prompt, max_tokens), expected = requests()
        try:
            tokens, complete = stream(port, prompt, max_tokens)
        except (OSError, http.client.HTTPException, IndexError, KeyError):
            results["refused or cut"] += 1
            over.wait(0.05)
            continue
        if not tokens and not complete:  # status 429 or 503
            results["refused or cut"] += 1
            over.wait(0.05)
            continue
        results["equal" if tokens == expected and complete else "different"] += 1


def tenths(values):
    """Medians of the tenths of a run."""
    return [round(statistics.median(values[len(values) * k // 10 : len(values) * (k + 1) // 10])) for k in range(10)]


def quantiles_ms(seconds):
    cuts = statistics.quantiles([1000 * s for s in seconds], n=100, method="inclusive")
    return {
        "count": len(seconds),
        "p50": round(cuts[49], 2),
        "p99": round(cuts[98], 2),
        "max": round(1000 * max(seconds)),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--attack", type=int, metavar="PORT", help="only attack this port, until standard input ends")
    parser.add_argument("--probe", type=int, metavar="PORT", help="only time /health, until standard input ends")
    parser.add_argument("--honest", nargs=2, metavar=("PORT", "FILE"), help="only stream, until standard input ends")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--together", action="store_true", help="let attackers and clients use the server's processor")
    parser.add_argument("--write", action="store_true", help="keep the result in tests/soak/results")
    options = parser.parse_args()
    if options.attack:
        return attack_all(options.attack)
    if options.probe:
        return probe_health(options.probe)
    if options.honest:
        return be_honest_together(int(options.honest[0]), options.honest[1])
    from hardships import Hardships

    with tempfile.TemporaryDirectory() as folder:
        hardships = Hardships(Path(folder))
        try:
            return besiege(options, Path(folder), hardships)
        finally:
            hardships.release()


def besiege(options, folder, hardships):
    """Attack a server, and report."""
    begun_at_load = os.getloadavg()[0]
    from many_streams import make_requests, offline_answers, resident_mib
    from serve_helpers import ServerProcess

    requests = make_requests(500, 24)
    expected, _ = offline_answers(requests)
    processors = set() if options.together else separate_processors()
    if processors:
        os.sched_setaffinity(0, {max(processors)})
    settings = {"max_queue": 512, **hardships.settings}
    server = ServerProcess(
        environment=hardships.environment, engine=ENGINE, keep_steps=1000, serve=settings, record_to=hardships.trace,
        mlx_cache_bytes=MLX_CACHE_BYTES,
    )  # fmt: skip
    if processors:  # of this process and of all that it starts from now on
        os.sched_setaffinity(0, processors - {max(processors)})
    draw, lock = random.Random(1), threading.Lock()

    def next_request():
        with lock:
            index = draw.randrange(len(requests))
        return requests[index], expected[index]

    results = Counter()
    memory = []

    def during(seconds, is_probed=True):
        """Let the honest clients stream; returns the times of /health meanwhile."""
        over = threading.Event()
        threads = [
            threading.Thread(target=be_honest, args=(server.port, next_request, results, over))
            for _ in range(options.streams)
        ]
        probe = start_part("--probe", server.port) if is_probed else None
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            memory.append(resident_mib(server.process.pid))
            time.sleep(1)
        latencies = end_part(probe) if probe else []
        over.set()
        for thread in threads:
            thread.join()
        return latencies

    during(5, is_probed=False)  # the first steps load and compile
    calm = during(min(30, options.minutes * 10))
    del memory[:]
    attackers = start_part("--attack", server.port)
    (folder / "requests.json").write_text(json.dumps(list(zip(requests, expected))))
    stopped = start_part("--honest", server.port, folder / "requests.json")
    hardships.begin([attackers, stopped], processors)
    during(min(WARM_UP_SECONDS, 60 * options.minutes), is_probed=False)
    warming_up = tenths(memory)
    del memory[:]
    besieged = during(options.minutes * 60)
    disk_in_use = hardships.end()
    counts, others = end_part(attackers), end_part(stopped)
    time.sleep(10)
    used = server.metric("vllm:kv_cache_usage_perc"), server.metric("vllm:num_requests_running")
    last_words = server.end()
    medians = tenths(memory)
    report = {
        "minutes": options.minutes,
        "load_average": [round(load, 1) for load in (begun_at_load, os.getloadavg()[0])],
        "server_on_separate_processor": bool(processors),
        "attacks": counts,
        "hardships": dict(hardships.counts) | {"share of the full disk in use": disk_in_use},
        "honest": dict(results),
        "honest_stopped": others,
        "health_ms_calm": quantiles_ms(calm),
        "health_ms_attacked": quantiles_ms(besieged),
        "memory_mib_warming_up": warming_up,
        "memory_mib": medians,
        "in_use_afterwards": used,
        "all_blocks_free": f"free blocks {ENGINE['num_blocks'] - 1}" in last_words,
        "log_lines": server.errors.count("\n"),
        "log_bytes": len(server.errors),
        "tracebacks": server.errors.count("Traceback"),
    }
    print(json.dumps(report))
    if options.write:
        RESULT.write_text(json.dumps(report, indent=2) + "\n")
    if report["tracebacks"]:
        print(server.errors[server.errors.index("Traceback") :][:3000], file=sys.stderr)


if __name__ == "__main__":
    main()
