"""Notebooks of the course in JupyterLite: they run in the browser, with their live view, and ask no other server."""

import functools
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import build_lite
import pytest

PATIENCE = 400_000
"""Milliseconds: a notebook takes 20 seconds on a quiet machine."""

FINISHED = """() => {
    const marks = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].map((mark) => mark.textContent);
    return marks.some((mark) => /[1-9]/.test(mark)) && !marks.some((mark) => mark.includes("*"));
}"""
ERRORS = '[...document.querySelectorAll(".jp-OutputArea-output[data-mime-type*=error]")].map((e) => e.textContent)'


class Handler(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript", ".wasm": "application/wasm"}

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    if not build_lite.is_installed():
        pytest.skip("JupyterLite is not here: `make docs` installs it if there is a network")
    folder = tmp_path_factory.mktemp("site")
    build_lite.build(folder / "lite")
    service = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=service.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{service.server_port}/lite/"
    service.shutdown()
    service.server_close()


@pytest.mark.parametrize("name", build_lite.NOTEBOOKS)
def test_a_notebook_runs_to_its_end_without_a_network(browser, address, name):
    context = browser.new_context(viewport={"width": 1300, "height": 1400})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    requests = []
    context.on("request", lambda request: requests.append(request.url))
    page.goto(f"{address}lab/index.html?path={name}.ipynb")
    page.locator(".jp-Notebook .jp-CodeCell").first.click()
    page.click("text=Run")
    page.click("text=Run All Cells")
    page.wait_for_function(FINISHED, timeout=PATIENCE)
    assert page.evaluate(ERRORS) == []
    if name == "12_recordings":  # its view is a widget, whose Python answers when it is asked
        assert page.locator(".wb-root svg, .wb-root canvas").count() > 2
    server = address.removesuffix("lite/")
    outside = [url for url in requests if not url.startswith((server, f"blob:{server}", "data:"))]
    assert outside == []
    context.close()


def test_cells_that_need_a_model_are_left_out_with_a_word_about_it():
    left = 0
    for name in build_lite.NOTEBOOKS:
        notebook = json.loads((build_lite.ROOT / "notebooks" / f"{name}.ipynb").read_text())
        shown = build_lite.in_the_page(notebook)["cells"]
        code = ["".join(cell["source"]) for cell in shown if cell["cell_type"] == "code"]
        assert not any("load_model" in source for source in code)
        left += sum(cell["source"] == build_lite.NEEDS_A_MODEL for cell in shown)
    assert left == 2  # one part each of notebooks 06 and 11
