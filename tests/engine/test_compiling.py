"""Engines that begin before their code is compiled: the change of ways, and everything that prevents it."""

import gc
import os
import shutil
import signal
import threading
import time
import weakref
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from gguf_files import random_model, tiny_config, write_model
from tiers import examples

from workbench import Engine, SamplingParams
from workbench.base.cache_folder import cached
from workbench.config import EngineConfig
from workbench.engine import compiling as home
from workbench.engine.compiling import VARIABLE, why_wait
from workbench.engine.distribution import Row
from workbench.engine.forward.compiled import CompiledPath
from workbench.kernels.cpu.attention import object_code
from workbench.kernels.cpu.attention.object_code import NotCompiled, without_compiling
from workbench.kernels.cpu.threads import thread_pool
from workbench.kernels.cpu.weight_sums import keep_sum_weights, sum_weights
from workbench.models import load_model
from workbench.models.packed import matrix
from workbench.models.packed.pack_model import why_not_packed

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

TENTHS = 3000
"""Tenths of a second to wait for another process: far longer than it takes."""

LIMITS = {"num_blocks": 256, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 32}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A tiny model, for engines that do not wait."""
    monkeypatch.delenv(VARIABLE)
    config = tiny_config("llama")
    path = tmp_path / "m.gguf"
    write_model(path, "llama", config, random_model(config), matrix_type="Q4_0")
    return path


@pytest.fixture
def not_kept(monkeypatch):
    """The first attempt to start finds that a function is not kept; later ones find it."""
    entered = count()

    @contextmanager
    def first_fails():
        if next(entered) == 0:
            raise NotCompiled("planted")
        with without_compiling():
            yield

    monkeypatch.setattr(home, "without_compiling", first_fails)


class Ready:
    """In place of `Compiling`: the packed model is there when the test says so."""

    def __init__(self, model, config, options):
        self.loaded, self.facts, self._load = None, {"state": "compiling"}, lambda: load_model(model, **options)

    def be_ready(self):
        self.loaded = self._load()

    def finish(self, state, reason=""):
        self.facts, self.loaded = {"state": state, "reason": reason}, None

    def close(self):
        pass


@pytest.fixture
def ready(file, monkeypatch, not_kept):
    Engine(file, wait_for_compiled=True, **LIMITS).close()
    monkeypatch.setattr(home, "Compiling", Ready)


def test_several_engines_say_once_that_kernels_are_compiled(monkeypatch, capsys):
    class Started(Exception):
        """The process would have begun."""

    def begin(*_, **__):
        raise Started

    monkeypatch.setattr(home, "start_connected", begin)
    getattr(home._announce, "cache_clear", lambda: None)()  # an engine of another test may have said it
    for _ in range(3):
        with pytest.raises(Started):
            home.Compiling("model.gguf", EngineConfig(), {})
    assert capsys.readouterr().err.count("compiling kernels for this CPU") == 1


def requests(number):
    random = np.random.default_rng(5)
    return [random.integers(1, 200, int(random.integers(2, 12))).tolist() for _ in range(number)]


def ways(engine):
    """The way that each step took, by its record."""
    return [step.kernel.details["forward"] for step in engine.trace if step.chunks]


def add_all(engine, prompts):
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2))


def near_ties(outputs, expected):
    """Requests whose tokens part where the two most likely tokens are further apart than rounding explains, or not."""
    parted = {"near ties": [], "wrong": []}
    for one, other in zip(outputs, expected, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids)) if a != b), None)
        if place is not None:
            best, second = sorted(other.logprobs[place].values(), reverse=True)[:2]
            parted["near ties" if best - second < 1e-3 else "wrong"].append(one.request_id)
    return parted


def test_tokens_of_requests_that_begin_one_way_and_end_the_other_are_those_of_either(file, ready):
    prompts = requests(examples(500, 2))
    with Engine(file, **LIMITS) as engine:
        add_all(engine, prompts)
        for _ in range(25):
            engine.step()
        assert engine.describe()["forward_not_taken"] == {"compiled": "its code is being compiled"}
        engine._compiling.be_ready()
        changing = engine.run(progress=False)
        taken = ways(engine)
        assert engine.describe()["forward"] == "compiled"
        assert "layer by layer" in engine.trace[0].kernel.details["forward"]
        assert engine.trace[0].kernel.details["forward_reason"] == "compiled code is not ready"
    assert taken == ["layer by layer"] * 26 + ["compiled"] * (len(taken) - 26) and len(taken) > 60
    with Engine(file, wait_for_compiled=True, **LIMITS) as engine:
        add_all(engine, prompts)
        compiled = engine.run(progress=False)
        assert set(ways(engine)) == {"compiled"}
    with Engine(load_model(file, weights="float32"), attention_backend="gather", **LIMITS) as engine:
        add_all(engine, prompts)
        by_layer = engine.run(progress=False)
    for expected in (compiled, by_layer):
        parted = near_ties(changing, expected)
        assert not parted["wrong"], parted
        assert len(parted["near ties"]) <= 5, parted


def test_wrong_compiled_code_is_not_changed_to(file, ready, monkeypatch):
    prompts = requests(12)

    def wrong(path, packed, adapters=None):
        logits, launch = run(path, packed, adapters)
        path._served.kv_cache.layers[0].k_cache[:] *= 1.0
        return type(logits).of(logits.values * 1.01), launch

    run = CompiledPath.run
    with Engine(file, **LIMITS) as engine:
        add_all(engine, prompts)
        engine.step()
        monkeypatch.setattr(CompiledPath, "run", wrong)
        engine._compiling.be_ready()
        outputs = engine.run(progress=False)
        assert set(ways(engine)) == {"layer by layer"}
        assert engine._compiling.facts["state"] == "failed"
        assert "differ from those of the model's layers by" in engine.describe()["compiling"]["reason"]
    with Engine(load_model(file, weights="float32"), attention_backend="gather", **LIMITS) as engine:
        add_all(engine, prompts)
        expected = engine.run(progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_a_failure_of_compiled_code_leaves_the_pool_and_the_steps(file, ready, monkeypatch):
    def broken(path, packed, adapters=None):
        raise RuntimeError("planted")

    with Engine(file, **LIMITS) as engine:
        add_all(engine, requests(4))
        engine.step()
        monkeypatch.setattr(CompiledPath, "run", broken)
        engine._compiling.be_ready()
        outputs = engine.run(progress=False)
        assert [output.finish_reason for output in outputs] == ["length"] * 4
        assert "planted" in engine.describe()["compiling"]["reason"]


def test_the_change_waits_for_a_capture_and_keeps_the_features_of_requests(file, ready):
    with Engine(file, **LIMITS) as engine:
        engine.add_request([1, 2, 3, 4], SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=1))
        engine.step()
        engine._compiling.be_ready()
        layer = engine.runner.kv_cache.kernel_layers[0]
        layer.taps.append(seen := [].append)
        engine.step()
        assert engine.runner.path.name == "layer by layer"
        layer.taps.remove(seen)
        engine.step()
        assert engine.runner.path.name == "compiled"
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=2, prompt_logprobs=1), request_id="later")
        (output,) = [one for one in engine.run(progress=False) if one.request_id == "later"]
        assert len(output.prompt_logprobs) == 3


def test_the_first_weights_are_let_go(file, ready):
    with Engine(file, **LIMITS) as engine:
        old = weakref.ref(engine.model.model)
        model = engine.model
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.step()
        engine._compiling.be_ready()
        engine.run(progress=False)
        gc.collect()
        assert old() is None
        assert engine.model is model and model.quantized


# -- another process --------------------------------------------------------------------------------------------


@pytest.fixture
def one_missing(file, tmp_path, monkeypatch):
    """A cache folder without one function, which this process has not loaded either."""
    Engine(file, wait_for_compiled=True, **LIMITS).close()
    keep_sum_weights()
    kept = cached("compiled")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WORKBENCH_PREFLIGHT", "remembered")
    shutil.copytree(kept, cached("compiled"), ignore=shutil.ignore_patterns("unpack_rows-*"))
    for name in ("_codes", "_calls"):
        monkeypatch.setattr(matrix.unpack_rows, name, {})
    return file


def wait_until(done):
    for _ in range(TENTHS):
        if done():
            return
        time.sleep(0.1)
    raise AssertionError("the other process takes too long")


def test_two_engines_share_a_compilation_and_the_next_one_starts_compiled(one_missing):
    with Engine(one_missing, **LIMITS) as engine, Engine(one_missing, **LIMITS) as other:
        facts = []
        for each in (engine, other):
            assert each.step() is None
            each.add_request([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
            assert each.step().kernel.details["forward"] == "layer by layer"
        for each in (engine, other):
            wait_until(lambda each=each: each.describe()["compiling"]["state"] in ("ready", "failed"))
            each.run(progress=False)
            assert each.trace[-1].kernel.details["forward"] == "compiled"
            facts.append(each.describe()["compiling"])
        assert [one["state"].partition(":")[0] for one in facts] == ["done", "done"]
        assert sorted(name for one in facts for name in one["functions"]) == ["unpack_rows"]
    with Engine(one_missing, **LIMITS) as engine:
        assert engine.describe()["forward"] == "compiled"
        assert "compiling" not in engine.describe()


def test_a_killed_compilation_leaves_nothing_behind_and_the_engine_as_it_is(one_missing, monkeypatch):
    started = []

    def start(*program, **options):
        process, connection = start_connected(*program, **options)
        os.kill(process.pid, signal.SIGSTOP)
        started.append(process)
        return process, connection

    start_connected = home.start_connected
    monkeypatch.setattr(home, "start_connected", start)
    with Engine(one_missing, **LIMITS) as engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        engine.step()
        (process,) = started
        part = next(cached("compiled").glob("*/")) / f"f.code.{process.pid}.part"
        part.write_bytes(b"half")
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: engine.describe()["compiling"]["state"] == "failed")
        assert "ended with status -9" in engine.describe()["compiling"]["reason"]
        assert not part.exists()
        assert [output.finish_reason for output in engine.run(progress=False)] == ["length"]
        assert set(ways(engine)) == {"layer by layer"}


def test_closing_an_engine_ends_its_compilation(one_missing, monkeypatch):
    started = []

    def start(*program, **options):
        started.append(start_connected(*program, **options))
        return started[0]

    start_connected = home.start_connected
    monkeypatch.setattr(home, "start_connected", start)
    engine = Engine(one_missing, **LIMITS)
    engine.close()
    assert started[0][0].wait(timeout=60) is not None
    assert engine.describe()["compiling"]["state"] == "stopped"


def test_the_start_after_one_that_was_cut_off_waits(one_missing):
    """Otherwise programs that are shorter than a compilation would never have compiled code."""
    for _ in range(2):  # the first is closed at once, the second waits
        with Engine(one_missing, **LIMITS) as engine:
            waited = "compiling" not in engine.describe()
    assert waited and engine.describe()["forward"] == "compiled"
    assert not cached("compiled", home.CUT_OFF).exists(), "later starts do not wait for it"


@pytest.mark.parametrize("state", ["starting", "compiling", "loading", "ready", "failed"])
def test_only_a_compilation_that_was_not_done_is_cut_off(state, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    cached("compiled").mkdir()
    progress = home._Progress(process=0, state=state)
    if state == "failed":
        progress.end("failed", "planted")
    home._end(os.getpid(), SimpleNamespace(terminate=lambda: None), progress, threading.current_thread())
    assert cached("compiled", home.CUT_OFF).exists() == (state in ("starting", "compiling"))


def test_a_fork_that_ends_leaves_the_compilation(one_missing, monkeypatch):
    with Engine(one_missing, **LIMITS) as engine:
        monkeypatch.setattr(home.os, "getpid", lambda: -1)
        engine._compiling.close()
        monkeypatch.undo()
        assert engine.describe()["compiling"]["state"] != "stopped"


def test_code_that_could_not_be_kept_is_the_reason(one_missing, monkeypatch):
    def load(*arguments, **options):
        if options.get("weights") == "float32":
            return load_model(*arguments, **options)
        raise NotCompiled("run_layers")

    monkeypatch.setattr(home, "load_model", load)
    with Engine(one_missing, **LIMITS) as engine:
        wait_until(lambda: engine.describe()["compiling"]["state"] == "failed")
        assert "run_layers was compiled and not kept: is there room in" in engine.describe()["compiling"]["reason"]


def test_sampling_does_not_compile_while_another_process_does(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    logits = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    expected = Row(logits, 0.7).sums(-1.0, 0.5)
    for name in ("_codes", "_calls"):
        monkeypatch.setattr(sum_weights, name, {})
    monkeypatch.setattr(object_code, "elsewhere", {1})
    assert Row(logits, 0.7).sums(-1.0, 0.5) == pytest.approx(expected, rel=1e-12)
    assert not sum_weights._codes


def test_the_other_process_compiles_what_sampling_calls(monkeypatch):
    for name in ("_codes", "_calls"):
        monkeypatch.setattr(sum_weights, name, {})
    Row(np.zeros(100, np.float32), 1.0).sums(0.0)
    keep_sum_weights()
    assert len(sum_weights._codes) == 1


# -- engines that wait ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"batch_invariant": True}, {}),
        ({"async_scheduling": True}, {}),
        ({"attention_backend": "cpu"}, {}),
        ({"kv_cache_dtype": "float16"}, {}),
        ({"num_blocks": "auto"}, {}),
        ({"max_loras": 1}, {}),
        ({"num_speculative_tokens": 2}, {}),
        ({}, {"activations": "int8"}),
        ({}, {"weights": "float32"}),
    ],
)
def test_an_engine_waits_if_its_bits_or_its_runner_must_not_change(config, options, file):
    assert why_wait(file, EngineConfig(), {}, "cpu") == ""
    assert why_wait(file, EngineConfig(**config), options, "cpu")


def test_a_variable_a_loaded_model_and_a_large_one_wait(file, monkeypatch):
    assert "loaded" in why_wait(load_model(file), EngineConfig(), {}, "cpu")
    assert "GPU" in why_wait(file, EngineConfig(), {}, "gpu")
    assert "large" in why_wait("somebody/model-on-a-hub", EngineConfig(), {}, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(home, "MAX_BYTES", 10)
        assert "large" in why_wait(file, EngineConfig(), {}, "cpu")
    monkeypatch.setenv(VARIABLE, "1")
    assert VARIABLE in why_wait(file, EngineConfig(), {}, "cpu")


def test_no_thread_compiles_where_it_is_forbidden(tmp_path, monkeypatch):
    seen = {}
    with without_compiling():
        thread_pool(2).run(lambda thread: seen.update({thread: object_code._WITHOUT_COMPILING.get()}))
    assert seen == {0: True, 1: True}
    thread_pool(2).run(lambda thread: seen.update({thread: object_code._WITHOUT_COMPILING.get()}))
    assert seen == {0: False, 1: False}
