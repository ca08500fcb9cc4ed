"""The server against OpenAI's own client: a real process on 127.0.0.1 over a tiny random model."""

import concurrent.futures
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from serve_helpers import ENGINE, ServerProcess, wait_for

openai = pytest.importorskip("openai", reason="the openai client is not installed (extra: test)")

PROMPT = [5, 9, 17, 33, 8]


@pytest.fixture(scope="module")
def server():
    server = ServerProcess(engine=ENGINE, serve={"max_queue": 8, "max_body_bytes": 65536})
    yield server
    server.end()


@pytest.fixture(scope="module")
def offline(tiny_llama):
    """Greedy tokens of a prompt from an engine without a server."""
    from workbench import Engine, EngineConfig, SamplingParams

    engine = Engine(tiny_llama, EngineConfig(**ENGINE))

    def tokens(prompt, max_tokens):
        rid = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        engine.run(progress=False)
        return list(engine.output(rid).token_ids)

    yield tokens
    engine.close()


def words(ids):
    return "".join(f" w{i}" for i in ids)


def test_answers_equal_the_offline_answers(server, offline):
    def ask(i):
        prompt = [*PROMPT, 10 + i]
        answer = server.openai().completions.create(
            model="tiny-llama", prompt=prompt, max_tokens=6 + i % 5, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == 6 + i % 5
        return answer.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(24)))
    assert texts == [words(offline([*PROMPT, 10 + i], 6 + i % 5)) for i in range(24)]


def test_a_stream_is_the_answer_in_parts(server, offline):
    events = list(
        server.openai().completions.create(
            model="tiny-llama", prompt=PROMPT, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert "".join(e.choices[0].text for e in events[:-1]) == words(offline(PROMPT, 12))
    assert [e.choices[0].finish_reason for e in events[:-1]][-1] == "length"
    assert events[-1].usage.completion_tokens == 12 and len(events) > 6


def test_a_stop_string_is_never_sent(server, offline):
    expected = words(offline(PROMPT, 12))
    stop = expected[7:14]
    events = list(
        server.openai().completions.create(
            model="tiny-llama", prompt=PROMPT, max_tokens=12, temperature=0, stop=stop, stream=True,
            extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert "".join(e.choices[0].text for e in events) == expected[: expected.index(stop)]
    assert events[-1].choices[0].finish_reason == "stop"


def test_choices_logprobs_and_seed(server):
    def ask():
        return server.openai().completions.create(
            model="tiny-llama", prompt=PROMPT, max_tokens=4, n=3, seed=7, logprobs=2, temperature=1
        )

    first, second = ask(), ask()
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices}) > 1
    assert len(first.choices[0].logprobs.token_logprobs) == len(first.choices[0].logprobs.tokens)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt": [3], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [3], "temperature": -1}, "temperature"),
        ({"prompt": [3], "tools": [{"type": "function"}]}, "tools"),
        ({"max_tokens": 3}, "prompt"),
    ],
)
def test_errors_name_the_field(server, body, param):
    status, _, text = server.ask("POST", "/v1/completions", body)
    assert status == 400 and json.loads(text)["error"]["param"] == param


def test_errors_of_the_client(server):
    client = server.openai()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny-llama", prompt=[119] * 300)
    with pytest.raises(openai.BadRequestError, match="not served"):
        client.embeddings.create(model="tiny-llama", input="w3")
    assert client.models.list().data[0].id == "tiny-llama"
    assert server.ask("POST", "/v1/completions", "{" * 50_000)[0] == 400
    assert server.ask("GET", "/nowhere")[0] == 404


