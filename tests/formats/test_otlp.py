"""Spans of requests: what is written is what OTLP/JSON and vLLM's tracing say, and it can be read back."""

import json
import random

import pytest

from workbench import simulate
from workbench.apps.cli import main
from workbench.simulation.access_log import is_access_log, read_access_log
from workbench.simulation.costs.cost_model import CostModel
from workbench.trace import TraceError
from workbench.trace.formats.otlp import read_spans, to_otlp


@pytest.fixture(scope="module")
def trace():
    """A run with preemptions and a request that has not ended."""
    rng = random.Random(4)
    requests = [
        {
            "id": f"r{i}",
            "prompt": {"len": rng.randint(30, 150)},
            "max_tokens": rng.randint(20, 60),
            "arrival_time": rng.uniform(0, 0.3),
        }
        for i in range(10)
    ]
    config = {"max_num_batched_tokens": 256, "num_blocks": 40, "enable_prefix_caching": False}
    cost = CostModel(fixed=0.01, per_prefill_token=1e-4)
    return simulate({"config": config, "requests": requests}, cost_model=cost, max_steps=60)


def plain(attributes):
    return {each["key"]: next(iter(each["value"].values())) for each in attributes}


def test_a_span_says_what_the_metrics_say(trace, tmp_path):
    path = tmp_path / "spans.json"
    metrics = trace.metrics()
    ended = {request_id: request for request_id, request in metrics.requests.items() if request.e2e is not None}
    assert 0 < len(ended) < len(trace.requests), "some requests must not have ended"
    assert to_otlp(trace, path) == len(ended)
    (resource,) = json.loads(path.read_text())["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    spans = {plain(span["attributes"])["gen_ai.request.id"]: span for span in scope["spans"]}
    assert spans.keys() == ended.keys()
    assert sum(request.num_preemptions for request in ended.values()) > 0
    for request_id, request in ended.items():
        span, about = spans[request_id], plain(spans[request_id]["attributes"])
        start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        assert (end - start) / 1e9 == pytest.approx(request.e2e.seconds, abs=1e-8)
        assert about["gen_ai.latency.time_to_first_token"] == request.ttft.seconds
        assert about["gen_ai.latency.time_in_queue"] == request.queue.seconds
        assert about["gen_ai.usage.prompt_tokens"] == str(request.num_prompt_tokens)
        assert about["gen_ai.usage.completion_tokens"] == str(request.num_output_tokens)
        assert span["name"] == "llm_request" and span["kind"] == 2
        assert len(bytes.fromhex(span["traceId"])) == 16 and len(bytes.fromhex(span["spanId"])) == 8
        names = [event["name"] for event in span["events"]]
        assert names.count("preempted") == names.count("resumed") == request.num_preemptions
        assert names.count("admitted") == names.count("first token") == 1
        times = [int(event["timeUnixNano"]) for event in span["events"]]
        assert times == sorted(times) and start <= times[0] and times[-1] <= end
        first = times[names.index("first token")]
        assert (first - start) / 1e9 == pytest.approx(request.ttft.seconds, abs=1e-8)
    assert len({span["spanId"] for span in spans.values()}) == len(spans)


def test_spans_are_an_access_log(trace, tmp_path):
    path = tmp_path / "spans.json"
    to_otlp(trace, path)
    assert is_access_log(path)
    arrivals = read_access_log(path)
    ended = [request for request in trace.metrics().requests.values() if request.e2e is not None]
    infos = sorted((trace.requests[request.request_id] for request in ended), key=lambda info: info.arrival_time)
    first = infos[0].arrival_time
    assert [len(arrival.prompt_token_ids) for arrival in arrivals] == [info.num_prompt_tokens for info in infos]
    assert [arrival.arrives_at for arrival in arrivals] == pytest.approx(
        [info.arrival_time - first for info in infos], abs=1e-6
    )
    tokens = {request.request_id: request.num_output_tokens for request in ended}
    assert [arrival.sampling.max_tokens for arrival in arrivals] == [tokens[info.request_id] for info in infos]


def test_the_spans_of_a_traced_vllm_are_read(tmp_path, capsys):
    """Two batches of an exporter, with a span of another name and without the optional attributes."""
    lines = []
    for start, prompt, output in ((5, 30, 4), (7, 200, 9)):
        span = {
            "traceId": "5b8efff798038103d269b633813fc60c",
            "spanId": "eee19b7ec3c1b174",
            "name": "llm_request",
            "kind": 2,
            "startTimeUnixNano": f"{start}500000000",
            "endTimeUnixNano": f"{start + 1}000000000",
            "attributes": [
                {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": str(prompt)}},
                {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": str(output)}},
                {"key": "gen_ai.latency.e2e", "value": {"doubleValue": 0.5}},
            ],
        }
        spans = [span, span | {"name": "POST /v1/completions", "attributes": []}]
        lines.append(json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": spans}]}]}))
    path = tmp_path / "spans.json"
    path.write_text("\n".join(lines) + "\n")
    assert [span["start"] for span in read_spans(path)] == [5.5, 7.5]
    assert main(["trace", "info", str(path)]) == 0
    said = capsys.readouterr().out
    assert "2 requests of spans.json, arriving over 2.0 s" in said and "e2e: mean 500 ms" in said
    assert "ttft" not in said and "cannot answer: why a request was slow" in said


def test_the_command(trace, tmp_path, capsys):
    trace.save(tmp_path / "run.jsonl.gz")
    assert main(["trace", "otlp", str(tmp_path / "run.jsonl.gz")]) == 0
    assert "spans to" in capsys.readouterr().out and (tmp_path / "run.otlp.json").exists()
    simulate({"requests": [{"id": "a", "prompt": {"len": 5}}]}).save(tmp_path / "steps.jsonl")
    assert main(["trace", "otlp", str(tmp_path / "steps.jsonl"), "--out", str(tmp_path / "no.json")]) == 2
    assert "the trace has no clock" in capsys.readouterr().err and not (tmp_path / "no.json").exists()


@pytest.mark.parametrize("text", ['{"resourceSpans": 7}', '{"resourceSpans": [{"scopeSpans": [{"spans": [3]}]}]}', "{"])
def test_a_malformed_file_names_its_line(tmp_path, text):
    path = tmp_path / "spans.json"
    path.write_text(text)
    with pytest.raises(TraceError, match="line 1: not spans in OTLP/JSON"):
        list(read_spans(path))
