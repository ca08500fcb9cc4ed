"""Labels are whole or hidden, a search always answers, a comparison closes, and a page has a heading and a landmark."""

import msgspec
import pytest

from workbench import Engine, EngineConfig, Trace, simulate
from workbench.viz.export_html import to_html

REQUESTS = [{"id": f"chat-{n}", "prompt": {"len": 40}, "max_tokens": 6, "arrival_step": n} for n in (1, 2, 12)]
TIMINGS = {"schedule": 0.002, "prepare": 0.0005, "forward": 0.04, "sample": 0.004, "update": 0.001}

BARS = """[...view.root.querySelectorAll('.wb-phases li')].map((bar) => {
    const words = document.createRange();
    words.selectNodeContents(bar);
    const [text, box] = [words.getBoundingClientRect(), bar.getBoundingClientRect()];
    return { title: bar.title, needed: text.width, width: box.width, right: text.right <= box.right + 0.5,
             below: text.top >= box.bottom - 1 };
})"""


@pytest.fixture
def trace():
    bare = simulate({"requests": REQUESTS}, config={"max_num_batched_tokens": 32})
    timed = Trace(bare.meta)
    for info in bare.requests.values():
        timed.add_request(info)
    for record in bare:
        times = {"time": record.step * 0.05, "end": record.step * 0.05 + 0.0475, "timings": TIMINGS}
        timed.append(msgspec.structs.replace(record, **times))
    return timed


def open_tools(page, width):
    """A phone has the phases and the search behind a button."""
    if width == 390:
        page.root.get_by_role("button", name="Tools").click()


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("width", [390, 1440])
def test_a_label_of_a_phase_is_whole_or_hidden(page_of, trace, width):
    page = page_of(trace, width=width)
    open_tools(page, width)
    page.view("view.cursor.seek(1)")
    page.frame()
    bars = page.view(BARS)
    assert len(bars) == len(TIMINGS)
    for bar in bars:
        assert bar["title"].startswith(tuple(TIMINGS)) and "into the step" in bar["title"], (
            "the tooltip has every label"
        )
        fits = bar["needed"] + 4 <= bar["width"]
        assert (bar["right"] and not bar["below"]) if fits else bar["below"], bar
    assert {bar["below"] for bar in bars} == {True, False}, "some labels fit and some do not"


@pytest.mark.repeats(step=3)
@pytest.mark.parametrize("width, has_lines", [(390, True), (1100, True), (1440, False)])
def test_a_narrow_picture_keeps_its_legend(page_of, trace, width, has_lines):
    page = page_of(trace, width=width, height=900)
    page.view("view.show('story')")
    page.frame()
    for name in ("timeline", "gantt"):
        legend = page.root.locator(f"[data-panel={name}] .wb-legend")
        assert legend.is_visible() == has_lines, name
        if has_lines:
            box = legend.bounding_box()
            assert 16 <= box["height"] <= 64 and box["x"] + box["width"] <= width


def test_the_first_tab_stop_skips_to_the_pictures(page_of, trace):
    page = page_of(trace)
    page.page.keyboard.press("Tab")
    assert page.page.get_by_role("button", name="Skip to the pictures").evaluate(
        "(button) => button.getRootNode().activeElement === button"
    )
    page.page.keyboard.press("Enter")
    assert page.root.evaluate("(root) => root.getRootNode().activeElement.closest('.wb-panel') !== null")


def test_a_page_has_one_main_landmark_and_one_heading_of_the_first_level(page_of, open_page, serve, trace):
    for page in (page_of(trace), open_page(serve(trace))):
        page.wait(f"view.store.numSteps === {len(trace)}")
        page.frame()
        assert page.page.get_by_role("main").count() == 1
        assert page.page.get_by_role("heading", level=1).count() == 1
        assert page.page.get_by_role("main").get_by_role("heading", level=1).count() == 1


def test_every_search_is_answered(page_of, trace):
    page = page_of(trace)
    box, found = page.root.get_by_role("searchbox"), page.root.locator(".wb-answers li")

    def answers(query):
        box.fill(query)
        page.frame()
        return found.all_text_contents() if found.first.is_visible() else []

    def filtered():
        return page.view("view.cursor.filter")

    last = len(trace) - 1
    [answer] = answers("3")
    assert answer == page.view("view.store.sentences[3]") and filtered() == ""
    box.press("Enter")
    assert page.view("view.cursor.step") == 3
    assert answers("999") == [f"There is no step 999; the steps are from 0 to {last}."]
    step, count = answers("12")
    assert step == page.view("view.store.sentences[12]") and filtered() == "12", "a step, and a part of a name"
    assert count == "The panels show only chat-12. Open its card"
    found.last.get_by_role("button").click()
    assert page.view("view.inspector.pinned.request") == 2 and filtered() == "12"
    page.view("view.inspector.pin(null)")
    assert answers("CHAT") == ["3 requests of 3: the panels show no other."] and filtered() == "CHAT"
    box.press("Enter")
    assert not found.first.is_visible() and filtered() == "CHAT"
    [answer] = answers("nobody")
    assert answer.startswith("No request has “nobody” in its name. Search also finds “step 12”") and filtered() == ""
    box.press("Enter")
    assert found.first.is_visible(), "words that say why nothing is found stay"
    assert answers("") == [] and filtered() == ""


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("width", [390, 1440])
def test_the_answers_of_a_search_stay_on_the_screen(page_of, trace, width):
    page = page_of(trace, width=width)
    open_tools(page, width)
    page.root.get_by_role("searchbox").fill("nobody is called that way in this run")
    page.frame()
    box = page.root.locator(".wb-answers").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_a_comparison_closes_and_the_card_is_back(open_page, serve, tiny_llama):
    config = EngineConfig(max_num_batched_tokens=24, block_size=4, num_blocks=128)
    with Engine(tiny_llama, config) as engine:
        engine.add_request(list(range(5, 65)), max_tokens=6)
        engine.run(progress=False)
        page = open_page(serve(engine))
        page.wait(f"view.store.numSteps === {len(engine.trace)}")
        card, compare = page.root.locator(".wb-end-card"), page.root.locator("[data-panel=compare]")
        card.get_by_role("button", name="Try a budget of 12").click()
        compare.wait_for(state="visible")
        page.frame()
        assert not card.is_visible()
        compare.get_by_role("button", name="Close").click()
        page.frame()
        assert not compare.is_visible() and card.get_by_role("button", name="Replay").is_visible()
        card.get_by_role("button", name="Try a budget of 12").click()
        compare.wait_for(state="visible")
        compare.get_by_role("button", name="Close").click()
        page.frame()
        page.page.keyboard.press("c")
        page.frame()
        assert compare.is_visible() and not card.is_visible(), "the comparison is kept, and the key shows it"


def test_a_saved_comparison_closes(open_page, tmp_path, trace):
    to_html(trace, tmp_path / "two.html", other=simulate({"requests": REQUESTS}))
    page = open_page(f"file://{tmp_path}/two.html")
    page.wait("view.other && view.other.numSteps > 0")
    compare = page.root.locator("[data-panel=compare]")
    compare.get_by_role("button", name="Close").click()
    assert not compare.is_visible()
    page.root.get_by_role("button", name="Compare: Show or hide").click()
    assert compare.is_visible()
