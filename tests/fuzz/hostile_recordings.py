"""Hostile recordings through every command: ``python tests/fuzz/hostile_recordings.py 2900 [SEED]``.

Each file is a recording of vLLM with one to three changes that leave it readable as often as possible: numbers, orders,
and fields that are missing, of requests, steps and the configuration. Every command answers, or refuses with an error
that it raises itself. Anything else is a finding: another exception, one that Python raised, or no end.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import json
import linecache
import logging
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from msgspec.structs import replace

from workbench.apps import cli
from workbench.trace import Trace, TraceError

ROOT = Path(__file__).parents[2]
SECONDS = 60
"""Maximum CPU time of a command."""

SOURCES = (
    "examples/vllm_preemption.jsonl.gz",
    "notebooks/data/vllm_five_long.jsonl.gz",
    "tests/data/vllm-private/sessions-sync-default.jsonl.gz",
    "tests/data/vllm-private/sessions-async-default.jsonl.gz",
    "tests/data/vllm-private/sessions-sync-tokens.jsonl.gz",
)
MAX_STEPS = 45
Lines = list[dict[str, Any]]


@cache
def source_lines(source: str) -> str:
    """The first steps of a recording whose durations follow from the contents of its steps, one line each."""
    trace, now = Trace.load(ROOT / source), 0.0
    part = trace[:MAX_STEPS]
    timed, begins = Trace(trace.meta), {}
    infos = iter(part.arrivals())
    info = next(infos, None)
    for index, record in enumerate(part):
        begins[index] = now
        while info is not None and info[0] <= index:
            timed.add_request(replace(info[1], arrival_time=max(0.0, now - 0.01)))
            info = next(infos, None)
        forward = 0.02 + 1e-4 * record.num_tokens + 1e-3 * len(record.chunks)
        timings = {"schedule": 1e-4, "forward": forward, "update": 1e-4}
        end = now + sum(timings.values())
        timed.append(replace(record, time=now, timings=timings, phase_starts={}, end=end))
        now = end + 1e-4
    for supplement in part.supplements:
        timed.add_supplement(supplement)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        timed.save(path)
        return path.read_text(encoding="utf-8")


# -- changes -------------------------------------------------------------------------------------------------------

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    10**3,
    10**6,
    10**9,
    2**31 - 1,
    2**53,
    0.5,
    1e-9,
    1e9,
    1e300,
    1e308,
    -1e308,
    1e12,
    -0.0,
)
CONFIG = (
    *("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching"),
    *("async_scheduling", "long_prefill_token_threshold", "policy", "watermark", "num_speculative_tokens"),
    *("max_num_partial_prefills", "max_num_scheduled_tokens", "token_ids_recorded", "kv_cache_groups", "max_loras"),
)
OTHERS = (None, "", "priority", "fcfs", True, False, [], {}, [1], "16")


def pick(lines: Lines, rng: Random, kind: str) -> dict[str, Any]:
    """A line of a kind, or the first line."""
    return rng.choice([line for line in lines if line["kind"] == kind] or lines[:1])


def number_near(value: Any, rng: Random) -> Any:
    """Another number of the same size or an extreme one; anything else is replaced."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return rng.choice(NUMBERS)
    near = (value + 1, value - 1, 2 * value, value // 2 if isinstance(value, int) else value / 2, -value, value * 1000)
    return rng.choice(near if rng.random() < 0.7 else NUMBERS)


def configuration(lines: Lines, rng: Random) -> None:
    """A setting has another value, or is missing."""
    config = lines[0].get("config", {})
    name = rng.choice([*config, *CONFIG])
    if rng.random() < 0.2:
        config.pop(name, None)
    else:
        config[name] = number_near(config.get(name), rng) if rng.random() < 0.8 else rng.choice(OTHERS)


def request_number(lines: Lines, rng: Random) -> None:
    """A number of a request is another one."""
    request = pick(lines, rng, "request")
    name = rng.choice(["arrival_time", "arrival_step", "max_tokens", "num_prompt_tokens", "priority"])
    request[name] = number_near(request.get(name, 0), rng)


def request_field(lines: Lines, rng: Random) -> None:
    """A field of a request is missing, or has the value of another request."""
    request, other = pick(lines, rng, "request"), pick(lines, rng, "request")
    name = rng.choice(sorted({*request, *other} - {"kind"}))
    if name in other and rng.random() < 0.5:
        request[name] = copy.deepcopy(other[name])
    else:
        request.pop(name, None)


def arrival_times(lines: Lines, rng: Random) -> None:
    """All requests arrive at once, in another order, or much later."""
    requests = [line for line in lines if line["kind"] == "request"]
    times = [request.get("arrival_time", 0.0) for request in requests]
    rng.shuffle(times)
    factor = rng.choice([0.0, 1.0, 1e-6, 1e6, 1e12])
    for request, time in zip(requests, times):
        request["arrival_time"] = time * factor


def clock(lines: Lines, rng: Random) -> None:
    """Steps take no time, a long time, or overlap; from one step on the clock is another one."""
    steps = [line for line in lines if line["kind"] == "step"]
    first, factor, shift = rng.randrange(len(steps)), rng.choice([0.0, 1e-9, 1e9, 1.0, 3.0]), rng.choice([0, -1, 1e6])
    for step in steps[first:]:
        step["time"] = max(0.0, step.get("time", 0.0) * factor + shift)
        step["timings"] = {name: seconds * factor for name, seconds in step.get("timings", {}).items()}


def durations(lines: Lines, rng: Random) -> None:
    """A share of the steps has no timings, or takes a random time."""
    share, spread = rng.random(), rng.choice([0.0, 0.1, 3.0])
    for step in lines:
        if step["kind"] == "step" and rng.random() < share:
            kept = step.pop("timings", {})
            if spread:
                step["timings"] = {name: seconds * rng.lognormvariate(0, spread) for name, seconds in kept.items()}


def extreme_times(lines: Lines, rng: Random) -> None:
    """One time is larger than all others, perhaps beyond what a double can be multiplied with."""
    value = rng.choice([1e308, 1.7e308, 1e300, 1e12, 1e11, 2e12, -1e308, 1e-308, 10**400])
    line = pick(lines, rng, rng.choice(["step", "step", "request"]))
    name = rng.choice(["arrival_time"] if line["kind"] == "request" else ["time", "end", "timings", "phase_starts"])
    if name in ("timings", "phase_starts"):
        phases = [*line.get("timings", {}), "forward"]
        line[name] = {**line.get(name, {}), rng.choice(phases): value}
    else:
        line[name] = value


def phases_without_times(lines: Lines, rng: Random) -> None:
    """Phases that begin somewhere and take no time, or are missing where other steps have them."""
    step = pick(lines, rng, "step")
    step["phase_starts"] = {rng.choice(["schedule", "forward", "x"]): rng.choice([0.0, 1e-3, -1e-3, 1e9])}
    if rng.random() < 0.7:
        step.pop("timings", None)


def scalar_for_a_list(lines: Lines, rng: Random) -> None:
    """A number or a text stands where a list or an object is expected, or the other way round."""
    line = rng.choice(lines)
    names = sorted(name for name in line if name not in ("kind", "schema_version", "step"))
    if names:
        name = rng.choice(names)
        many = isinstance(line[name], list | dict)
        line[name] = rng.choice([5, 0, "x", 1.5, True]) if many else rng.choice([[], {}, [5], [[]], {"a": 1}])


def step_field(lines: Lines, rng: Random) -> None:
    """A field of a step is missing, or has the value of another step."""
    step, other = pick(lines, rng, "step"), pick(lines, rng, "step")
    name = rng.choice(sorted({*step, *other} - {"kind", "step"}))
    if name in other and rng.random() < 0.6:
        step[name] = copy.deepcopy(other[name])
    else:
        step.pop(name, None)


def fields_of_all_steps(lines: Lines, rng: Random) -> None:
    """No step has a field."""
    name = rng.choice(sorted({name for line in lines if line["kind"] == "step" for name in line} - {"kind", "step"}))
    for step in lines:
        if step["kind"] == "step":
            step.pop(name, None)


def order_in_a_step(lines: Lines, rng: Random) -> None:
    """A list of a step has another order, lacks its last element, or has a request more."""
    step = pick(lines, rng, "step")
    names = [name for name, value in step.items() if isinstance(value, list) and value]
    if names:
        values = step[rng.choice(names)]
        change = rng.randrange(3)
        if change == 0:
            rng.shuffle(values)
        elif change == 1:
            values.pop()
        else:
            values.append(pick(lines, rng, "request").get("request_id", ""))


def step_number(lines: Lines, rng: Random) -> None:
    """A number of a step, or of one of its chunks, is another one."""
    step = pick(lines, rng, "step")
    chunks = step.get("chunks") or []
    if chunks and rng.random() < 0.5:
        chunk = rng.choice(chunks)
        index = rng.choice([index for index, value in enumerate(chunk) if isinstance(value, int)] or [0])
        chunk[index] = number_near(chunk[index], rng)
    else:
        names = [name for name, value in step.items() if isinstance(value, int | float) and name != "step"]
        if names:
            name = rng.choice(names)
            step[name] = number_near(step[name], rng)


def missing_steps(lines: Lines, rng: Random) -> None:
    """Steps are missing or come twice, and the others are counted without a hole."""
    places = [place for place, line in enumerate(lines) if line["kind"] == "step"]
    place = rng.choice(places)
    if rng.random() < 0.6:
        del lines[place : place + rng.choice([1, 1, 2, 10, 60])]
    else:
        lines.insert(place, copy.deepcopy(lines[place]))
    count = 0
    for line in lines:
        if line["kind"] == "step":
            line["step"] = count
            count += 1
        elif line["kind"] == "end":
            line["num_steps"] = count


def missing_lines(lines: Lines, rng: Random) -> None:
    """Requests, supplements or the end are missing, or another order of two lines."""
    place = rng.randrange(1, len(lines))
    change = rng.randrange(3)
    if change == 0:
        del lines[place]
    elif change == 1:
        other = min(len(lines) - 1, place + rng.choice([1, 2, 5]))
        lines[place], lines[other] = lines[other], lines[place]
    else:
        kind = rng.choice(["supplement", "end"])
        lines[1:] = [line for line in lines[1:] if line["kind"] != kind]


def hashes(lines: Lines, rng: Random) -> None:
    """The hashes of a request are those of another one, are cut, or say something else."""
    supplement, other = pick(lines, rng, "supplement"), pick(lines, rng, "supplement")
    if supplement["kind"] != "supplement":
        return
    facts, texts = supplement.get("facts", {}), other.get("facts", {})
    for name in list(facts):
        if rng.random() < 0.5:
            continue
        value = facts[name]
        if isinstance(value, str):
            facts[name] = rng.choice([value[: len(value) // 2], value[16:], value + value, texts.get(name, ""), ""])
        elif isinstance(value, dict) and value:
            key = rng.choice(list(value))
            value[key] = rng.choice(["", "0" * 16, "ab" * 40, None, 7])


CHANGES: tuple[Callable[[Lines, Random], None], ...] = (
    *(configuration, request_number, request_field, arrival_times, clock, durations, step_field, fields_of_all_steps),
    *(order_in_a_step, step_number, missing_steps, missing_lines, hashes),
    *(extreme_times, extreme_times, phases_without_times, scalar_for_a_list),
)


TYPES = (extreme_times, scalar_for_a_list)


def changed(rng: Random) -> tuple[str, str]:
    """The text of a changed recording, and what was changed."""
    source = rng.choice(SOURCES)
    lines = [json.loads(line) for line in source_lines(source).splitlines()]
    changes = [rng.choice(CHANGES) for _ in range(rng.choice([1, 1, 2, 3]))]
    for change in sorted(changes, key=lambda change: change in TYPES):  # the others expect each field's own type
        change(lines, rng)
    return "".join(json.dumps(line) + "\n" for line in lines), f"{source}: {', '.join(c.__name__ for c in changes)}"


# -- commands ------------------------------------------------------------------------------------------------------


def commands(path: Path, request_id: str, rng: Random) -> Iterator[list[str]]:
    """The commands that read a recording: seven of eight, because one that predicts is enough."""
    file = str(path)
    yield ["trace", "info", file]
    yield ["trace", "explain", file, request_id]
    yield ["trace", "explain", file, *rng.choice([["--slowest", "3"], ["--by", "e2e"]])]
    yield ["trace", "misses", file, *rng.choice([[], [request_id]])]
    yield ["trace", "html", file, str(path.with_suffix(".html"))]
    yield ["why", file]
    yield ["trace", "diff", file, str(path.with_name("original.jsonl"))]
    setting = rng.choice(
        ["max_num_batched_tokens=64", "max_num_seqs=3", "num_blocks=40", "enable_prefix_caching=false"]
    )
    if rng.random() < 0.5:  # they take most of the time
        yield ["trace", "whatif", file, "--set", setting, *rng.choice([[], ["--force"]])]
    else:
        yield ["trace", "tune", file, "--slo", "ttft_p99=1s", "--sweep", "max_num_seqs=2,4", "--force"]


parser = cache(cli.build_parser)


class NoEnd(BaseException):
    """A command takes too long."""


def run(words: list[str]) -> str:
    """Run a command; returns "answered", "refused", or the finding with its traceback."""
    raised: list[BaseException] = []
    options = parser().parse_args(words)
    said = io.StringIO()

    def stop(number: int, frame: FrameType | None) -> None:
        raise NoEnd

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            status = options.run(options)
    except (ValueError, OSError) as problem:
        raised.append(problem)
        status = 2
    except (Exception, NoEnd) as problem:
        return "".join(traceback.format_exception(problem))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if raised and not is_own(raised[0]):
        return "".join(traceback.format_exception(raised[0]))
    return "refused" if status else "answered"


def is_own(problem: BaseException) -> bool:
    """Whether a statement of this package raised an error, and not Python."""
    frame, line = list(traceback.walk_tb(problem.__traceback__))[-1]
    file = frame.f_code.co_filename
    if "workbench" not in file:
        return False
    tree = ast.parse("".join(linecache.getlines(file)))
    return any(isinstance(node, ast.Raise) and node.lineno <= line <= (node.end_lineno or 0) for node in ast.walk(tree))


def try_one(rng: Random, folder: Path) -> tuple[Counter[str], list[str]]:
    """Run all commands on one changed recording.

    Args:
        rng: Draws the recording and the changes.
        folder: Folder of the files to write.

    Returns:
        The numbers of outcomes by command, and the findings.
    """
    outcomes: Counter[str] = Counter()
    text, what = changed(rng)
    path = folder / "changed.jsonl"
    path.write_text(text, encoding="utf-8")
    (folder / "original.jsonl").write_text(source_lines(what.partition(":")[0]), encoding="utf-8")
    try:
        names = list(Trace.load(path).requests)
    except TraceError:
        outcomes["files refused"] += 1
        names = ["a"]
    else:
        outcomes["files read"] += 1
    findings = []
    for words in commands(path, rng.choice(names or ["a"]), rng):
        outcome = run(words)
        if outcome not in ("answered", "refused"):
            findings.append(f"{what}\n{' '.join(words)}\n{outcome}")
            outcome = "findings"
        outcomes[f"{' '.join(words[:2] if words[0] == 'trace' else words[:1])} {outcome}"] += 1
    return outcomes, findings


def main(number: int, seed: int = 0) -> None:
    """Try many recordings, and print each finding once."""
    outcomes: Counter[str] = Counter()
    known: Counter[str] = Counter()
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(number):
            found, findings = try_one(Random(f"{seed} {index}"), Path(folder))
            outcomes += found
            for finding in findings:
                place = "\n".join(finding.strip().splitlines()[-3:])
                known[place] += 1
                if known[place] == 1:
                    print(f"-- {seed} {index}: {finding}", flush=True)
            if index % 100 == 99:
                print(index + 1, dict(sorted(outcomes.items())), flush=True)
    print(number, json.dumps(dict(sorted(outcomes.items())), indent=1))
    print(json.dumps(known, indent=1))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
