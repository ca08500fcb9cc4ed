"""Answer a newcomer's questions with up to three clicks each: ``python scripts/answer_in_clicks.py DIR``.

The places are the dashboard of ``workbench demo``, a page saved from it, a notebook in JupyterLab that shows the same
run, and the playground, in Chromium at four widths and, with ``--browsers``, in Firefox and WebKit. Every answer is
looked for on the page, and a picture of it is written into DIR. A click on a field, and Enter, count as a click each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browsers
import nbformat
from browsers import Browser

from workbench import Engine, SamplingParams
from workbench.apps.demo import CONFIG, Arrivals, document
from workbench.apps.playground import server, site
from workbench.viz import app

SIZES = ((390, 844), (1100, 900), (1440, 900), (2560, 1300))
PLACES = ("dashboard", "saved", "notebook", "playground")
MOST_CLICKS = 3
PATIENCE = 180.0
"""Seconds that an answer may take: the engine works, and so may others on this machine."""

FOLDED = 2.0
"""Seconds without an element after which it is looked for among the tools that are folded."""

TRIES = 5
"""Number of times that a click which misses is repeated: a busy WebKit scrolls a while after it has said so."""

FIND = """
(css, text, exact) => {
  const walk = (node) => [...node.querySelectorAll("*")].flatMap((each) =>
    [...(each.matches(css) ? [each] : []), ...(each.shadowRoot ? walk(each.shadowRoot) : [])]);
  const said = (each) => (each.textContent || each.getAttribute("aria-label") || "").trim();
  const fits = (each) => exact ? said(each) === text : said(each).includes(text);
  const folds = "details:not([open]) > :not(summary)";
  const shown = (each) =>
    each.getClientRects().length && getComputedStyle(each).visibility === "visible" && !each.closest(folds);
  const found = walk(document).find((each) => shown(each) && fits(each));
  if (!found) return null;
  if (!("sought" in window))
    addEventListener("click", (event) => { window.clicked = event.composedPath().includes(window.sought); }, true);
  Object.assign(window, { sought: found, clicked: false });
  let box = found.getBoundingClientRect();
  const unseen = box.bottom > innerHeight || box.top < 0;
  if (unseen) found.scrollIntoView({ block: box.height > innerHeight ? "start" : "center", behavior: "instant" });
  box = found.getBoundingClientRect();
  const [x, y] = [box.left + box.width / 2, box.top + Math.min(box.height, innerHeight) / 2];
  let top = document.elementFromPoint(x, y);
  while (top?.shadowRoot?.elementFromPoint(x, y) && top.shadowRoot.elementFromPoint(x, y) !== top)
    top = top.shadowRoot.elementFromPoint(x, y);
  const hit = Boolean(top) && (found.contains(top) || top.contains(found));
  return { x, y, left: box.left, width: box.width, bottom: box.bottom, hit, unseen };
}
"""

FOLD = """(css) => document.querySelector(css)?.closest("details:not([open])")
  ?.querySelector("summary").textContent.trim()"""
"""The words that unfold the group of an element, if it has one that is folded."""

ROOT = """((node) => {
  const walk = (node) => [...node.querySelectorAll("*")].reduce((found, each) => found ??
    (each.matches(".wb-root") ? each : each.shadowRoot ? walk(each.shadowRoot) : null), null);
  return walk(node);
})(document)"""


class Reader:
    """A person with a page, whose clicks are counted."""

    def __init__(self, browser: Browser) -> None:
        self.browser, self.clicks = browser, 0

    def view(self, expression: str) -> Any:
        """Evaluate an expression of ``view``, the state behind the picture; None if there is no view yet."""
        return self.browser.run(f"() => {{ const view = {ROOT}?.workbench; return view ? {expression} : null; }}")

    def see(self, css: str, text: str = "", *, exact: bool = False, to_click: bool = False) -> dict[str, Any]:
        """Wait for an element, scroll to it, and return its place.

        Raises:
            AssertionError: It is not there, or something covers it.
        """
        end = time.monotonic() + PATIENCE
        before = None
        while time.monotonic() < end:
            place: dict[str, Any] | None = self.browser.run(FIND, css, text, exact)
            if place is not None and (not to_click or (place["hit"] and before == place)):  # and it stands still
                return place
            before = place
            time.sleep(0.1)
        raise AssertionError(f"{css} with {text!r} is {'not there' if place is None else 'covered'}")

    def unfold(self, css: str, text: str = "") -> None:
        """Open what a phone folds, if an element is in it: a group of settings, or the tools of a view."""
        end = time.monotonic() + FOLDED
        while time.monotonic() < end:
            if self.browser.run(FIND, css, text, bool(text)) is not None:
                return
            time.sleep(0.1)
        if summary := self.browser.run(FOLD, css):
            self.click("summary", summary)
        elif self.browser.run(FIND, ".wb-button", "Tools", True) is not None:
            self.click(".wb-button", "Tools")

    def click(self, css: str, text: str = "", at: float = 0.5) -> None:
        """Click an element, at a part of its width."""
        if css != "summary" and text != "Tools":
            self.unfold(css, text)
        self.clicks += 1
        for _ in range(TRIES):
            place = self.see(css, text, exact=bool(text), to_click=True)
            self.browser.press(place["left"] + at * place["width"], place["y"])
            if self.browser.run("() => window.clicked"):
                return
        raise AssertionError(f"{css} with {text!r} is not where it is said to be")

    def write(self, css: str, text: str) -> None:
        """Write into a field and press Enter."""
        self.click(css)
        self.clicks += 1
        self.browser.type(f"{text}\n")

    def begin(self, view: str, step: int) -> None:
        """Look at a step in a view, with nothing open and nothing sought."""
        self.view(
            f"(view.showComparison(false), view.show('{view}'), view.inspector.pin(null), view.setFilter(''), "
            f"view.controls.search.input.value = '', view.controls.search.close(), "
            f"view.cursor.seek({step}, {{ stay: true }}), scrollTo(0, 0), 1)"
        )
        time.sleep(0.3)
        self.clicks = 0


class Place:
    """A page on which questions are asked.

    Attributes:
        name: Its name in the names of pictures.
        questions: Names of the questions, the view and the step to ask each in.
    """

    name = ""
    questions: tuple[tuple[str, str, int], ...] = ()
    search = ".wb-search input"

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def open(self, address: str) -> None:
        """Open the place."""
        self.reader.browser.goto(address)

    def prepare(self, question: str) -> None:
        """Bring the place into the state in which a person asks."""

    def rows_seen(self) -> None:
        """What may row r see in this step?"""
        self.reader.click(".wb-tab", "Kernel")
        self.reader.see("[data-panel=rectangle] canvas")

    def block_of_token(self) -> None:
        """In which block is token 700 of the long prompt?"""
        self.reader.write(self.search, "long 700")
        self.reader.see(".wb-drawer dd", "700, slot")


class Dashboard(Place):
    """The served dashboard."""

    name = "dashboard"
    questions = (
        ("not_scheduled", "story", 2),
        ("block_of_token", "story", 12),
        ("rows_seen", "story", 12),
        ("request_by_name", "story", 12),
        ("own_question", "story", 12),
        ("smaller_budget", "story", 12),
        ("back_from_comparison", "story", 12),
        ("saved", "story", 12),
    )

    essays = itertools.count(1)
    """Numbers of the documents; browsers share the engine."""

    def __init__(self, reader: Reader, engine: Engine, folder: Path) -> None:
        super().__init__(reader)
        self.engine, self.folder, self.asked = engine, folder, 0

    def prepare(self, question: str) -> None:
        """A person's own question comes while the engine reads a document; all others come when it is idle."""
        while self.reader.view("view.status.state") != "idle":
            time.sleep(0.2)
        if question == "own_question":
            self.asked = next(self.essays)
            text = f"Text {self.asked}. {document(self.engine, 1800)}"
            self.engine.add_request(text, SamplingParams(max_tokens=4), request_id=f"essay{self.asked}")
            self.engine.start()

    def not_scheduled(self) -> None:
        """Why was this request not scheduled in this step?"""
        self.reader.click("[data-panel=texts] button", "seasons")
        self.reader.see(".wb-drawer dd", "token budget used up")

    def request_by_name(self) -> None:
        """Find a request by its name."""
        self.reader.write(self.search, "paris")
        self.reader.see("[data-panel=texts] .wb-card", "capital of France")

    def smaller_budget(self) -> None:
        """What would a budget of 32 change?"""
        self.reader.click("button", "Try a budget of 32")
        self.reader.see("[data-panel=compare] .wb-verdict", " -> ")

    def back_from_comparison(self) -> None:
        """Compare two runs and come back."""
        self.reader.click("button", "Try a budget of 32")
        self.reader.click("[data-panel=compare] .wb-tools button", "Close")
        self.reader.see("button", "Try a budget of 32", exact=True)

    def own_question(self) -> None:
        """What did my own question wait for?"""
        self.reader.write(".wb-ask textarea", "What is the highest mountain of Europe?")
        place = self.reader.see(".wb-own dd", f"of essay{self.asked}")
        seen = self.reader.browser.run("() => [scrollY, innerWidth]")
        assert seen[1] < 1100 or (not place["unseen"] and seen[0] == 0 and place["bottom"] <= 900), "below the fold"

    def saved(self) -> None:
        """Save the page with its comparison, and reopen it."""
        keep = (
            "(window.kept = '', URL.createObjectURL = (made) => (made.text().then((text) => kept = text), ''), "
            "HTMLAnchorElement.prototype.click = () => 0, 1)"
        )
        self.reader.view(keep)  # each browser puts downloads elsewhere
        self.reader.click("button", "Try a budget of 32")
        self.reader.see("[data-panel=compare] .wb-verdict", " -> ")
        self.reader.click("button", "Save HTML")
        end = time.monotonic() + PATIENCE
        while not (page := self.reader.browser.run("() => window.kept")):
            assert time.monotonic() < end, "no page has been saved"
            time.sleep(0.2)
        (self.folder / "saved.html").write_text(page, encoding="utf-8")


