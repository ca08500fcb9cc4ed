"""A client whose users ask again when they have their answer: agents, or people who chat.

python closed_loops.py OUT.json agents|chats SEED[,SEED ...] PORT

Each seed is another group of users. Their prompts begin with shared system prompts, and a turn repeats all before it
with its answers. A row of the result is a request: its user and turn, and what the user saw.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

KINDS: dict[str, dict[str, Any]] = {
    "agents": {"users": 10, "begin": 6, "turns": (6, 10), "input": (20, 160), "output": (8, 30), "systems": (1, 400)},
    "chats": {"users": 24, "begin": 45, "turns": (2, 5), "input": (20, 300), "output": (10, 50), "systems": (3, 240)},
}


def users(kind: str, seed: str) -> list[dict[str, Any]]:
    """When each user of a group begins, and their turns."""
    shape = KINDS[kind]
    plans = []
    for number in range(shape["users"]):
        rng = random.Random(f"{kind} {seed} {number}")
        system = random.Random(f"{kind} system {rng.randrange(shape['systems'][0])}")
        turns = [
            {
                "input": [rng.randint(3, 4000) for _ in range(rng.randint(*shape["input"]))],
                "num_output": rng.randint(*shape["output"]),
                "think": rng.uniform(0.02, 0.4) if kind == "agents" else rng.expovariate(1 / 6),
            }
            for _ in range(rng.randint(*shape["turns"]))
        ]
        prompt = [system.randint(3, 4000) for _ in range(shape["systems"][1])]
        plans.append({"begin": rng.uniform(0, shape["begin"]), "system": prompt, "turns": turns})
    return plans


async def use(session: aiohttp.ClientSession, url: str, name: str, plan: dict[str, Any], start: float) -> list[dict]:
    """One user's turns, one after the other; returns a row for each."""
    rows, history = [], plan["system"]
    await asyncio.sleep(max(0.0, start + plan["begin"] - time.perf_counter()))
    for number, turn in enumerate(plan["turns"]):
        history = history + turn["input"]
        body = {"model": "m", "prompt": history, "max_tokens": turn["num_output"], "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True}
        sent, times, answer = time.perf_counter(), [], []
        async with session.post(url, json=body, headers={"X-Request-Id": f"{name}-{number}"}) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else []
                if tokens := choices and choices[0].get("token_ids"):
                    times.append(time.perf_counter())
                    answer += tokens
        row = {"user": name, "turn": number, "at": sent - start, "prompt": len(history)}
        rows.append(row | {"ttft": times[0] - sent, "e2e": times[-1] - sent})
        history = history + answer
        await asyncio.sleep(turn["think"])
    return rows


async def main(out: Path, kind: str, seeds: list[str], port: int) -> None:
    """Let all groups of users ask, and write a row for each request."""
    url, timeout = f"http://127.0.0.1:{port}/v1/completions", aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.post(url, json={"model": "m", "prompt": [5, 6, 7], "max_tokens": 3}) as reply:
            await reply.read()
        start = time.perf_counter() + 1
        plans = [(f"{kind}-{seed}-{number}", plan) for seed in seeds for number, plan in enumerate(users(kind, seed))]
        rows = await asyncio.gather(*(use(session, url, name, plan, start) for name, plan in plans))
    out.write_text(json.dumps([row for of_user in rows for row in of_user]))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), int(sys.argv[4])))
