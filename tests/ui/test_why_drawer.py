"""Why a request took so long, in the drawer."""

from pathlib import Path

import pytest

from workbench import Trace, simulate
from workbench.analysis.causes import IDLE, KINDS
from workbench.apps.cli import main
from workbench.simulation.costs.cost_model import CostModel
from workbench.viz import export_html
from workbench.viz.layout.explanation import MARKS


def test_the_drawer_splits_a_request_into_causes_whose_culprits_are_links(open_page, serve):
    requests = [{"id": "long", "prompt": {"len": 900}, "max_tokens": 2, "arrival_time": 0.1}]
    requests += [{"id": "short", "prompt": {"len": 9}, "max_tokens": 5, "arrival_time": 0.101}]
    config = {"max_num_batched_tokens": 64, "num_blocks": 200}
    trace = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.01, per_sequence=0.001))
    page = open_page(serve(trace))
    page.wait(f"view.store.numSteps === {len(trace)}")
    page.view("view.inspector.pin({ kind: 'request', request: view.store.byId.get('short').index })")
    drawer = page.root.locator(".wb-drawer")
    drawer.get_by_role("button", name="Why so long?").click()
    drawer.locator("li").first.wait_for()
    bars = drawer.locator(".wb-bar-of-parts")
    assert bars.count() >= 2
    bar, parts = bars.first.bounding_box(), bars.first.locator("i")
    widths = [parts.nth(i).bounding_box()["width"] for i in range(parts.count())]
    assert abs(sum(widths) + len(widths) - 1 - bar["width"]) < 2
    explanation = trace.explain("short")
    assert abs(max(widths) / bar["width"] - explanation.parts[0].amount / explanation.total) < 0.05
    assert "waiting for the token budget" in drawer.locator("li").first.inner_text()
    drawer.get_by_role("button", name="long", exact=True).first.click()
    page.frame()
    assert drawer.get_by_role("heading", level=3).text_content() == "long"
    drawer.get_by_role("button", name="Why so long?").wait_for()


def test_a_saved_page_explains_its_slowest_requests(page_of, monkeypatch):
    monkeypatch.setattr(export_html, "MAX_EXPLAINED", 2)
    requests = [{"id": "</script>", "prompt": {"len": 900}, "max_tokens": 2, "arrival_time": 0.1}]
    requests += [{"id": "short", "prompt": {"len": 9}, "max_tokens": 5, "arrival_time": 0.101}]
    requests += [{"id": "early", "prompt": {"len": 9}, "max_tokens": 2}]
    config = {"max_num_batched_tokens": 64, "num_blocks": 200}
    trace = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.01, per_sequence=0.001))
    page = page_of(trace)
    page.view("view.inspector.pin({ kind: 'request', request: view.store.byId.get('short').index })")
    page.frame()
    drawer = page.root.locator(".wb-drawer")
    assert drawer.get_by_role("button", name="Why so long?").count() == 0
    assert "waiting for the token budget: </script>" in drawer.locator(".wb-why li").first.inner_text()
    page.view("view.inspector.pin({ kind: 'request', request: view.store.byId.get('early').index })")
    page.frame()
    assert "Run: workbench trace explain TRACE early" in drawer.inner_text()


def test_the_drawer_names_the_adapter_of_a_request(page_of):
    requests = [{"id": "plain", "prompt": {"len": 9}}, {"id": "tuned", "prompt": {"len": 9}, "adapter": "<b>french"}]
    page = page_of(simulate({"config": {"num_blocks": 50}, "requests": requests}))
    for name, said in (("tuned", True), ("plain", False)):
        page.view(f"view.inspector.pin({{ kind: 'request', request: view.store.byId.get('{name}').index }})")
        page.frame()
        assert ("adapter\n<b>french" in page.root.locator(".wb-drawer").inner_text()) == said


