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
