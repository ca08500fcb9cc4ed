"""A page on paper and with the colours of the system: nothing is cut, nothing chosen is lost."""

from pathlib import Path

import pytest

from workbench.trace import Trace
from workbench.viz.export_html import html_page

ROOT = Path(__file__).parents[2]
FACTS = """() => {
  const root = document.querySelector('.wb-root'), wide = root.getBoundingClientRect().right;
  const shown = (selector) => [...root.querySelectorAll(selector)].filter((each) => each.offsetWidth);
  return {
    wide, theme: root.dataset.theme, controls: shown('.wb-button, .wb-quiet, .wb-tab, input, select').length,
    beyond: shown('img, canvas, table, p').filter((each) => each.getBoundingClientRect().right > wide + 1).length,
    cut: shown('.wb-scroll, .wb-table-view').filter((each) => each.scrollHeight > each.clientHeight + 1).length,
    pictures: shown('.wb-printed').length, canvases: shown('canvas').length,
  };
}"""


@pytest.fixture(params=["vllm_preemption", "vllm_served"])
def saved(request, browser, tmp_path):
    folder = {"vllm_preemption": "examples", "vllm_served": "notebooks/data"}[request.param]
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="dark")
    path = tmp_path / "page.html"
    path.write_text(html_page(Trace.load(ROOT / folder / f"{request.param}.jsonl.gz")), encoding="utf-8")
    page.goto(path.as_uri())
    page.wait_for_function("document.querySelector('.wb-root')?.workbench?.store.numSteps > 0")
    page.evaluate("document.querySelector('.wb-root').workbench.draw()")
    yield page
    page.close()


def check_paper(facts):
    assert 500 < facts["wide"] <= 720 and facts["theme"] == "light"
    assert facts["controls"] == 0 and facts["beyond"] == 0 and facts["cut"] == 0
    assert facts["pictures"] >= 3 and facts["canvases"] == 0


def check_screen(facts):
    assert facts["wide"] == 1440 and facts["theme"] == "dark"
    assert facts["controls"] > 10 and facts["pictures"] == 0 and facts["canvases"] >= 3


def test_a_printed_page_is_as_wide_as_paper_and_light(saved):
    check_screen(saved.evaluate(FACTS))
    saved.evaluate(f"addEventListener('beforeprint', () => globalThis.printed = ({FACTS})())")
    saved.pdf()
    check_paper(saved.evaluate("printed"))
    check_screen(saved.evaluate(FACTS))


def test_pictures_of_a_printed_page_are_not_blank(saved):
    """The images that stand for the canvases on paper have the pixels of the picture at that width."""
    saved.emulate_media(media="print")
    saved.locator(".wb-root[data-printing]").wait_for(state="attached")
    check_paper(saved.evaluate(FACTS))
    painted = saved.evaluate("""() => [...document.querySelectorAll('[data-panel=incident] img')].map((image) => {
      const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight), context = canvas.getContext('2d');
      context.drawImage(image, 0, 0);
      const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
      return [image.offsetWidth, data.filter((value, i) => i % 4 === 3 && value).length / (data.length / 4)];
    })""")
    assert 600 < painted[0][0] <= 690 and painted[0][1] > 0.02
    saved.emulate_media(media="screen")
    saved.locator(".wb-root:not([data-printing])").wait_for(state="attached")
    check_screen(saved.evaluate(FACTS))


BACKGROUNDS = """(root) => [true, false].map((on) => {
  const found = [...root.querySelectorAll(`button[aria-pressed="${on}"]`)].filter((each) => each.offsetWidth);
  return [...new Set(found.map((each) => getComputedStyle(each).backgroundColor))];
})"""


def test_the_chosen_tab_can_be_told_in_forced_colours(saved):
    saved.emulate_media(forced_colors="active")
    assert saved.evaluate("matchMedia('(forced-colors: active)').matches")
    saved.evaluate("document.querySelector('[data-panel=timeline] button[aria-pressed]').click()")
    chosen, others = saved.evaluate(f"({BACKGROUNDS})(document.querySelector('.wb-root'))")
    assert len(chosen) == 1 and others and chosen[0] not in others


def test_the_pressed_button_of_the_playground_can_be_told_in_forced_colours(browser):
    style = (ROOT / "workbench/apps/playground/page/playground.css").read_text(encoding="utf-8")
    page = browser.new_page(forced_colors="active")
    page.set_content(
        f"<style>{style}</style><button aria-pressed=true>Unpin</button><button aria-pressed=false>x</button>"
    )
    chosen, others = page.evaluate(f"({BACKGROUNDS})(document)")
    page.close()
    assert len(chosen) == len(others) == 1 and chosen != others
