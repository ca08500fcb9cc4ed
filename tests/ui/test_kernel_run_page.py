"""The page of a recorded kernel in a browser: offline, at the width of a phone and of a desktop, and its clicks."""

import mlx.core as mx
import pytest
from kernel_cases import Case, build
from msl_runs import skip_without_compiler

from workbench import msl
from workbench.kernels.attention.metal.launch import PagedVarlenKernels

skip_without_compiler()


@pytest.fixture(scope="module")
def attention():
    """One threadgroup of the tiled kernel: a chunk of 10 rows at position 60."""
    runs = []

    def maker(**text):
        kernel = msl.metal_kernel(**text)

        def launch(**arguments):
            runs.append(kernel.record(**arguments, watch=["row.maximum", "row.total"]))
            return runs[-1].outputs

        return launch

    batch = build(Case(((10, 70),), 4, 2, 32, 16))
    PagedVarlenKernels(maker).attend(*batch.inputs, batch.options)
    return runs[0]


@pytest.fixture(scope="module")
def race():
    kernel = msl.metal_kernel(
        "race",
        ["x"],
        ["y"],
        "uint i = thread_index_in_threadgroup;\nthreadgroup float b[64];\nb[i % 63] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = b[i % 63];\n",
    )
    x = mx.arange(64).astype(mx.float32)
    launch = {"inputs": [x], "output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    return kernel.record(**launch, grid=(64, 1, 1), threadgroup=(64, 1, 1))


@pytest.fixture
def open_run(browser, tmp_path):
    """A function that opens the page of a recording from a file; nothing may fail or leave this machine."""
    problems, contexts = [], []

    def open_(run, width=1440, dark=False):
        path = tmp_path / "run.html"
        run.save_html(path)
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:", "blob:")) or problems.append(request.url),
        )
        page.goto(f"file://{path}")
        page.wait_for_selector(".wb-kr")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []


def seek(page, moment):
    page.evaluate("(n) => { const v = document.querySelector('.wb-kr').workbench; v.now = n; v.drawNow(); }", moment)


def says(page, how, words):
    """Wait until the sentence about the moment includes some words, or ends with them."""
    test = "([how, words]) => document.querySelector('.wb-kr-now').textContent[how](words)"
    page.wait_for_function(test, arg=[how, words])


@pytest.mark.parametrize("width, dark", [(1440, False), (390, True)])
def test_nothing_is_wider_than_the_page(open_run, attention, width, dark):
    page = open_run(attention, width, dark)
    for share in (0, 0.5, 0.99):
        seek(page, int(share * len(attention.instructions)))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        right = (
            "Math.max(...[...document.querySelectorAll('.wb-kr canvas')].map((c) => c.getBoundingClientRect().right))"
        )
        assert page.evaluate(right) <= width
    assert page.locator(".wb-kr-current").count() == 1
    expected = "rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('.wb-kr')).backgroundColor") == expected


