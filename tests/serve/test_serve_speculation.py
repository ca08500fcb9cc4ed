"""Streaming when a step gives a request several tokens, or its tokens an iteration late."""

import json

import pytest
from serve_helpers import ENGINE, serving

from workbench import Engine, EngineConfig, SamplingParams

PROMPT = [5, 9, 17, 33, 8]
NGRAM = {"num_speculative_tokens": 3}


def events(client, body):
    status, _, text = client.ask("POST", "/v1/completions", body | {"model": "tiny-llama", "stream": True})
    assert status == 200
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("config", [NGRAM, {"async_scheduling": True}, NGRAM | {"async_scheduling": True}])
def test_a_stream_with_steps_ahead_is_the_plain_answer(tiny_llama, config):
    with Engine(tiny_llama, EngineConfig(**ENGINE)) as plain:
        plain.add_request(PROMPT, SamplingParams(max_tokens=14, ignore_eos=True, logprobs=1))
        (whole,) = plain.run(progress=False)

    def oracle(token_ids, num_drafts):
        done = len(token_ids) - len(PROMPT)
        return [*whole.token_ids[done : done + 2], 1][:num_drafts]

    options = {"proposer": oracle} if "num_speculative_tokens" in config else {}
    stop = f" w{whole.token_ids[9]}"
    engine = Engine(tiny_llama, EngineConfig(**ENGINE, **config), **options)
    with engine, serving(engine) as client:
        body = {"prompt": PROMPT, "max_tokens": 14, "temperature": 0, "ignore_eos": True, "logprobs": 1,
                "stream_options": {"include_usage": True}}  # fmt: skip
        got = events(client, body)
        parts = [event["choices"][0] for event in got if event["choices"]]
        assert "".join(part["text"] for part in parts) == whole.text
        assert sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"]) == 14
        assert parts[-1]["finish_reason"] == "length"
        assert got[-1]["usage"]["completion_tokens"] == 14
        if options:
            assert len(parts) < 12, "several tokens per event"
        parts = [event["choices"][0] for event in events(client, body | {"stop": stop}) if event["choices"]]
        assert "".join(part["text"] for part in parts) == whole.text[: whole.text.index(stop)]
        assert parts[-1]["finish_reason"] == "stop"
