"""A client that sends the requests of a workload at their times, and writes down when each was sent, answered, ended.

python client.py WORKLOAD.json OUT.json PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp


async def send(session: aiohttp.ClientSession, port: int, request: dict[str, Any], start: float) -> dict[str, Any]:
    """Send one request at its time; times are seconds since the epoch."""
    await asyncio.sleep(max(0.0, start + request["at"] - time.time()))
    body = {"model": "m", "prompt": request["prompt"], "max_tokens": request["max_tokens"], "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": request["id"], "X-Session-ID": request["session"]}
    url, times = f"http://127.0.0.1:{port}/v1/completions", [time.time()]
    async with session.post(url, json=body, headers=headers) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                times.append(time.time())
    return {"id": request["id"], "sent": times[0], "first": times[1], "end": times[-1]}


async def main(workload: str, out: str, port: int) -> None:
    """Send all requests."""
    requests = json.loads(Path(workload).read_text())
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.time() + 1
        rows = await asyncio.gather(*(send(session, port, request, start) for request in requests))
    Path(out).write_text(json.dumps(sorted(rows, key=lambda row: row["sent"])))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
