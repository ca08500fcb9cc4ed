"""axe-core over pages that are not views: several servers, one server, findings, comparisons, slides, a notebook."""

import contextlib
import socket
from itertools import chain
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from tests.formats.test_live_scrapes import TEXTS, serving
from workbench import Trace, simulate, simulate_fleet
from workbench.analysis.hunt import hunt
from workbench.apps.cli import main
from workbench.trace.formats import live_scrapes
from workbench.trace.readings.fleet import Fleet
from workbench.viz.finding_page import page_of_two

ROOT = Path(__file__).parents[2]
each_theme = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@contextlib.contextmanager
def served(app_of_page):
    """The address of a page that Panel serves."""
    app = pytest.importorskip("workbench.viz.app")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = app.serve_session(app_of_page, port=port, threaded=True)
    yield f"http://127.0.0.1:{port}/"
    server.stop()


@pytest.fixture
def open_plain(browser):
    """A function that opens an address in a page of a width and a theme."""
    with contextlib.ExitStack() as stack:

        def open_(address, dark, width=1440):
            scheme = "dark" if dark else "light"
            size = {"width": width, "height": 900}
            context = browser.new_context(viewport=size, color_scheme=scheme, is_mobile=width < 500)
            stack.callback(context.close)
            page = context.new_page()
            page.goto(address)
            assert page.evaluate("innerWidth") == width
            return page

        yield open_


@each_theme
def test_the_page_of_replicas_has_no_serious_finding(axe_findings, open_plain, tmp_path, dark):
    pytest.importorskip("panel")
    from workbench.viz.fleet_page import make_fleet_app

    requests = [{"id": f"r{n}", "prompt": {"len": 50}, "max_tokens": 9, "arrival_time": n / 9} for n in range(9)]
    simulate_fleet({"requests": requests, "cost_model": {"fixed": 0.01}}, replicas=3).save(tmp_path)
    with Fleet(tmp_path) as fleet, served(make_fleet_app(fleet)) as address:
        for place in ("", "?request=r4", "?request=nobody", "?rank=replica-1"):
            page = open_plain(address + place, dark, 1440 if "rank" in place else 390)
            page.locator(".wb-fleet svg" if "rank" not in place else ".wb-ranks").first.wait_for()
            page.wait_for_timeout(500)
            assert axe_findings(page) == [], place


@each_theme
def test_the_page_of_a_server_has_no_serious_finding(axe_findings, open_plain, dark):
    pytest.importorskip("panel")
    from workbench.viz.server_page import make_server_app

    with serving(chain(TEXTS, [503])) as url:
        follower = live_scrapes.ServerFollower(url)
        with served(make_server_app(follower)) as address:
            page = open_plain(address, dark, 390)  # where the picture is wider than the window
            page.get_by_text("waiting for the second look").wait_for()
            assert axe_findings(page) == [], "before the second look"
            follower.look()
            page.locator(".wb-fleet svg").first.wait_for()
            assert axe_findings(page) == [], "with pictures"
            follower.look()
            follower.look()
            page.get_by_text("HTTP status 503").wait_for()
            assert axe_findings(page) == [], "when the server has gone"


@each_theme
def test_saved_pages_have_no_serious_finding(axe_findings, open_page, open_plain, tmp_path, dark, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/hunt"))
    (finding, *_) = hunt("planted:generous", seconds=None, workloads=60, out=tmp_path)
    requests = [{"id": f"r{n}", "prompt": {"len": 30 + n}, "max_tokens": 9} for n in range(9)]
    one, two = (simulate({"requests": requests, "config": {"max_num_batched_tokens": budget}}) for budget in (32, 64))
    one.to_html(tmp_path / "compared.html", other=two)
    Trace.load(ROOT / "examples/vllm_preemption.jsonl.gz").to_html(tmp_path / "incident.html")
    for name in (f"{finding.folder}/page.html", "compared.html", "incident.html#incident"):
        page = open_page(f"file://{tmp_path}/{name}", dark=dark)
        page.wait("view.store.numSteps > 0")
        page.frame()
        assert axe_findings(page.page) == [], name
    facts = {"a": "one", "b": "two", "step": 0, "kind": "other chunks", "message": "they differ", "means": "a choice"}
    facts |= {"lines_a": [], "lines_b": [], "by_trial": True}
    (tmp_path / "difference.html").write_text(page_of_two([], facts, [["it starts"], ["it waits"]]))
    assert axe_findings(open_plain((tmp_path / "difference.html").as_uri(), dark)) == [], "a difference without a trace"
    cells = [nbformat.v4.new_markdown_cell("# One"), nbformat.v4.new_code_cell("print(6 * 7)")]
    cells[0].metadata["slideshow"] = {"slide_type": "slide"}
    cells[1].metadata["slideshow"] = {"slide_type": "fragment"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "slides.ipynb")
    assert main(["course", "slides", str(tmp_path / "slides.ipynb")]) == 0
    page = open_plain((tmp_path / "slides.html").as_uri(), dark)
    for _ in cells:
        assert axe_findings(page) == [], "slides"
        page.keyboard.press("ArrowRight")


@each_theme
def test_the_outputs_of_a_notebook_about_kernels_have_no_serious_finding(axe_findings, open_plain, tmp_path, dark):
    """Notebook 23, executed and saved as a page by nbconvert, whose own parts are left out."""
    book = nbformat.read(ROOT / "notebooks/23_kernels_softmax.ipynb", 4)
    NotebookClient(book, timeout=300, allow_errors=True, resources={"metadata": {"path": ROOT / "notebooks"}}).execute()
    body, _ = HTMLExporter(theme="dark" if dark else "light").from_notebook_node(book)
    (tmp_path / "notebook.html").write_text(body)
    page = open_plain((tmp_path / "notebook.html").as_uri(), dark)
    page.wait_for_timeout(1500)
    assert page.locator(".jp-OutputArea-output").count() > 3
    page.evaluate(
        "() => { const outputs = [...document.querySelectorAll('.jp-OutputArea-output')];"
        " const main = document.createElement('main'); main.append(...outputs); document.body.replaceChildren(main); }"
    )
    assert [finding for finding in axe_findings(page) if finding[0] not in ("html-has-lang", "document-title")] == []
