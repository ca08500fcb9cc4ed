"""The Engine's promises to a person: what it refuses, what survives a failure, who may call it from where."""

import _thread
import itertools
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine import step as engine_step
from workbench.engine.output_processor import IncrementalDetokenizer, RequestState
from workbench.engine.packed_batch import prepare_unified
from workbench.engine.sampler import Logits

CONFIG = EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, block_size=4, num_blocks=32, max_model_len=64)


@pytest.fixture
def engine(tiny_llama):
    made = Engine(tiny_llama, CONFIG)
    yield made
    made.close()


def prompt(seed, length=10):
    return np.random.default_rng(seed).integers(3, 60, size=length).tolist()


def free_blocks(engine):
    return engine.scheduler.num_free_blocks


# -- bad input: rejected by name, before anything is queued, and the engine keeps running --------------------


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([], "prompt is empty"),
        (list(range(3, 67)), "max_model_len=64"),
        ([5, -1], r"prompt\[1\]=-1"),
        ([10**9], r"prompt\[0\]=1000000000 is outside the vocabulary"),
        ([5, 2.5], r"prompt\[1\]=2.5"),
        ([True], r"prompt\[0\]=True"),
        (b"bytes", "got bytes"),
        (17, "got int"),
        (np.int64(17), "got int64"),
        (None, "got NoneType"),
    ],
)
def test_bad_prompts_are_refused(engine, bad, words):
    with pytest.raises(ValueError, match=words):
        engine.add_request(bad)
    assert engine.step() is None
    engine.add_request(prompt(1), SamplingParams(max_tokens=2))
    assert len(engine.run(progress=False)) == 1


def test_a_request_the_pool_can_never_hold_is_refused(tiny_llama):
    engine = Engine(tiny_llama, EngineConfig(block_size=4, num_blocks=6, max_model_len=64))
    engine.add_request(prompt(1, 12), SamplingParams(max_tokens=9))  # 20 positions: exactly 5 blocks
    with pytest.raises(ValueError, match=r"num_blocks=6 is too small.*need 6 blocks of 4, the pool has 5"):
        engine.add_request(prompt(1, 12), SamplingParams(max_tokens=10))
    [output] = engine.run(progress=False)
    assert output.finish_reason == "length" and len(output.token_ids) == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_bad_sampling_parameters_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**changes)


@pytest.mark.parametrize("params", [{"logit_bias": {10**6: 1.0}}, {"stop_token_ids": [10**6]}])
def test_tokens_outside_the_vocabulary_are_refused_wherever_they_stand(engine, params):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.add_request(prompt(1), SamplingParams(**params))


def test_a_model_that_wants_a_first_token_gets_it_before_plain_text_only(tiny_llama, monkeypatch):
    monkeypatch.setattr(type(tiny_llama.tokenizer), "adds_bos", True)
    engine = Engine(tiny_llama, CONFIG)
    for given in ("w7 w9", [7, 9]):
        engine.add_request(given)
    assert [list(o.prompt_token_ids) for o in engine.outputs.values()] == [[1, 7, 9], [7, 9]]


def test_ids_are_unique_and_known(engine):
    engine.add_request(prompt(1), request_id="mine")
    with pytest.raises(ValueError, match="'mine' is in use"):
        engine.add_request(prompt(2), request_id="mine")
    with pytest.raises(ValueError, match="request_id"):
        engine.add_request(prompt(2), request_id="")
    for call in (engine.abort, engine.output):
        with pytest.raises(ValueError, match="'yours' is unknown"):
            call("yours")
    assert list(engine.outputs) == ["mine"]


def test_a_longer_context_than_the_model_has_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="max_model_len"):
        Engine(tiny_llama, EngineConfig(max_model_len=tiny_llama.max_position + 1))


# -- steps -----------------------------------------------------------------------------------------------------


