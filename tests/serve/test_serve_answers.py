"""Answers compared with the engine's own: chat, streams, choices, sampling fields, limits, lost clients."""

import json
import socket
import threading
import time
from dataclasses import replace

import pytest
from law_runs import assert_laws
from serve_helpers import ENGINE, ChatTokenizer, make_chat_model, serving, wait_for

openai = pytest.importorskip("openai", reason="the openai client is not installed (extra: test)")

MESSAGES = [{"role": "system", "content": "w5 w9"}, {"role": "user", "content": "w17 w33 w8"}]
PROMPT = [101, 5, 9, 102, 17, 33, 8, 103]
NO_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def model():
    return make_chat_model()


@pytest.fixture(scope="module")
def server(model):
    from workbench import Engine, EngineConfig

    with Engine(model, EngineConfig(**ENGINE), keep_steps=200) as engine, serving(engine, max_queue=8) as client:
        yield client


@pytest.fixture(scope="module")
def offline(model):
    """The output of an engine without a server, for token ids and sampling fields."""
    from workbench import Engine, EngineConfig, SamplingParams

    with Engine(model, EngineConfig(**ENGINE)) as engine:

        def output(prompt=PROMPT, **fields):
            fields = {"max_tokens": 10, "ignore_eos": True} | fields
            name = engine.add_request(prompt, SamplingParams(**fields))
            engine.run(progress=False)
            return engine.output(name)

        yield output


def chat(server, messages=MESSAGES, **fields):
    extra = NO_EOS | fields.pop("extra_body", {})
    fields = {"model": "tiny-llama", "max_tokens": 10, "temperature": 0} | fields
    return server.openai().chat.completions.create(messages=messages, extra_body=extra, **fields)


def complete(server, prompt=PROMPT, **fields):
    extra = NO_EOS | fields.pop("extra_body", {})
    fields = {"model": "tiny-llama", "max_tokens": 10, "temperature": 0} | fields
    return server.openai().completions.create(prompt=prompt, extra_body=extra, **fields)


# -- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_the_rendered_prompt(server, offline):
    answer = chat(server)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == offline().text and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 10)


def test_a_chat_as_a_stream(server, offline):
    events = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert {event.id for event in events} == {events[0].id} and events[0].object == "chat.completion.chunk"
    assert events[0].choices[0].delta.role == "assistant"
    *parts, last = events
    assert "".join(event.choices[0].delta.content for event in parts) == offline().text
    assert [event.choices[0].finish_reason for event in parts] == [None] * 10 + ["length"]
    assert last.choices == [] and last.usage.total_tokens == len(PROMPT) + 10
    assert all(event.usage is None for event in chat(server, stream=True))


def test_usage_in_every_event_when_asked_for(server):
    events = list(chat(server, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert [event.usage.completion_tokens for event in events if event.usage] == [*range(1, 11), 10]


def test_ways_to_write_a_conversation(server, offline):
    parts = [{"type": "text", "text": "w17 "}, {"type": "text", "text": "w33 w8"}]
    same = [{"role": "developer", "content": "w5 w9"}, {"role": "user", "content": parts, "name": "someone"}]
    answer = chat(server, same, max_tokens=None, max_completion_tokens=7)
    assert answer.choices[0].message.content == offline(max_tokens=7).text


def test_an_error_of_the_template_is_the_clients_error(server):
    with pytest.raises(openai.BadRequestError, match="wants a user's message") as error:
        chat(server, MESSAGES[:1])
    assert "Traceback" not in str(error.value)


class EndlessTokenizer(ChatTokenizer):
    """Renders one conversation without end."""

    def apply_chat_template(self, messages, add_generation_prompt=True, **kw):
        while messages[0]["content"] == "w99":
            time.sleep(0.001)
        return super().apply_chat_template(messages, add_generation_prompt)


def test_a_template_that_does_not_end_is_ended(model, monkeypatch):
    from workbench import Engine, EngineConfig

    endless = [{"role": "user", "content": "w99"}]
    with (
        Engine(replace(model, tokenizer=EndlessTokenizer()), EngineConfig(**ENGINE)) as engine,
        serving(engine, prepare_seconds=2.0) as server,
    ):
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"more than 2 s"):
                chat(server, endless)
            # A busy machine may take seconds to start the next process.
            with monkeypatch.context() as longer:
                longer.setattr(server.server.bridge.preparation, "_seconds", 60)
                assert chat(server).usage.completion_tokens == 10


class SlowTokenizer(ChatTokenizer):
    """Takes as long for a text as a tokenizer that is compiled first."""

    def encode(self, text):
        time.sleep(9.0)
        return super().encode(text)


@pytest.mark.repeats(of="test_a_request_that_is_being_prepared_is_not_a_hang_of_the_engine")
def test_a_tokenizer_that_takes_seconds_is_not_a_stopped_engine(model):
    from workbench import Engine, EngineConfig

    with (
        Engine(replace(model, tokenizer=SlowTokenizer()), EngineConfig(**ENGINE)) as engine,
        serving(engine) as server,
    ):
        assert chat(server).usage.completion_tokens == 10


# -- sampling fields -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.9},
        {"repetition_penalty": 1.8},
        {"logit_bias": {"77": 50.0}},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9},
        {"temperature": 1.2, "seed": 6, "top_k": 5},
        {"temperature": 1.2, "seed": 7, "min_p": 0.2},
        {"ignore_eos": False, "stop_token_ids": [62, 70, 75, 110, 3, 4, 9]},
    ],
    ids=lambda fields: next(iter(fields)) if len(fields) < 3 else "-".join(fields),
)
def test_sampling_fields_mean_what_the_engine_means(server, offline, fields):
    expected = offline(**{**fields, "logit_bias": {77: 50.0}} if "logit_bias" in fields else fields)
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "return_token_ids": True, **NO_EOS, **fields}
    choice = json.loads(server.ask("POST", "/v1/completions", body)[2])["choices"][0]
    assert choice["token_ids"] == list(expected.token_ids) and choice["finish_reason"] == expected.finish_reason
    if "temperature" not in fields and "ignore_eos" not in fields:
        assert expected.token_ids != offline().token_ids, "the field changes nothing: the test proves nothing"


