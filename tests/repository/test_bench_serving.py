"""The serving benchmark is right: workloads, times, and a baseline that gives the same tokens."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from baselines import phase_separated
from baselines.mlx_lm_batch import MlxLmEngine
from baselines.phase_separated import PhaseSeparatedEngine
from serving.http_client import replay_over_http, stream_completion, token_prompt
from serving.metrics import compare_outputs, percentile, serving_metrics
from serving.replay import Events, Timeline, replay
from serving.workloads import FULL, MAX_MODEL_LEN, SMALL, Request, Shape, Workload, make_workload

VOCABULARY = range(3, 120)


@pytest.mark.parametrize(("name", "shape"), [*FULL.items(), *SMALL.items()])
def test_workloads_are_what_their_shapes_say(name, shape):
    workload = make_workload(name, shape, VOCABULARY)
    inputs = [len(request.prompt) for request in workload.requests]
    outputs = [request.output_tokens for request in workload.requests]
    assert len(workload.requests) == shape.num_requests
    assert sum(inputs) == shape.input_tokens * (1 if shape.skewed else shape.num_requests)
    assert sum(outputs) == shape.output_tokens * (1 if shape.skewed else shape.num_requests)
    assert workload.longest <= MAX_MODEL_LEN and min(inputs + outputs) >= 1
    assert (len(set(inputs)) > 3) == shape.skewed
    arrivals = [request.arrival for request in workload.requests]
    assert arrivals[0] == 0 and (shape.rate > 0) == any(later > earlier for earlier, later in pairwise(arrivals))
    assert len({tuple(request.prompt[: shape.shared_prefix]) for request in workload.requests}) == 1
    if shape.num_requests > 1 and shape.input_tokens > 1:
        assert len({tuple(request.prompt) for request in workload.requests}) == shape.num_requests
    assert workload == make_workload(name, shape, VOCABULARY) == Workload.from_dict(workload.to_dict())
    assert workload != make_workload(name, shape, VOCABULARY, seed=1)


def some_requests(lengths, output_tokens, concurrency):
    """Requests with prompts of these lengths; ``output_tokens`` is one number, or one for each request."""
    shape = Shape("for a test", len(lengths), 0, 0, concurrency, 0.0, 8)
    generator = np.random.default_rng(5)
    outputs = np.broadcast_to(output_tokens, len(lengths)).tolist()
    requests = [
        Request(0.0, generator.integers(3, 120, length).tolist(), count) for length, count in zip(lengths, outputs)
    ]
    return Workload("test", shape, requests)


def alone(model, prompt, num_tokens):
    """Greedy tokens, each computed from the whole text without any cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    return tokens[len(prompt) :]


WORKLOAD = some_requests([5, 20, 8, 1, 13], output_tokens=[4, 6, 2, 5, 3], concurrency=3)


@pytest.fixture(scope="module")
def reference(tiny_llama):
    return [alone(tiny_llama.model, request.prompt, request.output_tokens) for request in WORKLOAD.requests]


@pytest.mark.parametrize("budget", [3, 8, 64])
def test_phase_separated_baseline_gives_the_models_own_tokens(tiny_llama, reference, budget):
    timelines = replay(WORKLOAD, PhaseSeparatedEngine(tiny_llama.model, budget))
    assert [timeline.tokens for timeline in timelines] == reference


def test_baseline_ends_a_request_with_its_first_token(tiny_llama, reference):
    short = Workload("test", WORKLOAD.shape, [Request(0.0, request.prompt, 1) for request in WORKLOAD.requests])
    timelines = replay(short, PhaseSeparatedEngine(tiny_llama.model, 8))
    assert [timeline.tokens for timeline in timelines] == [tokens[:1] for tokens in reference]


def test_baseline_without_its_block_diagonal_mask_gives_others(tiny_llama, reference, monkeypatch):
    monkeypatch.setattr(phase_separated, "_block_diagonal_mask", lambda bounds: mx.tri(int(bounds[-1])) > 0)
    timelines = replay(WORKLOAD, PhaseSeparatedEngine(tiny_llama.model, 64))
    assert [timeline.tokens for timeline in timelines] != reference


def test_baseline_computes_each_chunk_from_position_zero(tiny_llama):
    engine = PhaseSeparatedEngine(tiny_llama.model, token_budget=8)
    replay(some_requests([20], output_tokens=2, concurrency=1), engine)
    assert engine.num_prefill_rows == 8 + 16 + 20


def test_baseline_lets_decodes_wait_for_prompts(tiny_llama):
    engine = PhaseSeparatedEngine(tiny_llama.model, token_budget=4)
    engine.add(0, [5, 6, 7], 3)
    assert [index for index, _ in engine.step().tokens] == [0]
    engine.add(1, [8] * 10, 3)
    steps = [[index for index, _ in engine.step().tokens] for _ in range(4)]
    assert steps == [[], [], [1], [0, 1]]


def test_mlx_lm_arm_gives_the_models_own_tokens(tiny_llama, reference):
    engine = MlxLmEngine(tiny_llama.model, concurrency=3)
    timelines = replay(WORKLOAD, engine)
    engine.close()
    assert [timeline.tokens for timeline in timelines] == reference
    assert all(timeline.scheduled <= timeline.token_times[0] for timeline in timelines)


class CountingEngine:
    """Give every open request a token per step, and remember the number of open requests."""

    def __init__(self):
        self.open, self.most, self.begun = {}, 0, []

    def add(self, index, prompt, max_tokens):
        self.open[index] = max_tokens
        self.begun.append(index)
        self.most = max(self.most, len(self.open))

    def step(self):
        events = Events(self.begun, [(index, 7) for index in self.open])
        self.begun = []
        self.open = {index: left - 1 for index, left in self.open.items() if left > 1}
        return events