def test_step_run_and_the_trace_agree(engine):
    ids = [engine.add_request(prompt(n, 5 + 7 * n), SamplingParams(max_tokens=3)) for n in range(3)]
    first = engine.step()
    assert first.step == 0 and first.arrived == tuple(ids) and first.num_tokens == 16
    outputs = engine.run(progress=False)
    assert [o.request_id for o in outputs] == ids and all(o.finish_reason == "length" for o in outputs)
    assert engine.step() is None and engine.run(progress=False) == []
    assert [record.step for record in engine.trace] == list(range(len(engine.trace)))
    for output in outputs:
        sampled = [
            c.sampled
            for r in engine.trace
            for c in r.chunks
            if c.request_id == output.request_id and c.sampled is not None
        ]
        assert tuple(sampled) == output.token_ids
    assert set(first.timings) == {"schedule", "prepare", "forward", "sample", "update"}
    assert first.kernel.work_items
    assert free_blocks(engine) == CONFIG.num_blocks - 1


def test_what_the_record_derives_is_what_the_model_was_handed(engine):
    for n in range(4):
        engine.add_request(prompt(n, 3 + 6 * n), SamplingParams(max_tokens=4))
    seen = 0
    while (phase := engine.step_into()) is not None:
        packed = None
        while isinstance(phase, tuple):
            if phase[0] == "prepare":
                packed = phase[1]
            phase = engine.step_into()
        np.testing.assert_array_equal(phase.cu_seqlens_q, packed.cu_seqlens_q)
        np.testing.assert_array_equal(phase.seqused_k, packed.seqused_k)
        np.testing.assert_array_equal(phase.positions, packed.positions)
        np.testing.assert_array_equal(phase.slot_mapping, packed.slot_mapping)
        for row, table in enumerate(phase.block_tables.values()):
            assert packed.block_table[row, : len(table)].tolist() == table
        seen += 1
    assert seen == len(engine.trace) > 4


def test_a_step_can_be_taken_phase_by_phase_and_finished_by_step(engine):
    engine.add_request(prompt(1, 6), SamplingParams(max_tokens=2))
    name, batch = engine.step_into()
    assert name == "schedule" and batch.chunks[0].num_tokens == 6
    name, packed = engine.step_into()
    assert name == "prepare" and packed.cu_seqlens_q.tolist() == [0, 6]
    name, logits = engine.step_into(layers=False)
    assert name == "forward" and logits.shape[0] == 1
    record = engine.step()
    assert record.chunks[0].sampled == int(mx.argmax(logits[0]))
    assert len(engine.trace) == 1


def test_peek_says_what_the_next_step_does(engine):
    for n in range(3):
        engine.add_request(prompt(n, 9), SamplingParams(max_tokens=3))
    while True:
        peeked = engine.peek_next_batch()
        record = engine.step()
        if record is None:
            assert peeked == (False, 0)
            return
        assert peeked == (record.num_prefill_tokens > 0, record.num_tokens)


def test_abort_gives_the_blocks_back_before_the_next_step(engine):
    doomed = engine.add_request(prompt(1, 20), SamplingParams(max_tokens=20))
    other = engine.add_request(prompt(2, 5), SamplingParams(max_tokens=3))
    engine.step()
    engine.abort(doomed)
    record = engine.step()
    assert record.aborted == (doomed,) and doomed not in record.num_kv_computed
    engine.abort(doomed)  # twice does no harm
    outputs = {o.request_id: o.finish_reason for o in engine.run(progress=False)}
    assert outputs == {doomed: "abort", other: "length"}
    assert free_blocks(engine) == CONFIG.num_blocks - 1


def test_abort_before_any_step(engine):
    engine.abort(engine.add_request(prompt(1)))
    engine.run(progress=False)
    [output] = engine.outputs.values()
    assert output.finish_reason == "abort" and output.token_ids == ()


def test_eos_and_stop_tokens_end_a_request(tiny_llama):
    free = Engine(tiny_llama, CONFIG)
    free.add_request(prompt(3), SamplingParams(max_tokens=6, ignore_eos=True))
    [reference] = free.run(progress=False)
    stop = reference.token_ids[2]
    engine = Engine(tiny_llama, CONFIG)
    engine.add_request(prompt(3), SamplingParams(max_tokens=6, stop_token_ids=[stop], ignore_eos=True))
    [output] = engine.run(progress=False)
    assert output.finish_reason == "stop"
    assert output.token_ids == reference.token_ids[: reference.token_ids.index(stop) + 1]


