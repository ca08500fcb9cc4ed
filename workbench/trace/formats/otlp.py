"""Spans of requests in OTLP/JSON, the file format of OpenTelemetry, written and read without a network.

A request is a span named ``llm_request`` with the attributes that vLLM's tracing gives it (vllm/tracing/utils.py,
``SpanAttributes``), so dashboards for a traced vLLM show a trace of Workbench as well. Its scheduling is in events of
the span: admitted, first token, preempted, resumed.

Source: the OTLP file exporter's specification, https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/:
64-bit integers are strings, ids are lower-case hexadecimal, and each line is a complete object.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.base.field_checks import number
from workbench.base.key_table import RowCheck, Rule, UnknownKeyError
from workbench.base.outside_files import open_bytes
from workbench.base.text import significant
from workbench.base.whole_file import replaced_when_complete
from workbench.trace.errors import TraceError
from workbench.trace.fields import MAX_SECONDS
from workbench.trace.readings.metrics_collector import metrics
from workbench.trace.readings.narrate import shown

if TYPE_CHECKING:
    from workbench.trace.readings.metrics import RequestMetrics
    from workbench.trace.trace import Trace

SPAN_NAME = "llm_request"
"""Name of a request's span in vLLM."""

PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
OUTPUT_TOKENS = "gen_ai.usage.completion_tokens"
TTFT = "gen_ai.latency.time_to_first_token"
E2E = "gen_ai.latency.e2e"

_COUNTS = ("gen_ai.request.n", "gen_ai.request.choice.count", "gen_ai.usage.num_sequences")

ATTRIBUTE_RULES = (
    Rule("read", f"{PROMPT_TOKENS} {OUTPUT_TOKENS} {TTFT} {E2E}", "lengths and latencies"),
    Rule("read", "gen_ai.usage.input_tokens gen_ai.usage.output_tokens", "the present names of the lengths"),
    Rule("harmless", "gen_ai.latency.*", "measured at the server of the recording"),
    Rule("harmless", "gen_ai.usage.cached_tokens gen_ai.usage.cache* gen_ai.usage.total_tokens gen_ai.usage.reasoning*",
         "a part or the sum of the lengths"),
    Rule("harmless", "gen_ai.request.max_tokens gen_ai.request.temperature gen_ai.request.top_* "
         "gen_ai.request.*penalty gen_ai.request.seed gen_ai.request.stop* gen_ai.request.stream*",
         "the output has its length"),
    Rule("harmless", "gen_ai.request.id gen_ai.request.model gen_ai.response.* gen_ai.system gen_ai.provider* "
         "gen_ai.operation.* gen_ai.conversation.id scheduler.* service.* server.* client.* http.* url.* net.* "
         "network.* user_agent.* user.* enduser.* error.* exception.* thread.* process.* host.* telemetry.* otel.* "
         "session.* k8s.* cloud.* deployment.* code.* peer.*", "a label"),
    Rule("refused", " ".join(_COUNTS), "a request has one output here"),
    Rule("refused", "gen_ai.request.lora* gen_ai.request.*salt*", "it decides which requests share prefixes"),
)  # fmt: skip
"""The attributes of a request's span. OTLP says that a reader ignores unknown fields of a span itself."""

_NEWER_NAMES = {"gen_ai.usage.input_tokens": PROMPT_TOKENS, "gen_ai.usage.output_tokens": OUTPUT_TOKENS}

_OTHER_SIGNALS = ("resourceMetrics", "resourceLogs", "resourceProfiles")

_MALFORMED = (TypeError, ValueError, OverflowError)
_SERVER, _ERROR = 2, 2  # SpanKind and StatusCode


def to_otlp(trace: Trace, path: str | os.PathLike[str]) -> int:
    """Write the requests of a trace that have ended as spans.

    Args:
        trace: A trace with a clock.
        path: File to write; replaced when the new one is complete.

    Returns:
        Number of spans.

    Raises:
        TraceError: The trace has no clock.
        OSError: The file cannot be written.

    Example:
        >>> from workbench import simulate
        >>> from workbench import CostModel
        >>> trace = simulate({"requests": [{"id": "a", "prompt": {"len": 9}}]}, cost_model=CostModel(fixed=0.1))
        >>> to_otlp(trace, "spans.json")
        1
        >>> next(read_spans("spans.json"))["attributes"]["gen_ai.usage.prompt_tokens"]
        9
    """
    spans = list(_spans(trace))
    resource = {"service.name": trace.meta.source, "gen_ai.response.model": str(trace.meta.model.get("name", ""))}
    data = {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": {"name": "workbench"}, "spans": spans}],
            }
        ]
    }
    with replaced_when_complete(path) as unfinished:
        unfinished.write_bytes(msgspec.json.encode(data) + b"\n")
    return len(spans)


