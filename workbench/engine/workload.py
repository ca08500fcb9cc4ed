"""A workload: requests with the steps at which they arrive, and a configuration. JSON, so that it can be shared.

    {"config": {"max_num_batched_tokens": 64, ...},
     "requests": [{"id": "a", "prompt": {"len": 100}, "max_tokens": 8, "arrival_step": 0, "priority": 0,
                   "abort_step": 5}, ...]}

``config`` holds EngineConfig fields; null stands for the default. Of a request only ``id`` and ``prompt`` are
required; ``arrival_time`` (seconds) counts where the simulation has a clock. A prompt is a list of token ids,
``{"len": n, "seed": s}`` (the seed is the request's id unless given), or ``{"parts": [prompt, ...]}``, which joins
prompts, so that requests can share a prefix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from workbench.engine.config import EngineConfig, SamplingParams
from workbench.engine.field_checks import MAX_INT32, number
from workbench.engine.request import Request

MAX_PROMPT_TOKENS = 10_000_000
"""Longest prompt a workload may ask for; a misplaced digit should not fill the memory."""

MAX_WORKLOAD_TOKENS = 2**25
"""Prompt tokens of all requests of a workload, which are in memory together (33.5 million, about 1.2 GiB)."""

MAX_NESTING = 8
"""Parts within parts of a prompt."""

_REQUEST_FIELDS = ("id", "prompt", "max_tokens", "arrival_step", "arrival_time", "priority", "abort_step")


@dataclass(frozen=True)
class Arrival:
    """A request of a workload.

    Attributes:
        request_id: Unique name.
        prompt_token_ids: The prompt.
        sampling: Limits of the output.
        priority: Smaller is served first under the "priority" policy.
        arrival_step: First step whose scheduling sees the request.
        arrival_time: Decides between equal priorities.
        abort_step: The request is aborted before this step is scheduled; None for never.
        arrives_at: Where a simulation has a clock, seconds since its start before which nobody sees the request;
            None for no such limit.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    arrival_step: int = 0
    arrival_time: float = 0.0
    abort_step: int | None = None
    arrives_at: float | None = None

    def to_request(self) -> Request:
        """A fresh request for a scheduler."""
        return Request(
            self.request_id,
            self.prompt_token_ids,
            self.sampling,
            priority=self.priority,
            arrival_time=self.arrival_time,
            arrival_step=self.arrival_step,
        )


def arrival_order(arrival: Arrival) -> tuple[int, float]:
    """Order in which a simulation sees requests; those that compare equal keep the order of the file."""
    return arrival.arrival_step, arrival.arrives_at or 0.0


def made_up_token(text: str) -> int:
    """A token id from 3 to 31999 that depends on ``text`` alone."""
    return 3 + crc32(text.encode()) % 31997


