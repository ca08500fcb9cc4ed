"""Arbitrary arguments for every public entry: it works, or raises as documented, and harms nothing."""

import contextlib
import json
import math

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import examples
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, Trace, simulate
from workbench.apps.cli import main
from workbench.kernels.attention import paged_varlen_attention
from workbench.models.gguf.tokenizer import GGUFTokenizer

FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)
REFUSALS = (ValueError, TypeError)
"""Exceptions that a call may raise for wrong arguments: the named errors of the package are ValueErrors."""

BIG = [2**24, 2**31 - 1, 2**31, 2**63, 2**64, 10**400, -1, -(2**31), -(10**400)]
NUMBERS = st.one_of(st.integers(-2, 70), st.sampled_from(BIG), st.floats())
TEXTS = st.one_of(
    st.text(max_size=6), st.sampled_from(["\0", "\ud800", "\N{REPLACEMENT CHARACTER}", "1", "nan", "fcfs"])
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
OBJECTS = st.sampled_from(
    [
        b"bytes",
        object(),
        len,
        range(3),
        {1, 2},
        np.int64(5),
        np.float32(0.5),
        np.array([1, 2]),
        np.array(3),
        1j,
        EngineConfig,
    ]
)
ANYTHING = st.one_of(JSON, OBJECTS, st.builds(lambda value: mx.array(value), st.lists(st.integers(0, 9), max_size=3)))


# -- configurations --------------------------------------------------------------------------------------------------

CONFIG_FIELDS = list(EngineConfig().to_dict())
SAMPLING_FIELDS = [
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "logprobs", "seed"),
]


@settings(FUZZ, max_examples=examples(200))
@given(st.dictionaries(st.sampled_from([*CONFIG_FIELDS, "nonsense"]), ANYTHING, max_size=4))
def test_engine_config(fields):
    for make in (lambda: EngineConfig(**fields), lambda: EngineConfig.from_dict(fields)):
        with contextlib.suppress(*REFUSALS):
            config = make()
            assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
            repr(config)


@settings(FUZZ, max_examples=examples(200))
@given(
    st.dictionaries(
        st.sampled_from([*SAMPLING_FIELDS, "sampler", "logits_processors", "nonsense"]), ANYTHING, max_size=4
    )
)
def test_sampling_params(fields):
    with contextlib.suppress(*REFUSALS):
        params = SamplingParams(**fields)
        json.dumps(params.non_default())
        assert params.max_tokens >= 1 and math.isfinite(params.temperature)


# -- workloads -------------------------------------------------------------------------------------------------------

WORKLOAD = {
    "config": {"max_num_batched_tokens": 16, "max_num_seqs": 3, "block_size": 4, "num_blocks": 20, "max_model_len": 40},
    "requests": [
        {"id": "a", "prompt": {"len": 10, "seed": "s"}, "max_tokens": 4, "priority": 1},
        {"id": "b", "prompt": {"parts": [{"len": 3, "seed": "s"}, [4, 5]]}, "max_tokens": 3, "arrival_step": 1},
        {"id": "c", "prompt": [3, 4, 5], "max_tokens": 2, "abort_step": 3, "arrival_time": 0.5},
    ],
    "cost_model": {"fixed": 0.01},
}
GENERATED = {
    "config": {"max_num_batched_tokens": 64, "num_blocks": 30, "max_model_len": 200},
    "generate": {
        "num_requests": 5,
        "arrivals": {"process": "poisson", "rate": 10},
        "prompt": {"uniform": [5, 30]},
        "output": 4,
    },
    "cost_model": {"fixed": 0.01},
}


def places(value, path=()):
    """Every place in a JSON value, as a path of keys and indices."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value, path, new):
    """A copy with another value at a place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


# Values that are allowed but slow to simulate, such as pools of millions of blocks, are left out.
SMALL_JSON = JSON.filter(lambda value: value not in (2**24, 2**31 - 1))


