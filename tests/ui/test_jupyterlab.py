"""JupyterLab, for real: two views of one engine, updated while a cell runs, both ending on the last step."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
CELLS = (
    """
import sys, time
sys.path[:0] = [{support!r}, {checkout!r}]
from viz_traces import ReplayingController, workload
from workbench import simulate
from workbench.viz import watch
recorded = simulate(workload(3, num_requests=20, max_num_batched_tokens=24), max_steps=150)
controller = ReplayingController(recorded)
first = watch(controller)
first
""",
    "second = watch(controller, panels=('timeline', 'packed', 'pool'), theme='dark')\nsecond",
    "for _ in recorded:\n    controller.step()\n    time.sleep(0.01)",
)

COMPOSED = (
    """
import sys
sys.path[:0] = [{checkout!r}]
import ipywidgets as widgets
from workbench import EngineConfig, simulate
from workbench.viz.cursor import cursor_of
workload = dict(requests=[dict(id=name, prompt=dict(len=60), max_tokens=9) for name in "ab"])
trace = simulate(workload, config=dict(max_num_batched_tokens=32))
slider, told = widgets.IntSlider(max=len(trace) - 1, description="step"), widgets.Label()
pool, timeline = trace.view("pool"), trace.view("timeline")
widgets.jslink((slider, "value"), (pool, "step"))
cursor_of(trace).param.watch(lambda event: setattr(told, "value", f"told {{event.new}}"), "step")
widgets.VBox([widgets.HBox([pool, timeline]), slider, told])
""",
    """
def try_budget(max_num_batched_tokens=32):
    config = EngineConfig(max_num_batched_tokens=max_num_batched_tokens)
    return simulate(workload, config=config).view("timeline")
widgets.interact(try_budget, max_num_batched_tokens=(16, 64, 16));
""",
    "cursor_of(trace).step = 2",
)
KEPT = (
    """
import sys
sys.path[:0] = [{support!r}, {checkout!r}]
from viz_traces import ReplayingController, workload
from workbench import simulate
from workbench.viz import watch
recorded = simulate(workload(3, num_requests=9, max_num_batched_tokens=24), max_steps=60)
controller = ReplayingController(recorded)
view = watch(controller, height=420)
view
""",
    "controller.step()\nview.shared_cursor.step = 0",
    "for _ in recorded:\n    controller.step()",
)
LINKED = (
    """
import sys
sys.path[:0] = [{checkout!r}]
from workbench import simulate
trace = simulate(dict(requests=[dict(id=name, prompt=dict(len=60), max_tokens=30) for name in "ab"]))
trace.view("timeline")
""",
    "trace.figure()",
    "trace.view('pool').shared_cursor.step = 3",
)
MISTAKES = (
    """
