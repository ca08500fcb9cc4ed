"""A step of a trace is run again, and what rounding explains is told from a wrong block."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiers import examples
from tiny_models import VOCAB_SIZE, tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, Trace
from workbench.engine.replay import AS_IT_WAS, WITHOUT_HIT, _config_of, _Replayer
from workbench.trace import Chunk

pytestmark = pytest.mark.usefixtures("no_compilation")
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
NUM_CASES = examples(1000)
RECORDED = Path(__file__).parents[1] / "data" / "vllm-recorded"
EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_preemption.jsonl.gz"


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    begin = rng.integers(1, VOCAB_SIZE, 41).tolist()
    return {f"r{i}": begin + rng.integers(1, VOCAB_SIZE, 5 + 3 * i).tolist() for i in range(4)}


def recorded(loaded, **changes):
    """A trace whose later requests find the prefix of the first."""
    settings = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 100, "max_model_len": 200, **changes}
    with Engine(loaded, EngineConfig(attention_backend="cpu", **settings)) as engine:
        for name, tokens in prompts().items():
            engine.add_request(tokens, PARAMS, request_id=name)
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


def test_a_half_pool_has_its_own_bound(llama):
    trace = recorded(llama, kv_cache_dtype="float16")
    replayed = trace.replay(6, llama)
    assert not replayed.wrong and {parting.bound for parting in replayed.partings} == {0.1}


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


@pytest.fixture(scope="module")
def planter(trace, llama):
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
    """The row of a request runs at another position."""
    return tables, int(rng.choice([-3, -2, -1, 1, 2, 3])), None


def rounding(rng, replayer, tables, index):
    """Every key and value differs in its last bits."""
    for layer in replayer._runner.kv_cache.layers:
        for cache in (layer.k_cache, layer.v_cache):
            memory = np.asarray(cache)
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
    lfm2 = tiny_loaded_model("lfm2")
    with pytest.raises(ValueError, match="KV cache groups"):
        recorded(lfm2).replay(1, lfm2)
    assert WITHOUT_HIT in {parting.way for parting in trace.replay(0, llama).partings}
