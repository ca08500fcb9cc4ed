"""axe-core over every view, light and dark. It comes from npm: set WORKBENCH_AXE to the path of its axe.min.js."""

import mlx.core as mx
import pytest
from msl_runs import skip_without_compiler
from viz_traces import ReplayingController

from workbench import Engine, EngineConfig, msl, simulate
from workbench.viz import app
from workbench.viz.classroom import Classroom


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_view_of_a_recording_has_a_serious_finding(axe_findings, page_of, long_trace, dark):
    page = page_of(long_trace, dark=dark)
    for view in ("story", "scheduler", "kernel", "all"):
        page.view("view.show(argument)", view)
        page.view("view.inspector.pin({ kind: 'request', request: 3 })")
        page.frame()
        assert axe_findings(page.page) == [], view
    page.view("view.toggleTables()")
    page.frame()
    assert axe_findings(page.page) == [], "tables"


@pytest.mark.repeats(of="test_no_view_of_a_recording_has_a_serious_finding")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_dialog_of_a_live_view_has_a_serious_finding(axe_findings, open_page, serve, long_trace, dark):
    controller = ReplayingController(long_trace)
    controller.tokenizer = type("Tokenizer", (), {"has_chat_template": True})()
    controller.fork = lambda **_: long_trace
    while controller.step() is not None and len(controller.trace) < 40:
        pass
    page = open_page(serve(controller).rstrip("/") + "/#story", dark=dark)
    page.wait("view.store.numSteps === 40")
    for keys in (["?"], ["Escape", "b"], ["Escape", "w"], ["Escape", "a"], ["Escape", "/", "r", "Space", "3"]):
        for key in keys:
            page.page.keyboard.press(key)
        page.frame()
        assert axe_findings(page.page) == [], keys


def test_a_planted_fault_is_found(axe_findings, page_of, long_trace):
    page = page_of(long_trace)
    page.root.evaluate("(root) => root.append(document.createElement('button'))")
    assert [rule for rule, _ in axe_findings(page.page)] == ["button-name"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_film_or_link_has_a_serious_finding(axe_findings, open_page, serve, long_trace, dark):
    controller = ReplayingController(long_trace)
    while controller.step() is not None and len(controller.trace) < 20:
        pass
    page = open_page(serve(controller).rstrip("/") + "/#story", dark=dark)
    page.wait("view.store.numSteps === 20")
    page.page.keyboard.press("e")
    page.wait("view.film.open")
    for scene in range(5):
        page.view("(view.film.goTo(argument), view.film.toggle())", scene)
        assert axe_findings(page.page) == [], scene
    page.view("view.film.close()")
    page.root.get_by_role("button", name="Copy link").click()
    page.wait("view.linkBox.text.value.length > 0")
    page.frame()
    assert axe_findings(page.page) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_side_of_a_duel_has_a_serious_finding(axe_findings, open_page, serve, tiny_llama, monkeypatch, dark):
    room = Classroom()
    monkeypatch.setattr(app, "Classroom", lambda: room)
    with Engine(tiny_llama, EngineConfig(max_num_batched_tokens=32, block_size=4, num_blocks=128)) as engine:
        for i in range(3):
            engine.add_request(list(range(5 + i, 45 + i)), request_id=f"r{i}", max_tokens=8)
        engine.run(progress=False)
        url = serve(engine).rstrip("/")
        teacher = open_page(f"{url}/#teach={room.key}", dark=dark)
        follower = open_page(f"{url}/#follow", dark=dark, width=390)
        teacher.wait("view.status.class?.followers === 1 && view.status.state === 'idle'")
        teacher.root.get_by_role("button", name="What if").click()
        teacher.root.get_by_role("spinbutton", name="num_blocks").fill("30")
        assert axe_findings(teacher.page) == [], "the form of a duel"
        teacher.root.get_by_role("button", name="Let the class bet").click()
        for page in (follower, teacher):
            page.wait("view.status.class.question")
            page.frame()
            assert axe_findings(page.page) == [], "bets"
        follower.root.get_by_role("region", name="Class").get_by_role("button", name="A", exact=True).click()
        teacher.wait("view.status.class.spread[0][1] === 1")
        teacher.root.get_by_role("region", name="Class").get_by_role("button", name="Settle the duel").click()
        for page in (follower, teacher):
            page.wait("view.status.class.score")
            page.frame()
            assert axe_findings(page.page) == [], "the score"


@pytest.mark.parametrize("width, dark", [(1440, False), (390, True)])
def test_no_state_of_a_recorded_kernel_has_a_serious_finding(axe_findings, browser, tmp_path, width, dark):
    skip_without_compiler()
    source = "uint i = thread_index_in_threadgroup;\nthreadgroup float b[64];\nb[i % 63] = x[i];\ny[i] = b[i % 63];\n"
    x = mx.arange(128).astype(mx.float32)
    launch = {"inputs": [x], "output_shapes": [(128,)], "output_dtypes": [mx.float32], "grid": (128, 1, 1)}
    for name, kept in (("race", source), ("fine", source.replace("% 63", "% 64"))):
        kernel = msl.metal_kernel(name, ["x"], ["y"], kept)
        kernel.record(**launch, threadgroup=(64, 1, 1), threadgroups=2).save_html(tmp_path / f"{name}.html")
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        page = context.new_page()
        page.goto((tmp_path / f"{name}.html").as_uri())
        page.wait_for_selector(".wb-kr")
        assert axe_findings(page) == [], name
        page.evaluate("(() => { const v = document.querySelector('.wb-kr').workbench; v.seek(v.run.size >> 1); })()")
        page.locator(".wb-kr-cells").first.click()
        page.get_by_role("button", name="Table").click()
        assert axe_findings(page) == [], name
        context.close()


LINKS = """(root) => [...root.querySelectorAll(".wb-drawer dd .wb-link")].filter((e) => e.offsetParent).map((link) => {
  link.scrollIntoView({ block: "center" });
  const [box] = link.getClientRects();
  const hit = root.getRootNode().elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  return [link.textContent, link.contains(hit)];
})"""


def test_a_finger_hits_the_link_that_it_touches(page_of):
    """The lines of a card are close to each other, and the area of a link is larger than its letters."""
    requests = [{"id": f"r{i}", "prompt": {"len": 60 + 13 * i}, "max_tokens": 12} for i in range(8)]
    config = {"max_num_batched_tokens": 64, "max_num_seqs": 3, "num_blocks": 24, "block_size": 8}
    trace = simulate({"config": config, "requests": requests, "cost_model": {"fixed": 0.01}})
    page, seen = page_of(trace, width=390, height=844, touch=True), 0
    assert page.page.evaluate("matchMedia('(pointer: coarse)').matches")
    for step in (4, len(trace) // 2, len(trace) - 1):
        page.view("view.cursor.seek(argument)", step)
        for request in range(len(requests)):
            page.view("view.inspector.pin({ kind: 'request', request: argument })", request)
            page.frame()
            links = page.root.evaluate(LINKS)
            seen += len(links)
            assert all(hit for _, hit in links), links
    assert seen > 20
