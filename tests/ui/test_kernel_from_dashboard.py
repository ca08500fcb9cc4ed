"""From a work item in the dashboard of a live engine into its recorded threadgroup."""

import pytest
from msl_runs import skip_without_compiler

from workbench import Engine, EngineConfig, SamplingParams

skip_without_compiler()


@pytest.fixture
def served(smollm2, serve):
    """A live engine after three steps, and the address of its dashboard."""
    config = EngineConfig(max_num_batched_tokens=48, block_size=16, num_blocks=32)
    with Engine(smollm2, config) as engine:
        engine.add_request("The capital of France is", SamplingParams(max_tokens=6))
        engine.add_request("One two three four five six seven eight nine ten " * 12, SamplingParams(max_tokens=4))
        for _ in range(3):
            engine.step()
        yield engine, serve(engine)


def click_the_last_item(page):
    """Open the recorded run of the last item of the work list."""
    point = page.view(
        "(() => { const panel = view.panel('kernel'); panel.element.scrollIntoView({ block: 'center' });"
        " const box = panel.canvas.getBoundingClientRect();"
        " return [box.left + panel.x(0) + 4, box.top + 20 + (panel.rows.length - 0.5) * panel.row]; })()"
    )
    page.frame()
    page.page.mouse.click(*point)
    page.page.wait_for_selector(".wb-kernel-page iframe")


def test_a_click_on_a_work_item_opens_its_threadgroup(open_page, served):
    engine, address = served
    page = open_page(address)
    page.wait("view.store.numSteps === 3 && view.can('kernel_run')")
    item = engine.trace[-1].kernel.work_items[-1]
    request = engine.trace[-1].chunks[item.seq].request_id
    page.view("(view.wait('It is being recorded.'), view.statusChanged())")
    assert page.view("view.status.message") == "It is being recorded.", "a status of the host does not end it"
    click_the_last_item(page)
    assert page.view("view.status.message") != "It is being recorded."
    inner = page.page.frame_locator(".wb-kernel-page iframe")
    inner.locator(".wb-kr-now").wait_for()
    about = inner.locator(".wb-kr-head").inner_text()
    assert f"step {engine.trace[-1].step}, layer 0" in about and f"{request}, rows" in about
    page.view("root.querySelector('.wb-kernel-page').dataset.first = 'true'")
    page.view("view.send('kernel_run', { step: view.store.label(view.cursor.step), item: 0, kv_head: 0 })")
    page.wait("root.querySelector('.wb-kernel-page').dataset.first === undefined")
    assert page.page.locator(".wb-kernel-page").count() == 1, "another page takes the place of the first"
    page.page.get_by_role("button", name="Close").click()
    assert page.page.locator(".wb-kernel-page").count() == 0
    assert page.problems == [] and page.outside == []


def test_a_double_click_on_a_mask_opens_the_threadgroup_of_the_cell(open_page, served):
    engine, address = served
    page = open_page(address)
    page.wait("view.store.numSteps === 3 && view.can('kernel_run')")
    request = engine.trace[-1].chunks[-1].request_id
    page.view("view.cursor.select(view.store.requests.find((r) => r.id === argument).index)", request)
    page.frame()
    page.wait("view.panel('rectangle').mode === 'one'")
    point = page.view(
        "(() => { const panel = view.panel('rectangle'); panel.element.scrollIntoView({ block: 'center' });"
        " const box = panel.canvas.getBoundingClientRect(), x = 200, y = 40;"
        " return [box.left + x, box.top + y, panel.hit(x, y)?.hover.item ?? -1]; })()"
    )
    assert point[2] >= 0
    page.frame()
    page.page.mouse.dblclick(*point[:2])
    page.page.wait_for_selector(".wb-kernel-page iframe")
    about = page.page.frame_locator(".wb-kernel-page iframe").locator(".wb-kr-head").inner_text()
    assert f"{request}, rows" in about


def test_an_older_step_opens_its_own_threadgroup(open_page, served):
    engine, address = served
    page = open_page(address)
    page.wait("view.store.numSteps === 3 && view.can('kernel_run')")
    page.view("view.cursor.seek(1)")
    page.frame()
    item = engine.trace[1].kernel.work_items[-1]
    request = engine.trace[1].chunks[item.seq].request_id
    click_the_last_item(page)
    about = page.page.frame_locator(".wb-kernel-page iframe").locator(".wb-kr-head").inner_text()
    assert "step 1, layer 0" in about and f"{request}, rows" in about and about.rstrip().endswith("computed again")
    assert page.problems == [] and page.outside == []
