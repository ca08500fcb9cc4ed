"""One client can neither hold up the event loop nor fill the memory: a test for each promise of docs/serve.md."""

import json
import threading
import time

import pytest
from raw_clients import server_of
from serve_helpers import ENGINE

from workbench import Engine, EngineConfig, SamplingParams
from workbench.apps.serve import bridge, completions, handlers
from workbench.apps.serve.protocol import MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOP_TOKEN_IDS, MAX_STOPS
from workbench.trace.size import size_of, size_of_step

CHAT = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(chat_model):
    with server_of(chat_model) as client:
        yield client


def complete(server, **fields):
    body = {"prompt": "w5 w6 w7", "max_tokens": 2, "ignore_eos": True, **fields}
    status, _, text = server.ask("POST", "/v1/completions", body)
    return status, json.loads(text)


@pytest.fixture
def callers(monkeypatch):
    """A function that notes which threads call an attribute of an object."""
    threads = set()

    def note(owner, name):
        original = getattr(owner, name)

        def noting(*args, **kwargs):
            threads.add(threading.current_thread().name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)
        return threads

    return note


def test_bodies_are_read_checked_and_tokenized_beside_the_event_loop(server, callers):
    threads = callers(completions, "decode_body")
    callers(handlers, "decode_body")
    callers(SamplingParams, "__post_init__")
    callers(server.engine.tokenizer, "encode")
    assert complete(server, n=2, seed=3)[0] == 200
    assert server.ask("POST", "/v1/chat/completions", CHAT)[0] == 200
    assert server.ask("POST", "/tokenize", {"prompt": "w5"})[0] == 200
    assert threads and not any(name == "test-server" for name in threads), threads


def test_log_probabilities_of_a_whole_answer_are_written_beside_the_event_loop(server, callers):
    threads = callers(completions.Answer, "_logprobs")
    status, answer = complete(server, logprobs=3, n=2)
    assert status == 200 and threads and "test-server" not in threads
    for choice in answer["choices"]:
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))] and len(tokens) == 2


def test_the_description_of_the_api_is_made_once(server, monkeypatch):
    handlers.description.cache_clear()
    made = []
    original = handlers.describe
    monkeypatch.setattr(handlers, "describe", lambda **options: made.append(1) or original(**options))
    first, second = (server.ask("GET", "/openapi.json")[2] for _ in range(2))
    assert first == second and len(made) == 1


def test_a_prompt_is_tokenized_once_for_all_choices(server, monkeypatch):
    texts, original = [], server.engine.tokenizer.encode
    monkeypatch.setattr(server.engine.tokenizer, "encode", lambda text: texts.append(text) or original(text))
    status, answer = complete(server, n=4)
    assert status == 200 and len(answer["choices"]) == 4 and texts == ["w5 w6 w7"]
    assert list(server.engine.trace.requests.values())[-1].prompt == "w5 w6 w7"


@pytest.mark.parametrize("slow", ["tokenizer", "engine"])
def test_a_request_that_is_being_prepared_is_not_a_hang_of_the_engine(server, monkeypatch, slow):
    """A tokenizer that is compiled at its first text may take 9 s; the limit is 6 s, here a twentieth of it."""
    owner, name = (server.engine.tokenizer, "encode") if slow == "tokenizer" else (server.engine, "add_request")
    original = getattr(owner, name)

    def sleeping(*args, **kwargs):
        with monkeypatch.context() as shorter:  # for the sleep alone: a busy machine may keep the engine waiting
            shorter.setattr(bridge, "WATCH_SECONDS", 0.05)
            time.sleep(1.8)  # a second of the pause that has begun, and then the limit more than twice
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, sleeping)
    status, answer = complete(server)
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length", answer


def test_a_full_queue_and_another_models_name_come_before_everything_else(server, monkeypatch):
    wrong = {"stop_token_ids": [1] * 100_000}
    assert complete(server, model="another", **wrong)[0] == 404
    its = server.server.bridge
    monkeypatch.setattr(completions, "decode_body", lambda *args: pytest.fail("the body was decoded"))
    monkeypatch.setattr(its, "_preparing", its.limit)
    assert complete(server, **wrong)[0] == 429


@pytest.mark.parametrize(
    ("field", "make", "limit"),
    [
        ("stop", lambda n: ["w9"] * n, MAX_STOPS),
        ("stop", lambda n: "a" * n, MAX_STOP_LENGTH),
        ("stop_token_ids", lambda n: [9] * n, MAX_STOP_TOKEN_IDS),
        ("logit_bias", lambda n: {f"{i:04}": -1 for i in range(n)}, MAX_LOGIT_BIAS),
    ],
)
def test_lists_are_bounded(server, field, make, limit):
    value = make(limit)
    if field == "logit_bias":  # the tiny model's vocabulary is smaller, and the engine says so
        assert "vocabulary" in complete(server, **{field: value})[1]["error"]["message"]
    else:
        assert complete(server, **{field: value})[0] == 200
    status, answer = complete(server, **{field: make(limit + 1)})
    message = answer["error"]["message"]
    assert status == 400 and answer["error"]["param"] == field
    assert str(limit + 1) in message and f"allowed are up to {limit}" in message


def test_equal_settings_of_several_requests_are_kept_once(server):
    stops = ["w9" * 400, "w8" * 400]
    for _ in range(3):
        assert complete(server, stop=stops, n=2, seed=1)[0] == 200
    kept = [info.sampling["stop"] for info in list(server.engine.trace.requests.values())[-6:]]
    assert kept[0] == stops and all(each is kept[0] for each in kept)


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("keep_bytes", [1 << 20, None])
def test_a_trace_does_not_grow_with_the_requests(tiny_llama, keep_bytes):
    """The control, without the limit, grows. The steps alone, fewer than 300, are far from a limit on steps."""
    config = EngineConfig(**{**ENGINE, "num_blocks": 64})
    with Engine(tiny_llama, config, keep_steps=10_000, keep_bytes=keep_bytes) as engine:
        sizes = []
        for i in range(150):
            stops = [f"{i} {k} " + "x" * 1000 for k in range(4)]
            engine.add_request([3 + i % 90] * 200, max_tokens=1, stop=stops)
            engine.step()
            while engine.scheduler.num_waiting or engine.scheduler.num_running:
                engine.step()
            if i % 10 == 9:
                trace = engine.trace
                sizes.append(sum(map(size_of, trace.requests.values())) + sum(map(size_of_step, trace)))
    if keep_bytes is None:
        assert sizes[-1] > 3 << 19 and sizes == sorted(sizes)
    else:
        assert max(sizes) < 1.1 * keep_bytes and sizes[-1] > keep_bytes / 3


def test_sizes_are_estimated_well(tiny_llama):
    import gc
    import tracemalloc

    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, block_size=4, num_blocks=256, max_model_len=256)
    with Engine(tiny_llama, config) as engine:
        engine.generate([[5, 6]], max_tokens=2)
        gc.collect()
        tracemalloc.start()
        names = [
            engine.add_request([3 + i % 100] * 120, max_tokens=9, ignore_eos=True, stop=[f"{i}" * 500])
            for i in range(60)
        ]
        while engine.step() is not None:
            pass
        for name in names:
            engine.forget(name)
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        trace = engine.trace
        estimated = sum(map(size_of, list(trace.requests.values())[1:])) + sum(map(size_of_step, trace[2:]))
    assert measured / 2 < estimated < 2 * measured, (measured, estimated)
