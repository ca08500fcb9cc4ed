"""marimo as the host of a live view: the widget works there as it is."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    from word_llama import make_tiny_llama

    from workbench import Engine, EngineConfig

    engine = Engine(make_tiny_llama(), EngineConfig(max_num_batched_tokens=16, num_blocks=64))
    engine.add_request([5, 6, 7, 8, 9], max_tokens=20)
    engine.watch(panels=("timeline", "texts"))
    return


if __name__ == "__main__":
    app.run()
"""


@pytest.fixture
def marimo_page(tmp_path):
    """The address of the notebook, run as an app."""
    if importlib.util.find_spec("marimo") is None:
        pytest.skip("marimo is not installed")
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["run", "notebook.py", "--headless", "--no-token", "--host", "127.0.0.1", "--port", str(port)]
    paths = [str(ROOT / "tests" / "support"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "MARIMO_SKIP_UPDATE_CHECK": "1"}
    with (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-m", "marimo", *arguments]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    urlopen(f"http://127.0.0.1:{port}/", timeout=30).read()
                    break
                except URLError:
                    assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
                    time.sleep(0.3)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()
            process.wait(30)


def test_a_live_engine_runs_in_marimo(browser, marimo_page):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(marimo_page)
    root = page.locator(".wb-root").first  # in the shadow of marimo's element
    root.wait_for(timeout=90_000)
    root.get_by_role("button", name="Run the engine").click()
    element = root.element_handle()
    page.wait_for_function(
        "(root) => root.workbench.status.state === 'idle' && root.workbench.store.numSteps === 20",
        arg=element,
        timeout=60_000,
    )
    root.locator(".wb-output").hover()
    assert root.locator(".wb-output span").count() == 20
    context.close()
