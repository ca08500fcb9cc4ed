"""The page of several ranks in a browser: a table that grows, and the dashboard of each rank behind a link."""

import re
import socket

import pytest

from workbench import simulate, simulate_fleet
from workbench.trace import TraceWriter
from workbench.trace.readings.fleet import Fleet
from workbench.trace.storage import lines_of


def record(folder, rank, num_requests):
    requests = [{"id": f"r{rank}-{i}", "prompt": {"len": 20 + i}, "max_tokens": 4} for i in range(num_requests)]
    trace = simulate({"config": {"max_num_batched_tokens": 32, "num_blocks": 64}, "requests": requests})
    path = folder / f"vllm-20260101-120000-node1-rank{rank}-{rank}-0-00000.jsonl"
    with TraceWriter(path, trace.meta) as writer:
        for line in lines_of(trace):
            writer.write(line)


@pytest.fixture
def address(tmp_path):
    pytest.importorskip("panel")
    from workbench.viz import app
    from workbench.viz.fleet_page import make_fleet_app

    record(tmp_path, 0, 3)
    record(tmp_path, 1, 5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Fleet(tmp_path, whole=False) as fleet:
        fleet.start()
        server = app.serve_session(make_fleet_app(fleet), port=port, threaded=True)
        yield f"http://127.0.0.1:{port}/"
        server.stop()


def test_replicas_are_rows_of_one_picture_with_the_way_of_a_request(browser, tmp_path):
    """At the width of a phone and of a desktop nothing is wider than the page; a request that is in none is said."""
    from workbench.viz import app
    from workbench.viz.fleet_page import make_fleet_app

    requests = [{"id": f"r{n}", "prompt": {"len": 50}, "max_tokens": 9, "arrival_time": n / 9} for n in range(9)]
    run = simulate_fleet({"requests": requests, "cost_model": {"fixed": 0.01}}, replicas=3)
    run.save(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Fleet(tmp_path) as fleet:
        server = app.serve_session(make_fleet_app(fleet), port=port, threaded=True)
        for width in (390, 1440):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(f"http://127.0.0.1:{port}/")
            picture = page.locator(".wb-fleet svg")
            picture.wait_for()
            assert [picture.get_by_text(f"replica-{n}").count() for n in range(3)] == [1, 1, 1]
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for name, shown in (("r4", "the way of r4"), ("nobody", "request 'nobody' has no step")):
                page.get_by_label("Show the way of request").fill(name)
                page.get_by_role("button", name="Show").click()
                page.get_by_text(shown).first.wait_for()
            page.close()
        server.stop()


def test_the_table_leads_to_each_rank_and_shows_ranks_that_come_later(browser, address, tmp_path):
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector(".wb-fleet")
    rows = page.locator(".wb-fleet tbody tr")
    assert rows.nth(0).inner_text().startswith("rank 0") and rows.nth(2).inner_text().startswith("together")
    requests = page.locator(".wb-fleet thead th").all_inner_texts().index("requests")
    assert [row.locator("td").nth(requests).inner_text() for row in rows.all()] == ["3", "5", "8"]
    record(tmp_path, 2, 2)
    page.get_by_role("link", name="rank 2").click()
    page.get_by_text(re.compile("r2-1")).first.wait_for()
    assert page.get_by_role("link", name="rank 2").get_attribute("aria-current") == "page"
    page.get_by_role("link", name="All ranks").click()
    page.wait_for_selector(".wb-fleet")
    page.close()


def test_the_table_says_that_its_server_is_gone(browser, address):
    page = browser.new_page()
    sockets = []
    page.route_web_socket("**/ws*", lambda route: (sockets.append(route), route.connect_to_server()))
    page.goto(address)
    page.wait_for_selector(".wb-fleet")
    words = page.get_by_text("The server does not answer: start it again, and load this page again.")
    page.wait_for_function("Bokeh.documents[0]?.is_idle")
    assert words.count() == 0
    sockets[-1].close()  # as at the end of the server
    words.wait_for()
    page.close()