def read_workload(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[EngineConfig, list[Arrival]]:
    """Check a workload.

    Args:
        source: The workload, or the path of a JSON file that holds it.

    Returns:
        Its configuration, and its requests in the order of the file.

    Raises:
        ValueError: It is malformed; the message names the place, the value and what is allowed there.
        OSError: The file cannot be read.
    """
    source = read_json_workload(source)
    _check_fields("workload", source, ("config", "requests"))
    config = source.get("config") or {}
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be an object, got {config!r}")
    requests = source.get("requests")
    if not isinstance(requests, list | tuple):
        raise ValueError(f"requests must be a list, got {requests!r}")
    num_tokens = sum(_check_request(f"requests[{index}]", request) for index, request in enumerate(requests))
    if num_tokens > MAX_WORKLOAD_TOKENS:
        raise ValueError(
            f"the prompts of all requests have {num_tokens} tokens, allowed are {MAX_WORKLOAD_TOKENS}: describe the "
            "requests under generate, which makes them one by one"
        )
    arrivals = [_read_request(index, request) for index, request in enumerate(requests)]
    first_index: dict[str, int] = {}
    for index, arrival in enumerate(arrivals):
        if (first := first_index.setdefault(arrival.request_id, index)) != index:
            raise ValueError(f"requests[{index}].id {arrival.request_id!r} is the id of requests[{first}] already")
    return EngineConfig.from_dict(config), arrivals


def read_json_workload(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """The workload as it is, or as its file holds it.

    Raises:
        ValueError: The file does not hold a JSON object.
        OSError: The file cannot be read.
    """
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    try:
        workload = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is not a JSON file: {problem}") from None
    if not isinstance(workload, dict):
        raise ValueError(f"{path} must hold an object with config and requests, got a {type(workload).__name__}")
    return workload


def _check_request(place: str, request: Any) -> int:
    """Check a request's id and prompt, before anything is made of it; returns the prompt's tokens."""
    if not isinstance(request, Mapping):
        raise ValueError(f"{place} must be an object, got {request!r}")
    _check_fields(place, request, _REQUEST_FIELDS)
    request_id = request.get("id")
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"{place}.id must be a string that is not empty, got {request_id!r}")
    num_tokens = _count_tokens(f"{place}.prompt", request.get("prompt"))
    if not num_tokens:
        raise ValueError(f"{place}.prompt is empty: give at least one token")
    return num_tokens


def _read_request(index: int, request: Mapping[str, Any]) -> Arrival:
    place = f"requests[{index}]"
    arrival_step = _whole(place, request, "arrival_step", 0, 0)
    arrives_at = request.get("arrival_time")
    if arrives_at is not None:
        arrives_at = number(f"{place}.arrival_time", arrives_at, 0.0)
    return Arrival(
        request["id"],
        _make_prompt(request["prompt"], request["id"]),
        SamplingParams(max_tokens=_whole(place, request, "max_tokens", 16, 1), ignore_eos=True),
        priority=_whole(place, request, "priority", 0, -MAX_INT32),
        arrival_step=arrival_step,
        arrival_time=arrival_step + 1e-6 * index if arrives_at is None else arrives_at,
        abort_step=_whole(place, request, "abort_step", None, 0),
        arrives_at=arrives_at,
    )


def _count_tokens(place: str, prompt: Any, depth: int = 0) -> int:
    """Check a prompt; returns its tokens without making them."""
    if isinstance(prompt, list | tuple):
        for position, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token <= MAX_INT32:
                raise ValueError(f"{place}[{position}] must be a token id from 0 to {MAX_INT32}, got {token!r}")
        return len(prompt)
    if isinstance(prompt, Mapping) and "parts" in prompt:
        _check_fields(place, prompt, ("parts",))
        parts = prompt["parts"]
        if not isinstance(parts, list | tuple):
            raise ValueError(f"{place}.parts must be a list of prompts, got {parts!r}")
        if depth == MAX_NESTING:
            raise ValueError(f"{place} holds parts within parts more than {MAX_NESTING} deep")
        return sum(_count_tokens(f"{place}.parts[{i}]", part, depth + 1) for i, part in enumerate(parts))
    if not isinstance(prompt, Mapping):
        raise ValueError(f"{place} must be a list of token ids, {{len, seed}} or {{parts}}, got {prompt!r}")
    _check_fields(place, prompt, ("len", "seed"))
    length = _whole(place, prompt, "len", None, 1, MAX_PROMPT_TOKENS)
    if length is None:
        raise ValueError(f"{place}.len is missing: give the number of tokens, from 1 to {MAX_PROMPT_TOKENS}")
    return length


def _make_prompt(prompt: Any, seed: str) -> list[int]:
    """The tokens of a prompt that was checked."""
    if isinstance(prompt, list | tuple):
        return list(prompt)
    if "parts" in prompt:
        return [token for part in prompt["parts"] for token in _make_prompt(part, seed)]
    seed = prompt.get("seed", seed)
    return [made_up_token(f"p{seed}:{position}") for position in range(prompt["len"])]


def _check_fields(place: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in value:
        if name not in known:
            raise ValueError(f"{place} has an unknown field {name!r}; the fields are {', '.join(known)}")


def _whole(place: str, values: Mapping[str, Any], name: str, default: Any, low: int, high: int = MAX_INT32) -> Any:
    """An integer field; ``default`` where it is missing or null."""
    value = values.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{place}.{name} must be an integer from {low} to {high}, got {value!r}")
    return value
