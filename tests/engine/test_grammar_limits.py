"""Grammars of strangers: what they cost is bounded, and nobody else waits for it."""

import _thread
import contextlib
import json
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
from letter_llama import make_letter_llama
from llguidance import LLMatcher
from slow_grammars import ambiguous, hidden, is_running, wide

from workbench import Engine, EngineConfig, SamplingParams
from workbench.engine import grammar_host, grammar_texts
from workbench.engine.grammar import GrammarCompiler, vocabulary_of, wait_for
from workbench.engine.grammar_form import MAX_MULTIPLE, grammar_of, text_of
from workbench.engine.grammar_host import GrammarHost, MaskWait, Patience
from workbench.engine.grammar_process import LIMITS, make_tokenizer
from workbench.engine.grammar_texts import Turns

CONFIG = EngineConfig(max_num_batched_tokens=64, max_num_seqs=32, block_size=4, num_blocks=800, max_model_len=128)
SLOW = {"grammar": ambiguous(450)}


@pytest.fixture(scope="module")
def model():
    return make_letter_llama()


@pytest.fixture
def engine(model):
    with Engine(model, CONFIG) as engine:
        yield engine


@pytest.fixture
def compiler(model):
    compiler = GrammarCompiler(model)
    yield compiler
    compiler.close()


def add(engine, wanted, **fields):
    return engine.add_request([5, 7, 9], SamplingParams(structured_outputs=wanted, **{"max_tokens": 30, **fields}))


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


def forks(monkeypatch):
    """The processes that are made from now on."""
    made, fork = [], GrammarHost.fork

    def counted(self):
        made.append(fork(self))
        return made[-1]

    monkeypatch.setattr(GrammarHost, "fork", counted)
    return made


# -- before compiling ------------------------------------------------------------------------------------------


def lcm_of(value):
    return {"type": "number", "multipleOf": value}


@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ({"json": lcm_of(9_999_991)}, "9999991 at #:"),
        ({"json": lcm_of(0.9999991)}, "0.9999991 at #:"),
        ({"json": lcm_of(99_999_910)}, "99999910 at #:"),
        ({"json": json.dumps(lcm_of(MAX_MULTIPLE + 1))}, f"{MAX_MULTIPLE + 1} at #:"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": lcm_of(9_999_991)}}}, "#/$defs/b:"),
        ({"json": {"properties": {"multipleOf": lcm_of(9_999_991)}}}, "at #/properties/multipleOf:"),
        ({"json": {"properties": {"enum": {"items": lcm_of(9_999_991)}}}}, "at #/properties/enum/items:"),
        ({"json": '{"type": "integer", "multiple\\u004ff": 9999991}'}, "9999991 at #:"),
        ({"grammar": 'start: "a" %json {"type": "integer", "multipleOf": 9999991} "b"'}, "9999991 at #:"),
    ],
)
def test_an_automaton_with_millions_of_states_is_refused_by_name(engine, wanted, place):
    with pytest.raises(ValueError, match="multipleOf is") as problem:
        add(engine, wanted)
    assert place in str(problem.value) and f"allowed are up to {MAX_MULTIPLE:,}" in str(problem.value)
    assert engine.step() is None


@pytest.mark.parametrize("value", [7, 9973, 10**9, 0.001, 1e-9, 2.5, MAX_MULTIPLE * 1000])
def test_other_multiples_are_compiled(value):
    grammar_of("json", json.dumps(lcm_of(value)))
    grammar_of("json", json.dumps({"const": lcm_of(9_999_991), "enum": [lcm_of(9_999_991)]}))


def test_rules_and_alternatives_have_limits(engine):
    rules = "start: a0\n" + "\n".join(f"a{i}:" for i in range(10_001))
    with pytest.raises(ValueError, match=r"has 10,002 rules: allowed are up to 10,000"):
        grammar_of("grammar", rules)
    with pytest.raises(ValueError, match=r"its rule 'start' has 10,002 alternatives: allowed are up to 1,000"):
        grammar_of("grammar", "start: a" + "|a" * 10_001 + '\na: "b"')
    # Neither texts, nor regular expressions, comments and terminals count.
    grammar_of("grammar", 'start: "' + "|" * 20_000 + '" /a' + "|" * 20_000 + "/ // " + "|" * 20_000)
    grammar_of("grammar", "start: A\nA: " + "|".join('"a"' for _ in range(12_000)))


