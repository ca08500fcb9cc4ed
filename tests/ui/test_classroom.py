"""Visitors of a served dashboard: a cursor each, a teacher to follow and to leave, and predictions."""

import io
import re

import pytest
import zxingcpp
from PIL import Image
from viz_traces import ReplayingController

from workbench import Engine, EngineConfig
from workbench.viz import app
from workbench.viz.classroom import Classroom


@pytest.fixture
def controller(long_trace):
    return ReplayingController(long_trace)


@pytest.fixture
def address(serve, controller, monkeypatch):
    """The address of a dashboard of 60 steps, and its class."""
    room = Classroom()
    monkeypatch.setattr(app, "Classroom", lambda: room)
    for _ in range(60):
        controller.step()
    return serve(controller).rstrip("/"), room


def step_of(page):
    return page.view("view.cursor.step")


def test_each_visitor_has_a_cursor_and_a_language_level(open_page, address):
    one, two = open_page(f"{address[0]}/#story"), open_page(f"{address[0]}/#story")
    for page in (one, two):
        page.wait("view.store.numSteps === 60 && view.status.class")
    one.view("view.cursor.seek(7)")
    one.view("view.cursor.select(2)")
    one.root.get_by_role("button", name="Tools").click()
    one.root.get_by_role("button", name="Words: plain").click()
    one.frame()
    two.view("view.cursor.seek(30)")
    two.page.wait_for_timeout(500)
    assert (step_of(one), step_of(two)) == (7, 30)
    assert two.view("view.cursor.selected") is None and not two.root.locator(".wb-numbers").is_visible()
    assert "free blocks" in one.root.locator(".wb-numbers").text_content()
    assert not one.root.get_by_role("region", name="Class").is_visible(), "nobody teaches"


def test_a_follower_goes_where_the_teacher_is_and_leaves_again(open_page, address):
    url, room = address
    teacher, follower = open_page(f"{url}/#teach={room.key}"), open_page(f"{url}/#follow")
    visitor = open_page(f"{url}/#story")
    teacher.wait("view.status.class?.role === 'teacher' && view.status.class.followers === 1")
    assert room.key not in teacher.page.url, "the key leaves the address, which a screen may show"
    teacher.view("view.show('scheduler')")
    teacher.view("view.cursor.seek(11)")
    follower.wait("view.cursor.step === 11 && view.shown === 'scheduler'")
    assert visitor.view("view.shown") == "story" and step_of(visitor) == 59
    visitor.root.get_by_role("button", name="Follow the teacher").click()
    visitor.wait("view.cursor.step === 11 && view.shown === 'scheduler'")
    visitor.root.get_by_role("button", name="Leave").click()
    visitor.wait("view.status.class.role === 'visitor'")
    visitor.view("view.cursor.seek(20)")
    teacher.view("view.cursor.seek(3)")
    follower.wait("view.cursor.step === 3")
    assert step_of(visitor) == 20
    teacher.wait("view.status.class.followers === 1")


@pytest.mark.repeats(of="test_a_follower_goes_where_the_teacher_is_and_leaves_again")
def test_a_follower_waits_for_a_step_that_only_the_teacher_has(open_page, address, controller):
    url, room = address
    teacher, follower = open_page(f"{url}/#teach={room.key}"), open_page(f"{url}/#follow")
    teacher.wait("view.status.class?.role === 'teacher' && view.status.class.followers === 1")
    follower.wait("view.store.numSteps === 60")
    teacher.view("view.send('class', {what: 'lead', view: 'story', step: 65, follow: false, request: null})")
    follower.wait("view.status.class.lead.step === 65")
    for _ in range(10):
        controller.step()
    follower.wait("view.store.numSteps === 70")
    follower.wait("view.cursor.step === 65")


def test_a_wrong_key_makes_no_teacher(open_page, address):
    page = open_page(f"{address[0]}/#teach=guess")
    page.wait("view.status.message")
    assert "not the teacher's link" in page.root.get_by_role("alert").text_content()
    assert page.view("view.status.class.role") == "visitor"


