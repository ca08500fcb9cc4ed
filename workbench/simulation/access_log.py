"""Requests from an access log: arrival, prompt length and output length of each, in CSV or JSON lines.

Columns are found by name, whatever their case. The public traces of Azure (TIMESTAMP, ContextTokens, GeneratedTokens),
BurstGPT (Timestamp, Request tokens, Response tokens) and Mooncake (timestamp in ms, input_length, output_length,
hash_ids) are read as they are, and so are spans of requests in OTLP/JSON, as vLLM's tracing sends them. Times are
seconds, or dates such as 2023-11-16 18:15:46.68; the earliest becomes 0.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from workbench.config import EngineConfig
from workbench.field_checks import number
from workbench.scheduler.request import Request
from workbench.simulation.arrivals import Arrival, read_mooncake, timed_arrival
from workbench.simulation.cost_model import StepCost
from workbench.simulation.limits import MAX_PROMPT_TOKENS
from workbench.simulation.simulate import simulate_requests
from workbench.trace import Trace, TraceMeta
from workbench.trace.metrics import Distribution, amount
from workbench.trace.otlp import E2E, OUTPUT_TOKENS, PROMPT_TOKENS, TTFT, is_otlp, read_spans

SOURCE = "access log"
"""Beginning of the source of a trace that was simulated from a log: nothing in it was measured."""

PROMPT_COLUMNS = "prompt_tokens num_prompt_tokens prompt_length input_length input_tokens contexttokens"
OUTPUT_COLUMNS = "output_tokens num_output_tokens output_length completion_tokens generatedtokens"
COLUMNS = {
    "arrival": ("arrival", "arrival_time", "timestamp", "time", "start_time"),
    "prompt tokens": (*PROMPT_COLUMNS.split(), "request tokens"),
    "output tokens": (*OUTPUT_COLUMNS.split(), "response tokens"),
}
"""Names of each column, in lower case."""


def is_access_log(path: str | os.PathLike[str]) -> bool:
    """Whether a file is an access log and not a trace, by its name and its first line."""
    name = Path(path).name.lower()
    if name.endswith(".csv"):
        return True
    if not name.endswith((".jsonl", ".json")):
        return False
    if is_otlp(path):
        return True
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        return '"kind"' not in file.readline(200)


def read_access_log(path: str | os.PathLike[str], *, speed: float = 1.0) -> list[Arrival]:
    """The requests of an access log, in order of arrival; they share no prefix unless the log has ``hash_ids``.

    Args:
        path: A .csv file with a header, JSON lines, or spans in OTLP/JSON.
        speed: Factor by which requests arrive faster than in the log.

    Raises:
        ValueError: A column is missing or a value is malformed; the message names file, line and column.
        OSError: The file cannot be read.
    """
    number("speed", speed, 0.0, low_open=True)
    if Path(path).suffix.lower() == ".csv":
        rows = _csv_rows(path)
    else:
        rows = _span_rows(path) if is_otlp(path) else _json_rows(path)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path} holds no request")
    if "hash_ids" in first[1]:
        return list(read_mooncake(path, speed=speed))
    names = _find_columns(path, first[1])
    found: list[tuple[float, int, int]] = []
    for place, row in (first, *rows):
        at, prompt, output = (row.get(names[what]) for what in COLUMNS)
        found.append(
            (
                _seconds(f"{place} {names['arrival']}", at),
                max(1, _count(f"{place} {names['prompt tokens']}", prompt, 1)),
                max(1, _count(f"{place} {names['output tokens']}", output, 0)),
            )
        )
    found.sort(key=lambda request: request[0])
    start = found[0][0]
    return [
        timed_arrival(f"r{index}", [index] * prompt, output, (at - start) / speed)
        for index, (at, prompt, output) in enumerate(found)
    ]


def simulate_log(path: str | os.PathLike[str], config: EngineConfig, cost_model: StepCost, speed: float = 1.0) -> Trace:
    """The run that a server with this configuration and these costs would make of a log.

    Args:
        path: The access log.
        config: Configuration of the server.
        cost_model: Duration of a step, from a recording of such a server.
        speed: Factor by which requests arrive faster than in the log.
    """
    arrivals = read_access_log(path, speed=speed)
    meta = TraceMeta(source=f"{SOURCE} {Path(path).name}, simulated", config=config.to_dict())

    def sample_token(request: Request) -> int:
        return 3

    return simulate_requests(
        config, arrivals, sample_token, cost_model=cost_model, meta=meta, max_steps=100 * sum(map(_size, arrivals))
    )


def _size(arrival: Arrival) -> int:
    return arrival.sampling.max_tokens + len(arrival.prompt_token_ids)


def _find_columns(path: str | os.PathLike[str], row: Mapping[str, Any]) -> dict[str, str]:
    by_lower = {name.strip().lower(): name for name in row}
    names = {}
    for what, known in COLUMNS.items():
        found = next((by_lower[name] for name in known if name in by_lower), None)
        if found is None:
            raise ValueError(
                f"{path} has no column with the {what}: name it one of {', '.join(known)}; it has {', '.join(row)}"
            )
        names[what] = found
    return names


def _seconds(place: str, value: Any) -> float:
    """A time in seconds, from a number or a date."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                # Azure writes seven digits of a second, Python reads six.
                head, dot, digits = value.strip().partition(".")
                return datetime.fromisoformat(head + (dot + digits[:6].rstrip("Z") if dot else "")).timestamp()
            except ValueError:
                raise ValueError(f"{place} must be seconds or a date, got {value!r}") from None
    return number(place, value, 0.0)