class SavedPage(Place):
    """The page that was saved from the dashboard. There is no engine to ask in it."""

    name = "saved"
    questions = (
        ("not_scheduled", "story", 2),
        ("block_of_token", "story", 12),
        ("rows_seen", "story", 12),
        ("request_by_name", "story", 12),
        ("compared", "story", 12),
        ("back_from_comparison", "story", 12),
        ("own_question", "story", 12),
    )
    not_scheduled = Dashboard.not_scheduled
    request_by_name = Dashboard.request_by_name

    def compared(self) -> None:
        """What would a budget of 32 change?"""
        self.reader.click("button", "Compare")
        self.reader.see("[data-panel=compare] .wb-verdict", " -> ")

    def back_from_comparison(self) -> None:
        """Compare two runs and come back."""
        self.reader.click("button", "Compare")
        self.reader.click("[data-panel=compare] .wb-tools button", "Close")
        self.reader.see("[data-panel=timeline] canvas")

    def own_question(self) -> None:
        """What did the question of this request wait for?"""
        self.reader.write(self.search, "seasons")
        self.reader.see(".wb-drawer dd", "from step")


class Notebook(SavedPage):
    """A cell of a notebook that shows the recorded run, beside the same run with a budget of 32."""

    name = "notebook"

    def open(self, address: str) -> None:
        """Open the notebook, wait for its kernel, and run its cells."""
        browser = self.reader.browser
        browser.goto(f"{address}/doc/tree/run.ipynb?reset")
        shown = "[...(globalThis.jupyterapp?.shell?.widgets('main') ?? [])][0]"
        end = time.monotonic() + PATIENCE
        while browser.run(f"() => {shown}?.context?.sessionContext?.session?.kernel?.status") != "idle":
            assert time.monotonic() < end, "the notebook's kernel has not started"
            time.sleep(0.2)
        run = "jupyterapp.commands.execute('notebook:run-all-cells')"
        browser.run(f"() => (jupyterapp.shell.activateById({shown}.id), {run}, 1)")


