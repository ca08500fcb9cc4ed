"""Why a server serves nothing, from lines of its log: what people paste into issues, and the weakest source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workbench.base.text import counted
from workbench.trace.formats.server_log import Load, Server, ServerLog, trouble_lines

Verdict = Literal["idle", "runs", "queued", "full", "starved", "still"]
"""``idle``: no request is there. ``runs``: none waits. ``queued``: some run, some wait. ``full``: likewise, and the KV
cache is nearly full. ``starved``: requests run and no token comes out. ``still``: none runs, and some wait."""

FULL, HALF_FULL = 0.9, 0.5
"""Shares of the KV cache from which on the rest is too small for the next request, or perhaps too small."""

_MORE: dict[Server, str] = {
    "vLLM": (
        "workbench why http://HOST:PORT (its /metrics) tells whether tokens come out and requests are preempted; "
        "workbench why FOLDER, with a recording (--scheduler-cls workbench.vllm.RecordingScheduler), tells the rest"
    ),
    "SGLang": (
        "its /metrics (--enable-metrics) have more; workbench simulate WORKLOAD.json --out OUT.jsonl and workbench "
        "why OUT.jsonl tell what vLLM's scheduler would do with the same requests"
    ),
    "llama-server": (
        "its /slots and /metrics (--metrics) have more; workbench simulate WORKLOAD.json --out OUT.jsonl and "
        "workbench why OUT.jsonl tell what vLLM's scheduler would do with the same requests"
    ),
}
"""The command that tells what a log of each server cannot."""

_SEATS: dict[Server, str] = {
    "vLLM": "--max-num-seqs",
    "SGLang": "--max-running-requests",
    "llama-server": "--parallel",
}
_POOL: dict[Server, str] = {
    "vLLM": "--gpu-memory-utilization",
    "SGLang": "--mem-fraction-static",
    "llama-server": "--ctx-size",
}


@dataclass(frozen=True)
class WhyLog:
    """A log, read for requests that are not served.

    Attributes:
        log: The log.
        verdicts: The verdict on each rank, by its name.
    """

    log: ServerLog
    verdicts: dict[str, Verdict]

    @property
    def is_stuck(self) -> bool:
        """Whether requests of a rank get nothing."""
        return not {"starved", "still"}.isdisjoint(self.verdicts.values())

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        server = self.log.server
        yield f"{counted(len(self.log.loads), 'line')} of {server}; the last says:"
        for rank, verdict in self.verdicts.items():
            load = self.log.last[rank]
            name = f"{rank}: " if len(self.verdicts) > 1 else ""
            yield f"{name}{_shown(load)}"
            yield f"{name}{_sentence(self.log, load, verdict)}"
        yield from trouble_lines(self.log)
        if set(self.verdicts.values()) <= {"idle"}:
            return
        yield (
            "cannot tell from a log: which request waits, for how much of what, what happened between two lines, and "
            "which setting frees it"
        )
        yield _MORE[server]


def why_log(log: ServerLog) -> WhyLog:
    """Judge the last line of each rank.

    Args:
        log: The log.
    """
    return WhyLog(log, {rank: _verdict(load) for rank, load in log.last.items()})


def served_while_others_wait(server: Server, kv_use: float | None) -> str:
    """The most likely reason why requests wait while others are served.

    Args:
        server: The server, whose flags are named.
        kv_use: Share of its KV cache in use; None if it does not say.
    """
    seats, pool = f"a seat ({_SEATS[server]})", f"room in the KV cache ({_POOL[server]}, or shorter requests)"
    if kv_use is None:
        return f"requests are served; others wait, most likely for {seats} or for tokens"
    if kv_use < HALF_FULL:
        return f"requests are served; others wait, most likely for {seats} or for tokens; the KV cache has room"
    if kv_use < FULL:
        return (
            f"requests are served; others wait for {seats}, for tokens, or, if a prompt needs more than the free "
            f"{1 - kv_use:.0%}, for {pool}"
        )
    return f"requests are served; others wait, most likely for {pool}"


def _verdict(load: Load) -> Verdict:
    if not load.running and not load.waiting:
        return "idle"
    if not load.running:
        return "still"
    if load.tokens_per_second == 0:
        return "starved"
    if not load.waiting:
        return "runs"
    return "full" if load.kv_use is not None and load.kv_use >= FULL else "queued"


def _shown(load: Load) -> str:
    running, waiting = ("unknown" if each is None else each for each in (load.running, load.waiting))
    use = "unknown" if load.kv_use is None else f"{load.kv_use:.0%}"
    hits = "unknown" if load.hit_rate is None else f"{load.hit_rate:.0%}"
    return f"{running} running, {waiting} waiting, KV cache use {use}, hits in the prefix cache {hits}"


def _sentence(log: ServerLog, load: Load, verdict: Verdict) -> str:
    server = log.server
    match verdict:
        case "idle":
            return "no request is unfinished"
        case "runs":
            return "requests are served, and none waits"
        case "full" | "queued":
            return served_while_others_wait(server, load.kv_use)
        case "starved":
            return "requests run and get no token: a step takes longer than the time between two lines, or it hangs"
        case "still":
            return f"nothing runs, and the head of the queue is not admitted{_since(log, load)}"


def _since(log: ServerLog, last: Load) -> str:
    """The stretch of last lines of a rank in which nothing runs and some wait."""
    stretch: list[Load] = []
    for load in reversed([each for each in log.loads if each.rank == last.rank]):
        if load.running or not load.waiting:
            break
        stretch.append(load)
    times = [load.at for load in stretch if load.at is not None]
    span = f" over {max(times) - min(times):.0f} s" if len(times) > 1 else ""
    return (
        f" in the last {counted(len(stretch), 'line')}{span}: an idle engine lacks what it needs, such as KV blocks "
        "for the whole prompt, a compiled grammar, a transfer of KV, or an adapter"
    )
