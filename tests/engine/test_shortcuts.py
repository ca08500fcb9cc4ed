"""Short ways to use an engine, and the guesses a person makes."""

import pytest
from word_llama import WordTokenizer

from workbench import Engine, EngineConfig
from workbench.models.bundled import is_bundled
from workbench.models.tokenizer import ChatTemplateError


class ChatTokenizer(WordTokenizer):
    """Writes a message between w90 and w91."""

    has_chat_template = True

    def apply_chat_template(self, messages, add_generation_prompt=True, **_):
        return " ".join(f"w90 {message['content']} w91" for message in messages)


@pytest.fixture
def engine(tiny_llama):
    with Engine(tiny_llama, max_num_batched_tokens=16, block_size=4, num_blocks=64) as engine:
        yield engine


def test_fields_by_name_make_the_configuration(tiny_llama):
    with Engine(tiny_llama, max_num_batched_tokens=16, policy="priority") as by_name:
        assert by_name.config.max_num_batched_tokens == 16 and by_name.config.policy == "priority"
    config = EngineConfig(max_num_batched_tokens=8, seed=3)
    with Engine(tiny_llama, config, max_num_batched_tokens=16) as on_top:
        assert (on_top.config.max_num_batched_tokens, on_top.config.seed) == (16, 3)
    with pytest.raises(ValueError, match=r"field 'max_tokens'.*; help\(EngineConfig\) lists all 32"):
        Engine(tiny_llama, max_tokens=3)
    with pytest.raises(ValueError, match="config must be an EngineConfig, got 64; fields can also be given by name"):
        Engine(tiny_llama, 64)


def test_generate_gives_outputs_in_order_and_run_does_not_give_them_again(engine):
    waiting = engine.add_request("w5 w6", max_tokens=30)
    outputs = engine.generate(["w7 w8", [9, 10, 11], "w12"], max_tokens=4)
    assert [output.prompt_token_ids for output in outputs] == [(7, 8), (9, 10, 11), (12,)]
    assert all(len(output.token_ids) == 4 and output.finished for output in outputs)
    assert [output.request_id for output in engine.run(progress=False)] == [waiting]
    assert engine.generate("w7 w8", max_tokens=4)[0].token_ids == outputs[0].token_ids
    assert engine.generate([7, 8], max_tokens=4)[0].token_ids == outputs[0].token_ids


def test_generate_beside_a_background_run(engine):
    engine.add_request("w5 w6", max_tokens=40)
    engine.start()
    assert len(engine.generate(["w7"], max_tokens=3)[0].token_ids) == 3
    engine.pause()


def test_a_refused_prompt_leaves_nothing_queued(engine):
    with pytest.raises(ValueError, match=r"prompt\[0\]=999 is outside the vocabulary"):
        engine.generate(["w5", [999]], max_tokens=4)
    while engine.step():
        pass
    assert [output.finish_reason for output in engine.outputs.values()] == ["abort"]
    for nothing in ([], 5, b"w5"):
        with pytest.raises(ValueError, match="prompts"):
            engine.generate(nothing)
    with pytest.raises(TypeError):
        engine.generate("w5", max_toks=4)


def test_chat_uses_the_template_and_the_room_there_is(tiny_llama, engine, monkeypatch):
    with pytest.raises(ChatTemplateError, match="has no chat template: use generate"):
        engine.chat("w5")
    monkeypatch.setattr(tiny_llama, "tokenizer", ChatTokenizer())
    answer = engine.chat("w5 w6")
    assert engine.outputs["r0"].prompt_token_ids == (90, 5, 6, 91)
    assert engine.trace.requests["r0"].max_tokens == 249
    assert answer == engine.outputs["r0"].text.strip()
    conversation = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    engine.chat(conversation, max_tokens=2)
    assert engine.outputs["r1"].prompt_token_ids == (90, 5, 91, 90, 6, 91)


def test_a_finished_request_is_not_aborted_again(engine):
    (output,) = engine.generate("w5", max_tokens=2)
    engine.abort(output.request_id)
    assert engine.state == "idle" and engine.output(output.request_id).finish_reason == "length"


def test_steps_and_their_sentences(engine):
    engine.generate("w5 w6", max_tokens=3)
    assert engine.trace.steps == tuple(engine.trace) and len(engine.trace.steps) == 3
    assert str(engine.trace[0]).startswith("Step 0: ")


