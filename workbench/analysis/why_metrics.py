"""Why a server serves nothing, from its /metrics alone: counts without requests, so the answer is weaker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from workbench.analysis.why_log import served_while_others_wait
from workbench.trace.formats.scrapes import Scrapes

Verdict = Literal["idle", "runs", "circles", "still"]
"""``idle``: no request is there. ``runs``: tokens came out between the scrapes. ``circles``: none did, and requests
were preempted. ``still``: nothing happened."""


@dataclass(frozen=True)
class WhyMetrics:
    """Two scrapes of /metrics, read for requests that are not served.

    Attributes:
        verdict: See `Verdict`.
        seconds: Time between the scrapes.
        num_running: Number of running requests at the last one; None if it is not a number.
        num_waiting: Number of waiting requests at the last one, likewise.
        kv_use: Share of the KV blocks in use at the last one; None if the server does not say.
        waiting_by_reason: Number of waiting requests by vLLM's reasons, "capacity" and "deferred".
        num_tokens: Prompt and output tokens of the time between.
        num_preemptions: Preemptions of the time between.
        num_blocks: KV blocks that requests can have; "" if the server does not say.
    """

    verdict: Verdict
    seconds: float
    num_running: int | None
    num_waiting: int | None
    kv_use: float | None
    waiting_by_reason: Mapping[str, float]
    num_tokens: float
    num_preemptions: float
    num_blocks: str

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait and get nothing."""
        return self.verdict in ("circles", "still")

    def __repr__(self) -> str:
        return "\n".join(_lines(self))


def why_metrics(scrapes: Scrapes) -> WhyMetrics:
    """Read the last two scrapes.

    Args:
        scrapes: Scrapes of one server.
    """
    window = scrapes.windows[-1]
    last = window.last
    counts = [last.total(f"vllm:num_requests_{state}") or 0.0 for state in ("running", "waiting")]
    running, waiting = (round(count) if isfinite(count) else None for count in counts)
    tokens = sum(window.increase(f"vllm:{kind}_tokens_total") or 0.0 for kind in ("prompt", "generation"))
    preemptions = window.increase("vllm:num_preemptions_total") or 0.0
    verdict: Verdict = "still"
    if running == waiting == 0:
        verdict = "idle"
    elif tokens:
        verdict = "runs"
    elif preemptions:
        verdict = "circles"
    use = [share for share in last.values("vllm:kv_cache_usage_perc", "engine").values() if isfinite(share)]
    return WhyMetrics(
        verdict=verdict,
        seconds=window.seconds,
        num_running=running,
        num_waiting=waiting,
        kv_use=max(use) if use else None,
        waiting_by_reason=last.values("vllm:num_requests_waiting_by_reason", "reason"),
        num_tokens=tokens,
        num_preemptions=preemptions,
        num_blocks=_usable(scrapes.settings.get("num_gpu_blocks", "")),
    )


def _usable(num_gpu_blocks: str) -> str:
    """The blocks of a pool without block 0, which is never handed out and does not count for the use of the pool."""
    return str(int(num_gpu_blocks) - 1) if num_gpu_blocks.isdecimal() else num_gpu_blocks


def _lines(answer: WhyMetrics) -> Iterator[str]:
    share = "an unknown share" if answer.kv_use is None else f"{answer.kv_use:.0%}"
    running, waiting = ("unknown" if each is None else each for each in (answer.num_running, answer.num_waiting))
    yield f"{running} running, {waiting} waiting, {share} of {answer.num_blocks or 'the'} KV blocks in use"
    yield (
        f"in {answer.seconds:.1f} s: {answer.num_tokens:,.0f} tokens, {answer.num_preemptions:,.0f} preemptions "
        "(from /metrics alone)"
    )
    deferred, capacity = (answer.waiting_by_reason.get(reason, 0) for reason in ("deferred", "capacity"))
    match answer.verdict:
        case "idle":
            yield "no request is unfinished"
            return
        case "runs" if not answer.num_waiting:
            yield "requests are served"
            return
        case "runs":
            yield served_while_others_wait("vLLM", answer.kv_use)
            if deferred:
                yield f"of those that wait, {deferred:.0f} for an event outside the scheduler"
        case "circles":
            yield "requests are preempted again and again and get no token: too few KV blocks for what runs"
            yield "to try: a larger pool, fewer seats (--max-num-seqs), or admission of whole requests only"
        case _ if deferred:
            yield f"{deferred:.0f} wait for an event outside the scheduler: a grammar, a transfer of KV, or an adapter"
            if capacity:
                yield f"{capacity:.0f} wait for room; those that are deferred may hold seats and KV blocks"
        case _ if answer.num_running:
            yield "requests run and get no token: a step hangs, or waiting requests hold the budget of the encoder"
        case _:
            yield "nothing runs, and the head of the queue is not admitted: an idle engine lacks what it needs"
            yield (
                "this happens if its prompt needs more KV blocks than the pool has, if the token budget of a step is "
                "below 1 + num_speculative_tokens, or if it waits for a grammar, a transfer or an adapter"
            )
    yield (
        "cannot tell from /metrics: which request waits, for how much of what, whether it ever clears, and which "
        "setting frees it; a recording (--scheduler-cls workbench.vllm.RecordingScheduler) can"
    )
