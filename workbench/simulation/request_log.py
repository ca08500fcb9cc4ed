"""The requests that other tools recorded at a running vLLM, with their measured latencies and without its steps."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.field_checks import number
from workbench.simulation.access_log import read_access_log
from workbench.simulation.arrivals import Arrival
from workbench.trace.fields import MAX_SECONDS
from workbench.trace.formats.otlp import E2E, TTFT, read_spans
from workbench.trace.formats.vcr import is_vcr, read_vcr
from workbench.trace.readings.metrics import Distribution, amount

_SPANS_LACK = "hits in the prefix cache: spans hold no steps, queues, blocks or token ids"
_VCR_LACKS = "what it waited for: a recording of vllm-vcr holds no steps, queues or KV blocks"


@dataclass(frozen=True)
class RequestLog:
    """Requests with their arrivals and latencies.

    Attributes:
        path: The file.
        arrivals: The requests, in order of arrival.
        latencies: Distributions in seconds by name: "ttft", "itl" and "e2e", each if the file has it.
        num_cached_tokens: Prompt tokens that vLLM found in its prefix cache; None if the file does not say.
        lacks: The end of the sentence about what the file cannot answer.
    """

    path: Path
    arrivals: tuple[Arrival, ...]
    latencies: Mapping[str, Distribution]
    num_cached_tokens: int | None
    lacks: str

    def __repr__(self) -> str:
        times = [arrival.arrives_at or 0.0 for arrival in self.arrivals]
        lines = [f"{len(times)} requests of {self.path.name}, arriving over {max(times) - min(times):.1f} s"]
        for name, values in self.latencies.items():
            shown = (values.mean, values.p50, values.p99)
            mean, middle, high = (amount(value, "s") for value in shown)
            what = "gaps" if name == "itl" else "requests"
            lines.append(f"{name}: mean {mean}, p50 {middle}, p99 {high} (measured, {values.count} {what})")
        if self.num_cached_tokens is not None:
            whole = sum(len(arrival.prompt_token_ids) for arrival in self.arrivals)
            lines.append(f"prefix cache: {self.num_cached_tokens} of {whole} prompt tokens found (measured)")
        lines += [
            "can answer: trace whatif and trace tune, with --cost-from a recording of a server of the same kind",
            f"cannot answer: why a request was slow, how long a step took, or {self.lacks}",
        ]
        return "\n".join(lines)


def read_request_log(path: str | os.PathLike[str], ignore_columns: Collection[str] = ()) -> RequestLog:
    """The requests and latencies in a file of spans (OTLP/JSON), or in a recording of vllm-vcr.

    Args:
        path: The file.
        ignore_columns: Attributes of spans, or keys of requests, to leave out.

    Raises:
        TraceError: The file is neither.
        ValueError: A request has no lengths or no arrival, or there is none.
        OSError: The file cannot be read.

    Example:
        >>> line = '{"prompt_tokens": 9, "output_tokens": 2, "ttft_ms": 31.5, "itl_ms": [8.5], "arrival_ms": 0.0}'
        >>> _ = Path("tap.jsonl").write_text(line)
        >>> read_request_log("tap.jsonl").latencies["e2e"].mean
        0.04
    """
    arrivals = tuple(read_access_log(path, ignore_columns=ignore_columns))
    if is_vcr(path):
        _, requests = read_vcr(path, ignore_columns)
        ends = [request.e2e_ms for request in requests]
        values = {
            "ttft": [request.ttft_ms / 1000 for request in requests],
            "itl": [gap / 1000 for request in requests for gap in request.itl_ms or ()],
            "e2e": [end / 1000 for end in ends if end is not None],
        }
        num_cached, lacks = sum(request.cached_tokens for request in requests), _VCR_LACKS
    else:
        spans = [span["attributes"] for span in read_spans(path, ignore_columns)]
        values = {
            name: [_seconds(path, key, at) for about in spans if (at := about.get(key)) is not None]
            for name, key in (("ttft", TTFT), ("e2e", E2E))
        }
        num_cached, lacks = None, _SPANS_LACK
    latencies = {name: Distribution.of(each) for name, each in values.items() if each}
    return RequestLog(Path(path), arrivals, latencies, num_cached, lacks)


def _seconds(path: str | os.PathLike[str], key: str, value: Any) -> float:
    return number(f"{path}: {key}", value, 0.0, MAX_SECONDS)