# -- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["prepare", "forward", "sample"])
def test_an_exception_ends_the_requests_of_its_batch_and_no_others(engine, monkeypatch, stage):
    running = engine.add_request(prompt(1, 16), SamplingParams(max_tokens=5))
    waiting = engine.add_request(prompt(2, 12), SamplingParams(max_tokens=5))

    def explode(*_, **__):
        raise RuntimeError("out of memory, planted")

    if stage == "prepare":
        monkeypatch.setattr("workbench.engine.step.prepare_unified", explode)
    else:
        target = engine.runner if stage == "forward" else engine.sampler
        monkeypatch.setattr(target, stage, explode)
    record = engine.step()
    monkeypatch.undo()
    assert record.finish_reasons == {running: "error"}
    assert free_blocks(engine) == CONFIG.num_blocks - 1
    outputs = {o.request_id: o for o in engine.run(progress=False)}
    assert outputs[running].finish_reason == "error" and "planted" in outputs[running].error
    assert outputs[waiting].finish_reason == "length"
    # The hashes that the failed step had published are withdrawn: the same prompt is computed, not found.
    again = engine.add_request(prompt(1, 16), SamplingParams(max_tokens=5))
    assert engine.step().chunk(again).num_cached_tokens == 0
    fresh = Engine(engine.model, CONFIG)
    fresh.add_request(prompt(1, 16), SamplingParams(max_tokens=5))
    assert fresh.run(progress=False)[0].token_ids == engine.run(progress=False)[0].token_ids


def test_logits_that_are_not_numbers_end_their_request_alone(engine, monkeypatch):
    bad = engine.add_request(prompt(1, 5), SamplingParams(max_tokens=4))
    good = engine.add_request(prompt(2, 5), SamplingParams(max_tokens=4))
    forward = engine.runner.forward

    def poisoned(packed):
        logits, launch = forward(packed)
        logits = np.array(logits.values)
        logits[0] = np.nan
        return Logits.of(mx.array(logits)), launch

    monkeypatch.setattr(engine.runner, "forward", poisoned)
    record = engine.step()
    monkeypatch.undo()
    assert record.finish_reasons == {bad: "error"}
    outputs = {o.request_id: o for o in engine.run(progress=False)}
    assert "finite" in outputs[bad].error and outputs[good].finish_reason == "length"
    assert free_blocks(engine) == CONFIG.num_blocks - 1


def test_ctrl_c_leaves_an_engine_that_goes_on(tiny_llama, monkeypatch):
    def tokens(interrupted):
        engine = Engine(tiny_llama, CONFIG)
        for n in range(4):
            engine.add_request(prompt(n, 12), SamplingParams(max_tokens=30))
        if interrupted:
            forward, calls = engine.runner.forward, itertools.count(1)

            def interrupted_once(packed):
                if next(calls) == 5:
                    _thread.interrupt_main()
                    assert engine._loop._pause.wait(60), "Ctrl-C does not pause the run"
                return forward(packed)

            monkeypatch.setattr(engine.runner, "forward", interrupted_once)
            with pytest.raises(KeyboardInterrupt):
                engine.run(progress=False)
            assert engine.state == "paused" and len(engine.trace) > 0
            monkeypatch.undo()
        return [o.token_ids for o in engine.run(progress=False)]

    assert tokens(True) == tokens(False)


# -- threads ----------------------------------------------------------------------------------------------------


def test_run_in_the_background_pause_and_add(engine):
    first = engine.add_request(prompt(1), SamplingParams(max_tokens=40))
    engine.start()
    second = engine.add_request(prompt(2), SamplingParams(max_tokens=40))
    engine.pause()
    assert engine.state in ("paused", "idle")
    steps = len(engine.trace)
    time.sleep(0.05)
    assert len(engine.trace) == steps
    outputs = {o.request_id for o in engine.run(progress=False)}
    assert outputs == {first, second} and engine.state == "idle"


def test_requests_may_be_added_from_many_threads(engine):
    def add(n):
        for k in range(5):
            engine.add_request(prompt(10 * n + k, 6), SamplingParams(max_tokens=2))

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = engine.run(progress=False)
    assert len({o.request_id for o in outputs}) == 20


