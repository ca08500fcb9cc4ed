"""*What if* says in its box what came of the change that its handles show, and *Compare* shows nothing else."""

import json

import pytest
from msgspec.structs import replace

from workbench import simulate
from workbench.simulation.costs.cost_model import CostModel
from workbench.viz import app
from workbench.viz.classroom import Classroom

COSTS = CostModel(fixed=0.01, per_sequence=0.0005, per_prefill_token=0.0001)


def recording(num_requests=12, **config):
    """A run with times, of requests of 60 prompt tokens for a few seats."""
    requests = [
        {"id": f"r{i}", "prompt": {"len": 60}, "max_tokens": 5 + i, "arrival_time": i * 0.02}
        for i in range(num_requests)
    ]
    config = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "num_blocks": 200, **config}
    return simulate({"config": config, "requests": requests}, cost_model=COSTS)


def opened(open_page, url, trace, **size):
    """A page of a run with its box open, and the box."""
    page = open_page(url, **size)
    page.wait(f"view.store.numSteps === {len(trace)}")
    page.root.get_by_role("button", name="What if").click()
    return page, page.root.get_by_role("dialog", name="What if")


def answered(page, **changes):
    """Wait for the simulation of these changes."""
    asked = json.dumps(changes, separators=(",", ":"))
    page.wait(f"JSON.stringify(view.other?.comparison.fork?.changes) === '{asked}'")
    page.frame()


@pytest.mark.parametrize("width", [390, 1280])
def test_a_refused_change_says_why_in_the_box_and_closes_the_older_answer(open_page, serve, width):
    trace = recording()
    page, dialog = opened(open_page, serve(trace), trace, width=width)
    verdict, panel = dialog.locator(".wb-verdict"), page.root.locator("[data-panel=compare]")
    dialog.get_by_label("max_num_seqs").fill("2")
    answered(page, max_num_seqs=2)
    assert panel.is_visible() and page.view("view.cursor.beside !== null")
    dialog.get_by_label("num_blocks").fill("3")
    verdict.get_by_text("num_blocks=3 is too small").wait_for()
    page.frame()
    assert panel.is_hidden() and page.view("view.cursor.beside === null"), "they are of another change"
    assert page.root.locator(".wb-message").is_hidden(), "the box says it, and covers the bar"
    box, said = dialog.bounding_box(), verdict.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    assert said["x"] + said["width"] <= box["x"] + box["width"]
    for value, reason in (("0", "got 0"), ("2.5", "got 2.5")):
        dialog.get_by_label("max_num_batched_tokens").fill(value)
        verdict.get_by_text(reason).wait_for()
    page.root.press("Escape")
    page.root.get_by_role("button", name="What if").click()
    assert "got 2.5" in verdict.text_content(), "it is still what the handles ask for"
    assert dialog.get_by_label("num_blocks").input_value() == "3"
    dialog.get_by_label("num_blocks").fill("200")
    dialog.get_by_label("max_num_batched_tokens").fill("64")
    page.wait("view.comparing")  # the simulation that was there before
    assert "got" not in verdict.text_content() and verdict.text_content() != "…"


def test_handles_show_one_change_and_not_the_rest_of_another(open_page, serve):
    trace = recording()
    page, dialog = opened(open_page, serve(trace), trace)
    dialog.get_by_label("max_num_seqs").fill("2")
    answered(page, max_num_seqs=2)
    page.view("view.simulate(0, { num_blocks: 100 })")  # as the card at the end of a run does
    answered(page, num_blocks=100)
    page.root.press("Escape")
    page.root.get_by_role("button", name="What if").click()
    assert dialog.get_by_label("num_blocks").input_value() == "100"
    assert dialog.get_by_label("max_num_seqs").input_value() == "4"
    dialog.get_by_role("button", name="As it was").click()
    answered(page)
    assert dialog.get_by_label("num_blocks").input_value() == "200"


