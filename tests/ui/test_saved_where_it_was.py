"""A page that is saved from a live view opens where the person was."""

import pytest
from viz_traces import random_trace

from workbench.viz.export_html import PagePlace, html_page

STATE = """() => {
  const view = document.querySelector('.wb-root').workbench, { store, cursor } = view;
  return [view.shown, store.label(cursor.step), store.requests[cursor.selected]?.id ?? null, view.comparing];
}"""


@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("place", [("scheduler", 7, 1), ("kernel", 0, None), ("story", -1, 0)])
def test_a_saved_page_opens_at_its_place(browser, tmp_path, place, compared):
    trace = random_trace(11)
    view, step, request = place[0], trace[place[1]].step, None if place[2] is None else list(trace.requests)[place[2]]
    other = random_trace(11) if compared else None
    path = tmp_path / "page.html"
    path.write_text(html_page(trace, other=other, opens_at=PagePlace(view, step, request)), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector(".wb-position:not(:empty)")
    assert page.evaluate(STATE) == [view, step, request, compared]
    page.close()