def test_the_first_reader_of_a_block_is_found_in_three_clicks(open_run, attention):
    """Choose the block in the list above the cache: two clicks; the third goes to the moment."""
    number = next(i for i, array in enumerate(attention.arrays) if array.name == "k_cache")
    size = attention.arrays[number].num_bytes // attention.arrays[number].shape[0]
    blocks = attention.events["offset"][attention.events["array"] == number] // size
    block = int(blocks[len(blocks) // 2])
    page = open_run(attention)
    page.get_by_label("Part of k_cache").select_option(str(block))  # opens the list, and chooses
    rows = page.locator(".wb-kr-inspector tbody tr")
    first = next(
        event
        for event in attention.instructions.order.tolist()
        if attention.events["array"][event] == number and attention.events["offset"][event] // size == block
    )
    cells = rows.nth(0).locator("td").all_inner_texts()
    assert cells[0] == "first read" and int(cells[2]) == int(attention.events["thread"][first])
    rows.nth(0).click()
    says(page, "includes", "k_cache")
    assert f"[{block}, " in page.locator(".wb-kr-now").inner_text()


def test_a_race_shows_both_threads_and_both_lines(open_run, race):
    assert race.fault.kind == "threadgroup race"
    page = open_run(race)
    page.locator(".wb-kr-fault").click()
    rows = page.locator(".wb-kr-inspector tbody tr")
    found = [row.locator("td").all_inner_texts() for row in rows.all()]
    assert [(row[0], int(row[2]), row[-1]) for row in found] == [
        ("earlier access", 0, "race.source:3"),
        ("fault", 63, "race.source:3"),
    ]
    rows.nth(0).click()
    says(page, "includes", "store to b[0]")


def test_keys_the_slider_and_lines_move_in_time(open_run, attention):
    page = open_run(attention)
    now = lambda: page.evaluate("document.querySelector('.wb-kr').workbench.now")  # noqa: E731
    page.locator(".wb-kr").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert now() == 1
    page.keyboard.press("End")
    assert now() == len(attention.instructions) - 1
    page.keyboard.press("Home")
    page.get_by_label("Way of stepping").select_option("barrier")
    page.get_by_title("On (right arrow)").click()
    says(page, "includes", "barrier")
    page.get_by_role("tab", name="paged_varlen.source").click()
    line = page.locator(".wb-kr-used").last
    line.click()
    number = line.get_attribute("data-line")
    says(page, "endsWith", f"paged_varlen.source:{number}")


def test_the_table_has_the_marks(open_run, attention):
    page = open_run(attention)
    seek(page, len(attention.instructions) // 2)
    page.get_by_role("button", name="Table", exact=True).click()
    page.wait_for_selector(".wb-panel[aria-label=Lanes] tbody tr")
    marks = page.evaluate("document.querySelector('.wb-kr').workbench.painted !== undefined")
    rows = page.locator(".wb-panel[aria-label=Lanes] tbody tr")
    assert marks and rows.count() == 128
    assert page.locator(".wb-panel[aria-label=Lanes] canvas").is_hidden()


def test_watched_values_are_shown_for_each_lane(open_run, attention):
    page = open_run(attention)
    seek(page, len(attention.instructions) - 1)
    table = page.locator(".wb-kr-watched")
    assert table.get_by_text("row.maximum").count() == 1 and table.locator("thead th").count() == 33


def test_the_pointer_tells_the_value_of_a_cell(open_run, attention):
    page = open_run(attention)
    number = next(i for i, array in enumerate(attention.arrays) if array.name == "query_rows")
    first = next(
        moment
        for moment in range(len(attention.instructions))
        if attention.events["array"][attention.instructions.events(moment)[0]] == number
    )
    seek(page, first)
    event = int(attention.instructions.events(first)[0])
    value = float(f"{attention.values(event)[0]:.4g}")
    panel = page.locator(".wb-panel[aria-label='Memory of query_rows']")
    panel.scroll_into_view_if_needed()
    box = panel.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 74 + 3, box["y"] + 3)
    told = panel.locator(".wb-kr-told").inner_text()
    thread, line = int(attention.events["thread"][event]), attention.place(event).line
    assert told == f"query_rows[0] = {value:g}, last stored by thread {thread} at paged_varlen.source:{line}"


def test_playing_makes_the_lines_of_a_text_once(open_run, attention):
    """A kernel goes from one text to another and back with every call: making hundreds of lines takes a frame each."""
    page = open_run(attention)
    page.evaluate("document.querySelectorAll('.wb-kr-line').forEach((line) => line.first = true)")
    made = []
    for moment in range(0, len(attention.instructions), 7):
        seek(page, moment)
        made.append(page.evaluate("document.querySelectorAll('.wb-kr-line').length"))
        place = attention.place(int(attention.instructions.events(moment)[0]))
        shown = page.evaluate(
            "(() => { const line = document.querySelector('.wb-kr-current'), box = line.getBoundingClientRect();"
            " const around = line.closest('.wb-kr-source').getBoundingClientRect();"
            " const inside = box.height > 0 && box.top >= around.top - 1 && box.bottom <= around.bottom + 1;"
            " return [Number(line.dataset.line), inside]; })()"
        )
        assert shown == [place.line, True], (moment, place)
    assert len(set(made)) <= len({file for file, text in attention.texts.items() if text})
    assert page.evaluate("[...document.querySelectorAll('.wb-kr-line')].some((line) => line.first)")


def test_a_click_in_the_grid_goes_to_a_recorded_threadgroup(open_run):
    kernel = msl.metal_kernel("k", ["x"], ["y"], "uint i = thread_position_in_grid.x;\ny[i] = x[i];")
    x = mx.arange(320).astype(mx.float32)
    launch = {"inputs": [x], "output_shapes": [(320,)], "output_dtypes": [mx.float32]}
    run = kernel.record(**launch, grid=(320, 1, 1), threadgroup=(32, 1, 1), threadgroups=[2, 7])
    page = open_run(run)
    grid = page.locator(".wb-kr-grid")
    assert (
        grid.get_attribute("aria-label")
        == "Grid of 10 by 1 by 1 threadgroups; recorded: (2, 0, 0), (7, 0, 0); now (2, 0, 0)"
    )
    grid.click(position={"x": 74 + 7.5 * 12, "y": 5})
    says(page, "includes", "Threadgroup (7, 0, 0)")
    grid.click(position={"x": 74 + 4.5 * 12, "y": 5})
    says(page, "includes", "Threadgroup (7, 0, 0)")
    grid.click(position={"x": 74 + 2.5 * 12, "y": 5})
    says(page, "includes", "Threadgroup (2, 0, 0)")
