"""Replay a workload against an OpenAI-compatible server, streaming. Standard library only."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from serving.replay import Timeline
from serving.workloads import Request, Workload


def stream_completion(port: int, body: dict[str, Any]) -> tuple[list[float], list[int], str]:
    """POST /v1/completions; return the time of each event with output, its tokens if it has any, and the text.

    Raises:
        RuntimeError: The server rejected the request or reported an error.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
    times, tokens, texts = [], [], []
    for line in response:
        if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
            continue  # mlx-lm sends comments while it computes a prompt
        event = json.loads(line[5:])
        if "error" in event:
            raise RuntimeError(f"the server failed: {event['error']}")
        choice = (event.get("choices") or [{}])[0]
        if choice.get("text") or choice.get("token_ids"):
            times.append(time.perf_counter())
            tokens += choice.get("token_ids") or []
            texts.append(choice.get("text") or "")
    connection.close()
    return times, tokens, "".join(texts)


def replay_over_http(workload: Workload, port: int, body: dict[str, Any], prompt_of) -> list[Timeline]:
    """Send each request once it has arrived and fewer than ``concurrency`` are open; wait for all.

    Args:
        workload: The requests.
        port: Port of the server on 127.0.0.1.
        body: Fields of every request besides ``prompt`` and ``max_tokens``.
        prompt_of: Returns the ``prompt`` field for a Request.

    Raises:
        RuntimeError: A request failed.
    """
    timelines = [Timeline(request.arrival) for request in workload.requests]
    bodies = [
        {**body, "prompt": prompt_of(request), "max_tokens": request.output_tokens} for request in workload.requests
    ]
    slots, failures = threading.Semaphore(workload.shape.concurrency), []
    start = time.perf_counter()

    def send(index: int) -> None:
        timeline = timelines[index]
        try:
            timeline.scheduled = time.perf_counter() - start
            times, timeline.tokens, timeline.text = stream_completion(port, bodies[index])
            timeline.token_times = [moment - start for moment in times]
        except Exception as problem:  # reported in the main thread
            failures.append(problem)
        finally:
            slots.release()

    threads = []
    for index, request in enumerate(workload.requests):
        time.sleep(max(0.0, request.arrival - (time.perf_counter() - start)))
        slots.acquire()
        threads.append(threading.Thread(target=send, args=(index,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"{len(failures)} requests failed, the first: {failures[0]}")
    return timelines


def token_prompt(request: Request) -> list[int]:
    """The prompt as token ids, for servers that take them."""
    return request.prompt