@pytest.mark.parametrize("letters", ['"\\', "/a\\", '"', "/", "[", "(", "%json {", "#", "a:", "|\n", '%json {"a":'])
def test_reading_a_grammar_takes_time_that_grows_with_its_length(letters):
    def seconds(length):
        start = time.process_time()
        for _ in range(3):
            with contextlib.suppress(ValueError, RecursionError):
                grammar_of("grammar", "start: " + letters * (length // len(letters)))
        return time.process_time() - start

    assert seconds(64_000) < 100 * seconds(6_400) + 0.5


# -- many choices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [900, 1100, 5000])
def test_thousands_of_choices_work(engine, number):
    words = [f"w{i}x" for i in range(number)]
    texts = " | ".join(json.dumps(word) for word in words)
    for wanted in ({"choice": words}, {"grammar": f"start: W\nW: {texts}"}):
        add(engine, wanted, temperature=1.0)
    for output in engine.run(progress=False):
        assert output.finish_reason == "stop" and output.text in words, output


def test_alternatives_that_would_end_after_a_token_are_refused(engine):
    texts = [f'"w{i}x"' for i in range(1001)]
    add(engine, {"grammar": "start: " + " | ".join(texts[:1000])}, temperature=1.0)
    (output,) = engine.run(progress=False)
    assert output.finish_reason == "stop"
    with pytest.raises(
        ValueError, match="its rule 'start' has 1,001 alternatives: allowed are up to 1,000; make them a"
    ):
        add(engine, {"grammar": "start: " + " | ".join(texts)})
    parts = [f"p{part}: " + " | ".join(f'"{part}{i}x"' for i in range(700)) for part in range(4)]
    add(engine, {"grammar": "start: p0 | p1 | p2 | p3\n" + "\n".join(parts)})
    (output,) = engine.run(progress=False)
    assert output.token_ids == () and "cannot be used: Parser Error: Current row has 28" in output.error


@pytest.mark.parametrize(
    "words", [["a", "ab", "abc"], ["ab", "a", "ab"], ["", "a"], [""], ["é", "日本", '"', "\\", "\n"], [" a", "a "]]
)
def test_choices_allow_what_alternatives_of_a_rule_allow(model, words):
    tokenizer = make_tokenizer(vocabulary_of(model))
    alternatives = "start: " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    pairs = [
        (
            "",
            *(
                LLMatcher(tokenizer, text, limits=LIMITS)
                for text in (grammar_of(*text_of({"choice": words})), alternatives)
            ),
        )
    ]
    found = set()
    while pairs:
        text, one, other = pairs.pop()
        mask = one.compute_bitmask()
        assert mask == other.compute_bitmask() and one.is_error() == other.is_error(), text
        if one.is_error():  # the vocabulary lacks a letter
            continue
        for token in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")):
            if token == 1:
                found.add(text)
                continue
            copies = one.deep_copy(), other.deep_copy()
            assert all(copy.consume_token(int(token)) for copy in copies)
            pairs.append((text + model.tokenizer.decode([int(token)]), *copies))
    letters = set("".join(map(model.tokenizer.decode, ([token] for token in range(2, model.tokenizer.vocab_size)))))
    assert found == {word for word in words if set(word) <= letters}


# -- compiling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_read", [True, False], ids=["while it is compiled", "while it is read"])
def test_nobody_waits_for_the_grammar_of_another(model, monkeypatch, is_read):
    made, problems, validate = forks(monkeypatch), [], grammar_texts.GrammarTexts._validate

    def read_for_ever(self, text):
        if text.kind != "grammar":
            return validate(self, text)
        while self._may_continue(text):
            time.sleep(0.01)

    if not is_read:
        monkeypatch.setattr(grammar_texts.GrammarTexts, "_validate", read_for_ever)

    def add_slowly():
        try:
            add(engine, SLOW)
        except ValueError as problem:
            problems.append(str(problem))

    with Engine(model, CONFIG) as engine:
        thread = threading.Thread(target=add_slowly)
        thread.start()
        wait_until(lambda: [text["state"] for text in engine.grammars_at_work()] == ["compiling"])
        wait_until(lambda: thread.is_alive() is not is_read)
        structured, free = add(engine, {"regex": "ab{4}"}), add(engine, {}, max_tokens=5)
        while not (engine.output(structured).finish_reason and engine.output(free).finish_reason):
            engine.step()
        assert engine.output(structured).text == "abbbb" and len(engine.output(free).token_ids) == 5
        (at_work,) = engine.grammars_at_work()
        assert at_work["kind"] == "grammar" and at_work["characters"] == len(SLOW["grammar"])
    thread.join(60)
    wait_until(lambda: not any(is_running(process.number) for process in made))
    assert problems == ([] if is_read else ["structured_outputs: the engine is closed"])


@pytest.mark.parametrize(
    "wanted", [SLOW, {"grammar": ambiguous(450, "another").replace('"a"', '"b"')}, {"json": lcm_of(999_983)}], ids=str
)
def test_a_grammar_that_takes_too_long_is_refused_and_its_process_is_gone(engine, monkeypatch, wanted):
    monkeypatch.setattr(grammar_texts, "COMPILE_SECONDS", 0.3)
    made = forks(monkeypatch)
    name = add(engine, wanted)
    other = add(engine, {"regex": "ab"})
    outputs = {output.request_id: output for output in engine.run(progress=False)}
    assert outputs[other].text == "ab" and outputs[name].finish_reason == "error"
    (kind,) = wanted
    expected = f"structured_outputs['{kind}'] takes more than 0.3 s to compile: make it smaller, or less ambiguous"
    assert outputs[name].error == expected
    wait_until(lambda: not is_running(made[0].number))
    with pytest.raises(ValueError, match="takes more than"):  # it is known now
        add(engine, wanted)
    assert len(made) == 2


def test_ctrl_c_ends_the_wait_for_a_grammar(engine, monkeypatch):
    made = forks(monkeypatch)

    def read_for_ever(self, text):
        while self._may_continue(text):
            time.sleep(0.01)

    def interrupt():
        wait_until(lambda: made and engine.grammars_at_work())
        _thread.interrupt_main()

    with monkeypatch.context() as endless:
        endless.setattr(grammar_texts.GrammarTexts, "_validate", read_for_ever)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            add(engine, {"regex": "ab"})
        thread.join()
        assert engine.grammars_at_work() == [] and engine.step() is None
        wait_until(lambda: not is_running(made[0].number))
    add(engine, {"regex": "ab"})
    assert [output.text for output in engine.run(progress=False)] == ["ab"]


def test_a_request_that_ends_while_it_waits_ends_its_grammar(engine, monkeypatch):
    made = forks(monkeypatch)
    name = add(engine, SLOW)  # it is quickly read, and then compiled
    free = add(engine, {}, max_tokens=3)
    assert engine.step().not_scheduled[name].kind == "grammar"
    engine.abort(name)
    outputs = {output.request_id: output for output in engine.run(progress=False)}
    assert outputs[name].finish_reason == "abort" and outputs[free].finish_reason == "length"
    wait_until(lambda: not is_running(made[0].number))
    assert engine.grammars_at_work() == []


def test_short_work_does_not_wait_for_long_work(compiler):
    slow = [compiler.join({"grammar": ambiguous(450, remark)}, "A") for remark in range(8)]
    honest = compiler.join({"regex": "ab"}, "B")
    wait_for(honest.compiled)
    assert not any(text.compiled.done() for text in slow)
    states = [text["state"] for text in compiler.texts.at_work()]
    assert 1 <= states.count("compiling") <= grammar_texts.MAX_SHORT + grammar_texts.MAX_LONG
    for text in slow:
        compiler.leave(text)
    wait_until(lambda: not any(compiler.texts._at_work.values()))
    assert compiler.texts.at_work() == []


def test_clients_take_turns():
    turns = Turns()
    for client, item in (("A", 1), ("A", 2), ("A", 3), ("B", 4), ("C", 5), ("B", 6)):
        turns.add(client, item)
    assert len(turns) == 6
    assert [turns.take() for _ in range(7)] == [1, 4, 5, 2, 6, 3, None]


@pytest.mark.parametrize("is_zygote", [False, True], ids=["its process", "all processes"])
def test_a_process_that_was_ended_while_it_compiles_is_replaced(compiler, is_zygote):
    text = compiler.join(SLOW)
    wait_until(lambda: text.process is not None and text.validated.done())
    program = compiler.texts._host._running[0][0]
    os.kill(program.pid if is_zygote else text.process.number, signal.SIGKILL)
    if not is_zygote:
        with pytest.raises(ValueError, match="too much memory to compile, or its process was ended"):
            wait_for(text.compiled)
    wait_until(lambda: not is_running(text.process.number) if text.process is not None else True)
    compiler.leave(text)
    honest = compiler.join({"regex": "ab"})
    wait_for(honest.compiled)
    assert (compiler.texts._host._running[0][0] is not program) is is_zygote


def test_a_process_that_was_ended_while_it_generates_ends_its_requests(engine, monkeypatch):
    made = forks(monkeypatch)
    lost, kept = add(engine, {"regex": "a{20}"}), add(engine, {"regex": "b{20}"})
    while len(engine.output(lost).token_ids) < 3:
        engine.step()
    os.kill(made[0].number, signal.SIGKILL)
    again = add(engine, {"regex": "b{9}"})
    outputs = {output.request_id: output for output in engine.run(progress=False)}
    assert outputs[lost].finish_reason == "error"
    assert outputs[lost].error.startswith(
        "structured_outputs: the grammar cannot continue: it took too much memory, or"
    )
    assert outputs[kept].text == "b" * 20 and outputs[again].text == "b" * 9
    add(engine, {"regex": "a{20}"})
    assert [output.text for output in engine.run(progress=False)] == ["a" * 20]
    assert len(made) == 4


# -- once per text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted", [{"json": wide(300)}, {"regex": "[a-z]{4,9}"}, {"grammar": 'start: ("a" | "b" start)*'}]
)
def test_a_text_is_compiled_once_for_all_requests(model, monkeypatch, wanted):
    made, sampling = forks(monkeypatch), {"temperature": 1.5, "max_tokens": 12}
    together = []
    with Engine(model, CONFIG) as engine:
        for seed in range(16):
            add(engine, wanted, seed=seed, **sampling)
        together += engine.run(progress=False)
        for seed in range(16, 18):  # after the others have ended
            add(engine, wanted, seed=seed, **sampling)
        together += engine.run(progress=False)
    assert len(made) == 1
    for seed in (0, 7, 15, 17):
        with Engine(model, CONFIG) as engine:
            add(engine, wanted, seed=seed, **sampling)
            (alone,) = engine.run(progress=False)
        assert alone.token_ids == together[seed].token_ids
    wait_until(lambda: not any(is_running(process.number) for process in made))


def test_texts_without_requests_are_kept_within_limits(engine, monkeypatch):
    made = forks(monkeypatch)
    monkeypatch.setattr(grammar_texts, "MAX_KEPT", 2)
    for letter in "abcd":
        add(engine, {"regex": letter})
        engine.run(progress=False)
    wait_until(lambda: [is_running(process.number) for process in made] == [False, False, True, True])
    monkeypatch.setattr(grammar_texts, "MAX_KEPT_BYTES", -1)
    add(engine, {"regex": "e"})
    engine.run(progress=False)
    wait_until(lambda: not any(is_running(process.number) for process in made))


def test_texts_without_requests_are_kept_for_a_while(engine, monkeypatch):
    made = forks(monkeypatch)
    monkeypatch.setattr(grammar_texts, "KEPT_SECONDS", 0.05)
    add(engine, {"regex": "f"})
    engine.run(progress=False)
    wait_until(lambda: not is_running(made[0].number))
    add(engine, {"regex": "f"})
    assert [output.text for output in engine.run(progress=False)] == ["f"]


def test_a_worn_process_is_replaced_for_new_requests(engine, monkeypatch):
    made = forks(monkeypatch)
    add(engine, {"regex": "[ab]{20}"})
    engine.step()
    made[0].is_worn = True
    add(engine, {"regex": "[ab]{20}"})
    assert [len(output.text) for output in engine.run(progress=False)] == [20, 20]
    assert len(made) == 2
    wait_until(lambda: [is_running(process.number) for process in made] == [False, True])


def test_a_request_that_is_refused_gives_its_grammar_back(engine, monkeypatch):
    add(engine, {"regex": "a"}, max_tokens=2)
    with monkeypatch.context() as refusing:
        refusing.setattr(type(engine._outputs), "add_request", lambda *_, **__: int("refused"))
        with pytest.raises(ValueError, match="refused"):
            add(engine, {"regex": "b"})
    assert sum(text.num_users for text in engine.grammars.texts._known.values()) == 1
    engine.run(progress=False)
    assert not any(text.num_users for text in engine.grammars.texts._known.values())


# -- masks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"async_scheduling": True}, {"num_speculative_tokens": 2}], ids=str)
def test_a_mask_that_takes_too_long_ends_its_request_alone(model, monkeypatch, mode):
    made = forks(monkeypatch)
    with Engine(model, CONFIG.replace(**mode)) as engine:
        slow, same = (add(engine, {"grammar": hidden()}) for _ in range(2))
        honest, free = add(engine, {"regex": "[a-z]{25}"}), add(engine, {}, max_tokens=25)
        outputs = {output.request_id: output for output in engine.run(progress=False)}
        for name in (slow, same):
            assert outputs[name].finish_reason == "error"
            assert re.search(r"take too long to find \(allowed are \d+ ms\)", outputs[name].error)
            assert len(outputs[name].text) >= 14 and set(outputs[name].text) <= set("xyz")
        wait_until(lambda: not is_running(made[0].number))
        with pytest.raises(ValueError, match="take too long to find"):  # it is known now
            add(engine, {"grammar": hidden()})
    assert outputs[honest].finish_reason == "stop" and len(outputs[honest].text) == 25
    with Engine(model, CONFIG) as engine:
        add(engine, {"regex": "[a-z]{25}"})
        add(engine, {}, max_tokens=25)
        alone = [output.token_ids for output in engine.run(progress=False)]
    assert [outputs[honest].token_ids, outputs[free].token_ids] == alone


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("size", [190, 250])
def test_masks_that_take_too_long_at_once_are_found_before_a_request_has_them(smollm2, size):
    """With a real vocabulary, whose tokens are many letters: too slow, or too many items in a row."""
    compiler = GrammarCompiler(smollm2)
    text = compiler.join({"grammar": ambiguous(size)})
    with pytest.raises(
        ValueError,
        match=r"take more than 0.25 s to find|items; max is 2000|takes more than (10 s|60 s on this busy system)",
    ):
        wait_for(text.compiled)
    compiler.close()


def test_all_waits_for_masks_together_have_a_share_of_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(grammar_host.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(grammar_host.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(grammar_host.sys, "platform", "linux")
    patience, waited = Patience(), 0.0
    while now[0] < 100:
        wait = patience.wait()
        assert 0.02 <= wait.limit <= 0.25
        now[0] += wait.limit
        waited += wait.limit if wait.limit > 0.02 else 0
        patience.charge(wait)
        now[0] += 0.01
    assert waited < 0.5 + 0.05 * now[0] + 0.25
    now[0] += 1000
    assert patience.wait().limit == 0.25
    for _ in range(1000):  # short waits are free
        wait = patience.wait()
        now[0] += 0.005
        patience.charge(wait)
    assert patience.wait().limit == 0.25


def test_a_child_that_gets_no_processor_is_not_to_blame(compiler, monkeypatch):
    text = compiler.join({"regex": "ab"})
    wait_for(text.compiled)
    process = text.process
    spent = {"value": 0.0}
    monkeypatch.setattr(type(process), "spent", lambda self: spent["value"])
    os.kill(process.number, signal.SIGSTOP)
    asked = process.ask("masks", 1, [], [])
    continuing = threading.Timer(0.3, os.kill, (process.number, signal.SIGCONT))
    continuing.start()
    assert len(process.answer(asked, MaskWait(0.01))) > 1
    os.kill(process.number, signal.SIGSTOP)
    asked, spent["value"] = process.ask("masks", 1, [], []), 0.02
    with pytest.raises(TimeoutError):
        process.answer(asked, MaskWait(0.01))
    os.kill(process.number, signal.SIGCONT)
