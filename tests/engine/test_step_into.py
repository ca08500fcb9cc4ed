"""A step taken phase by phase, its forward pass layer by layer, and what else happens in the middle of one."""

import gc
import os
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest

from workbench import Engine, EngineConfig, StepRecord
from workbench.models.capture import LayerCapture
from workbench.models.patch import defining_modules

CONFIG = EngineConfig(max_num_batched_tokens=16, block_size=4, num_blocks=64, max_model_len=128)
PROMPTS = {"long": list(range(5, 35)), "short": [7, 3, 9, 11, 40], "late": list(range(50, 59))}
LAYERS = ["layer 0", "layer 1"]


@pytest.fixture
def engine(tiny_llama):
    with closing_engine(tiny_llama) as engine:
        yield engine


class closing_engine:
    def __init__(self, model, config=CONFIG):
        self.engine = Engine(model, config)

    def __enter__(self):
        return self.engine

    def __exit__(self, *_):
        self.engine.close()


def add_all(engine, **sampling):
    for request_id, tokens in PROMPTS.items():
        engine.add_request(tokens, request_id=request_id, **{"max_tokens": 5, **sampling})


def advance_to(engine, name):
    """Go on to a phase; returns what it made."""
    while True:
        phase = engine.step_into()
        assert phase is not None, f"nothing is left to do before {name!r}"
        if isinstance(phase, tuple) and phase[0] == name:
            return phase[1]


def run_by_phases(engine, layers=True):
    """Every step phase by phase: the names of each step, its logits and its record."""
    steps = []
    names, logits = [], None
    while (phase := engine.step_into(layers=layers)) is not None:
        if isinstance(phase, StepRecord):
            steps.append((names, logits, phase))
            names, logits = [], None
            continue
        names.append(phase[0])
        if phase[0] == "forward":
            logits = np.array(phase[1])
    return steps


def untimed(record):
    return (record.chunks, record.block_tables, record.finished, record.cached_block_ids, record.free_blocks_end)


def test_the_phases_of_a_step_in_order(engine):
    add_all(engine)
    steps = run_by_phases(engine)
    assert len(steps) == len(engine.trace) > 5
    for names, _, record in steps:
        assert names == ["schedule", "prepare", *LAYERS, "forward", "sample"]
        assert record is engine.trace[record.step]
        assert record.timings["forward"] > 0


@pytest.mark.parametrize("backend", ["cpu", "gather", "dense"])
def test_logits_are_those_of_a_pass_in_one_piece(tiny_llama, backend):
    config = EngineConfig(**{**CONFIG.to_dict(), "attention_backend": backend})
    runs = []
    for layers in (True, False):
        with closing_engine(tiny_llama, config) as engine:
            add_all(engine, temperature=0.8)
            runs.append(run_by_phases(engine, layers))
    for (by_layer, stopped, record), (names, whole, other) in zip(*runs, strict=True):
        assert by_layer == [*names[:2], *LAYERS, *names[2:]]
        np.testing.assert_array_equal(stopped, whole)
        assert untimed(record) == untimed(other)


def test_a_layer_shows_what_it_was_handed_and_gave_back(engine):
    add_all(engine)
    engine.step()
    packed = advance_to(engine, "prepare")
    for index in range(2):
        name, layer = engine.step_into()
        assert name == f"layer {index}" and isinstance(layer, LayerCapture) and layer.layer == index
        assert layer.step == 1 == len(engine.trace)
        assert layer.request_ids == ["long", "short"] and layer.cu_seqlens_q == packed.cu_seqlens_q.tolist()
        assert layer.q.shape == layer.out.shape == (packed.num_tokens, 4, 16) and layer.k.shape[1] == 2
        for row in (0, packed.num_tokens - 1):
            seq = int(np.searchsorted(packed.cu_seqlens_q, row, side="right")) - 1
            attended = np.einsum("hk,khd->hd", layer.weights(row), layer.values[seq].repeat(2, axis=1))
            np.testing.assert_allclose(attended, layer.out[row], atol=2e-5)


def test_later_layers_have_not_been_computed_yet(engine):
    """Negative control: the pass really stands still. The pool of layer 1 is written when layer 1 is reached."""
    engine.add_request(PROMPTS["short"], max_tokens=2)
    advance_to(engine, "layer 0")
    caches = engine.runner.kv_cache.layers
    written = [bool(mx.any(cache.k_cache != 0)) for cache in caches]
    advance_to(engine, "layer 1")
    assert written == [True, False]
    assert all(bool(mx.any(cache.k_cache != 0)) for cache in caches)


def test_the_rest_of_the_pass_in_one_go(engine):
    engine.add_request(PROMPTS["short"], max_tokens=2)
    advance_to(engine, "layer 0")
    name, logits = engine.step_into(layers=False)
    assert name == "forward" and logits.shape[0] == 1
    assert not any(cache.taps for cache in engine.runner.kv_cache.layers)


@pytest.mark.parametrize("finish", ["step", "run", "start"])
def test_other_calls_finish_a_step_that_stands_in_a_layer(tiny_llama, finish):
    with closing_engine(tiny_llama) as engine:
        add_all(engine)
        engine.run(progress=False)
        expected = [output.token_ids for output in engine.outputs.values()]
    with closing_engine(tiny_llama) as engine:
        add_all(engine)
        advance_to(engine, "layer 0")
        if finish == "step":
            assert engine.step().step == 0
        elif finish == "start":
            engine.start()
        engine.run(progress=False)
        assert [output.token_ids for output in engine.outputs.values()] == expected


