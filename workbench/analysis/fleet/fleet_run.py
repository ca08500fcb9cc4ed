"""A simulated run of a fleet: where each request went and why, and a trace for each replica."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

from workbench.analysis.fleet.fork import Fork, SecondChoice, second_choice
from workbench.analysis.fleet.router import Decision, Router
from workbench.analysis.fleet.split import HandOver
from workbench.base.on_demand import find
from workbench.base.tables import table_lines, terminal_width, wrapped
from workbench.base.text import counted, shown, significant
from workbench.trace import Trace
from workbench.trace.readings.metrics import TraceMetrics, amount, ended_words, percent
from workbench.trace.readings.metrics_collector import merge_metrics, metrics
from workbench.trace.readings.run_clock import idle_words

_COLUMNS = ("", "requests", "steps", "cached", "preempted", "TTFT mean", "p99", "ITL mean", "peak KV")


@dataclass(frozen=True)
class Choice:
    """A router's decision about one request.

    Attributes:
        request_id: The request.
        time: Seconds since the start at which it arrived.
        replica: Index of the replica that got it.
        scores: A number for each candidate, which decided it; empty if none did.
        unit: The meaning of the scores.
        rule: The part of the router's rule that applied.
        candidates: Indices of the replicas that the scores belong to: all that took requests.
        loads: Requests in flight of each of them, if the rule weighed them against the scores.
    """

    request_id: str
    time: float
    replica: int
    scores: tuple[float, ...]
    unit: str
    rule: str
    candidates: tuple[int, ...]
    loads: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.request_id} went to replica {self.replica}"
        if self.rule:
            text += f": {self.rule}"
        if self.scores:
            text += f"; {self.unit}: " + ", ".join(significant(score, 6) for score in self.scores)
        if self.candidates != tuple(range(len(self.candidates))):
            text += f" of replicas {', '.join(map(str, self.candidates))}"
        return text


class FleetRun:
    """A simulated run of several replicas.

    Attributes:
        router: Name of the router.
        choices: The router's decisions by request, in the order of arrival.
        traces: One trace per replica.
        hand_overs: With prefill and decode apart, the moves from one to the other by request.
    """

    def __init__(
        self,
        router: str,
        choices: dict[str, Choice],
        traces: list[Trace],
        hand_overs: dict[str, HandOver],
        again: Callable[[Callable[[Router], Router]], FleetRun],
        why_together: Callable[[Sequence[Decision]], str],
    ) -> None:
        self._again = again
        self._why_together = why_together
        self.router = router
        self.choices = choices
        self.traces = traces
        self.hand_overs = hand_overs

    @property
    def assignments(self) -> dict[str, int]:
        """The index of each request's replica."""
        return {request_id: choice.replica for request_id, choice in self.choices.items()}

    @property
    def shares(self) -> list[float]:
        """The share of the requests that each replica got."""
        counts = [0] * len(self.traces)
        for choice in self.choices.values():
            counts[choice.replica] += 1
        return [count / len(self.choices) if self.choices else 0.0 for count in counts]

    @property
    def concentration(self) -> str:
        """Why one replica got more than half of the requests, from the decisions; "" if none of several did."""
        counts = Counter(self.assignments.values())
        if len(self.traces) < 2 or not counts:
            return ""
        replica, count = counts.most_common(1)[0]
        if 2 * count <= len(self.choices):
            return ""
        decisions = [
            Decision(choice.replica, choice.scores, choice.rule, choice.loads)
            for choice in self.choices.values()
            if choice.replica == replica
        ]
        share = f"all {count:,}" if count == len(self.choices) else f"{count:,} of {len(self.choices):,}"
        sent = f"{self.router} sent {share} requests to replica {replica}."
        return f"{sent} {self._why_together(decisions)}".strip()

    def metrics(self) -> TraceMetrics:
        """The metrics of all replicas as one; requests are named ``replica 0/request``.

        With prefill and decode apart they are those of the replicas that decode, whose latencies begin with a request's
        first arrival.
        """
        decoding = {move.replica for move in self.hand_overs.values()}
        counted = [index for index in range(len(self.traces)) if not decoding or index in decoding]
        return merge_metrics({f"replica {index}": (metrics(self.traces[index]), 0.0) for index in counted})

    def to_svg(self, request_id: str = "") -> str:
        """The replicas as rows of one time axis; ``request_id`` names a request whose way is framed.

        Raises:
            ValueError: The run has no clock, or there is no such request.
        """
        traces = {f"replica {index}": trace for index, trace in enumerate(self.traces)}
        svg: str = find("FleetRun.to_svg")(traces, request_id)
        return svg

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save each replica's trace into a folder, which ``workbench trace watch`` opens as one page.

        Raises:
            OSError: A file cannot be written.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        for index, trace in enumerate(self.traces):
            trace.save(Path(folder) / f"replica-{index}.jsonl.gz")

    def _repr_html_(self) -> str:
        has_time = any(len(trace) and trace[-1].end for trace in self.traces)
        picture = self.to_svg() if has_time else ""
        return f"<pre>{escape(repr(self))}</pre>{picture}"

    def second_choice(self, request_id: str) -> Fork:
        """The cost of the second choice for one request: everything runs again, with this request sent elsewhere.

        Raises:
            ValueError: There is no such request, one replica alone took requests, or the run has no clock.
        """
        if request_id not in self.choices:
            raise ValueError(f"there is no request {shown(request_id)} in this run")
        if self.metrics().summary.unit != "s":
            raise ValueError("a second choice costs time, and this run has no clock: give a cost_model")
        other = self._again(partial(SecondChoice, request_id=request_id))
        replicas = (self.choices[request_id].replica, other.choices[request_id].replica)
        return second_choice(request_id, replicas, (self.metrics(), other.metrics()))

    def __str__(self) -> str:
        whole = self.metrics().summary
        ended = ended_words(whole.num_finished, len(self.choices), whole.num_aborted, whole.num_failed)
        heading = (
            f"{self.router}, {counted(len(self.traces), 'replica')}: {ended} in "
            f"{amount(whole.duration, whole.unit)}{idle_words(whole.clock.idle)}"
        )
        rows = [list(_COLUMNS)]
        names = [*map(str, range(len(self.traces))), "all"]
        for name, measured in zip(names, [*(metrics(trace) for trace in self.traces), self.metrics()]):
            found = measured.summary
            counts = (found.num_requests, found.num_steps, percent(found.hit_rate), found.num_preemptions)
            times = (found.ttft.amount("mean"), found.ttft.amount("p99"))
            last = (found.itl.amount("mean"), percent(found.peak_kv_use))
            rows.append([name, *map(str, counts), *times, *last])
        width = terminal_width()
        return "\n".join([*wrapped(heading, width), *table_lines(rows, width=width)])

    def __repr__(self) -> str:
        heading, _, table = str(self).partition("\n")
        return f"FleetRun({heading})\n{table}"
