"""One client that sends the same requests at the same times to several servers, and measures what a user sees.

python client.py OUT.json NUM_REQUESTS RATE SEED PROMPTS SCENE ROUND NAME=PORT [NAME=PORT ...]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

import aiohttp

Request = tuple[float, list[int], int]
"""Arrival in seconds, prompt, number of output tokens."""


def workload(num_requests: int, rate: float, seed: int, prompts: float) -> list[Request]:
    """Poisson arrivals; one prompt in ten is long; all lengths are multiplied by ``prompts``."""
    rng = random.Random(seed)
    now = 0.0
    requests = []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        length = rng.randint(1200, 2400) if rng.random() < 0.1 else rng.randint(30, 400)
        prompt = [rng.randint(3, 4000) for _ in range(int(length * prompts))]
        requests.append((now, prompt, rng.randint(10, 70)))
    return requests


def sessions(num_requests: int, rate: float, seed: int, prompts: float) -> list[Request]:
    """Sessions of up to four turns behind three system prompts: a turn repeats all before it, with its answer."""
    rng = random.Random(seed)
    systems = [[random.Random(f"system {n}").randint(3, 4000) for _ in range(int(480 * prompts))] for n in range(3)]
    requests: list[Request] = []
    begin = 0.0
    while len(requests) < num_requests:
        begin += rng.expovariate(rate / 2.5)
        now, history = begin, list(rng.choice(systems))
        for _ in range(rng.randint(1, 4)):
            history += [rng.randint(3, 4000) for _ in range(int(rng.randint(30, 300) * prompts))]
            num_output = rng.randint(10, 70)
            requests.append((now, list(history), num_output))
            history += [rng.randint(3, 4000) for _ in range(num_output)]
            now += rng.uniform(10, 40)
    return sorted(requests)[:num_requests]


SCENES = {"random": workload, "sessions": sessions}


async def send(
    session: aiohttp.ClientSession, port: int, name: str, index: int, request: Request, start: float
) -> dict:
    """Send one request at its time; returns its times."""
    at, prompt, max_tokens = request
    await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
    sent = time.perf_counter()
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    times = []
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with session.post(
        url, json=body | {"stream": True}, headers={"X-Request-Id": f"bench-{name}-{index}"}
    ) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    tpot = (times[-1] - times[0]) / (max_tokens - 1) if max_tokens > 1 else None
    return {"index": index, "at": sent - start, "ttft": times[0] - sent, "e2e": times[-1] - sent, "tpot": tpot}


async def main(out: str, requests: list[Request], name: str, ports: dict[str, int]) -> None:
    """Send the requests of a round to all servers at once, and write each server's times."""
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        warm_up: Request = (0.0, [3, 4, 5], 3)
        await asyncio.gather(*(send(session, port, "warm", 0, warm_up, 0.0) for port in ports.values()))
        start = time.perf_counter() + 1
        tasks = [[send(session, port, name, i, r, start) for i, r in enumerate(requests)] for port in ports.values()]
        rows = await asyncio.gather(*(asyncio.gather(*each) for each in tasks))
    Path(out).write_text(json.dumps(dict(zip(ports, rows))))


if __name__ == "__main__":
    out, number, rate, seed, prompts, scene, name, *targets = sys.argv[1:]
    servers = {server: int(port) for server, _, port in (argument.partition("=") for argument in targets)}
    asyncio.run(main(out, SCENES[scene](int(number), float(rate), int(seed), float(prompts)), name, servers))