def test_a_prediction_comes_before_the_picture_and_its_spread_is_the_teachers(open_page, address):
    url, room = address
    teacher = open_page(f"{url}/#teach={room.key}")
    followers = [open_page(f"{url}/#follow") for _ in range(2)]
    teacher.wait("view.status.class?.followers === 2")
    lesson = teacher.root.get_by_role("region", name="Class")
    lesson.get_by_label("Question").fill("Who waits in step 12?")
    lesson.get_by_label("Choices").fill("r1, r2, nobody")
    lesson.get_by_role("button", name="Ask the class").click()
    for page, answer in zip(followers, ("r2", "nobody"), strict=True):
        page.wait("view.status.class.question")
        page.frame()
        assert not page.root.locator("[data-panel=timeline]").is_visible(), "the picture comes after the answer"
        tells_nothing(page)
        page.root.get_by_role("region", name="Class").get_by_role("button", name=answer).click()
        page.root.locator("[data-panel=timeline]").wait_for()
    tells_nothing(teacher)
    teacher.wait("view.status.class.spread.reduce((sum, [, n]) => sum + n, 0) === 2")
    teacher.frame()
    assert "2 of 2 followers answered" in lesson.text_content()
    assert lesson.locator("li").all_text_contents() == ["r1", "r2", "nobody"], "the room can talk about them"
    assert lesson.locator("dd").count() == 0, "the projector does not show the first answers to the others"
    lesson.get_by_role("button", name="Show the picture").click()
    followers[0].wait("!view.status.class.question")
    box = followers[0].root.get_by_role("region", name="Class")
    for shown in (lesson, box):  # the prediction stays beside the picture
        shown.get_by_text("Who waits in step 12?").wait_for()
        assert shown.locator("dt").all_text_contents() == ["r1", "r2", "nobody"]
        assert shown.locator("dd").all_text_contents() == ["0 (0%)", "1 (50%)", "1 (50%)"]
    assert "You answered r2." in box.text_content() and "You answered" not in lesson.text_content()
    assert teacher.root.locator("[data-panel=timeline]").is_visible()
    lesson.get_by_role("button", name="r2", exact=True).click()
    for shown in (lesson, box):
        shown.get_by_text("It was r2. 1 of 2 answers is right.").wait_for()
    assert box.get_by_text("You answered r2: right.").count() == 1
    assert lesson.locator("dd").all_text_contents() == ["0 (0%)", "1 (50%) ✓", "1 (50%)"]
    lesson.get_by_role("button", name="nobody", exact=True).click()  # the teacher was wrong
    for shown in (lesson, box):
        shown.get_by_text("It was nobody. 1 of 2 answers is right.").wait_for()
    box.get_by_text("You answered r2: wrong.").wait_for()
    lesson.get_by_role("button", name="Close").click()
    box.get_by_text("Who waits in step 12?").wait_for(state="detached")
    lesson.get_by_label("Question").fill("How many steps?")
    assert lesson.get_by_label("Choices").input_value() == "", "the choices are those of one question"
    lesson.get_by_role("button", name="Ask the class").click()
    followers[0].wait("view.status.class.question")
    box = followers[0].root.get_by_label("Your prediction")
    box.fill("1000042")
    box.press("Enter")
    teacher.wait("view.status.class.spread.length === 1 && view.status.class.spread[0][0] === '1,000,042'")
    lesson.get_by_role("button", name="Show the picture").click()
    followers[0].root.get_by_text("You answered 1,000,042.").wait_for()
    lesson.get_by_label("The right answer").fill("1000040")
    lesson.get_by_role("button", name="Tell the class").click()
    told = "It was 1,000,040. 0 of 1 answer is right. The nearest answer is 1,000,042."
    followers[0].root.get_by_text(told).wait_for()


def tells_nothing(page):
    """Neither the film of a step nor the search answers what the class predicts."""
    page.view("(view.film.show(), view.controls.search.input.value = 'step 1', view.controls.search.typed())")
    assert page.view("view.film.element.hidden"), "nor does it begin, to be there when the answers are"
    answers = page.view("view.controls.search.found.map(({ words }) => words)")
    assert answers == ["The class predicts: the pictures come after its answers."]
    assert page.root.get_by_text(answers[0]).first.is_visible()
    page.view("(view.controls.search.input.value = '', view.controls.search.typed(), view.toggleFork())")
    assert page.view("view.whatIf.element.hidden !== false"), "nor what would happen under another setting"
    assert page.view("view.controls.message.textContent") == answers[0]