def test_replay_keeps_to_the_concurrency_and_waits_for_arrivals():
    workload = some_requests([2] * 7, output_tokens=3, concurrency=2)
    late = [Request(0.05, request.prompt, 3) if i == 6 else request for i, request in enumerate(workload.requests)]
    engine = CountingEngine()
    timelines = replay(Workload("test", workload.shape, late), engine)
    assert engine.most == 2
    assert all(timeline.tokens == [7, 7, 7] for timeline in timelines)
    assert timelines[6].scheduled >= 0.05


def test_metrics_of_timelines_worked_out_by_hand():
    workload = some_requests([4, 6], output_tokens=3, concurrency=2)
    timelines = [
        Timeline(0.0, scheduled=1.0, token_times=[2.0, 3.0, 5.0]),
        Timeline(1.0, scheduled=4.0, token_times=[5.0, 6.0, 10.0]),
    ]
    rows = serving_metrics(workload, timelines)
    assert rows["duration_s"] == 10.0
    assert rows["requests_per_s"] == 0.2
    assert rows["output_tokens_per_s"] == 0.6
    assert rows["total_tokens_per_s"] == 1.6
    assert rows["mean_ttft_s"] == 3.0 and rows["mean_queue_s"] == 2.0 and rows["mean_prefill_s"] == 1.0
    assert rows["mean_tpot_s"] == 2.0  # 3 s and 5 s, over two tokens each
    assert rows["mean_itl_s"] == 2.0 and rows["median_itl_s"] == 1.5
    assert rows["p99_itl_s"] == pytest.approx(np.percentile([1, 2, 1, 4], 99))


def test_percentile_is_numpys():
    values = np.random.default_rng(0).normal(size=37).tolist()
    for percent in (0, 1, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_outputs_are_compared_by_token_or_by_text():
    def decode(tokens):
        return "".join(f" w{token}" for token in tokens)

    ours = [Timeline(0.0, tokens=[1, 2, 3]), Timeline(0.0, tokens=[4, 5, 6])]
    other = [Timeline(0.0, tokens=[1, 2, 3]), Timeline(0.0, tokens=[4, 9, 6])]
    texts = [Timeline(0.0, text="w1 w2 w3"), Timeline(0.0, text="w4 w5 w6")]
    assert compare_outputs(ours, other, decode) == {"requests": 2, "equal": 1, "first_difference": 1}
    assert compare_outputs(ours, texts, decode) == {"requests": 2, "equal": 2, "first_difference": None}


class StreamingServer(BaseHTTPRequestHandler):
    """Answer with a token for each prompt token and comments in between, like mlx-lm's server; refuse token 8."""

    most_open = now_open = 0
    lock = threading.Lock()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            type(self).now_open += 1
            type(self).most_open = max(self.most_open, self.now_open)
        self.send_response(200 if 8 not in body["prompt"] else 400)
        self.end_headers()
        for token in body["prompt"][: body["max_tokens"]]:
            choice = {"text": f" w{token}", "token_ids": [token]}
            self.wfile.write(b": keepalive 1/2\n\n")
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        with self.lock:
            type(self).now_open -= 1
        self.wfile.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n')

    def log_message(self, *arguments):
        pass


@pytest.fixture
def streaming_port():
    StreamingServer.most_open = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), StreamingServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_client_reads_every_token_and_keeps_to_the_concurrency(streaming_port):
    requests = [Request(0.0, [10 + i, 20 + i, 30 + i], 3) for i in range(6)]
    workload = Workload("test", Shape("for a test", 6, 3, 3, 2, 0.0, 8), requests)
    timelines = replay_over_http(workload, streaming_port, {"stream": True}, token_prompt)
    assert [timeline.tokens for timeline in timelines] == [request.prompt for request in requests]
    assert timelines[0].text == " w10 w20 w30"
    assert all(len(t.token_times) == 3 and t.scheduled <= t.token_times[0] for t in timelines)
    assert 1 <= StreamingServer.most_open <= 2


def test_http_client_tells_a_refusal(streaming_port):
    with pytest.raises(RuntimeError, match="status 400"):
        stream_completion(streaming_port, {"prompt": [8], "max_tokens": 1})
    workload = Workload("test", Shape("for a test", 1, 1, 1, 1, 0.0, 8), [Request(0.0, [8], 1)])
    with pytest.raises(RuntimeError, match="1 requests failed"):
        replay_over_http(workload, streaming_port, {}, token_prompt)


def test_arm_without_a_record_computes_the_same_tokens(tiny_llama, monkeypatch):
    from bench_watched import switch_record_off

    from workbench import Engine, EngineConfig
    from workbench.models.served_model import ServedModel
    from workbench.scheduler.batch import ScheduledBatch

    for home, name in ((ScheduledBatch, "to_record"), (ServedModel, "launch")):
        monkeypatch.setattr(home, name, getattr(home, name))  # restored afterwards
    outputs = []
    for record in (True, False):
        engine = Engine(tiny_llama, EngineConfig(max_num_batched_tokens=16, num_blocks=64))
        if not record:
            switch_record_off(engine)
        for request in WORKLOAD.requests:
            engine.add_request(request.prompt, max_tokens=6, ignore_eos=True)
        engine.run(progress=False)
        outputs.append([list(output.token_ids) for output in engine.outputs.values()])
        assert (len(engine.trace) > 0) == record
        engine.close()
    assert outputs[0] == outputs[1] and len(outputs[0][0]) == 6