class Playground(Place):
    """The playground, which simulates; a link takes the place of a saved page."""

    name = "playground"
    questions = (
        ("not_scheduled", "scheduler", 8),
        ("block_of_token", "scheduler", 40),
        ("rows_seen", "scheduler", 20),
        ("request_by_name", "scheduler", 12),
        ("smaller_budget", "scheduler", 12),
        ("back_from_comparison", "scheduler", 12),
        ("own_request", "scheduler", 12),
        ("linked", "scheduler", 12),
    )

    def prepare(self, question: str) -> None:
        """Questions about waiting are asked in a workload in which requests wait."""
        preset = "partial-prefills" if question in ("not_scheduled", "own_request") else "chunked"
        self.reader.browser.run("(preset) => (playground.openState({ preset }), 1)", preset)
        self.settle()

    def settle(self) -> None:
        """Wait until no run is in progress."""
        ready = (
            "() => { const p = globalThis.playground; return Boolean(p?.view && !p.busy && !p.running && !p.stale); }"
        )
        end = time.monotonic() + PATIENCE
        while not self.reader.browser.run(ready):
            assert time.monotonic() < end, "the playground does not come to rest"
            time.sleep(0.2)

    def not_scheduled(self) -> None:
        """Why was this request not scheduled in this step?"""
        self.reader.write(self.search, "short0")
        self.reader.see(".wb-drawer dd", "token budget used up")

    def request_by_name(self) -> None:
        """Find a request by its name."""
        self.reader.write(self.search, "chat")
        self.reader.see(".wb-drawer h3", "chat")

    def smaller_budget(self) -> None:
        """What would a budget of 32 change?"""
        self.reader.click("#pin")
        self.settle()
        at, steps = self.reader.browser.run(
            "() => { const { steps } = playground.settings.controls[0]; return [steps.indexOf(32), steps.length - 1]; }"
        )
        self.reader.unfold("#sliders input")
        width = self.reader.see("#sliders input")["width"]
        self.reader.click("#sliders input", at=(8 + (width - 16) * at / steps) / width)
        self.settle()
        self.reader.see("#sliders output", "32", exact=True)
        self.reader.see("#verdict", " -> ")

    def back_from_comparison(self) -> None:
        """Compare two runs and come back."""
        self.smaller_budget()
        self.reader.click("#pin")
        self.settle()
        self.reader.see("#pin", "Pin this run as A")

    def own_request(self) -> None:
        """What did my own request wait for?"""
        self.reader.click("#drawing", at=0.5)
        self.settle()
        self.reader.click("#why summary")
        self.reader.clicks += 1
        self.reader.browser.run(
            "() => { const list = document.getElementById('request'); list.value = 'new7'; "
            "list.dispatchEvent(new Event('change')); return 1; }"
        )
        self.settle()
        self.reader.see("#explanation", "new7")

    def linked(self) -> None:
        """Keep the run and reopen it."""
        self.reader.click("#sliders input", at=0.4)
        self.settle()
        before = self.reader.view("[...new Uint8Array(view.model.get('packet').buffer)].length")
        address = self.reader.browser.run("() => location.href")
        self.reader.browser.goto("about:blank")
        self.reader.browser.goto(address)
        self.settle()
        after = self.reader.view("[...new Uint8Array(view.model.get('packet').buffer)].length")
        assert after == before, "the link opens another run"


