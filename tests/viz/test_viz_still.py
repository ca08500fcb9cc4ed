"""The picture that stays of a view in a saved notebook: when it is drawn again, and a view that is frozen."""

import base64
import gzip
import json
import re
from html import unescape

import pytest
from viz_traces import ReplayingController, workload

from workbench import simulate
from workbench.viz import still, watch

WIDGET = "application/vnd.jupyter.widget-view+json"


class Shown:
    """A display handle that keeps what it shows, and how often it was changed."""

    def __init__(self, bundle):
        self.bundle, self.updates = bundle, 0

    def update(self, bundle, raw):
        assert raw
        self.bundle, self.updates = bundle, self.updates + 1


@pytest.fixture
def displays(monkeypatch):
    """The outputs that are displayed, in a notebook whose cells end when ``end_cell`` is called."""
    found = []

    def display(bundle, *, raw, display_id=None):
        assert raw
        found.append(Shown(bundle))
        return found[-1]

    monkeypatch.setenv("WORKBENCH_HEADLESS", "1")
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(still, "_views", set())
    monkeypatch.setattr("workbench.viz.widget.refresh_after_cells", lambda view: still._views.add(view))
    return found


@pytest.fixture
def controller():
    return ReplayingController(simulate(workload(3, num_requests=4, max_num_batched_tokens=24)))


def test_the_picture_follows_the_run_and_leaves_the_widget_alone(displays, controller):
    watch(controller)._ipython_display_()
    widget, picture = displays
    assert WIDGET in widget.bundle and "text/html" not in widget.bundle
    assert "0 steps" in picture.bundle["text/html"] and "text/plain" not in picture.bundle
    still._refresh_all()
    assert picture.updates == 0, "nothing has happened"
    controller.step()
    controller.step()
    still._refresh_all()
    assert "2 steps" in picture.bundle["text/html"] and (picture.updates, widget.updates) == (1, 0)


def test_each_place_of_a_view_has_a_picture(displays, controller):
    view = watch(controller)
    view._ipython_display_()
    view._ipython_display_()
    controller.step()
    still._refresh_all()
    assert len(displays) == 4 and all("1 step" in shown.bundle["text/html"] for shown in displays[1::2])


def test_a_picture_that_cannot_be_drawn_spoils_no_cell(displays, controller, monkeypatch, caplog):
    watch(controller)._ipython_display_()
    controller.step()
    monkeypatch.setattr(still, "trace_html", lambda trace: 1 / 0)
    still._refresh_all()
    assert "could not be drawn" in caplog.text


@pytest.mark.parametrize("shown", [True, False])
def test_a_frozen_view_is_the_offline_page(displays, controller, shown):
    view = watch(controller, height=300)
    if shown:
        view._ipython_display_()
    while controller.step():
        pass
    view.freeze()
    assert view.comm is None, "the live view has ended"
    if shown:
        assert displays[0].bundle["text/html"] == "" and WIDGET not in displays[0].bundle
    html = displays[-1].bundle["text/html"]
    assert "height:300px" in html and 'sandbox="allow-scripts allow-downloads"' in html
    page = unescape(re.search(r'srcdoc="([^"]*)"', html)[1])
    assert page.startswith("<!doctype html>") and "default-src 'none'" in page and page.count("</script>") >= 2


@pytest.mark.parametrize("step", [None, 2])
def test_a_frozen_view_stays_at_its_step(displays, controller, step):
    view = watch(controller)
    while controller.step():
        pass
    view.shared_cursor.step = step
    view.freeze()
    page = unescape(re.search(r'srcdoc="([^"]*)"', displays[-1].bundle["text/html"])[1])
    found = re.search(r'id="place">([^<]*)<', page)
    place = found and json.loads(gzip.decompress(base64.b64decode(found[1])))
    assert place == (step and {"view": "story", "step": step, "request": None, "card": False})


@pytest.mark.parametrize("height", [199, 10_001, "tall", True])
def test_a_height_outside_its_range_is_refused(controller, height):
    with pytest.raises(ValueError, match="height must be"):
        watch(controller, height=height)