@pytest.mark.parametrize("allowed", [True, False])
def test_the_followers_link_is_shown_where_a_page_may_not_copy(open_page, address, allowed):
    """As on every page of an address other than 127.0.0.1 without encryption: navigator.clipboard is not there."""
    url, room = address
    teacher = open_page(f"{url}/#teach={room.key}")
    teacher.wait("view.status.class?.role === 'teacher'")
    copied = "{ writeText: (text) => { globalThis.copied = text; return Promise.resolve(); } }"
    value = copied if allowed else "undefined"
    teacher.view(f"Object.defineProperty(navigator, 'clipboard', {{ value: {value}, configurable: true }}) && null")
    teacher.frame()
    teacher.root.get_by_role("button", name="Copy the followers' link").click()
    box = teacher.root.get_by_role("dialog", name="The followers' link")
    words = box.get_by_role("status")
    words.get_by_text("pages opened by it follow you").wait_for()
    assert words.text_content().startswith("Copied" if allowed else "Copy the selected text")
    link = box.get_by_role("textbox")
    assert link.input_value() == f"{url}/#follow"
    assert link.evaluate("(input) => input.selectionEnd - input.selectionStart") == len(f"{url}/#follow")
    assert teacher.view("globalThis.copied ?? null") == (f"{url}/#follow" if allowed else None)


def test_the_role_of_a_page_outlives_a_reload(open_page, address):
    url, room = address
    teacher, follower = open_page(f"{url}/#teach={room.key}"), open_page(f"{url}/#follow")
    teacher.wait("view.status.class?.role === 'teacher'")
    follower.wait("view.status.class?.role === 'follower'")
    for page, role in ((teacher, "teacher"), (follower, "follower")):
        page.page.reload()
        page.wait(f"view.status.class?.role === '{role}'")
        assert page.view("location.hash") == "#story", "the key is not for the projector"
    follower.root.get_by_role("button", name="Leave").click()
    follower.wait("view.status.class.role === 'visitor'")
    follower.page.reload()
    follower.wait("view.status.class?.role === 'visitor'")
    room.key = "that of another server"
    teacher.page.reload()
    teacher.wait("view.status.message.includes('not the teacher')")
    teacher.frame()
    assert teacher.view("sessionStorage.getItem('workbench-class')") is None


def test_a_teacher_who_stops_can_teach_again(open_page, address):
    url, room = address
    follower = open_page(f"{url}/#follow")
    followed = follower.root.get_by_role("region", name="Class")
    followed.get_by_text("You follow: the teacher is not here yet.").wait_for()
    teacher = open_page(f"{url}/#teach={room.key}")
    follower.wait("view.status.class?.taught")
    lesson = teacher.root.get_by_role("region", name="Class")
    lesson.get_by_role("button", name="Stop teaching").click()
    follower.wait("!view.status.class.taught")
    lesson.get_by_text("You have stopped teaching.").wait_for()
    followed.get_by_text("The teacher has stopped: look around.").wait_for()
    assert not lesson.get_by_role("button", name="Follow the teacher").is_visible(), "there is none"
    teacher.page.reload()
    teacher.root.get_by_role("region", name="Class").get_by_role("button", name="Teach again").click()
    follower.wait("view.status.class.taught")
    followed.get_by_text("You follow the teacher.").wait_for()
    teacher.wait("view.status.class.role === 'teacher'")


def test_a_phone_that_is_loaded_again_is_counted_once(open_page, address):
    url, room = address
    teacher, phone = open_page(f"{url}/#teach={room.key}"), open_page(f"{url}/#follow", width=390)
    visitor = open_page(f"{url}/#story")
    teacher.wait("view.status.class?.followers === 1 && view.status.class.visitors === 2")
    for page, role in ((phone, "follower"), (visitor, "visitor"), (phone, "follower"), (teacher, "teacher")):
        page.page.reload()
        page.wait(f"view.status.class?.role === '{role}'")
        assert len(room._visitors) > 3, "the session of the page before still exists"
        teacher.wait("view.status.class?.visitors === 2 && view.status.class.followers === 1")
    teacher.frame()
    assert "1 of 2 visitors follows" in teacher.root.get_by_role("region", name="Class").text_content()


