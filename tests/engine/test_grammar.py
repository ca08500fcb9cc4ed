"""Structured output: every output obeys its grammar, whatever else the engine does."""

import random
import resource
import sys
import threading
import time

import numpy as np
import pytest
from letter_llama import make_letter_llama
from llguidance import LLMatcher
from random_grammars import HOSTILE, is_beginning, is_valid, random_constraint
from tiers import examples

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine import grammar
from workbench.engine.grammar_form import grammar_of, text_of
from workbench.engine.grammar_process import make_tokenizer
from workbench.engine.grammar_texts import GrammarTexts
from workbench.scheduler.scheduler import Scheduler
from workbench.trace.readings.top_tokens import read_top_tokens
from workbench.viz.phases import describe_phase

CONFIG = EngineConfig(max_num_batched_tokens=48, max_num_seqs=12, block_size=4, num_blocks=400, max_model_len=128)
MODES = {
    "plain": {},
    "preempting": {"num_blocks": 36},
    "drafts": {"num_speculative_tokens": 3},
    "asynchronous": {"async_scheduling": True, "num_blocks": 40},
    "asynchronous drafts": {"async_scheduling": True, "num_speculative_tokens": 2, "num_blocks": 44},
}
NUM_CONSTRAINTS = 1000


@pytest.fixture(scope="module")
def model():
    return make_letter_llama()


def run(model, requests, **changes):
    """The outputs of requests (constraint or None, sampling fields), and the trace."""
    with Engine(model, CONFIG.replace(**changes), check_laws=True) as engine:
        for index, (constraint, fields) in enumerate(requests):
            sampling = SamplingParams(structured_outputs=constraint, **fields)
            engine.add_request([5 + index % 90, 7, 9, 7, 9, 7, 9], sampling, request_id=f"r{index}")
        outputs = engine.run(progress=False)
        assert engine.broken_laws == []
        return outputs, engine.trace


def obeys(model, constraint, output):
    """Whether an output is what was asked for, or may become it."""
    if output.finish_reason == "stop":
        return is_valid(constraint, output.text)
    tokenizer = make_tokenizer(grammar.vocabulary_of(model))
    matcher = LLMatcher(tokenizer, grammar_of(*text_of(constraint)), log_level=0)
    tokens = list(output.token_ids)
    allowed = matcher.try_consume_tokens(tokens) == len(tokens)
    return output.finish_reason == "length" and allowed and is_beginning(constraint, output.text)


def random_requests(rng, count):
    requests = []
    for _ in range(count):
        fields = {"max_tokens": rng.choice([3, 30, 60]), "temperature": rng.choice([0.0, 1.0, 1.5])}
        fields |= {"top_p": 0.9} if rng.random() < 0.3 else {}
        requests.append((random_constraint(rng), fields))
    return requests


