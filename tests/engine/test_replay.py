"""A step of a trace is run again, and what rounding explains is told from a wrong block."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gguf_files import random_model, tiny_config, write_model
from random_adapters import linear_sizes, make_adapter
from tiers import examples
from tiny_models import VOCAB_SIZE, tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, Trace, load_model
from workbench.engine.replay import AS_IT_WAS, WITHOUT_HIT, _config_of, _Replayer
from workbench.kernels.attention.stored import STORED_DTYPES
from workbench.models.packed.int8 import why_no_int8
from workbench.trace import Chunk
from workbench.trace.records import Load

pytestmark = pytest.mark.usefixtures("no_compilation")
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
NUM_CASES = examples(1000, 10)
RECORDED = Path(__file__).parents[1] / "data" / "vllm-recorded"
EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_preemption.jsonl.gz"


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    begin = rng.integers(1, VOCAB_SIZE, 41).tolist()
    return {f"r{i}": begin + rng.integers(1, VOCAB_SIZE, 5 + 3 * i).tolist() for i in range(4)}


def recorded(loaded, *, seed=0, params=PARAMS, folders=(), **changes):
    """A trace whose later requests find the prefix of the first; every other one has the next of some adapters."""
    settings = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 100, "max_model_len": 200, **changes}
    with Engine(loaded, EngineConfig(attention_backend="cpu", **settings)) as engine:
        for name, folder in dict(folders).items():
            engine.add_adapter(name, folder)
        names = ["", *dict(folders)]
        for index, (name, tokens) in enumerate(prompts(seed).items()):
            engine.add_request(tokens, params, request_id=name, adapter=names[index % len(names)])
            engine.step()
        engine.run(progress=False)
        return engine.trace


@pytest.fixture(scope="module")
def llama():
    return tiny_loaded_model("llama")


@pytest.fixture(scope="module")
def trace(llama):
    return recorded(llama)


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 14}, {"num_speculative_tokens": 2}, {"async_scheduling": True}])
def test_a_right_step_differs_by_rounding_alone(llama, changes, tmp_path):
    trace = recorded(llama, **changes)
    trace.save(tmp_path / "trace.jsonl.gz")
    trace, hits = Trace.load(tmp_path / "trace.jsonl.gz"), 0
    for record in list(trace)[::3]:
        if not record.chunks:
            continue
        replayed = trace.replay(record.step, llama)
        assert not replayed.wrong, replayed
        assert len(replayed.partings) == 3 * len(record.chunks) and replayed.of(record.chunks[0].request_id)
        for parting in replayed.partings:
            assert parting.token_id == parting.alone_token_id and parting.logits_error < 1e-4
            chunk = record.chunk(parting.request_id)
            if not chunk.drafts and parting.recorded_token_id is not None and not chunk.discarded:
                assert parting.token_id == parting.recorded_token_id and parting.recorded_gap == 0
            else:
                assert parting.recorded_gap is None
        assert not replayed.other_tokens
        hits += sum(chunk.num_cached_tokens for chunk in record.chunks)
    assert "rounding" in str(replayed) or "equal to the last bit" in str(replayed)


def test_a_recorded_token_that_rounding_does_not_explain_is_named(llama, trace, tmp_path):
    """As if the recorded engine had computed other numbers, or the request had been sampled."""
    record = next(r for r in trace if len(r.chunks) > 1 and all(chunk.is_decode for chunk in r.chunks))
    first, second = (chunk.request_id for chunk in record.chunks[:2])
    trace.save(tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    (line,) = (line for line in lines if line["kind"] == "step" and line.get("step", 0) == record.step)
    place = Chunk.__struct_fields__.index("sampled")
    line["chunks"][0][place] = (record.chunks[0].sampled + 1) % VOCAB_SIZE
    (tmp_path / "changed.jsonl").write_text("\n".join(map(json.dumps, lines)))
    replayed = Trace.load(tmp_path / "changed.jsonl").replay(record.step, llama)
    (other,) = replayed.other_tokens
    assert other.request_id == first and other.way == AS_IT_WAS and other.recorded_gap > 2 * other.bound
    assert f"(recorded: {other.recorded_token_id}, {other.recorded_gap:.1e} below it)" in str(other)
    assert all(parting.recorded_gap == 0 for parting in replayed.of(second)) and not replayed.wrong


BOUNDS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, "int8_per_token_head": 0.5}


@pytest.mark.parametrize("kv_cache_dtype", STORED_DTYPES)
def test_a_narrow_pool_has_its_own_bound_and_no_false_alarm(llama, kv_cache_dtype):
    """Codes are compared as the numbers they stand for: a scale's last bit is large in a byte and small in these."""
    is_coded = kv_cache_dtype == "int8_per_token_head"
    num_partings = num_partings_without_alarm(
        llama, kv_cache_dtype, 0, slice(None, None, 2) if is_coded else slice(6, 7)
    )
    assert num_partings > (50 if is_coded else 8)