def _count(place: str, value: Any, low: int) -> int:
    try:
        count = int(float(value))
    except (TypeError, ValueError, OverflowError):
        count = -1
    if not low <= count <= MAX_PROMPT_TOKENS:
        raise ValueError(f"{place} must be a number of tokens from {low} to {MAX_PROMPT_TOKENS}, got {value!r}")
    return count


def _csv_rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        for index, row in enumerate(csv.DictReader(file), start=2):
            yield f"{path}, line {index}:", {name: value for name, value in row.items() if name is not None}


def _span_rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, span in enumerate(read_spans(path), start=1):
        about = span["attributes"]
        yield (
            f"{path}, span {index}:",
            {
                "arrival": span["start"],
                "prompt_tokens": about.get(PROMPT_TOKENS),
                "output_tokens": about.get(OUTPUT_TOKENS),
            },
        )


@dataclass(frozen=True)
class RequestSpans:
    """The requests of a traced server: their arrivals and latencies, without its steps.

    Attributes:
        path: The file.
        arrivals: The requests, in order of arrival.
        latencies: Distributions in seconds by name: "ttft" and "e2e", each if the spans have it.
    """

    path: Path
    arrivals: tuple[Arrival, ...]
    latencies: Mapping[str, Distribution]

    def __repr__(self) -> str:
        times = [arrival.arrives_at or 0.0 for arrival in self.arrivals]
        lines = [f"{len(times)} requests of {self.path.name}, arriving over {max(times) - min(times):.1f} s"]
        for name, values in self.latencies.items():
            shown = (values.mean, values.p50, values.p99)
            mean, middle, high = (amount(value, "s") for value in shown)
            lines.append(f"{name}: mean {mean}, p50 {middle}, p99 {high} (measured, {values.count} requests)")
        lines += [
            "can answer: trace whatif and trace tune, with --cost-from a recording of a server of the same kind",
            "cannot answer: why a request was slow, how long a step took, or hits in the prefix cache: spans hold no "
            "steps, queues, blocks or token ids",
        ]
        return "\n".join(lines)


def read_request_spans(path: str | os.PathLike[str]) -> RequestSpans:
    """The requests and latencies in a file of spans.

    Raises:
        TraceError: The file is not OTLP/JSON.
        ValueError: A span has no lengths, or there is none.
        OSError: The file cannot be read.
    """
    spans = [span["attributes"] for span in read_spans(path)]
    latencies = {
        name: Distribution.of([float(about[key]) for about in spans if about.get(key) is not None])
        for name, key in (("ttft", TTFT), ("e2e", E2E))
    }
    known = {name: values for name, values in latencies.items() if values.count}
    return RequestSpans(Path(path), tuple(read_access_log(path)), known)


def _json_rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with Path(path).open(encoding="utf-8") as file:
        for index, text in enumerate(file, start=1):
            place = f"{path}, line {index}:"
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as problem:
                raise ValueError(f"{place} not JSON: {problem}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{place} must be an object, got {row!r}")
            yield place, row