def test_a_follower_has_the_teachers_place_and_no_button_to_another(open_page, address):
    url, room = address
    teacher, follower = open_page(f"{url}/#teach={room.key}"), open_page(f"{url}/#follow")
    follower.wait("view.status.class?.role === 'follower'")
    teacher.view("view.cursor.seek(3)")
    follower.wait("view.cursor.step === 3")
    follower.frame()
    live = follower.root.locator(".wb-live")
    assert not live.is_visible() and teacher.root.locator(".wb-live").is_visible()
    follower.view("view.cursor.seek(5)")
    follower.frame()
    assert live.text_content() == "Back to the teacher"
    live.click()
    follower.wait("view.cursor.step === 3")
    follower.frame()
    assert not live.is_visible()


@pytest.mark.repeats(of="test_a_follower_goes_where_the_teacher_is_and_leaves_again")
def test_a_camera_reads_the_followers_link_from_the_teachers_page(open_page, address):
    url, room = address
    teacher = open_page(f"{url}/#teach={room.key}")
    teacher.wait("view.status.class?.role === 'teacher'")
    teacher.root.get_by_role("button", name="Show its QR code").click()
    code = teacher.root.locator(".wb-code canvas")
    code.wait_for()
    picture = Image.open(io.BytesIO(code.screenshot()))
    (found,) = zxingcpp.read_barcodes(picture)
    assert found.text == f"{url}/#follow" and found.format == zxingcpp.BarcodeFormat.QRCode
    follower = open_page(found.text)
    follower.wait("view.status.class?.role === 'follower'")
    teacher.root.get_by_role("button", name="Hide the QR code").click()
    code.wait_for(state="detached")


def test_the_code_of_a_page_at_a_loopback_address_is_one_that_phones_reach(open_page, address):
    """The server listens on more than the address that the teacher typed; behind a tunnel the typed one is right."""
    url, room = address
    port = url.rpartition(":")[2]
    for origin, expected, warns in (
        (f"http://192.0.2.7:{port}", f"http://192.0.2.7:{port}/#follow", False),
        ("http://192.0.2.7:1", f"{url}/#follow", True),  # another port than the page's: that of a tunnel
        (None, f"{url}/#follow", True),
    ):
        room.origins = [origin] if origin else []
        teacher = open_page(f"{url}/#teach={room.key}")
        teacher.wait("view.status.class?.role === 'teacher'")
        teacher.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        teacher.root.get_by_role("button", name="Show its QR code").click()
        code = teacher.root.locator(".wb-code canvas")
        code.wait_for()
        (found,) = zxingcpp.read_barcodes(Image.open(io.BytesIO(code.screenshot())))
        assert found.text == expected
        assert expected in teacher.root.locator(".wb-code").text_content()
        teacher.root.get_by_role("button", name="Copy the followers' link").click()
        assert teacher.root.locator("input.wb-long-link").input_value() == expected
        teacher.root.get_by_text(re.compile("Copied: |Copy the selected text: ")).wait_for()
        warned = teacher.root.get_by_text("Only this machine reaches this address").count()
        assert (warned == 2) is warns and (warned > 0) is warns, "below the code and beside the link"
        teacher.page.close()


def test_commands_of_one_moment_are_all_carried_out_once(open_page, address):
    """The host passes on the last value of a property; each command repeats those before it."""
    url, room = address
    teacher = open_page(f"{url}/#teach={room.key}")
    teacher.wait("view.status.class?.role === 'teacher'")
    taken, take = [], room.take
    room.take = lambda page, what, **values: (taken.append((what, values)), take(page, what, **values))
    teacher.root.evaluate(
        """(root) => {
          const { workbench: view } = root;
          view.send("class", { what: "questions", allowed: true });
          view.send("class", { what: "code", link: `http://192.0.2.7/${"x".repeat(370)}` });
          view.send("class", { what: "ask", text: "Who waits?" });
          view.send("class", { what: "lead", view: "story", step: 3, follow: false, request: null });
        }"""
    )
    teacher.wait("view.status.class.class_asks && view.status.class.question?.text === 'Who waits?'")
    teacher.wait("view.status.class.code.length")
    teacher.root.evaluate("(root) => root.workbench.send('class', { what: 'end' })")
    teacher.wait("!view.status.class.question")
    told = [what for what, values in taken if what != "lead" or values["step"] == 3]
    assert told == ["questions", "code", "ask", "lead", "end"]