def test_requests_share_blocks_only_under_the_same_cache_salt(server):
    """The trace, which every client with a key may read, does not tell the salt."""
    prompt = [80 + i for i in range(8)]

    def cached_tokens(salt):
        usage = complete(server, prompt, max_tokens=1, extra_body={} if salt is None else {"cache_salt": salt}).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [cached_tokens(salt) for salt in (None, "mine", "yours", "mine", None)] == [0, 0, 0, 4, 4]
    salts = {info.cache_salt for info in server.engine.trace.requests.values()}
    assert len(salts) == 3 and "" in salts and not salts & {"mine", "yours"}
    for salt in salts - {""}:
        assert cached_tokens(salt) == 0, "a salt of the trace finds nothing"
    for wrong in ("", 5):
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            cached_tokens(wrong)


@pytest.mark.parametrize("kind", [chat, complete])
def test_each_choice_has_its_own_seed(server, offline, kind):
    choices = kind(server, n=3, seed=11, temperature=1).choices
    texts = [choice.message.content if kind is chat else choice.text for choice in choices]
    assert texts == [offline(seed=11 + i, temperature=1).text for i in range(3)] and len(set(texts)) == 3
    assert [choice.index for choice in choices] == [0, 1, 2]


def test_choices_of_several_prompts_as_a_stream(server, offline):
    prompts, texts = [PROMPT, PROMPT[::-1]], [""] * 4
    stream = complete(server, prompts, n=2, seed=3, temperature=1, stream=True, stream_options={"include_usage": True})
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.text
        usage = event.usage
    assert texts == [offline(prompt, seed=3 + i, temperature=1).text for prompt in prompts for i in range(2)]
    assert (usage.prompt_tokens, usage.completion_tokens) == (2 * len(PROMPT), 40)


def test_logprobs(server, offline):
    expected = offline(logprobs=3)
    for answer in (chat(server, logprobs=True, top_logprobs=3), None):
        if answer is not None:
            content = answer.choices[0].logprobs.content
        else:  # the same in parts
            events = chat(server, logprobs=True, top_logprobs=3, stream=True)
            content = [item for e in events if e.choices[0].logprobs for item in e.choices[0].logprobs.content]
        assert [item.token for item in content] == [f" w{token}" for token in expected.token_ids]
        assert [item.bytes for item in content] == [list(f" w{token}".encode()) for token in expected.token_ids]
        for item, token, near in zip(content, expected.token_ids, expected.logprobs, strict=True):
            assert item.logprob == pytest.approx(near[token], abs=1e-5)
            assert {top.token: top.logprob for top in item.top_logprobs} == pytest.approx(
                {f" w{other}": value for other, value in near.items()}, abs=1e-5
            )
    found = complete(server, logprobs=2).choices[0].logprobs
    assert found.tokens == [f" w{token}" for token in expected.token_ids]
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(10)]
    assert found.token_logprobs == pytest.approx(
        [n[t] for n, t in zip(expected.logprobs, expected.token_ids)], abs=1e-5
    )
    assert all(len(near) >= 2 for near in found.top_logprobs)


