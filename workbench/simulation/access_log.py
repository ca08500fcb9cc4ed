"""Requests from an access log: arrival, prompt length and output length of each, in CSV or JSON.

Columns are found by name, whatever their case, and each is read, harmless or refused
(`workbench.simulation.log_tables`). The public traces of Azure (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT
(Timestamp, Request tokens, Response tokens), Mooncake and Qwen-Bailian (timestamp, input_length, output_length,
hash_ids) are read as they are, and so are ShareGPT's conversations, the requests that ServeGen generates (timestamp,
input_tokens, output_tokens) and those that other tools record at a running vLLM: spans in OTLP/JSON, and recordings of
vllm-vcr. Times are seconds, or dates such as 2023-11-16 18:15:46.68; the earliest becomes 0. Other units are found, or
given by the user (`workbench.simulation.log_units`).
"""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from workbench.base.field_checks import FieldError, integer, items, number
from workbench.base.outside_files import json_value
from workbench.base.text import shown
from workbench.simulation.arrivals import Arrival, made_up_prompt, read_sharegpt, timed_arrival
from workbench.simulation.limits import MAX_PROMPT_TOKENS, count_prompt_tokens
from workbench.simulation.log_rows import Rows, is_array, is_table, json_rows, table_rows
from workbench.simulation.log_tables import (
    CONVERSATION_RULES,
    RULES,
    SESSION_COLUMNS,
    TOTAL,
    column_check,
    find_columns,
    is_refused,
)
from workbench.simulation.log_units import (
    Hashed,
    Moment,
    UnitOfTime,
    block_sizes,
    read_moment,
    single_block_size,
    split_unit,
    time_unit,
)
from workbench.simulation.summary import summary_of
from workbench.trace.fields import MAX_SECONDS
from workbench.trace.formats.otlp import OUTPUT_TOKENS, PROMPT_TOKENS, is_otlp, read_spans
from workbench.trace.formats.vcr import is_vcr, read_vcr
from workbench.trace.text_file import beginning

_SHAREGPT = "no times in the file, so all arrive together; four characters of a text count as a token"

_LINE_START = 2**16
"""Characters that a request of a log has at most in a file that could hold a workload."""


@dataclass(frozen=True)
class AccessLog:
    """The requests of a log, and how it was read.

    Attributes:
        path: The file.
        arrivals: The requests, in order of arrival.
        reading: The units that its times and blocks were read in.
        block_size: Tokens of a block that requests can share; None if the log names none.
    """

    path: Path
    arrivals: list[Arrival]
    reading: str
    block_size: int | None = None

    def __str__(self) -> str:
        return f"{self.path.name}: {summary_of(self.arrivals, self.block_size)}\nread as: {self.reading}"


def is_access_log(path: str | os.PathLike[str]) -> bool:
    """Whether a file is an access log and not a trace or a workload, by its name and its beginning."""
    name = Path(path).name.lower().removesuffix(".gz")
    if is_table(path):
        beginning(path)  # refuses what is not a regular file
        return True
    if not name.endswith((".jsonl", ".json")):
        return False
    if is_otlp(path) or is_vcr(path) or is_array(path):
        return True
    line = beginning(path, _LINE_START).partition("\n")[0]
    return '"kind"' not in line[:200] and not (name.endswith(".json") and _begins_workload(line))


def _begins_workload(line: str) -> bool:
    """Whether a file that begins with this line is one JSON object, as a workload is, and no list of requests."""
    try:
        content = json_value(line)
    except ValueError:
        return True  # an object of several lines
    return isinstance(content, dict) and not content.keys().isdisjoint(("config", "requests", "generate"))


def read_access_log(
    path: str | os.PathLike[str],
    time_unit: UnitOfTime | None = None,
    block_size: int | None = None,
    *,
    speed: float = 1.0,
    ignore_columns: Collection[str] = (),
) -> list[Arrival]:
    r"""The requests of an access log, in order of arrival; they share no prefix unless the log says so.

    Args:
        path: A table with a header (.csv, .csv.gz), JSON lines or an array (.jsonl, .json, with or without .gz), spans
            in OTLP/JSON, or a recording of vllm-vcr.
        time_unit: Unit of its times: "s", "ms", "us" or "ns"; None to find it.
        block_size: Tokens that each of its ``hash_ids`` stands for; None to find it.
        speed: Factor by which requests arrive faster than in the log.
        ignore_columns: Columns to leave out, as if the file lacked them.

    Raises:
        ValueError: A column is missing, unknown or malformed, or two readings of the times or blocks are possible; the
            message names file, line and column, or the option that decides.
        OSError: The file cannot be read.

    Example:
        >>> from pathlib import Path
        >>> from workbench import read_access_log
        >>> size = Path("log.csv").write_text("timestamp,input_length,output_length\n0.5,200,30\n2.25,90,12\n")
        >>> [(arrival.arrives_at, arrival.max_tokens) for arrival in read_access_log("log.csv", time_unit="s")]
        [(0.0, 30), (1.75, 12)]
    """
    return read_log(path, time_unit, block_size, speed=speed, ignore_columns=ignore_columns).arrivals


