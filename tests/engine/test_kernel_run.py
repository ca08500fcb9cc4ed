"""From an engine's step into the Metal kernel: the recorded threadgroup of a work item."""

import re

import numpy as np
import pytest
from kernel_replay import as_loaded, as_stored
from msl_runs import skip_without_compiler
from random_adapters import linear_sizes, make_adapter
from tiny_models import tiny_loaded_model

from workbench import Engine, EngineConfig, SamplingParams, Trace
from workbench.kernels.msl.recorded import LOAD, WATCH

skip_without_compiler()


@pytest.fixture
def engine(smollm2):
    config = EngineConfig(max_num_batched_tokens=48, block_size=16, num_blocks=32)
    with Engine(smollm2, config) as engine:
        engine.add_request("The capital of France is", SamplingParams(max_tokens=6))
        engine.add_request("One two three four five six seven eight nine ten " * 12, SamplingParams(max_tokens=4))
        yield engine


def test_a_work_item_runs_on_the_steps_own_tensors(engine):
    """Its blocks are those of the pool, and what it stores is the engine's attention."""
    for _ in range(3):
        step = engine.step()
    before = [np.array(array) for array in engine.runner.kv_cache.arrays]
    items = []
    while True:
        try:
            items.append(step.kernel_run(len(items), layer=2, kv_head=1))
        except ValueError as problem:
            assert "work items in this step, from 0 on" in str(problem)
            break
    rows = set()
    for run in items:
        assert run.fault is None and run.threadgroups[0][1:] == (1, 0)
        loaded = as_loaded(run, "k_cache")
        blocks = {block for block in range(len(loaded)) if np.isfinite(loaded[block]).any()}
        request = run.about.split(": ")[1].split(",")[0]
        assert blocks and blocks <= set(step.block_tables[request])
        assert f"step {step.step}, layer 2, KV head 1" in run.about
        rows |= set(np.flatnonzero(np.isfinite(as_stored(run, "out")).any(axis=(1, 2))).tolist())
    assert rows == set(range(step.num_tokens))
    shadow = engine.shadow(step, layer=2)
    assert shadow.agrees and len(items) == len(shadow.facts["work_items"])
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, engine.runner.kv_cache.arrays))


def test_the_sums_of_the_softmax_are_watched(engine):
    run = engine.step().kernel_run(0)
    watched = run.events[run.events["kind"] == WATCH]
    assert {run.names[name] for name in watched["name"]} == {"row.maximum", "row.total"}
    assert len(run.events[run.events["kind"] == LOAD])
    assert len(engine.kernel_run(0, watch=()).events) < len(run.events)


def test_a_work_item_fits_into_a_small_page(engine, tmp_path):
    for _ in range(3):
        step = engine.step()
    run = step.kernel_run(len(step.chunks) - 1)
    run.save(tmp_path / "item.kernelrun")
    run.save_html(tmp_path / "item.html")
    assert len(run.events) > 10_000
    assert (tmp_path / "item.kernelrun").stat().st_size < 2e6 and (tmp_path / "item.html").stat().st_size < 4e6


def test_an_item_of_the_step_is_found_in_the_kernels_list(engine):
    for _ in range(3):
        step = engine.step()
    item = step.kernel.work_items[-1]
    run = step.kernel_run(item)
    assert step.chunks[item.seq].request_id in run.about


def test_the_page_of_another_item_says_which_items_of_the_kernel_have_the_row(engine):
    step, listed = engine.step(), []
    while True:
        try:
            listed.append(step.kernel_run(len(listed), watch=()).about)
        except ValueError:
            break
    assert not any("list of work" in about for about in listed), "asked for by the kernel's own index"
    others = 0
    for item in step.kernel.work_items:
        name, about = step.chunks[item.seq].request_id, step.kernel_run(item, watch=()).about
        spans = [re.search(r": (\S+), rows \[(\d+), (\d+)\)", each).groups() for each in listed]
        having = [i for i, (who, at, end) in enumerate(spans) if who == name and int(at) <= item.q_start < int(end)]
        if f"rows [{item.q_start}, {item.q_start + item.num_rows})" in about.partition(". ")[0]:
            assert "list of work" not in about
            continue
        others += 1
        assert f"work item {having[0]} of {len(listed)}: " in about
        told = re.search(rf"row {item.q_start} is in its items? ([\d, and]+)$", about)[1]
        assert [int(number) for number in re.findall(r"\d+", told)] == having
    assert others


def test_what_cannot_be_recorded_is_refused(engine):
    engine.step()
    engine.step()
    for options, message in (
        ({"item": 99}, "item is 99"),
        ({"item": -1}, "item is -1"),
        ({"kv_head": 3}, "kv_head is 3: the layer has 3"),
        ({"layer": 99}, "layer must be from 0 to 29"),
        ({"watch": ["nothing"]}, "watch has 'nothing'"),
    ):
        for step in (None, 0):
            with pytest.raises(ValueError, match=message):
                engine.kernel_run(step=step, **options)
    with pytest.raises(ValueError, match="step 7 has computed nothing, or is not in the trace, which holds"):
        engine.kernel_run(0, 7)
    step = engine.trace[-1]
    engine.close()
    with pytest.raises(ValueError, match=r"which has the model: .* trace.kernel_run\(1, model, item\)"):
        step.kernel_run(0)