@pytest.mark.parametrize("mode", MODES)
def test_random_constraints_are_obeyed(model, mode):
    rng = random.Random(f"grammars:{mode}")
    requests = random_requests(rng, examples(NUM_CONSTRAINTS // len(MODES)))
    outputs, trace = run(model, requests, **MODES[mode])
    wrong = [
        (constraint, output)
        for (constraint, _), output in zip(requests, outputs)
        if output.finish_reason != "error" and not obeys(model, constraint, output)
    ]
    assert wrong == []
    # Some random patterns exclude each other, and the tiny vocabulary cannot write every text.
    assert sum(output.finish_reason == "error" for output in outputs) < len(outputs) // 10
    assert sum(output.finish_reason == "stop" for output in outputs) > len(outputs) // 3
    if CONFIG.replace(**MODES[mode]).num_blocks < 100:
        assert any(record.preempted for record in trace)
    if "drafts" in mode:
        chunks = [chunk for record in trace for chunk in record.chunks]
        assert any(chunk.num_accepted for chunk in chunks)
        assert any(chunk.num_accepted < len(chunk.drafts) for chunk in chunks)


@pytest.mark.parametrize("mode", ["plain", "asynchronous drafts"])
def test_neighbours_get_the_same_text(model, mode):
    rng = random.Random("neighbours")
    free = [({}, {"max_tokens": 20, "temperature": rng.choice([0.0, 1.0])}) for _ in range(6)]
    mixed = [request for pair in zip(free, random_requests(rng, 6)) for request in pair]
    alone, _ = run(model, [(None, {"max_tokens": 1}) if constraint else (None, fields) for constraint, fields in mixed])
    beside, _ = run(model, mixed, **MODES[mode])
    assert [output.text for output in beside[::2]] == [output.text for output in alone[::2]]


@pytest.mark.parametrize("mode", ["plain", "asynchronous", "asynchronous drafts"])
def test_a_mask_that_is_a_step_late_is_found(model, mode, monkeypatch):
    follow = grammar.Grammar._follow

    def late(self, token_ids):
        follow(self, token_ids[: max(self._num_consumed, len(token_ids) - 1)])

    monkeypatch.setattr(grammar.Grammar, "_follow", late)
    requests = random_requests(random.Random("late"), 12)
    outputs, _ = run(model, requests, **MODES[mode])
    found = [
        output.finish_reason == "error" or not obeys(model, constraint, output)
        for (constraint, _), output in zip(requests, outputs)
    ]
    assert sum(found) > len(found) // 3


def test_drafts_are_taken_back(model):
    compiler = grammar.GrammarCompiler(model)
    encode = model.tokenizer.encode
    for pattern, drafts in (("(xy|xz)*w", "xyxzxy"), ("xyz", "xyz"), ("x{3}", "xxy")):
        sampling = SamplingParams(structured_outputs={"regex": pattern})
        found = compiler.compile(sampling, 2)
        found.wait()
        before = found.masks([3, 4], [])[0]
        assert found.num_valid([3, 4], encode(drafts)) == (2 if drafts == "xxy" else len(drafts))
        masks = found.masks([3, 4], [*encode(drafts), -1])
        assert len(masks) == (3 if drafts == "xxy" else 1 + len(drafts))
        for place, mask in enumerate(masks):  # the same as those of a grammar that has really consumed the drafts
            fresh = compiler.compile(sampling, 2)
            fresh.wait()
            assert np.array_equal(fresh.masks([3, 4, *encode(drafts)[:place]], [])[0], mask)
        assert np.array_equal(found.masks([3, 4], [])[0], before)
    compiler.close()


def test_a_step_shows_the_mask(model):
    requests = [({"choice": ["xyz", "qrs"]}, {"max_tokens": 9}), ({}, {"max_tokens": 3})]
    _, trace = run(model, requests, record_top_tokens=3)
    masked = [record for record in trace if "mask" in record.timings]
    assert masked and all(list(record.timings)[2:5] == ["forward", "mask", "sample"] for record in masked)
    tops = [top for r in trace for top in read_top_tokens(trace.supplement(r.step, "top_tokens") or {"tokens": []})]
    first = next(top for top in tops if top.request == "r0")
    assert first.num_allowed == 2 and 0.5 < first.removed < 1
    kept = [candidate for candidate in first.candidates if not candidate.removed_by]
    likely = [candidate for candidate in first.candidates if candidate.removed_by]
    assert {model.tokenizer.decode([c.id]) for c in [*kept, *likely] if c.removed_by != "grammar"} == {"q", "x"}
    assert sum(candidate.probability for candidate in first.candidates if candidate.removed_by == "grammar") < 1
    allowed = [c.probability for c in first.candidates if c.removed_by != "grammar"]
    assert first.removed == pytest.approx(1 - sum(allowed), abs=1e-6)
    assert "its grammar allows 2 tokens" in first.how
    assert all(top.num_allowed is None and top.removed is None for top in tops if top.request == "r1")


def test_a_step_in_phases_stops_at_the_mask(model):
    """It comes between the logits and the tokens, says what is allowed, and changes nothing."""
    runs, both = [], ("held", "free")
    for by_phases in (True, False):
        with Engine(model, CONFIG) as engine:
            sampling = SamplingParams(structured_outputs={"choice": ["ab", "cd"]}, max_tokens=3)
            engine.add_request([5, 7, 9], sampling, request_id="held")
            engine.add_request([6, 7, 9], SamplingParams(max_tokens=3, ignore_eos=True), request_id="free")
            names, masks = [], []
            while (phase := engine.step_into(layers=False) if by_phases else engine.step()) is not None:
                if isinstance(phase, tuple):
                    names.append(phase[0])
                    if phase[0] == "mask":
                        ((row, allowed),) = phase[1].items()  # the other request has none
                        masks.append(allowed)
                        facts = describe_phase(*phase)["facts"]
                        assert facts == [(f"row {row}", f"{allowed.sum()} of {allowed.size} tokens")]
            chunks = [chunk for record in engine.trace for chunk in record.chunks]
            tokens = {name: [c.accepted for c in chunks if c.request_id == name and c.accepted] for name in both}
            runs.append(tokens)
            if by_phases:
                at = names.index("mask")
                assert names[at - 1 : at + 2] == ["forward", "mask", "sample"]
                first = {model.tokenizer.decode([int(token)]) for token in np.flatnonzero(masks[0])}
                assert {text[0] for text in first} == {"a", "c"}
    assert runs[0] == runs[1]


def test_a_request_waits_for_its_grammar(model, monkeypatch):
    compiled = GrammarTexts._compile

    schedule, has_decided = Scheduler.schedule, threading.Event()

    def scheduled(self):
        try:
            return schedule(self)
        finally:
            has_decided.set()

    def slow(self, text):
        assert has_decided.wait(60)
        time.sleep(0.05)
        return compiled(self, text)

    monkeypatch.setattr(Scheduler, "schedule", scheduled)
    monkeypatch.setattr(GrammarTexts, "_compile", slow)
    outputs, trace = run(model, [({"regex": "ab+"}, {"max_tokens": 4}), ({}, {"max_tokens": 4})])
    assert trace[0].not_scheduled["r0"].kind == "grammar" and trace[0].admitted == ("r1",)
    assert is_beginning({"regex": "ab+"}, outputs[0].text)
    assert "grammar" in {part.kind for part in trace.explain("r0").parts}
    has_decided.clear()
    _, alone = run(model, [({"regex": "ab+"}, {"max_tokens": 4})])
    assert sum(not record.chunks for record in alone) == 1  # the wait is recorded once


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_time(model, name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Engine(model, CONFIG) as engine:
        started = time.process_time()
        try:
            engine.add_request([5], SamplingParams(structured_outputs=HOSTILE[name], max_tokens=4))
        except ValueError as problem:
            assert str(problem).startswith("structured_outputs[")
        engine.add_request([5], SamplingParams(max_tokens=4))
        *refused, served = engine.run(progress=False)
        assert served.finish_reason == "length"
        for output in refused:
            assert output.finish_reason in ("length", "stop") or output.error.startswith("structured_outputs")
        assert time.process_time() - started < 10
    if sys.platform == "linux":  # counts KiB
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"json": {"type": "nonsense"}}, "Invalid type"),
        ({"json": "{"}, "not valid"),
        ({"json": {"a": {1, 2}}}, "is not JSON"),
        ({"regex": "("}, "invalid regex"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"choice": []}, "must be a list of texts"),
        ({"choice": [1]}, "must be a list of texts"),
        ({"choice": "ab"}, "must be a list of texts"),
        ({"json_object": False}, "must be True"),
        ({"regex": "a", "json": {}}, "must hold one of"),
        ({"pattern": "a"}, "must hold one of json, json_object, regex, choice, grammar"),
        (["a"], "must hold one of"),
    ],
)
def test_mistakes_are_named(model, value, message):
    with Engine(model, CONFIG) as engine:
        with pytest.raises(ValueError, match=message):
            engine.add_request([5], SamplingParams(structured_outputs=value))
        with pytest.raises(ValueError, match="does not work with ignore_eos"):
            SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
        assert engine.step() is None


def test_a_model_without_text_has_no_grammars(model):
    from dataclasses import replace

    for changes in ({"tokenizer": None}, {"eos_token_ids": frozenset()}):
        with (
            Engine(replace(model, **changes), CONFIG) as engine,
            pytest.raises(ValueError, match="structured_outputs needs a model"),
        ):
            engine.add_request([5], SamplingParams(structured_outputs={"regex": "a"}))


def test_a_sampler_that_leaves_the_grammar_ends_with_an_error(model):
    requests = [({"regex": "a+"}, {"sampler": lambda logprobs: np.argmin(np.asarray(logprobs), axis=-1)})]
    (output,), _ = run(model, requests)
    assert output.finish_reason == "error" and "the grammar does not allow" in output.error