def answer(place: Place, folder: Path, name: str, size: tuple[int, int]) -> None:
    """Answer every question of a place at one size of the window.

    Raises:
        AssertionError: An answer takes more clicks, or is not on the page.
    """
    reader = place.reader
    for question, view, step in place.questions:
        place.prepare(question)
        reader.begin(view, step)
        ask: Callable[[], None] = getattr(place, question)
        try:
            ask()
        except AssertionError:
            reader.browser.picture(folder / f"{name}-{place.name}-{size[0]}-{question}-not-answered.png")
            raise
        time.sleep(0.4)
        reader.browser.picture(folder / f"{name}-{place.name}-{size[0]}-{question}.png")
        assert reader.clicks <= MOST_CLICKS, f"{question} takes {reader.clicks} clicks"
        wide = reader.browser.run("() => document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{question}: the page is {wide} pixels wider than the window"
        words = (ask.__doc__ or "").strip()
        print(f"{name:8s} {place.name:10s} {size[0]:5d} px  {reader.clicks} clicks  {words}", file=sys.stderr)


@contextlib.contextmanager
def dashboard() -> Iterator[tuple[Engine, str]]:
    """The engine of ``workbench demo`` after its run, and the address of its dashboard."""
    port = browsers.free_port()
    with Engine("smollm2", CONFIG, wait_for_compiled=True) as engine, contextlib.redirect_stdout(io.StringIO()):
        Arrivals(engine).begin()
        engine.run(progress=False)
        running = app.serve(engine, port=port, threaded=True)
        try:
            browsers.wait_for_port(port)
            yield engine, f"http://127.0.0.1:{port}/#story"
        finally:
            running.stop()


@contextlib.contextmanager
def notebook(engine: Engine) -> Iterator[str]:
    """The address of a JupyterLab with a notebook that shows an engine's run."""
    source = """
from workbench import Trace
trace = Trace.load("run.jsonl.gz")
trace.watch(other=trace.fork(max_num_batched_tokens=32))
"""
    port = browsers.free_port()
    with tempfile.TemporaryDirectory() as folder:
        engine.trace.save(f"{folder}/run.jsonl.gz")
        cells = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip())])
        cells.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(cells, f"{folder}/run.ipynb")
        (Path(folder) / "config/labconfig").mkdir(parents=True)
        news = '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
        (Path(folder) / "config/labconfig/page_config.json").write_text(news)
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
        settings = ["--ServerApp.token=", f"--ServerApp.root_dir={folder}"]
        server = browsers.start([*command, f"--port={port}", *settings], {"JUPYTER_CONFIG_DIR": f"{folder}/config"})
        try:
            browsers.wait_for_port(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


@contextlib.contextmanager
def playground() -> Iterator[str]:
    """The address of the playground."""
    with tempfile.TemporaryDirectory() as folder:
        site.build(Path(folder))
        service = server.make_server(Path(folder))
        threading.Thread(target=service.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{service.server_port}/"
        finally:
            service.shutdown()
            service.server_close()


def main() -> None:
    """Answer the questions in every place, browser and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browsers", nargs="+", choices=browsers.NAMES, default=["chromium"])
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--widths", nargs="+", type=int, default=[width for width, _ in SIZES])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sizes = [size for size in SIZES if size[0] in options.widths]
    with contextlib.ExitStack() as stack:
        needs_engine = {"dashboard", "notebook"} & {*options.places}
        engine, address = stack.enter_context(dashboard()) if needs_engine else (None, "")
        lab = stack.enter_context(notebook(engine)) if engine and "notebook" in options.places else ""
        simulated = stack.enter_context(playground()) if "playground" in options.places else ""
        for name in options.browsers:
            if why := browsers.missing(name):
                print(f"{name:8s} left out: {why}", file=sys.stderr)
                continue
            with contextlib.closing(browsers.launch(name)) as browser:
                reader = Reader(browser)
                for place, where in (
                    (Dashboard(reader, engine, options.folder), address) if engine else (None, ""),
                    (SavedPage(reader), f"file://{(options.folder / 'saved.html').resolve()}"),
                    (Notebook(reader), lab),
                    (Playground(reader), simulated),
                ):
                    if place is None or place.name not in options.places:
                        continue
                    place.open(where)
                    while not reader.view("view.store.numSteps > 0"):
                        time.sleep(0.2)
                    for size in sizes:
                        browser.resize(*size)
                        answer(place, options.folder, name, size)


if __name__ == "__main__":
    main()