def same_numbers(one, other):
    """Whether two recordings read the same places of the pool and have the same numbers, but for rounding."""
    for of, name in ((as_loaded, "k_cache"), (as_loaded, "v_cache"), (as_stored, "out")):
        a, b = of(one, name), of(other, name)
        if a.shape != b.shape or not np.allclose(a, b, rtol=0.02, atol=0.02 * np.nanmax(abs(b)), equal_nan=True):
            return False
    return True


def test_an_older_step_is_computed_again(engine):
    """Its recording is the one that was made while it was the newest, but for rounding."""
    made = []
    for number in range(5):
        step = engine.step()
        last = len(step.kernel.work_items) - 1
        made.append((step, step.kernel.work_items[last], step.kernel_run(step.kernel.work_items[last], layer=3)))
        assert step.step == number
    before = [np.array(array) for array in engine.runner.kv_cache.arrays]
    for step, item, then in made[:-1]:
        again = step.kernel_run(item, layer=3)
        assert again.about == f"{then.about}; computed again" and again.fault is None
        assert again.threadgroups == then.threadgroups
        others = [one for _, _, one in made if one is not then]
        assert same_numbers(again, then) and not any(same_numbers(again, one) for one in others)
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, engine.runner.kv_cache.arrays))
    engine.run(progress=False)


def test_an_older_step_that_cannot_be_computed_again_says_why(smollm2):
    config = EngineConfig(max_num_batched_tokens=16, block_size=16, num_blocks=32)
    with Engine(smollm2, config, keep_steps=16) as engine:
        first = engine.add_request("One two three", SamplingParams(max_tokens=40, ignore_eos=True)) and engine.step()
        engine.run(progress=False)
        begin = engine.trace[0].step
        assert begin > 0
        with pytest.raises(ValueError, match=f"the trace begins at step {begin}: its blocks were written before"):
            engine.kernel_run(0, engine.trace[3])
        with pytest.raises(ValueError, match="step 0 has computed nothing, or is not in the trace"):
            engine.kernel_run(0, first)
        assert engine.kernel_run(0).fault is None


def test_a_step_of_a_saved_trace_is_computed_again(engine, smollm2, tmp_path):
    made = [(step, step.kernel_run(0, layer=2)) for step in (engine.step() for _ in range(3))]
    engine.trace.save(tmp_path / "run.jsonl.gz")
    engine.close()
    trace = Trace.load(tmp_path / "run.jsonl.gz")
    for step, then in made:
        again = trace.kernel_run(step.step, smollm2, layer=2)
        assert again.about == f"{then.about}; computed again" and same_numbers(again, then)
    for arguments, message in (
        ((7, smollm2), "step is 7; it must be a step of this trace with chunks: it holds 3 steps"),
        ((0, smollm2, 99), "item is 99"),
    ):
        with pytest.raises(ValueError, match=message):
            trace.kernel_run(*arguments)


def test_older_steps_with_adapters_are_computed_with_them(tmp_path):
    model = tiny_loaded_model("llama")
    sizes = linear_sizes(model.model)
    folders = {name: make_adapter(tmp_path / name, sizes, seed=seed) for seed, name in enumerate(("legal", "poems"))}
    config = EngineConfig(max_num_batched_tokens=64, block_size=16, num_blocks=32, max_loras=2)
    with Engine(model, config) as engine:
        for name, folder in folders.items():
            engine.add_adapter(name, folder)
            engine.add_request([5, 7, 9, 4], SamplingParams(max_tokens=3), request_id=name, adapter=name)
        step = engine.step()
        item = step.kernel.work_items[-1]
        then = step.kernel_run(item, layer=1)
        engine.run(progress=False)
        assert same_numbers(step.kernel_run(item, layer=1), then)
        trace = engine.trace
        assert same_numbers(trace.kernel_run(step.step, model, item, layer=1, adapters=folders), then)
        other = trace.kernel_run(
            step.step, model, item, layer=1, adapters=dict(zip(folders, [*folders.values()][::-1]))
        )
        assert not same_numbers(other, then)
        with pytest.raises(ValueError, match="request 'legal' was computed with adapter 'legal', which is not given"):
            trace.kernel_run(step.step, model)


def test_several_groups_are_recorded_at_the_newest_step_alone():
    with Engine(
        tiny_loaded_model("gemma3_text"), EngineConfig(max_num_batched_tokens=32, block_size=8, num_blocks=64)
    ) as engine:
        engine.add_request(list(range(3, 40)), SamplingParams(max_tokens=3), request_id="a")
        first, newest = engine.step(), engine.step()
        assert first.num_groups == 2
        for layer in (0, 1):
            assert newest.kernel_run(0, layer=layer).fault is None
        with pytest.raises(ValueError, match="the trace has 2 KV cache groups, and a replay takes one"):
            first.kernel_run(0)
