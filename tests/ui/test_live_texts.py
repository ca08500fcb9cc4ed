"""Hostile texts in the live dashboard of a server: the model's name, prompts and answers."""

from dataclasses import replace

import pytest
from serve_helpers import ENGINE, ChatTokenizer, make_chat_model, serving, wait_for
from viz_traces import HOSTILE_TEXTS

from workbench import simulate

TEXTS = [text for text in HOSTILE_TEXTS if len(text) < 1000]


class HostileTokenizer(ChatTokenizer):
    """Every token decodes to one text; any prompt is a few tokens."""

    text = ""

    def encode(self, text):
        return [5, 9, 17]

    def decode(self, ids):
        return self.text * len(ids)


@pytest.mark.parametrize("text", TEXTS, ids=["script", "end-tags", "bidi", "entities"])
def test_a_live_page_shows_hostile_texts_as_text(open_page, text):
    from workbench import Engine, EngineConfig

    tokenizer = HostileTokenizer()
    tokenizer.text = text
    model = replace(make_chat_model(), tokenizer=tokenizer, name=text)
    with Engine(model, EngineConfig(**ENGINE)) as engine, serving(engine) as server:
        page = open_page(f"http://127.0.0.1:{server.port}/dashboard")
        body = {"prompt": text, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert server.ask("POST", "/v1/completions", body)[0] == 200
        page.wait("view.store.numSteps === 5")  # they came while the page was open
        page.view("view.cursor.toLive()")
        page.frame()
        page.root.focus()
        page.page.keyboard.press("t")
        page.page.keyboard.press("t")
        page.frame()
        output = page.root.locator(".wb-output").first
        wait_for(lambda: output.text_content())
        assert output.text_content() in ((text * 5).replace("\x00", "\ufffd"), text * 5)
        assert page.page.evaluate("window.pwned") is None
        assert page.root.locator("script, img, textarea:not([aria-label=Prompt])").count() == 0


def test_only_texts_in_sight_have_an_element_for_each_token(page_of):
    requests = [{"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 30} for i in range(30)]
    page = page_of(simulate({"requests": requests, "config": {"max_num_seqs": 30, "num_blocks": 400}}))
    page.view("view.cursor.seek(view.cursor.last)")
    output = "root.querySelectorAll('.wb-output')"
    page.view(f"{output}[0].scrollIntoView()")
    page.wait(f"{output}[0].childElementCount === 30")
    last = f"{output}[29]"
    assert page.view(f"{last}.childElementCount") == 0
    text = page.view(f"{last}.textContent")
    assert len(text.split()) == 30
    page.view(f"{last}.scrollIntoView()")
    page.wait(f"{last}.childElementCount === 30")
    assert page.view(f"{last}.textContent") == text
