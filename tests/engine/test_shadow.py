"""Shadow launches: the step's own attention through the Metal source, checked, beside the engine."""

import threading

import numpy as np
import pytest
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, Trace
from workbench.engine import shadow, shadow_once
from workbench.kernels.msl.compiler import find_compiler
from workbench.kernels.msl.errors import MslCompilerMissing
from workbench.trace.records import WorkItem

try:
    find_compiler()
except MslCompilerMissing as problem:
    pytest.skip(str(problem), allow_module_level=True)


def run(smollm2, **changes):
    config = EngineConfig(max_num_batched_tokens=48, block_size=16, num_blocks=32, **changes)
    engine = Engine(smollm2, config)
    engine.add_request("The capital of France is", SamplingParams(max_tokens=6))
    engine.add_request("One two three four five six seven eight nine ten " * 12, SamplingParams(max_tokens=4))
    return engine


def test_the_metal_source_agrees_with_the_backend_that_ran(smollm2):
    engine = run(smollm2, shadow_metal={"layer": 4, "every": 2})
    results = []
    while (record := engine.step()) is not None:
        assert engine._step.shadow.wait(120)
        if (result := engine.trace.supplement(record.step, "shadow")) is not None:
            results.append((record, result))
    assert len(results) >= 3
    assert any(0 < record.num_decode_tokens < record.num_tokens for record, _ in results)
    for record, result in results:
        assert result["layer"] == 4 and result["faults"] == [] and "shadow" not in record.kernel.details
        assert result["max_difference"] < 1e-5
        launch = result["launches"][0]
        read = {block for _, blocks in launch["kv_blocks"] for block in blocks}
        assert read == {block for table in record.block_tables.values() for block in table}
        used = sum(record.seqused_k) * 3 * 64 * 4
        assert launch["buffers"]["k_cache"]["bytes_read"] >= used
        # Threadgroup (i, h, 0) computes work item i for KV head h, and reads its KV range of that head, K and V.
        items = [WorkItem(*item) for item in result["work_items"]]
        assert [position for position, _ in launch["kv_blocks"]] == [
            [i, h, 0] for i in range(len(items)) for h in range(3)
        ]
        assert launch["kv_bytes"] == [2 * 64 * 4 * (i.kv_end - i.kv_start) for i in items for _ in range(3)]
        once = [launch["buffers"][name]["bytes_read_once_per_threadgroup"] for name in ("k_cache", "v_cache")]
        assert sum(launch["kv_bytes"]) == sum(once)
        for (i, _, _), blocks in launch["kv_blocks"]:
            table = record.block_table(items[i].seq)
            assert sorted(table[items[i].kv_start // 16 : -(-items[i].kv_end // 16)]) == sorted(blocks)
    assert [record.step % 2 for record, _ in results] == [0] * len(results)
    engine.close()


def test_a_recording_holds_what_a_launch_found_after_its_step_was_written(smollm2, tmp_path):
    engine = run(smollm2, shadow_metal={"layer": 4, "every": 1})
    with engine.trace.record_to(tmp_path / "run.jsonl"):
        record = engine.step()
        assert engine._step.shadow.wait(120)
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert loaded[0] == record and loaded.supplements == engine.trace.supplements
    assert loaded.supplement(0, "shadow")["max_difference"] < 1e-5
    engine.close()


def test_a_launch_that_ends_when_its_step_is_forgotten(tiny_llama, tmp_path, monkeypatch):
    """The trace has been replaced by then, and the engine closed: the recording is given the result."""
    arrays = threading.Event()
    ask = shadow.ask
    monkeypatch.setattr(shadow, "ask", lambda *job: arrays.wait(60) and ask(*job))
    config = EngineConfig(max_num_batched_tokens=48, block_size=16, num_blocks=32, shadow_metal={"every": 30})
    engine = Engine(tiny_llama, config, keep_steps=16)
    engine.add_request([5, 6, 7, 8], SamplingParams(max_tokens=40, ignore_eos=True))
    writer = engine.trace.record_to(tmp_path / "run.jsonl")
    first = engine.step()
    while engine.step() is not None:
        pass
    trace = engine.trace
    assert trace[0].step > 30 and trace.supplements == []
    engine.close()
    arrays.set()
    assert engine._step.shadow.wait(120)
    writer.close("done")
    assert trace.supplements == []
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert loaded[0] == first and [supplement.step for supplement in loaded.supplements] == [0]
    assert loaded.supplement(0, "shadow")["faults"] == []


def test_a_process_that_cannot_be_started_is_a_fault(smollm2, monkeypatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    engine = run(smollm2, shadow_metal={"layer": 2})
    engine.step()
    assert engine._step.shadow.wait(120)
    found = engine.trace.supplement(0, "shadow")
    assert found["layer"] == 2 and "could not be reached" in found["faults"][0]
    engine.close()


def test_a_wrong_answer_is_seen(smollm2, monkeypatch):
    """Negative control: the engine's backend is made to be wrong by a little, in one head."""
    engine = run(smollm2, shadow_metal={"layer": 0})
    cache = engine.runner.kv_cache.layers[0]
    attend = cache.backend.write_and_attend

    def wrong(*arrays, **options):
        out = np.array(attend(*arrays, **options))
        out[:, 3] *= 1.001
        return type(arrays[0])(out)

    monkeypatch.setattr(cache.backend, "write_and_attend", wrong)
    record = engine.step()
    monkeypatch.undo()
    assert engine._step.shadow.wait(120)
    assert engine.trace.supplement(record.step, "shadow")["max_difference"] > 1e-5
    engine.close()


def test_tokens_are_the_same_with_and_without(smollm2):
    plain = [o.token_ids for o in run(smollm2).run(progress=False)]
    engine = run(smollm2, shadow_metal={"layer": 9, "every": 1})
    assert [o.token_ids for o in engine.run(progress=False)] == plain
    engine.close()


@pytest.mark.parametrize(
    ("value", "words"),
    [({"layer": -1}, "layer"), ({"every": 0}, "every"), ({"layers": 2}, "shadow_metal"), (7, "shadow_metal")],
)
def test_bad_settings_are_refused(value, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(shadow_metal=value)


def test_a_layer_that_is_not_there_is_refused(smollm2):
    with pytest.raises(ValueError, match="from 0 to 29"):
        Engine(smollm2, EngineConfig(shadow_metal={"layer": 30}))


def bits_of(engine):
    return [np.array(array).tobytes() for array in engine.runner.kv_cache.arrays]


def test_the_newest_step_runs_again_and_changes_nothing(smollm2):
    with run(smollm2) as plain:
        expected = [output.token_ids for output in plain.run(progress=False)]
    with run(smollm2) as engine:
        for layer in (0, 7, 29):
            record = engine.step()
            before = bits_of(engine)
            found = engine.shadow(record, layer=layer)
            assert bits_of(engine) == before
            assert (
                found.agrees
                and found.max_difference < 1e-5
                and "agrees with" in repr(found)
                and "✓" in str(found._repr_html_())
            )
            assert engine.trace.supplement(record.step, "shadow") == found.facts
            read = {block for _, blocks in found.facts["launches"][0]["kv_blocks"] for block in blocks}
            assert read == {block for table in record.block_tables.values() for block in table}
        assert [output.token_ids for output in engine.run(progress=False)] == expected
        assert engine.shadow().agrees  # of the last step, whose requests have ended


def test_a_result_that_the_kernel_does_not_share_is_told(smollm2, monkeypatch):
    with run(smollm2) as engine:
        engine.step()
        copied = shadow_once.copied_call
        monkeypatch.setattr(
            shadow_once, "copied_call", lambda call: (got := copied(call)) | {"out": 1.001 * got["out"]}
        )
        found = engine.shadow()
        assert not found.agrees and "DIFFERS" in repr(found) and found.faults == ()


def test_what_cannot_run_again_is_refused(smollm2):
    with run(smollm2) as engine:
        with pytest.raises(ValueError, match="no step to run again"):
            engine.shadow()
        first = engine.step()
        engine.step()
        for old in (first, 0, 9):
            with pytest.raises(ValueError, match="is not the newest one, which is 1"):
                engine.shadow(old)
        for layer in (-1, 30, "0"):
            with pytest.raises(ValueError, match="layer must be from 0 to 29"):
                engine.shadow(layer=layer)
        engine.step_into()
        with pytest.raises(ValueError, match="no step to run again"):
            engine.shadow()


@pytest.mark.parametrize(
    ("architecture", "why"), [("mamba", "recurrent layers"), ("gathered", "does its own arithmetic")]
)
def test_models_that_the_kernel_cannot_follow(architecture, why):
    with Engine(tiny_loaded_model(architecture), num_blocks=32) as engine:
        engine.add_request([5, 6, 7, 8], max_tokens=2)
        engine.step()
        with pytest.raises(ValueError, match=why):
            engine.shadow()


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3", "gpt_oss"])
def test_windows_and_groups(architecture):
    with Engine(tiny_loaded_model(architecture), num_blocks=64, max_num_batched_tokens=40) as engine:
        engine.add_request([5 + i % 40 for i in range(75)], max_tokens=2)
        engine.add_request([7, 8, 9], max_tokens=2)
        while (record := engine.step()) is not None:
            for layer in (0, 1):
                before = bits_of(engine)
                assert engine.shadow(record, layer=layer).agrees
                assert bits_of(engine) == before


def test_a_step_with_another_one_in_flight_is_refused(tiny_llama):
    with Engine(tiny_llama, num_blocks=64, block_size=4, async_scheduling=True) as engine:
        engine.add_request([5, 6, 7], max_tokens=6)
        record = engine.step()
        with pytest.raises(ValueError, match="no step to run again: finish one first"):
            engine.shadow(record)
