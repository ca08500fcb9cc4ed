"""JupyterLab, for real: two views of one engine, updated while a cell runs, both ending on the last step."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
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


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab server on a notebook with CELLS; gives its address."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("jupyterlab")
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for source in CELLS:
        source = source.format(support=str(SUPPORT), checkout=str(ROOT)) if "{support" in source else source
        notebook.cells.append(nbformat.v4.new_code_cell(source.strip()))
    nbformat.write(notebook, tmp_path / "views.ipynb")
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
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
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
        yield address
    finally:
        server.terminate()
        server.wait(20)
        log.close()


def test_two_views_of_one_engine_both_end_on_the_last_step(browser, lab):
    context = browser.new_context(viewport={"width": 1400, "height": 3600})
    page = context.new_page()
    problems, outside = [], []
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    local = (lab, lab.replace("http", "ws"), "blob:", "data:")
    page.on("request", lambda request: request.url.startswith(local) or outside.append(request.url))
    page.goto(f"{lab}/lab/workspaces/test/tree/views.ipynb?reset")
    page.wait_for_selector(".jp-Notebook", timeout=60_000)
    # Before the kernel is there, running a cell would ask which kernel to take.
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
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
    context.close()
    assert kept == [len(CELLS), seen[0]["cursor"] - 1], "a key of the view reached the notebook, or not the view"
    assert not problems and not outside, json.dumps([problems, outside])
    assert seen[0]["steps"] == seen[1]["steps"] == seen[0]["cursor"] + 1 == seen[1]["cursor"] + 1
    assert seen[1]["theme"] == "dark" and seen[1]["panels"] == 3 < seen[0]["panels"]