@pytest.mark.repeats(of="test_a_narrow_pool_has_its_own_bound_and_no_false_alarm")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_codes_of_other_prompts_make_no_false_alarm(llama, seed):
    assert num_partings_without_alarm(llama, "int8_per_token_head", seed, slice(None, None, 2)) > 50


def num_partings_without_alarm(loaded, kv_cache_dtype, seed, steps):
    """The number of comparisons in a trace's steps, none of which finds a fault."""
    trace, num_partings = recorded(loaded, kv_cache_dtype=kv_cache_dtype, seed=seed), 0
    for record in list(trace)[steps]:
        replayed = trace.replay(record.step, loaded)
        assert not replayed.wrong and not replayed.other_tokens, replayed
        assert {parting.bound for parting in replayed.partings} == {BOUNDS[kv_cache_dtype]}
        num_partings += len(replayed.partings)
    return num_partings


@pytest.mark.usefixtures("smollm2")
@pytest.mark.skipif(bool(why_no_int8()), reason=why_no_int8())
def test_activations_of_8_bits_make_no_false_alarm():
    """A last bit of an input changes its codes, and after some layers many numbers."""
    loaded = load_model("smollm2", activations="int8")
    trace = recorded(loaded)
    for record in list(trace)[4:9:4]:
        replayed = trace.replay(record.step, loaded)
        assert not replayed.wrong and not replayed.other_tokens, replayed


@pytest.mark.skipif(bool(why_no_int8()), reason=why_no_int8())
def test_tokens_of_other_activations_are_not_judged(tmp_path):
    config = tiny_config("llama")
    write_model(tmp_path / "m.gguf", "llama", config, random_model(config), matrix_type="Q4_0")
    loaded = load_model(tmp_path / "m.gguf", activations="int8")
    trace = recorded(loaded)
    for model, is_judged in ((loaded, True), (load_model(tmp_path / "m.gguf"), False)):
        gaps = [parting.recorded_gap for parting in trace.replay(8, model).partings]
        assert len(gaps) == 12 and [gap is not None for gap in gaps] == [is_judged] * 12


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 2.0},
        {"logit_bias": {5: 100.0}},
        {"presence_penalty": 2.0, "repetition_penalty": 3.0},
        {"logits_processors": [lambda tokens, logits: -logits]},
        {"sampler": lambda logits: (-logits).argmax(-1)},
    ],
)
def test_a_token_that_need_not_be_the_most_likely_is_not_judged(llama, params, tmp_path):
    trace = recorded(llama, params=replace(PARAMS, **params))
    trace.save(tmp_path / "trace.jsonl")
    for one in (trace, Trace.load(tmp_path / "trace.jsonl")):
        replayed = one.replay(8, llama)
        assert not replayed.other_tokens and not replayed.wrong
        assert all(parting.recorded_gap is None for parting in replayed.partings)


