"""The page of a running server in a browser: it grows as the server is asked, and is as wide as a phone."""

import socket
from itertools import chain
from types import SimpleNamespace

from tests.formats.test_live_scrapes import TEXTS, serving
from workbench.trace.formats import live_scrapes


def test_the_page_of_a_server_grows(browser, monkeypatch):
    from workbench.viz import app
    from workbench.viz.server_page import make_server_app

    at = iter(range(1000, 2000, 5))
    clock = SimpleNamespace(time=lambda: float(next(at)), monotonic=live_scrapes.time.monotonic)
    monkeypatch.setattr(live_scrapes, "time", clock)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving(chain(TEXTS, [503])) as url:
        follower = live_scrapes.ServerFollower(url)
        server = app.serve_session(make_server_app(follower), port=port, threaded=True)
        page = browser.new_page(viewport={"width": 390, "height": 900})
        sockets = []
        page.route_web_socket("**/ws*", lambda route: (sockets.append(route), route.connect_to_server()))
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_text("waiting for the second look").wait_for()
        follower.look()
        page.get_by_text("4 running, 5 waiting, 15% of 59 KV blocks in use").wait_for()
        for title in ("requests", "use of KV blocks", "prompt tokens found in the prefix cache", "preemptions"):
            assert page.locator(".wb-fleet svg").get_by_text(title, exact=True).count() == 1, title
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert "workbench.vllm.RecordingScheduler" in page.locator(".wb-fleet").inner_text()
        follower.look()
        follower.look()
        page.get_by_text("HTTP status 503").wait_for()
        sockets[-1].close()  # as at the end of the page's own server
        page.get_by_text("The server does not answer: start it again").wait_for()
        page.close()
        server.stop()
