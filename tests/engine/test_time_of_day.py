"""A run of an engine knows its time of day: that of its steps, however long the model took to load."""

import time

import msgspec
import pytest
from tiny_models import tiny_loaded_model

from workbench import Engine, Trace
from workbench.apps.cli import main

SETTINGS = {"block_size": 4, "num_blocks": 64, "max_model_len": 64}


@pytest.fixture
def loaded():
    return tiny_loaded_model("llama")


def test_a_step_has_the_time_at_which_it_was_taken(loaded, monkeypatch):
    make = Engine._make_scheduler
    monkeypatch.setattr(Engine, "_make_scheduler", lambda *given: (time.sleep(0.4), make(*given))[1])  # a slow load
    with Engine(loaded, **SETTINGS) as engine:
        engine.add_request([5, 6, 7], max_tokens=2)
        before = time.time()
        record = engine.step()
        begin, end = (engine.trace.meta.created + moment for moment in (record.time, record.end))
        assert before - 0.01 <= begin <= end <= time.time() + 0.01


def test_a_clock_that_is_set_meanwhile_is_said(loaded, monkeypatch, tmp_path, capsys):
    with Engine(loaded, **SETTINGS) as engine:
        engine.add_request([5, 6, 7], max_tokens=2)
        engine.run(progress=False)
        assert engine.trace.clock_drift is msgspec.UNSET
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3.0)
        engine.trace.save(tmp_path / "run.jsonl")
    assert Trace.load(tmp_path / "run.jsonl").clock_drift == pytest.approx(-3.0, abs=0.05)
    assert main(["trace", "info", str(tmp_path / "run.jsonl")]) == 0
    assert "the wall clock lost 3 s meanwhile" in capsys.readouterr().out
    monkeypatch.undo()
    assert engine.trace.clock_drift is msgspec.UNSET, "it was set back"


def test_a_clock_that_was_given_has_no_drift(loaded):
    ticks = iter(range(10_000))
    with Engine(loaded, clock=lambda: float(next(ticks)), **SETTINGS) as engine:
        engine.add_request([5, 6, 7], max_tokens=2)
        engine.run(progress=False)
        assert engine.trace.clock_drift is msgspec.UNSET
