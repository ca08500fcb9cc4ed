"""Fields of requests that depend on each other, and those that vLLM knows: served as there, or refused by name."""

import json

import pytest
from letter_llama import TEXTS, make_letter_llama
from serve_helpers import serving
from tool_templates import HERMES

from workbench import Engine, EngineConfig
from workbench.apps.serve.errors import ApiError
from workbench.apps.serve.protocol import ChatRequest, CompletionRequest, TokenizeRequest, decode_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"role": "user", "content": "abc"}
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "go"}}


@pytest.fixture(scope="module")
def server():
    config = EngineConfig(max_num_batched_tokens=256, max_num_seqs=8, block_size=4, num_blocks=2000, max_model_len=512)
    with Engine(make_letter_llama(HERMES), config) as engine, serving(engine) as server:
        yield server


def asked(server, address, **body):
    given = {"messages": [HELLO]} if address == CHAT else {} if "prompt" in body else {"prompt": "abc"}
    no_text = {str(token): -100 for token in range(len(TEXTS), 120)}
    status, _, text = server.ask("POST", address, {"max_tokens": 4, "seed": 1, "logit_bias": no_text, **given, **body})
    return status, text if body.get("stream") else json.loads(text)


# -- two values of one name --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ('"temperature": 0, "temperature": 1', "temperature"),
        ('"max_tokens": 1, "model": "a", "max_tokens": null', "max_tokens"),
        ('"logit_bias": {"5": 1, "5": 2}', "5"),
        ('"response_format": {"type": "json_object", "type": "text"}', "type"),
        ('"extra": {"a": {"b": [{"c": 1, "c": 2}]}}', "c"),
        ('"stream": 1, "stream": true', "stream"),
        ('"extra": [{"a": [0], "a": [false]}]', "a"),
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest])
def test_two_values_of_one_name_are_refused(kind, fields, name):
    begun = '"messages": [{"role": "user", "content": "a"}]' if kind is ChatRequest else '"prompt": "a"'
    with pytest.raises(ApiError, match=f"an object has two values of '{name}'") as refused:
        decode_body(f"{{{begun}, {fields}}}".encode(), kind)
    assert refused.value.status == 400 and refused.value.param == name


def test_the_same_value_twice_says_one_thing(server):
    body = b'{"prompt": "abc", "max_tokens": 2, "max_tokens": 2}'
    assert decode_body(body, CompletionRequest).max_tokens == 2


def test_a_body_of_any_depth_is_read_or_refused():
    """Two readers see it, and the second stops earlier."""
    verdicts = set()
    for depth in range(1, 1200):
        body = b'{"prompt": "a", "model": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(ApiError) as refused:
            decode_body(body, CompletionRequest)
        verdicts.add(refused.value.message.rpartition(":")[2])
    assert any("nested too deeply" in verdict for verdict in verdicts) and len(verdicts) <= 3


def test_two_values_of_one_name_in_the_arguments_of_a_call_are_refused():
    made = {"id": "a", "type": "function", "function": {"name": "go", "arguments": '{"a": {"b": 1, "b": 2}}'}}
    body = {"messages": [HELLO, {"role": "assistant", "content": "", "tool_calls": [made]}]}
    request = decode_body(json.dumps(body).encode(), ChatRequest)
    with pytest.raises(ValueError, match=r"arguments of a call of 'go'.* two values of 'b'"):
        request.messages[1].as_dict()


# -- pairs of fields ---------------------------------------------------------------------------------------------------

SERVED = [
    (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, {"max_tokens": 3}),
    (CHAT, {"max_tokens": 2, "max_completion_tokens": None}, {"max_tokens": 2}),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 3}, {"max_tokens": 3}),
    (CHAT, {"logprobs": True, "top_logprobs": None}, {"logprobs": True, "top_logprobs": 0}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}, {}),
    (CHAT, {"tools": [], "parallel_tool_calls": True}, {}),
    (CHAT, {"tools": None, "tool_choice": "none"}, {}),
    (CHAT, {"response_format": {"type": "text"}, "structured_outputs": {"choice": ["ab"]}},
     {"structured_outputs": {"choice": ["ab"]}}),
    (COMPLETIONS, {"n": 2, "best_of": 2}, {"n": 2}),
    (COMPLETIONS, {"prompt": ["abc"]}, {"prompt": "abc"}),
    (COMPLETIONS, {"prompt": [12, 13, 14]}, {"prompt": "abc"}),
    (COMPLETIONS, {"prompt": [[12, 13, 14]]}, {"prompt": "abc"}),
    (COMPLETIONS, {"max_tokens": None}, {"max_tokens": 16}),
    (COMPLETIONS, {"stop": [], "stop_token_ids": []}, {}),
    *((address, {"top_k": k}, {}) for address in (CHAT, COMPLETIONS) for k in (0, -1, None)),
    *((address, {"stream_options": options}, {}) for address in (CHAT, COMPLETIONS)
      for options in (None, {}, {"include_usage": False})),
]  # fmt: skip
"""Bodies, and plain ones with the same answers."""