def _spans(trace: Trace) -> Iterator[dict[str, Any]]:
    measured = metrics(trace)
    if measured.summary.unit != "s":
        raise TraceError("the trace has no clock: a span needs times, and this trace holds only steps")
    start = trace.meta.created
    events: defaultdict[str, list[tuple[float, str, dict[str, Any]]]] = defaultdict(list)
    for record in trace:
        for name, request_ids in (("admitted", record.admitted), ("resumed", record.resumed)):
            for request_id in request_ids:
                events[request_id].append((record.time, name, {"step": record.step}))
        for request_id in record.preempted:
            facts: dict[str, Any] = {"step": record.step}
            if (reason := record.preempt_reasons.get(request_id)) is not None:
                facts |= {"reason": shown(reason), "reason.kind": reason.kind}
            events[request_id].append((record.time, "preempted", facts))
    for request_id, info in trace.requests.items():
        request = measured.requests[request_id]
        if request.e2e is None or request.e2e.seconds is None:
            continue
        if request.token_times and request.ttft is not None:
            events[request_id].append((request.token_times[0], "first token", {"step": request.token_steps[0]}))
        digest = hashlib.sha256(f"{start} {request_id}".encode()).hexdigest()
        span = {
            "traceId": digest[:32],
            "spanId": digest[32:48],
            "name": SPAN_NAME,
            "kind": _SERVER,
            "startTimeUnixNano": _nanoseconds(start + info.arrival_time),
            "endTimeUnixNano": _nanoseconds(start + info.arrival_time + request.e2e.seconds),
            "attributes": _attributes(_facts(request, info.max_tokens)),
            "events": [
                {"timeUnixNano": _nanoseconds(start + at), "name": name, "attributes": _attributes(about)}
                for at, name, about in sorted(events[request_id], key=lambda event: event[0])
            ],
        }
        yield span | ({"status": {"code": _ERROR}} if request.finish_reason == "error" else {})


def _facts(request: RequestMetrics, max_tokens: int) -> dict[str, Any]:
    latencies = {
        TTFT: request.ttft,
        E2E: request.e2e,
        "gen_ai.latency.time_in_queue": request.queue,
        "gen_ai.latency.time_in_model_prefill": request.prefill,
        "gen_ai.latency.time_in_model_decode": request.decode,
    }
    return {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": max_tokens,
        PROMPT_TOKENS: request.num_prompt_tokens,
        OUTPUT_TOKENS: request.num_output_tokens,
        **{name: latency.seconds for name, latency in latencies.items() if latency is not None},
        "gen_ai.response.finish_reason": request.finish_reason,
        "scheduler.num_preemptions": request.num_preemptions,
        "scheduler.num_cached_tokens": request.num_cached_tokens,
        "scheduler.num_recomputed_tokens": request.num_recomputed_tokens,
    }


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e9))


def _attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


# -- reading -----------------------------------------------------------------------------------------------------


def is_otlp(path: str | os.PathLike[str]) -> bool:
    """Whether a file is in OTLP/JSON, by its beginning; `read_spans` refuses metrics and logs."""
    with open_bytes(path) as file:
        start = file.read(200)
    return any(f'"{signal}"'.encode() in start for signal in ("resourceSpans", *_OTHER_SIGNALS))


def read_spans(path: str | os.PathLike[str], ignored: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The spans of requests in a file of OTLP/JSON, of vLLM's tracing or written by `to_otlp`.

    Args:
        path: The file.
        ignored: Attributes to leave out.

    Yields:
        ``start`` and ``end`` in seconds since the epoch, and ``attributes`` by name.

    Raises:
        TraceError: The file is not OTLP/JSON, or a span is malformed, has an unknown attribute or a latency that is
            longer than itself; the message names the line.
        OSError: The file cannot be read.
    """
    keys, num_spans, others = RowCheck(ignored), 0, dict[str, None]()
    with open_bytes(path) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                for span in _spans_of(msgspec.json.decode(line)):
                    num_spans += span.get("name") == SPAN_NAME
                    if span.get("name") == SPAN_NAME:
                        yield _read_span(span, keys)
                    elif len(others) < 5:
                        others.setdefault(str(span.get("name"))[:80])
            except (UnknownKeyError, TraceError) as problem:
                raise TraceError(f"{path}, line {line_number}: {problem}") from None
            except (msgspec.DecodeError, RecursionError, LookupError, AttributeError, *_MALFORMED) as problem:
                raise TraceError(
                    f"{path}, line {line_number}: not spans in OTLP/JSON: {type(problem).__name__}: {problem}"
                ) from None
    if not num_spans:
        raise TraceError(
            f"{path} has no span named {SPAN_NAME}, as vLLM calls that of a request; it has {', '.join(others)}"
        )
    keys.finish(path)


def _read_span(span: Mapping[str, Any], keys: RowCheck) -> dict[str, Any]:
    start, end = (
        number(name, int(span[name]) / 1e9, 0, MAX_SECONDS) for name in ("startTimeUnixNano", "endTimeUnixNano")
    )
    given = {one["key"]: _plain(one["value"]) for one in span.get("attributes", ())}
    single = {name: value for name, value in given.items() if not (name in _COUNTS and value == 1)}
    attributes = dict(keys.check("a span of a request", single, ATTRIBUTE_RULES))
    for newer, name in _NEWER_NAMES.items():
        if newer in attributes and attributes.setdefault(name, attributes[newer]) != attributes[newer]:
            raise TraceError(f"{name} is {attributes[name]}, and {newer} is {attributes[newer]}")
    for name in (TTFT, E2E):
        value = attributes.get(name)
        if isinstance(value, float | int) and value > 2 * (end - start) + 1:
            raise TraceError(
                f"{name} is {value}, in a span of {significant(end - start, 6)} s: "
                "it must be in seconds, and times in nanoseconds"
            )
    return {"start": start, "end": end, "attributes": attributes}


def _spans_of(data: Any) -> Iterator[dict[str, Any]]:
    for signal in _OTHER_SIGNALS:
        if signal in data:
            raise TraceError(
                f"the file holds {signal} of OTLP, and requests are in its spans: export traces, or record scrapes of "
                "/metrics"
            )
    for resource in data["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())


def _plain(value: Mapping[str, Any]) -> Any:
    (kind, plain), *_ = value.items()
    return int(plain) if kind == "intValue" else plain