def test_blocks_that_are_in_use_do_not_change(open_page, serve):
    trace = recording()
    page, dialog = opened(open_page, serve(trace), trace)
    blocks, why = (
        dialog.get_by_label("num_blocks"),
        dialog.get_by_text("at a later step than the first they are in use"),
    )
    handle = dialog.get_by_role("slider", name="KV blocks")
    assert blocks.is_enabled() and handle.is_enabled() and why.is_hidden()
    blocks.fill("100")
    answered(page, num_blocks=100)
    dialog.get_by_label("Begin").select_option("cursor")
    assert blocks.is_disabled() and handle.is_disabled() and why.is_visible()
    assert blocks.input_value() == str(trace.meta.config["num_blocks"])
    page.wait("view.other.comparison.fork.at_step === view.store.label(view.cursor.step)")
    answered(page)
    assert "cannot change" not in dialog.locator(".wb-verdict").text_content()
    dialog.get_by_role("button", name="As it was").click()
    assert blocks.is_enabled() and handle.is_enabled() and why.is_hidden()


def test_a_teacher_sees_no_answer_to_another_change(open_page, serve, monkeypatch):
    """Nothing is simulated by itself there, so an older answer is not left beside handles that have moved."""
    room = Classroom()
    monkeypatch.setattr(app, "Classroom", lambda: room)
    trace = recording()
    url = f"{serve(trace).rstrip('/')}/#teach={room.key}"
    page = open_page(url)
    page.wait(f"view.store.numSteps === {len(trace)} && view.status.class?.role === 'teacher'")
    page.root.get_by_role("button", name="What if").click()
    dialog = page.root.get_by_role("dialog", name="What if")
    verdict, run = dialog.locator(".wb-verdict"), dialog.get_by_role("button", name="Simulate")
    dialog.get_by_label("max_num_seqs").fill("2")
    run.click()
    answered(page, max_num_seqs=2)
    assert verdict.text_content()
    panel = page.root.locator("[data-panel=compare]")
    assert panel.is_visible()
    dialog.get_by_label("num_blocks").fill("3")
    waits = "Not simulated yet: press Simulate, or let the class bet."
    assert verdict.text_content() == waits
    page.frame()
    assert panel.is_hidden() and page.view("view.cursor.beside === null"), "it is of other values"
    page.root.press("Escape")
    page.root.get_by_role("button", name="What if").click()
    values = [dialog.get_by_label(name).input_value() for name in ("num_blocks", "max_num_seqs")]
    assert values == ["3", "2"] and verdict.text_content() == waits, "what was set is lost"
    dialog.get_by_role("button", name="As it was").click()
    assert verdict.text_content() == "These are the settings of the run."
    dialog.get_by_label("num_blocks").fill("3")
    dialog.get_by_label("max_num_seqs").fill("2")
    run.click()
    verdict.get_by_text("num_blocks=3 is too small").wait_for()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_box_leaves_its_answer_in_sight(open_page, serve, width):
    """It covered the numbers of the comparison, and all of it on a phone."""
    trace = recording()
    page, dialog = opened(open_page, serve(trace), trace, width=width)
    dialog.get_by_role("slider", name="seats").press("ArrowLeft")
    page.wait("view.comparing")
    page.frame()
    numbers = page.root.locator("[data-panel=compare] .wb-measures table").bounding_box()
    if width == 390:
        assert dialog.is_hidden()
    else:
        box = dialog.bounding_box()
        assert box["x"] >= numbers["x"] + numbers["width"] and box["x"] + box["width"] <= width
        assert dialog.locator(".wb-measures").is_hidden() and dialog.locator(".wb-verdict").text_content()
        page.root.press("Escape")
    page.root.get_by_role("button", name="What if").click()
    assert dialog.get_by_label("max_num_seqs").input_value() == "3"
    page.frame()
    assert dialog.is_visible(), "one click brings it back"


@pytest.mark.parametrize("width", [390, 1280])
def test_an_answer_below_the_window_is_scrolled_to(open_page, serve, width):
    trace = recording()
    trace.meta = replace(trace.meta, source="vllm 0.33.0")
    page, dialog = opened(open_page, serve(trace), trace, width=width, height=600)
    page.view("view.show('incident')")
    dialog.get_by_label("max_num_seqs").fill("2")
    answered(page, max_num_seqs=2)
    page.root.press("Escape")
    top = "view.panel('compare').element.getBoundingClientRect().top"
    page.view("scrollTo(0, 0)")
    assert page.view(f"{top} > innerHeight"), "a control: it is below the window"
    page.root.get_by_role("button", name="What if").click()
    dialog.get_by_label("max_num_seqs").fill("3")
    answered(page, max_num_seqs=3)
    page.wait(f"{top} >= 0 && {top} < innerHeight / 2")
