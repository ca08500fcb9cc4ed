"""A workload: a configuration and the requests that arrive. JSON, so that it can be shared.

    {"config": {"max_num_batched_tokens": 64, ...},
     "requests": [{"id": "a", "prompt": {"len": 100}, "max_tokens": 8, "arrival_step": 0, "priority": 0,
                   "abort_step": 5}, ...]}

``config`` holds EngineConfig fields, and two short forms of keys of ``speculative``: ``spec_method``, which is "ngram"
by default and "eagle" with asynchronous scheduling, and ``disable_lookahead_block_hashes``; null stands for the
default. With speculation, ``accepts`` of a request says how many drafts are accepted in each of its verifications, from
the first again after the last. ``stop_at: n`` makes its n-th output token a stop token. Requests share prefixes only
with requests of the same ``cache_salt`` and ``adapter``, strings that are empty by default; an adapter is the name of a
LoRA, of which ``max_loras`` may run together. ``grammar`` of a request, such as
``{"ready_step": 3, "valid_drafts": [2, 0]}``, says from which step on its grammar is compiled, and how many drafts of
each proposal it allows; with ``"fails": true`` it cannot be compiled. ``session`` names the requests that the
routers of a fleet keep together; each has its own by default. A request needs only ``id`` and ``prompt``;
``arrival_time`` (seconds) has an effect if the simulation has a clock. A prompt is a list of token ids,
``{"len": n, "seed": s}`` (the seed is the request's id by default), or ``{"parts": [prompt, ...]}``, which joins
prompts, so that requests can share a prefix.

Instead of ``requests`` a workload can have ``generate`` (``workbench.simulation.arrivals.read_generated``). With
``cost_model``, coefficients of CostModel by name, the simulation has a clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from workbench.base.cache_salt import check_adapter, check_salt
from workbench.base.field_checks import MAX_INT32, FieldError, choice, flag, integer, json_object, number
from workbench.base.outside_files import read_json
from workbench.base.text import shown
from workbench.config import EngineConfig, SamplingParams
from workbench.simulation.arrivals import Arrival, GrammarArrival, arrival_order, read_generated
from workbench.simulation.costs.cost_model import CostModel, as_step_cost
from workbench.simulation.limits import MAX_NESTING, MAX_PROMPT_TOKENS, count_prompt_tokens
from workbench.speculation import MAX_DRAFTS, SPEC_METHODS

_WORKLOAD_FIELDS = ("config", "requests", "generate", "cost_model")
_REQUEST_FIELDS = (
    "id",
    "prompt",
    "max_tokens",
    "arrival_step",
    "arrival_time",
    "priority",
    "abort_step",
    "accepts",
    "stop_at",
    "cache_salt",
    "adapter",
    "session",
    "grammar",
)


def made_up_token(text: str) -> int:
    """A token id from 3 to 31999 that depends on ``text`` alone."""
    return 3 + crc32(text.encode("utf-8", "surrogatepass")) % 31997


def read_simulation(
    workload: Mapping[str, Any] | str | os.PathLike[str], cost_model: CostModel | None = None
) -> tuple[EngineConfig, Iterable[Arrival], CostModel | None]:
    """Check a workload with all that it may hold.

    Args:
        workload: The workload, or the path of its JSON file.
        cost_model: Replaces the workload's cost model.

    Returns:
        Configuration, requests in order of arrival (generated ones are made one by one), and the cost model.

    Raises:
        ValueError: The workload is malformed, or its requests have times and there is no cost model.
    """
    content = dict(json_object("workload", read_json_workload(workload), _WORKLOAD_FIELDS))
    coefficients = content.pop("cost_model", None)
    cost_model = as_step_cost(coefficients if cost_model is None else cost_model)
    if "generate" not in content:
        config, arrivals = read_workload(content)
        return config, sorted(arrivals, key=arrival_order), cost_model
    if "requests" in content:
        raise ValueError("a workload has either requests or generate, not both")
    generated = read_generated(content.pop("generate"))
    if cost_model is None:
        raise ValueError('generated requests arrive at times: give a cost_model, such as {"fixed": 0.01}')
    config, _ = read_workload({**content, "requests": []})
    return config, generated, cost_model


def read_workload(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[EngineConfig, list[Arrival]]:
    """Check a workload of ``config`` and ``requests``.

    Args:
        source: The workload, or the path of its JSON file.

    Returns:
        Its configuration, and its requests in the order of the file.

    Raises:
        ValueError: It is malformed; the message names the place, the value and what is allowed there.
        OSError: The file cannot be read.
    """
    content = json_object("workload", read_json_workload(source), ("config", "requests"))
    config = json_object("config", content.get("config") or {})
    requests = content.get("requests")
    if not isinstance(requests, list | tuple):
        raise ValueError(f"requests must be a list, got {shown(requests)}")
    lengths = (_check_request(f"requests[{index}]", request) for index, request in enumerate(requests))
    count_prompt_tokens(lengths, "requests")
    arrivals = [_read_request(index, request) for index, request in enumerate(requests)]
    first_index: dict[str, int] = {}
    for index, arrival in enumerate(arrivals):
        if (first := first_index.setdefault(arrival.request_id, index)) != index:
            raise ValueError(f"requests[{index}].id {arrival.request_id!r} is already the id of requests[{first}]")
    return _read_config(config), arrivals


def _read_config(given: Mapping[str, Any]) -> EngineConfig:
    """The configuration, with the short forms of a workload put under ``speculative``."""
    config = dict(given)
    names = {"spec_method": "method", "disable_lookahead_block_hashes": "disable_lookahead_block_hashes"}
    short = {name: value for name in names if (value := config.pop(name, None)) is not None}
    if "spec_method" in short:
        choice("config.spec_method", short["spec_method"], SPEC_METHODS)
    if "disable_lookahead_block_hashes" in short:
        flag("config.disable_lookahead_block_hashes", short["disable_lookahead_block_hashes"])
    if config.get("num_speculative_tokens") and config.get("async_scheduling"):
        short.setdefault("spec_method", "eagle")
    if short:
        options = json_object("config.speculative", config.get("speculative") or {})
        config["speculative"] = {names[name]: value for name, value in short.items()} | dict(options)
    return EngineConfig.from_dict(config)


def read_json_workload(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """A workload that is given as such, or as the path of its file; only the file's format is checked.

    Raises:
        ValueError: The file does not hold a JSON object.
        OSError: The file cannot be read.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        fields = ", ".join(_WORKLOAD_FIELDS)
        raise FieldError(
            f"workload must be the path of a file or an object with {fields}, got a {type(source).__name__}; a list of "
            'requests is written {"requests": [...]}'
        )
    path = Path(source)
    workload = read_json(path)
    if not isinstance(workload, dict):
        raise ValueError(f"{path} must hold an object with config and requests, got a {type(workload).__name__}")
    return workload


