"""marimo as the host of a live view: the widget works there as it is."""

import importlib.util

import pytest
from script_server import serving

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
    arguments = ["run", "notebook.py", "--headless", "--no-token", "--host", "127.0.0.1", "--port", "PORT"]
    with serving("marimo", arguments, tmp_path, MARIMO_SKIP_UPDATE_CHECK="1") as address:
        yield address


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
