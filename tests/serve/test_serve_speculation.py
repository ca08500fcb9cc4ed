"""Streaming when a step gives a request several tokens, or its tokens an iteration late."""

import json
import re

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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_are_counted_under_the_names_of_vllm(tiny_llama, asynchronous):
    with Engine(tiny_llama, EngineConfig(**ENGINE)) as plain:
        plain.add_request(PROMPT, SamplingParams(max_tokens=14, ignore_eos=True))
        (whole,) = plain.run(progress=False)

    def two_of_three(token_ids, num_drafts):
        done = len(token_ids) - len(PROMPT)
        return [*whole.token_ids[done : done + 2], 1][:num_drafts]

    engine = Engine(tiny_llama, EngineConfig(**ENGINE, **NGRAM, async_scheduling=asynchronous), proposer=two_of_three)
    with engine, serving(engine) as client:
        body = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": 14, "temperature": 0, "ignore_eos": True}
        assert client.ask("POST", "/v1/completions", body)[0] == 200
        text = client.ask("GET", "/metrics")[2]
    counts = dict(re.findall(r"^vllm:spec_decode_num_(\w+_total)\{[^}]*\} (\d+)$", text, re.M))
    positions = dict(
        re.findall(r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d)"\} (\d+)$', text, re.M)
    )
    # 13 tokens after the first: four verifications give three each, the fifth is cut off by max_tokens.
    chunks = [chunk for record in engine.trace for chunk in record.chunks if chunk.drafts and not chunk.discarded]
    assert len(chunks) >= 4
    assert int(counts["drafts_total"]) == len(chunks)
    assert int(counts["draft_tokens_total"]) == sum(len(chunk.drafts) for chunk in chunks)
    assert int(counts["accepted_tokens_total"]) == sum(chunk.num_accepted for chunk in chunks) >= 8
    by_position = [sum(chunk.num_accepted > position for chunk in chunks) for position in range(3)]
    assert [int(positions[str(position)]) for position in range(3)] == by_position
    assert by_position[0] > 0 == by_position[2], "the third draft is always wrong"


def test_a_server_without_drafts_shows_none_of_their_metrics(tiny_llama):
    engine = Engine(tiny_llama, EngineConfig(**ENGINE))
    with engine, serving(engine) as client:
        assert "spec_decode" not in client.ask("GET", "/metrics")[2]
