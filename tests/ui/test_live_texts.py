"""Hostile texts in the live dashboard of a server: the model's name, prompts and answers."""

from dataclasses import replace

import msgspec
import pytest
from serve_helpers import ENGINE, ChatTokenizer, make_chat_model, serving, wait_for
from viz_traces import HOSTILE_TEXTS

from workbench import simulate
from workbench.trace import Trace, TraceMeta

TEXTS = [text for text in HOSTILE_TEXTS if len(text) < 1000]


class HostileTokenizer(ChatTokenizer):
    """Every token decodes to one text; any prompt is a few tokens."""

    text = ""

    def encode(self, text):
        return [5, 9, 17]

    def decode(self, ids):
        return self.text * len(ids)


@pytest.mark.repeats(step=4)
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


def test_line_breaks_before_a_reply_are_not_shown_and_stay_in_the_data(page_of):
    """Cards and tables begin with the first word, whether it comes with the line break or after it."""
    replies = {"a": ["\n", "\n\n Yes", ", it\n", "is"], "b": ["\n\nNo", "\n", "way", ""], "c": ["\n", " ", "\n", "\n"]}
    requests = [{"id": name, "prompt": {"len": 5}, "max_tokens": 4} for name in replies]
    plain = simulate({"requests": requests})
    counts = dict.fromkeys(replies, 0)

    def spoken(chunk):
        text = replies[chunk.request_id][counts[chunk.request_id]]
        counts[chunk.request_id] += 1
        return msgspec.structs.replace(chunk, text=text)

    trace = Trace(TraceMeta(source="test", config=plain.config))
    for info in plain.requests.values():
        trace.add_request(info)
    for step in plain:
        trace.append(msgspec.structs.replace(step, chunks=tuple(map(spoken, step.chunks))))
    page = page_of(trace)
    page.view("view.cursor.seek(view.cursor.last)")
    page.frame()
    page.root.locator(".wb-panel-texts").scroll_into_view_if_needed()
    expected = ["Yes, it\nis", "No\nway", ""]
    for i, text in enumerate(expected):
        output = page.root.locator(f".wb-card[data-request='{i}'] .wb-output")
        wait_for(lambda output=output, text=text: output.text_content() == text)
        output.locator("..").hover()
        page.frame()
        assert output.text_content() == text, "also with an element for each token"
    assert page.view("view.store.requests[0].tokens.map(({ text }) => text)") == replies["a"]
    rows = page.view("view.panel('texts').tableData().rows.map((row) => row[3])")
    assert rows == expected
    assert "<td>Yes, it\nis</td>" in trace._repr_html_() and "<td>No\nway</td>" in trace._repr_html_()


def test_only_a_card_that_is_pointed_at_has_an_element_for_each_token(page_of):
    requests = [{"id": f"r{i}", "prompt": {"len": 20}, "max_tokens": 30} for i in range(3)]
    page = page_of(simulate({"requests": requests}))
    page.view("view.cursor.seek(view.cursor.last)")
    page.frame()
    outputs = page.root.locator(".wb-output")
    sizes = "[...root.querySelectorAll('.wb-output')].map((output) => output.childElementCount)"
    page.root.locator(".wb-panel-texts").scroll_into_view_if_needed()
    wait_for(lambda: len(outputs.nth(1).text_content().split()) == 30)
    text = outputs.nth(1).text_content()
    assert page.view(sizes) == [1, 1, 1]  # the newest token
    outputs.nth(1).hover()
    assert page.view(sizes) == [1, 30, 1]
    assert outputs.nth(1).text_content() == text
    tenth = outputs.nth(2).text_content().split()[9]
    outputs.nth(2).hover()
    page.view("view.cursor.seek(9)")
    page.frame()
    assert page.view(sizes) == [1, 1, 10]  # a jump back draws without them what was pointed at before
    assert outputs.nth(2).locator(".wb-now").text_content().strip() == tenth


def test_a_click_on_a_token_goes_to_its_step_without_a_hover_before_it(page_of):
    page = page_of(simulate({"requests": [{"id": "a", "prompt": {"len": 20}, "max_tokens": 30}]}))
    page.view("view.cursor.seek(view.cursor.last)")
    page.frame()
    output = page.root.locator(".wb-output")
    output.scroll_into_view_if_needed()
    x, y = (output.bounding_box()[side] + 3 for side in "xy")
    output.dispatch_event("click", {"clientX": x, "clientY": y, "bubbles": True})
    assert page.view("view.cursor.step") == 0