import sys, threading, _thread, warnings
sys.path[:0] = [{support!r}, {checkout!r}]
from word_llama import make_tiny_llama
from workbench import Engine, EngineConfig, Trace, load_model, simulate
engine = Engine(make_tiny_llama(), num_blocks=64)
trace = simulate(dict(requests=[dict(id="a", prompt=dict(len=9))]))
""",
    "Engine('smolm2')",
    "EngineConfig(max_num_seq=4)",
    "EngineConfig(seats=4)",
    "engine.add_request('w5', 4)",
    "engine.add_request('w5', max_token=4)",
    "engine.view('chunck')",
    "Trace.load('nope.jsonl')",
    "simulate(dict(requests=[dict(prompt=dict(len=3))]))",
    "trace.explain('nobody')",
    "trace.fork(max_num_seq=3)",
    "engine.start()",
    "engine.add_request([5] * 5000)",
    "engine.add_request('w5', max_tokens=450)\nthreading.Timer(0.3, _thread.interrupt_main).start()\n"
    "while True:\n    engine.add_request('w5', max_tokens=450)\n    engine.run(progress=False)",
    "engine.close()\nengine.step()",
)
NOTEBOOKS = {"views": CELLS, "composed": COMPOSED, "kept": KEPT, "linked": LINKED, "mistakes": MISTAKES}
ROOTS = "[...document.querySelectorAll('.wb-root')].map((root) => root.workbench).filter(Boolean)"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab server on NOTEBOOKS; gives its address and its folder."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("jupyterlab")
    tmp_path = tmp_path_factory.mktemp("lab")
    for name, cells in NOTEBOOKS.items():
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
        for source in cells:
            source = source.format(support=str(SUPPORT), checkout=str(ROOT)) if "{checkout" in source else source
            # An error in a cell with this tag does not end the run of all cells.
            tags = {"tags": ["raises-exception"]}
            notebook.cells.append(nbformat.v4.new_code_cell(source.strip(), metadata=tags))
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    options = [
        "--ServerApp.token=",
        "--ServerApp.password=",
        f"--ServerApp.root_dir={tmp_path}",
        "--LabApp.news_url=None",
    ]
    options.append("--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate")
    log = (tmp_path / "lab.log").open("w")
    environment = {**os.environ, "WORKBENCH_PREFLIGHT": "remembered", "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    server = subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api")
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline and server.poll() is None, (tmp_path / "lab.log").read_text()
                time.sleep(0.3)
        yield address, tmp_path
    finally:
        server.terminate()
        server.wait(20)
        log.close()


@contextmanager
def run_notebook(browser, lab, name):
    """Run all cells of a notebook and give its page, which must end without errors and requests to other hosts."""
    lab, _ = lab
    context = browser.new_context(viewport={"width": 1400, "height": 3600})
    page = context.new_page()
    problems, outside = [], []
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    local = (lab, lab.replace("http", "ws"), "blob:", "data:")
    page.on("request", lambda request: request.url.startswith(local) or outside.append(request.url))
    page.goto(f"{lab}/lab/workspaces/{name}/tree/{name}.ipynb?reset")
    page.wait_for_selector(".jp-Notebook", timeout=60_000)
    # Before the kernel is there, running a cell would ask which kernel to take.
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    yield page
    context.close()
    assert not problems and not outside, json.dumps([problems, outside])


def test_two_views_of_one_engine_both_end_on_the_last_step(browser, lab):
    with run_notebook(browser, lab, "views") as page:
        look_at_two_views(page)


@pytest.mark.repeats(of="test_two_views_of_one_engine_both_end_on_the_last_step")
def test_views_sliders_and_interact_of_a_composition(browser, lab):
    """``HBox``, ``jslink`` with a step, the cursor set and watched from Python, and ``interact`` over EngineConfig."""

    def wait(condition):
        page.wait_for_function(f"() => {{ const views = {ROOTS}; return {condition}; }}", timeout=60_000, polling=100)

    with run_notebook(browser, lab, "composed") as page:
        wait("views.length === 3 && views.every((view) => view.store.numSteps)")
        wait("views[0].cursor.step === 2 && views[1].cursor.step === 2")  # set by the last cell
        page.get_by_text("told 2").wait_for()
        slider, budget = page.get_by_role("slider").first, page.get_by_role("slider").last
        slider.focus()
        slider.press("ArrowRight")
        wait("views[0].cursor.step === 3 && views[1].cursor.step === 3")
        page.get_by_text("told 3").wait_for()
        page.evaluate(f"() => {ROOTS}[1].cursor.seek(5)")  # a person moves the other view
        page.get_by_text("told 5").wait_for()
        wait("views[0].cursor.step === 5")
        assert float(slider.get_attribute("aria-valuenow")) == 5, "the linked slider stayed behind"
        many = page.evaluate(f"() => {ROOTS}[2].store.numSteps")
        budget.focus()
        budget.press("ArrowRight")
        # The view is replaced by another one, which is not there for a moment.
        wait(f"views[2]?.store.numSteps > 0 && views[2].store.numSteps < {many}")


def test_a_figure_and_a_view_are_zoomed_together(browser, lab):
    """The figure is shown before its browser has told a range, and moves of the cursor leave that alone."""
    models = "Bokeh.documents.flatMap((document) => [...document._all_models.values()])"
    mark = f"{models}.find((model) => model.type === 'Span')"
    axis = f"{models}.find((model) => model.renderers?.some((one) => one.glyph?.type === 'VBar')).x_range"

    def wait(condition):
        page.wait_for_function(f"() => {{ const [view] = {ROOTS}; return {condition}; }}", timeout=60_000, polling=100)

    with run_notebook(browser, lab, "linked") as page:
        wait(f"globalThis.Bokeh && view && {mark}?.location === 3 && view.cursor.step === 3")
        wait(f"{axis}.start < 0.5 && {axis}.end > view.store.numSteps - 1.5")
        page.evaluate(f"() => {ROOTS}[0].cursor.moveTo(4, 8)")
        wait(f"{axis}.start === 3.5 && {axis}.end === 11.5")
        page.evaluate(f"() => {axis}.setv({{ start: 9.5, end: 19.5 }})")
        wait("view.cursor.range[0] === 10 && view.cursor.range[1] === 20")
        note = page.get_by_text("The page was loaded again")
        assert note.count() == 0
        page.reload()  # without the outputs, which are not saved; the kernel is the same
        page.get_by_text("(ipykernel) | Idle").wait_for(timeout=60_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        note.wait_for()


STILL = "document.querySelector('[class^=wb-still]')"


def test_a_view_stays_in_a_saved_notebook(browser, lab):
    """The saved file has the run's end; an ended kernel is told; a notebook opened again shows the picture alone."""
    _, folder = lab
    with run_notebook(browser, lab, "kept") as page:
        page.wait_for_function(f"() => {ROOTS}[0]?.status.state === 'idle' && {ROOTS}[0].store.numSteps > 20")
        cursor, height = f"{ROOTS}[0].cursor.step", "document.querySelector('.wb-root').clientHeight"
        assert page.evaluate(cursor) == 0, "the picture's update moved the cursor"
        assert page.evaluate(height) == 420
        assert page.evaluate(f"getComputedStyle({STILL}).display") == "none", "two pictures of one run"
        end = page.evaluate(f"{ROOTS}[0].store.numSteps")
        page.wait_for_function(f"() => {STILL}.textContent.includes('{end} steps')")
        page.keyboard.press("Control+s")
        deadline = time.monotonic() + 30
        while f"{end} steps" not in (folder / "kept.ipynb").read_text():
            assert time.monotonic() < deadline, "the saved notebook does not have the run's end"
            time.sleep(0.2)
        hidden = f"(({{ fork, tune, link }}) => [fork, tune, link].map((e) => e.hidden))({ROOTS}[0].controls)"
        assert not all(page.evaluate(hidden))
        page.get_by_role("menuitem", name="Kernel", exact=True).click()
        page.locator(".lm-Menu-item[data-command='kernelmenu:restart']").click()
        page.locator(".jp-Dialog .jp-mod-accept").click()
        page.wait_for_function(f"() => {ROOTS}[0].gone", timeout=30_000)
        page.get_by_text("kernel ended").wait_for()
        assert page.get_by_role("group", name="Engine").count() == 0, "buttons of an engine that is gone"
        assert page.evaluate(hidden) == [True, True, True], "their host is gone too"
        # A browser that opens the notebook later.
        page.reload()
        page.wait_for_function(f"() => {STILL} && getComputedStyle({STILL}).display !== 'none'", timeout=60_000)
        assert page.locator("img[alt^='Tokens']").first.is_visible()
        page.wait_for_timeout(500)
        assert not page.get_by_text("Error displaying widget").is_visible()