def _check_request(place: str, request: Any) -> int:
    """Check a request's id and prompt; returns the length of the prompt without making its tokens."""
    json_object(place, request, _REQUEST_FIELDS)
    request_id = request.get("id")
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"{place}.id must be a string that is not empty, got {shown(request_id)}")
    num_tokens = _count_tokens(f"{place}.prompt", request.get("prompt"))
    if not num_tokens:
        raise ValueError(f"{place}.prompt is empty: give at least one token")
    return num_tokens


def _read_request(index: int, request: Mapping[str, Any]) -> Arrival:
    place = f"requests[{index}]"
    given = {name: value for name, value in request.items() if value is not None}
    arrival_step = integer(f"{place}.arrival_step", given.get("arrival_step", 0), 0, MAX_INT32)
    arrives_at = given.get("arrival_time")
    if arrives_at is not None:
        arrives_at = number(f"{place}.arrival_time", arrives_at, 0.0)
    abort_step = given.get("abort_step")
    if abort_step is not None:
        abort_step = integer(f"{place}.abort_step", abort_step, 0, MAX_INT32)
    max_tokens = integer(f"{place}.max_tokens", given.get("max_tokens", 16), 1, MAX_INT32)
    prompt = _make_prompt(given["prompt"], given["id"])
    stop: tuple[int, ...] = ()
    if (stop_at := given.get("stop_at")) is not None:
        stop_at = integer(f"{place}.stop_at", stop_at, 1, MAX_INT32, " (the first output token is 1)")
        stop = (made_up_token(f"{given['id']}:{len(prompt) + stop_at - 1}"),)
    return Arrival(
        given["id"],
        prompt,
        SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, ignore_eos=True),
        priority=integer(f"{place}.priority", given.get("priority", 0), -MAX_INT32, MAX_INT32),
        arrival_step=arrival_step,
        arrival_time=arrival_step + 1e-6 * index if arrives_at is None else arrives_at,
        abort_step=abort_step,
        arrives_at=arrives_at,
        index=index,
        accepts=_read_counts(f"{place}.accepts", given.get("accepts", ())),
        cache_salt=check_salt(f"{place}.cache_salt", given.get("cache_salt", "")),
        adapter=check_adapter(f"{place}.adapter", given.get("adapter", "")),
        session=check_salt(f"{place}.session", given.get("session", "")),
        grammar=_read_grammar(f"{place}.grammar", given["grammar"]) if "grammar" in given else None,
    )


