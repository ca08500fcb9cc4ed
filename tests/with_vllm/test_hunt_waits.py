"""Requests of vLLM that wait for a grammar or for KV from elsewhere are driven without either."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)

from workbench.analysis.hunt.drive import Run
from workbench.analysis.hunt.vllm_scheduler import VllmScheduler
from workbench.analysis.hunt.vllm_waits import any_tokens

CONFIG = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 4, "num_blocks": 32, "max_model_len": 64}


def chunks_of(request, **config):
    """(step, start, number of tokens) of each chunk of a request that is alone."""
    scheduler = VllmScheduler({**CONFIG, **config})
    seen = []

    class Watch:
        added = updated = staticmethod(lambda *_: None)

        def scheduled(self, run, plan):
            seen.extend((plan.step, chunk.start, chunk.num_tokens) for chunk in plan.chunks)

    workload = {
        "config": {**CONFIG, **config},
        "requests": [{"id": "a", "prompt": {"len": 10}, "max_tokens": 1, **request}],
    }
    assert Run(scheduler, workload, Watch()).drive(40) == "done"
    scheduler.close()
    return seen


@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}])
def test_a_request_waits_for_its_grammar(config):
    assert chunks_of({}, **config) == [(0, 0, 10)]
    assert chunks_of({"grammar": {"ready_step": 5}}, **config) == [(5, 0, 10)]


def test_the_grammar_is_one_of_vllm_s():
    """Releases up to 0.29 assert it when a token comes in."""
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    grammar = any_tokens()
    assert isinstance(grammar, StructuredOutputGrammar)
    assert grammar.accept_tokens("a", [1, 2]) and grammar.validate_tokens([1, 2]) == [1, 2]
    assert not grammar.is_terminated()


@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}])
def test_kv_comes_from_elsewhere_or_fails(config):
    (step, start, count), *_ = chunks_of({"remote": {"num_tokens": 8, "num_steps": 3}}, **config)
    assert step >= 3 and (start, count) == (8, 2)
    assert chunks_of({"remote": {"num_tokens": 8, "num_steps": 0}}, **config) == [(0, 8, 2)]
    (step, start, count), *_ = chunks_of({"remote": {"num_tokens": 8, "num_steps": 3, "fails": True}}, **config)
    assert step >= 3 and (start, count) == (0, 10)


def test_a_request_waits_for_a_slot_of_its_adapter():
    """Its reason is told, so that no law asks why others overtake it."""
    config = {**CONFIG, "max_loras": 1}
    scheduler, seen = VllmScheduler(config), []

    class Watch:
        added = updated = staticmethod(lambda *_: None)

        def scheduled(self, run, plan):
            seen.append(({name: reason.kind for name, reason in plan.passed_over.items()}, len(plan.chunks)))

    requests = [{"id": name, "prompt": {"len": 5}, "max_tokens": 2, "adapter": name} for name in "ab"]
    assert Run(scheduler, {"config": config, "requests": requests}, Watch()).drive(40) == "done"
    scheduler.close()
    assert seen[:3] == [({"b": "adapter"}, 1), ({"b": "adapter"}, 1), ({}, 1)]
