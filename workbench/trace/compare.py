"""Two traces of the same requests, aligned by request: where they part, and what each request gains or loses."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from workbench.trace.checks import TraceError
from workbench.trace.divergence import (
    Divergence,
    TokenDifference,
    chunks_by_request,
    common_steps,
    divergence,
    output_token_ids,
    token_difference,
)
from workbench.trace.metrics import RequestMetrics
from workbench.trace.metrics_table import number

if TYPE_CHECKING:
    from workbench.trace.trace import Trace

MAX_ROWS = 20
"""Requests that a repr lists."""

MAX_FIELDS = 3
"""Fields that one configuration alone has, named up to this many and counted beyond."""


@dataclass(frozen=True)
class RequestComparison:
    """One request in both traces. Deltas are b minus a: negative is better for b. None where one has no value.

    Attributes:
        request_id: The request.
        a: Its metrics in the first trace.
        b: Its metrics in the second trace.
        divergence: Where it was first scheduled differently; None when it never was.
        token_difference: Where its output first differs; None when it does not, as far as both have got.
        ttft_a: Time to first token in the first trace, in the comparison's unit.
        ttft_b: The same in the second trace.
        itl_a: Mean inter-token latency in the first trace.
        itl_b: The same in the second trace.
    """

    request_id: str
    a: RequestMetrics
    b: RequestMetrics
    divergence: Divergence | None
    token_difference: TokenDifference | None
    ttft_a: float | None
    ttft_b: float | None
    itl_a: float | None
    itl_b: float | None

    @property
    def ttft_delta(self) -> float | None:
        """Change of the time to first token."""
        return _minus(self.ttft_b, self.ttft_a)

    @property
    def itl_delta(self) -> float | None:
        """Change of the mean inter-token latency."""
        return _minus(self.itl_b, self.itl_a)

    @property
    def waste_delta(self) -> int:
        """Change of the number of tokens computed again."""
        return self.b.num_recomputed_tokens - self.a.num_recomputed_tokens


@dataclass(frozen=True, eq=False)
class Comparison:
    """What ``compare`` found.

    Attributes:
        a: The first trace.
        b: The second trace.
        unit: Unit of latencies: "s", or "steps" where one of the traces has no clock.
        requests: Every request, the largest change of TTFT first, then of ITL, then of waste.
        first_divergence: The earliest step in which the schedules differ; None when they never do.
        same_tokens: Whether all outputs agree as far as both traces have got; None when
            one of them holds no tokens.
        first_token_difference: The differing token of the earliest request in order of arrival.
        notes: What else is worth knowing, in words.
    """

    a: Trace
    b: Trace
    unit: str
    requests: tuple[RequestComparison, ...]
    first_divergence: Divergence | None
    same_tokens: bool | None
    first_token_difference: TokenDifference | None
    notes: tuple[str, ...]

    @property
    def badge(self) -> str:
        """One line on whether both produced the same tokens."""
        if self.same_tokens is None:
            return "no tokens to compare"
        if self.first_token_difference is None:
            return "same tokens"
        difference = self.first_token_difference
        tokens = [("nothing" if token is None else f"token {token}") for token in (difference.a, difference.b)]
        return (
            f"different tokens: {difference.request_id}, output token {difference.index}: "
            f"{tokens[0]} in a, {tokens[1]} in b"
        )

    def sorted_by(self, value: str) -> list[RequestComparison]:
        """Requests by the size of a change, largest first.

        Args:
            value: "ttft", "itl" or "waste".

        Raises:
            ValueError: Another value.
        """
        if value not in ("ttft", "itl", "waste"):
            raise ValueError(f'value must be "ttft", "itl" or "waste", got {value!r}')
        return sorted(self.requests, key=lambda request: -abs(getattr(request, f"{value}_delta") or 0))

    def _lines(self) -> list[str]:
        parted = str(self.first_divergence) if self.first_divergence else "never"
        return [
            f"a: {self.a.meta.source}, {len(self.a)} steps",
            f"b: {self.b.meta.source}, {len(self.b)} steps",
            self.badge,
            f"first divergence: {parted}",
            *self.notes,
        ]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        title = ["request"]
        title += [
            f"{name} {column}" for name in (f"TTFT {self.unit}", f"ITL {self.unit}") for column in ("a", "b", "Δ")
        ]
        title += ["waste a", "b", "Δ"]
        rows = [
            [
                request.request_id,
                *map(number, (request.ttft_a, request.ttft_b)),
                _signed(request.ttft_delta),
                *map(number, (request.itl_a, request.itl_b)),
                _signed(request.itl_delta),
                number(request.a.num_recomputed_tokens),
                number(request.b.num_recomputed_tokens),
                _signed(request.waste_delta),
            ]
            for request in self.requests[:MAX_ROWS]
        ]
        return title, rows

    def __repr__(self) -> str:
        title, rows = self._table()
        widths = [max(len(row[column]) for row in [title, *rows]) for column in range(len(title))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
            for row in [title, *rows]
        ]
        return "\n".join([*self._lines(), "", *lines, *self._more()])

    def _repr_html_(self) -> str:
        title, rows = self._table()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in title)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        text = "<br>".join(escape(line) for line in [*self._lines(), *self._more()])
        return f"<div><p>{text}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"

    def _more(self) -> list[str]:
        hidden = len(self.requests) - MAX_ROWS
        return [f"... and {hidden} requests whose times changed less"] if hidden > 0 else []


def compare(a: Trace, b: Trace) -> Comparison:
    """Compare two traces of the same workload, request by request.

    Args:
        a: The trace to compare with.
        b: The trace that is compared; deltas are b minus a.

    Returns:
        The comparison; its repr is a table.

    Raises:
        TraceError: The workloads differ: other requests, or other prompts.

    Example:
        >>> from workbench import simulate
        >>> workload = {"requests": [{"id": "r", "prompt": {"len": 100}, "max_tokens": 2}]}
        >>> result = compare(simulate(workload), simulate(workload, config={"max_num_batched_tokens": 50}))
        >>> print(result.first_divergence)
        step 0, r: a computes tokens [0, 100), b computes tokens [0, 50)
        >>> result.requests[0].ttft_delta
        1.0
    """
    _check_same_workload(a, b)
    metrics_a, metrics_b = a.metrics(), b.metrics()
    unit = "s" if metrics_a.summary.unit == metrics_b.summary.unit == "s" else "steps"
    before = common_steps(a, b)
    chunks_a, chunks_b = chunks_by_request(a, before), chunks_by_request(b, before)
    tokens_a, tokens_b = output_token_ids(a), output_token_ids(b)
    requests = []
    for request_id in a.requests:
        of_a, of_b = metrics_a.requests[request_id], metrics_b.requests[request_id]
        ended = all(metrics.finish_reason not in ("", "abort") for metrics in (of_a, of_b))
        requests.append(
            RequestComparison(
                request_id,
                of_a,
                of_b,
                divergence(request_id, a, b, chunks_a[request_id], chunks_b[request_id]),
                token_difference(request_id, tokens_a[request_id], tokens_b[request_id], ended),
                _ttft(of_a, unit),
                _ttft(of_b, unit),
                _itl(of_a, unit),
                _itl(of_b, unit),
            )
        )
    divergences = [request.divergence for request in requests if request.divergence]
    differences = [request.token_difference for request in requests if request.token_difference]
    known = any(tokens_a.values()) and any(tokens_b.values())
    return Comparison(
        a=a,
        b=b,
        unit=unit,
        requests=tuple(sorted(requests, key=_size_of_change, reverse=True)),
        first_divergence=min(divergences, key=lambda divergence: divergence.step, default=None),
        same_tokens=not differences if known else None,
        first_token_difference=differences[0] if differences and known else None,
        notes=tuple(_notes(a, b)),
    )


def _check_same_workload(a: Trace, b: Trace) -> None:
    only = [
        f"only {name} has {', '.join(map(repr, missing[:3]))}{' and others' if len(missing) > 3 else ''}"
        for name, one, other in (("a", a, b), ("b", b, a))
        if (missing := [request_id for request_id in one.requests if request_id not in other.requests])
    ]
    if only:
        raise TraceError(f"the traces hold different requests ({'; '.join(only)}): compare runs of the same workload")
    for request_id, in_a in a.requests.items():
        in_b = b.requests[request_id]
        if in_a.num_prompt_tokens != in_b.num_prompt_tokens:
            lengths = f"{in_a.num_prompt_tokens} tokens in a, {in_b.num_prompt_tokens} in b"
            raise TraceError(f"the prompts of request {request_id!r} differ in length: {lengths}")
        tokens = in_a.prompt_token_ids, in_b.prompt_token_ids
        if all(tokens) and tokens[0] != tokens[1]:
            index = next(i for i, (x, y) in enumerate(zip(*tokens)) if x != y)
            raise TraceError(
                f"the prompts of request {request_id!r} differ: token {index} is {tokens[0][index]} in a, "
                f"{tokens[1][index]} in b"
            )


def _notes(a: Trace, b: Trace) -> list[str]:
    notes = [f"{name} is not whole: {problem}" for name, trace in (("a", a), ("b", b)) for problem in trace.problems]
    moved = [rid for rid, info in a.requests.items() if info.arrival_step != b.requests[rid].arrival_step]
    if moved:
        steps = f"{a.requests[moved[0]].arrival_step} in a, {b.requests[moved[0]].arrival_step} in b"
        notes.append(f"{len(moved)} requests arrive in different steps, the first is {moved[0]}: {steps}")
    changed = [
        f"{name} {a.config[name]!r} -> {b.config[name]!r}"
        for name in sorted(a.config.keys() & b.config.keys())
        if a.config[name] != b.config[name]
    ]
    if changed:
        notes.append(f"config: {', '.join(changed)}")
    one_sided = [known for known in (_known_only("a", a, b), _known_only("b", b, a)) if known]
    if one_sided:
        notes.append(f"config, in one trace only: {'; '.join(one_sided)}")
    return notes


def _known_only(name: str, one: Trace, other: Trace) -> str:
    """The fields of one configuration that the other has no word for: a few by name, many as a number."""
    fields = sorted(one.config.keys() - other.config.keys())
    if len(fields) > MAX_FIELDS:
        return f"{len(fields)} fields in {name}"
    return ", ".join(f"{field} {one.config[field]!r}" for field in fields) + f" in {name}" if fields else ""


def _ttft(metrics: RequestMetrics, unit: str) -> float | None:
    if metrics.ttft is None:
        return None
    return metrics.ttft.seconds if unit == "s" else float(metrics.ttft.steps)


def _itl(metrics: RequestMetrics, unit: str) -> float | None:
    gaps: np.ndarray = metrics.itl_seconds if unit == "s" else metrics.itl_steps
    return float(gaps.mean()) if len(gaps) else None


def _size_of_change(request: RequestComparison) -> tuple[float, ...]:
    return tuple(abs(delta or 0) for delta in (request.ttft_delta, request.itl_delta, request.waste_delta))


def _minus(x: float | None, y: float | None) -> float | None:
    return None if x is None or y is None else x - y


def _signed(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else ("+" if value > 0 else "") + number(value)
