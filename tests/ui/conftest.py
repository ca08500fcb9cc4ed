"""A real browser for the tests of the views; without one they are skipped with the reason."""

import os
import shutil
import socket
import time
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
"""The browser; Debian's shell without windows takes a third less processor time."""

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.ui)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed, so the views cannot be driven")
    with playwright.sync_playwright() as driver:
        instance = driver.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield instance
        instance.close()


@pytest.fixture(scope="session")
def axe():
    """The program of axe-core, from npm: WORKBENCH_AXE holds the path of its axe.min.js."""
    path = os.environ.get("WORKBENCH_AXE", "")
    if not Path(path).is_file():
        pytest.skip("axe-core is not here: npm pack axe-core, and set WORKBENCH_AXE to its axe.min.js")
    return Path(path).read_text(encoding="utf-8")


@pytest.fixture
def axe_findings(axe):
    """A function that returns axe's serious findings on a page, as (rule, elements)."""

    def findings(page):
        if not page.evaluate("typeof axe === 'object'"):
            page.evaluate(axe)
        found = page.evaluate("async () => (await axe.run({ resultTypes: ['violations'] })).violations")
        return [
            (entry["id"], [node["html"][:120] for node in entry["nodes"]][:4])
            for entry in found
            if entry["impact"] in ("serious", "critical")
        ]

    return findings


class WatchedPage:
    """A page that collects console messages and requests that leave this machine."""

    def __init__(self, page, origin):
        self.page = page
        self.problems = []
        self.outside = []
        page.on("console", lambda message: message.type in ("error", "warning") and self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        server = origin.split("#")[0] if origin.startswith("file:") else "/".join(origin.split("/")[:3])
        local = (server, server.replace("http", "ws"), "blob:", "data:")
        page.on("request", lambda request: request.url.startswith(local) or self.outside.append(request.url))
        # All panels at once, unless the address names a view.
        page.goto(origin if "#" in origin else f"{origin}#all")
        page.wait_for_selector(".wb-root")
        self.root = page.locator(".wb-root").first

    def view(self, expression, argument=None):
        """Evaluate an expression of ``view``, the state behind the picture."""
        return self.root.evaluate(
            f"(root, argument) => {{ const view = root.workbench; return {expression}; }}", argument
        )

    def wait(self, expression, timeout=60_000):
        """Wait until an expression of ``view`` is true."""
        handle = self.root.element_handle()
        self.page.wait_for_function(
            f"(root) => {{ const view = root.workbench; return {expression}; }}", arg=handle, timeout=timeout
        )

    def frame(self):
        """Wait until all requested drawing is done."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def open_page(browser):
    """A function that opens an address and returns a WatchedPage; it must end without errors."""
    contexts, pages = [], []

    def open_(origin, *, dark=False, width=1280, height=800, touch=False):
        options = {"viewport": {"width": width, "height": height}, "color_scheme": "dark" if dark else "light"}
        options["has_touch"] = touch
        # A phone shows a page that names no viewport in miniature.
        context = browser.new_context(**options, is_mobile=width < 500)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = WatchedPage(context.new_page(), origin)
        pages.append(page)
        return page

    yield open_
    for context in contexts:
        context.close()
    for page in pages:
        assert not page.problems, f"the browser complains: {page.problems}"
        assert not page.outside, f"requests leave the machine: {page.outside}"


@pytest.fixture
def serve():
    """A function that serves a source on a free port and returns its address."""
    pytest.importorskip("panel")
    from workbench.viz import app

    servers = []

    def serve_(source):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        servers.append(app.serve(source, port=port, threaded=True))
        # The thread listens when it has started, which takes a while on a busy machine.
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        return f"http://127.0.0.1:{port}/"

    yield serve_
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def long_trace():
    from viz_traces import workload

    from workbench import simulate

    return simulate(workload(3, num_requests=40, max_num_batched_tokens=24, max_num_seqs=8), max_steps=260)


@pytest.fixture
def page_of(open_page, tmp_path):
    """Open a trace as a single-file page."""

    def page_of_(trace, **options):
        trace.to_html(tmp_path / "trace.html")
        page = open_page(f"file://{tmp_path}/trace.html", **options)
        page.wait(f"view.store.numSteps === {len(trace)}")
        return page

    return page_of_
