"""The first screen at every width: pictures before tools, labels that are whole, names for marks and ends."""

from itertools import pairwise

import pytest

from workbench import simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.viz.export_html import to_html


@pytest.fixture
def trace():
    requests = [{"id": f"r{n}", "prompt": {"len": 60 + n}, "max_tokens": 12, "arrival_time": 0.7 * n} for n in range(9)]
    config = {"max_num_batched_tokens": 64, "num_blocks": 512}
    return simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.2))


@pytest.fixture
def open_trace(open_page, tmp_path, trace):
    def open_(width, view="story"):
        to_html(trace, tmp_path / "page.html")
        page = open_page(f"file://{tmp_path}/page.html#{view}", width=width, height=1000)
        page.wait(f"view.store.numSteps === {len(trace)}")
        page.frame()
        return page

    return open_


def test_tools_are_folded_on_a_phone_and_open_with_one_button(open_trace):
    page = open_trace(390)
    fold = page.root.get_by_role("button", name="Tools")
    theme, help_ = (
        page.root.locator("button[title^='Switch between light']"),
        page.root.get_by_role("button", name="Keyboard shortcuts"),
    )
    assert fold.is_visible() and not theme.is_visible() and not help_.is_visible()
    assert fold.get_attribute("aria-expanded") == "false"
    below = page.root.locator(".wb-controls").evaluate("(bar) => bar.getBoundingClientRect().bottom")
    assert below < 320, "the pictures begin in the first third of a phone's screen"
    fold.click()
    assert theme.is_visible() and help_.is_visible() and fold.get_attribute("aria-expanded") == "true"
    fold.click()
    assert not theme.is_visible()


def test_tools_are_open_on_a_desk_and_folded_for_a_follower(open_trace):
    page = open_trace(1440)
    fold, theme = (
        page.root.get_by_role("button", name="Tools"),
        page.root.locator("button[title^='Switch between light']"),
    )
    assert fold.is_hidden() and theme.is_visible()
    page.view("view.root.setAttribute('data-follows', 'true')")
    assert fold.is_visible() and theme.is_hidden()


@pytest.mark.parametrize("width", (390, 620, 1100, 1440))
def test_no_label_of_an_axis_is_cut(open_page, tmp_path, width):
    """Every text of the timeline ends inside the picture, also that of a tick at its end: 20 steps of a second."""
    request = {"id": "a", "prompt": {"len": 5}, "max_tokens": 20}
    to_html(simulate({"requests": [request]}, cost_model=CostModel(fixed=1.0)), tmp_path / "page.html")
    page = open_page(f"file://{tmp_path}/page.html#all", width=width, height=1000)
    page.wait("view.store.numSteps === 20")
    page.frame()
    found = page.view("""(() => {
        const panel = view.panel('timeline'), real = document.createElement('canvas').getContext('2d'), ends = [];
        const context = new Proxy(real, {
            get(target, key) {
                const value = target[key];
                if (key !== 'fillText') return typeof value === 'function' ? value.bind(target) : value;
                return (words, x) => {
                    const { width } = target.measureText(words);
                    ends.push([words, x + (target.textAlign === 'right' ? 0 : width)]);
                };
            },
            set(target, key, value) { target[key] = value; return true; },
        });
        panel.cursor.axis = 'time';
        panel.draw(context, panel.axis(), 0);
        return { ends, width: panel.width };
    })()""")
    assert len(found["ends"]) > 6
    assert [words for words, end in found["ends"] if end > found["width"]] == []


def test_a_wide_screen_is_used_by_the_pool(open_trace):
    page = open_trace(2560, "scheduler")
    columns, cell, width = page.view("[view.panel('pool').columns, view.panel('pool').cell, view.panel('pool').width]")
    assert columns * cell > 0.8 * width


@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1100, 1), (1440, 1), (2560, 2)])
def test_texts_stand_side_by_side_where_there_is_room(open_trace, width, columns):
    page = open_trace(width)
    page.view("view.cursor.seek(view.cursor.last)")
    page.frame()
    lefts = page.view("[...view.root.querySelectorAll('.wb-card')].map((card) => card.getBoundingClientRect().left)")
    assert len(lefts) > 4 and len(set(lefts)) == columns


