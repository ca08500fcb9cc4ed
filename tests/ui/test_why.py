"""Why a request took so long, in the drawer."""

from workbench import simulate
from workbench.simulation.cost_model import CostModel


def test_the_drawer_splits_a_request_into_causes_whose_culprits_are_links(open_page, serve, page_of):
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

    saved = page_of(trace)  # a page without a host cannot ask
    saved.view("view.inspector.pin({ kind: 'request', request: 0 })")
    saved.frame()
    assert saved.root.locator(".wb-drawer").is_visible()
    assert saved.root.get_by_role("button", name="Why so long?").count() == 0