def test_a_mistake_takes_five_lines_of_the_notebook(browser, lab):
    """Measured on the page, at the width of a laptop: a line that wraps counts twice."""
    with run_notebook(browser, lab, "mistakes") as page:
        last = page.locator(".jp-CodeCell").nth(len(MISTAKES) - 1)
        last.get_by_text("this engine is closed").wait_for(timeout=90_000)
        lines = page.evaluate(
            """() => [...document.querySelectorAll(".jp-CodeCell")].map((cell) => {
                const texts = [...cell.querySelectorAll(".jp-OutputArea-output pre")];
                const lines = (text) => text.clientHeight / parseFloat(getComputedStyle(text).lineHeight);
                return Math.round(texts.reduce((sum, text) => sum + lines(text), 0));
            })"""
        )
        assert lines[0] == 0 and all(1 <= count <= 5 for count in lines[1:]), lines


def look_at_two_views(page):
    """Both views end on the last step, and a shortcut of JupyterLab that is pressed in a view stays there."""
    page.wait_for_function(
        """() => {
            const roots = [...document.querySelectorAll(".wb-root")];
            const ended = ({ status, store }) => status.state === "idle" && store.numSteps > 20;
            return roots.length === 2 && roots.every((root) => ended(root.workbench));
        }""",
        timeout=90_000,
        polling=300,
    )
    seen = page.evaluate(
        """() => [...document.querySelectorAll(".wb-root")].map((root) => ({
            steps: root.workbench.store.numSteps, cursor: root.workbench.cursor.step,
            theme: root.dataset.theme, panels: root.querySelectorAll("section.wb-panel").length,
        }))"""
    )
    # The notebook's shortcut for deleting a cell, pressed in a view.
    page.evaluate("() => document.querySelector('.wb-root').focus()")
    page.keyboard.press("d")
    page.keyboard.press("d")
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(300)
    kept = page.evaluate(
        """() => [document.querySelectorAll(".jp-CodeCell").length,
            document.querySelector(".wb-root").workbench.cursor.step]"""
    )
    assert kept == [len(CELLS), seen[0]["cursor"] - 1], "a key of the view reached the notebook, or not the view"
    assert seen[0]["steps"] == seen[1]["steps"] == seen[0]["cursor"] + 1 == seen[1]["cursor"] + 1
    assert seen[1]["theme"] == "dark" and seen[1]["panels"] == 3 < seen[0]["panels"]
