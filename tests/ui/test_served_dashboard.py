"""The dashboard of ``workbench serve`` in a browser: all that a page sends is taken."""

from raw_clients import server_of
from serve_helpers import make_chat_model, wait_for


def test_a_page_asks_moves_its_cursor_and_stays_connected(open_page):
    with server_of(make_chat_model()) as server:
        for _ in range(3):
            body = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
            assert server.ask("POST", "/v1/completions", body)[0] == 200
        watched = open_page(f"http://127.0.0.1:{server.port}/dashboard")
        watched.page.wait_for_selector(".wb-root .wb-panel")
        (session,) = server.server.dashboard.get_sessions("/dashboard")
        view = next(model for model in session.document.models if "command" in model.properties())
        wait_for(lambda: view.mounted, 60)
        for number in range(3):
            watched.page.keyboard.press("ArrowLeft")
            wait_for(lambda before=number: view.step is not None and view.step <= 57 + 2 - before, 60)
        watched.page.set_viewport_size({"width": 700, "height": 600})
        watched.page.locator("button", has_text="Save HTML").first.evaluate("button => button.click()")
        wait_for(lambda: view.command.get("name") == "save_html" and view.download, 60)
        assert session.connection_count == 1
