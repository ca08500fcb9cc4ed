"""Visitors of a served dashboard: a cursor each, a teacher to follow and to leave, and predictions."""

import io

import pytest
import zxingcpp
from PIL import Image
from viz_traces import ReplayingController

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
        page.root.get_by_role("region", name="Class").get_by_role("button", name=answer).click()
        page.root.locator("[data-panel=timeline]").wait_for()
    teacher.wait("view.status.class.spread.reduce((sum, [, n]) => sum + n, 0) === 2")
    teacher.frame()
    assert "2 of 2 followers answered" in lesson.text_content()
    assert lesson.locator("dt").all_text_contents() == ["r1", "r2", "nobody"]
    assert lesson.locator("dd").all_text_contents() == ["0", "1", "1"]
    lesson.get_by_role("button", name="Show the picture").click()
    followers[0].wait("!view.status.class.question")
    lesson.get_by_label("Question").fill("How many steps?")
    lesson.get_by_label("Choices").fill("")
    lesson.get_by_role("button", name="Ask the class").click()
    followers[0].wait("view.status.class.question")
    box = followers[0].root.get_by_label("Your prediction")
    box.fill("42")
    box.press("Enter")
    teacher.wait("view.status.class.spread.length === 1 && view.status.class.spread[0][0] === '42'")


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
