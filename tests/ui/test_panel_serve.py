"""``panel serve`` with the few lines a person would write, driven in a browser."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]

APP = """
import panel as pn
from word_llama import make_tiny_llama

from workbench import Engine, EngineConfig
from workbench.viz.app import make_app


def make_engine():
    engine = Engine(make_tiny_llama(), EngineConfig(max_num_batched_tokens=16, num_blocks=64))
    engine.add_request([5, 6, 7, 8, 9], max_tokens=20)
    return engine


# The script runs once for every browser session; they all see one engine.
engine = pn.state.as_cached("engine", make_engine)
make_app(engine)().servable(title="My engine")
"""


@pytest.fixture
def panel_serve(tmp_path):
    """A function that serves a script with the ``panel`` command and returns its address."""
    pytest.importorskip("panel")
    processes = []

    def serve_(script):
        (tmp_path / "app.py").write_text(script)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "panel", "serve", "app.py", "--port", str(port), "--address", "127.0.0.1"]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT}",
            "WORKBENCH_PREFLIGHT": "remembered",
        }
        log = (tmp_path / "log").open("w+")
        process = subprocess.Popen(command, cwd=tmp_path, stderr=log, env=environment)
        processes.append((process, log))
        address = f"http://127.0.0.1:{port}/app"
        deadline = time.monotonic() + 120
        while True:
            try:
                urlopen(address, timeout=30).read()
                return address
            except URLError:
                log.seek(0)
                assert process.poll() is None and time.monotonic() < deadline, log.read()
                time.sleep(0.2)

    yield serve_
    for process, log in processes:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.seek(0)
        text = log.read()
        log.close()
        assert not re.search("Traceback|ERROR", text), text


@pytest.mark.repeats(of="test_the_example_of_an_own_dashboard")
def test_two_sessions_of_panel_serve_share_an_engine(open_page, panel_serve):
    address = panel_serve(APP)
    first, second = open_page(address), open_page(address)
    assert first.page.title() == "My engine"
    first.root.get_by_role("button", name="Run one engine step").click()
    for page in (first, second):
        page.wait("view.store.numSteps === 1")
    second.root.get_by_role("button", name="Run the engine").click()
    for page in (first, second):
        page.wait("view.status.state === 'idle' && view.store.numSteps === 20")
        page.frame()
        assert page.view("view.store.requests[0].tokens.length") == 20


WAYS = {
    "engine": "pn.panel(engine)",
    "row": "pn.Row(engine, pn.pane.Markdown('beside it'))",
    "view": "pn.panel(engine.watch())",
    "tabs": "pn.Tabs(('run', engine))",
}


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_is_a_live_component(open_page, panel_serve, way):
    """It follows the run, and each browser has another cursor."""
    start = APP.partition("make_app(engine)")[0].replace("from workbench.viz.app import make_app\n", "")
    address = panel_serve(f"{start}{WAYS[way]}.servable(title='My engine')\n")
    first, second = open_page(address), open_page(address)
    first.root.get_by_role("button", name="Run the engine").click()
    for page in (first, second):
        page.wait("view.status.state === 'idle' && view.store.numSteps === 20")
    first.view("view.cursor.seek(3)")
    first.wait("view.cursor.step === 3")
    second.view("view.cursor.seek(9)")
    second.wait("view.cursor.step === 9")
    first.frame()
    assert first.view("view.cursor.step") == 3 and first.view("view.store.requests[0].tokens.length") == 20


def test_the_example_of_an_own_dashboard(open_page, panel_serve):
    """Three panels beside a plot: one cursor, moved in a panel and from Python's side; the slider follows."""
    page = open_page(panel_serve((ROOT / "examples" / "own_dashboard.py").read_text()), height=1600)
    page.page.locator(".wb-root").nth(2).wait_for()
    views = """() => {
        const roots = [], walk = (node) => {
            for (const child of node.querySelectorAll("*")) {
                if (child.classList?.contains("wb-root")) roots.push(child.workbench);
                if (child.shadowRoot) walk(child.shadowRoot);
            }
        };
        walk(document);
        return roots.map((view) => [view.panels.map((panel) => panel.id).join(), view.cursor.step]);
    }"""
    page.page.wait_for_function(f"({views})().every(([, step]) => step > 0)", timeout=30_000)
    assert sorted(name for name, _ in page.page.evaluate(views)) == ["gantt", "pool", "timeline"]
    page.view("view.cursor.seek(9)")
    page.page.wait_for_function(f"({views})().every(([, step]) => step === 9)", timeout=30_000)
    page.page.get_by_text("Step 9:").first.wait_for(timeout=30_000)
    slider = page.page.get_by_role("slider").last
    slider.focus()
    slider.press("ArrowRight")
    page.page.wait_for_function(f"({views})().every(([, step]) => step === 10)", timeout=30_000)