def test_a_duel_hides_the_projector_until_it_is_settled(open_page, serve, tiny_llama, monkeypatch):
    room = Classroom()
    monkeypatch.setattr(app, "Classroom", lambda: room)
    with Engine(tiny_llama, EngineConfig(max_num_batched_tokens=32, block_size=4, num_blocks=128)) as engine:
        for i in range(3):
            engine.add_request(list(range(5 + i, 45 + i)), request_id=f"r{i}", max_tokens=8)
        engine.run(progress=False)
        url = serve(engine).rstrip("/")
        teacher = open_page(f"{url}/#teach={room.key}")
        follower = open_page(f"{url}/#follow")
        teacher.wait("view.status.class?.followers === 1 && view.status.state === 'idle'")
        teacher.view("view.show('kernel')")
        teacher.root.locator("[data-panel=weights]").get_by_text("Choose a layer").wait_for()
        assert not follower.root.locator("[data-panel=weights]").is_visible(), "a page that may not capture"
        teacher.root.get_by_role("button", name="What if").click()
        # Another budget or number of seats could be refused: the times of so short a run vary.
        teacher.root.get_by_role("spinbutton", name="num_blocks").fill("3")
        bet = teacher.root.get_by_role("button", name="Let the class bet")
        bet.click()
        teacher.wait("view.status.message.includes('num_blocks=3 is too small')")
        assert not follower.view("view.status.class.question"), "a duel that cannot be settled"
        what_if = teacher.root.get_by_role("button", name="What if")
        what_if.click()
        teacher.root.get_by_role("spinbutton", name="num_blocks").fill("16")
        bet.click()
        follower.wait("view.status.class.question")
        teacher.root.get_by_role("button", name="Call it off").click()
        follower.wait("!view.status.class.question")
        assert not follower.view("view.status.class.score")
        what_if.click()
        bet.click()
        follower.wait("view.status.class.question")
        teacher.wait("view.status.class.question")
        teacher.frame()
        for page in (teacher, follower):
            assert not page.root.locator("[data-panel=timeline]").is_visible(), "no picture before the bets"
        asked = follower.root.get_by_role("region", name="Class").text_content()
        assert "A is this run, with KV blocks 128. B has the same requests with KV blocks 16." in asked
        for name in ("What if", "Which setting?"):
            assert teacher.root.get_by_role("button", name=name).first.is_visible()
            assert follower.root.get_by_role("button", name=name).count() == 0, "nor its answer"
        follower.root.get_by_role("region", name="Class").get_by_role("button", name="A", exact=True).click()
        teacher.wait("view.status.class.spread[0][1] === 1")
        lesson = teacher.root.get_by_role("region", name="Class")
        lesson.get_by_role("button", name="Settle the duel").click()
        follower.wait("view.status.class.score")
        follower.frame()
        for page in (teacher, follower):
            page.wait("view.comparing")
            page.frame()
            score = page.root.locator(".wb-predict .wb-asked").bounding_box()
            assert 0 <= score["y"] < 700, "the score is what the class waits for"
        told = follower.root.get_by_role("region", name="Class").text_content()
        score = follower.view("view.status.class.score")
        assert score["sentence"] in told and f"You bet on A: {'right' if score['winner'] == 'A' else 'wrong'}." in told
        teacher.wait("view.comparing")
        teacher.root.locator("[data-panel=compare]").wait_for()


