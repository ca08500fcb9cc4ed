"""Lines that servers log about their load: vLLM's, SGLang's and llama-server's.

    INFO 05-19 10:13:11 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput:
    81.3 tokens/s, Running: 6 reqs, Waiting: 6 reqs, GPU KV cache usage: 12.0%, Prefix cache hit rate: 0.0%
    [2026-04-08 14:05:21 TP0] Decode batch, #running-req: 5, #token: 20800, token usage: 0.29, cuda graph: True,
    gen throughput (token/s): 144.95, #queue-req: 0
    slot launch_slot_: id  0 | task 7 | processing task

Everything else in a file is skipped, so a whole log may be given, or what somebody pasted into an issue.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Literal

from workbench.base.text import counted, printable
from workbench.trace.errors import TraceError
from workbench.trace.readings.metrics import number
from workbench.trace.text_file import beginning, text_lines

Server = Literal["vLLM", "SGLang", "llama-server"]

LINES_LOOKED_AT = 100_000
"""Lines of a file among which one about the load must be, for the file to be a server's log."""

_NUMBER = r"\s*([\d.]+|nan|-nan|inf)"
_MOMENT = re.compile(r"(?:(\d{4})[-/])?(\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)")
_RANK = re.compile(r"Engine (\d+):|\d\d:\d\d:\d\d((?: (?:DP|TP|PP|EP)\d+)+)\]")
_VLLM = re.compile(rf"Running:{_NUMBER} reqs?\b")
_SGLANG = re.compile(r"(?:Decode|Prefill) batch\b.*#running-req:")
_LLAMA = re.compile(
    r"(?:slot\s+launch_slot_\S*|launch_slot_with_task\]?).*processing task|slot\s+release\b|\brelease\] slot released|"
    r"all slots are idle|no slot is available|defer(?:ring)? task"
)
_TROUBLE = re.compile(
    r"EngineDeadError|out of memory|Traceback \(most recent call last\)|failed to find free space in the KV cache|"
    r"failed to decode the batch|KV cache pool is full|Engine core .*(?:died|failed)|is not enough KV cache space"
)
_PREEMPTED = re.compile(r"\bpreempt(?:ed|ion)\b|#retracted_reqs?:|Retract requests", re.IGNORECASE)


@dataclass(frozen=True)
class Load:
    """The load of a server at one line.

    Attributes:
        at: Seconds, of which differences count; None if the line has no time.
        rank: The engine or rank that wrote it; "" if there is one.
        running: Number of running requests; None if it is not a number.
        waiting: Number of waiting requests; None if the line does not say.
        kv_use: Share of the KV cache in use; None if unknown.
        tokens_per_second: Prompt and output tokens per second; None if unknown.
        hit_rate: Share of prompt tokens that were found in the prefix cache; None if unknown.
    """

    at: float | None
    rank: str
    running: int | None
    waiting: int | None
    kv_use: float | None = None
    tokens_per_second: float | None = None
    hit_rate: float | None = None


@dataclass(frozen=True)
class ServerLog:
    """The load of a server, from its log.

    Attributes:
        path: The file.
        server: The server.
        loads: The load at each line about it, in their order.
        num_preempted: Number of lines about preempted, or retracted, requests.
        trouble: Lines that name an error, the first few.
    """

    path: Path
    server: Server
    loads: Sequence[Load]
    num_preempted: int = 0
    trouble: Sequence[str] = field(default=())

    @property
    def last(self) -> dict[str, Load]:
        """The last line of each rank."""
        return {load.rank: load for load in self.loads}

    @property
    def seconds(self) -> float | None:
        """The time from the first line to the last; None if they have no times."""
        times = [load.at for load in self.loads if load.at is not None]
        return max(times) - min(times) if len(times) > 1 else None

    def __repr__(self) -> str:
        span = f" over {self.seconds:.0f} s" if self.seconds is not None else ""
        ranks = f", {len(self.last)} ranks" if len(self.last) > 1 else ""
        lines = [f"{self.path.name}: {counted(len(self.loads), 'line')} of {self.server} about its load{span}{ranks}"]
        lines += [f"{name}: {said}" for name, said in self._figures()]
        lines += trouble_lines(self)
        lines += [
            "can answer: how many requests ran and waited, and how full the KV cache was, when a line was written",
            "cannot answer: which request was slow and why, or another setting (whatif, tune): a log has no requests, "
            "steps or blocks",
        ]
        return "\n".join(lines)

    def _figures(self) -> Iterator[tuple[str, str]]:
        figures: dict[str, tuple[Callable[[Load], float | None], Callable[[float], str]]] = {
            "running requests": (lambda load: load.running, number),
            "waiting requests": (lambda load: load.waiting, number),
            "use of the KV cache": (lambda load: load.kv_use, "{:.0%}".format),
            "tokens per second": (lambda load: load.tokens_per_second, number),
            "hits in the prefix cache": (lambda load: load.hit_rate, "{:.0%}".format),
        }
        for name, (read, words) in figures.items():
            values = [value for load in self.loads if (value := read(load)) is not None]
            if not values:
                yield name, "unknown"
                continue
            mean, high = sum(values) / len(values), max(values)
            yield name, f"{words(mean)} on average, at most {words(high)}, at the end {words(values[-1])}"


