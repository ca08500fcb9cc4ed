"""A real engine's step, taken layer by layer from the dashboard."""

import pytest

from workbench import Engine, EngineConfig


@pytest.fixture
def engine(tiny_llama):
    with Engine(tiny_llama, EngineConfig(max_num_batched_tokens=24, block_size=4, num_blocks=64)) as engine:
        yield engine


def press(page, name):
    """Press a button of the step and wait for what it brings; returns the phase, None after the last."""
    before = page.view("JSON.stringify(view.status.phase || null)")
    page.root.get_by_role("button", name=name).click()
    page.wait(f"JSON.stringify(view.status.phase || null) !== {before!r}")
    page.frame()
    return page.view("view.status.phase && view.status.phase.name")


def test_a_step_is_taken_layer_by_layer(open_page, serve, engine):
    engine.add_request(list(range(5, 40)), request_id="long", max_tokens=4)
    engine.add_request([40, 41, 42], request_id="short", max_tokens=4)
    engine.step()
    page = open_page(serve(engine), width=1440, height=1400)
    page.wait("view.store.numSteps === 1")
    box = page.root.get_by_role("region", name="Step into")
    assert box.is_hidden()
    assert press(page, "Take the next step phase by phase") == "schedule"
    phases = ["schedule"]
    while phases[-1] != "layer 1":
        phases.append(press(page, "Next phase"))
    assert phases == ["schedule", "prepare", "layer 0", "layer 1"]
    assert box.locator("strong").text_content() == "Inside step 1: layer 1 of 2"
    track = box.get_by_role("listitem")
    assert track.count() == 7 and track.nth(3).get_attribute("aria-current") == "step"
    pictures = box.get_by_role("img")
    assert pictures.count() == 4
    assert pictures.first.get_attribute("aria-label").startswith("q: norms of 4 heads in 14 packed rows")
    drawn = pictures.first.evaluate(
        "(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, 20).data.filter((_, i) => i % 4 === 0)).size"
    )
    assert drawn > 8, "the norms differ, and so do their greys"
    # The layer's attention weights are there before the step is over, for the row that is chosen.
    weights = page.root.locator("[data-panel=weights]")
    weights.get_by_label("Row", exact=True).select_option("short, last row (13)")
    page.wait("view.status.weights.request === 'short'")
    page.frame()
    assert weights.locator(".wb-weights span").count() == 3
    page.wait("view.store.numSteps === 1")
    assert press(page, "Finish the step") is None
    page.wait("view.store.numSteps === 2")
    assert box.is_hidden()


@pytest.mark.repeats(of="test_a_step_is_taken_layer_by_layer")
def test_the_rest_of_a_forward_pass_in_one_press(open_page, serve, engine):
    engine.add_request(list(range(5, 40)), max_tokens=4)
    page = open_page(serve(engine), width=1440)
    page.root.focus()
    page.page.keyboard.press("i")
    page.wait("view.status.phase && view.status.phase.name === 'schedule'")
    press(page, "Next phase")
    assert press(page, "Next phase") == "layer 0"
    assert press(page, "Finish the forward pass") == "forward"
    assert page.root.get_by_role("button", name="Finish the forward pass").is_hidden()
    page.root.get_by_role("button", name="Run the engine").click()
    page.wait("view.status.state === 'idle' && view.store.numSteps === 5")
    assert len(engine.trace) == 5