def test_the_first_of_several_stop_strings_ends_a_chat(server, offline):
    text = offline().text
    stops = [text[20:26], text[9:16]]
    whole = chat(server, stop=stops).choices[0]
    parts = list(chat(server, stop=stops, stream=True))
    assert (
        whole.message.content
        == "".join(part.choices[0].delta.content for part in parts)
        == text[: text.index(stops[1])]
    )
    assert whole.finish_reason == parts[-1].choices[0].finish_reason == "stop"


# -- limits and clients that go away ----------------------------------------------------------------------------------


def test_a_full_queue_rejects_requests_until_there_is_room(server):
    client, bridge, gate = server.openai(), server.server.bridge, threading.Event()
    prompt = {"model": "tiny-llama", "prompt": [3, 4], "max_tokens": 5, "stream": True, "extra_body": NO_EOS}
    wait_for(lambda: server.engine.state == "idle")
    server.engine.before_step(lambda: gate.wait(60))
    try:
        streams = [client.completions.create(**prompt) for _ in range(15)]  # 8 could run and 8 wait
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**prompt | {"prompt": [[3], [4]]})
        streams.append(client.completions.create(**prompt))
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(**prompt)
        assert error.value.response.headers["Retry-After"] and error.value.code == "rate_limit_exceeded"
        assert server.ask("GET", "/health")[0] == 200
        streams.pop().close()
    finally:
        gate.set()
    assert [len(list(stream)) for stream in streams] == [5] * 15
    wait_for(lambda: bridge.num_open == 0)
    assert server.ask("POST", "/v1/completions", {"prompt": [3], "max_tokens": 1})[0] == 200


def test_a_lost_client_is_aborted_within_one_step(server, monkeypatch):
    engine, gate, aborts = server.engine, threading.Event(), []
    wait_for(lambda: engine.state == "idle")
    abort = engine.abort
    monkeypatch.setattr(engine, "abort", lambda name: (abort(name), aborts.append(name)))
    remove = engine.on_step(lambda record: gate.wait(60))
    try:
        body = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": 240, "stream": True, "extra_body": NO_EOS}
        stream = server.openai().completions.create(**body)
        next(iter(stream))  # the first token has arrived, and the engine waits before its next step
        following = engine.scheduler.step
        stream.close()
        wait_for(lambda: aborts)
    finally:
        gate.set()
        remove()
    wait_for(lambda: engine.state == "idle" and not server.server.bridge.num_open)
    assert [record.step for record in engine.trace if aborts[0] in record.aborted] == [following]
    assert engine.scheduler.num_free_blocks == ENGINE["num_blocks"] - 1


@pytest.mark.repeats(of="test_a_connection_is_freed_when_it_has_ended")
def test_a_thousand_clients_that_go_away(server):
    """Clients leave before the first token, in the middle, or while they wait: every block is freed, nothing leaks."""
    engine, bridge = server.engine, server.server.bridge
    wait_for(lambda: engine.state == "idle" and not bridge.num_open)
    free, aborted = engine.scheduler.num_free_blocks, bridge.metrics.finished["abort"]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 240, "stream": True, **NO_EOS})
    request = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    for _ in range(63):
        sockets = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(16)]
        for number, connection in enumerate(sockets):
            connection.sendall(request)
            if number % 4 == 0 and number < 8:
                # Requests of the previous batch may not have been aborted yet and leave no room for this one.
                assert connection.recv(4096).startswith((b"HTTP/1.1 200", b"HTTP/1.1 429"))
        for connection in sockets:
            connection.close()
        wait_for(lambda: not bridge.num_open)
    wait_for(lambda: engine.state == "idle" and not bridge.num_open)
    assert bridge.metrics.finished["abort"] > aborted + 63
    assert engine.scheduler.num_free_blocks == free == ENGINE["num_blocks"] - 1
    assert_laws(engine.scheduler)
    assert not engine.outputs and len(engine.trace) <= 200
    assert engine.trace[0].step > 0 and len(engine.trace.requests) < 1008, "the trace forgets the oldest of them"
    assert server.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0] == 200


def test_the_chat_tokenizer_of_these_tests():
    assert ChatTokenizer().encode(ChatTokenizer().apply_chat_template(MESSAGES)) == PROMPT
