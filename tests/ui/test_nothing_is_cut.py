"""No words are cut: in no view, panel, table, dialog or card, on a phone and on a small laptop."""

import pytest

from workbench import Engine, EngineConfig, Trace, simulate
from workbench.viz import app
from workbench.viz.classroom import Classroom
from workbench.viz.export_html import to_html

CUT = """([root, edge]) => {
  const found = new Set(), words = document.createRange(), pen = document.createElement("canvas").getContext("2d");
  const name = (e) => `${e.localName}.${e.className}`;
  const around = (e) => e.parentElement ?? e.getRootNode().host;
  const look = (element, box, what) => {
    for (let at = element; at; at = around(at)) {
      const style = getComputedStyle(at), frame = at.getBoundingClientRect();
      if (style.overflowX === "visible" || !frame.width) continue;
      const named = style.textOverflow === "ellipsis" && at.title;  // the whole text is a hover away
      if (/auto|scroll/.test(style.overflowX) || named) box = frame;
      else if (box.right > frame.right + 1.5 || box.left < frame.left - 1.5) found.add(`${what} is cut by ${name(at)}`);
    }
    if (box.right > edge + 1 || box.left < -1) found.add(`${what} is beyond the window`);
  };
  const seen = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) &&
    !e.closest(".wb-announce, .wb-skip, .wb-phases");  // test_labels_and_search.py has the labels of phases
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, element = text.parentElement;
    if (!text.data.trim() || element.closest("style, option, svg") || !seen(element)) continue;
    words.selectNodeContents(text);
    for (const box of words.getClientRects()) look(element, box, `"${text.data.slice(0, 40)}" in ${name(element)}`);
  }
  for (const e of root.querySelectorAll("canvas, img, svg, button, input, select, textarea")) {
    // A picture out of sight has its old width until it is seen.
    const isStale = e.localName === "canvas" && e.getBoundingClientRect().top > innerHeight;
    if (!seen(e) || isStale) continue;
    look(around(e), e.getBoundingClientRect(), `${name(e)} ${e.ariaLabel ?? ""}`);
    if (!e.placeholder || e.value) continue;
    const style = getComputedStyle(e), room = e.clientWidth - parseFloat(style.paddingLeft) * 2;
    pen.font = style.font;
    if (e.localName === "input" && pen.measureText(e.placeholder).width > room) {
      found.add(`the placeholder "${e.placeholder}" is cut`);
    }
  }
  return [...found];
}"""
"""Texts, pictures and controls of an element that are cut: wider than a frame around them that does not scroll."""

each_width = pytest.mark.parametrize("width", [390, 1100])


def cut(page, where):
    """The faults of a page as it is now, each with the place."""
    for _ in range(3):  # one that lays out, one that notices new widths, one that draws
        page.frame()
    root = page.root.element_handle()
    return [f"{where}: {words}" for words in page.page.evaluate(CUT, [root, page.page.viewport_size["width"]])]


def cut_in_every_view(page):
    """The faults of every view that the page has, in pictures and tables, and of the cards."""
    found = []
    for view in page.view(
        "view.controls.views.filter((tab) => !tab.hidden).map((tab) => tab.textContent.toLowerCase())"
    ):
        page.view("view.show(argument)", view)
        for what in ("pictures", "tables"):
            page.view("view.panels.forEach((panel) => panel.showTable(argument))", what == "tables")
            found += cut(page, f"{view}, {what}")
        page.view("view.panels.forEach((panel) => panel.showTable(false))")
    for pinned in ("{ kind: 'request', request: 0 }", "{ kind: 'block', block: 1, request: 0 }"):
        page.view(f"view.inspector.pin({pinned})")
        found += cut(page, f"card of {pinned}")
    page.view("view.inspector.pin(null)")
    page.view("view.controls.toggleTools()")
    found += cut(page, "tools")
    page.view("view.controls.toggleTools()")
    return found


@each_width
def test_nothing_of_a_class_is_cut(open_page, serve, tiny_llama, monkeypatch, width):
    room = Classroom()
    monkeypatch.setattr(app, "Classroom", lambda: room)
    config = EngineConfig(max_num_batched_tokens=24, block_size=4, num_blocks=128)
    with Engine(tiny_llama, config) as engine:
        for i in range(9):
            engine.add_request(list(range(5 + i, 25 + 3 * i)), request_id=f"question {i}", max_tokens=4)
        engine.run(progress=False)
        url = serve(engine).rstrip("/")
        teacher, follower = (open_page(f"{url}/#{role}", width=width) for role in (f"teach={room.key}", "follow"))
        teacher.wait("view.status.class?.followers === 1 && view.status.state === 'idle'")
        found = cut_in_every_view(teacher) + cut(follower, "a follower")
        for number in range(teacher.view("view.popovers.length")):
            teacher.view("(view.popovers.forEach((box) => { box.hidden = true; }), null)")
            teacher.view("(view.popovers[argument].opener = view.controls.fold, null)", number)
            teacher.view("(view.popovers[argument].hidden = false, null)", number)
            found += cut(teacher, f"dialog {number}")
        teacher.view("view.escape()")
        teacher.view("view.toggleFork()")
        found += cut(teacher, "What if")
        routers = teacher.root.get_by_role("dialog", name="What if").get_by_role("button", name="Bet on two routers")
        routers.click()
        follower.wait("view.status.class.question")
        found += cut(teacher, "bets") + cut(follower, "bets")
        follower.root.get_by_role("region", name="Class").get_by_role("button", name="A", exact=True).click()
        teacher.wait("view.status.class.spread[0][1] === 1")
        teacher.root.get_by_role("button", name="Settle the duel").click()
        for page in (teacher, follower):
            page.wait("view.status.class.score && !view.status.class.pictures")
            found += cut(page, "the score")
        teacher.view("view.simulate(0, { max_num_batched_tokens: 12 })")
        teacher.wait("view.comparing")
        found += cut_in_every_view(teacher)
        teacher.view("(view.film.show(), null)")
        teacher.wait("view.film.open")
        found += cut(teacher, "film")
    assert found == []


@each_width
def test_nothing_of_a_saved_page_is_cut(open_page, page_of, tmp_path, long_trace, width):
    page = page_of(long_trace, width=width)
    found = cut_in_every_view(page)
    requests = [
        {"id": f"question {n}", "prompt": {"len": 30 + n}, "max_tokens": 9, "arrival_time": n / 9} for n in range(9)
    ]
    given = {"requests": requests, "cost_model": {"fixed": 0.01234}}
    one, two = (simulate({**given, "config": {"max_num_batched_tokens": budget}}) for budget in (32, 64))
    to_html(one, tmp_path / "two.html", other=two)
    page = open_page(f"file://{tmp_path}/two.html", width=width)
    page.wait("view.other && view.other.numSteps > 0")
    found += cut_in_every_view(page)
    Trace.load("examples/vllm_preemption.jsonl.gz").to_html(tmp_path / "incident.html")
    page = open_page(f"file://{tmp_path}/incident.html#incident", width=width)
    page.wait("view.store.numSteps > 0")
    assert page.view("view.isIncident")
    assert found + cut_in_every_view(page) == []


def test_a_cut_table_is_found(page_of, long_trace):
    page = page_of(long_trace, width=390)
    page.view("view.panel('timeline').showTable(true)")
    assert cut(page, "a table") == []
    page.view("(view.panel('timeline').tableView.style.overflow = 'hidden', null)")
    assert any("duration" in words for words in cut(page, "planted"))
