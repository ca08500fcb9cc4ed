"""Pages at the width of a small phone, with the system's colours, and with the finger."""

from itertools import pairwise

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


def test_a_tap_says_the_whole_name_of_a_row_once(open_page, long_names):
    origin, names = long_names
    page = open_page(origin, width=390)
    page.wait("view.store.numSteps > 20")
    page.view("view.cursor.seek(1)")
    page.frame()
    tap = """([panel, x, y]) => {
      const { left, top } = panel.canvas.getBoundingClientRect();
      const at = { clientX: left + x, clientY: top + y, pointerType: "touch", bubbles: true };
      panel.canvas.dispatchEvent(new PointerEvent("click", at));
      const { inspector, tooltip } = view, { pinned } = inspector;
      inspector.update();
      return [tooltip.element.hidden ? "" : tooltip.element.textContent, pinned ? inspector.title.textContent : ""];
    }"""
    page.page.evaluate("(root) => { globalThis.view = root.workbench; }", page.root.element_handle())
    for name, y in (("gantt", 26), ("tables", 28), ("packed", 130), ("rectangle", 100)):
        page.view("view.inspector.pin(null)")
        told, card = page.page.evaluate(f"([name, y]) => ({tap})([view.panel(name), 20, y])", [name, y])
        assert any(each in told + card for each in names), (name, told, card)
        assert not (told and card), "nothing covers the card that a tap has opened"
        assert bool(card) == (name != "rectangle"), name
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


LINES = """(cells) => cells.map((cell) => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return new Set([...range.getClientRects()].map(({ top }) => Math.round(top))).size;
})"""


@pytest.fixture
def long_prompts(tmp_path):
    """A page of two runs with long contexts and requests that find a part of their prompts in the prefix cache."""
    same = {"len": 1040, "seed": "same"}
    requests = [
        {"id": f"req-{n:02}", "prompt": {"parts": [same, {"len": 30 + n, "seed": n}]}, "max_tokens": 9}
        for n in range(4)
    ]
    costs = CostModel(fixed=0.00876, per_prefill_token=1e-4)
    runs = [
        simulate(
            {"config": {"max_num_batched_tokens": budget, "num_blocks": 400}, "requests": requests}, cost_model=costs
        )
        for budget in (512, 256)
    ]
    to_html(runs[0], tmp_path / "page.html", other=runs[1])
    return f"file://{tmp_path}/page.html#all"


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_has_room_for_bars_labels_reasons_and_values(open_page, long_prompts, width):
    page = open_page(long_prompts, width=width)
    page.wait("view.store.numSteps > 8 && view.comparing")
    page.frame()
    page.page.evaluate(TEXTS)
    for step in range(page.view("view.store.numSteps")):
        page.view("view.cursor.seek(argument)", step)
        page.frame()
        page.page.evaluate("() => { wbTexts.length = 0; }")
        page.view("view.panels.forEach((panel) => { panel.visible = true; panel.redraw?.(); })")
        page.frame()
        bars, space = page.view("((p) => [p.kvScale(p.kvMost) - 84, p.width - 100])(view.panel('packed'))")
        assert bars >= 0.4 * space
        at = page.view("((p) => p.rowY(p.chunks.length) + 10)(view.panel('packed'))")
        texts = {(x, end) for panel, words, x, end, y, _ in page.page.evaluate("wbTexts")
                 if panel == "packed" and abs(y - at) < 1 and words[0].isdigit()}  # fmt: skip
        labels = sorted(texts)
        assert len(labels) > 1 and all(a[1] + 4 <= b[0] for a, b in pairwise(labels))
    events = page.root.locator(".wb-events")
    why = events.locator("tbody tr").first.locator("td").last.bounding_box()["width"]
    assert why >= 0.4 * events.bounding_box()["width"]
    page.view("view.cursor.seek(2)")
    page.frame()
    follow = page.root.get_by_text("Go to end")
    assert follow.count() == 1 and not follow.is_visible(), "it is the end of the slider"
    values = page.root.locator("[data-panel=compare] .wb-measures td:nth-child(2)").evaluate_all(LINES)
    assert values and set(values) == {1}, "a value stands beside its unit"