def test_the_bundled_model_in_any_spelling(tmp_path, monkeypatch):
    for name in ("smollm2", "SmolLM2", "SmolLM2-135M-Instruct", "smollm2_135m"):
        assert is_bundled(name)
    for name in ("owner/smollm2", "llama", "gpt2", tmp_path):
        assert not is_bundled(name)
    with pytest.raises(FileNotFoundError, match="did you mean 'smollm2'"):
        is_bundled("smolm2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2").mkdir()
    assert not is_bundled("SmolLM2")


def test_ask_prints_the_words_as_they_come_and_keeps_the_steps(tiny_llama, engine, monkeypatch, capsys):
    monkeypatch.setattr(tiny_llama, "tokenizer", ChatTokenizer())
    said = engine.chat("w5", max_tokens=6, ignore_eos=True)
    answer = engine.ask("w5", max_tokens=6, ignore_eos=True)
    assert capsys.readouterr().out.strip() == said == answer.text
    assert len(answer.steps) == 6 and len(engine.trace) == 12
    assert repr(answer).startswith(f"{answer.request_id}: ") and "time to first token" in repr(answer)
    assert "<img" in answer._repr_html_() and engine.run(progress=False) == []


def test_outputs_are_a_list_that_draws_itself(engine):
    given = engine.generate(["12 13", "14"], max_tokens=3, ignore_eos=True)
    assert (
        isinstance(given, list) and [output.request_id for output in given] == ["r0", "r1"] and given[:1] == [given[0]]
    )
    assert repr(given).splitlines()[0] == f"r0: {given[0].text!r}, 3 tokens, hit max_tokens"
    engine.add_request("15", max_tokens=9, request_id="<b>")
    assert isinstance(engine.outputs, dict) and list(engine.outputs) == ["r0", "r1", "<b>"]
    assert repr(engine.outputs).endswith("<b>: '', 0 tokens, running")
    engine.abort("<b>")
    (ended,) = engine.run(progress=False)
    assert ended.request_id == "<b>" and repr(engine.run(progress=False)) == "no outputs"
    html = engine.outputs._repr_html_()
    for words in ("hit max_tokens", "aborted", "first token", "tokens/s", "&lt;b&gt;", engine.runs_on):
        assert words in html
    assert "<b>" not in html and len(repr(engine.outputs)) < 500


def test_an_output_that_ends_at_max_model_len_says_so(tiny_llama):
    with Engine(tiny_llama, max_model_len=8, block_size=4, num_blocks=64) as engine:
        given = engine.generate(["12 13 14 15 16", "14"], max_tokens=4, ignore_eos=True)
        room = [min(4, 8 - len(output.prompt_token_ids)) for output in given]
        assert room == [len(output.token_ids) for output in given] == [3, 4]
        ends = ["hit max_model_len", "hit max_tokens"]
        assert [line.split(", ")[-1] for line in repr(given).splitlines()] == ends
        assert [request.end for request in engine.trace.metrics().requests.values()] == ends
        assert all(end in given._repr_html_() for end in ends)


def test_the_repr_of_many_outputs_is_short(engine):
    outputs = engine.generate(["12 13"] * 30, max_tokens=1)
    assert repr(outputs).endswith("and 10 more") and len(repr(outputs).splitlines()) == 21
    assert outputs._repr_html_().count("<tr>") == 31


def test_an_engine_without_work_says_so(engine, caplog):
    def said(work):
        caplog.clear()
        work()
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("nothing to do")]

    def until_none():
        while engine.step():
            pass

    assert len(said(engine.step)) == 1, "before the first request"
    (words,) = said(engine.start)
    assert "start() again" in words
    engine.add_request("w5 w6", max_tokens=3)
    assert not said(until_none), "the end of a loop is not a mistake"
    assert len(said(engine.step)) == 1
    engine.add_request("w5 w6", max_tokens=3)
    assert not said(lambda: engine.run(progress=False))
    assert len(said(engine.step)) == 1, "after run()"


def test_ctrl_c_names_the_step_and_the_run_continues(engine, monkeypatch):
    engine.add_request("w5 w6", max_tokens=9)
    steps = []

    def interrupt(after_step):
        steps.append(engine.step())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._loop, "run", interrupt)
        with pytest.raises(KeyboardInterrupt, match=r"^stopped after step 0: run\(\) continues from there$"):
            engine.run(progress=False)
    assert len(engine.run(progress=False)[0].token_ids) == 9 and len(engine.trace) == 9