def _read_grammar(place: str, given: Any) -> GrammarArrival:
    json_object(place, given, ("ready_step", "valid_drafts", "fails"))
    return GrammarArrival(
        integer(f"{place}.ready_step", given.get("ready_step", 0), 0, MAX_INT32),
        _read_counts(f"{place}.valid_drafts", given.get("valid_drafts", ())),
        flag(f"{place}.fails", given.get("fails", False)),
    )


def _read_counts(place: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"{place} must be a list of numbers of drafts, got {shown(given)}")
    return tuple(integer(f"{place}[{index}]", count, 0, MAX_DRAFTS) for index, count in enumerate(given))


def _count_tokens(place: str, prompt: Any, depth: int = 0) -> int:
    """Check a prompt; returns its length without making its tokens."""
    if isinstance(prompt, list | tuple):
        for position, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token <= MAX_INT32:
                raise ValueError(f"{place}[{position}] must be a token id from 0 to {MAX_INT32}, got {shown(token)}")
        return len(prompt)
    if isinstance(prompt, Mapping) and "parts" in prompt:
        parts = json_object(place, prompt, ("parts",))["parts"]
        if not isinstance(parts, list | tuple):
            raise ValueError(f"{place}.parts must be a list of prompts, got {shown(parts)}")
        if depth == MAX_NESTING:
            raise ValueError(f"{place} nests parts within parts more than {MAX_NESTING} deep")
        return sum(_count_tokens(f"{place}.parts[{i}]", part, depth + 1) for i, part in enumerate(parts))
    if not isinstance(prompt, Mapping):
        raise ValueError(f"{place} must be a list of token ids, {{len, seed}} or {{parts}}, got {shown(prompt)}")
    length = json_object(place, prompt, ("len", "seed")).get("len")
    if length is None:
        raise ValueError(f"{place}.len is missing: give the number of tokens, from 1 to {MAX_PROMPT_TOKENS}")
    return integer(f"{place}.len", length, 1, MAX_PROMPT_TOKENS)


def _make_prompt(prompt: Any, seed: str) -> list[int]:
    """The tokens of a checked prompt."""
    if isinstance(prompt, list | tuple):
        return list(prompt)
    if "parts" in prompt:
        return [token for part in prompt["parts"] for token in _make_prompt(part, seed)]
    seed = prompt.get("seed", seed)
    return [made_up_token(f"p{seed}:{position}") for position in range(prompt["len"])]
