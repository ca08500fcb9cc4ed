"""axe-core over every view, light and dark. It comes from npm: set WORKBENCH_AXE to the path of its axe.min.js."""

import os
from pathlib import Path

import pytest
from viz_traces import ReplayingController

SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def axe():
    path = os.environ.get("WORKBENCH_AXE", "")
    if not Path(path).is_file():
        pytest.skip("axe-core is not here: npm pack axe-core, and set WORKBENCH_AXE to its axe.min.js")
    return Path(path).read_text(encoding="utf-8")


def findings(page, axe):
    """Serious findings of axe as (rule, elements)."""
    if not page.page.evaluate("typeof axe === 'object'"):
        page.page.evaluate(axe)
    found = page.page.evaluate("async () => (await axe.run({ resultTypes: ['violations'] })).violations")
    return [
        (entry["id"], [node["html"][:120] for node in entry["nodes"]][:4])
        for entry in found
        if entry["impact"] in SERIOUS
    ]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_view_of_a_recording_has_a_serious_finding(axe, page_of, long_trace, dark):
    page = page_of(long_trace, dark=dark)
    for view in ("story", "scheduler", "kernel", "all"):
        page.view("view.show(argument)", view)
        page.view("view.inspector.pin({ kind: 'request', request: 3 })")
        page.frame()
        assert findings(page, axe) == [], view
    page.view("view.toggleTables()")
    page.frame()
    assert findings(page, axe) == [], "tables"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_dialog_of_a_live_view_has_a_serious_finding(axe, open_page, serve, long_trace, dark):
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
        assert findings(page, axe) == [], keys


def test_a_planted_fault_is_found(axe, page_of, long_trace):
    page = page_of(long_trace)
    page.root.evaluate("(root) => root.append(document.createElement('button'))")
    assert [rule for rule, _ in findings(page, axe)] == ["button-name"]
