"""axe-core over every view, light and dark. It comes from npm: set WORKBENCH_AXE to the path of its axe.min.js."""

import pytest
from viz_traces import ReplayingController


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_view_of_a_recording_has_a_serious_finding(axe_findings, page_of, long_trace, dark):
    page = page_of(long_trace, dark=dark)
    for view in ("story", "scheduler", "kernel", "all"):
        page.view("view.show(argument)", view)
        page.view("view.inspector.pin({ kind: 'request', request: 3 })")
        page.frame()
        assert axe_findings(page.page) == [], view
    page.view("view.toggleTables()")
    page.frame()
    assert axe_findings(page.page) == [], "tables"


@pytest.mark.repeats(of="test_no_view_of_a_recording_has_a_serious_finding")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_dialog_of_a_live_view_has_a_serious_finding(axe_findings, open_page, serve, long_trace, dark):
    controller = ReplayingController(long_trace)
    controller.tokenizer = type("Tokenizer", (), {"has_chat_template": True})()
    controller.fork = lambda **_: long_trace
    while controller.step() is not None and len(controller.trace) < 40:
        pass
    page = open_page(serve(controller).rstrip("/") + "/#story", dark=dark)
    page.wait("view.store.numSteps === 40")
    for keys in (["?"], ["Escape", "b"], ["Escape", "w"], ["Escape", "a"], ["Escape", "/", "r", "Space", "3"]):
        for key in keys:
            page.page.keyboard.press(key)
        page.frame()
        assert axe_findings(page.page) == [], keys


def test_a_planted_fault_is_found(axe_findings, page_of, long_trace):
    page = page_of(long_trace)
    page.root.evaluate("(root) => root.append(document.createElement('button'))")
    assert [rule for rule, _ in axe_findings(page.page)] == ["button-name"]
