"""The engine's option that checks the laws after every step."""

import logging

import pytest

from workbench import Engine, SamplingParams
from workbench.scheduler.checked import CheckedScheduler
from workbench.scheduler.kv_cache_manager import KVCacheManager
from workbench.scheduler.scheduler import Scheduler

PROMPTS = [list(range(3, 3 + length)) for length in (5, 23, 11, 40)]


@pytest.mark.parametrize("fields", [{}, {"async_scheduling": True}, {"num_speculative_tokens": 2}])
def test_an_engine_that_is_checked_keeps_the_laws(tiny_llama, fields):
    engine = Engine(tiny_llama, check_laws=True, num_blocks=40, block_size=4, max_num_batched_tokens=16, **fields)
    with engine:
        for prompt in PROMPTS:
            engine.add_request(prompt, SamplingParams(max_tokens=6))
        engine.run(progress=False)
        assert type(engine.scheduler) is CheckedScheduler
        assert engine.broken_laws == [] and engine.trace.check() == []


def test_a_broken_law_is_logged_and_kept(tiny_llama, monkeypatch, caplog):
    monkeypatch.setattr(KVCacheManager, "free", lambda self, request, keep_cached=True: None)
    with Engine(tiny_llama, check_laws=True, num_blocks=40) as engine, caplog.at_level(logging.ERROR, "workbench"):
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=2))
        engine.run(progress=False)
        assert {broken.law for broken in engine.broken_laws} == {"blocks"}
        assert "a law is broken: step 1: blocks" in caplog.text


def test_by_default_nothing_is_checked(tiny_llama):
    with Engine(tiny_llama, num_blocks=40) as engine:
        assert type(engine.scheduler) is Scheduler and engine.broken_laws == []
