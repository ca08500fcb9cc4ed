"""``echo`` with log-probabilities, as evaluations ask for them."""

import json

import mlx.core as mx
import numpy as np
import pytest
from serve_helpers import ENGINE, make_chat_model, serving
from word_llama import make_tiny_llama

from workbench import Engine, EngineConfig, SamplingParams

PROMPT = [5, 9, 11, 9, 11, 40, 7]


@pytest.fixture(scope="module")
def server():
    with Engine(make_chat_model(), EngineConfig(**ENGINE)) as engine, serving(engine) as client:
        yield client


def complete(server, **body):
    status, _, text = server.ask("POST", "/v1/completions", {"prompt": PROMPT, "temperature": 0, **body})
    answer = json.loads(text)
    assert status == 200, answer
    return answer


def direct(max_tokens=4, logprobs=2):
    with Engine(make_tiny_llama(), EngineConfig(**ENGINE)) as engine:
        engine.add_request(PROMPT, SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=logprobs))
        return engine.run(progress=False)[0]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_the_scores_are_the_engines(server, max_tokens):
    answer = complete(server, echo=True, logprobs=2, max_tokens=max_tokens, return_token_ids=True)
    output, choice = direct(), answer["choices"][0]
    tokens = [*PROMPT, *output.token_ids[:max_tokens]]
    assert choice["token_ids"] == tokens and choice["finish_reason"] == "length"
    assert choice["text"] == "".join(f" w{token}" for token in tokens)
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    near = [*output.prompt_logprobs[1:], *output.logprobs[:max_tokens]]
    assert found["token_logprobs"][1:] == [pytest.approx(n[t], abs=1e-5) for n, t in zip(near, tokens[1:])]
    for top, expected in zip(found["top_logprobs"][1:], near):
        assert top == pytest.approx({f" w{token}": value for token, value in expected.items()}, abs=1e-5)
    assert found["text_offset"] == [sum(len(f" w{t}") for t in tokens[:i]) for i in range(len(tokens))]
    assert answer["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": max_tokens,
        "total_tokens": len(PROMPT) + max_tokens,
        "prompt_tokens_details": 0,
    }


def test_a_streamed_echo_begins_with_the_prompt(server):
    client = server.openai()
    options = {"model": "tiny-llama", "prompt": PROMPT, "temperature": 0, "echo": True, "max_tokens": 3, "logprobs": 1}
    whole = client.completions.create(**options).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    joined = [value for part in parts for value in (part.logprobs.token_logprobs if part.logprobs else [])]
    assert joined == pytest.approx(whole.logprobs.token_logprobs, nan_ok=True)
    assert parts[0].text.startswith("".join(f" w{token}" for token in PROMPT))


def test_echo_without_logprobs_and_without_an_output(server):
    assert complete(server, echo=True, max_tokens=0)["choices"][0]["text"] == "".join(f" w{token}" for token in PROMPT)
    status, _, text = server.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
    assert status == 400 and json.loads(text)["error"]["param"] == "max_tokens"


def check_prompt_logprobs(found, tokens, count):
    """The field of an answer against a plain pass of the model in float64, with vLLM's fields."""
    logits = np.array(make_tiny_llama().model(mx.array([tokens]))[0].astype(mx.float32), np.float64)
    rows = logits - logits.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    assert len(found) == len(tokens) and found[0] is None
    for row, token, entries in zip(rows, tokens[1:], found[1:]):
        best = np.argsort(-row)[:count].tolist()
        assert list(map(int, entries)) == [*best, *([token] if token not in best else [])]
        for rank, (name, entry) in enumerate(entries.items(), 1):
            own_rank = int((row >= row[token]).sum())
            assert entry["rank"] == (own_rank if int(name) == token else rank)
            assert entry["logprob"] == pytest.approx(row[int(name)], abs=1e-4)
            assert entry["decoded_token"] == f" w{name}"


@pytest.mark.parametrize("echo", [False, True])
def test_prompt_logprobs_are_those_of_a_plain_pass(server, echo):
    prompt = np.random.default_rng(1).integers(5, 100, 150).tolist()  # three chunks
    choice = complete(server, prompt=prompt, prompt_logprobs=3, max_tokens=2, echo=echo)["choices"][0]
    check_prompt_logprobs(choice["prompt_logprobs"], prompt, 3)
    assert choice["logprobs"] is None and choice["text"].startswith(f" w{prompt[0]} w{prompt[1]}") is echo
    # With echo, logprobs ask for those of the prompt too.
    choice = complete(server, prompt=prompt, logprobs=1, max_tokens=2, echo=echo)["choices"][0]
    assert ("prompt_logprobs" in choice) is echo
    if echo:
        check_prompt_logprobs(choice["prompt_logprobs"], prompt, 1)


def test_chat_has_them_beside_the_choices(server):
    body = {"messages": [{"role": "user", "content": "w7 w9 w9"}], "max_tokens": 2, "prompt_logprobs": 0}
    answer = json.loads(server.ask("POST", "/v1/chat/completions", body)[2])
    check_prompt_logprobs(answer["prompt_logprobs"], [102, 7, 9, 9, 103], 0)
    assert "prompt_logprobs" not in answer["choices"][0]


def test_prompt_logprobs_of_a_stream_or_out_of_range_are_refused(server):
    for options in ({"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": -1}, {"prompt_logprobs": 21}):
        status, _, text = server.ask("POST", "/v1/completions", {"prompt": PROMPT, **options})
        assert status == 400 and "prompt_logprobs" in json.loads(text)["error"]["message"]
