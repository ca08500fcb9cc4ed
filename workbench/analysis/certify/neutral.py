"""Workloads and schedules as neutral files, which another simulator can read and write without Workbench.

A workload is that of ``simulate()`` with every token written out: ``prompt_token_ids`` instead of a recipe for them,
and ``output_token_ids``, the tokens that the model will give if the request runs to its end. A schedule is
``{"steps": [...]}``. docs/certify.md has every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.field_checks import MAX_INT32, integer, json_object
from workbench.base.outside_files import json_value
from workbench.base.text import printable, shortened, shown
from workbench.simulation.simulate import simulate
from workbench.simulation.workload import made_up_token, read_workload
from workbench.trace import StepRecord, Trace

VERSION = 1
"""Version of the files and of the protocol."""

MOST_STEPS = 10_000
"""Steps of the longest schedule that is read; no workload of a certificate takes more than a few hundred."""

ASPECTS = ("chunks", "hits", "preempted", "finished", "blocks")
"""The aspects of a step, from the one that every schedule has to those that a simulator may leave out."""

CHUNK = ("id", "start", "num_tokens", "num_drafts")
"""The fields of a chunk."""

_KEPT = ["id", "max_tokens", "arrival_step", "arrival_time", "abort_step", "priority", "accepts", "cache_salt"]
_KEPT += ["adapter", "grammar"]


def neutral_workload(name: str, workload: Mapping[str, Any]) -> dict[str, Any]:
    """A workload of ``simulate()`` with every token written out.

    Args:
        name: Name of the workload.
        workload: The workload.
    """
    _, arrivals = read_workload({"config": {}, "requests": workload["requests"]})
    longest = workload["config"].get("max_model_len") or 1 << 30
    requests = []
    for given, arrival in zip(workload["requests"], arrivals):
        prompt, end = list(arrival.prompt_token_ids), given.get("stop_at") or arrival.sampling.max_tokens
        count = max(1, min(end, arrival.sampling.max_tokens, longest - len(prompt)))
        made = {key: given[key] for key in _KEPT if key in given}
        made |= {"max_tokens": arrival.sampling.max_tokens, "prompt_token_ids": prompt}
        made["output_token_ids"] = [made_up_token(f"{given['id']}:{len(prompt) + i}") for i in range(count)]
        requests.append(made)
    return {"version": VERSION, "id": name, "config": dict(workload["config"]), "requests": requests}


def read_neutral(text: str) -> dict[str, Any]:
    """A neutral workload from a line of JSON; its settings and requests are checked as those of ``simulate()`` are.

    Raises:
        ValueError: It is not a neutral workload.
    """
    fields = json_object("workload", json_value(text, "the line is not JSON"), ("version", "id", "config", "requests"))
    integer("workload.version", fields.get("version", VERSION), VERSION, VERSION)
    _of_kind("workload.id", fields.get("id"), str, "name")
    config = json_object("workload.config", fields.get("config"))
    if config.get("max_model_len") is not None:
        integer("workload.config.max_model_len", config["max_model_len"], 1, MAX_INT32)
    for number, each in enumerate(_of_kind("workload.requests", fields.get("requests"), list, "list of requests")):
        place = f"workload.requests[{number}]"
        request = json_object(place, each)
        integer(f"{place}.max_tokens", request.get("max_tokens"), 1, MAX_INT32)
        for name in ("prompt_token_ids", "output_token_ids"):
            _of_kind(f"{place}.{name}", request.get(name), list, "list of tokens")
    return dict(fields)


def simulated_workload(workload: Mapping[str, Any]) -> dict[str, Any]:
    """The workload of ``simulate()`` of a neutral one."""
    requests = []
    longest = workload["config"].get("max_model_len") or 1 << 30
    for given in workload["requests"]:
        made = {key: value for key, value in given.items() if not key.endswith("_token_ids")}
        made["prompt"], count = given["prompt_token_ids"], len(given["output_token_ids"])
        if count < min(given["max_tokens"], longest - len(given["prompt_token_ids"])):
            made["stop_at"] = count
        requests.append(made)
    return {"config": workload["config"], "requests": requests}


def judge(workload: Mapping[str, Any]) -> Trace:
    """The run of a neutral workload through Workbench's scheduler, which decides as vLLM does.

    Raises:
        ValueError: No schedule can serve it.
        RuntimeError: vLLM's engine would die.
    """
    return simulate(simulated_workload(workload), as_vllm=True)


def steps_of(trace: Trace) -> list[dict[str, Any]]:
    """The steps of a trace as a schedule."""
    return [_step(record) for record in trace]


def _step(record: StepRecord) -> dict[str, Any]:
    admitted = {*record.admitted, *record.resumed}
    return {
        "chunks": [
            {"id": c.request_id, "start": c.start, "num_tokens": c.num_tokens, "num_drafts": len(c.drafts)}
            for c in record.chunks
        ],
        "hits": {chunk.request_id: chunk.start for chunk in record.chunks if chunk.request_id in admitted},
        "preempted": list(record.preempted),
        "finished": list(record.finished),
        "blocks": {name: [list(table) for table in tables] for name, tables in record.block_tables_by_group.items()},
    }


class Unsupported(Exception):
    """The simulator does not have what a workload needs, and says so."""


def read_schedule(answer: Any) -> list[dict[str, Any]]:
    """Check the answer of a simulator.

    Raises:
        ValueError: It is not a schedule.
        Unsupported: It says that it does not support the workload.
    """
    fields = json_object("answer", answer, ("steps", "unsupported", "id", "version"))
    if "unsupported" in fields:
        reason = _of_kind("answer.unsupported", fields["unsupported"], str, "text that gives the reason")
        raise Unsupported(shortened(printable(reason)) or "no reason is given")
    steps = fields.get("steps")
    if not isinstance(steps, list):
        raise ValueError(
            f'answer.steps must be a list of steps, got {shown(steps)}; or answer {{"unsupported": reason}}'
        )
    if len(steps) > MOST_STEPS:
        raise ValueError(f"answer.steps has {len(steps):,} steps; a schedule has at most {MOST_STEPS:,}")
    for index, step in enumerate(steps):
        _check_step(f"answer.steps[{index}]", step)
    return [_known(step) for step in steps]


def _known(step: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a schedule; a simulator may tell more."""
    told = {name: step[name] for name in ASPECTS if name in step}
    told["chunks"] = [{name: each[name] for name in CHUNK if name in each} for each in step["chunks"]]
    return told