def trouble_lines(log: ServerLog) -> Iterator[str]:
    """Sentences about the preemptions and errors of a log."""
    if log.num_preempted:
        yield f"{counted(log.num_preempted, 'line')} about preempted requests"
    for line in log.trouble:
        yield f"an error in the log: {line}"


def is_server_log(path: str | os.PathLike[str]) -> bool:
    """Whether a file has lines of a server about its load, and is not a trace."""
    if '"kind"' in beginning(path, 200):
        return False
    try:
        return any(_server_of(line) for line in islice(text_lines(path, errors="replace"), LINES_LOOKED_AT))
    except TraceError:  # a damaged gzip file, or one enormous line
        return False


def read_server_log(path: str | os.PathLike[str]) -> ServerLog:
    """The load of a server from its log.

    Raises:
        TraceError: No line is about the load, or lines are those of several kinds of servers.
        OSError: The file cannot be read.

    Example:
        >>> line = "Engine 000: Running: 0 reqs, Waiting: 6 reqs, GPU KV cache usage: 12.0%"
        >>> _ = Path("vllm.log").write_text(line)
        >>> read_server_log("vllm.log").loads[0].kv_use
        0.12
    """
    servers: dict[Server, None] = {}
    loads: list[Load] = []
    slots = _Slots()
    num_preempted = 0
    trouble: list[str] = []
    for line in text_lines(path, errors="replace"):
        num_preempted += _PREEMPTED.search(line) is not None
        if _TROUBLE.search(line) is not None and len(trouble) < 3:
            trouble.append(printable(line.strip())[-200:])
        if (server := _server_of(line)) is None:
            continue
        servers.setdefault(server)
        loads.append({"vLLM": _vllm_load, "SGLang": _sglang_load, "llama-server": slots.load}[server](line))
    if not loads:
        raise TraceError(f"{path} has no line of vLLM, SGLang or llama-server about its load")
    if len(servers) > 1:
        raise TraceError(f"{path} has lines of {' and of '.join(servers)}: give the log of one server")
    return ServerLog(Path(path), next(iter(servers)), loads, num_preempted, trouble)


def _server_of(line: str) -> Server | None:
    if "reqs" in line and _VLLM.search(line):
        return "vLLM"
    if "#running-req" in line and _SGLANG.search(line):
        return "SGLang"
    return "llama-server" if ("slot" in line or "defer" in line) and _LLAMA.search(line) else None


def _vllm_load(line: str) -> Load:
    rates = [_read(line, rf"Avg {kind} throughput:{_NUMBER}") for kind in ("prompt", "generation")]
    known = [rate for rate in rates if rate is not None]
    return Load(
        _moment(line),
        _rank(line),
        _count(line, rf"Running:{_NUMBER} req"),
        _count(line, rf"(?:Waiting|Pending):{_NUMBER} req"),
        kv_use=_read(line, rf"KV cache usage:{_NUMBER}\s*%", 100),
        tokens_per_second=sum(known) if known else None,
        hit_rate=_read(line, rf"(?<!External )(?<!MM )[Pp]refix cache hit rate:(?: GPU:)?{_NUMBER}\s*%", 100),
    )


def _sglang_load(line: str) -> Load:
    new, cached = (_read(line, rf"#{kind}-token:{_NUMBER}") for kind in ("new", "cached"))
    return Load(
        _moment(line),
        _rank(line),
        _count(line, rf"#running-req:{_NUMBER}"),
        _count(line, rf"#queue-req:{_NUMBER}"),
        kv_use=_read(line, rf"token usage:{_NUMBER}"),
        tokens_per_second=_read(line, rf"(?:gen|input) throughput \(token/s\):{_NUMBER}"),
        hit_rate=cached / (new + cached) if new is not None and cached is not None and new + cached else None,
    )


class _Slots:
    """The slots of llama-server, which logs what happens to each and not how many are taken."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._deferred: set[str] = set()

    def load(self, line: str) -> Load:
        """Take a line into account."""
        task = re.search(r"(?:\btask|id_task)\s*=?\s*(-?\d+)", line)
        name = task[1] if task is not None else ""
        if "all slots are idle" in line:
            self._taken.clear()
        elif "release" in line:
            self._taken.discard(name)
        elif "processing task" in line:
            self._taken.add(name)
            self._deferred.discard(name)
        else:
            self._deferred.add(name)
        return Load(_moment(line), "", len(self._taken), len(self._deferred))


def _read(line: str, pattern: str, per: float = 1) -> float | None:
    """A number of a line; None if it is missing or not finite."""
    if (found := re.search(pattern, line)) is None:
        return None
    try:
        value = float(found[1]) / per
    except ValueError:
        return None
    return value if isfinite(value) else None


def _count(line: str, pattern: str) -> int | None:
    value = _read(line, pattern)
    return None if value is None else int(value)


def _moment(line: str) -> float | None:
    if (found := _MOMENT.search(line)) is None:
        return None
    year, *rest = found.groups()
    try:
        moment = datetime.fromisoformat("{}-{}-{} {}:{}:{}+00:00".format(year or 2000, *rest))
    except ValueError:  # the 45th of a month
        return None
    return moment.timestamp()


def _rank(line: str) -> str:
    found = _RANK.search(line)
    return (found[1] or found[2] or "").strip() if found is not None else ""
