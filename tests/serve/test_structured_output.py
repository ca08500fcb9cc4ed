"""Structured output over HTTP, as OpenAI's client and vLLM's users ask for it."""

import copy
import json
import random

import jsonschema
import pytest
from random_grammars import HOSTILE, random_constraint
from serve_helpers import ServerProcess
from tiers import examples

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def server():
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 4, "num_blocks": 400, "max_model_len": 256}
    process = ServerProcess(letters=True, template=TEMPLATE, engine=engine)
    yield process
    process.end()


def ask(server, **body):
    """Status and answer of a completion."""
    status, _, text = server.ask("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 60, **body})
    return status, json.loads(text)


@pytest.mark.repeats(of="test_required_calls_obey_the_tools_schemas")
def test_openais_client_gets_what_its_schema_says(server):
    client = server.openai()
    messages = [{"role": "user", "content": "abc"}]
    for seed in range(4):
        options = {"model": "tiny-llama", "messages": messages, "seed": seed, "response_format": NAMED}
        answer = client.chat.completions.create(**options, max_tokens=100)
        streamed = client.chat.completions.create(**options, max_tokens=100, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert text == answer.choices[0].message.content
        if answer.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert text.lstrip().startswith("{")


def test_vllms_words(server):
    status, answer = ask(server, structured_outputs={"choice": ["abc", "xyz"]})
    assert status == 200 and answer["choices"][0]["text"] in ("abc", "xyz")
    assert answer["choices"][0]["finish_reason"] == "stop"
    status, answer = ask(server, structured_outputs={"regex": "[0-9]{4}"}, n=3, seed=1)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) > 1 and all(len(text) == 4 and text.isdigit() for text in texts)
    status, answer = ask(server, structured_outputs={"grammar": 'start: "(" start ")" | "x"'}, temperature=0)
    assert status == 200 and set(answer["choices"][0]["text"]) <= set("()x")
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        status, answer = ask(server, structured_outputs={"json": schema}, max_tokens=4)
        assert status == 200 and answer["choices"][0]["text"].lstrip().startswith("{")
    status, answer = ask(server, response_format={"type": "json_object"}, max_tokens=4)
    assert status == 200 and answer["choices"][0]["text"].lstrip().startswith("{")
    assert ask(server, response_format={"type": "text"}, max_tokens=2)[0] == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "and with no other"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": NAMED, "structured_outputs": {"regex": "a"}}, "give one of them"),
        (
            {
                "structured_outputs": {
                    "regex": "(",
                }
            },
            "invalid regex",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "must hold one of"),
        ({"structured_outputs": {"pattern": "a"}}, "unknown field"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "Invalid type"),
        ({"structured_outputs": {"json": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_mistakes_are_answered_with_the_field(server, body, message):
    status, answer = ask(server, **body)
    assert status == 400 and message in answer["error"]["message"], answer


def mutated(rng, value):
    """A JSON value with one thing changed."""
    value = copy.deepcopy(value)
    places = [(None, None)]

    def collect(holder):
        keys = holder if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in list(keys):
            places.append((holder, key))
            collect(holder[key])

    collect(value)
    holder, key = rng.choice(places)
    odd = [
        None,
        0,
        -1,
        1e400,
        "",
        "(",
        "\\",
        "\ud800",
        [],
        {},
        [[]],
        True,
        "a" * 300,
        {"$ref": "#"},
        {"type": "x"},
        2**70,
    ]
    new = rng.choice(odd)
    if holder is None:
        return new
    if isinstance(holder[key], str) and holder[key] and rng.random() < 0.6:
        text = holder[key]
        at = rng.randrange(len(text))
        new = (
            text[:at]
            + rng.choice(["", "(", ")", "[", "{", "*", "\\", "|", '"', "\0", "é", "{9999999}"])
            + text[at + 1 :]
        )
    elif isinstance(holder, dict) and rng.random() < 0.3:
        holder[rng.choice(["$ref", "type", "items", "allOf", "pattern", "x"])] = holder.pop(key)
        return value
    holder[key] = new
    return value


def test_mutated_constraints_are_served_or_refused_by_name(server):
    rng = random.Random("mutated constraints")
    statuses = []
    for _ in range(examples(500)):
        body = {"structured_outputs": random_constraint(rng)}
        if "json" in body["structured_outputs"] and rng.random() < 0.5:
            body = {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": body["structured_outputs"]["json"]},
                }
            }
        for _ in range(rng.randint(1, 3)):
            body = mutated(rng, body) if isinstance(body, dict) else body
        status, answer = ask(server, **(body if isinstance(body, dict) else {"structured_outputs": body}), max_tokens=3)
        assert status in (200, 400, 404), (status, body, answer)
        assert status == 200 or answer["error"]["message"]
        statuses.append(status)
    assert statuses.count(400) > len(statuses) // 5 and statuses.count(200) > len(statuses) // 10
    assert ask(server, max_tokens=2)[0] == 200


def test_hostile_grammars_do_not_hold_up_others(server):
    import threading
    import time

    longest, done = [0.0], threading.Event()

    def others():
        while not done.is_set():
            started = time.monotonic()
            assert server.ask("GET", "/health")[0] == 200
            longest[0] = max(longest[0], time.monotonic() - started)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for name, constraint in HOSTILE.items():
            status, answer = ask(server, structured_outputs=constraint, max_tokens=3)
            assert status in (200, 400), (name, answer)
    finally:
        done.set()
        thread.join()
    assert ask(server, max_tokens=2)[0] == 200
    assert longest[0] < 30