def read_log(
    path: str | os.PathLike[str],
    time_unit: UnitOfTime | None = None,
    block_size: int | None = None,
    *,
    speed: float = 1.0,
    ignore_columns: Collection[str] = (),
) -> AccessLog:
    """`read_access_log`, with the units that were found."""
    number("speed", speed, 0.0, low_open=True)
    rows, is_foreign = _rows(path, ignore_columns)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path} holds no request")
    if "conversations" in first[1]:
        return _read_conversations(path, time_unit, block_size, ignore_columns)
    log = _Log(path, first, is_foreign)
    for place, row in chain([first], rows):
        log.add(place, row)
    return log.finish(time_unit, block_size, speed)


def refuse_units(
    source: Any, time_unit: UnitOfTime | None, block_size: int | None, ignore_columns: Collection[str] = ()
) -> None:
    """Refuse units and columns for a file that is not an access log: a trace and a workload say what they count.

    Raises:
        ValueError: One is given; the message names the option.
    """
    given = ("--time-unit", time_unit), ("--block-size", block_size), ("--ignore-columns", ",".join(ignore_columns))
    for option, value in given:
        if value not in (None, ""):
            raise FieldError(f"{option} {value} has no effect on {source}, which is not an access log: leave it out")


class _Log:
    """The rows of a log, as far as they can be read without its units.

    Args:
        path: The file.
        first: Its first row, whose columns all rows have.
        is_foreign: Whether a reader of another format made the rows.
    """

    def __init__(self, path: str | os.PathLike[str], first: tuple[str, Mapping[str, Any]], is_foreign: bool) -> None:
        self._path = path
        self._is_foreign = is_foreign
        self._is_table = is_table(path)
        self._names, self._unit = find_columns(path, first[1])
        self._totals = [str(name) for name in first[1] if split_unit(str(name))[0] in TOTAL.split()]
        self._keys = {split_unit(str(name))[0] for name in first[1]}
        self._moments: list[Moment] = []
        self._prompts: list[Hashed] = []
        self._outputs: list[int] = []
        self._sessions: list[str] = []
        self._block_size: int | None = None

    def add(self, place: str, row: Mapping[str, Any]) -> None:
        """Read a row."""
        at, length, output = (f"{place} {name}" for name in self._names.values())
        given = [row.get(name) for name in self._names.values()]
        num_tokens = max(1, _count(length, given[1], 1))
        self._check_total(place, row, num_tokens, given[2])
        blocks: list[int] = []
        if self._is_foreign:
            blocks, self._block_size = list(row.get("block_hashes") or ()), row.get("block_size")
        elif (hash_ids := row.get("hash_ids")) is not None:
            blocks = _hash_ids(f"{place} hash_ids", hash_ids, is_table=self._is_table)
            if len(blocks) > num_tokens:
                raise ValueError(f"{place} {len(blocks)} hash_ids are more than input_length, {num_tokens} tokens")
        self._moments.append(read_moment(at, given[0]))
        self._prompts.append(Hashed(place, num_tokens, blocks))
        self._outputs.append(max(1, _count(output, given[2], 0)))
        self._sessions.append(next((str(row[name]) for name in SESSION_COLUMNS if row.get(name) is not None), ""))

    def _check_total(self, place: str, row: Mapping[str, Any], num_tokens: int, output: Any) -> None:
        """Refuse a total that is not the sum of the two lengths, which then count something else."""
        for name in self._totals:
            total = row.get(name)
            if total not in (None, "") and _count(f"{place} {name}", total, 0) != num_tokens + _count(place, output, 0):
                raise ValueError(
                    f"{place} {name} is {shown(total)}, with a prompt of {num_tokens} and an output of {shown(output)} "
                    f"tokens: it must be their sum, or left out with --ignore-columns {shlex.quote(name)}"
                )

    def finish(self, unit: str | None, size: int | None, speed: float) -> AccessLog:
        """All requests, in the units that are given or found."""
        path, prompts = self._path, self._prompts
        count_prompt_tokens((prompt.length for prompt in prompts), str(path))
        sizes = [self._block_size or 1] if self._is_foreign else block_sizes(path, prompts, size)
        size = single_block_size(path, prompts, sizes)
        found = time_unit(
            path,
            self._moments,
            given=unit,
            named=self._unit,
            keys=self._keys,
            like_mooncake={"timestamp", "input_length", "output_length"} <= self._keys,
            is_table=self._is_table,
            block_sizes=sizes,
        )
        times = [number(each.place, each.value * found.seconds, 0.0, MAX_SECONDS) for each in self._moments]
        start = min(times)
        numbers: defaultdict[int, int] = defaultdict(lambda: len(numbers))
        arrivals = []
        for index, place in enumerate(sorted(range(len(times)), key=times.__getitem__)):
            length, blocks = prompts[place].length, prompts[place].blocks if size else ()
            tokens = made_up_prompt(index, length, [numbers[each] for each in blocks], size or 1)
            at = (times[place] - start) / speed
            arrivals.append(timed_arrival(f"r{index}", tokens, self._outputs[place], at, session=self._sessions[place]))
        has_blocks = any(prompt.blocks for prompt in prompts)
        reading = f"times in {found.words}"
        if has_blocks:
            reading += f"; blocks of {size} tokens" if size else "; hash_ids that no two prompts share"
        return AccessLog(Path(path), arrivals, reading, size if has_blocks else None)


