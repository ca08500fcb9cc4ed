"""Changed logs of requests in every format: ``python tests/fuzz/hostile_logs.py 10000 [SEED]``.

A log is read, or refused with an error that Workbench raises itself, as in ``hostile_recordings.py``.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hostile_recordings import is_own, run

from workbench import simulate
from workbench.simulation.access_log import is_access_log, read_access_log
from workbench.simulation.workload import read_simulation
from workbench.trace.formats.kv_events.recording import is_kv_events, read_kv_events
from workbench.trace.formats.scrapes import is_scrapes, read_scrapes

Reader = Callable[[Path], object]

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 5, 0.5, -0.0, 1e12, 2e12, 1e308, -1e308, 1.7e308, 1e-308, 2**31, 2**63, 10**400),
    *("", "x", "5", "1e308", "nan", "inf", "-inf", "9" * 400, "2023-11-16", "0001-01-01", "\ud800", "0x1p3"),
    *([], {}, [5], [[]], {"a": 1}, [None], [1e308] * 3, {"intValue": "x"}, {"doubleValue": "1e309"}),
)

SPAN = {
    "name": "llm_request",
    "startTimeUnixNano": "1000000000",
    "endTimeUnixNano": "2000000000",
    "attributes": [
        {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "9"}},
        {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": "3"}},
        {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.5}},
        {"key": "gen_ai.latency.e2e", "value": {"doubleValue": 1.5}},
    ],
}
VCR = {
    "prompt_tokens": 9,
    "output_tokens": 3,
    "ttft_ms": 1.0,
    "arrival_ms": 0.0,
    "itl_ms": [1.0, 2.0],
    "cached_tokens": 1,
}
STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
REQUEST = {"id": "a", "prompt": {"len": 9, "seed": "s"}, "max_tokens": 3, "arrival_time": 0.5, "accepts": [1]}

LOGS: dict[str, tuple[list[Any], Reader]] = {
    "mooncake.jsonl": (
        [{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}] * 3,
        read_access_log,
    ),
    "log.jsonl": ([{"timestamp": 1.5, "input_tokens": 9, "output_tokens": 3}] * 3, read_access_log),
    "spans.json": ([{"resourceSpans": [{"scopeSpans": [{"spans": [SPAN, SPAN]}]}]}] * 2, read_access_log),
    "vcr.jsonl": ([{"meta": {"block_size": 4}}, {**VCR, "block_hashes": [1, 2]}, VCR], read_access_log),
    "kv.jsonl": (
        [{"kind": "kv_events", "version": 1}, *[{"ts": 1.5, "seq": 0, "rank": 0, "events": [STORED]}] * 2],
        read_kv_events,
    ),
    "workload.json": (
        [{"config": {"max_num_seqs": 2}, "requests": [REQUEST], "cost_model": {"fixed": 0.1}}],
        lambda path: simulate(path, max_steps=100),
    ),
    "generated.json": (
        [
            {
                "generate": {
                    "num_requests": 5,
                    "prompt": {"uniform": [1, 9]},
                    "output": 3,
                    "arrivals": {"process": "poisson", "rate": 2.0},
                },
                "cost_model": {"fixed": 0.1},
            }
        ],
        lambda path: read_simulation(path)[0],
    ),
}


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in [(*path, key), *places_of(item, (*path, key))]]


def changed(lines: list[Any], rng: Random) -> list[Any]:
    """The lines with something odd in one to three places."""
    lines = copy.deepcopy(lines)
    for _ in range(rng.choice([1, 1, 1, 2])):
        *path, key = rng.choice(places_of(lines))
        inner = lines
        for each in path:
            inner = inner[each]
        if isinstance(inner, dict) and rng.random() < 0.2:
            del inner[key]
        else:
            inner[key] = copy.deepcopy(rng.choice(ODD))
    return lines


def as_csv(lines: list[Any]) -> str:
    """The lines as rows of a table."""
    rows = [line for line in lines if isinstance(line, dict)] or [{"a": 1}]
    text = "\n".join(",".join(str(row.get(name)) for name in rows[0]) for row in rows)
    return ",".join(map(str, rows[0])) + "\n" + text + "\n"


def try_one(rng: Random, folder: Path) -> tuple[str, str]:
    """Read one changed log; returns what happened, and the finding or ""."""
    name = rng.choice(list(LOGS))
    given, read = LOGS[name]
    lines, path = changed(given, rng), folder / name
    if name == "log.jsonl" and rng.random() < 0.5:
        path = folder / "log.csv"
        path.write_bytes(as_csv(lines).encode("utf-8", "surrogatepass"))
    else:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        is_access_log(path), is_kv_events(path), is_scrapes(path)
        read(path)
    except (ValueError, TypeError) as problem:
        if not is_own(problem):
            return f"{name} finding", f"{json.dumps(lines)}\n{''.join(traceback.format_exception(problem))}"
        outcome = "refused"
    except Exception as problem:
        return f"{name} finding", f"{json.dumps(lines)}\n{''.join(traceback.format_exception(problem))}"
    else:
        outcome = "read"
    if name != "workload.json" and (said := run(["trace", "info", str(path)])) not in ("answered", "refused"):
        return f"{name} finding", f"{json.dumps(lines)}\ntrace info\n{said}"
    return f"{name} {outcome}", ""


def try_scrapes(rng: Random, folder: Path) -> str:
    """Read changed scrapes; returns the finding or ""."""
    sample = 'vllm:generation_tokens_total{engine="0"}'
    words = [rng.choice(["10", "15", "20", "1e5", "9" * 400, "nan", "-1", "x"]) for _ in range(4)]
    path = folder / "m.prom"
    path.write_text(f"# scraped {words[0]}\n{sample} {words[1]}\n# scraped {words[2]}\n{sample} {words[3]}\n")
    try:
        repr(read_scrapes(path))
    except (ValueError, TypeError) as problem:
        if is_own(problem):
            return ""
        return f"{words}\n{''.join(traceback.format_exception(problem))}"
    except Exception as problem:
        return f"{words}\n{''.join(traceback.format_exception(problem))}"
    return ""


def main(number: int, seed: int = 0) -> None:
    """Try many logs, and print each finding once."""
    outcomes: Counter[str] = Counter()
    known: Counter[str] = Counter()
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(number):
            rng = Random(f"{seed} {index}")
            outcome, finding = try_one(rng, Path(folder))
            outcomes[outcome] += 1
            for text in filter(None, [finding, try_scrapes(rng, Path(folder))]):
                place = "\n".join(text.strip().splitlines()[-3:])
                known[place] += 1
                if known[place] == 1:
                    print(f"-- {seed} {index}: {text}", flush=True)
    print(number, json.dumps(dict(sorted(outcomes.items())), indent=1))
    print(json.dumps(known, indent=1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