def test_two_routers_duel_over_the_requests_of_the_run(open_page, serve, tiny_llama, monkeypatch):
    room = Classroom()
    monkeypatch.setattr(app, "Classroom", lambda: room)
    with Engine(tiny_llama, EngineConfig(max_num_batched_tokens=32, block_size=4, num_blocks=128)) as engine:
        for i in range(9):
            engine.add_request(list(range(5 + i, 25 + i)), request_id=f"r{i}", max_tokens=4)
        engine.run(progress=False)
        url = serve(engine).rstrip("/")
        teacher, follower = open_page(f"{url}/#teach={room.key}"), open_page(f"{url}/#follow", width=390)
        teacher.wait("view.status.class?.followers === 1 && view.status.state === 'idle'")
        teacher.root.get_by_role("button", name="What if").click()
        dialog = teacher.root.get_by_role("dialog", name="What if")
        assert dialog.get_by_label("Router of A").input_value() != dialog.get_by_label("Router of B").input_value()
        dialog.get_by_label("Router of B").select_option("consistent_hash")
        dialog.get_by_label("replicas").fill("3")
        dialog.get_by_label("Measure of the routers").select_option("share of requests at the busiest replica")
        dialog.get_by_role("button", name="Bet on two routers").click()
        follower.wait("view.status.class.question")
        box = follower.root.get_by_role("region", name="Class")
        assert "go to 3 replicas" in box.text_content()
        sides = box.locator(".wb-sides dd").all_text_contents()
        assert [side.split(": ")[0] for side in sides] == ["round_robin", "consistent_hash"]
        assert sides[0] == "round_robin: One after another."
        assert box.get_by_role("button", name="A", exact=True).bounding_box()["height"] >= 40, "a finger's width"
        assert teacher.view("view.other") is None
        box.get_by_role("button", name="A", exact=True).click()
        teacher.wait("view.status.class.spread[0][1] === 1")
        teacher.root.get_by_role("button", name="Settle the duel").click()
        follower.wait("view.status.class.score")
        follower.frame()
        told = box.text_content()
        bars = box.locator(".wb-spread")
        assert bars.locator("dd").all_text_contents() == ["1 (100%)", "0 (0%)", "0 (0%)"]
        widths = [bar.bounding_box()["width"] for bar in bars.locator("i").all()]
        assert widths[0] > 60 and widths[1:] == [0, 0], "a bar for the one vote"
        assert "Both sides are simulated" in told and "You bet on A: " in told and "A 33.3%" in told
        assert follower.view("document.documentElement.scrollWidth") <= 390
        assert " -> " not in told, "values stand in a table"
        for page in (follower, teacher):
            page.wait("!view.status.class.pictures")  # it has them
            figures = page.root.locator(".wb-fleets figure")
            assert [text.split(":")[0] for text in figures.all_text_contents()] == ["A", "B"]
            drawn = "[...view.root.querySelectorAll('.wb-fleets img')].every((image) => image.naturalWidth > 100)"
            page.wait(drawn)
        # Sixteen busy replicas are 300 KB each, more than a browser takes as arguments of one call.
        many = "<svg xmlns='http://www.w3.org/2000/svg' width='200' height='9'>${'<g/>'.repeat(75000)}</svg>"
        kept = f"view.classroom.keepPictures({{ pictures: [['A: é', `{many}`]], score: {{ number: 0 }} }})"
        image = "view.classroom.pictures[0].querySelector('img')"
        assert teacher.view(f"({kept}, {image}.decode().then(() => true))")
        size = float(teacher.root.locator(".wb-asked").evaluate("(e) => parseFloat(getComputedStyle(e).fontSize)"))
        assert size >= 20, "read from the last row"
        first, second = (figure.bounding_box() for figure in follower.root.locator(".wb-fleets figure").all())
        assert second["y"] >= first["y"] + first["height"], "one below the other on a phone"
        teacher.frame()
        assert not teacher.view("view.comparing"), "no comparison with the run is shown"
        visitor = open_page(f"{url}/")
        visitor.wait("view.status.state === 'idle'")
        assert not visitor.root.get_by_label("Router of A").is_visible()


def test_a_question_survives_a_reload_in_a_colour_of_its_own(open_page, serve, tiny_llama):
    with Engine(tiny_llama, EngineConfig(max_num_batched_tokens=64, block_size=4, num_blocks=256)) as engine:
        for i in range(7):
            engine.add_request(list(range(5 + i, 15 + i)), request_id=f"r{i}", max_tokens=4)
        engine.run(progress=False)
        url = serve(engine).rstrip("/") + "/#story"
        page, other = open_page(url), open_page(url)
        page.wait("view.status.state === 'idle' && view.store.requests.length === 7")
        before = page.view("view.store.requests.map(({ index }) => view.theme.hue(index))")
        box = page.root.get_by_role("textbox", name="Prompt")
        box.fill("w7 w8 w9")
        box.press("Enter")
        page.wait("view.store.requests.length === 8 && view.store.requests[7].own")
        mine = page.view("view.theme.hue(7)")
        assert page.view("view.store.requests.slice(0, 7).map(({ index }) => view.theme.hue(index))") == before
        assert mine and mine not in before
        other.wait("view.store.requests.length === 8")
        assert other.view("view.theme.hue(7)") != mine, "it is the question of one page"
        page.page.reload()
        page.wait("view.store.requests.length === 8 && view.store.requests[7].own", timeout=60_000)
        assert page.view("view.theme.hue(7)") == mine
        page.frame()
        assert page.root.locator(".wb-own-prompt").text_content() == "w7 w8 w9"
