"""A saved page in Firefox and WebKit, as Debian has them: the first picture, a search, and the card of a request.

`scripts/answer_in_clicks.py --browsers chromium firefox webkit` asks more questions, in more places.
"""

import contextlib
import time

import browsers
import pytest
from answer_in_clicks import Reader
from PIL import Image

INK = """(view.panel('timeline').canvas.getContext('2d').getImageData(0, 0, view.panel('timeline').canvas.width,
view.panel('timeline').canvas.height).data.reduce((set, byte, i, all) => i % 4 ? set :
set.add(all[i] << 16 | all[i + 1] << 8 | all[i + 2]), new Set()).size)"""
"""The number of colours of a picture."""


@pytest.fixture(scope="module", params=["firefox", "webkit"])
def browser_of_debian(request):
    if why := browsers.missing(request.param):
        pytest.skip(why)
    with contextlib.closing(browsers.launch(request.param)) as browser:
        yield browser


@pytest.mark.parametrize("kind", [browsers.Chromium, browsers.Firefox, browsers.WebKit])
def test_every_browser_can_be_made(kind):
    assert not kind.__abstractmethods__


def story_of(browser, trace, tmp_path, width):
    """A reader of the saved page of a trace, with all its steps."""
    trace.to_html(tmp_path / "trace.html")
    reader = Reader(browser)
    browser.resize(width, 900)
    browser.goto(f"file://{tmp_path}/trace.html#story")
    deadline = time.monotonic() + 60
    while reader.view("view.store.numSteps") != len(trace):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return reader


def test_the_first_picture_and_a_card(browser_of_debian, long_trace, tmp_path):
    reader = story_of(browser_of_debian, long_trace, tmp_path, 1280)
    reader.see("[data-panel=timeline] canvas")
    assert reader.view(INK) > 6, "a picture has several colours"
    reader.write(".wb-search input", "r39")
    reader.see(".wb-drawer h3", "r39", exact=True)
    assert reader.clicks == 2


def test_a_legend_that_was_hidden_is_painted_again(browser_of_debian, long_trace, tmp_path):
    """WebKit may forget what a hidden canvas showed: it still has its pixels, and the screen has none."""
    reader = story_of(browser_of_debian, long_trace, tmp_path, 1100)

    def colours():
        """The number of colours that the screen shows where the legend of the timeline is."""
        place = reader.see("[data-panel=timeline] .wb-legend")
        browser_of_debian.picture(tmp_path / "picture.png")
        box = reader.view(
            "(({ left, top, right, bottom }) => [left, top, right, bottom])"
            "(view.panel('timeline').legend.element.getBoundingClientRect())"
        )
        with Image.open(tmp_path / "picture.png") as picture:
            return place and len(picture.convert("RGB").crop(tuple(map(round, box))).getcolors(1 << 24))

    before = colours()
    assert before > 6
    for view in ("scheduler", "all", "story"):
        reader.view(f"(view.show('{view}'), true)")
        time.sleep(0.5)  # every view is painted before the next
    assert colours() > before / 2