@pytest.mark.parametrize("size", [65537, 10_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_rejected(server, size, chunked):
    body = (b" " * 50_000 for _ in range(0, size, 50_000)) if chunked else b" " * size
    status, _, text = server.ask("POST", "/v1/completions", body)
    assert status == 413 and "allowed are 65536" in json.loads(text)["error"]["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process's memory from /proc")
def test_a_body_that_is_too_large_is_not_kept(server):
    def peak():
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

    before = peak()
    assert server.ask("POST", "/v1/completions", b" " * 200_000_000)[0] == 413
    assert peak() < before + 20_000_000


def test_a_body_of_the_largest_size_is_read(server):
    body = json.dumps({"prompt": "w3 w4"})
    status, _, text = server.ask("POST", "/tokenize", body + " " * (65536 - len(body)))
    assert status == 200 and json.loads(text)["tokens"] == [3, 4]


def test_every_error_has_openais_shape_and_says_nothing_about_the_server(server):
    for method, path, body in (
        ("GET", "/nowhere", None),
        ("PUT", "/v1/completions", "{}"),
        ("POST", "/v1/completions", "not JSON"),
        ("POST", "/v1/completions", '{"prompt": "\\ud800"}'),
        ("POST", "/v1/completions", '{"prompt": [1e400]}'),
        ("POST", "/v1/completions", '{"prompt": [3], "logit_bias": {"x": 1}}'),
        ("POST", "/v1/completions", '{"prompt": ["w3"], "seed": 99999999999999999999}'),
        ("POST", "/v1/chat/completions", '{"messages": []}'),
        ("POST", "/tokenize", '{"prompt": "not words"}'),
        ("GET", "/v1/models/another", None),
        ("POST", "/v1/completions", b"\xff" * 70_000),
    ):
        status, headers, text = server.ask(method, path, body)
        error = json.loads(text)["error"]
        assert 400 <= status < 500 and set(error) == {"message", "type", "param", "code"}, (path, text)
        assert headers["Content-Type"].startswith("application/json")
        assert not re.search(r"Traceback|File |\.py|/home|/work|/root", text), text


def test_tokenize_and_dashboard(server):
    assert json.loads(server.ask("POST", "/tokenize", {"prompt": "w3 w4"})[2])["tokens"] == [3, 4]
    status, _, page = server.ask("GET", "/dashboard")
    assert status == 200 and "Workbench" in page


def test_a_request_is_aborted_when_its_client_disconnects(server):
    free_before = server.metric("vllm:kv_cache_usage_perc")
    aborted = re.compile(r'finished_reason="abort"} (\d+)')
    before = int(aborted.search(server.ask("GET", "/metrics")[2])[1])
    for _ in range(4):
        stream = server.openai().completions.create(
            model="tiny-llama", prompt=PROMPT, max_tokens=240, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    wait_for(lambda: not server.metric("vllm:num_requests_running"))
    server.openai().completions.create(model="tiny-llama", prompt=[3], max_tokens=1)
    # An answer that was complete before the server had seen its client leave is not an abort.
    assert before < int(aborted.search(server.ask("GET", "/metrics")[2])[1]) <= before + 4
    assert server.metric("vllm:kv_cache_usage_perc") == free_before


def test_more_answers_than_fit_the_queue_are_rejected(server):
    status, _, text = server.ask("POST", "/v1/completions", {"prompt": [[3]] * 17, "max_tokens": 1})
    assert status == 400 and "limit of 16" in json.loads(text)["error"]["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
def test_the_event_loop_goes_before_the_engine(server):
    process = server.process.pid
    threads = {int(thread.name) for thread in Path(f"/proc/{process}/task").iterdir()}
    first = os.getpriority(os.PRIO_PROCESS, process)
    assert first == os.getpriority(os.PRIO_PROCESS, 0)
    niceness = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads - {process}]
    assert min(19, first + 5) in niceness


def test_pages_of_other_sites_are_rejected(server):
    assert server.ask("GET", "/v1/models", headers={"Host": "evil.example"})[0] == 403
    for path in ("/v1/models", "/trace/stream", "/dashboard", "/dashboard/ws"):
        assert server.ask("GET", path, headers={"Origin": "http://evil.example"})[0] == 403


def test_an_api_key_guards_everything_and_sigterm_drains():
    server = ServerProcess(engine=ENGINE, serve={"api_key": "secret-key-1"})
    try:
        for path in ("/v1/models", "/dashboard", "/dashboard/ws", "/trace/stream", "/metrics"):
            assert server.ask("GET", path)[0] == 401
        assert server.ask("GET", "/health")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="wrong").models.list()
        client = server.openai(api_key="secret-key-1")
        status, headers, _ = server.ask("GET", "/dashboard?api_key=secret-key-1")
        assert status == 302 and "HttpOnly" in headers["Set-Cookie"] and "secret" not in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert server.ask("GET", "/dashboard", headers={"Cookie": cookie})[0] == 200
        stream = client.completions.create(
            model="tiny-llama", prompt=PROMPT, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        parts = iter(stream)
        next(parts)
        os.kill(server.process.pid, signal.SIGTERM)
        assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    finally:
        out = server.end()
    assert "free blocks 127" in out and server.process.returncode == 0


def test_an_open_address_needs_a_key_or_insecure():
    from workbench.apps.serve.settings import ServeSettings

    with pytest.raises(ValueError, match="--api-key"):
        ServeSettings(host="0.0.0.0")
    assert ServeSettings(host="0.0.0.0", insecure=True).host == "0.0.0.0"
