"""Pages at the width of a small phone, with the system's colours, and with the finger."""

import pytest

from workbench import simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.viz.export_html import to_html

TEXTS = """() => {
  const real = CanvasRenderingContext2D.prototype.fillText, found = [];
  globalThis.wbTexts = found;
  CanvasRenderingContext2D.prototype.fillText = function (words, x, y) {
    const { e, f, a } = this.getTransform(), wide = this.measureText(words).width;
    const left = { right: x - wide, center: x - wide / 2 }[this.textAlign] ?? x;
    const name = this.canvas.closest("[data-panel]")?.dataset.panel;
    const { style } = this.canvas, from = parseFloat(style.left) || 0, size = from + parseFloat(style.width);
    const begin = left + e / a + from;
    if (name) found.push([name, words, begin, begin + wide, y + f / a, size]);
    return real.apply(this, arguments);
  };
}"""


@pytest.fixture
def long_names(tmp_path):
    """A page of requests with long names, with a prefix cache that evicts blocks, and phases."""
    names = [f"customer-support-conversation-{n}-turn-{7 * n}" for n in range(5)]
    requests = [{"id": name, "prompt": {"len": 40 + 9 * n}, "max_tokens": 20} for n, name in enumerate(names)]
    config = {"max_num_batched_tokens": 48, "num_blocks": 24, "enable_prefix_caching": True}
    trace = simulate({"config": config, "requests": requests}, cost_model=CostModel(fixed=0.05))
    to_html(trace, tmp_path / "page.html")
    return f"file://{tmp_path}/page.html#all", names


@pytest.mark.parametrize("width", [320, 420, 690])
def test_no_text_of_a_picture_is_cut_or_covers_another(open_page, long_names, width):
    """Also the names of requests, of which a narrow picture shows the end."""
    page = open_page(long_names[0], width=width)
    page.wait("view.store.numSteps > 20")
    page.frame()
    page.page.evaluate(TEXTS)
    for step in (1, 6, 20):
        page.view("view.cursor.seek(argument)", step)
        page.page.evaluate("() => { wbTexts.length = 0; }")
        page.view("view.panels.forEach((panel) => { panel.visible = true; panel.redraw?.(); })")
        for _ in range(3):
            page.frame()
        texts = page.page.evaluate("wbTexts")
        assert len({panel for panel, *_ in texts}) >= 7
        # A redrawn text is there twice, at the same place.
        texts = sorted(
            {(panel, words, round(x, 1), round(end, 1), round(y, 1), size) for panel, words, x, end, y, size in texts}
        )
        cut = [(panel, words, x, end) for panel, words, x, end, _, size in texts if x < -1 or end > size + 1]
        assert not cut
        for i, (panel, words, x, end, y, _) in enumerate(texts):
            for other, besides, left, right, at, _ in texts[i + 1 :]:
                covers = other == panel and abs(at - y) < 7 and x < right - 1 and left < end - 1
                assert not covers, (panel, words, besides)


@pytest.mark.parametrize("width", [390, 690, 1280])
def test_the_legend_of_the_chunks_is_whole(open_page, long_names, width):
    page = open_page(long_names[0], width=width)
    page.wait("view.store.numSteps > 20")
    page.page.evaluate(TEXTS)
    page.view("view.panel('gantt').legend.signature = ''")
    page.view("view.panel('gantt').redraw()")
    page.frame()
    page.frame()
    words = {words for panel, words, *_ in page.page.evaluate("wbTexts") if panel == "gantt"}
    assert words >= {"prefill chunk", "decode", "recomputed", "waiting", "preempted", "finished"}


def test_a_tap_says_the_whole_name_of_a_row(open_page, long_names):
    origin, names = long_names
    page = open_page(origin, width=390)
    page.wait("view.store.numSteps > 20")
    page.view("view.cursor.seek(1)")
    page.frame()
    tap = """([panel, x, y]) => {
      const { left, top } = panel.canvas.getBoundingClientRect();
      const at = { clientX: left + x, clientY: top + y, pointerType: "touch", bubbles: true };
      panel.canvas.dispatchEvent(new PointerEvent("click", at));
      return view.tooltip.element.hidden ? "" : view.tooltip.element.textContent;
    }"""
    page.page.evaluate("(root) => { globalThis.view = root.workbench; }", page.root.element_handle())
    for name, y in (("gantt", 26), ("tables", 28), ("packed", 130), ("rectangle", 100)):
        told = page.page.evaluate(f"([name, y]) => ({tap})([view.panel(name), 20, y])", [name, y])
        assert any(each in told for each in names), (name, told)
    page.root.locator("h3").first.dispatch_event("pointerdown")
    assert page.view("view.tooltip.element.hidden")


def test_forced_colours_show_phases_and_what_is_chosen(open_page, long_names):
    page = open_page(long_names[0], width=1100)
    page.page.emulate_media(forced_colors="active")
    page.wait("view.store.numSteps > 20")
    page.frame()
    phases = page.root.locator(".wb-phases li")
    assert phases.count() > 0
    style = "(e) => [getComputedStyle(e).borderRightWidth, getComputedStyle(e).borderRightColor]"
    width, colour = phases.first.evaluate(style)
    background = page.root.evaluate("(e) => getComputedStyle(e.ownerDocument.body).backgroundColor")
    assert width == "1px" and colour != background, "phases have edges"
    chosen, other = (page.root.locator(f".wb-tab[aria-pressed={pressed}]").first for pressed in ("true", "false"))
    assert chosen.evaluate("(e) => getComputedStyle(e).backgroundColor") != other.evaluate(
        "(e) => getComputedStyle(e).backgroundColor"
    )


def test_forced_colours_show_the_cursor_and_the_newest_token(open_page, long_names):
    """A background and a shadow alone are taken away."""
    page = open_page(long_names[0], width=1100)
    page.page.emulate_media(forced_colors="active")
    page.wait("view.store.numSteps > 20")
    page.view("(view.show('story'), view.cursor.seek(8))")
    page.frame()
    background = page.root.evaluate("(e) => getComputedStyle(e.ownerDocument.body).backgroundColor")
    style = "(e) => { const s = getComputedStyle(e); return [s.backgroundColor, s.borderColor, s.outlineStyle]; }"
    marks = page.root.locator("[data-panel=timeline] .wb-cursor:not(.wb-cursor-hover)")
    assert marks.count() == 1 and marks.first.is_visible()
    fill, edge, _ = marks.first.evaluate(style)
    frame = "wb-cursor-frame" in marks.first.get_attribute("class")
    assert (edge if frame else fill) not in (background, "rgba(0, 0, 0, 0)")
    newest = page.root.locator(".wb-output .wb-now").first
    assert newest.evaluate(style)[2] == "solid"
