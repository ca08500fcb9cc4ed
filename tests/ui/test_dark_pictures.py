"""Pictures take the theme of the element around them: dark on dark, in colours that stand out, and light on light."""

import io
from collections import Counter
from html import escape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from workbench import simulate
from workbench.analysis.sweep import sweep
from workbench.apps.course.pictures import bars, matrix
from workbench.trace.formats.live_scrapes import Moment
from workbench.viz import fleet_rows, lines, reprs, svg
from workbench.viz.image import image
from workbench.viz.palette import luminance
from workbench.viz.pareto import pareto_svg

ROOT = Path(__file__).parents[2]
WORKLOAD = {
    "config": {"max_num_batched_tokens": 32, "num_blocks": 40},
    "requests": [{"id": f"r{n}", "prompt": {"len": 30 + n}, "max_tokens": 6, "arrival_time": n / 9} for n in range(6)],
    "cost_model": {"fixed": 0.05},
}


def pictures():
    """A picture of each maker of SVGs."""
    trace = simulate(WORKLOAD)
    focus, record = reprs.focus_of(trace.requests), trace[2]
    yield "packed batch", image(svg.packed_batch(record, focus))
    yield "mask", image(svg.mask(record, focus))
    yield "block tables", image(svg.block_tables(record, focus))
    yield "timeline", image(svg.timeline(list(trace)))
    yield "pool", image(svg.pool(trace.pool_state(2), focus))
    yield "bars", image(bars({"a": 1.0, "b": 3.0}, "bars").svg)
    yield "matrix", image(matrix(np.array([[0.0, 1.0], [2.0, 3.0]]), "matrix").svg)
    rows = sweep(WORKLOAD, {"max_num_batched_tokens": [16, 32, 64]})
    yield "Pareto plot", image_of(pareto_svg(rows, ["max_num_batched_tokens"]))
    yield "lines", image_of(lines.lines_svg([1, 2, 3], {"a": [1, 3, 2]}, ("x", "y"), 2.5))
    yield "fleet", image_of(fleet_rows.fleet_svg({"replica 0": trace}))
    pytest.importorskip("panel")
    from workbench.viz.server_page import server_svg

    yield "server", image_of(server_svg([Moment(at=float(n), running=n) for n in range(4)]))


def image_of(drawing):
    return f'<img src="data:image/svg+xml,{escape(drawing.replace("#", "%23"), quote=True)}" width="880">'


@pytest.fixture(scope="module")
def shots(browser):
    """The pixels of every picture in a dark and in a light element of a light page, as {(name, theme): image}."""
    context = browser.new_context(viewport={"width": 900, "height": 900}, color_scheme="light")
    page, found = context.new_page(), {}
    for name, element in pictures():
        for theme in ("dark", "light"):
            page.set_content(f'<div style="color-scheme: {theme}">{element}</div>')
            page.wait_for_function("() => document.querySelector('img').naturalWidth > 0")
            shot = page.locator("img").screenshot()
            found[name, theme] = Image.open(io.BytesIO(shot)).convert("RGB")
    context.close()
    return found


def shades(picture):
    """The luminance of the background, the commonest colour of the edges, and of what differs most from it."""
    each = [luminance("#" + bytes(colour).hex()) for _, colour in picture.getcolors(1 << 24)]
    pixels = np.asarray(picture)
    edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ((paper, _),) = Counter(map(bytes, edges)).most_common(1)
    paper = luminance("#" + paper.hex())
    return paper, max(each, key=lambda shade: abs(shade - paper))


def test_a_picture_has_the_background_of_its_theme_and_ink_that_stands_out(shots):
    assert len(shots) == 22
    for (name, theme), picture in shots.items():
        paper, ink = shades(picture)
        assert (paper < 0.02) if theme == "dark" else (paper > 0.98), (name, theme)
        assert abs(ink - paper) > 0.6, (name, theme)


def test_every_maker_of_a_picture_is_among_them():
    makers = {path.name for path in (ROOT / "workbench").rglob("*.py") if "<svg " in path.read_text(encoding="utf-8")}
    assert makers == {"drawing.py", "image.py", "svg.py"}, "what they make is themed"
