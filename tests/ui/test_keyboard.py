"""Tab reaches every control that the eye sees: of each view, and of a live dashboard with its dialogs."""

import pytest
from tab_stops import unreached
from viz_traces import ReplayingController


@pytest.mark.repeats(step=4)
@pytest.mark.parametrize("view", ["story", "scheduler", "kernel", "all"])
def test_tab_reaches_every_control_of_a_view(page_of, long_trace, view):
    page = page_of(long_trace)
    page.view("view.show(argument)", view)
    page.view("view.inspector.pin({ kind: 'request', request: 3 })")
    page.frame()
    assert unreached(page.page) == []


@pytest.mark.repeats(of="test_tab_reaches_every_control_of_a_view")
def test_tab_reaches_every_control_of_a_live_dashboard_and_its_dialogs(open_page, serve, long_trace):
    controller = ReplayingController(long_trace)
    controller.tokenizer = type("Tokenizer", (), {"has_chat_template": True})()
    controller.fork = lambda **_: long_trace
    while controller.step() is not None and len(controller.trace) < 40:
        pass
    page = open_page(serve(controller).rstrip("/") + "/#story")
    page.wait("view.store.numSteps === 40")
    for keys in ([], ["?"], ["Escape", "b"], ["Escape", "w"], ["Escape", "a"]):
        for key in keys:
            page.page.keyboard.press(key)
        page.frame()
        assert unreached(page.page) == [], keys


def test_a_control_without_a_stop_is_noticed(page_of, long_trace):
    page = page_of(long_trace)
    page.root.evaluate("""(root) => {
        const planted = Object.assign(document.createElement("button"), { textContent: "planted", tabIndex: -1 });
        root.prepend(planted);
    }""")
    assert [html.partition(">")[0] for html in unreached(page.page)] == ['<button tabindex="-1"']


def test_a_card_that_a_key_opens_has_the_focus_and_gives_it_back(page_of, long_trace):
    page = page_of(long_trace)
    page.view("view.show('story')")
    page.frame()
    page.page.keyboard.press("/")
    page.page.keyboard.type(list(long_trace.requests)[2])
    focused = "view.root.getRootNode().activeElement"
    for end in ("Escape", "Enter"):
        page.view("view.controls.search.focus()")
        page.page.keyboard.press("Enter")
        page.wait("!view.inspector.element.hidden")
        page.frame()
        assert page.view(f"{focused} === view.inspector.title"), "a screen reader reads it"
        page.page.keyboard.press("ArrowRight")
        page.frame()
        assert page.view(f"{focused} === view.inspector.title"), "also at another step"
        if end == "Enter":
            page.page.keyboard.press("Tab")  # the button that closes it
        page.page.keyboard.press(end)
        page.wait("view.inspector.element.hidden")
        page.frame()
        assert page.view(f"{focused} === view.controls.search.input")
    page.root.locator("[data-panel=gantt] canvas[role=img]").click(position={"x": 20, "y": 26})
    page.wait("!view.inspector.element.hidden")
    page.frame()
    assert not page.view(f"view.inspector.element.contains({focused})"), "a pointer is where it was"


def test_rows_that_react_to_clicks_react_to_the_keyboard(page_of, long_trace):
    page = page_of(long_trace)
    page.view("view.show('scheduler')")
    page.view("view.cursor.seek(view.cursor.last)")
    page.frame()
    events = page.root.locator("[data-panel=events] tbody")
    steps = [event.step for step in long_trace for event in step.events if event.kind != "arrive"][::-1]
    buttons = events.get_by_role("button")
    assert buttons.count() == events.locator("tr").count() == min(300, len(steps))
    for place in (7, 3):
        at = steps.index(next(step for step in steps[place:] if step != steps[0]))
        buttons.nth(at).focus()
        page.page.keyboard.press("Enter")
        page.frame()
        assert page.view("view.cursor.step") == steps[at]
        assert events.evaluate("(rows) => rows.contains(rows.getRootNode().activeElement)"), "the next key is heard"
        steps = [step for step in steps if step <= steps[at]]
    rows = page.root.locator(".wb-table tbody tr:visible").filter(has=page.page.locator(".wb-link"))
    assert rows.count() and page.root.locator("tr[tabindex]").count() == 0
