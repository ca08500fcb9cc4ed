"""A served page whose server ends, or whose phone leaves the network: it says so, rests, and comes back."""

from contextlib import contextmanager

import pytest
from viz_traces import ReplayingController

from workbench.viz import app
from workbench.viz.classroom import Classroom

WORDS = "The server does not answer: is it still running, and are you in its network?"
SCRIPTS = "**/*.js"


class Line:
    """A page and its line to the server, which the test cuts and mends."""

    def __init__(self, page, url):
        self.page = page
        self.sockets = []
        page.route_web_socket("**/ws*", self.connect)
        page.goto(url)
        self.root = page.locator(".wb-root").first
        self.wait("view.store.numSteps === 9 && view.status.class?.role")

    def connect(self, socket):
        socket.connect_to_server()
        self.sockets.append(socket)

    def cut(self):
        """As at the end of the server: nothing answers, and the websocket closes."""
        self.page.route(SCRIPTS, lambda route: route.abort())
        self.sockets[-1].close()

    def mend(self):
        self.page.unroute(SCRIPTS)

    def view(self, expression):
        return self.root.evaluate(f"(root) => {{ const view = root.workbench; return {expression}; }}")

    def wait(self, expression):
        self.page.wait_for_function(
            f"(root) => {{ const view = root.workbench; return {expression}; }}", arg=self.root.element_handle()
        )


@pytest.fixture
def line(browser, serve, long_trace, monkeypatch):
    """A function that opens a page of a class and returns its line."""
    room = Classroom()
    monkeypatch.setattr(app, "Classroom", lambda: room)
    controller = ReplayingController(long_trace)
    for _ in range(9):
        controller.step()
    url = serve(controller).rstrip("/")

    @contextmanager
    def line_(role, **options):
        context = browser.new_context(**options)
        context.set_default_timeout(60_000)
        try:
            yield Line(context.new_page(), f"{url}/#teach={room.key}" if role == "teacher" else f"{url}/#follow")
        finally:
            context.close()

    return line_


def test_a_page_without_its_server_says_so_rests_and_can_be_loaded_again(line):
    with line("teacher") as teacher:
        root = teacher.root
        prompt = root.get_by_role("textbox", name="Prompt")
        prompt.fill("Why is the sky blue?")
        assert root.get_by_role("group", name="Engine").is_visible()
        teacher.cut()
        root.get_by_text(WORDS).wait_for()
        root.get_by_text("not connected").wait_for()
        assert "kernel" not in root.locator(".wb-message").text_content()
        assert root.get_by_role("group", name="Engine").count() == 0, "buttons that nobody hears"
        assert not root.get_by_role("region", name="Class").is_visible(), "nobody follows"
        assert prompt.is_visible() and prompt.input_value() == "Why is the sky blue?"
        prompt.press("Enter")
        assert prompt.input_value() == "Why is the sky blue?", "what nobody hears must not be lost"
        again = root.get_by_role("button", name="Load the page again")
        assert not again.is_visible()
        teacher.page.keyboard.press("Escape")
        teacher.page.keyboard.press("Home")
        teacher.wait("view.cursor.step === 0")  # the pictures stay
        teacher.mend()
        again.click()
        teacher.wait("!view.gone && view.status.class?.role === 'teacher'")


def test_the_page_of_a_follower_comes_back_by_itself(line):
    with line("follower") as follower:
        follower.cut()
        follower.root.get_by_text(WORDS).wait_for()
        follower.mend()
        follower.page.wait_for_event("load")
        follower.wait("!view.gone && view.status.class?.role === 'follower'")


def test_a_network_that_goes_is_noticed_and_a_question_that_was_not_heard_comes_back(line):
    with line("teacher") as teacher:
        prompt = teacher.root.get_by_role("textbox", name="Prompt")
        teacher.view("view.model.save_changes = () => {}")  # nothing is sent
        prompt.fill("Why is the sky blue?")
        prompt.press("Enter")
        assert prompt.input_value() == ""
        teacher.root.get_by_text(WORDS).wait_for()
        assert not teacher.view("view.gone"), "the server answers for a script: only this command was not heard"
        teacher.page.context.set_offline(True)
        teacher.root.get_by_text("not connected").wait_for()
        assert prompt.input_value() == "Why is the sky blue?"


PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def test_a_phone_that_has_scrolled_has_the_words_and_the_way_back_in_sight(line):
    with line("teacher", **PHONE) as teacher:
        words = teacher.root.get_by_text(WORDS)
        again = teacher.root.get_by_role("button", name="Load the page again")

        def is_in_sight(element):
            box = element.bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= 844, box
            x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            return teacher.view(f"root.getRootNode().elementFromPoint({x}, {y})?.className")

        teacher.page.evaluate("scrollTo(0, 900)")
        teacher.cut()
        words.wait_for()
        teacher.page.wait_for_timeout(300)
        assert teacher.page.evaluate("scrollY") > 500, "the page stays where it was read"
        assert is_in_sight(words) == "wb-message"
        teacher.mend()
        again.wait_for()
        teacher.page.wait_for_timeout(300)
        assert is_in_sight(again) == "wb-button"