def test_stream_yields_the_text_of_the_output(smollm2):
    engine = Engine(smollm2, EngineConfig(num_blocks=64))
    pieces = list(engine.stream("The capital of France is", SamplingParams(max_tokens=8)))
    [output] = engine.outputs.values()
    assert "".join(pieces) == output.text and len(pieces) > 2
    text = output.text
    stop = text[5:8]
    stopped = list(engine.stream("The capital of France is", SamplingParams(max_tokens=8, stop=stop)))
    assert "".join(stopped) == text[: text.index(stop)]


def test_a_prompt_is_refused_when_its_stream_is_asked_for(smollm2):
    engine = Engine(smollm2, EngineConfig(num_blocks=64))
    with pytest.raises(ValueError, match="prompt"):
        engine.stream([])
    assert not engine.outputs


def test_a_stream_loses_nothing_when_the_request_ends_while_it_looks(smollm2, monkeypatch):
    engine = Engine(smollm2, EngineConfig(num_blocks=64))
    look = RequestState.output

    def look_just_before_the_end(entry):
        so_far = look(entry)
        engine.run(progress=False)  # as a background run may
        return so_far

    monkeypatch.setattr(RequestState, "output", look_just_before_the_end)
    pieces = list(engine.stream("The capital of France is", SamplingParams(max_tokens=8)))
    [output] = engine.outputs.values()
    assert len(output.token_ids) == 8 and "".join(pieces) == output.text


def test_a_step_reuses_what_was_packed_for_the_one_before(engine, monkeypatch):
    handed = []

    def pack_and_remember(batch, block_size, **options):
        handed.append(options["previous"])
        return prepare_unified(batch, block_size, **options)

    monkeypatch.setattr(engine_step, "prepare_unified", pack_and_remember)
    engine.add_request(prompt(1), SamplingParams(max_tokens=3))
    for _ in range(3):
        engine.step()
    assert handed[0] is None
    assert [packed.num_tokens for packed in handed[1:]] == [10, 1] and engine._step.packed.tables == handed[2].tables


def test_a_background_run_that_cannot_go_on_says_so(engine, monkeypatch, caplog):
    def broken():
        raise RuntimeError("planted")

    engine.add_request(prompt(1))
    monkeypatch.setattr(engine.scheduler, "schedule", broken)
    engine.start()
    until = time.monotonic() + 60
    while engine.state == "running" and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.state == "paused"
    assert "a step could not be taken" in caplog.text and "planted" in caplog.text


def test_an_output_with_a_finish_reason_is_whole(smollm2, monkeypatch):
    engine = Engine(smollm2, EngineConfig(num_blocks=64))
    reasons = []
    flush = IncrementalDetokenizer.flush

    def flush_and_look(detokenizer):
        reasons.append(engine.output("r0").finish_reason)
        return flush(detokenizer)

    monkeypatch.setattr(IncrementalDetokenizer, "flush", flush_and_look)
    engine.add_request("The capital of France is", SamplingParams(max_tokens=2))
    engine.run(progress=False)
    assert reasons == [None] and engine.output("r0").finish_reason == "length"


def test_logprobs_come_with_each_token(engine):
    engine.add_request(prompt(5), SamplingParams(max_tokens=4, logprobs=3))
    [output] = engine.run(progress=False)
    assert len(output.logprobs) == len(output.token_ids)
    for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        assert len(logprobs) == 3 and max(logprobs, key=logprobs.get) == token  # greedy


def test_reprs_say_where_the_engine_stands(engine):
    engine.add_request(prompt(1, 30), SamplingParams(max_tokens=2))
    engine.step()
    assert "1 running" in repr(engine) and f"KV blocks of {engine.config.block_size} tokens free" in repr(engine)
    assert "<img" in engine._repr_html_() or "<table" in engine._repr_html_()


def test_requests_wait_from_the_moment_they_are_added(engine):
    for n in range(3):
        engine.add_request(prompt(n, 12), SamplingParams(max_tokens=3))
        assert f"0 running, {n + 1} waiting" in repr(engine) and engine.facts()["waiting"] == n + 1
    engine.step()
    running, waiting = engine.scheduler.num_running, engine.scheduler.num_waiting
    assert running + waiting == 3 and f"{running} running, {waiting} waiting" in repr(engine)
    engine.run(progress=False)
    assert "0 running, 0 waiting" in repr(engine)