def test_a_trace_with_adapters_is_replayed_with_them(llama, tmp_path):
    sizes = linear_sizes(llama.model)
    folders = {name: make_adapter(tmp_path / name, sizes, seed=i) for i, name in enumerate(("legal", "poems"))}
    trace = recorded(llama, folders=folders)
    assert {info.adapter for info in trace.requests.values()} == {"", *folders}
    for record in list(trace)[::3]:
        replayed = trace.replay(record.step, llama, adapters=folders)
        assert not replayed.wrong and not replayed.other_tokens, replayed
    step = next(record.step for record in trace if len(record.chunks) == 4)
    swapped = trace.replay(step, llama, adapters=dict(zip(folders, reversed(folders.values()))))
    assert {parting.request_id for parting in swapped.other_tokens} <= {"r1", "r2"} and swapped.other_tokens
    with pytest.raises(ValueError, match="request 'r1' was computed with adapter 'legal', which is not given"):
        trace.replay(step, llama)
    with pytest.raises(ValueError, match="request 'r2' was computed with adapter 'poems'"):
        trace.replay(step, llama, adapters={"legal": folders["legal"]})
    assert trace.replay(0, llama).partings, "a step that no adapter has a part in needs none"


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("name", ["sync/e_shared_prefix", "sync/d_preempt", "async/e_shared_prefix", "async/d_preempt"])
def test_the_blocks_of_a_recorded_vllm_are_right(name):
    """Any model shows it: the same tokens through the recorded block tables, and alone."""
    trace = Trace.load(RECORDED / f"{name}.jsonl.gz")
    loaded = tiny_loaded_model("llama", vocab_size=32_000)
    loaded = replace(loaded, vocab_size=32_000)
    num_replayed = 0
    for record in [record for record in trace if record.chunks][::3]:
        replayed = trace.replay(record.step, loaded)
        assert not replayed.wrong, replayed
        num_replayed += len(replayed.partings)
    assert num_replayed > 6


# -- planted faults --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["auto", "int8_per_token_head"])
def planter(request, llama):
    trace = recorded(llama, kv_cache_dtype=request.param)
    record = next(r for r in trace if len(r.chunks) == 4 and all(chunk.is_decode for chunk in r.chunks))
    replayer = _Replayer(trace, record, llama, _config_of(trace))
    made = list(replayer._partings())  # fills the pool
    assert not [parting for parting in made if parting.is_wrong]
    tables = [[replayer._block_of[block] for block in table] for _, table in replayer._chunks(record)]
    alone = []
    for chunk in record.chunks:
        replayer._compute(replayer._spare, chunk.request_id, chunk.first_position)
        alone.append(replayer._captured(replayer._batch([replayer._spare], [chunk])))
    yield replayer, tables, alone
    replayer._runner.close()