def test_requests_come_and_go_while_a_step_stands_in_a_layer(engine):
    engine.add_request(PROMPTS["long"], request_id="long", max_tokens=5)
    engine.add_request(PROMPTS["short"], request_id="short", max_tokens=5)
    engine.step()
    advance_to(engine, "layer 1")
    assert engine.state == "paused"
    engine.add_request(PROMPTS["late"], request_id="late", max_tokens=5)
    engine.abort("short")
    with pytest.raises(RuntimeError, match="not complete"):
        engine.peek_next_batch()
    record = engine.step()
    assert record.step == 1 and "short" in record.num_kv_computed and not record.arrived and not record.aborted
    after = engine.step()
    assert after.arrived == ("late",) and after.aborted == ("short",)
    engine.run(progress=False)
    assert engine.output("late").finish_reason == engine.output("long").finish_reason == "length"


def test_a_capture_asked_for_in_the_middle_is_filled_in_the_same_step(engine):
    engine.add_request(PROMPTS["short"], max_tokens=3)
    seen = advance_to(engine, "layer 0")
    capture = engine.capture(layer=1)
    layer = advance_to(engine, "layer 1")
    record = engine.step()
    assert capture.step == record.step == seen.step
    np.testing.assert_array_equal(capture.out, layer.out)
    assert capture.request_ids == layer.request_ids


def test_an_error_in_a_layer_ends_the_requests_of_the_batch_alone(engine, monkeypatch):
    engine.add_request(PROMPTS["short"], request_id="short", max_tokens=5)
    advance_to(engine, "layer 0")
    second = engine.runner.kv_cache.layers[1]
    attend = second.attend
    monkeypatch.setattr(second, "attend", lambda *args, **kwargs: 1 / 0)
    record = engine.step_into()
    assert isinstance(record, StepRecord) and record.finish_reasons == {"short": "error"}
    assert "ZeroDivisionError" in engine.output("short").error
    monkeypatch.setattr(second, "attend", attend)
    engine.add_request(PROMPTS["late"], request_id="late", max_tokens=2)
    assert [output.finish_reason for output in engine.run(progress=False)][-1] == "length"
    assert not any(cache.taps for cache in engine.runner.kv_cache.layers)


def test_closing_in_the_middle_leaves_the_model_as_it_was(tiny_llama):
    modules = defining_modules(tiny_llama.model)
    gc.collect()  # an engine that another test has dropped restores the model when it is collected
    before = [module.scaled_dot_product_attention for module in modules if "llama" in module.__name__]
    engine = Engine(tiny_llama, CONFIG)
    engine.add_request(PROMPTS["long"], max_tokens=5)
    advance_to(engine, "layer 1")
    engine.close()
    assert [m.scaled_dot_product_attention for m in modules if "llama" in m.__name__] == before
    with pytest.raises(RuntimeError, match="no step is in progress"):
        _ = engine.runner.kv_cache.layers[0].offset
    assert len(engine.trace) == 0


def test_two_engines_stand_in_the_middle_of_the_same_model(tiny_llama):
    """A value that the stopped pass has set for its thread is not visible to another pass."""
    with closing_engine(tiny_llama) as first, closing_engine(tiny_llama) as second:
        add_all(first)
        add_all(second, max_tokens=20)
        whole = [np.array(advance_to(second, "forward")) for _ in range(4)]
        for expected in whole:
            advance_to(first, "layer 0")
            advance_to(second, "layer 1")
            np.testing.assert_array_equal(np.array(advance_to(first, "forward")), expected)


def test_a_model_with_its_own_arithmetic_runs_in_one_piece(engine):
    engine.runner.preflight = engine.runner.preflight.__class__(**{**vars(engine.runner.preflight), "mode": "gather"})
    engine.add_request(PROMPTS["short"], max_tokens=1)
    names = []
    while isinstance(phase := engine.step_into(), tuple):
        names.append(phase[0])
    assert names == ["schedule", "prepare", "forward", "sample"]


def test_an_engine_dropped_in_the_middle_ends_quietly(tmp_path):
    """Collected without close(), by another thread, and at the interpreter's exit."""
    script = tmp_path / "dropped.py"
    script.write_text(
        "import gc\n"
        "from word_llama import make_tiny_llama\n"
        "from workbench import Engine, EngineConfig\n"
        "def stand():\n"
        "    engine = Engine(make_tiny_llama(), EngineConfig(num_blocks=16, max_model_len=64))\n"
        "    engine.add_request([5, 6, 7], max_tokens=3)\n"
        "    while (phase := engine.step_into())[0] != 'layer 0':\n"
        "        pass\n"
        "    return engine\n"
        "stand()\n"
        "gc.collect()\n"
        "kept = stand()\n"
        "print('stands', kept.state)\n"
    )
    kept = {name: os.environ[name] for name in ("HOME", "WORKBENCH_CACHE") if name in os.environ}  # compiled code
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin", **kept},
    )
    said = [line for line in result.stderr.splitlines() if not line.startswith(("compiling kernels", "compiled "))]
    assert (result.returncode, result.stdout, said) == (0, "stands paused\n", [])


def test_phases_are_asked_for_from_any_thread(engine):
    add_all(engine)
    names = []

    def advance():
        phase = engine.step_into()
        names.append(phase[0] if isinstance(phase, tuple) else "record")

    while "record" not in names:
        thread = threading.Thread(target=advance)
        thread.start()
        thread.join()
    assert names == ["schedule", "prepare", *LAYERS, "forward", "sample", "record"]