def _read_conversations(
    path: str | os.PathLike[str], unit: str | None, size: int | None, ignored: Collection[str]
) -> AccessLog:
    """The conversations of ShareGPT, which hold no times and no lengths."""
    for name, value in (("time_unit", unit), ("block_size", size)):
        if value is not None:
            raise FieldError(f"{name} {value!r} has no effect on {path}, which holds conversations: leave it out")
    arrivals = list(read_sharegpt(path, repeat(0.0), ignore_columns=ignored))
    if not arrivals:
        raise ValueError(f"{path} holds no conversation with an answer")
    return AccessLog(Path(path), arrivals, _SHAREGPT)


def _hash_ids(place: str, value: Any, *, is_table: bool) -> list[int]:
    """The names of a prompt's blocks; in a table they are written as in JSON, or with spaces between them."""
    if is_table and isinstance(value, str):
        value = [int(word) if word.isdecimal() else word for word in value.strip("[] ").replace(",", " ").split()]
    return [integer(place, each, 0) for each in items(place, value, "numbers")]


def _rows(path: str | os.PathLike[str], ignored: Collection[str]) -> tuple[Rows, bool]:
    """The requests of a file by column, and whether a reader of another format made them."""
    if not is_table(path) and is_otlp(path):
        return _span_rows(path, ignored), True
    if not is_table(path) and is_vcr(path):
        return _vcr_rows(path, ignored), True
    return _checked(path, table_rows(path) if is_table(path) else json_rows(path), ignored), False


def _checked(path: str | os.PathLike[str], rows: Rows, ignored: Collection[str]) -> Rows:
    """The rows without the columns that are left out; any other is known."""
    columns, rules = column_check(ignored), None
    for place, row in rows:
        if rules is None:
            rules = CONVERSATION_RULES if "conversations" in row else RULES
            if rules is RULES and not is_refused(row):
                find_columns(path, columns.kept(row))  # one that is missing comes before one too many
        yield place, columns.check(place.removesuffix(":"), row, rules)
    columns.finish(path)


def _count(place: str, value: Any, low: int) -> int:
    try:
        count = float(value)
        whole = int(count)
    except (TypeError, ValueError, OverflowError):
        count, whole = 0.0, -1
    if not low <= whole <= MAX_PROMPT_TOKENS or count != whole or isinstance(value, bool):
        raise ValueError(f"{place} must be a number of tokens from {low} to {MAX_PROMPT_TOKENS}, got {shown(value)}")
    return whole


def _span_rows(path: str | os.PathLike[str], ignored: Collection[str]) -> Rows:
    for index, span in enumerate(read_spans(path, ignored), start=1):
        about = span["attributes"]
        yield (
            f"{path}, span {index}:",
            {
                "arrival": span["start"],
                "prompt_tokens": about.get(PROMPT_TOKENS),
                "output_tokens": about.get(OUTPUT_TOKENS),
            },
        )


def _vcr_rows(path: str | os.PathLike[str], ignored: Collection[str]) -> Rows:
    meta, requests = read_vcr(path, ignored)
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
