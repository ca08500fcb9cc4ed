"""``panel serve`` with the few lines a person would write, driven in a browser."""

import re

import pytest
from script_server import ROOT, serving

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


WAYS = {
    "engine": "pn.panel(engine)",
    "row": "pn.Row(engine, pn.pane.Markdown('beside it'))",
    "view": "pn.panel(engine.watch())",
    "tabs": "pn.Tabs(('run', engine))",
}
START = APP.partition("make_app(engine)")[0].replace("from workbench.viz.app import make_app\n", "")
SCRIPTS = {
    "app": APP,
    **{way: f"{START}{shown}.servable(title='My engine')\n" for way, shown in WAYS.items()},
    "own_dashboard": (ROOT / "examples" / "own_dashboard.py").read_text(),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of a server of all scripts, each of which has its own engine, by the name of the script."""
    pytest.importorskip("panel")
    folder = tmp_path_factory.mktemp("panel")
    for name, script in SCRIPTS.items():
        (folder / f"{name}.py").write_text(script.replace('as_cached("engine"', f'as_cached("engine of {name}"'))
    arguments = ["serve", *(f"{name}.py" for name in SCRIPTS), "--port", "PORT", "--address", "127.0.0.1"]
    with serving("panel", arguments, folder, "app", WORKBENCH_PREFLIGHT="remembered") as address:
        yield {name: f"{address}{name}" for name in SCRIPTS}
    text = (folder / "log").read_text()
    assert not re.search("Traceback|ERROR", text), text


@pytest.mark.repeats(of="test_the_example_of_an_own_dashboard")
def test_two_sessions_of_panel_serve_share_an_engine(open_page, served):
    first, second = open_page(served["app"]), open_page(served["app"])
    assert first.page.title() == "My engine"
    first.root.get_by_role("button", name="Run one engine step").click()
    for page in (first, second):
        page.wait("view.store.numSteps === 1")
    second.root.get_by_role("button", name="Run the engine").click()
    for page in (first, second):
        page.wait("view.status.state === 'idle' && view.store.numSteps === 20")
        page.frame()
        assert page.view("view.store.requests[0].tokens.length") == 20


@pytest.mark.repeats(step=2)
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_is_a_live_component(open_page, served, way):
    """It follows the run, and each browser has another cursor."""
    first, second = open_page(served[way]), open_page(served[way])
    first.root.get_by_role("button", name="Run the engine").click()
    for page in (first, second):
        page.wait("view.status.state === 'idle' && view.store.numSteps === 20")
    first.view("view.cursor.seek(3)")
    first.wait("view.cursor.step === 3")
    second.view("view.cursor.seek(9)")
    second.wait("view.cursor.step === 9")
    first.frame()
    assert first.view("view.cursor.step") == 3 and first.view("view.store.requests[0].tokens.length") == 20


def test_the_example_of_an_own_dashboard(open_page, served):
    """Three panels beside a plot: one cursor, moved in a panel and from Python's side; the slider follows."""
    page = open_page(served["own_dashboard"], height=1600)
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