def test_headings_have_no_gap_and_every_column_a_name(open_trace):
    page = open_trace(1280, "all")
    levels = [
        int(name[1]) for name in page.root.locator("h1, h2, h3, h4").evaluate_all("(all) => all.map((h) => h.tagName)")
    ]
    assert levels[0] == 1 and 2 in levels
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    heads = page.root.locator("[data-panel=events] thead th").all_inner_texts()
    assert heads == ["step", "mark", "event", "request", "why"]


def test_the_end_of_a_text_is_named(open_trace):
    page = open_trace(1280)
    words = page.view("""(() => {
        const { store } = view, request = store.requests[0], last = request.tokens.at(-1);
        const named = () => store.tokenText(request, request.tokens.length - 1);
        last.text = "";
        request.finishReason = "stop";
        const alone = named();
        request.hasText = true;
        const end = named();
        request.finishReason = "length";
        return [alone, end, named()];
    })()""")
    assert words[1] == "⟨end of text⟩" and words[0] == words[2] and words[0].startswith("⟨token ")


SIZES = [
    (134_515_008, "135 million weights writes well and gets many facts wrong"),
    (49_664, "49,664 weights writes nothing that makes sense"),
    (7_000_000_000, ""),
]


@pytest.mark.parametrize(("size", "said"), SIZES)
def test_a_small_model_is_said_to_get_facts_wrong(open_trace, size, said):
    page = open_trace(1280)
    words = page.view(
        "(() => { view.store.facts.model = { num_parameters: argument }; view.question.ask.update(view.status); "
        "const { small } = view.question.ask; return small.hidden ? '' : small.textContent; })()",
        size,
    )
    assert said in words and bool(words) == bool(said)


@pytest.fixture
def low_view(open_page, tmp_path, trace):
    """A view as ``watch(height=420)`` shows it, of an engine that is paused."""

    def open_(width):
        to_html(trace, tmp_path / "low.html")
        page = (tmp_path / "low.html").read_text(encoding="utf-8")
        status = '{ live: true, state: "paused", can: ["fork", "breakpoints"], explains: true, handled: 99 }'
        values = f"status: {status}, options: {{ height: 420 }}"
        saved = "status: { live: false }, options: { page: true }"
        assert saved in page
        (tmp_path / "low.html").write_text(page.replace(saved, values), encoding="utf-8")
        opened = open_page(f"file://{tmp_path}/low.html", width=width, height=900)
        opened.wait(f"view.store.numSteps === {len(trace)} && view.root.dataset.low === 'true'")
        opened.frame()
        return opened

    return open_


@pytest.mark.parametrize("width", (390, 800, 1100, 1440))
def test_a_low_view_has_two_thirds_for_its_pictures(low_view, width):
    page = low_view(width)
    whole, bars = (page.root.bounding_box(), page.root.locator(".wb-controls").bounding_box())
    first = page.root.locator(".wb-panel canvas[tabindex]:visible").first.bounding_box()
    assert whole["height"] == 420
    assert bars["y"] + bars["height"] - whole["y"] <= 140
    assert first["y"] - whole["y"] <= (210 if width == 390 else 160), "the first picture, below its legend"
    speed, find = page.root.get_by_label("Playback speed"), page.root.get_by_role("searchbox")
    assert not speed.is_visible() and not find.is_visible()
    page.root.get_by_role("button", name="Tools").click()
    assert speed.is_visible() and find.is_visible()


def test_the_box_for_a_question_opens_in_a_low_view_with_its_button(low_view):
    page = low_view(1100)
    box, ask = page.root.get_by_role("textbox", name="Prompt"), page.root.get_by_role("button", name="Ask")
    assert not box.is_visible()
    ask.click()
    assert box.evaluate("(box) => box.getRootNode().activeElement === box")
    box.fill("Why?")
    page.root.get_by_role("button", name="Next step").focus()
    assert box.is_visible(), "a question that is written stays"
    box.fill("")
    page.root.get_by_role("button", name="Next step").focus()
    assert not box.is_visible()