@settings(FUZZ, max_examples=examples(150))
@given(st.sampled_from([WORKLOAD, GENERATED]), st.data())
def test_workloads(tmp_path_factory, workload, data):
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(places(workload))))
        workload = changed(workload, path, data.draw(SMALL_JSON))
        if not isinstance(workload, dict):
            break
    path = tmp_path_factory.mktemp("fuzz") / "w.json"
    path.write_text(json.dumps(workload))
    with contextlib.suppress(*REFUSALS):
        trace = simulate(path, max_steps=60)
        assert trace.end in ("done", "stuck", "max_steps")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "is not a JSON file"),
        ('{"requests": [{"id": "a", "prompt": ' + '{"parts": [' * 400 + "]}" * 400 + "}]}", "parts within parts"),
        ('{"requests": [{"id": "a", "prompt": {"parts": [' + ", ".join(['{"len": 10000000}'] * 50) + "]}}]}", "tokens"),
        (
            '{"requests": [' + ", ".join(f'{{"id": "{n}", "prompt": {{"len": 9999999}}}}' for n in range(50)) + "]}",
            "tokens",
        ),
        ('{"requests": [{"id": "a", "prompt": {"len": 1' + "0" * 5000 + "}}]}", "JSON"),
        (b"\xff\xfe", "is not a JSON file"),
    ],
)
def test_small_workloads_that_ask_for_too_much(tmp_path, text, words):
    path = tmp_path / "w.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=words):
        simulate(path)


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    loaded = tiny_loaded_model("llama", vocab_size=262)
    loaded.tokenizer, loaded.vocab_size = GGUFTokenizer(byte_tokenizer(262)), 262
    with Engine(loaded, EngineConfig(block_size=4, num_blocks=40, max_model_len=64)) as made:
        yield made


PROMPTS = st.one_of(
    ANYTHING, st.lists(st.integers(-1, 130), max_size=70), st.lists(ANYTHING, max_size=3), st.text(max_size=70)
)


@settings(FUZZ, max_examples=examples(200))
@given(
    PROMPTS,
    st.one_of(st.none(), ANYTHING),
    st.dictionaries(st.sampled_from(SAMPLING_FIELDS), st.one_of(ANYTHING, st.integers(0, 5)), max_size=3),
    st.one_of(st.none(), ANYTHING),
    st.one_of(st.just(0), ANYTHING),
    st.one_of(st.just(""), ANYTHING),
)
def test_add_request(engine, prompt, sampling, fields, request_id, priority, salt):
    before = len(engine.outputs)
    try:
        name = engine.add_request(prompt, sampling, request_id=request_id, priority=priority, cache_salt=salt, **fields)
    except REFUSALS:
        assert len(engine.outputs) == before, "a rejected request must not be added"
        return
    engine.run(progress=False)
    assert engine.output(name).finish_reason in ("length", "stop", "error")
    engine.forget(name)
    assert engine.scheduler.num_free_blocks == engine.config.num_usable_blocks


@settings(FUZZ, max_examples=examples(60))
@given(ANYTHING)
def test_names_of_requests_and_breakpoints(engine, value):
    for call in (engine.abort, engine.forget, engine.output, engine.capture):
        with contextlib.suppress(*REFUSALS):
            call(value)
    with contextlib.suppress(*REFUSALS):
        engine.breakpoints.remove(engine.break_when(value).number)


# -- attention -------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
Q = mx.array(RNG.standard_normal((5, 4, 8)).astype(np.float32))
K = mx.array(RNG.standard_normal((6, 4, 2, 8)).astype(np.float32))
V = mx.array(RNG.standard_normal((6, 4, 2, 8)).astype(np.float32))
GOOD = {
    "cu_seqlens_q": [0, 3, 5],
    "seqused_k": [7, 2],
    "block_table": [[1, 4], [5, 0]],
    "softmax_scale": 0.3,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "sinks": [0.1, 0.2, 0.3, 0.4],
    "backend": "cpu",
}
INT_LISTS = st.lists(st.one_of(st.integers(-1, 9), st.sampled_from(BIG)), max_size=4)
METADATA = st.one_of(
    ANYTHING,
    st.lists(ANYTHING, min_size=4, max_size=4),
    INT_LISTS,
    st.lists(INT_LISTS, max_size=3),
    INT_LISTS.map(lambda values: np.array([value for value in values if abs(value) < 2**31], np.int32)),
    st.sampled_from([mx.zeros((2, 2), mx.int32), mx.zeros((0,), mx.int32), mx.full((3,), 2**31 - 1, mx.int32)]),
)