def _check_step(place: str, step: Any) -> None:
    """Check a step, so that nothing behind this door has to."""
    told = json_object(place, step)
    for number, chunk in enumerate(_of_kind(f"{place}.chunks", told.get("chunks"), list, "list of chunks")):
        where = f"{place}.chunks[{number}]"
        one = json_object(where, chunk)
        _of_kind(f"{where}.id", one.get("id"), str, "request's id")
        integer(f"{where}.start", one.get("start"), 0, MAX_INT32)
        integer(f"{where}.num_tokens", one.get("num_tokens"), 0, MAX_INT32)
        integer(f"{where}.num_drafts", one.get("num_drafts", 0), 0, MAX_INT32)
    for name in ("preempted", "finished"):
        for number, each in enumerate(_of_kind(f"{place}.{name}", told.get(name, []), list, "list of ids")):
            _of_kind(f"{place}.{name}[{number}]", each, str, "request's id")
    for key, hit in _of_kind(f"{place}.hits", told.get("hits", {}), dict, "dict of tokens by id").items():
        integer(f"{place}.hits[{key!r}]", hit, 0, MAX_INT32)
    for key, tables in _of_kind(f"{place}.blocks", told.get("blocks", {}), dict, "dict of tables by id").items():
        for number, table in enumerate(_of_kind(f"{place}.blocks[{key!r}]", tables, list, "list of block tables")):
            where = f"{place}.blocks[{key!r}][{number}]"
            for slot, block in enumerate(_of_kind(where, table, list, "list of blocks")):
                integer(f"{where}[{slot}]", block, 0, MAX_INT32)


def _of_kind(name: str, value: Any, kind: type, words: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {words}, got {shown(value)}")
    return value
