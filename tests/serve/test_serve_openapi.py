"""The API's description: complete, and true for the requests that schemathesis generates."""

import json
from dataclasses import replace

import pytest
from serve_helpers import ChatTokenizer, make_chat_model, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (extra: test)")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402

ENGINE = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 4, "num_blocks": 64, "max_model_len": 24}
EXAMPLES = 15
PLAIN = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2, "prompt_logprobs": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "prompt_logprobs": 2},
    "/tokenize": {"prompt": "ab"},
}
CHECKS = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]


class AnyTextTokenizer(ChatTokenizer):
    """A token for each byte, so that any text is a prompt."""

    def encode(self, text):
        return [3 + byte % 100 for byte in text.encode("utf-8", "replace")]

    def apply_chat_template(self, messages, add_generation_prompt=True, **kw):
        return "".join(message["content"] for message in messages) + "."


@pytest.fixture(scope="module")
def server():
    from workbench import Engine, EngineConfig

    with (
        Engine(replace(make_chat_model(), tokenizer=AnyTextTokenizer()), EngineConfig(**ENGINE)) as engine,
        serving(engine, max_queue=64) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")


def test_every_address_is_described(server):
    from workbench.apps.serve.openapi import OPERATIONS
    from workbench.apps.serve.server import make_api

    rules = make_api(server.server.bridge, None).wildcard_router.rules
    served = {rule.matcher.regex.pattern.removesuffix("$").replace("(.+)", "{model}") for rule in rules}
    served -= {"/", "/favicon.ico", "/dashboard", "/dashboard/"}  # for browsers
    assert served == {operation.path for operation in OPERATIONS}
    description = json.loads(server.ask("GET", "/openapi.json")[2])
    assert set(description["paths"]) == served and "security" not in description
    for path, operations in description["paths"].items():
        other = "GET" if "post" in operations else "POST"
        assert server.ask(other, path.replace("{model}", "x"), "{}")[0] == 405


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_answers_are_as_described(schema, path, mode):
    """Bodies that fit the description, and bodies that do not: no status 500 and no answer that is not described."""
    strategy = schema[path]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    statuses = set()

    @given(case=strategy)
    @settings(
        max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(case):
        if mode == "positive":
            case.body.pop("model", None)  # all names but one are rejected
            if not statuses and path in PLAIN:  # one body at least is served, and its answer is as described
                case.body = dict(PLAIN[path])
            if path == "/tokenize" and case.body.get("prompt") is not None:  # the other fields are those of messages
                case.body = {"prompt": case.body["prompt"]}
        response = case.call(timeout=60)
        statuses.add(response.status_code)
        # Only the checks of shapes: the others do not know which values the engine rejects.
        checks = schemathesis.checks.CHECKS.get_by_names(CHECKS)
        case.validate_response(response, checks=checks)

    check()
    assert {400} < statuses <= {200, 400, 404} if mode == "positive" else statuses == {400}, statuses


STREAMS = {
    "/v1/completions": {"prompt": "ab", "stream": True, "max_tokens": 3, "n": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 3,
        "stream_options": {"include_usage": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("path", STREAMS)
def test_events_of_a_stream_are_as_described(server, schema, path):
    case = schema[path]["POST"].Case(body=STREAMS[path], media_type="application/json")
    response = case.call(timeout=60)
    assert response.status_code == 200 and response.content.endswith(b"data: [DONE]\n\n")
    checks = schemathesis.checks.CHECKS.get_by_names(CHECKS)
    case.validate_response(response, checks=checks)
    response = case.call(timeout=60)
    response.content = response.content.replace(b'"index":0', b'"index":"first"', 1)
    with pytest.raises(schemathesis.core.failures.FailureGroup, match="violates"):
        case.validate_response(response, checks=checks)