@settings(FUZZ, max_examples=examples(200))
@given(
    st.dictionaries(st.sampled_from(sorted(GOOD)), METADATA, min_size=1, max_size=3),
    st.sampled_from(["cpu", "gather", "dense"]),
)
def test_attention_metadata(changes, backend):
    with contextlib.suppress(*REFUSALS):
        out = paged_varlen_attention(Q, K, V, **{**GOOD, "backend": backend, **changes})
        assert out.shape == Q.shape


@settings(FUZZ, max_examples=examples(100))
@given(st.dictionaries(st.sampled_from(["q", "k_cache", "v_cache"]), METADATA, min_size=1))
def test_attention_tensors(changes):
    with pytest.raises(REFUSALS):
        paged_varlen_attention(**{"q": Q, "k_cache": K, "v_cache": V, **GOOD, **changes})


# -- traces and the command line -------------------------------------------------------------------------------------


@settings(FUZZ, max_examples=examples(60))
@given(value=ANYTHING)
def test_paths_of_traces(value, tmp_path_factory):
    trace = simulate({"requests": [{"id": "a", "prompt": [1, 2], "max_tokens": 1}]})
    with contextlib.chdir(tmp_path_factory.mktemp("fuzz")):
        for call in (Trace.load, trace.save, trace.record_to, lambda value: trace[value], trace.pool_state):
            with contextlib.suppress(*REFUSALS, OSError, IndexError):
                call(value)


def test_a_number_is_not_a_path(tmp_path):
    """Not even the number of an open file, which would be read to its end and closed."""
    with open(tmp_path / "open.txt", "w+") as stream:
        with pytest.raises(TypeError):
            Trace.load(stream.fileno())
        stream.write("still open")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of files to name on the command line, good and bad."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "w.json").write_text(json.dumps(WORKLOAD))
    (folder / "g.json").write_text(json.dumps(GENERATED))
    (folder / "bad.json").write_text("[1, 2")
    simulate(WORKLOAD).save(folder / "t.jsonl")
    (folder / "bad.jsonl").write_bytes(b"\x1f\x8b not gzip")
    (folder / "folder").mkdir()
    return folder


WORDS = st.one_of(
    st.sampled_from(
        ["w.json", "g.json", "bad.json", "t.jsonl", "bad.jsonl", "folder", "nowhere/x.jsonl", "", "-", "--"]
    ),
    st.sampled_from(
        ["out.jsonl", "out.html", "out.csv", "out.svg", "0:3", "3:1", "rate=1,2", "max_num_seqs=1,x", "block_size="]
    ),
    st.sampled_from(
        ["--trace", "--cost-from", "--record", "--sweep", "--jobs", "--out", "--plot", "--port", "--model"]
    ),
    st.sampled_from(
        ["--host", "0.0.0.0", "--insecure", "--api-key", "--max-queue", "--num-blocks", "--keep-steps", "--seed"]
    ),
    st.sampled_from(["1", "0", "-1", "99999", "1e9", "nan", "\ud800", "10**400", "1" * 5000]),
    st.text(max_size=5),
)
COMMANDS = [
    ["simulate"],
    ["trace", "info"],
    ["trace", "html"],
    ["trace", "perfetto"],
    ["trace", "diff"],
    ["serve"],
    ["bench"],
    ["demo"],
    [],
]


@settings(FUZZ, max_examples=50)
@given(st.sampled_from(COMMANDS), st.lists(WORDS, max_size=5))
def test_command_line(files, command, words):
    """Exit status 0 or 2. The model cannot be loaded, which ends every command that serves one."""
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(files):
        for module in ("models.load", "models", "engine.engine", "engine.distributed.job"):
            patch.setattr(f"workbench.{module}.load_model", no_model)
        try:
            status = main([*command, *words])
        except SystemExit as end:
            status = end.code
    assert status in (0, 2)


def no_model(*_, **__):
    raise ValueError("no model, planted")


def test_the_fuzzed_calls_work_without_a_change(engine, files, monkeypatch):
    """A negative control: the calls above work before they are changed."""
    assert simulate(WORKLOAD).end == simulate(GENERATED).end == "done"
    assert paged_varlen_attention(Q, K, V, **GOOD).shape == Q.shape
    engine.add_request("the end", max_tokens=3)
    assert engine.run(progress=False)[0].finish_reason in ("length", "stop")
    with contextlib.chdir(files):
        assert main(["trace", "info", "t.jsonl"]) == 0 and main(["simulate", "w.json"]) == 0