def test_each_cause_has_a_mark_of_its_own_in_all_bars(page_of, long_trace):
    """All of them look different, and those that are not red look the same in every card."""
    page = page_of(long_trace)
    parts = [
        {"cause": kind, "kind": kind, "amount": "1 s", "share": 0.02, "is_own": kind in ("own", *IDLE),
         "is_listed": True, "culprits": [], "tokens": [], "more": 0, "first": 0, "last": 0, "mark": MARKS[kind]}
        for kind in KINDS
    ]  # fmt: skip
    answer = {
        "request": page.view("view.store.requests[0].id"),
        "spans": [
            {"name": "whole", "total": "1 s", "parts": parts},
            {"name": "first token", "total": "1 s", "parts": parts[::-1]},
        ],
    }
    few = [part for part in parts if part["kind"] in ("before_part", "stall", "seats", "own")][::-1]
    other = {"request": page.view("view.store.requests[1].id"), "spans": [{"name": "w", "total": "1 s", "parts": few}]}
    answers = {each["request"]: each for each in (answer, other)}
    page.view("(view.status = {...view.status, explanations: argument}, null)", answers)
    page.view("view.inspector.pin({ kind: 'request', request: 0 })")
    page.frame()
    assert "Red is the largest part" in page.root.locator(".wb-why .wb-hint").text_content()
    parts_of_look = "[s.backgroundColor, s.backgroundImage, s.backgroundSize].join()"
    looks = f"(all) => all.map((e) => getComputedStyle(e)).map((s) => {parts_of_look})"
    for marks in (".wb-bar-of-parts i", ".wb-part"):
        found = page.root.locator(f".wb-why {marks}").evaluate_all(looks)
        count = len(KINDS)
        assert len(found) == 2 * count and len(set(found)) == count, marks
        assert found[:count] == found[: count - 1 : -1], f"{marks}: a cause looks the same in both"
    page.view("view.inspector.pin({ kind: 'request', request: 1 })")
    page.frame()
    again = dict(zip([part["kind"] for part in few], page.root.locator(".wb-why .wb-part").evaluate_all(looks)))
    assert [again[kind] for kind in ("before_part", "own")] == [
        found[KINDS.index(kind)] for kind in ("before_part", "own")
    ]
    assert again["stall"] == found[KINDS.index("stall")] and again["seats"] != found[KINDS.index("seats")], "one is red"


AT_CLOSE = """(root) => {
  const drawer = root.querySelector(".wb-drawer"), close = drawer.querySelector("header button.wb-quiet");
  const { left, top, width, height } = close.getBoundingClientRect();
  const name = drawer.querySelector("h3").getBoundingClientRect(), document = root.getRootNode();
  const at = (x, y) => document.elementFromPoint(x, y);
  return {
    close: at(left + width / 2, top + height / 2) === close,
    name: at(name.left + 4, (name.top + name.bottom) / 2) === drawer.querySelector("h3"),
    height: drawer.offsetHeight,
  };
}"""


@pytest.mark.parametrize("size", [(390, 844), (390, 664), (320, 700)])
def test_a_card_can_be_closed_at_once_on_a_phone(open_page, serve, tmp_path, size):
    """Its head is below the bars: in a page around a request, in a live one, with a message, after a pin."""
    served = Path(__file__).parents[2] / "notebooks" / "data" / "vllm_served.jsonl.gz"
    who = "cmpl-bench-5-26-0"
    assert main(["trace", "html", str(served), "--around", who, "--out", str(tmp_path / "around.html")]) == 0
    saved = open_page(f"file://{tmp_path}/around.html#incident", width=size[0], height=size[1])
    live = open_page(serve(Trace.load(served)), width=size[0], height=size[1])
    live.wait("view.store.numSteps > 100")
    index = "view.store.requests.findIndex(({ id }) => id.startsWith(argument))"
    live.view(f"view.inspector.pin({{ kind: 'request', request: {index} }})", who)
    live.root.get_by_role("button", name="Why so long?").click()
    live.root.locator(".wb-drawer .wb-why li").first.wait_for()
    for page in (saved, live):
        page.wait("!view.inspector.element.hidden")
        page.frame()
        found = page.root.evaluate(AT_CLOSE)
        assert found["close"] and found["name"] and found["height"] > 200, found
        page.view("view.say('A message about the run, whose words take several lines of a phone: ' + 'so '.repeat(40))")
        page.frame()
        page.frame()
        found = page.root.evaluate(AT_CLOSE)
        assert found["close"] and found["name"], (found, "below a message")
        page.root.locator(".wb-drawer > header button").click()
        page.wait("!view.inspector.pinned")
        page.view("view.inspector.pin({ kind: 'block', block: 3 })")
        page.frame()
        assert page.root.evaluate(AT_CLOSE)["close"]


def test_a_narrow_phone_has_the_whole_name_and_each_comma_behind_its_request(open_page, tmp_path):
    recording = Path(__file__).parents[2] / "notebooks/data/vllm_served.jsonl.gz"
    slowest = Trace.load(recording).slowest(1)[0].request_id
    out = tmp_path / "page.html"
    assert main(["trace", "html", str(recording), str(out), "--around", slowest]) == 0
    page = open_page(f"file://{out}#incident", width=320, height=700)
    page.root.locator(".wb-why li").first.wait_for()
    name = page.root.locator(".wb-name")
    assert name.evaluate("(name) => name.scrollWidth <= name.clientWidth")
    assert page.page.evaluate("document.documentElement.scrollWidth") == 320
    rows = page.root.locator(".wb-why li > span").evaluate_all(
        "(rows) => rows.map((row) => [...row.childNodes].map(({ textContent }) => textContent))"
    )
    parts = [part for row in rows for part in row]
    assert not any(part.startswith(",") for part in parts), "it would stand alone on a line"
    assert sum(part.endswith(",") for part in parts) > 3
