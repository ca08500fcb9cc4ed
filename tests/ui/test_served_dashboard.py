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


def test_copy_link_shows_and_copies_a_link_to_the_run(open_page):
    with server_of(make_chat_model()) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
        assert server.ask("POST", "/v1/completions", body)[0] == 200
        watched = open_page(f"http://127.0.0.1:{server.port}/dashboard")
        watched.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        watched.page.wait_for_selector(".wb-root .wb-panel")
        watched.page.locator(".wb-transport button", has_text="Copy link").click()
        field = watched.page.locator("input.wb-long-link")
        field.wait_for(state="visible")
        watched.page.get_by_text("nothing is uploaded").wait_for()
        link = field.input_value()
        assert link.startswith("http://127.0.0.1:5007/#step=") and "&run=" in link
        assert watched.page.evaluate("navigator.clipboard.readText()") == link
        watched.page.keyboard.press("Escape")
        assert not field.is_visible()