MISTAKES = [
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    (CHAT, {"tool_choice": NAMED, "tools": []}, "tool_choice", "needs tools"),
    (CHAT, {"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools", "give one of them"),
    (CHAT, {"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "tools", "give one of them"),
    (CHAT, {"guided_json": {}, "tools": [TOOL]}, "guided_json", "use structured_outputs"),
    (CHAT, {"max_tokens": 0}, "max_tokens", ">= 1"),
    (CHAT, {"echo": True}, "echo", "another address"),
    (COMPLETIONS, {"n": 1, "best_of": 2}, "best_of", "must equal n"),
    (COMPLETIONS, {"suffix": "a"}, "suffix", "stands behind it"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "needs echo=true"),
    (COMPLETIONS, {"prompt": []}, "prompt", "length >= 1"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "length >= 1"),
    (COMPLETIONS, {"prompt": [5, "a"]}, "prompt", "must be a list of token ids, of texts"),
    (COMPLETIONS, {"prompt": [5, -1]}, "prompt", "vocabulary"),
    (COMPLETIONS, {"prompt": [5, 10**6]}, "prompt", "vocabulary"),
    (COMPLETIONS, {"logprobs": True}, "logprobs", "`int"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs", ">= 0"),
    (COMPLETIONS, {"tools": [TOOL]}, "tools", "another address"),
    (COMPLETIONS, {"tool_choice": "auto"}, "tool_choice", "another address"),
    (COMPLETIONS, {"top_k": -2}, "top_k", "-1"),
    (COMPLETIONS, {"stop": [""]}, "stop", "not empty"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    *((address, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true")
      for address in (CHAT, COMPLETIONS)),
    *((address, {"stream_options": {"continuous_usage_stats": True}, "stream": False}, "stream_options", "needs stream")
      for address in (CHAT, COMPLETIONS)),
    *((address, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
       "structured_outputs", "give one of them") for address in (CHAT, COMPLETIONS)),
    *((address, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of")
      for address in (CHAT, COMPLETIONS)),
]  # fmt: skip


@pytest.mark.parametrize(("address", "body", "plain"), SERVED)
def test_pairs_that_are_served(address, body, plain, server):
    made, expected = asked(server, address, **body), asked(server, address, **plain)
    assert made[0] == expected[0] == 200, (made, expected)
    assert made[1]["choices"] == expected[1]["choices"]
    assert made[1]["usage"]["completion_tokens"] == expected[1]["usage"]["completion_tokens"]


@pytest.mark.parametrize(("address", "body", "field", "message"), MISTAKES)
def test_pairs_that_are_refused_name_the_field(address, body, field, message, server):
    status, answer = asked(server, address, **body)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    assert status == 400, answer
    problem = answer["error"]
    assert (problem["param"] or "").partition("[")[0] == field and message in problem["message"], problem


def test_a_seed_of_minus_one_is_none(server):
    """As in vLLM: each answer is another one."""
    texts = {asked(server, COMPLETIONS, seed=-1, max_tokens=20)[1]["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    assert len({asked(server, COMPLETIONS, max_tokens=20)[1]["choices"][0]["text"] for _ in range(3)}) == 1


# -- what a tokenizer puts around a prompt -----------------------------------------------------------------------------


def test_a_completion_may_do_without_special_tokens(tmp_path):
    """vLLM's add_special_tokens, whose default is true for completions and false for chats."""
    model = make_letter_llama()
    model.tokenizer.adds_bos = True
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=2, block_size=4, num_blocks=100, max_model_len=64)
    with Engine(model, config) as engine, serving(engine) as server:
        for given, tokens in ((None, 4), (True, 4), (False, 3)):
            body = {"prompt": ["abc", "def"], "max_tokens": 2, "add_special_tokens": given, "return_token_ids": True}
            status, _, text = server.ask("POST", COMPLETIONS, body)
            answer = json.loads(text)
            assert status == 200 and answer["usage"]["prompt_tokens"] == 2 * tokens, answer
            body = {"prompt": "abc"} | ({} if given is None else {"add_special_tokens": given})
            counted = json.loads(server.ask("POST", "/tokenize", body)[2])["count"]
            assert counted == tokens


def test_tokenize_counts_tools(server):
    """The tokens are those of a completion of the same body."""
    body = {"messages": [HELLO], "tools": [TOOL]}
    counted = json.loads(server.ask("POST", "/tokenize", body)[2])["count"]
    assert counted == asked(server, CHAT, tools=[TOOL])[1]["usage"]["prompt_tokens"]
    assert counted > json.loads(server.ask("POST", "/tokenize", {"messages": [HELLO]})[2])["count"]
    status, _, text = server.ask("POST", "/tokenize", {"prompt": "abc", "tools": [TOOL]})
    assert status == 400 and "tools needs messages" in text
    many = [TOOL | {"function": {"name": f"go{i}"}} for i in range(129)]
    for tools, words in ((many, "tools holds 129 tools"), ([TOOL, TOOL], "two have the same name")):
        for address in ("/tokenize", CHAT):
            status, _, text = server.ask("POST", address, {"messages": [HELLO], "tools": tools})
            assert status == 400 and words in text, (address, text)


# -- fields of vLLM ----------------------------------------------------------------------------------------------------

DEFAULTS = {
    "logprob_token_ids": [], "ec_transfer_params": {}, "watermarking": False, "return_prompt_text": False,
    "return_weight_versions": False, "routed_experts_prompt_start": 0, "thinking_token_budget": -1,
}  # fmt: skip
NO_EFFECT = {
    "session_id": "s", "stream_interval": 4, "truncation_side": "left", "return_token_offsets": True,
    "mm_payload": "none", "return_mm_kwargs": True,
}  # fmt: skip
REFUSED = {
    "logprob_token_ids": [5], "ec_transfer_params": {"a": 1}, "watermarking": True, "return_prompt_text": True,
    "return_weight_versions": True, "routed_experts_prompt_start": 1, "thinking_token_budget": 10,
}  # fmt: skip


@pytest.mark.parametrize("address", [CHAT, COMPLETIONS])
def test_fields_that_vllm_has_besides(address, server):
    plain = asked(server, address)[1]["choices"]
    assert asked(server, address, **DEFAULTS)[1]["choices"] == plain
    assert asked(server, address, **NO_EFFECT)[1]["choices"] == plain
    for name, value in REFUSED.items():
        status, answer = asked(server, address, **{name: value})
        assert status == 400 and answer["error"]["param"] == name, answer
