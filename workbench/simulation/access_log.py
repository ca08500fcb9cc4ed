"""Requests from an access log: arrival, prompt length and output length of each, in CSV or JSON lines.

Columns are found by name, whatever their case. The public traces of Azure (TIMESTAMP, ContextTokens, GeneratedTokens),
BurstGPT (Timestamp, Request tokens, Response tokens) and Mooncake (timestamp in ms, input_length, output_length,
hash_ids) are read as they are, and so are the requests that ServeGen generates (timestamp, input_tokens, output_tokens)
and those that other tools record at a running vLLM: spans in OTLP/JSON, and recordings of vllm-vcr. Times are seconds,
or dates such as 2023-11-16 18:15:46.68; the earliest becomes 0.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from workbench.base.field_checks import number
from workbench.base.outside_files import open_text
from workbench.simulation.arrivals import (
    Arrival,
    json_lines,
    made_up_prompt,
    mooncake_rows,
    read_mooncake,
    timed_arrival,
)
from workbench.simulation.limits import MAX_PROMPT_TOKENS, count_prompt_tokens
from workbench.trace.fields import MAX_SECONDS
from workbench.trace.formats.otlp import OUTPUT_TOKENS, PROMPT_TOKENS, is_otlp, read_spans
from workbench.trace.formats.vcr import is_vcr, read_vcr

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
    if not name.endswith((".jsonl", ".json", ".jsonl.gz")):
        return False
    if is_otlp(path) or is_vcr(path):
        return True
    if name.endswith(".gz"):
        return False
    with open_text(path, errors="replace") as file:
        return '"kind"' not in file.readline(200)


def read_access_log(path: str | os.PathLike[str], *, speed: float = 1.0) -> list[Arrival]:
    """The requests of an access log, in order of arrival; they share no prefix unless the log says so.

    Args:
        path: A .csv file with a header, JSON lines, spans in OTLP/JSON, or a recording of vllm-vcr.
        speed: Factor by which requests arrive faster than in the log.

    Raises:
        ValueError: A column is missing or a value is malformed; the message names file, line and column.
        OSError: The file cannot be read.
    """
    number("speed", speed, 0.0, low_open=True)
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path} holds no request")
    if "hash_ids" in first[1]:
        count_prompt_tokens((length for _, length, *_ in mooncake_rows(path)), str(path))
        return list(read_mooncake(path, speed=speed))
    names = _find_columns(path, first[1])
    found: list[tuple[float, int, int, Mapping[str, Any]]] = []
    for place, row in (first, *rows):
        at, prompt, output = (row.get(names[what]) for what in COLUMNS)
        found.append(
            (
                _seconds(f"{place} {names['arrival']}", at),
                max(1, _count(f"{place} {names['prompt tokens']}", prompt, 1)),
                max(1, _count(f"{place} {names['output tokens']}", output, 0)),
                row,
            )
        )
    count_prompt_tokens((prompt for _, prompt, *_ in found), str(path))
    found.sort(key=lambda request: request[0])
    start = found[0][0]
    blocks: defaultdict[int, int] = defaultdict(lambda: len(blocks))
    arrivals = []
    for index, (at, prompt, output, row) in enumerate(found):
        shared = [blocks[each] for each in row.get("block_hashes") or ()]
        tokens = made_up_prompt(index, prompt, shared, row["block_size"] if shared else 1)
        arrivals.append(timed_arrival(f"r{index}", tokens, output, (at - start) / speed))
    return arrivals


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The requests of a file by column, each with its place for messages."""
    if Path(path).suffix.lower() == ".csv":
        return _csv_rows(path)
    if is_otlp(path):
        return _span_rows(path)
    return _vcr_rows(path) if is_vcr(path) else json_lines(path)


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
                value = datetime.fromisoformat(head + (dot + digits[:6].rstrip("Z") if dot else "")).timestamp()
            except (ValueError, OverflowError, OSError):
                raise ValueError(f"{place} must be seconds or a date, got {value!r}") from None
    return number(place, value, 0.0, MAX_SECONDS)


def _count(place: str, value: Any, low: int) -> int:
    try:
        count = int(float(value))
    except (TypeError, ValueError, OverflowError):
        count = -1
    if not low <= count <= MAX_PROMPT_TOKENS:
        raise ValueError(f"{place} must be a number of tokens from {low} to {MAX_PROMPT_TOKENS}, got {value!r}")
    return count


def _csv_rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with open_text(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            for index, row in enumerate(rows, start=2):
                yield f"{path}, line {index}:", {name: value for name, value in row.items() if name is not None}
        except (csv.Error, UnicodeDecodeError) as problem:
            raise ValueError(f"{path}, line {rows.line_num}: not CSV: {problem}") from None


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


def _vcr_rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    meta, requests = read_vcr(path)
    for index, request in enumerate(requests, start=1):
        if request.arrival_ms is None:
            raise ValueError(f"{path}, request {index}: arrival_ms is missing: record it with vllm-vcr record")
        yield (
            f"{path}, request {index}:",
            {
                "arrival": request.arrival_ms / 1000,
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": request.output_tokens,
                "block_hashes": request.block_hashes if meta.block_size else None,
                "block_size": meta.block_size,
            },
        )
