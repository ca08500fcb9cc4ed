"""JSON schemas: what a grammar made of one allows is valid, also at the edges of numbers."""

import json
import random
from decimal import Decimal

import jsonschema
import pytest
from door_folders import byte_tokenizer
from llguidance import LLMatcher
from tiers import examples

from workbench.engine.grammar_form import grammar_of
from workbench.engine.grammar_process import make_tokenizer

END, SIZE = 257, 300
EXACT = 2**53


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer({"serialized": byte_tokenizer().to_str(), "size": SIZE, "ends": [END]})


def allows(tokenizer, schema, text):
    matcher = LLMatcher(tokenizer, grammar_of("json", json.dumps(schema)), log_level=0)
    tokens = [*tokenizer.tokenize_str(text), END]
    return not matcher.is_error() and matcher.validate_tokens(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("schema", "valid", "not_valid"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.1", "0.499"], ["0", "0.0", "0.5"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "-0"]),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3.25}, ["3.1", "3.25"], ["3", "3.0", "3.3"]),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, ["-0.1", "-0.5"], ["0", "-0", "-0.0"]),
        ({"type": "number", "exclusiveMaximum": -2, "exclusiveMinimum": -2.5}, ["-2.1"], ["-2", "-2.0", "-2.5"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.2", "null"], ["1", "1.5"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, ["1", "0.5"], ["0", "2"]),
        ({"type": "integer", "minimum": EXACT + 1}, [str(EXACT + 2)], [str(EXACT)]),
        ({"type": "integer", "exclusiveMinimum": EXACT}, [str(EXACT + 2)], [str(EXACT)]),
        ({"type": "integer", "exclusiveMaximum": -EXACT}, [str(-EXACT - 2)], [str(-EXACT)]),
        ({"type": "integer", "exclusiveMinimum": 1e16}, [str(10**16 + 2)], [str(10**16)]),
        ({"type": "integer", "exclusiveMaximum": -1e16}, [str(-(10**16) - 2)], [str(-(10**16))]),
        ({"exclusiveMaximum": 1e16}, [str(10**16 - 2), "null"], [str(10**16)]),
        ({"type": "integer", "maximum": EXACT + 1}, [str(EXACT)], [str(EXACT + 2)]),
        ({"type": "integer", "maximum": EXACT - 1}, [str(EXACT - 1)], [str(EXACT)]),
        ({"const": EXACT}, [str(EXACT)], [str(EXACT + 1)]),
        ({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "null"], ["0", "0.6"]),
        ({"type": ["integer", "string"], "minimum": EXACT + 1}, [str(EXACT + 2), '"a"'], [str(EXACT)]),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1", "0.5"], ["0", "0.6"]),
        (
            {"$ref": "#/$defs/p", "maximum": 0.5, "$defs": {"p": {"type": "number", "exclusiveMinimum": 0}}},
            ["0.1", "0.5"],
            ["0", "0.6"],
        ),
        (
            {
                "anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}],
                "maximum": 0.5,
                "$defs": {"p": {"type": "number", "exclusiveMinimum": 0}},
            },
            ["0.1", "null"],
            ["0", "0.6"],
        ),
        (
            {"oneOf": [{"type": "number", "maximum": 0.5}, {"type": "string"}], "exclusiveMinimum": 0},
            ["0.1", '"a"'],
            ["0", "0.6"],
        ),
    ],
    ids=str,
)
def test_bounds_are_kept(schema, valid, not_valid, tokenizer):
    judge = jsonschema.Draft202012Validator(schema)
    for text in (*valid, *not_valid):
        assert judge.is_valid(json.loads(text)) is (text in valid)
        assert allows(tokenizer, schema, text) is (text in valid), text


@pytest.mark.parametrize("schema", [{"const": EXACT + 1}, {"enum": [1, [{"a": -EXACT - 1}]]}])
def test_constants_that_a_double_cannot_hold_are_refused(schema):
    with pytest.raises(ValueError, match=r"#/properties/a/(const|enum) is not supported: integers beyond 2\*\*53"):
        grammar_of("json", json.dumps({"properties": {"a": schema}}))


def random_bounds(draw):
    schema = {"type": draw.choice(["number", "integer"])}
    near = [draw.randint(-3, 3), round(draw.uniform(-3, 3), draw.choice([1, 2]))]
    far = [EXACT + draw.randint(-2, 2), -EXACT + draw.randint(-2, 2), 10**17 + draw.randint(0, 50)]
    for word in draw.sample(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"], draw.randint(1, 3)):
        schema[word] = draw.choice([*near, *near, *far])
    return schema


def scattered(draw, schema):
    """The schema with its words in several places that hold together: allOf, $ref, and beside anyOf and oneOf."""
    parts, definitions = {}, {}
    for word, value in schema.items():
        place = draw.choice(["here", "all", "all", "ref", "any", "deep"])
        parts.setdefault(place, {})[word] = value
    made = parts.get("here", {})
    if "all" in parts:
        made["allOf"] = [{word: value} for word, value in parts["all"].items()]
    if "ref" in parts:
        definitions["small"] = parts["ref"]
        reference = {"$ref": "#/$defs/small"}
        made = {**made, **reference} if draw.random() < 0.5 else {**made, "allOf": [*made.get("allOf", []), reference]}
    if "any" in parts:
        made[draw.choice(["anyOf", "oneOf"])] = [parts["any"], {"type": "string"}]
    if "deep" in parts:
        definitions["deep"] = {"allOf": [{"$ref": "#/$defs/deeper"}]}
        definitions["deeper"] = {"anyOf": [parts["deep"]]}
        made["allOf"] = [*made.get("allOf", []), {"$ref": "#/$defs/deep"}]
    return {**made, "$defs": definitions} if definitions else made


@pytest.mark.parametrize(
    ("word", "value", "inside"), [("exclusiveMaximum", 10**17 + 50, 10**17), ("exclusiveMinimum", -(10**17) - 50, 0)]
)
def test_an_excluded_integer_that_is_the_shortest_text_of_a_double_is_not_allowed(tokenizer, word, value, inside):
    """The double itself is inside: 100000000000000048."""
    schema = {"type": "number", word: value}
    assert int(float(value)) != value == Decimal(repr(float(value)))
    assert allows(tokenizer, schema, str(inside)) and not allows(tokenizer, schema, str(value))


@pytest.mark.parametrize("scatters", [False, True])
def test_no_number_beyond_a_bound_is_allowed(tokenizer, scatters):
    draw = random.Random(50)
    for _ in range(examples(300 if scatters else 150)):
        schema = random_bounds(draw)
        bounds = [bound for bound in schema.values() if not isinstance(bound, str)]
        schema = scattered(draw, schema) if scatters else schema
        judge = jsonschema.Draft202012Validator(schema)
        texts = {str(int(bound) + step) for bound in bounds for step in range(-2, 3)} | {"0", "-0", "0.0", "-0.0"}
        texts |= {f"{bound + step:.3f}" for bound in bounds if abs(bound) < 9 for step in (-0.5, -0.001, 0, 0.001, 0.5)}
        for text in sorted(texts):
            assert judge.is_valid(json.loads(text)) or not allows(tokenizer, schema, text), (schema, text)


def random_schema(draw, depth=0):
    kinds = ["string", "number", "choice", "boolean", "format", "pattern"]
    match draw.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "any of", "null"]):
        case "string":
            return {"type": "string", "minLength": 1, "maxLength": draw.randint(1, 4), "x-note": {"not": 1}}
        case "number":
            return random_bounds(draw)
        case "choice":
            return {"enum": draw.sample([1, "a", None, True, {"a": [0.5]}, "<sop>", EXACT], 3)}
        case "format":
            return {"type": "string", "format": draw.choice(["date", "ipv4", "path"]), "maxLength": 12}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[ab]{2}$", "^x", "^(a|é)+$"]), "maxLength": 5}
        case "object":
            names = draw.sample(["a", "b", "é", "not", "<think>"], draw.randint(0, 3))
            schema = {"type": "object", "properties": {name: random_schema(draw, depth + 1) for name in names}}
            return {**schema, "required": names[:2], "additionalProperties": False}
        case "array":
            return {"type": "array", "items": random_schema(draw, depth + 1), "minItems": 1, "maxItems": 3}
        case "any of":
            return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def finished(tokenizer, schema, draw):
    """An output of a random model under a schema; None if it does not end, or nothing fits."""
    matcher = LLMatcher(tokenizer, grammar_of("json", json.dumps(schema)), log_level=0)
    tokens, spaces = [], set(tokenizer.tokenize_str(" \n\r\t"))
    for _ in range(400):
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]
        allowed = [token for token in allowed if token not in spaces] or allowed
        if matcher.is_error() or not allowed:
            return None
        token = END if END in allowed and draw.random() < 0.5 else draw.choice(allowed)
        if token == END:
            return json.loads(tokenizer.decode_bytes(tokens))
        matcher.consume_token(token)
        tokens.append(token)
    return None


def test_finished_outputs_of_random_schemas_are_valid(tokenizer):
    draw, num_finished = random.Random(51), 0
    for _ in range(count := examples(120)):
        schema = random_schema(draw)
        output = finished(tokenizer, schema, draw)
        if output is not None:
            jsonschema.validate(output, schema, jsonschema.Draft202012Validator)
            num_finished += 1
    assert num_finished > count / 2


def test_a_schema_in_a_grammar_is_read_as_one_alone(tokenizer):
    """Bounds are kept, unknown formats are annotations, and a word that is not served is refused with its line."""
    schema = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}
    grammar = f"start: a b\na: %json {json.dumps(schema)}\nb: %json {json.dumps({'type': 'string', 'format': 'x'})}"
    for text, fits in {'0.1"b"': True, '0"b"': False, '0.5"b"': False}.items():
        matcher = LLMatcher(tokenizer, grammar_of("grammar", grammar), log_level=0)
        tokens = [*tokenizer.tokenize_str(text), END]
        assert (matcher.validate_tokens(tokens) == len(tokens)) is fits, text
    with pytest.raises(ValueError, match=r"at 3\(1\): #/not is not supported"):
        grammar_of("grammar", grammar.replace('"format"', '"not"'))
