"""Cache salts of an engine's requests: who shares blocks with whom, against the rule and against a simulation."""

import pytest

from workbench import Engine, EngineConfig, simulate
from workbench.base.cache_salt import MAX_SALT

CONFIG = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4, "num_blocks": 64, "max_model_len": 64}
PROMPT = [5, 9, 33, 17, 8, 6, 7, 41, 12, 30]
SALTS = ["", "a", "", "b", "a", "b", "a" * MAX_SALT, ""]


@pytest.fixture
def engine(tiny_llama):
    with Engine(tiny_llama, EngineConfig(**CONFIG)) as made:
        yield made


def test_only_requests_with_the_same_salt_share_blocks(engine):
    first = {}
    for salt in SALTS:
        name = engine.add_request(PROMPT, max_tokens=1, cache_salt=salt)
        record = engine.step()
        full_blocks = record.block_tables[name][:2]
        assert record.chunk(name).num_cached_tokens == (8 if salt in first else 0)
        assert full_blocks == first.setdefault(salt, full_blocks)
        assert engine.trace.requests[name].cache_salt == salt
    assert len({block for blocks in first.values() for block in blocks}) == 2 * len(first)


def test_block_ids_are_those_of_a_simulation(engine):
    for number, salt in enumerate(SALTS):
        engine.add_request(PROMPT[: 4 + number], max_tokens=3, ignore_eos=True, cache_salt=salt)
        if number % 3 == 2:
            engine.run(progress=False)
    engine.run(progress=False)
    assert sum(chunk.num_cached_tokens for record in engine.trace for chunk in record.chunks) >= 12
    requests = [
        {"id": info.request_id, "prompt": list(info.prompt_token_ids), "max_tokens": 3, "cache_salt": info.cache_salt,
         "arrival_step": info.arrival_step}
        for info in engine.trace.requests.values()
    ]  # fmt: skip
    simulated = simulate({"config": CONFIG, "requests": requests})
    assert [record.block_tables for record in engine.trace] == [record.block_tables for record in simulated]


@pytest.mark.parametrize("salt", [None, 1, b"a", "a" * (MAX_SALT + 1)])
def test_a_salt_is_a_short_string(engine, salt):
    with pytest.raises(ValueError, match=f"cache_salt must be a string of 0 to {MAX_SALT} characters, got "):
        engine.add_request(PROMPT, cache_salt=salt)
    assert not engine.outputs
