"""A step waits for MLX once: its tokens are evaluated together with its logits, and then only read."""

import io

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine.sampler import most_likely_rows, most_likely_tokens

CONFIG = EngineConfig(attention_backend="gather", max_num_batched_tokens=24, num_blocks=64, block_size=8)


def is_evaluated(array):
    """Whether reading the array waits for nothing: an array with values has no operation before it."""
    graph = io.StringIO()
    mx.export_to_dot(graph, x=array)
    return "rectangle" not in graph.getvalue()


def test_the_test_can_tell():
    x = mx.array([1.0, 2.0])
    y = x + 1
    assert is_evaluated(x) and not is_evaluated(y)
    mx.eval(y)
    assert is_evaluated(y)


@pytest.fixture
def waits(monkeypatch):
    """The calls that wait for MLX: evaluations, and reads of arrays that are not evaluated."""
    seen = []
    evaluate = mx.eval

    def counted(*arrays):
        seen.append("eval")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    for name in ("array", "asarray"):
        read = getattr(np, name)

        def watched(value, *arguments, _read=read, **options):
            if isinstance(value, mx.array) and not is_evaluated(value):
                seen.append("read")
            return _read(value, *arguments, **options)

        monkeypatch.setattr(np, name, watched)
    return seen


SAMPLING = {
    "greedy": SamplingParams(max_tokens=5),
    "temperature": SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9),
    "logprobs": SamplingParams(max_tokens=5, logprobs=3),
    "penalties": SamplingParams(max_tokens=5, repetition_penalty=1.2, logit_bias={3: 1.0}),
}


@pytest.mark.parametrize("kinds", [["greedy"], ["temperature"], list(SAMPLING)], ids="-".join)
def test_one_wait_per_step(waits, kinds):
    """Prompt chunks without samples, mixed steps and decodes, whatever is sampled."""
    with Engine(tiny_loaded_model("llama"), CONFIG) as engine:
        for number, kind in enumerate(kinds):
            engine.add_request(list(range(2, 40 + number)), SAMPLING[kind])
        while True:
            waits.clear()
            if (step := engine.step()) is None:
                break
            assert waits == ["eval"] * bool(step.chunks), (step.step, waits)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("fields", "waits_per_step"),
    [
        ({"async_scheduling": True}, 1),
        ({"num_speculative_tokens": 3}, 1),
        ({"num_speculative_tokens": 3, "async_scheduling": True}, 1),
        # A draft depends on the one before, so the draft model's passes cannot share a wait.
        ({"num_speculative_tokens": 3, "speculative": {"method": "draft_model", "num_layers": 1}}, 1 + 3),
    ],
    ids=["async", "drafts", "async and drafts", "draft model"],
)
def test_steps_ahead_wait_no_more_often(waits, fields, waits_per_step, temperature):
    """A step waits once, whatever it verifies, and a draft model once for each of its passes."""
    has_drafts = "num_speculative_tokens" in fields
    proposer = (lambda token_ids, num_drafts: token_ids[:num_drafts]) if has_drafts and waits_per_step == 1 else None
    with Engine(tiny_loaded_model("llama"), CONFIG.replace(**fields), proposer=proposer) as engine:
        sampling = SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True)
        engine.add_request([5, 6, 7, 8] * 8, sampling)
        engine.add_request([9, 8, 7], sampling)
        waits.clear()
        while engine.step() is not None:
            pass
        assert any(chunk.drafts for record in engine.trace for chunk in record.chunks) is has_drafts
        num_steps = sum(bool(record.chunks) for record in engine.trace)
        assert num_steps <= len(waits) <= waits_per_step * num_steps and set(waits) == {"eval"}, waits


@pytest.mark.parametrize("row", [[np.nan, 1.0, 0.0], [-np.inf] * 3, [np.inf, 0.0, 0.0]])
def test_rows_that_cannot_be_sampled(row):
    logits = mx.array([[0.0, 1.0, 2.0], row])
    assert most_likely_rows(logits).tolist() == most_likely_tokens(np.array(logits)).tolist() == [2, -1]
