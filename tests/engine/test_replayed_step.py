"""Decode steps replay a recorded graph: the same tokens and logits, keys and values in place, one wait per step."""

import gc
import weakref

import mlx.core as mx
import numpy as np
import pytest
from kernel_in_mlx import MetalInMlx
from word_llama import make_tiny_llama

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine import model_runner
from workbench.engine.forward import replayed
from workbench.models.preflight import preflight

PROMPTS = [[(7 * row + column) % 50 for column in range(3 + 5 * row)] for row in range(4)]


BACKEND = MetalInMlx()


@pytest.fixture(scope="module")
def result():
    """The preflight's, which is the same for every model of `make_tiny_llama`."""
    return preflight(make_tiny_llama().model, BACKEND)


@pytest.fixture
def metal(monkeypatch, result):
    """Engines run the backend of an Apple GPU, as MLX operations."""
    monkeypatch.setattr(model_runner, "_tried_backend", lambda model, config: (BACKEND, result, ""))


def make_engine(**config):
    return Engine(make_tiny_llama(), EngineConfig(num_blocks=64, block_size=8, max_num_seqs=4, **config))


def run(engine, max_tokens=30):
    """Output tokens, and the logits of each step."""
    logits = []
    forward = engine.runner.forward
    engine.runner.forward = lambda packed: logits.append(forward(packed)) or logits[-1]
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens - index, ignore_eos=True))
    outputs = engine.run()
    return {output.request_id: output.token_ids for output in outputs}, [of_step.rows for of_step, _ in logits]


def test_replayed_steps_equal_steps_built_layer_by_layer(metal):
    """Over crossings of blocks, wider tables, and a batch that shrinks."""
    replaying, building = make_engine(), make_engine()
    building.runner.path = building.runner.watched_path
    tokens, logits = run(replaying)
    expected_tokens, expected = run(building)
    assert tokens == expected_tokens
    assert len(logits) == len(expected)
    for ours, theirs in zip(logits, expected):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    step = replaying.runner.path
    assert step.not_replayed == "" and 1 <= step.num_recorded < len(logits) / 3


def test_keys_and_values_are_written_in_place(metal):
    """A step's peak of memory would rise by a pool's array if the array were copied."""
    engine = Engine(make_tiny_llama(), EngineConfig(num_blocks=2048, block_size=16, max_num_seqs=4))
    array = engine.runner.kv_cache.arrays[0].nbytes
    peaks = []
    forward = engine.runner.forward

    def watched(packed):
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        logits = forward(packed)
        peaks.append(mx.get_peak_memory() - active)
        return logits

    engine.runner.forward = watched
    engine.add_request(PROMPTS[1], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.run()
    assert engine.runner.path.num_recorded == 1
    assert max(peaks[1:]) < array / 4


def test_a_replayed_step_evaluates_once(metal, monkeypatch):
    engine = make_engine()
    calls = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: calls.append(len(engine.trace)) or evaluate(*arrays))
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.run()
    assert engine.runner.path.num_recorded == 1
    # Steps 3 and 4 record a graph and replay it for the first time: both are computed layer by layer too, the second
    # also far from the start, and then once more where it is.
    assert [calls.count(step) for step in range(len(engine.trace))] == [1, 1, 1, 2, 7, 1, 1, 1, 1]


def test_a_replaced_weight_takes_effect(metal):
    """Weights are inputs of the graph."""
    texts = []
    for replays in (True, False):
        engine = make_engine()
        if not replays:
            engine.runner.path = engine.runner.watched_path
        rid = engine.add_request(PROMPTS[1], SamplingParams(max_tokens=16, ignore_eos=True))
        for _ in range(7):
            engine.step()
        embedding = engine.runner.model.model.embed_tokens
        embedding.weight = embedding.weight[::-1] * 1.5
        texts.append(next(output for output in engine.run() if output.request_id == rid).token_ids)
    unchanged = make_engine()
    unchanged.add_request(PROMPTS[1], SamplingParams(max_tokens=16, ignore_eos=True))
    assert texts[0] == texts[1] != unchanged.run()[0].token_ids


def test_a_graph_with_values_of_its_recording_is_noticed(metal, monkeypatch):
    """Here positions are a constant of the graph; every later step would have those of the recorded one."""
    expected, _ = run(make_engine(), max_tokens=12)
    forward = replayed._Recorder.forward

    def with_constant(self, token_ids, positions, rows, metadata):
        return forward(self, token_ids, mx.array(self.metadata[0].seqused_k - 1), rows, metadata)

    monkeypatch.setattr(replayed._Recorder, "forward", with_constant)
    engine = make_engine()
    tokens, _ = run(engine, max_tokens=12)
    assert "logits differ" in engine.runner.path.not_replayed
    assert tokens == expected


def test_a_graph_that_is_wrong_far_from_the_start_is_noticed(metal, monkeypatch):
    """No step of the run comes near the position from which this graph is wrong."""
    expected, _ = run(make_engine(), max_tokens=12)
    record, forward = replayed._Recorder.__call__, replayed._Recorder.forward
    recording = []

    def recorded(self, *arguments):
        recording.append(self)
        try:
            return record(self, *arguments)
        finally:
            recording.pop()

    def limited(self, token_ids, positions, rows, metadata):
        return forward(self, token_ids, mx.minimum(positions, 200) if recording else positions, rows, metadata)

    monkeypatch.setattr(replayed._Recorder, "__call__", recorded)
    monkeypatch.setattr(replayed._Recorder, "forward", limited)
    engine = make_engine()
    tokens, _ = run(engine, max_tokens=12)
    assert "logits differ" in engine.runner.path.not_replayed
    assert tokens == expected


def test_a_model_that_decides_by_values_is_built_layer_by_layer(metal, monkeypatch):
    expected, _ = run(make_engine(), max_tokens=8)
    forward_rows = replayed.forward_rows

    def deciding(model, token_ids, *arguments):
        token_ids.tolist()
        return forward_rows(model, token_ids, *arguments)

    monkeypatch.setattr(replayed, "forward_rows", deciding)
    engine = make_engine()
    tokens, _ = run(engine, max_tokens=8)
    assert engine.runner.path.num_recorded == 0
    assert engine.runner.path.not_replayed
    assert tokens == expected


def test_a_layer_that_is_watched_is_called(metal):
    engine = make_engine()
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True))
    for _ in range(6):
        engine.step()
    calls = []
    engine.runner.kv_cache.kernel_layers[1].taps.append(calls.append)
    engine.run()
    assert len(calls) == len(engine.trace) - 6


def test_an_engine_with_recorded_graphs_is_freed(metal):
    engine = make_engine()
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.run()
    assert engine.runner.path.num_recorded == 1
    pool, model = weakref.ref(engine.runner.kv_cache), weakref.ref(engine.runner.model)
    engine.close()
    del engine
    gc.collect()
    assert pool() is None and model() is None
