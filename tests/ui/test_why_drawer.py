"""Why a request took so long, in the drawer."""

from workbench import simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.viz import export_html


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
    page = page_of(long_trace)
    parts = [
        {"cause": name, "kind": name, "amount": "1 s", "share": 0.2, "is_own": own, "is_listed": True,
         "culprits": [], "tokens": [], "more": 0, "first": 0, "last": 0}
        for name, own in (("a", True), ("b", False), ("c", False), ("d", True), ("e", False), ("f", False))
    ]  # fmt: skip
    answer = {
        "request": page.view("view.store.requests[0].id"),
        "spans": [
            {"name": "whole", "total": "1 s", "parts": parts},
            {"name": "first token", "total": "1 s", "parts": parts[::-1]},
        ],
    }
    page.view("(view.status = {...view.status, explanations: {[argument.request]: argument}}, null)", answer)
    page.view("view.inspector.pin({ kind: 'request', request: 0 })")
    page.frame()
    looks = "(all) => all.map((e) => { const s = getComputedStyle(e); return s.backgroundColor + s.backgroundImage; })"
    for marks in (".wb-bar-of-parts i", ".wb-part"):
        found = page.root.locator(f".wb-why {marks}").evaluate_all(looks)
        assert len(found) == 12 and len(set(found)) == 6, marks
        assert found[:6] == found[:5:-1], f"{marks}: a cause looks the same in both"
