"""/health while the engine's steps raise: 503 with the error after a few in a row, 200 after one that succeeds."""

import json

import pytest
from raw_clients import PROMPT
from serve_helpers import ENGINE, serving

from workbench import Engine, EngineConfig
from workbench.apps.serve.bridge import MAX_FAILED_STEPS


@pytest.fixture(params=["plain", "asynchronous"])
def served(chat_model, request):
    """An engine and a client of its server."""
    config = EngineConfig(**ENGINE, async_scheduling=request.param == "asynchronous")
    with Engine(chat_model, config) as engine, serving(engine) as client:
        yield engine, client


def health(client):
    status, _, text = client.ask("GET", "/health")
    return status, json.loads(text)


def complete(client, tokens=1):
    return client.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True})[0]


@pytest.mark.parametrize(("owner", "name"), [("runner", "forward"), ("sampler", "sample")])
def test_steps_that_all_raise_make_health_503_and_one_that_succeeds_200(served, monkeypatch, owner, name):
    engine, client = served

    def explode(*_, **__):
        raise RuntimeError("out of memory, planted\na second line")

    assert complete(client) == 200 and health(client) == (200, {"status": "ok"})
    for _ in range(2):  # once more after it has recovered
        with monkeypatch.context() as patch:
            patch.setattr(getattr(engine, owner), name, explode)
            for number in range(1, MAX_FAILED_STEPS + 2):
                assert complete(client) == 500
                if number < MAX_FAILED_STEPS:
                    assert health(client) == (200, {"status": "ok"})
                else:
                    answer = {"status": "failing", "error": "RuntimeError: out of memory, planted"}
                    assert health(client) == (503, answer)
        assert complete(client) == 200 and health(client) == (200, {"status": "ok"})


def test_failures_between_successes_are_not_counted_together(served, monkeypatch):
    engine, client = served

    def explode(*_, **__):
        raise RuntimeError("planted")

    for _ in range(MAX_FAILED_STEPS + 1):
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "forward", explode)
            assert complete(client) == 500
        assert complete(client, 3) == 200
        assert health(client) == (200, {"status": "ok"})


def test_a_step_that_cannot_be_scheduled_counts(chat_model, monkeypatch):
    with Engine(chat_model, EngineConfig(**ENGINE)) as engine:

        def explode():
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "schedule", explode)
            engine.add_request(PROMPT)
            for number in range(1, 4):
                engine.start()
                engine._thread.call(lambda: None)  # waits for the end of the run
                assert engine.failed_steps.count == number
        assert engine.failed_steps.error == "RuntimeError: planted"