def stale_block(rng, replayer, tables, index):
    """A block has what another block has."""
    place = int(rng.integers(0, replayer._record.chunks[index].first_position // 8))
    block = tables[index][place]
    other = int(rng.choice([b for table in tables for at, b in enumerate(table[:5]) if at != place and b != block]))
    for layer in replayer._runner.kv_cache.layers:
        for cache in (layer.k_cache, layer.v_cache):
            memory = np.asarray(cache)
            memory[block] = memory[other]
    return tables, 0, place


def swapped_table(rng, replayer, tables, index):
    """Two entries of a block table have changed places."""
    a, b = sorted(rng.choice(replayer._record.chunks[index].first_position // 8, 2, replace=False).tolist())
    tables = [list(table) for table in tables]
    tables[index][a], tables[index][b] = tables[index][b], tables[index][a]
    return tables, 0, a


def wrong_position(rng, replayer, tables, index):
    """The row of a request runs at another position; a pool of codes has a wider bound, which hides a shift by 1."""
    narrow = replayer._runner.preflight.bound > 1e-2
    return tables, int(rng.choice([-3, 3] if narrow else [-3, -2, -1, 1, 2, 3])), None


def rounding(rng, replayer, tables, index):
    """Every key and value differs in its last bits."""
    for layer in replayer._runner.kv_cache.layers:
        for cache in (layer.k_cache, layer.v_cache):
            memory = np.asarray(cache)
            if memory.dtype == np.int8:  # the scales
                memory = memory[..., -4:].view(np.float32)
            memory *= 1 + 3e-7 * rng.standard_normal(memory.shape).astype(np.float32)
    return tables, 0, None


def test_planted_faults_are_told_from_rounding(planter):
    replayer, right_tables, alone = planter
    layers, rng = replayer._runner.kv_cache.layers, np.random.default_rng(0)
    kept = [[np.array(cache) for cache in (layer.k_cache, layer.v_cache)] for layer in layers]
    found = dict.fromkeys((stale_block, swapped_table, wrong_position, rounding), 0)
    for number in range(NUM_CASES):
        plant = list(found)[number % 4]
        index = int(rng.integers(len(alone)))
        tables, shift, place = plant(rng, replayer, right_tables, index)
        packed = replayer._batch(tables)
        positions = packed.positions.copy()
        positions[index] += shift
        made = replayer._captured(replace(packed, positions=positions))
        parting = replayer._parting(index, AS_IT_WAS, made, index, alone[index])
        expected = {wrong_position: "wrong row", rounding: "rounding"}.get(plant, "wrong block")
        assert parting.kind == expected and parting.is_wrong == (plant is not rounding), (plant, parting)
        if plant is not rounding:
            chunk = replayer._record.chunks[index]
            assert parting.layer == 0
            assert parting.position // 8 == (chunk.first_position // 8 if place is None else place)
            assert parting.block == replayer._record.block_table(index)[parting.position // 8]
        found[plant] += 1
        for layer, arrays in zip(layers, kept):
            for cache, array in zip((layer.k_cache, layer.v_cache), arrays):
                np.asarray(cache)[:] = array
    assert sum(found.values()) == NUM_CASES and min(found.values()) >= NUM_CASES // 4


def test_a_recording_with_a_wrong_block_is_found(trace, llama, monkeypatch):
    """The trace itself names a block that somebody else has: the replay reads it, and names it."""
    record = next(r for r in trace if len(r.chunks) == 4)
    right = _Replayer._chunks

    def wrong(self, of):
        for index, (chunk, table) in enumerate(right(self, of)):
            if of.step == record.step and index == 2:
                table = [*table[:3], table[4], *table[4:]]
            yield chunk, table

    monkeypatch.setattr(_Replayer, "_chunks", wrong)
    (parting,) = trace.replay(record.step, llama).wrong
    assert (parting.way, parting.kind, parting.layer, parting.position) == (AS_IT_WAS, "wrong block", 0, 24)
    assert parting.request_id == record.chunks[2].request_id and "wrong block from layer 0, position 24" in str(parting)


# -- what cannot be ----------------------------------------------------------------------------------------------


def test_what_a_replay_needs(trace, llama, tmp_path):
    with pytest.raises(ValueError, match=r"step is 99; it must be a step of this trace"):
        trace.replay(99, llama)
    with pytest.raises(ValueError, match=r"has token \d+, and the model 260: give the recorded one"):
        Trace.load(EXAMPLE).replay(0, llama)
    trace.save(tmp_path / "trace.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("prompt_token_ids", None)
    (tmp_path / "without.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match="has no token ids in this trace: record with token_ids=True"):
        Trace.load(tmp_path / "without.jsonl").replay(0, llama)
    with pytest.raises(ValueError, match="begins at step"):
        trace[5:].replay(6, llama)
    with pytest.raises(ValueError, match=r"another model, of .*num_layers 4 instead of 2.*: give the recorded one"):
        trace.replay(6, tiny_loaded_model("llama", num_hidden_layers=2))
    with pytest.raises(ValueError, match="architecture 'llama' instead of 'qwen2'"):
        trace.replay(6, tiny_loaded_model("qwen2"))
    lfm2 = tiny_loaded_model("lfm2")
    with pytest.raises(ValueError, match="KV cache groups"):
        recorded(lfm2).replay(1, lfm2)
    assert WITHOUT_HIT in {parting.way for parting in trace.replay(0, llama).partings}


def changed(trace, path, change):
    """The trace with its lines changed."""
    trace.save(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("\n".join(map(json.dumps, lines)))
    return Trace.load(path)


def test_blocks_that_no_step_of_the_trace_has_written_are_refused(trace, llama, tmp_path):
    load = json.loads(msgspec.json.encode(Load("r1", (), (3,))))

    def loaded(line):
        if line["kind"] == "step" and line.get("step", 0) == 4:
            line["loads"] = [load]

    with_loads = changed(trace, tmp_path / "loads.jsonl", loaded)
    with pytest.raises(ValueError, match="step 4 loaded blocks of 'r1' from the second tier"):
        with_loads.replay(6, llama)
    assert not with_loads.replay(3, llama).wrong

    def windowed(line):
        if line["kind"] == "meta":
            line["config"]["kv_cache_groups"] = [{"kind": "sliding_window", "sliding_window": 16}]

    with pytest.raises(ValueError, match="of kind 'sliding_window', and a replay takes full_attention"):
        changed(trace, tmp_path / "windows.jsonl", windowed).replay(6, llama)


def test_the_tokens_of_a_simulation_are_not_judged(trace, llama, tmp_path):
    def simulated(line):
        if line["kind"] == "meta":
            line["source"] = "simulation"

    replayed = changed(trace, tmp_path / "simulated.jsonl", simulated).replay(6, llama)
    assert all(parting.recorded_gap is None for parting in replayed.partings) and not replayed.wrong
